// The stream of states, and every other call: with the key, where one is needed.

const KEY = "forebay-key";
const LONGEST_WAIT_S = 15;

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

export function call(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  return fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
}

export async function whyNot(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the server answered ${answer.status}`;
  }
}

// Events of a body as {name, data}. EventSource cannot send a key.
async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const event = { name: "", data: "" };
      for (const line of part.split("\n")) {
        if (line.startsWith("event: ")) event.name = line.slice(7);
        else if (line.startsWith("data: ")) event.data += line.slice(6);
      }
      if (event.name) yield event;
    }
  }
}

// Follows the server for as long as the page is looked at. `on` has: hello, state, link (how the
// connection is: "wait", "live", "ended", with a text), refused (a key is needed, and why).
export class Stream {
  constructor(on) {
    this.on = on;
    this.wait_s = 1;
    this.abort = null;
    this.timer = 0;
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) this.stop();
      else this.start();
    });
  }

  start() {
    this.stop();
    this.abort = new AbortController();
    this.follow(this.abort.signal);
  }

  stop() {
    clearTimeout(this.timer);
    this.abort?.abort();
    this.abort = null;
  }

  async follow(signal) {
    let told = "the server is not there";
    try {
      const answer = await call("/v1/forebay/live", { signal });
      if (answer.status === 401 || answer.status === 403) {
        this.on.refused(await whyNot(answer));
        return;
      }
      if (!answer.ok) throw new Error(await whyNot(answer));
      for await (const { name, data } of eventsOf(answer.body)) {
        if (name === "end") told = "the server is shutting down";
        else if (name === "hello") this.on.hello(JSON.parse(data));
        else if (name === "state") {
          this.wait_s = 1;
          this.on.state(JSON.parse(data));
        }
      }
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof TypeError)) told = error.message;
    }
    if (signal.aborted) return;
    this.on.link("ended", `${told}; trying again`);
    this.timer = setTimeout(() => this.start(), this.wait_s * 1000);
    this.wait_s = Math.min(LONGEST_WAIT_S, this.wait_s * 2);
  }
}
