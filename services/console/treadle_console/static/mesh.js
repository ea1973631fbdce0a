// The first page: what the mesh does now.
import { html, svg, nothing } from "./vendor/lit-html.js";
import { controlBar, drainButton, unlocked } from "./control.js";
import { bar, clock, figures, number, seconds, share, stateWord, table, trajectoryLink } from "./format.js";
import { rowsOf } from "./gantt.js";
import { gantt } from "./pictures.js";

const MOST_STANDING = 12;
const BANDS = [["below_p10", "below p10", 0.1], ["p10_to_p50", "p10 to p50", 0.4], ["p50_to_p90", "p50 to p90", 0.4], ["above_p90", "above p90", 0.1]];
const WINDOWS = [["0", "all of it"], ["30", "last 30 s"], ["120", "last 2 min"], ["600", "last 10 min"]];
const shown = { rollout: "newest", window_s: "0" };

export function meshPage(store, refresh) {
  const { sections } = store;
  const engines = sections.engines ?? [];
  return html`<h1>The mesh now</h1>
    ${summary(store, engines)}
    <section class="card" aria-labelledby="h-gantt"><h2 id="h-gantt">Trajectories over time</h2>${picture(store, refresh)}</section>
    <section class="card" aria-labelledby="h-engines"><h2 id="h-engines">Engines</h2>${controlBar(store, engines, refresh)}${engineTable(engines, unlocked(store) ? refresh : null)}</section>
    <div class="pair">
      <div>
        <section class="card" aria-labelledby="h-standing"><h2 id="h-standing">Priorities</h2>${standing(store)}</section>
        <section class="card" aria-labelledby="h-plan"><h2 id="h-plan">Plan</h2>${plan(sections.plan)}</section>
        <section class="card" aria-labelledby="h-calibration"><h2 id="h-calibration">Predictor</h2>${calibration(sections.calibration)}</section>
      </div>
      <div>
        <section class="card" aria-labelledby="h-events"><h2 id="h-events">As it happens</h2>${events(store)}</section>
        <section class="card" aria-labelledby="h-jobs"><h2 id="h-jobs">Jobs</h2>${jobs(sections.jobs ?? [])}</section>
        <section class="card" aria-labelledby="h-tools"><h2 id="h-tools">Tools</h2>${tools(store)}</section>
      </div>
    </div>
    ${policy(sections)}`;
}

function summary(store, engines) {
  const open = {};
  let count = 0;
  for (const row of store.rows.values()) {
    if (row.closed_ms) continue;
    open[row.state] = (open[row.state] ?? 0) + 1;
    count += 1;
  }
  const healthy = engines.filter((each) => each.healthy && !each.paused && !each.draining).length;
  const step = store.newest();
  const ended = [...store.rollouts.values()].filter((each) => each.tail_ms !== null && each.closed === each.trajectories);
  const last = ended.sort((a, b) => a.last_ms - b.last_ms).at(-1);
  const kept = [...store.rollouts.values()].filter((each) => each.shaping).sort((a, b) => a.last_ms - b.last_ms).at(-1);
  const { plan } = store.sections;
  const sum = (name) => engines.reduce((total, each) => total + each[name], 0);
  const states = Object.entries(open).map(([state, each]) => `${number(each)} ${state}`).join(", ");
  return figures([
    ["Engines", `${healthy} of ${engines.length}`, "healthy, not paused, not drained"],
    ["Open trajectories", number(count), states || "none"],
    ["Steps", `${number(sum("running"))} run`, `${number(sum("waiting"))} wait at engines`],
    ["Decode", `${number(sum("tokens_per_s"))} tok/s`, "all engines"],
    ["Ended", step ? `${number(step.closed)} of ${number(step.trajectories)}` : "–", step ? `of ${step.id || "no rollout"}` : ""],
    ["Straggler tax", last ? share(last.tail_ms / last.lasted_ms) : "–", last ? `last tenth of ${last.id || "no rollout"}` : "no rollout has ended"],
    ["Kept", kept ? share(kept.shaping.kept_fraction) : "–", kept ? `${number(kept.shaping.trained)} of ${number(kept.shaping.sampled)} sampled` : "no samples are handed in"],
    ["Plan", plan ? seconds(plan.makespan_s) : "–", plan ? `bound ${seconds(plan.bound_s)}` : "none yet"],
  ]);
}

