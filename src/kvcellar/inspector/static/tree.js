// tree: the prefix tree as an image that can be walked with the keyboard. Layout by d3-hierarchy, drawn as SVG here.

import { html, useEffect, useRef, useState } from "/inspector/vendor/preact-htm.js";
import { stratify, tree } from "/inspector/vendor/d3-hierarchy.js";
import { bytes, count, counted, hue, line, percent } from "/inspector/data.js";

const [WIDE, HIGH, GAP, ROW] = [214, 40, 46, 50];
const [LETTERS, MOST] = [24, 160]; // characters of a label; entries that are drawn

// Entries with their places; the root stands for all of memory.
function laidOut(entries) {
  const shown = entries.map((entry, at) => ({ entry, at })).slice(0, MOST);
  const there = new Set(shown.map(({ at }) => at));
  const rows = [{ id: "root", above: null }];
  for (const { entry, at } of shown) rows.push({ id: at, above: there.has(entry.parent) ? entry.parent : "root", entry });
  const root = stratify().id((row) => row.id).parentId((row) => row.above)(rows);
  tree().nodeSize([ROW, WIDE + GAP])(root);
  const nodes = root.descendants().filter((node) => node.data.entry);
  const top = Math.min(0, ...nodes.map((node) => node.x));
  for (const node of nodes) [node.left, node.top] = [node.y - WIDE - GAP + 8, node.x - top + 6];
  return nodes.sort((a, b) => a.top - b.top || a.left - b.left);
}

function title(entry) {
  return entry.begins !== null ? line(entry.begins, LETTERS) || "(white space)" : entry.name;
}

function places(entry) {
  const tokens = entry.end - entry.start;
  const stored = Object.entries(entry.stored || {}).map(([name, n]) => (n >= tokens ? name : `${name} ${percent(n, tokens)}`));
  return ["device", ...stored].join(", ");
}

function facts(entry) {
  const tokens = `${count(entry.end - entry.start)} tok`;
  return [tokens, places(entry), entry.checkpoints && `${count(entry.checkpoints)} cp`, entry.pinned && "pinned"].filter(Boolean).join(" · ");
}

// Begins with what is to be seen.
function spoken(entry) {
  const uses = entry.users ? `, used by ${counted(entry.users, "running sequence")}` : "";
  return `${title(entry)} ${facts(entry)}, from position ${entry.start}${uses}`;
}

function Box({ node, part, selected, focused, pick, keys }) {
  const { entry } = node.data;
  const tokens = entry.end - entry.start;
  const classes = ["node", entry.users && "used", part && "on-way", selected && "selected"].filter(Boolean).join(" ");
  const wide = (n) => ((WIDE - 4) * Math.min(n, tokens)) / Math.max(1, tokens);
  const [memory, own] = part ? [Math.min(part.memory, tokens), part.end - part.start - part.memory] : [0, 0];
  return html`<g class=${classes} transform=${`translate(${node.left},${node.top})`} role="treeitem"
      tabindex=${focused ? "0" : "-1"} aria-level=${node.depth} aria-selected=${selected ? "true" : "false"}
      aria-label=${spoken(entry)} data-name=${entry.name} onClick=${() => pick(entry.name)} onKeyDown=${(event) => keys(event, node)}>
    <rect class="box" width=${WIDE} height=${HIGH} rx="6"></rect>
    <rect class="stripe" width="5" height=${HIGH - 8} x="4" y="4" rx="2" style=${{ fill: `hsl(${hue(entry.name)} 55% 50%)` }}></rect>
    ${part && html`<g class="parts" aria-hidden="true">
      <rect class="memory" x="2" y=${HIGH - 5} height="4" width=${wide(memory)}></rect>
      <rect class="computed" x=${2 + wide(memory)} y=${HIGH - 5} height="4" width=${wide(Math.min(own, tokens - memory))}></rect>
    </g>`}
    <text class="title" x="15" y="16">${title(entry)}</text>
    <text class="facts" x="15" y="30">${facts(entry)}</text>
    ${entry.users > 0 && html`<circle class="busy" cx=${WIDE - 10} cy="11" r="4"></circle>`}
  </g>`;
}

const link = (from, to) => {
  const [x, y, u, v] = [from.left + WIDE, from.top + HIGH / 2, to.left, to.top + HIGH / 2];
  return `M${x},${y}C${x + GAP / 2},${y} ${u - GAP / 2},${v} ${u},${v}`;
};

