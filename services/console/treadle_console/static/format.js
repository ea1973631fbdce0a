// Numbers and times as words, and small bars. What other people named is text in templates, never markup.
import { html, svg, nothing } from "./vendor/lit-html.js";

export const PARTS = ["held", "queue", "prefill", "decode", "preempted", "move", "tool", "weights", "control"];
export const MEANINGS = {
  held: "a step waited in the scheduler for room or an engine",
  queue: "a step waited at its engine before it first ran",
  prefill: "an engine read the context",
  decode: "an engine sampled tokens",
  preempted: "a step was evicted until it ran again",
  move: "a step waited until its KV had moved",
  tool: "a tool ran between two steps",
  weights: "a step waited as engines loaded weights",
  control: "calls, the bus, and the client's own work",
};

export const number = (value, digits = 0) =>
  value === null || value === undefined || Number.isNaN(value)
    ? "–"
    : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
export const seconds = (value) =>
  value === null || value === undefined ? "–" : value >= 120 ? `${number(value / 60, 1)} min` : `${number(value, value < 10 ? 2 : 1)} s`;
export const share = (value) => (value === null || value === undefined || Number.isNaN(value) ? "–" : `${number(100 * value, value < 0.1 ? 1 : 0)} %`);
export const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");
export const trajectoryLink = (id) => `#/t/${encodeURIComponent(id)}`;

// A bar of parts: [class, amount, words]. Without `whole`, the parts are all of it.
export function bar(parts, words, { whole = 0, mark = null, tall = false } = {}) {
  const all = whole || parts.reduce((sum, part) => sum + part[1], 0) || 1;
  let from = 0;
  const rects = parts.map(([name, amount, title]) => {
    const width = Math.max(0, Math.min(100 - from, (100 * amount) / all));
    const rect = svg`<rect class=${name} x=${from} y="0" height="8" width=${width}>${title ? svg`<title>${title}</title>` : nothing}</rect>`;
    from += width;
    return rect;
  });
  const at = mark === null ? nothing : svg`<rect class="mark" x=${Math.min(99, (100 * mark) / all)} y="0" width="1" height="8"></rect>`;
  return html`<svg class=${tall ? "bar tall" : "bar"} viewBox="0 0 100 8" preserveAspectRatio="none" role="img" aria-label=${words}>${rects}${at}</svg>`;
}

// Where time went: seconds by part, as one bar.
export function ledgerBar(ledger_s, options) {
  const parts = PARTS.filter((part) => ledger_s[part] > 0);
  const words = parts.map((part) => `${part} ${seconds(ledger_s[part])}`).join(", ") || "no time yet";
  return bar(parts.map((part) => [`k-${part}`, ledger_s[part], `${part}: ${seconds(ledger_s[part])}`]), words, options);
}

export const legend = (names) => html`<ul class="legend">${names.map((name) => html`<li class=${name}>${name}</li>`)}</ul>`;

// A table that becomes a list of labelled values on a narrow screen. columns: [label, class, cell of a row].
export function table(columns, rows, caption, empty) {
  if (!rows.length) return html`<p class="empty">${empty}</p>`;
  return html`<div class="scroll" tabindex="0" role="group" aria-label=${caption}>
    <table class="stack">
      <caption class="hidden">${caption}</caption>
      <thead><tr>${columns.map(([label, kind]) => html`<th scope="col" class=${kind}>${label}</th>`)}</tr></thead>
      <tbody>${rows.map((row) => html`<tr>${columns.map(([label, kind, cell]) => html`<td class=${kind} data-label=${label}>${cell(row)}</td>`)}</tr>`)}</tbody>
    </table></div>`;
}

export const figures = (pairs) =>
  html`<dl class="figures">${pairs.map(([name, value, more]) => html`<div><dt>${name}</dt><dd>${value}<small>${more ?? ""}</small></dd></div>`)}</dl>`;

export const stateWord = (row) => (row.state === "tool" && row.tool ? `tool: ${row.tool}` : row.state);
