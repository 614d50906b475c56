// memory: a map of the cells of each group by owner, and the tiers.

import { html, useEffect, useRef } from "/inspector/vendor/preact-htm.js";
import { bytes, count, hue, percent, rate, time } from "/inspector/data.js";

const KINDS = [
  ["request", "running requests"],
  ["shared", "several running requests"],
  ["kept", "kept for later requests"],
  ["other", "others, or on their way"],
  ["free", "free"],
];
const HIGH = 96;

function colors(canvas, entries, picked, number) {
  const style = getComputedStyle(canvas);
  const of = (name) => style.getPropertyValue(`--${name}`);
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  return ([, kind, which]) => {
    if (kind === "request") return which === number ? of("accent") : of("running");
    if (kind !== "kept" || which === null) return of(kind === "kept" ? "other" : kind);
    const entry = entries[which];
    if (entry.name === picked) return of("accent");
    return `hsl(${hue(entry.name)} 45% ${dark ? 45 : 62}%)`;
  };
}

// Cells in rows, from the left. Every run is at least as wide as it is, so none is lost.
function draw(canvas, group, color) {
  const scale = window.devicePixelRatio || 1;
  const wide = Math.max(1, canvas.clientWidth);
  [canvas.width, canvas.height] = [wide * scale, HIGH * scale];
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const rows = Math.max(1, Math.min(12, Math.ceil(group.cells / wide)));
  const columns = Math.max(1, Math.ceil(group.cells / rows));
  const [w, h] = [wide / columns, HIGH / rows];
  let cell = 0;
  for (const run of group.runs) {
    context.fillStyle = color(run);
    for (let left = run[0]; left > 0; ) {
      const [row, column] = [Math.floor(cell / columns), cell % columns];
      const n = Math.min(left, columns - column);
      context.fillRect(column * w, row * h, n * w + 0.4, h - (rows > 1 ? 1 : 0));
      [cell, left] = [cell + n, left - n];
    }
  }
  return { rows, columns };
}

function Group({ group, entries, sums, picked, pick, number }) {
  const canvas = useRef(null);
  const shape = useRef(null);
  useEffect(() => {
    const paint = () => canvas.current && (shape.current = draw(canvas.current, group, colors(canvas.current, entries, picked, number)));
    paint();
    const watch = new ResizeObserver(paint);
    watch.observe(canvas.current);
    return () => watch.disconnect();
  });

  // With the keyboard the same is done in the tree.
  function clicked(event) {
    const { rows, columns } = shape.current;
    const box = canvas.current.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) / box.height) * rows);
    let cell = row * columns + Math.floor(((event.clientX - box.left) / box.width) * columns);
    const run = group.runs.find(([n]) => (cell -= n) < 0);
    if (run && run[1] === "kept" && run[2] !== null) pick(entries[run[2]].name);
  }

  const used = group.cells - group.counts.free - (sums ? 0 : group.counts.other);
  const label = `${count(used)} of ${count(group.cells)} cells are in use: ${KINDS.filter(([kind]) => group.counts[kind]).map(([kind, name]) => `${count(group.counts[kind])} ${name}`).join(", ")}`;
  return html`<div class="group">
    <h3>${group.name}</h3>
    <div class="map">
      <canvas ref=${canvas} role="img" aria-label=${label} onClick=${clicked}></canvas>
      <table>
        <caption>${count(group.cells)} cells in ${count(group.layers)} layers, ${bytes(group.bytes)}${group.backend ? html`, ${group.backend}` : ""}</caption>
        <thead><tr><th scope="col">Cells of</th><th scope="col">Number</th><th scope="col">Part</th></tr></thead>
        <tbody>
          ${KINDS.filter(([kind]) => kind === "free" || group.counts[kind]).map(([kind, name]) => html`<tr key=${kind}>
            <th scope="row"><span class=${`key ${kind}`}></span>${name}</th>
            <td class="number">${count(group.counts[kind])}</td>
            <td class="number">${percent(group.counts[kind], group.cells)}</td>
          </tr>`)}
        </tbody>
      </table>
    </div>
    ${group.cells_each > 1 && html`<p class="more">There are too many runs to draw all: ${count(group.cells_each)} cells are drawn as what the busiest one is.</p>`}
  </div>`;
}

export function Memory({ snapshot, picked, pick, number }) {
  return html`<section aria-labelledby="memory">
    <h2 id="memory">Memory on the device</h2>
    <p class="hint">
      Every cell is the K and V of one token. Each text of the tree has a color, like the stripes there; what is selected
      is highlighted. Free cells can be taken at once; those that are kept are evicted when they are needed.
    </p>
    ${snapshot.groups.map((group) => html`<${Group} key=${group.name} group=${group} entries=${snapshot.tree.entries} sums=${snapshot.sums} picked=${picked} pick=${pick} number=${number} />`)}
    ${!snapshot.groups.length && html`<p class="empty">This model has no cells, only rows of state.</p>`}
    ${snapshot.more_groups > 0 && html`<p class="more">${count(snapshot.more_groups)} more groups.</p>`}
    ${snapshot.engine.rows > 0 && html`<p class="more">Rows of recurrent state: ${count(snapshot.engine.rows_used)} used and ${count(snapshot.engine.rows_cached)} kept of ${count(snapshot.engine.rows)}, ${bytes(snapshot.engine.state_bytes)}.</p>`}
  </section>`;
}

