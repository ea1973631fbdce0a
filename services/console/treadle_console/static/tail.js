// The interactive page on long tails. The server plays the rollout, by the formulas of the core.
import { html, svg, nothing } from "./vendor/lit-html.js";
import { figures, number, seconds, share, table } from "./format.js";

const QUESTIONS = [
  ["samples", "Samples of a prompt that are trained (K)", 1, 64, 1, (v) => number(v)],
  ["prompts", "Prompts", 1, 32, 1, (v) => number(v)],
  ["mean_tokens", "Mean length", 100, 8000, 100, (v) => `${number(v)} tokens`],
  ["variation", "Coefficient of variation", 0.1, 3, 0.1, (v) => number(v, 1)],
  ["cap_percentile", "Cap at this percentile of lengths", 0.8, 1, 0.005, (v) => (v >= 1 ? "no cap" : number(100 * v, 1))],
  ["oversample", "Samples started, over those trained", 1, 2, 0.05, (v) => `${number(v, 2)} ×`],
  ["per_sequence_s", "A decode step takes longer for each sample by", 0, 0.002, 0.00005, (v) => `${number(1000 * v, 2)} ms`],
  ["seed", "Another draw", 0, 20, 1, (v) => number(v)],
];
const asked = { samples: 16, prompts: 8, mean_tokens: 800, variation: 1, cap_percentile: 1, oversample: 1, per_sequence_s: 0.0002, seed: 0 };
const RETRY_MS = 1000;
const state = { said: null, error: "", sent: "", busy: false };

async function ask(refresh) {
  const words = new URLSearchParams(asked).toString();
  if (state.busy || words === state.sent) return;
  state.busy = true;
  state.sent = words;
  try {
    const response = await fetch(`/api/tail?${words}`);
    const said = await response.json();
    state.said = response.ok ? said : state.said;
    state.error = response.ok ? "" : said.error;
  } catch (error) {
    state.error = `the console does not answer (${error.message})`;
    setTimeout(() => { state.sent = ""; }, RETRY_MS); // the page is drawn each second, and asks again
  }
  state.busy = false;
  refresh();
}

export function tailPage(store, refresh) {
  ask(refresh);
  const set = (name) => (event) => {
    asked[name] = Number(event.target.value);
    refresh();
  };
  return html`<h1>How long a batch waits for its longest sample</h1>
    <section class="card">
      <p>A training step starts when its last sample has ended. Lengths are log-normal here, as they about are in practice; an engine decodes all samples at once, and
        each step of it takes the longer, the more samples it has.</p>
      <div class="sliders">${QUESTIONS.map(([name, words, least, most, step, show]) => html`<label>${words}<output>${show(asked[name])}</output>
        <input type="range" name=${name} min=${least} max=${most} step=${step} .value=${String(asked[name])} @input=${set(name)}></label>`)}</div>
      ${state.error ? html`<p class="bad" role="alert">${state.error}</p>` : nothing}
    </section>
    ${state.said ? answer(state.said) : html`<p class="empty">Asking the console…</p>`}`;
}

function answer(said) {
  const { plain, patched } = said;
  const has_patch = said.asked.cap_percentile < 1 || said.asked.oversample > 1;
  const rows = [
    ["makespan", (t) => seconds(t.makespan_s)],
    ["straggler tax: longest over mean, less 1", (t) => share(t.tax)],
    ["share of the makespan for the last tenth", (t) => share(t.last_tenth)],
    ["utilization of the batch's places", (t) => share(t.utilization)],
    ["sampled tokens", (t) => number(t.tokens)],
    ["kept fraction", (t) => share(t.kept.value)],
  ];
  const columns = [["", "", ([words]) => words], ["as it is", "n", ([, of]) => of(plain)], ...(has_patch ? [["with cap and more samples", "n", ([, of]) => of(patched)]] : [])];
  const most_s = Math.max(plain.makespan_s, patched.makespan_s);
  return html`${figures([
      ["Longest of K, by the formula", `${number(said.formula, 2)} means`, "exp(s √(2 ln K) − s²/2), s² = ln(1 + c²)"],
      ["Longest of K, on average", `${number(said.expected, 2)} means`, "the exact mean of the maximum"],
      ["Makespan", seconds(patched.makespan_s), has_patch ? `${seconds(plain.makespan_s)} as it is` : "of this draw"],
      ["Straggler tax", share(patched.tax), has_patch ? `${share(plain.tax)} as it is` : "longest over mean, less 1"],
      ["Cap", said.cap_tokens === null ? "none" : `${number(said.cap_tokens)} tokens`, `${number(patched.how.filter((how) => how === 2).length)} samples are cut`],
      ["Kept", share(patched.kept.value), patched.kept.verdict],
    ])}
    <section class="card"><h2>Each sample, the first to end first</h2>${chart("as it is", plain, most_s)}${has_patch ? chart("with cap and more samples", patched, most_s) : nothing}
      <ul class="legend"><li class="decode">trained</li><li class="queue">cut at the cap</li><li class="control">aborted: its prompt had enough</li></ul></section>
    <section class="card">${table(columns, rows, "Figures of the draw", "")}</section>`;
}

function chart(words, tail, most_s) {
  const wide = 400 / tail.ends_s.length;
  const kinds = ["k-decode", "k-control", "k-queue"];
  const bars = tail.ends_s.map((end, at) => {
    const height = (96 * end) / most_s;
    return svg`<rect class=${kinds[tail.how[at]]} x=${at * wide} y=${98 - height} width=${Math.max(wide - (wide > 3 ? 0.6 : 0), 0.2)} height=${height}></rect>`;
  });
  return html`<p class="faint">${words}: ${seconds(tail.makespan_s)}</p><svg class="chart" viewBox="0 0 400 98" preserveAspectRatio="none" role="img"
    aria-label="${tail.ends_s.length} samples, ${words}; the last ends at ${seconds(tail.makespan_s)}">${bars}</svg>`;
}
