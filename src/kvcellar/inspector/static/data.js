// data: reads the stream of snapshots, and asks for texts. One snapshot replaces the last; nothing is added up here.

const KEY = "kvcellar.key"; // of the session's storage: gone when the tab is closed
const FIRST_WAIT = 500;
const LONGEST_WAIT = 4000; // milliseconds between two attempts

export const savedKey = () => sessionStorage.getItem(KEY) || "";
export const saveKey = (key) => sessionStorage.setItem(KEY, key);

const address = (route, params) => `/inspector/api/${route}?${new URLSearchParams(params)}`;

function get(route, params, signal) {
  const key = savedKey();
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  return fetch(address(route, params), { headers, signal, cache: "no-store" });
}

// One object of the server; an error has the server's message.
export async function ask(route, params) {
  const response = await get(route, params);
  const body = await response.json();
  if (!response.ok) throw new Error(body.error?.message || `status ${response.status}`);
  return body;
}

// Calls `shown(snapshot)` and `state(name, message)` until the returned function is called. States: "connecting",
// "live", "lost" (tries again), "key" (a key is needed, or another one), "refused".
export function follow(params, shown, state) {
  let over = false;
  let abort = null;
  let wait = FIRST_WAIT;
  let timer = 0;

  async function read() {
    abort = new AbortController();
    state("connecting");
    const response = await get("stream", params, abort.signal);
    if (!response.ok) return refuse(response);
    wait = FIRST_WAIT;
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const events = (rest + part.value).split("\n\n");
      rest = events.pop();
      for (const event of events) if (event.startsWith("data: ")) deliver(JSON.parse(event.slice(6)));
    }
    throw new Error("the stream has ended");
  }

  function deliver(snapshot) {
    if (over) return;
    state("live");
    shown(snapshot);
  }

  async function refuse(response) {
    const body = await response.json().catch(() => ({}));
    const message = body.error?.message || `status ${response.status}`;
    if (response.status === 503) throw new Error(message);
    over = true;
    state(response.status === 401 ? "key" : "refused", message);
  }

  function begin() {
    clearTimeout(timer);
    if (over || document.hidden) return;
    read().catch(() => {
      if (over || document.hidden) return;
      state("lost");
      timer = setTimeout(begin, wait);
      wait = Math.min(2 * wait, LONGEST_WAIT);
    });
  }

  // A page that is not looked at costs the server nothing.
  function turned() {
    abort?.abort();
    clearTimeout(timer);
    if (!document.hidden) begin();
  }

  document.addEventListener("visibilitychange", turned);
  begin();
  return () => {
    over = true;
    document.removeEventListener("visibilitychange", turned);
    clearTimeout(timer);
    abort?.abort();
  };
}

const NUMBER = new Intl.NumberFormat("en");
export const count = (n) => NUMBER.format(Math.round(n));
export const counted = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;
export const percent = (part, of) => (of ? `${Math.round((100 * part) / of)} %` : "0 %");
export const rate = (n) => (n >= 100 ? count(n) : n.toFixed(1));

export function time(seconds) {
  if (seconds < 0.0995) return `${(1e3 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  return seconds < 1 ? `${Math.round(1e3 * seconds)} ms` : `${seconds.toFixed(seconds < 10 ? 2 : 0)} s`;
}

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; n >= 1024 && at < units.length - 1; at++) n /= 1024;
  return `${at && n < 100 ? n.toFixed(1) : Math.round(n)} ${units[at]}`;
}

export const clock = (at) => new Date(1e3 * at).toLocaleTimeString("en-GB");

// A text on one line; what does not print is shown as such.
export function line(text, most) {
  const shown = text.replace(/\n/g, "⏎").replace(/\s+/g, " ").trim();
  return shown.length > most ? `${shown.slice(0, most - 1)}…` : shown;
}

// A color of an entry or a request: the same for the same name.
export function hue(name) {
  let found = 7;
  for (const c of String(name)) found = (31 * found + c.charCodeAt(0)) % 360;
  return found;
}

// Why not more of a prompt came from memory.
export const REASONS = {
  all: "the last token is always computed",
  new: "the rest is new text",
  diverged: "the text goes on in another way",
  "no checkpoint": "no place to resume nearer",
  evicted: "it was evicted",
  damaged: "a tier had damaged bytes",
  "other weights": "stored by other weights",
  "other adapter": "computed with another adapter",
  "cheaper to recompute": "computing was faster than reading back",
  "tier unavailable": "a tier could not be used",
};
