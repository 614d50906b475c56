// steps: the last steps of the engine on a time line. Drawn by uPlot, which the page loads as a classic script.

import { html, useEffect, useRef, useState } from "/inspector/vendor/preact-htm.js";
import { clock, count, counted, time } from "/inspector/data.js";

const uPlot = window.uPlot;
const HIGH = 130;
const FLOOR = 0.6; // the foot of a bar on a logarithmic scale: one token is still a bar

const css = (node, name) => getComputedStyle(node).getPropertyValue(`--${name}`).trim();

function options(node, wide, { at, series, scale, unit, values, moved }) {
  const [text, grid] = [css(node, "soft"), css(node, "line")];
  const bars = uPlot.paths.bars({ size: [0.8, 14], align: 0 });
  return {
    width: wide,
    height: HIGH,
    legend: { show: false },
    cursor: { sync: { key: "steps" }, drag: { x: false, y: false }, points: { show: false } },
    hooks: { setCursor: [(plot) => moved(plot.cursor.idx)] },
    scales: { x: { time: false }, y: scale },
    axes: [
      { stroke: text, grid: { show: false }, ticks: { stroke: grid }, size: 28, space: 90, values: (plot, ticks) => ticks.map((n) => (at.has(n) ? clock(at.get(n)) : "")).map((text, i, all) => (text === all[i - 1] ? "" : text)) },
      { stroke: text, grid: { stroke: grid, width: 1 }, ticks: { show: false }, size: 54, label: unit, labelSize: 18, labelGap: 0, values },
    ],
    series: [{}, ...series.map((one) => ({ label: one.name, fill: css(node, one.color), stroke: css(node, one.color), width: 0, paths: bars, points: { show: false } }))],
  };
}

function Plot({ data, label, ...about }) {
  const place = useRef(null);
  useEffect(() => {
    let plot = null;
    const make = () => {
      const wide = place.current.clientWidth;
      if (plot && plot.width === wide) return;
      plot?.destroy();
      plot = new uPlot(options(place.current, wide, about), data, place.current);
    };
    make();
    const watch = new ResizeObserver(make);
    watch.observe(place.current);
    return () => (watch.disconnect(), plot?.destroy());
  }, [data]);
  return html`<div class="plot" ref=${place} role="img" aria-label=${label}></div>`;
}

function sums(steps) {
  const of = (name) => steps[name].reduce((sum, n) => sum + n, 0);
  const modules = steps.modules.filter((reason) => reason !== null).length;
  const [prefill, decode, drafts, seconds] = ["prefill", "decode", "drafts", "seconds"].map(of);
  return { prefill, decode, drafts, seconds, modules, all: steps.number.length };
}

// What one step was, in words.
function told(steps, at) {
  const parts = [["prefill", "of prompts"], ["decode", "written"], ["drafts", "drafted"]].filter(([name]) => steps[name][at]).map(([name, what]) => `${count(steps[name][at])} ${what}`);
  const by = steps.modules[at] === null ? "recorded" : `by modules (${steps.reasons[steps.modules[at]]})`;
  return `Step ${count(steps.number[at])}, ${clock(steps.at[at])}: ${parts.join(", ")}, in ${time(steps.seconds[at])}, ${by}`;
}

export function Steps({ snapshot }) {
  const { steps } = snapshot;
  const [over, setOver] = useState(null);
  const last = useRef({});
  const key = `${snapshot.instance}:${steps.number.at(-1)}`;
  if (last.current.key !== key) {
    const positive = (name) => steps[name].map((n) => (n > 0 ? n : null));
    const ms = (recorded) => steps.seconds.map((s, at) => ((steps.modules[at] === null) === recorded ? 1e3 * s : null));
    last.current = { key, tokens: [steps.number, positive("prefill"), positive("drafts"), positive("decode")], times: [steps.number, ms(true), ms(false)] };
  }
  const all = sums(steps);
  const at = new Map(steps.number.map((n, i) => [n, steps.at[i]]));
  const shown = over !== null && over !== undefined && over < all.all ? over : all.all - 1;
  const kinds = [["prefill", "computed"], ["drafts", "draft"], ["decode", "written"]];
  if (!all.all) return html`<section aria-labelledby="steps"><h2 id="steps">Steps</h2><p class="empty">${snapshot.sums ? "No step yet." : "Steps compute tokens of all keys: an admin key shows them."}</p></section>`;
  return html`<section aria-labelledby="steps">
    <h2 id="steps">Steps</h2>
    <p class="hint">The last ${count(all.all)} forwards of the model in order; idle time is left out.</p>
    <p class="keys"><b>Tokens of a step:</b> <span class="key computed"></span> of prompts (prefill) <span class="key draft"></span> drafts <span class="key written"></span> written (decode)</p>
    <${Plot} data=${last.current.tokens} at=${at} moved=${setOver} unit="tokens" label=${`tokens of the last ${all.all} steps: ${count(all.prefill)} of prompts, ${count(all.decode)} written, ${count(all.drafts)} drafts`}
      scale=${{ distr: 3, range: (plot, low, high) => [FLOOR, Math.max(10, high * 1.4)] }} series=${kinds.map(([name, color]) => ({ name, color }))}
      values=${(plot, ticks) => ticks.map((n) => (n >= 1 && /^1/.test(String(n)) ? count(n) : ""))} />
    <p class="keys"><b>Time of a step:</b> <span class="key recorded"></span> recorded <span class="key modules"></span> by modules</p>
    <${Plot} data=${last.current.times} at=${at} moved=${setOver} unit="ms" label=${`times of the last ${all.all} steps, ${time(all.seconds)} together`}
      scale=${{ range: (plot, low, high) => [0, Math.max(1, high * 1.1)] }} series=${[{ name: "recorded", color: "recorded" }, { name: "modules", color: "modules" }]} values=${(plot, ticks) => ticks.map(count)} />
    <p class="told">${told(steps, shown)}</p>
    <p class="more">Together ${counted(all.prefill, "token")} of prompts, ${count(all.decode)} written and ${counted(all.drafts, "draft")} in ${time(all.seconds)}; ${count(all.all - all.modules)} steps recorded, ${count(all.modules)} by modules${steps.reasons.length ? html` (${steps.reasons.join("; ")})` : ""}.</p>
  </section>`;
}
