// marks: where each token of a text came from and how long it took, as lines under the text, and in words.

import { html, useMemo } from "/inspector/vendor/preact-htm.js";
import { REASONS, count, counted, percent, rate, time } from "/inspector/data.js";
import { isImage } from "/inspector/chat/client.js";

export const TIERS = ["device", "host", "disk", "remote"];

// Where each message ({text, images}) is in the tokens: {tokens: [[index, its part of the text]], images: [indices]}, or null for a text
// that a template has changed. White space around a text may be lost.
export function placed(ids, texts, messages) {
  const starts = [];
  let whole = "";
  for (const text of texts) [starts[starts.length], whole] = [whole.length, whole + text];
  let [from, before] = [0, 0];
  return messages.map((message) => {
    const text = message.text.trim();
    let end = before;
    if (!text && message.images.length) { // only images: up to the last of those that are next
      while (end < ids.length && !isImage(ids[end])) end++;
      while (end < ids.length && isImage(ids[end])) end++;
      from = starts[end] ?? whole.length;
    }
    const at = whole.indexOf(text, from);
    if (at < 0) return null;
    from = at + text.length;
    const tokens = [];
    for (; end < texts.length && starts[end] < from; end++) {
      const part = texts[end].slice(Math.max(0, at - starts[end]), Math.max(0, from - starts[end]));
      if (part) tokens.push([end, part]);
    }
    const images = [];
    for (let i = before; i < end; i++) if (isImage(ids[i])) images.push(i);
    before = end;
    return { tokens, images };
  });
}

// The tier that a token of a prompt came from, or "computed". What was read back is behind what the device had.
export function origin(turn, index) {
  let end = 0;
  for (const [tier, n] of Object.entries(turn.sources || {})) if (index < (end += n)) return tier;
  return "computed";
}

const said = (kind) => (kind === "computed" ? "computed" : `from memory (${kind})`);

export function Marked({ text, place, turn }) {
  return useMemo(() => {
    if (!place) return text;
    const [lead, tail] = [text.slice(0, text.length - text.trimStart().length), text.slice(text.trimEnd().length)];
    return html`${lead}${place.tokens.map(([index, part]) => {
      const kind = origin(turn, index);
      return html`<span class=${`t ${kind}`} title=${`token ${index} of the prompt: ${said(kind)}`}>${part}</span>`;
    })}${tail}`;
  }, [text, place, turn]);
}

// In words, as it stands beside a message.
export function told(place, turn) {
  const counts = {};
  for (const index of [...place.tokens.map(([index]) => index), ...place.images]) counts[origin(turn, index)] = (counts[origin(turn, index)] || 0) + 1;
  const images = place.images.length ? `, ${count(place.images.length)} of images` : "";
  const all = Object.entries(counts).map(([kind, n]) => `${count(n)} ${said(kind)}`).join(", ");
  return `${counted(place.tokens.length + place.images.length, "token")}${images}: ${all}`;
}

function steps(turn) {
  const found = turn.ms.map((at, index) => (index ? at - turn.ms[index - 1] : null)).slice(1);
  const sorted = [...found].sort((a, b) => a - b);
  return { found, median: sorted[sorted.length >> 1] || 0, longest: sorted.at(-1) || 0 };
}

const slow = (ms, median) => (ms > 5 * median ? "s3" : ms > 2.5 * median ? "s2" : ms > 1.5 * median ? "s1" : "s0");

// The text of an answer, with the time of each token.
export function Written({ text, turn }) {
  return useMemo(() => {
    const place = turn.texts && placed([], turn.texts, [{ text, images: [] }])[0];
    if (!place || !place.tokens.length) return text;
    const { found, median } = steps(turn);
    const [lead, tail] = [text.slice(0, text.length - text.trimStart().length), text.slice(text.trimEnd().length)];
    return html`${lead}${place.tokens.map(([index, part]) => {
      const ms = index ? found[index - 1] : turn.first;
      const level = index && ms !== undefined ? slow(ms, median) : "s0";
      return html`<span class=${`t written ${level}`} title=${`token ${index}: ${ms === undefined ? "time not known" : time(ms / 1e3)}`}>${part}</span>`;
    })}${tail}`;
  }, [text, turn]);
}