function picture(store, refresh) {
  const steps = store.steps().reverse();
  const newest = steps[0]?.id ?? null;
  const chosen = shown.rollout === "newest" ? newest : shown.rollout === "all" ? null : shown.rollout;
  const window_ms = 1000 * Number(shown.window_s);
  const of = chosen === null ? null : store.rollouts.get(chosen);
  const running = !of || of.closed < of.trajectories;
  const until_ms = running ? store.now() : of.last_ms;
  let rows = rowsOf(store, chosen, window_ms ? until_ms - window_ms : 0);
  if (chosen === null && !window_ms) rows = rows.slice(-20000);
  const first_ms = rows.reduce((least, row) => Math.min(least, row.opened_ms), until_ms);
  const from_ms = window_ms ? Math.max(until_ms - window_ms, first_ms) : first_ms;
  const set = (name) => (event) => {
    shown[name] = event.target.value;
    refresh();
  };
  const option = ([value, words], selected) => html`<option value=${value} .selected=${value === selected}>${words}</option>`;
  const choices = [["newest", "the newest rollout"], ["all", "all rollouts"], ...steps.map((each) => [each.id, each.id || "no rollout"])];
  return html`<div class="controls">
      <label>Show <select id="gantt-rollout" @change=${set("rollout")}>${choices.map((each) => option(each, shown.rollout))}</select></label>
      <label>Time <select id="gantt-window" @change=${set("window_s")}>${WINDOWS.map((each) => option(each, shown.window_s))}</select></label>
      <span class="faint">A line is a trajectory, in the order of ending. <a href="#/trajectories">The same as a list</a></span>
    </div>
    ${rows.length ? gantt(store, "mesh", rows, from_ms, until_ms) : html`<p class="empty">No trajectory has been opened. They appear here as clients open them.</p>`}`;
}

function health(engine) {
  if (!engine.measured) return html`<span class="faint">no load yet</span>`;
  if (!engine.healthy) return html`<span class="bad">does not generate</span>`;
  if (engine.draining) return html`<span class="faint">${engine.empty ? "drained, empty" : `drains, ${number(engine.trajectories)} left`}${engine.paused ? ", paused" : ""}</span>`;
  if (engine.asleep.length) return html`<span class="faint">asleep: ${engine.asleep.join(", ")}</span>`;
  return engine.paused ? html`<span class="bad">paused</span>` : html`<span class="good">healthy</span>`;
}

// refresh: to change engines; null where nobody may.
function engineTable(engines, refresh) {
  const columns = [
    ["engine", "", (e) => html`<strong>${e.id}</strong> <span class="faint">${e.tags.join(" ")}</span>`],
    ["health", "", health],
    ["batch", "nowrap", (e) => html`${bar([["k-decode", e.running]], `${e.running} of ${e.slots} slots`, { whole: e.slots })}${e.running} of ${e.slots}`],
    ["queue", "n", (e) => number(e.waiting)],
    ["oldest wait", "n", (e) => seconds(e.oldest_wait_s)],
    ["KV", "nowrap", (e) => html`${bar([["fill", e.kv_used]], `${number(e.kv_used)} of ${number(e.kv_capacity)} tokens`, { whole: e.kv_capacity })}${e.kv_capacity ? share(e.kv_used / e.kv_capacity) : "unknown"}`],
    ["tok/s", "n", (e) => number(e.tokens_per_s)],
    ["trajectories", "n", (e) => number(e.trajectories)],
    ["weights", "", (e) => e.version],
    ["model", "", (e) => html`${e.model} <span class="faint">${e.accelerators > 1 ? `on ${e.accelerators} accelerators` : ""}</span>`],
  ];
  if (refresh) columns.push(["drain", "nowrap", (e) => drainButton(e, refresh)]);
  return table(columns, engines, "Engines", "No engine is registered. A sidecar registers its engine when it starts.");
}

