// app: the page. What comes from the server or from files becomes text nodes and attributes; nothing is parsed as HTML.

import { html, render, useEffect, useMemo, useRef, useState } from "/inspector/vendor/preact-htm.js";
import { count, saveKey } from "/inspector/data.js";
import { describe, events, hasInspector, modelNames, promptIds, textsOf } from "/inspector/chat/client.js";
import { Composer } from "/inspector/chat/composer.js";
import * as kept from "/inspector/chat/conversations.js";
import { Legend, placed } from "/inspector/chat/marks.js";
import { Message } from "/inspector/chat/messages.js";
import { Conversations, Settings } from "/inspector/chat/settings.js";

const WANTED = { stream_options: { include_usage: true }, return_token_ids: true, return_token_times: true, return_recall: true };

function Key({ message, again }) {
  const [key, setKey] = useState("");
  const send = (event) => (event.preventDefault(), saveKey(key.trim()), again());
  return html`<main><h1>kvcellar chat</h1><form class="ask" onSubmit=${send}>
    <p>This server has API keys${message && `: ${message}`}.</p>
    <label for="key">API key, kept until the tab is closed</label>
    <input id="key" type="password" autocomplete="off" value=${key} onInput=${(event) => setKey(event.target.value)} />
    <button type="submit">Chat</button>
  </form></main>`;
}

function common(some, other) {
  let n = 0;
  while (n < some.length && some[n] === other[n]) n++;
  return n;
}

// Ask for the answer `node` of a conversation, which grows as it comes.
async function answer(one, node, info, signal, grown) {
  const path = info.chats ? "/v1/chat/completions" : "/v1/completions";
  const turn = { ms: [], ids: 0, end: "" };
  const [ids, made] = [[], { ids: [], texts: [], answer: [] }];
  node.turn = turn;
  try {
    const body = { model: one.model, ...kept.prompt(one, kept.pathTo(one, node.parent), info.chats), ...kept.sampling(one), ...WANTED };
    for await (const chunk of events(path, body, signal)) {
      const choice = chunk.choices[0];
      const prompt = chunk.prompt_token_ids || choice?.prompt_token_ids;
      if (prompt) made.ids = prompt;
      if (choice) {
        node.text += choice.delta ? choice.delta.content || "" : choice.text;
        node.reasoning += choice.delta?.reasoning_content || "";
        ids.push(...(choice.token_ids || []));
        turn.ms.push(...(choice.token_ms || []));
        turn.end = choice.finish_reason || turn.end;
      }
      if (chunk.usage) finish(turn, chunk.usage, chunk.timings);
      grown();
    }
  } catch (error) {
    turn.end = signal.aborted ? "stopped" : "failed";
    if (!signal.aborted) [turn.error, turn.status] = [error.message, error.status];
  }
  turn.ids = ids.length;
  made.answer = ids;
  const texts = await textsOf(one.model, [...made.ids, ...ids]).catch(() => []);
  [made.texts, turn.texts] = [texts.slice(0, made.ids.length), texts.slice(made.ids.length)];
  return made;
}

function finish(turn, usage, timings) {
  const recall = usage.recall?.[0];
  Object.assign(turn, { prompt: usage.prompt_tokens, restored: usage.prompt_tokens_details.cached_tokens, completion: usage.completion_tokens });
  Object.assign(turn, { queued: timings.queued_ms, first: timings.queued_ms + timings.prompt_ms });
  Object.assign(turn, { sources: recall?.sources || {}, reason: recall?.reason || "all", detail: recall?.detail || "" });
}

