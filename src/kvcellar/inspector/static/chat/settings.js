// settings: what is beside the messages: the conversations of this browser, and how the shown one is answered.

import { html, useState } from "/inspector/vendor/preact-htm.js";

const FIELDS = [ // name, least, most, step, what it is
  ["temperature", 0, 2, 0.05, "0: always the most likely token"],
  ["top_p", 0.01, 1, 0.01, "only tokens of this probability together"],
  ["top_k", 0, null, 1, "only so many of the most likely tokens"],
  ["min_p", 0, 1, 0.01, "only tokens at least so likely, relative to the most likely"],
  ["max_tokens", 1, null, 1, "of an answer, at most"],
  ["seed", 0, null, 1, "the same answer to the same prompt"],
  ["repetition_penalty", 0.01, 2, 0.01, "above 1: tokens that were there become less likely"],
  ["presence_penalty", -2, 2, 0.1, "above 0: new words become more likely"],
];

function Conversation({ one, open, choose, rename, remove }) {
  const [sure, setSure] = useState(false);
  const [naming, setNaming] = useState(false);
  const named = (event) => (event.preventDefault(), setNaming(false), rename(one, new FormData(event.target).get("name").trim()));
  const label = one.name || "New chat";
  if (naming) {
    return html`<li><form class="naming" onSubmit=${named}><label class="unseen" for="name">Name</label>
      <input id="name" name="name" maxlength="80" value=${one.name} ref=${(input) => input?.focus()} /><button type="submit">Keep</button></form></li>`;
  }
  return html`<li class=${open ? "open" : ""}>
    <button type="button" class="plain name" aria-current=${open ? "true" : null} onClick=${() => choose(one)}>${label}</button>
    ${open && html`<span class="actions">
      <button type="button" class="plain" aria-label=${`rename ${label}`} onClick=${() => setNaming(true)}>Rename</button>
      <button type="button" class=${sure ? "sure" : "plain"} aria-label=${`${sure ? "really delete" : "delete"} ${label}`} onBlur=${() => setSure(false)} onClick=${() => (sure ? remove(one) : setSure(true))}>${sure ? "Really?" : "Delete"}</button>
    </span>`}
  </li>`;
}

export function Conversations({ all, open, choose, start, rename, remove }) {
  return html`<section aria-labelledby="chats" class="chats">
    <header><h2 id="chats">Conversations</h2><button type="button" onClick=${start}>New chat</button></header>
    <ul>${all.map((one) => html`<${Conversation} key=${one.id} one=${one} open=${one === open} choose=${choose} rename=${rename} remove=${remove} />`)}</ul>
    <p class="note">Kept in this browser only.</p>
  </section>`;
}

export function Settings({ one, info, changed }) {
  const set = (name, value) => ((one.params = { ...one.params, [name]: value }), changed());
  return html`<section aria-labelledby="settings" class="settings">
    <h2 id="settings">Settings</h2>
    <p class="note">Empty: the model's own values.</p>
    ${info.chats && html`<label for="system">System prompt</label>
      <textarea id="system" rows="3" value=${one.system} onInput=${(event) => ((one.system = event.target.value), changed())}></textarea>`}
    <div class="fields">${FIELDS.map(([name, least, most, step, about]) => html`<label key=${name} for=${name} title=${about}>${name}</label>
      <input id=${name} type="number" title=${about} min=${least} max=${most} step=${step} value=${one.params[name] ?? ""} onInput=${(event) => set(name, event.target.value)} />`)}
      <label for="stop" title="an answer ends where it has one of these lines">stop</label>
      <textarea id="stop" rows="1" title="an answer ends where it has one of these lines" placeholder="one a line" value=${one.params.stop ?? ""} onInput=${(event) => set("stop", event.target.value)}></textarea>
    </div>
  </section>`;
}
