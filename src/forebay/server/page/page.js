// Ties the stream to the page.

import { Minute, drawLanes, drawRates } from "./charts.js";
import { at, element, figures, pools, prefetch, requests } from "./show.js";
import { Stream, call, key, whyNot } from "./stream.js";
import { TreePicture } from "./tree.js";

const LATE_S = 3;

let hello = null;
let last = null;
let minute = new Minute();
let earlier = [];
let came_ms = 0;
let switching = false;
const tree = new TreePicture();

function note(text) {
  at("note").textContent = text;
  at("note").hidden = !text;
}

function link(state, text) {
  const shown = at("link");
  if (shown.dataset.state === state && shown.textContent === text) return;
  shown.dataset.state = state;
  shown.textContent = text;
}

// Rates over the last second or two, from counters.
function rates(totals, now_s) {
  earlier.push([now_s, totals.steps]);
  earlier = earlier.filter(([then_s]) => now_s - then_s < 2.2);
  const [then_s, steps] = earlier[0];
  const elapsed_s = Math.max(0.1, now_s - then_s);
  return {
    steps_per_s: (totals.steps - steps) / elapsed_s,
    load_bytes_per_s: minute.mean("load_bytes_per_s", 10),
    save_bytes_per_s: minute.mean("save_bytes_per_s", 10),
  };
}

function showHello(told) {
  hello = told;
  last = null;
  minute = new Minute();
  earlier = [];
  const operator = told.role === "operator";
  document.body.classList.toggle("tenant", !operator);
  document.title = `${told.model} · Forebay`;
  at("model").textContent = told.model;
  at("about").textContent = `Forebay ${told.version}${operator ? "" : ". This key shows what is its own."}`;
  at("mode").replaceChildren(
    ...told.modes.map(({ mode, name }) => element("option", { value: mode }, `${mode} · ${name}`)),
  );
  at("tools").hidden = !operator;
  at("forget").hidden = !key.get();
  at("ask").hidden = true;
  at("all").hidden = false;
}

function showState(state) {
  last = state;
  came_ms = performance.now();
  link("live", "live");
  requests(state.requests, state.totals);
  if (state.tree) tree.show(state.tree, hello.block_tokens);
  if (!state.totals) return;
  minute.add(state.lanes);
  figures(state.totals, rates(state.totals, state.now_s));
  pools(state.device, state.host, hello.block_bytes);
  prefetch(state.totals.prefetch_bytes, state.totals.prefetch_open_bytes);
  if (!switching && document.activeElement !== at("mode")) at("mode").value = state.totals.mode;
  drawCharts();
}

function drawCharts() {
  if (!last?.totals) return;
  drawLanes(minute);
  drawRates(minute, last.totals.link_bytes_per_s);
}

function askForKey(why) {
  link("wait", "needs a key");
  at("why").textContent = why;
  at("all").hidden = true;
  at("tools").hidden = true;
  at("ask").hidden = false;
  at("key").focus();
}

async function switchMode() {
  switching = true;
  at("mode").disabled = true;
  try {
    const answer = await call("/v1/forebay/mode", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ mode: at("mode").value }),
    });
    note(answer.ok ? "" : `The mode was not changed: ${await whyNot(answer)}`);
  } catch {
    note("The mode was not changed: the server is not there.");
  }
  at("mode").disabled = false;
  switching = false;
}

async function downloadTrace() {
  at("trace").disabled = true;
  try {
    const answer = await call("/v1/forebay/trace");
    if (!answer.ok) throw new Error(await whyNot(answer));
    const url = URL.createObjectURL(await answer.blob());
    const name = `forebay-${new Date().toISOString().slice(0, 19).replaceAll(":", "")}.json`;
    element("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
    note("");
  } catch (error) {
    note(`No trace: ${error.message}`);
  }
  at("trace").disabled = false;
}

const stream = new Stream({ hello: showHello, state: showState, link, refused: askForKey });

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(at("key").value.trim());
  at("key").value = "";
  stream.start();
});
at("forget").addEventListener("click", () => {
  key.forget();
  at("forget").hidden = true;
  stream.start();
});
at("mode").addEventListener("change", switchMode);
at("trace").addEventListener("click", downloadTrace);

let resized = 0;
window.addEventListener("resize", () => {
  cancelAnimationFrame(resized);
  resized = requestAnimationFrame(() => {
    drawCharts();
    tree.draw();
  });
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  drawCharts();
  tree.draw();
});

setInterval(() => {
  const quiet_s = (performance.now() - came_ms) / 1000;
  if (last && at("link").dataset.state === "live" && quiet_s > LATE_S) {
    link("late", `no news for ${Math.round(quiet_s)} s`);
  } else if (at("link").dataset.state === "late" && quiet_s > LATE_S) {
    link("late", `no news for ${Math.round(quiet_s)} s`);
  }
}, 1000);

stream.start();