function Chat({ names, inspector, lockOut }) {
  const [all, setAll] = useState(() => kept.load());
  const [one, setOne] = useState(() => all.find((it) => it.id === kept.lastOpen()) || all[0] || kept.empty(names[0]));
  const [info, setInfo] = useState(null);
  const [busy, setBusy] = useState(null); // {one, node, abort} while an answer comes
  const [chosen, setChosen] = useState(null); // the answer whose prompt is marked, if it is not the last one
  const [marks, setMarks] = useState(kept.marksShown());
  const [side, setSide] = useState(false);
  const [note, setNote] = useState("");
  const [version, setVersion] = useState(0); // of conversations, which are changed in place
  const prompts = useRef(new Map()); // {ids, texts, answer} of answers, by node
  const end = useRef(null);
  const frame = useRef(0);
  const changed = () => setVersion((n) => n + 1);
  const grown = () => { frame.current ||= requestAnimationFrame(() => ((frame.current = 0), changed())); };
  const model = names.includes(one.model) ? one.model : names[0];

  useEffect(() => {
    let over = false;
    setInfo(null);
    one.model = model;
    describe(model).then((found) => over || setInfo(found), (error) => over || (error.status === 401 ? lockOut(error.message) : setInfo({ model, failed: error.message })));
    return () => (over = true);
  }, [model, one]);

  const nodes = kept.path(one);
  const last = nodes.findLast((node) => node.turn?.restored !== undefined);
  const shown = nodes.find((node) => node.id === chosen) || last;
  const known = shown && prompts.current.get(shown.id);
  useEffect(() => { // after the page was loaded again, tokens of a prompt are asked for again
    if (!shown || known || !info?.model || info.failed) return;
    const what = kept.prompt(one, kept.pathTo(one, shown.parent), info.chats);
    promptIds(one.model, what).then(async (ids) => {
      if (ids.length !== shown.turn.prompt) return;
      prompts.current.set(shown.id, { ids, texts: await textsOf(one.model, ids), answer: [] });
      changed();
    }, () => {});
  }, [shown, info]);
  const places = useMemo(() => {
    if (!known) return new Map();
    const before = kept.pathTo(one, shown.parent);
    const system = info?.chats && one.system.trim() ? [{ text: one.system, images: [] }] : [];
    const found = placed(known.ids, known.texts, [...system, ...before]).slice(system.length);
    return new Map(before.map((node, at) => [node.id, found[at]]));
  }, [known, shown, one, version]);

  const bottom = useRef(true); // whether the end was in view
  useEffect(() => {
    let before = 0;
    const look = () => {
      if (scrollY < before) bottom.current = false; // by hand: the page itself only goes down
      if (innerHeight + scrollY > document.documentElement.scrollHeight - 4) bottom.current = true;
      before = scrollY;
    };
    addEventListener("scroll", look);
    return () => removeEventListener("scroll", look);
  }, []);
  useEffect(() => { if (bottom.current) end.current?.scrollIntoView({ block: "end" }); }, [version, busy, one]);

  function keep() {
    if (one.removed) return;
    one.at = Date.now();
    setNote(kept.save(one));
    setAll((before) => [one, ...before.filter((it) => it.id !== one.id)]);
    changed();
  }

  async function write(parent) {
    const node = kept.add(one, parent.id, "assistant", "");
    const abort = new AbortController();
    setBusy({ one, node, abort });
    setChosen(null);
    bottom.current = true;
    keep();
    prompts.current.set(node.id, await answer(one, node, info, abort.signal, grown));
    setBusy(null);
    keep();
    if (node.turn.status === 401) lockOut(node.turn.error);
  }

  const send = (text, images) => write(kept.add(one, nodes.at(-1)?.id || "", "user", text, images));
  const edit = (node, text) => write(kept.add(one, node.parent, "user", text, node.images));

  // How many tokens of the prompt with another text are those of a prompt and answer before.
  async function reuse(node, text, signal) {
    const before = { ...node, text };
    const ids = await promptIds(model, kept.prompt(one, [...kept.pathTo(one, node.parent), before], info.chats), signal);
    const others = Object.keys(one.nodes).map((id) => prompts.current.get(id)).filter(Boolean).map((made) => [...made.ids, ...made.answer]);
    if (!others.length) others.push(await promptIds(model, kept.prompt(one, nodes, info.chats), signal));
    const same = Math.max(...others.map((other) => common(ids, other)));
    return { all: ids.length, same: Math.min(same, ids.length - 1) };
  }

  const link = (node) => (inspector && node.turn?.queued !== undefined ? `/inspector#${new URLSearchParams({ model: one.model, queued: node.turn.queued })}` : null);
  const act = { edit, reuse, link, again: (node) => write(one.nodes[node.parent]), choose: (node) => ((one.chosen[node.parent] = node.id), setChosen(null), keep()), show: (node) => setChosen(node === shown ? null : node.id) };
  const view = { marks, shown, places, busy: busy?.node, chats: info?.chats, model };
  const open = (it) => (setOne(it), setChosen(null), setSide(false), Object.keys(it.nodes).length && kept.save(it));
  const start = () => open(kept.empty(model, one));
  function remove(it) {
    it.removed = true; // an answer may still come
    kept.remove(it);
    if (busy?.one === it) busy.abort.abort();
    const others = all.filter((other) => other !== it);
    setAll(others);
    setOne(others[0] || kept.empty(model));
  }
  const told = busy ? "Writing." : last ? `Answer complete: ${count(last.turn.restored)} of ${count(last.turn.prompt)} prompt tokens came from memory.` : "";

  return html`<header class="top">
      <h1><img src="/inspector/icon.svg" alt="" width="24" height="24" /> <span>kvcellar</span></h1>
      ${names.length > 1 ? html`<label>Model <select value=${model} disabled=${Boolean(busy)} onChange=${(event) => ((one.model = event.target.value), changed())}>${names.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>` : html`<p class="model">${model}</p>`}
      ${info?.context && html`<p class="note context">${count(info.context)} tokens</p>`}
      <button type="button" class="menu" aria-expanded=${side ? "true" : "false"} aria-controls="side" onClick=${() => setSide(!side)}>Menu</button>
      ${inspector && html`<a class="inspect" href=${`/inspector#${new URLSearchParams({ model })}`} target="_blank" rel="opener">Inspector</a>`}
    </header>
    <div class=${`columns ${side ? "with-side" : ""}`}>
      <aside id="side" aria-label="conversations and settings">
        <${Conversations} all=${all.includes(one) ? all : [one, ...all]} open=${one} choose=${open} start=${start} rename=${(it, name) => ((it.name = name || it.name), keep())} remove=${remove} />
        ${info && !info.failed && html`<${Settings} one=${one} info=${info} changed=${() => (nodes.length && kept.save(one), changed())} />`}
      </aside>
      <main>
        <p class="unseen" role="status">${told}</p>
        ${!info && html`<p class="empty">Loading ${model}.</p>`}
        ${info?.failed && html`<p class="failed" role="alert">${info.failed}</p>`}
        ${info?.why && html`<p class="failed" role="alert">This page needs a model of texts: ${info.why}.</p>`}
        ${info && !info.failed && !info.why && html`
          ${nodes.length ? html`<${Legend} marks=${marks} toggle=${(yes) => (kept.showMarks(yes), setMarks(yes))} />` : html`<div class="hello">
            <p>${info.chats ? "Ask something, then something else." : `${model} has no chat template, so it continues texts instead of answering.`}</p>
            <p class="note">Each ${info.chats ? "answer" : "continuation"} says which tokens of its prompt came from memory, from where, and how long everything took. ${info.images ? "Images can be picked, pasted or dropped." : ""}</p></div>`}
          <ol class="messages" aria-label="messages">${nodes.map((node) => html`<${Message} key=${`after ${node.parent}`} node=${node} among=${kept.variants(one, node)} view=${view} act=${act} />`)}</ol>
          ${note && html`<p class="failed" role="alert">${note}</p>`}
          <${Composer} info=${info} busy=${Boolean(busy)} last=${nodes.length} send=${send} stop=${() => busy?.abort.abort()} />
          <div ref=${end}></div>`}
      </main>
    </div>`;
}

function App() {
  const [names, setNames] = useState(null);
  const [locked, setLocked] = useState(null); // why a key is needed
  const [failed, setFailed] = useState("");
  const [inspector, setInspector] = useState(false);
  async function begin() {
    setLocked(null);
    try {
      setNames(await modelNames());
      setFailed("");
      setInspector(await hasInspector());
    } catch (error) {
      if (error.status === 401) return setLocked(error.message);
      setFailed(error.status === 503 ? `${error.message}.` : `The server does not answer (${error.message}).`);
      setTimeout(begin, 1500);
    }
  }
  useEffect(() => void begin(), []);
  if (locked !== null) return html`<${Key} message=${locked} again=${begin} />`;
  if (!names) return html`<main><h1>kvcellar chat</h1><p class="empty" role="status">${failed || "Connecting."}</p></main>`;
  if (!names.length) return html`<main><h1>kvcellar chat</h1><p class="empty">This server has no model.</p></main>`;
  return html`<${Chat} names=${names} inspector=${inspector} lockOut=${setLocked} />`;
}

const place = document.getElementById("app");
place.replaceChildren();
render(html`<${App} />`, place);
