// replicas: those of a model in a cluster, side by side; one of them is what the rest of the page shows.

import { html } from "/inspector/vendor/preact-htm.js";
import { count, percent, rate } from "/inspector/data.js";

const NAMES = ["Replica", "State", "Running", "Waiting", "Cells", "Read/s", "Written/s", "Blocks"];

function Row({ one, sums, shown, choose }) {
  const free = one.cells - one.cells_used - one.cells_cached;
  const wide = (cells) => ({ width: `${(100 * cells) / Math.max(1, one.cells)}%` });
  const label = `${percent(one.cells_used, one.cells)} used, ${percent(one.cells_cached, one.cells)} cached, ${percent(free, one.cells)} free`;
  return html`<tr class=${shown ? "selected" : ""}>
    <th scope="row">${one.state === "connected" ? html`<button type="button" aria-pressed=${shown ? "true" : "false"} onClick=${() => choose(one.name)}>${one.name}</button>` : one.name}</th>
    <td>${one.state}${one.why && html` <small>${one.why}</small>`}</td>
    ${sums && html`<td class="number">${count(one.running)}</td>
      <td class="number">${count(one.waiting)}${one.waiting_tokens > 0 && ` (${count(one.waiting_tokens)} tokens)`}</td>
      <td><span class="bar" role="img" aria-label=${label} title=${label}><span class="request" style=${wide(one.cells_used)}></span><span class="memory" style=${wide(one.cells_cached)}></span></span></td>
      <td class="number">${rate(one.prefill_rate)}</td>
      <td class="number">${rate(one.decode_rate)}</td>
      <td class="number">${count(one.blocks)}</td>`}
  </tr>`;
}

export function Replicas({ snapshot, choose }) {
  return html`<section aria-labelledby="replicas">
    <h2 id="replicas">Replicas</h2>
    <p class="hint">Those of this model, as this gateway knows them. Select one: all that is below is of it.</p>
    ${snapshot.sums && html`<p class="keys"><b>Cells:</b> <span class="key request"></span> running requests <span class="key memory"></span> kept for later requests <span class="key free"></span> free</p>`}
    <div class="scroll" tabindex="0" role="region" aria-label="table of replicas">
      <table>
        <thead><tr>${NAMES.slice(0, snapshot.sums ? NAMES.length : 2).map((name) => html`<th scope="col" key=${name}>${name}</th>`)}</tr></thead>
        <tbody>${snapshot.replicas.map((one) => html`<${Row} key=${one.name} one=${one} sums=${snapshot.sums} shown=${one.name === snapshot.replica} choose=${choose} />`)}</tbody>
      </table>
    </div>
  </section>`;
}
