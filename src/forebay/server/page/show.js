// From states to words, numbers and bars. Text goes in as text, never as markup.

export const at = (id) => document.getElementById(id);

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style") Object.assign(made.style, value);
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (count >= 999.5 && unit < units.length - 1) {
    count /= 1000;
    unit += 1;
  }
  return `${unit === 0 ? Math.round(count) : count.toPrecision(3)} ${units[unit]}`;
}

export const number = (value) => Math.round(value).toLocaleString("en").replaceAll(",", "\u202f");

const seconds = (s) => (s < 10 ? `${s.toFixed(2)} s` : s < 600 ? `${s.toFixed(0)} s` : `${(s / 60).toFixed(0)} min`);

function figure(id, value, unit = "") {
  at(id).replaceChildren(value, ...(unit ? [element("small", {}, ` ${unit}`)] : []));
}

export function figures(totals, rates) {
  figure("running", number(totals.running));
  figure("waiting", number(totals.waiting));
  figure("steps", rates.steps_per_s.toFixed(rates.steps_per_s < 10 ? 1 : 0), "per s");
  figure("loading", bytes(rates.load_bytes_per_s), "per s");
  figure("saving", bytes(rates.save_bytes_per_s), "per s");
  const hidden = totals.load_s > 0 ? Math.max(0, 1 - totals.stall_s / totals.load_s) : null;
  figure("hidden", hidden === null ? "–" : `${Math.round(100 * hidden)} %`, hidden === null ? "no load yet" : "");
}

const DOING = {
  decode: "decodes",
  prefill: "prefills",
  load: "waits for its load",
  compute: "waits for a prefill of the same prefix",
  room: "waits for room",
  turn: "waits for its turn",
};

function doing(request) {
  let text = DOING[request.doing] ?? request.doing;
  if (request.doing === "prefill") text += ` ${Math.round((100 * request.computed) / request.prompt)} %`;
  if (request.place && request.flying && request.doing === "turn") text += ", loading ahead";
  return text;
}

// How much of the prompt was cached: on the device, and in host memory or still there.
function cached(request) {
  const [near, far] = request.place
    ? [request.near, request.found - request.near]
    : [request.found - request.host, request.host];
  const share = (tokens) => ({ width: `${(100 * tokens) / Math.max(1, request.prompt)}%` });
  const meter = element(
    "span",
    { class: "meter", "aria-hidden": "true" },
    element("i", { class: "device", style: share(near) }),
    element("i", { class: "host", style: share(far) }),
  );
  return [meter, `${Math.round((100 * request.found) / Math.max(1, request.prompt))} %`];
}

function row(request) {
  const name = element("th", { scope: "row" }, `${request.id}`);
  if (request.session) name.append(" ", element("span", { class: "session" }, request.session));
  const state = element("td", {}, element("span", { class: "does", "data-doing": request.doing }), doing(request));
  if (request.place) state.append(element("span", { class: "quiet" }, ` #${request.place}`));
  return element(
    "tr",
    {},
    name,
    state,
    element("td", { class: "n" }, number(request.prompt)),
    element("td", {}, ...cached(request)),
    element("td", { class: "n" }, request.place ? "" : `${number(request.answer)} of ${number(request.most)}`),
    element("td", { class: "n" }, seconds(request.waited_s)),
  );
}

export function requests(rows, totals) {
  at("requests").tBodies[0].replaceChildren(...rows.map(row));
  const running = rows.filter((each) => !each.place).length;
  const waiting = totals ? totals.waiting : rows.length - running;
  const behind = totals ? Math.max(0, totals.running + totals.waiting - rows.length) : 0;
  const words = [`${totals ? totals.running : running} running, ${waiting} waiting`];
  if (behind) words.push(`${behind} more not shown`);
  at("requests-summary").textContent = `${words.join("; ")}.`;
  at("requests").hidden = rows.length === 0;
}

function stack(id, legend, total, parts) {
  const share = (count) => `${(100 * count) / Math.max(1, total)}%`;
  const bars = at(id);
  if (bars.children.length !== parts.length) bars.replaceChildren(...parts.map(([of]) => element("i", { class: of })));
  parts.forEach(([, , count], i) => (bars.children[i].style.width = share(count)));
  bars.setAttribute("aria-label", parts.map(([, name, count]) => `${name} ${count}`).join(", "));
  at(legend).replaceChildren(
    ...parts.map(([of, name, count]) => element("li", {}, element("i", { class: of }), `${name} ${number(count)}`)),
  );
}

export function pools(device, host, block_bytes) {
  at("device-size").textContent = `${number(device.slots)} slots, ${bytes(device.slots * block_bytes)}`;
  stack("device-use", "device-legend", device.slots, [
    ["leased", "leased", device.leased],
    ["prefetched", "prefetch-leased", device.prefetched],
    ["idle", "idle", device.idle],
    ["free", "free", device.free],
    ["quarantined", "quarantined", device.quarantined],
  ]);
  at("device-content").textContent =
    `In them: ${number(device.clean)} clean, ${number(device.dirty)} dirty, ` +
    `${number(device.loading)} loading, ${number(device.saving)} saving.`;
  at("host-size").textContent = host.slots > 1 ? `${number(host.slots)} slots, ${bytes(host.slots * block_bytes)}` : "none";
  stack("host-use", "host-legend", host.slots, [
    ["saved", "saved", host.used],
    ["saving", "saving", host.saving],
    ["free", "free", host.free],
    ["quarantined", "quarantined", host.quarantined],
  ]);
}

const OUTCOMES = {
  used: ["both", "in place before their request could run"],
  late: ["host", "on their way when it could"],
  wasted: ["loading", "read by nobody in time"],
  cancelled: ["idle", "stopped"],
  refused: ["quarantined", "wanted, and there was no room"],
  failed: ["saving", "the copy failed"],
};

export function prefetch(outcomes, open) {
  const most = Math.max(1, ...Object.values(outcomes));
  const total = Object.values(outcomes).reduce((sum, each) => sum + each, 0);
  at("prefetch").tBodies[0].replaceChildren(
    ...Object.entries(OUTCOMES).map(([outcome, [of, meaning]]) => {
      const count = outcomes[outcome] ?? 0;
      const bar = element("i", { class: of, style: { width: `${(100 * count) / most}%` } });
      const share = total ? ` (${Math.round((100 * count) / total)} %)` : "";
      return element(
        "tr",
        { title: meaning },
        element("th", { scope: "row" }, outcome),
        element("td", { class: "track", "aria-hidden": "true" }, bar),
        element("td", { class: "n" }, bytes(count) + share),
      );
    }),
  );
  at("open").textContent = `${bytes(open)} planned have no outcome yet.`;
}
