// Training step by step: a row for each rollout, and two of them side by side.
import { html, svg, nothing } from "./vendor/lit-html.js";
import { PARTS, clock, ledgerBar, legend, number, seconds, share, table } from "./format.js";
import { rowsOf } from "./gantt.js";
import { gantt } from "./pictures.js";

const chosen = new Set();

const compareLink = (ids) => `#/compare/${ids.map(encodeURIComponent).join("/")}`;
const tax = (step) => (step.tail_ms === null || !step.lasted_ms ? null : step.tail_ms / step.lasted_ms);

export function stepsPage(store, refresh) {
  const steps = store.steps();
  const newest = [...steps].reverse();
  const choose = (id) => (event) => {
    if (event.target.checked) chosen.add(id);
    else chosen.delete(id);
    while (chosen.size > 2) chosen.delete(chosen.values().next().value);
    refresh();
  };
  const columns = [
    ["compare", "", (s) => html`<input type="checkbox" aria-label="Compare ${s.id || "no rollout"}" .checked=${chosen.has(s.id)} @change=${choose(s.id)}>`],
    ["rollout", "", (s) => html`<strong>${s.id || "no rollout"}</strong> <span class="faint">${clock(s.began_ms)}</span>`],
    ["weights", "", (s) => s.version || "–"],
    ["ended", "n", (s) => `${number(s.closed)} of ${number(s.trajectories)}`],
    ["makespan", "n", (s) => seconds(s.lasted_ms / 1000)],
    ["straggler tax", "n", (s) => share(tax(s))],
    ["kept", "n", (s) => share(s.shaping?.kept_fraction)],
    ["tokens", "n", (s) => number(s.tokens)],
    ["preempted", "n", (s) => number(s.preemptions)],
    ["moved", "n", (s) => number(s.moves)],
    ["where the time went", "", (s) => ledgerBar(s.ledger_s)],
  ];
  const pair = [...chosen].filter((id) => store.rollouts.has(id));
  return html`<h1>Training step by step</h1>
    <section class="card" aria-labelledby="h-trend"><h2 id="h-trend">Makespan of each step</h2>${trend(steps)}</section>
    <section class="card" aria-labelledby="h-steps"><h2 id="h-steps">Rollouts</h2>
      <p>${pair.length === 2 ? html`<a id="compare" href=${compareLink(pair)}>Compare the two side by side</a>` : html`<span class="faint">Choose two to see them side by side.</span>`}</p>
      ${table(columns, newest, "Rollouts", "No rollout has begun. Each rollout of a client is a line here.")}
      ${legend(PARTS)}
      <p class="faint">The straggler tax is the share of the makespan after nine tenths of the trajectories had ended.</p>
      ${alarms(newest)}
    </section>`;
}

function alarms(steps) {
  const said = steps.flatMap((step) => (step.shaping?.alarms ?? []).map((words) => [step.id, words]));
  return said.length ? html`<ul>${said.slice(0, 10).map(([id, words]) => html`<li class="bad">${id}: ${words}</li>`)}</ul>` : nothing;
}

function trend(steps) {
  const ended = steps.filter((step) => step.lasted_ms > 0).slice(-40);
  if (!ended.length) return html`<p class="empty">No step has a length yet.</p>`;
  const most = Math.max(...ended.map((step) => step.lasted_ms));
  const wide = 400 / Math.max(ended.length, 12);
  const bars = ended.map((step, at) => {
    const all = (92 * step.lasted_ms) / most;
    const tail = (92 * (step.tail_ms ?? 0)) / most;
    return svg`<rect class="k-decode" x=${at * wide + 1} y=${96 - all + tail} width=${wide - 2} height=${all - tail}></rect>
      <rect class="k-queue" x=${at * wide + 1} y=${96 - all} width=${wide - 2} height=${tail}><title>${step.id}: ${seconds(step.lasted_ms / 1000)}, tail ${share(tax(step))}</title></rect>`;
  });
  const words = ended.map((step) => `${step.id || "no rollout"} ${seconds(step.lasted_ms / 1000)}`).join(", ");
  return html`<svg class="chart" viewBox="0 0 400 100" preserveAspectRatio="none" role="img" aria-label=${words}>${bars}</svg>
    <ul class="legend"><li class="decode">until nine tenths had ended (longest: ${seconds(most / 1000)})</li><li class="queue">the last tenth</li></ul>`;
}

const COMPARED = [
  ["trajectories", (s) => s.trajectories, number, 0],
  ["makespan", (s) => s.lasted_ms / 1000, seconds, -1],
  ["straggler tax", tax, share, -1],
  ["mean trajectory ends at", (s) => (s.mean_end_ms === null ? null : s.mean_end_ms / 1000), seconds, -1],
  ["tokens", (s) => s.tokens, number, 0],
  ["tokens per second", (s) => (s.lasted_ms ? (1000 * s.tokens) / s.lasted_ms : null), number, 1],
  ["kept fraction", (s) => s.shaping?.kept_fraction ?? null, share, 0],
  ["failed", (s) => s.outcomes.failed ?? 0, number, -1],
  ["preemptions", (s) => s.preemptions, number, 0],
  ["moves", (s) => s.moves, number, 0],
];

export function comparePage(store, refresh, ids) {
  const pair = ids.map((id) => store.rollouts.get(id));
  const missing = ids.filter((id) => !store.rollouts.has(id));
  if (ids.length !== 2 || missing.length) {
    return html`<h1>Side by side</h1><p class="bad">${missing.length ? `The console knows no rollout ${missing.join(", ")}.` : "Two rollouts are needed."}</p><p><a href="#/steps">Choose two</a></p>`;
  }
  const [one, other] = pair;
  const change = ([, of, , better]) => {
    const [a, b] = [of(one), of(other)];
    if (a === null || b === null || !a) return "";
    const by = b / a - 1;
    const words = `${by > 0 ? "+" : ""}${number(100 * by)} %`;
    return Math.abs(by) < 0.02 || !better ? words : html`<span class=${by * better > 0 ? "good" : "bad"}>${words} ${by * better > 0 ? "better" : "worse"}</span>`;
  };
  const mean_s = (step, part) => (step.closed ? (step.ledger_s[part] ?? 0) / step.closed : null);
  const name = (step) => step.id || "no rollout";
  const parts = PARTS.map((part) => [`${part}, seconds a trajectory`, (step) => mean_s(step, part), (value) => number(value, 3), part === "decode" || part === "tool" ? 0 : -1]);
  const columns = [["", "", ([words]) => words], [name(one), "n long", ([, of, show]) => show(of(one))], [name(other), "n long", ([, of, show]) => show(of(other))], ["change", "n", change]];
  const longest_ms = Math.max(one.lasted_ms, other.lasted_ms, 1);
  return html`<p><a href="#/steps">All steps</a></p><h1>${name(one)} and ${name(other)}</h1>
    <div class="pair">${pair.map((step, at) => html`<section class="card" aria-label=${name(step)}><h2>${name(step)}: ${seconds(step.lasted_ms / 1000)}</h2>
      ${gantt(store, `side-${at}`, rowsOf(store, step.id), step.began_ms, step.began_ms + longest_ms, "half")}</section>`)}</div>
    <section class="card">${table(columns, [...COMPARED, ...parts], "Figures of both", "")}
      <p class="faint">Both pictures have the same axis of time. Two rollouts differ by chance too: compare several before you decide.</p></section>`;
}