// Bytes per second since the snapshot before.
function traffic(tier, before, seconds) {
  const of = (name) => (before && seconds > 0 && tier[name] !== null ? (tier[name] - before[name]) / seconds : 0);
  return { read_bytes: of("read_bytes"), written_bytes: of("written_bytes") };
}

export function Tiers({ snapshot, before }) {
  const { all, store } = snapshot.tiers;
  if (!snapshot.sums) return html`<section aria-labelledby="tiers"><h2 id="tiers">Tiers</h2><p class="empty">They have what all keys have computed: an admin key shows them.</p></section>`;
  const seconds = before ? snapshot.at - before.at : 0;
  return html`<section aria-labelledby="tiers">
    <h2 id="tiers">Tiers</h2>
    <div class="scroll" tabindex="0" role="group" aria-labelledby="tiers"><table>
      <caption>What leaves the device goes to the tiers below it, and comes back from there.</caption>
      <thead><tr><th scope="col">Tier</th><th scope="col" class="wide">Filled</th><th scope="col">Bytes</th><th scope="col">Read</th><th scope="col">Written</th><th scope="col">State</th></tr></thead>
      <tbody>${all.map((tier) => {
        const now = traffic(tier, before?.tiers.all.find((one) => one.name === tier.name), seconds);
        const cell = (name) => (tier[name] === null ? "" : html`${bytes(tier[name])}${now[name] >= 1 && html` <small>${bytes(now[name])}/s</small>`}`);
        const failures = Object.entries(tier.failures).map(([kind, n]) => `${kind} ${count(n)}`).join(", ");
        return html`<tr key=${tier.name}>
          <th scope="row">${tier.name}</th>
          <td><div class="bar" role="img" aria-label=${`${percent(tier.bytes, tier.limit_bytes)} filled`}><span class="memory" style=${{ width: `${Math.min(100, (100 * tier.bytes) / Math.max(1, tier.limit_bytes))}%` }}></span></div></td>
          <td class="number">${bytes(tier.bytes)} <small>of ${bytes(tier.limit_bytes)}</small></td>
          <td class="number">${cell("read_bytes")}</td><td class="number">${cell("written_bytes")}</td>
          <td>${tier.down ? "not used now" : "in use"}${failures && html` <small>${failures}</small>`}</td>
        </tr>`;
      })}</tbody>
    </table></div>
    ${store ? html`<p class="more">${count(store.snapshots)} snapshots. Since the start ${count(store.written)} tokens were written and ${count(store.restored)} read back; ${count(store.declined)} requests found computing faster.</p>` : html`<p class="more">There is no store: what is evicted from the device is gone.</p>`}
  </section>`;
}

function recorded({ engine, steps }) {
  if (engine.recording.refused) return "run by modules";
  const modules = steps.modules.filter((reason) => reason !== null).length;
  return modules ? `${count(modules)} of the last ${count(steps.modules.length)} by modules` : "the last ones recorded";
}

export function Now({ snapshot }) {
  const { engine, rates, groups } = snapshot;
  const cells = groups.reduce((sum, group) => sum + group.cells, 0);
  const sum = (kind) => groups.reduce((all, group) => all + group.counts[kind], 0);
  const busy = sum("request") + sum("shared");
  const kept = sum("kept") + (snapshot.sums ? sum("other") : 0);
  const tiles = [
    ["running", count(engine.running), engine.waiting ? `${count(engine.waiting)} waiting` : "none waiting"],
    ["reading prompts", rate(rates.prefill), `tokens a second, over ${time(rates.seconds)}`],
    ["writing", rate(rates.decode), `tokens a second, over ${time(rates.seconds)}`],
    ["memory in use", percent(busy, cells), `and ${percent(kept, cells)} kept, of ${bytes(engine.cache_bytes)}`],
  ];
  if (snapshot.sums) tiles.push(["steps", count(engine.steps), recorded(snapshot)]);
  if (engine.speculation) tiles.push(["drafts", percent(engine.speculation.accepted, engine.speculation.drafted), `of ${count(engine.speculation.drafted)} became tokens (${engine.speculation.drafter})`]);
  return html`<section class="now" aria-label="Now">
    ${tiles.map(([name, value, more]) => html`<div class="tile" key=${name}><span class="name">${name}</span><span class="value">${value}</span><span class="about">${more}</span></div>`)}
  </section>`;
}
