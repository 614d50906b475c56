// requests: what runs, and of what has ended what came from memory and why it was not more.

import { html } from "/inspector/vendor/preact-htm.js";
import { REASONS, clock, count, counted, line, percent, rate, time } from "/inspector/data.js";

const STATES = { waiting: "waiting", prefill: "reading the prompt", decode: "writing" };
const OUTCOMES = { stop: "ended", length: "at its limit", cancelled: "cancelled" };

// A prompt as a bar: from memory, computed, and, while it is read, not computed yet.
export function Bar({ prompt, memory, computed }) {
  const label = `${count(memory)} of ${count(prompt)} prompt tokens from memory, ${count(computed)} computed`;
  const part = (n) => ({ width: `${prompt ? (100 * n) / prompt : 0}%` });
  return html`<div class="bar" role="img" aria-label=${label}>
    <span class="memory" style=${part(memory)}></span><span class="computed" style=${part(computed)}></span>
  </div>`;
}

function Row({ one, selected, select, cells, classes }) {
  return html`<tr class=${`${classes} ${selected ? "selected" : ""}`} onClick=${() => select(one.number)}>
    <th scope="row">
      <button type="button" aria-pressed=${selected ? "true" : "false"} aria-label=${`request ${one.number}`}>
        ${one.number}
      </button>
    </th>
    ${cells.map((cell) => html`<td>${cell}</td>`)}
  </tr>`;
}

function live(one) {
  const memory = one.restored || 0;
  const computed = Math.max(0, Math.min(one.computed, one.prompt) - memory);
  return [
    html`<span class=${`state ${one.status}`}>${STATES[one.status]}</span>`,
    html`<${Bar} prompt=${one.prompt} memory=${memory} computed=${computed} />`,
    html`<span class="number">${count(memory)} / ${count(one.prompt)}</span>`,
    one.completions > 1 ? counted(one.completions, "completion") : "",
    time(one.seconds),
    html`${count(one.produced)} <small>at ${rate(one.tokens_per_second)}/s</small>`,
  ];
}

function ended(one) {
  const memory = one.recall ? one.recall.restored : 0;
  return [
    html`${clock(one.at)} <small>${OUTCOMES[one.outcome] || `failed: ${one.outcome}`}</small>`,
    html`<${Bar} prompt=${one.prompt} memory=${memory} computed=${one.recall ? one.prompt - memory : 0} />`,
    html`<span class="number">${count(memory)} / ${count(one.prompt)}</span>`,
    one.recall ? html`<span class=${`reason r-${one.recall.reason.replace(/ /g, "-")}`}>${one.recall.reason}</span>` : "did not run",
    one.produced ? time(one.first_token) : "",
    html`${count(one.produced)} <small>at ${rate(one.tokens_per_second)}/s</small>`,
  ];
}

export function Requests({ snapshot, selected, select }) {
  const { live: running, ended: past, more_live } = snapshot.requests;
  const left = Math.max(0, snapshot.engine.running + snapshot.engine.waiting - running.length);
  return html`<section aria-labelledby="requests">
    <h2 id="requests">Requests</h2>
    <div class="scroll" tabindex="0" role="group" aria-labelledby="requests">
      <table class="requests">
        <caption>
          What runs, and what has ended. Of each prompt:${" "}<span class="key memory"></span>came from memory,${" "}
          <span class="key computed"></span>was computed. Select a request to see why.
        </caption>
        <thead>
          <tr>
            <th scope="col">Request</th>
            <th scope="col">State</th>
            <th scope="col" class="wide">Prompt</th>
            <th scope="col">From memory</th>
            <th scope="col">Why not more</th>
            <th scope="col">First token</th>
            <th scope="col">Written</th>
          </tr>
        </thead>
        <tbody>
          ${running.map((one) => html`<${Row} key=${`r${one.number}`} one=${one} selected=${one.number === selected} select=${select} cells=${live(one)} classes="live" />`)}
          ${past.map((one) => html`<${Row} key=${`r${one.number}`} one=${one} selected=${one.number === selected} select=${select} cells=${ended(one)} classes="past" />`)}
        </tbody>
      </table>
    </div>
    ${!running.length && !past.length && html`<p class="empty">No request yet. Send one, and another that begins with the same text.</p>`}
    ${more_live > 0 && html`<p class="more">${counted(more_live, "more request")} run or wait.</p>`}
    ${!running.length && left > 0 && html`<p class="more">${counted(left, "completion")} run or wait.</p>`}
  </section>`;
}

