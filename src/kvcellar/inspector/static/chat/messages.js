// messages: a conversation as it is shown, and what can be done with each message.

import { html, useEffect, useRef, useState } from "/inspector/vendor/preact-htm.js";
import { count, counted } from "/inspector/data.js";
import { Marked, Turn, Written, origin, told } from "/inspector/chat/marks.js";

const CODE = /^( {4}|\t|```)/m; // is shown in columns
const classes = (text) => (CODE.test(text) ? "text code" : "text");

// The line under the images of a message is that of their first token.
function Images({ node, view }) {
  if (!node.images.length) return null;
  const first = view?.marks && view.shown && view.places.get(node.id)?.images[0];
  return html`<ul class=${`thumbs ${first ? `of-${origin(view.shown.turn, first)}` : ""}`}>${node.images.map((url, at) => html`<li key=${at}><img src=${url} alt=${`image ${at + 1} of the message`} /></li>`)}</ul>`;
}

// The editor of a message that was sent. `reuse(text)` returns how much of the prompt stays in memory.
function Editor({ node, chats, reuse, send, cancel }) {
  const [text, setText] = useState(node.text);
  const [stays, setStays] = useState(null);
  const area = useRef(null);
  useEffect(() => area.current.focus(), []);
  useEffect(() => {
    const abort = new AbortController();
    const timer = setTimeout(() => reuse(text, abort.signal).then(setStays, (error) => abort.signal.aborted || setStays({ error: error.message })), 200);
    return () => (clearTimeout(timer), abort.abort());
  }, [text]);
  const keys = (event) => {
    if (event.key === "Escape") cancel();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) (event.preventDefault(), send(text));
  };
  return html`<form class="editor" onSubmit=${(event) => (event.preventDefault(), send(text))}>
    <label class="unseen" for="edit">${chats ? "Your message" : "The text"}</label>
    <textarea id="edit" ref=${area} rows=${Math.min(12, text.split("\n").length + 1)} value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${keys}></textarea>
    <p class="stays" role="status">${!stays ? "Looking at what stays in memory." : stays.error ? stays.error : html`<b class="memory">${count(stays.same)} of ${counted(stays.all, "prompt token")} stay</b>, as far as memory still has them; ${count(stays.all - stays.same)} will be computed.`}</p>
    <p class="actions"><button type="submit" class="main">Send as a new branch</button><button type="button" onClick=${cancel}>Cancel</button></p>
  </form>`;
}

function Branches({ node, among, choose, beside, compare }) {
  if (among.length < 2) return null;
  const at = among.indexOf(node);
  const to = (by) => choose(among[(at + by + among.length) % among.length]);
  return html`<span class="branches" role="group" aria-label="branches">
    <button type="button" aria-label="branch before" onClick=${() => to(-1)}>‹</button>
    <span>${at + 1} of ${among.length}</span>
    <button type="button" aria-label="next branch" onClick=${() => to(1)}>›</button>
    <button type="button" aria-pressed=${beside ? "true" : "false"} onClick=${compare}>Side by side</button>
  </span>`;
}

function Text({ node, view }) {
  const { marks, shown, places } = view;
  const place = marks && shown && node !== shown ? places.get(node.id) : null;
  if (place) return html`<${Marked} text=${node.text} place=${place} turn=${shown.turn} />`;
  return marks && node.turn?.texts && (node === shown || !places.has(node.id)) ? html`<${Written} text=${node.text} turn=${node.turn} />` : node.text;
}

function Answer({ node, view }) {
  return html`${node.reasoning && html`<details class="reasoning" open=${!node.text}><summary>Reasoning</summary><p class="text">${node.reasoning}</p></details>`}
    <p class=${classes(node.text)}><${Text} node=${node} view=${view} />${node === view.busy && html`<span class="caret" aria-hidden="true"></span>`}</p>
    ${node.turn?.error && html`<p class="failed" role="alert">${node.turn.error}</p>`}
    ${node.turn?.end === "length" && html`<p class="note">Cut off at the most tokens.</p>`}`;
}

export function Message({ node, among, view, act }) {
  const [editing, setEditing] = useState(false);
  const [beside, setBeside] = useState(false);
  const edit = useRef(null);
  const ours = node.role === "user";
  const place = view.shown && node !== view.shown ? view.places.get(node.id) : null;
  const names = view.chats ? { user: "You", assistant: view.model } : { user: "Text", assistant: "Continued" };
  const leave = () => (setEditing(false), setTimeout(() => edit.current?.focus()));
  const turn = (one) => one.turn && one !== view.busy && html`<${Turn} turn=${one.turn} shown=${one === view.shown} show=${one.turn.restored !== undefined && !beside ? () => act.show(one) : null} link=${act.link(one)} />`;
  return html`<li class=${`message ${node.role}`}>
    <header><h2>${names[node.role]}</h2>
      ${view.marks && place && html`<span class="told">${told(place, view.shown.turn)}</span>`}
      <span class="actions">
        <${Branches} node=${node} among=${among} choose=${act.choose} beside=${beside} compare=${() => setBeside(!beside)} />
        ${ours && !editing && html`<button type="button" class="plain" ref=${edit} disabled=${Boolean(view.busy)} onClick=${() => setEditing(true)}>Edit</button>`}
        ${!ours && html`<button type="button" class="plain" disabled=${Boolean(view.busy)} onClick=${() => act.again(node)}>Regenerate</button>`}
        <button type="button" class="plain" onClick=${() => navigator.clipboard?.writeText(node.text)}>Copy</button>
      </span>
    </header>
    ${beside && among.length > 1 ? html`<ol class="beside">${among.map((one) => html`<li key=${one.id} class=${one === node ? "chosen" : ""}>
        <${Images} node=${one} />${ours ? html`<p class=${classes(one.text)}>${one.text}</p>` : html`<${Answer} node=${one} view=${view} />`}${turn(one)}
        <p class="actions">${one === node ? html`<span class="note">goes on from here</span>` : html`<button type="button" onClick=${() => act.choose(one)}>Go on from here</button>`}</p></li>`)}</ol>`
      : editing ? html`<${Images} node=${node} /><${Editor} key=${node.id} node=${node} chats=${view.chats} reuse=${(text, signal) => act.reuse(node, text, signal)} cancel=${leave} send=${(text) => (setEditing(false), act.edit(node, text))} />`
        : html`<${Images} node=${node} view=${view} />${ours ? html`<p class=${classes(node.text)}><${Text} node=${node} view=${view} /></p>` : html`<${Answer} node=${node} view=${view} />`}${turn(node)}`}
  </li>`;
}