export function Tree({ snapshot, picked, pick, way }) {
  const nodes = laidOut(snapshot.tree.entries);
  const [at, setAt] = useState(null);
  const svg = useRef(null);
  const moved = useRef(false);
  const parts = new Map((way?.entries || []).map((part) => [part.name, part]));
  const focused = nodes.find((node) => node.data.entry.name === at) || nodes[0];

  useEffect(() => {
    if (!moved.current || !svg.current) return;
    moved.current = false;
    svg.current.querySelector('[tabindex="0"]')?.focus();
  });

  function go(node) {
    if (!node?.data.entry) return;
    moved.current = true;
    setAt(node.data.entry.name);
  }

  function keys(event, node) {
    const index = nodes.indexOf(node);
    const to = { ArrowDown: nodes[index + 1], ArrowUp: nodes[index - 1], ArrowLeft: node.parent, ArrowRight: node.children?.[0], Home: nodes[0], End: nodes.at(-1) };
    if (event.key === "Enter" || event.key === " ") pick(node.data.entry.name);
    else if (event.key in to) go(to[event.key]);
    else return;
    event.preventDefault();
  }

  const wide = Math.max(WIDE, ...nodes.map((node) => node.left + WIDE)) + 12;
  const high = Math.max(HIGH, ...nodes.map((node) => node.top + HIGH)) + 10;
  const drawn = snapshot.tree.entries.length - nodes.length;
  return html`<section aria-labelledby="tree">
    <h2 id="tree">Prefix tree</h2>
    <p class="hint">
      Cached prompts as a tree. A request reuses the boxes along its path. Under each text: its tokens, where they are, and checkpoints (cp) from which layers with windows and
      recurrent ones resume. A dot: a running request uses it. Arrow keys move, Enter shows the text.
    </p>
    ${nodes.length ? html`<div class="scroll tree"><svg ref=${svg} width=${wide} height=${high} viewBox=${`0 0 ${wide} ${high}`}>
      <g class="links" aria-hidden="true">
        ${nodes.filter((node) => node.parent?.data.entry).map((node) => html`<path key=${`l${node.data.entry.name}`} d=${link(node.parent, node)} class=${parts.has(node.data.entry.name) ? "on-way" : ""}></path>`)}
      </g>
      <g role="tree" aria-label="prefix tree">
        ${nodes.map((node) => html`<${Box} key=${node.data.entry.name} node=${node} part=${parts.get(node.data.entry.name)}
          selected=${node.data.entry.name === picked} focused=${node === focused} pick=${pick} keys=${keys} />`)}
      </g>
    </svg></div>` : html`<p class="empty">${snapshot.sums ? "Memory is empty." : "Memory has nothing of this key."}</p>`}
    ${drawn + snapshot.tree.more > 0 && html`<p class="more">At least ${count(drawn + snapshot.tree.more)} more entries are not drawn: those that were used longer ago.</p>`}
  </section>`;
}

export function EntryDetail({ entry, text, close, groups }) {
  const tokens = entry.end - entry.start;
  const size = groups.reduce((sum, group) => sum + group.bytes / Math.max(1, group.cells), 0) * tokens;
  return html`<aside class="detail" aria-labelledby="entry">
    <header><h3 id="entry">Entry ${entry.name}</h3><button type="button" onClick=${close}>Close</button></header>
    <dl>
      <dt>tokens</dt><dd>${count(tokens)}, positions ${count(entry.start)} to ${count(entry.end - 1)}; up to ${bytes(size)} of cells</dd>
      <dt>where</dt><dd>${places(entry)}${entry.stored === null ? "" : Object.keys(entry.stored).length ? "" : "; no tier has it"}</dd>
      <dt>checkpoints</dt><dd>${count(entry.checkpoints)}</dd>
      <dt>used</dt><dd>${entry.users ? `by ${counted(entry.users, "running sequence")} now` : entry.reused ? "again by later requests" : "by the request that computed it"}${entry.pinned ? "; pinned" : ""}</dd>
      ${entry.namespace && html`<dt>namespace</dt><dd><code>${entry.namespace}</code></dd>`}
    </dl>
    <h4>Its text</h4>
    ${!text && html`<p class="empty">Reading it.</p>`}
    ${text?.error && html`<p class="empty">${text.error}</p>`}
    ${text && !text.error && !text.reads && html`<p class="empty">Only the key whose requests have computed it sees its text.</p>`}
    ${text?.reads && html`<pre tabindex="0" aria-label="text of the entry">${text.text ?? text.tokens.join(" ")}</pre>`}
    ${text?.reads && text.images.length > 0 && html`<ul class="images" aria-label="images of the entry">
      ${text.images.map((one, at) => html`<li><figure>
        <img src=${one.thumbnail} alt=${`image ${at + 1} of the entry`} />
        <figcaption>${count(one.width)} × ${count(one.height)}, at ${count(one.at)}</figcaption>
      </figure></li>`)}
    </ul>`}
    ${text?.reads && text.shown < tokens && html`<p class="more">${count(tokens - text.shown)} more tokens are not shown.</p>`}
  </aside>`;
}