// Tokens of prompts per second, of steps that computed little else.
function readingRate(steps) {
  let tokens = 0;
  let seconds = 0;
  steps.prefill.forEach((n, at) => {
    if (n >= 8 && n > 4 * steps.decode[at]) [tokens, seconds] = [tokens + n, seconds + steps.seconds[at]];
  });
  return seconds ? tokens / seconds : 0;
}

const places = (sources) => Object.entries(sources).filter(([, n]) => n).map(([name, n]) => `${count(n)} in the ${name}`).join(", ");

function Story({ one, steps }) {
  const recall = one.recall;
  if (!recall) return html`<p>It ended before it began to run (${one.outcome}).</p>`;
  const computed = one.prompt - recall.restored;
  const speed = readingRate(steps);
  const saved = speed ? recall.restored / speed : 0;
  return html`
    <p class="story">
      Its prompt has <b>${counted(one.prompt, "token")}</b>.
      ${recall.restored
        ? html` <b class="memory">${count(recall.restored)} (${percent(recall.restored, one.prompt)})</b> came from memory${places(recall.sources) && html` (${places(recall.sources)})`}, so only <b class="computed">${count(computed)}</b> had to be computed.`
        : html` Nothing of it came from memory: <b class="computed">all ${count(computed)}</b> were computed.`}
      ${one.produced > 0 && html` Its first token came after <b>${time(one.first_token)}</b>.`}
      ${saved > 0 && html` Prompts are read here with about ${count(speed)} tokens a second: what came from memory saved about <b>${time(saved)}</b>.`}
    </p>
    <dl>
      <dt>matched</dt><dd>${counted(recall.matched, "token")} that were found</dd>
      <dt>restored</dt><dd>${counted(recall.restored, "token")} that were used${recall.seconds > 0 && html`, after ${time(recall.seconds)} of reading back`}</dd>
      <dt>why not more</dt><dd><span class=${`reason r-${recall.reason.replace(/ /g, "-")}`}>${recall.reason}</span> ${recall.detail || REASONS[recall.reason]}${recall.image && `; ${recall.image}`}</dd>
      ${recall.ours && html`<dt>this prompt goes on</dt><dd><q>${line(recall.ours, 80)}</q></dd>`}
      ${recall.theirs && html`<dt>memory goes on</dt><dd><q>${line(recall.theirs, 80)}</q></dd>`}
      <dt>waited</dt><dd>${time(one.queued)} for its turn</dd>
      ${one.drafts && html`<dt>drafts</dt><dd>${count(one.drafts.accepted)} of ${count(one.drafts.drafted)} became tokens</dd>`}
    </dl>`;
}

// Tokens of the prompt in a part of the way.
const prompts = (part, way) => Math.max(part.memory, Math.min(part.end, way.prompt) - part.start);

function shares(part, way) {
  const prompt = prompts(part, way);
  const found = [[part.memory, "from memory"], [prompt - part.memory, "computed"], [part.end - part.start - prompt, "its answer"]];
  return found.filter(([n]) => n > 0).map(([n, what]) => `${count(n)} ${what}`).join(", ");
}

export function RequestDetail({ snapshot, number, way, pick, close }) {
  const past = snapshot.requests.ended.find((one) => one.number === number);
  const now = snapshot.requests.live.find((one) => one.number === number);
  if (!past && !now) return null;
  return html`<aside class="detail" aria-labelledby="why">
    <header>
      <h3 id="why">Request ${number}</h3>
      <button type="button" onClick=${close}>Close</button>
    </header>
    ${past ? html`<${Story} one=${past} steps=${snapshot.steps} />` : html`<p>It is ${STATES[now.status]}.</p>`}
    <h4>Its way through the tree</h4>
    ${way?.error && html`<p class="empty">${way.error}</p>`}
    ${way?.entries && !way.entries.length && html`<p class="empty">Nothing of its text is in memory now.</p>`}
    ${way?.entries && html`<ol class="way">
      ${way.entries.map((part) => html`<li key=${part.name}>
        <button type="button" onClick=${() => pick(part.name)}>${part.begins !== null ? html`<q>${line(part.begins, 44)}</q>` : part.name}</button>
        <${Bar} prompt=${part.end - part.start} memory=${part.memory} computed=${prompts(part, way) - part.memory} />
        <small>${shares(part, way)}</small>
      </li>`)}
    </ol>`}
  </aside>`;
}