// The time of each token as a row of bars.
function Times({ turn }) {
  const { found, median, longest } = steps(turn);
  if (found.length < 2) return null;
  const shown = found.slice(0, 400);
  return html`<svg class="times" role="img" aria-label=${`time of each token: mostly ${time(median / 1e3)}, at most ${time(longest / 1e3)}`}
      viewBox=${`0 0 ${shown.length} 20`} preserveAspectRatio="none" style=${{ width: `${Math.min(260, 3 * shown.length)}px` }}>
    ${shown.map((ms, at) => { const high = Math.max(1, (20 * ms) / (longest || 1)); return html`<rect class=${slow(ms, median)} x=${at} y=${20 - high} width="0.7" height=${high}></rect>`; })}
  </svg>`;
}

function Speed({ turn, children }) {
  const n = turn.completion ?? turn.ids;
  const seconds = turn.ms.length ? turn.ms.at(-1) / 1e3 : 0;
  return html`<p class="speed"><span class="key written"></span>${counted(n, "token")} written${seconds > 0 ? ` in ${time(seconds)}, ${rate((turn.ms.length - 1) / seconds)}/s` : ""}<${Times} turn=${turn} />${children}</p>`;
}

// What came from memory for an answer, why it was not more, and how long everything took.
export function Turn({ turn, shown, show, link }) {
  if (!turn.ms) return null;
  const known = turn.restored !== undefined;
  const tiers = Object.entries(turn.sources || {}).map(([tier, n]) => (Object.keys(turn.sources).length > 1 ? `${count(n)} ${tier}` : tier)).join(", ");
  const share = (n) => ({ width: `${turn.prompt ? (100 * n) / turn.prompt : 0}%` });
  return html`<div class="turn">
    ${known && html`<p><span class="bar" role="img" aria-label=${`${percent(turn.restored, turn.prompt)} of the prompt from memory`}><span class="memory" style=${share(turn.restored)}></span><span class="computed" style=${share(turn.prompt - turn.restored)}></span></span>
      <b class="memory">${count(turn.restored)} of ${counted(turn.prompt, "prompt token")} came from memory</b>${tiers && ` (${tiers})`}, ${count(turn.prompt - turn.restored)} computed; first token after ${time(turn.first / 1e3)}</p>`}
    ${known && turn.reason !== "all" && html`<p class="why">Why not more: <span class=${`reason r-${turn.reason.replace(/ /g, "-")}`}>${turn.reason}</span> ${turn.detail || REASONS[turn.reason]}</p>`}
    ${!known && turn.end === "stopped" && html`<p>Stopped: what is here was kept. What came from memory is told at the end of an answer.</p>`}
    ${(turn.ms.length > 0 || known) && html`<${Speed} turn=${turn}>
      ${known && show && html`<button type="button" class="plain" aria-pressed=${shown ? "true" : "false"} onClick=${show}>${shown ? "marked above" : "mark above"}</button>`}
      ${known && link && html`<a href=${link} target="_blank" rel="opener">in the tree</a>`}
    <//>`}
  </div>`;
}

export function Legend({ marks, toggle }) {
  return html`<div class="legend">
    <label><input type="checkbox" checked=${marks} onChange=${(event) => toggle(event.target.checked)} /> Mark tokens</label>
    ${marks && html`<ul aria-label="legend">
      <li>from memory: ${TIERS.map((tier, at) => html`${at ? ", " : ""}<span class=${`t ${tier}`}>${tier}</span>`)}</li>
      <li><span class="t computed">computed</span></li>
      <li><span class="t written s0">written</span>, <span class="t written s2">slower</span></li>
    </ul>`}
  </div>`;
}
