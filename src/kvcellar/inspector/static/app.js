// app: the page. Everything from the server becomes text nodes and attributes; nothing is parsed as HTML.

import { html, render, useEffect, useState } from "/inspector/vendor/preact-htm.js";
import { ask, counted, follow, saveKey } from "/inspector/data.js";
import { Memory, Now, Tiers } from "/inspector/memory.js";
import { Replicas } from "/inspector/replicas.js";
import { RequestDetail, Requests } from "/inspector/requests.js";
import { Steps } from "/inspector/steps.js";
import { EntryDetail, Tree } from "/inspector/tree.js";

const SAID = {
  connecting: "connecting",
  live: "live",
  lost: "connection lost; trying again",
  key: "an API key is needed",
  refused: "refused",
};

// The chat leads here with a model, and a request by the time that it waited, which no other one has.
const sought = new URLSearchParams(location.hash.slice(1));
const isSought = (one) => sought.has("queued") && Math.abs(1e3 * one.queued - Number(sought.get("queued"))) < 1e-6;

// What `ask` answers, asked again when `key` changes; null before the answer.
function useAnswer(key, route, params) {
  const [answer, setAnswer] = useState(null);
  useEffect(() => {
    if (!key) return setAnswer(null);
    let over = false;
    ask(route, params)
      .then((found) => over || setAnswer({ ...found, key }))
      .catch((error) => over || setAnswer({ error: error.message, key }));
    return () => (over = true);
  }, [key]);
  return key && answer ? answer : null;
}

function Key({ message, again }) {
  const [key, setKey] = useState("");
  const send = (event) => (event.preventDefault(), saveKey(key.trim()), again());
  return html`<form class="ask" onSubmit=${send}>
    <p>${message ? `${message}.` : "This server has API keys."}</p>
    <p>The page shows what requests with your key have computed.</p>
    <label for="key">API key, kept until the tab is closed</label>
    <input id="key" type="password" autocomplete="off" value=${key} onInput=${(event) => setKey(event.target.value)} />
    <button type="submit">Look inside</button>
  </form>`;
}

function Head({ state, snapshot, model, choose }) {
  const running = snapshot ? `, ${counted(snapshot.engine.running, "completion")} running, ${snapshot.engine.waiting} waiting` : "";
  return html`<header class="top">
    <h1><img src="/inspector/icon.svg" alt="" width="26" height="26" /> kvcellar inspector</h1>
    ${snapshot && snapshot.model.all.length > 1
      ? html`<label>Model <select value=${model || snapshot.model.name} onChange=${(event) => choose(event.target.value)}>
          ${snapshot.model.all.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
        </select></label>`
      : snapshot && html`<p class="model">${snapshot.model.name}</p>`}
    <p class=${`pill is-${state.name}`} role="status"><span class="dot" aria-hidden="true"></span>${SAID[state.name]}${state.name === "live" ? running : ""}</p>
  </header>`;
}

function Page({ snapshot, before, params, choose }) {
  const { live, ended } = snapshot.requests;
  const [number, setNumber] = useState(null);
  const [name, setName] = useState(null);
  const entry = snapshot.tree.entries.find((one) => one && one.name === name);
  const known = [...live, ...ended].find((one) => one.number === number);
  const way = useAnswer(known && `${snapshot.instance}:${number}:${snapshot.at}`, "request", { ...params, number });
  const text = useAnswer(entry && `${snapshot.instance}:${name}:${entry.end}`, "entry", { ...params, name });
  const select = (one) => setNumber(one === number ? null : one);
  const pick = (one) => setName(one === name ? null : one);
  const shown = known && way?.number === number ? way : way?.error ? way : null;
  useEffect(() => (setNumber(ended.find(isSought)?.number ?? null), setName(null)), [snapshot.instance, snapshot.replica]);
  return html`${snapshot.replicas.length > 0 && html`<${Replicas} snapshot=${snapshot} choose=${choose} />`}
    <${Now} snapshot=${snapshot} />
    <div class="with-detail">
      <${Requests} snapshot=${snapshot} selected=${number} select=${select} />
      ${known && html`<${RequestDetail} snapshot=${snapshot} number=${number} way=${shown} pick=${setName} close=${() => setNumber(null)} />`}
    </div>
    <div class="with-detail">
      <${Tree} snapshot=${snapshot} picked=${name} pick=${pick} way=${shown} />
      ${entry && html`<${EntryDetail} entry=${entry} text=${text} groups=${snapshot.groups} close=${() => setName(null)} />`}
    </div>
    <${Memory} snapshot=${snapshot} picked=${name} pick=${pick} number=${number} />
    <${Steps} snapshot=${snapshot} />
    <${Tiers} snapshot=${snapshot} before=${before} />`;
}

function App() {
  const [state, setState] = useState({ name: "connecting" });
  const [seen, setSeen] = useState({ now: null, before: null });
  const [params, setParams] = useState(sought.has("model") ? { model: sought.get("model") } : {});
  const [attempt, setAttempt] = useState(0);
  useEffect(() => {
    setSeen({ now: null, before: null });
    const same = (a, b) => a?.instance === b.instance && a.replica === b.replica;
    const shown = (now) => setSeen((seen) => ({ now, before: same(seen.now, now) ? seen.now : null }));
    return follow(params, shown, (name, message) => setState({ name, message }));
  }, [params, attempt]);
  const snapshot = seen.now;
  return html`<${Head} state=${state} snapshot=${snapshot} model=${params.model} choose=${(model) => setParams({ model })} />
    <main class=${state.name === "lost" ? "old" : ""}>
      ${state.name === "key" && html`<${Key} message=${state.message} again=${() => setAttempt(attempt + 1)} />`}
      ${state.name === "refused" && html`<p class="empty">${state.message}${params.replica && html` <button type="button" onClick=${() => setParams(params.model ? { model: params.model } : {})}>Show another one</button>`}</p>`}
      ${snapshot && state.name !== "key" && html`<${Page} snapshot=${snapshot} before=${seen.before} params=${snapshot.replica ? { ...params, replica: snapshot.replica } : params} choose=${(replica) => setParams({ ...params, replica })} />`}
      ${!snapshot && (state.name === "connecting" || state.name === "lost") && html`<p class="empty">${state.name === "lost" ? "The server does not answer." : "Waiting for the first picture."}</p>`}
    </main>
    <footer><p>Numbers are of this moment, at most one picture a second. Times are of this browser's clock zone. <a href="/inspector/NOTICE">Notices of the libraries</a></p></footer>`;
}

const place = document.getElementById("app");
place.replaceChildren();
render(html`<${App} />`, place);
