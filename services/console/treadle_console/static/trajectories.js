// The list of trajectories, and the page of one: its ledger, decisions and steps.
import { html, nothing } from "./vendor/lit-html.js";
import { MEANINGS, PARTS, clock, figures, ledgerBar, legend, number, seconds, share, stateWord, table, trajectoryLink } from "./format.js";
import { gantt } from "./pictures.js";
import { KINDS } from "./store.js";

const MOST_LISTED = 200;
const ASK_EVERY_MS = 2000;
const search = { text: "", open: false };
const asked = { id: "", at_ms: 0, busy: false, said: null, error: "" };

export function listPage(store, refresh) {
  const text = search.text.trim().toLowerCase();
  const found = [];
  for (const row of store.rows.values()) {
    const named = !text || [row.id, row.prompt, row.rollout, row.state].some((each) => each.toLowerCase().includes(text));
    if (named && (!search.open || !row.closed_ms)) found.push(row);
  }
  found.sort((a, b) => b.n - a.n);
  const columns = [
    ["trajectory", "", (row) => html`<a href=${trajectoryLink(row.id)}>${row.id}</a>`],
    ["prompt", "", (row) => `${row.prompt} #${row.sample}`],
    ["rollout", "", (row) => row.rollout],
    ["state", "", stateWord],
    ["engine", "", (row) => store.engineName(row.engine)],
    ["turns", "n", (row) => number(row.turns)],
    ["tokens", "n", (row) => number(row.tokens)],
    ["open for", "n", (row) => seconds(((row.closed_ms || store.now()) - row.opened_ms) / 1000)],
    ["preempted", "n", (row) => number(row.preemptions)],
    ["moved", "n", (row) => number(row.moves)],
  ];
  return html`<h1>Trajectories</h1>
    <section class="card">
      <div class="controls">
        <label>Find <input id="find" type="search" .value=${search.text} placeholder="id, prompt, rollout or state" @input=${(event) => { search.text = event.target.value; refresh(); }}></label>
        <label><input type="checkbox" id="only-open" .checked=${search.open} @change=${(event) => { search.open = event.target.checked; refresh(); }}> open ones only</label>
        <span class="faint" role="status">${number(found.length)} of ${number(store.rows.size)}${found.length > MOST_LISTED ? `, the newest ${MOST_LISTED} are listed` : ""}</span>
      </div>
      ${table(columns, found.slice(0, MOST_LISTED), "Trajectories", store.rows.size ? "None has these words." : "No trajectory has been opened.")}
    </section>`;
}

async function ask(id, refresh) {
  asked.busy = true;
  try {
    const response = await fetch(`/api/trajectory?id=${encodeURIComponent(id)}`);
    const said = await response.json();
    if (asked.id !== id) return;
    asked.said = response.ok ? said : null;
    asked.error = response.ok ? "" : said.error;
  } catch (error) {
    if (asked.id === id) asked.error = `the console does not answer (${error.message})`;
  } finally {
    asked.busy = false;
    asked.at_ms = Date.now();
  }
  refresh();
}

export function trajectoryPage(store, refresh, id) {
  if (asked.id !== id) Object.assign(asked, { id, at_ms: 0, said: null, error: "", busy: false });
  const is_open = !asked.said || asked.said.open;
  if (!asked.busy && (asked.at_ms === 0 || (is_open && Date.now() - asked.at_ms > ASK_EVERY_MS))) ask(id, refresh);
  const row = store.rows.get(store.ids.get(id));
  const { said } = asked;
  return html`<p><a href="#/trajectories">All trajectories</a></p>
    <h1>${id}</h1>
    ${asked.error ? html`<p class="bad">${asked.error}</p>` : nothing}
    ${row ? own(store, row) : nothing}
    ${said ? explained(said) : asked.error ? nothing : html`<p class="empty">Asking the scheduler…</p>`}
    ${said ? html`<p class="faint">How it and its rollout would have ended under other policies is simulated by <code>treadle explain ${id}</code></p>` : nothing}`;
}

function own(store, row) {
  const until_ms = row.closed_ms || store.now();
  return html`<section class="card" aria-labelledby="h-own"><h2 id="h-own">Over time</h2>
      ${gantt(store, "own", [row], row.opened_ms, Math.max(until_ms, row.opened_ms + 1), "small")}
      <p class="faint">Opened at ${clock(row.opened_ms)}; ${row.closed_ms ? `${row.state} at ${clock(row.closed_ms)}` : `${stateWord(row)} since ${clock(row.since_ms)}`}.</p>
      ${legend([...KINDS, "open"])}
    </section>`;
}

function explained(t) {
  const known_s = PARTS.reduce((sum, part) => sum + t.ledger_s[part], 0);
  const parts = [
    ["part", "", ([part]) => part],
    ["seconds", "n", ([, amount]) => number(amount, 3)],
    ["share", "n", ([, amount]) => share(t.wall_s ? amount / t.wall_s : null)],
    ["", "faint", ([, , words]) => words],
  ];
  const left = [["", t.wall_s - known_s, t.open ? "not accounted for yet" : "not measured"]];
  const rows = [...PARTS.map((part) => [part, t.ledger_s[part], MEANINGS[part]]), ...(t.wall_s - known_s > 0.0005 ? left : [])];
  const decisions = [
    ["at", "n", (d) => `${number(d.at_s, 3)} s`],
    ["decision", "nowrap", (d) => html`<span class="tag">${d.kind}</span>`],
    ["engine", "", (d) => d.engine],
    ["why", "", (d) => d.reason],
  ];
  const steps = [
    ["turn", "n", (s) => number(s.turn)],
    ["context", "n", (s) => number(s.context_tokens)],
    ["tokens", "n", (s) => number(s.tokens)],
    ["tool before it", "n", (s) => seconds(s.tool_s)],
  ];
  return html`${figures([
      ["State", t.state, `sample ${t.sample} of ${t.prompt}`],
      ["Engine", t.engine || "–", `${number(t.migrations)} moves`],
      ["Tokens", number(t.tokens), `${number(t.turns)} turns, context ${number(t.context_tokens)}`],
      ["Tokens left", t.open ? number(t.predicted[1]) : "–", t.open ? `${number(t.predicted[0])} to ${number(t.predicted[2])}, by ${t.predicted_by || "no predictor"}` : "it is over"],
      ["Priority", t.open ? number(t.priority, 2) : "–", "higher runs first"],
      ["Wall time", seconds(t.wall_s), t.job ? `job ${t.job}` : "no job"],
    ])}
    <div class="pair">
      <div><section class="card" aria-labelledby="h-ledger"><h2 id="h-ledger">Where its time went</h2>
        ${ledgerBar(t.ledger_s, { whole: Math.max(t.wall_s, known_s), tall: true })}${legend(PARTS.filter((part) => t.ledger_s[part] > 0))}
        ${table(parts, rows, "Ledger", "")}</section>
      <section class="card" aria-labelledby="h-steps"><h2 id="h-steps">Steps</h2>${table(steps, t.steps, "Steps", "No step has ended.")}</section></div>
      <div><section class="card" aria-labelledby="h-decisions"><h2 id="h-decisions">Decisions, the newest last</h2>${table(decisions, t.decisions, "Decisions", "None is known: the scheduler keeps the last ones, and those since its last start.")}</section></div>
    </div>`;
}