function standing(store) {
  const open = [];
  for (const row of store.rows.values()) if (!row.closed_ms && row.priority !== null) open.push(row);
  open.sort((a, b) => b.priority - a.priority);
  const columns = [
    ["trajectory", "", (row) => html`<a href=${trajectoryLink(row.id)}>${row.prompt || row.id} #${row.sample}</a>`],
    ["priority", "n", (row) => number(row.priority, 2)],
    ["state", "", stateWord],
    ["tokens left", "n", (row) => (row.predicted ? html`${number(row.predicted[1])} <span class="faint">${number(row.predicted[0])}–${number(row.predicted[2])}</span>` : "–")],
    ["engine", "", (row) => store.engineName(row.engine)],
  ];
  const words = open.length > MOST_STANDING ? html`<p class="faint">The highest ${MOST_STANDING} of ${number(open.length)} open ones.</p>` : nothing;
  return html`${table(columns, open.slice(0, MOST_STANDING), "Open trajectories by priority", "No open trajectory has a priority.")}${words}`;
}

function events(store) {
  if (!store.events.length) return html`<p class="empty">Nothing yet: preemptions, moves, engines, pauses, drains, weights and settled groups appear here.</p>`;
  const newest = store.events.slice(-60).reverse();
  return html`<ul class="events" tabindex="0" aria-label="Events, the newest first">${newest.map((each) => {
    const row = each.row < 0 ? null : store.rows.get(each.row);
    const about = row ? html`<a href=${trajectoryLink(row.id)}>${each.about}</a>` : html`<strong>${each.about}</strong>`;
    return html`<li><span class="faint">${clock(each.at_ms)}</span><span><span class="tag">${each.kind}</span></span><span>${about} ${each.words}</span></li>`;
  })}</ul>`;
}

function plan(made) {
  if (!made) return html`<p class="empty">No plan yet. The scheduler asks for one as trajectories open and end.</p>`;
  const most = Math.max(...made.engines.map((each) => each.predicted_s), 0.001);
  const gap = made.bound_s > 0 ? made.makespan_s / made.bound_s - 1 : null;
  const columns = [
    ["engine", "", (e) => e.id],
    ["trajectories", "n", (e) => number(e.trajectories)],
    ["ends in", "n", (e) => seconds(e.predicted_s)],
    ["", "", (e) => bar([["k-decode", e.predicted_s]], seconds(e.predicted_s), { whole: most, mark: made.bound_s })],
  ];
  return html`<p>The last of ${number(made.trajectories)} trajectories ends in <strong>${seconds(made.makespan_s)}</strong>; no plan of these engines can end
      before <strong>${seconds(made.bound_s)}</strong>${gap === null ? nothing : html` (gap ${share(gap)})`}. <span class="faint">Solved in ${number(1000 * made.solve_s, 1)} ms,
      at ${clock(made.at_ms)}.</span></p>
    ${table(columns, made.engines, "The plan by engine", "")}
    ${planLines(made.history)}`;
}

function planLines(history) {
  if (history.length < 3) return nothing;
  const most = Math.max(...history.map((each) => each.makespan_s), 0.001);
  const first = history[0].at_ms;
  const span = Math.max(history.at(-1).at_ms - first, 1);
  const points = (name) => history.map((each) => `${(300 * (each.at_ms - first)) / span},${58 - (54 * each[name]) / most}`).join(" ");
  return html`<svg class="chart" viewBox="0 0 300 60" preserveAspectRatio="none" role="img" aria-label="Predicted makespan and bound of the last ${history.length} plans">
      ${svg`<line x1="0" y1="58" x2="300" y2="58"></line><polyline class="makespan" points=${points("makespan_s")} vector-effect="non-scaling-stroke"></polyline><polyline class="bound" points=${points("bound_s")} vector-effect="non-scaling-stroke"></polyline>`}
    </svg><ul class="legend"><li class="decode">predicted makespan, ${history.length} plans</li><li class="tool">bound</li></ul>`;
}

function calibration(bands) {
  const total = bands ? Object.values(bands).reduce((sum, each) => sum + each, 0) : 0;
  if (!total) return html`<p class="empty">No trajectory with a prediction before its first step has come to its own end.</p>`;
  const columns = [
    ["where the length lay", "", ([, words]) => words],
    ["share", "n", ([name]) => share(bands[name] / total)],
    ["expected", "n", ([, , expected]) => share(expected)],
    ["", "", ([name, words, expected]) => bar([["fill", bands[name]]], `${words}: ${share(bands[name] / total)}, expected ${share(expected)}`, { whole: total, mark: expected * total })],
  ];
  return html`${table(columns, BANDS, "Calibration of first predictions", "")}<p class="faint">${number(total)} trajectories; the mark is what a calibrated predictor has.</p>`;
}

function jobs(list) {
  const columns = [
    ["job", "", (j) => j.job || "without a name"],
    ["weight", "n", (j) => number(j.weight, 1)],
    ["share now", "n", (j) => share(j.share)],
    ["", "", (j) => bar([["fill", j.share]], share(j.share), { whole: 1 })],
    ["tickets", "n", (j) => number(j.live_tickets)],
    ["open", "n", (j) => number(j.open_trajectories)],
    ["wait", "n", (j) => number(j.waiting_steps)],
    ["KV tokens", "n", (j) => number(j.kv_tokens)],
  ];
  return table(columns, list, "Jobs", "No client holds a job.");
}

function tools(store) {
  const columns = [
    ["tool", "", (t) => t.name],
    ["calls", "n", (t) => number(t.calls)],
    ["running", "n", (t) => number(t.running)],
    ["failed", "n", (t) => (t.failed ? html`<span class="bad">${number(t.failed)}</span>` : "0")],
    ["mean", "n", (t) => seconds(t.calls ? (t.queue_s + t.overhead_s + t.execution_s) / t.calls : null)],
    ["its time", "", (t) => bar([["k-queue", t.queue_s, "queue"], ["k-control", t.overhead_s, "overhead"], ["k-tool", t.execution_s, "execution"]],
      `queue ${seconds(t.queue_s)}, overhead ${seconds(t.overhead_s)}, execution ${seconds(t.execution_s)}`)],
  ];
  const list = [...store.tools.values()].sort((a, b) => b.execution_s - a.execution_s);
  const { resources } = store.sections;
  const amount = (r, value) => (r.dimension.endsWith("bytes") ? `${number(value / 1e9, 1)} GB` : number(value));
  const used = [
    ["resource", "", (r) => r.dimension],
    ["held", "n", (r) => `${amount(r, r.held)} of ${amount(r, r.capacity)}`],
    ["", "", (r) => bar([["fill", r.held]], `${amount(r, r.held)} of ${amount(r, r.capacity)}`, { whole: r.capacity })],
    ["wait", "n", (r) => number(r.waiting)],
  ];
  return html`${table(columns, list, "Tools", "No tool of the mesh has been called.")}
    ${resources?.resources.length ? table(used, resources.resources, "Resources of the tools service", "") : nothing}
    ${list.length ? html`<ul class="legend"><li class="queue">queue</li><li class="control">overhead</li><li class="tool">execution</li></ul>` : nothing}`;
}

function policy(sections) {
  const said = sections.policy;
  if (!said) return nothing;
  const on = ["migrate", "preempt", "reserve"].filter((name) => said[name]).join(", ") || "nothing more";
  const words = (text) => text.replaceAll("_", " ");
  const { weights } = sections;
  return html`<p class="faint">Policy: ${words(said.ordering)}, ${words(said.objective)}, placement ${words(said.placement)}; ${on}.
    ${weights?.version ? html`Desired weights: ${weights.version}.` : nothing}</p>`;
}
