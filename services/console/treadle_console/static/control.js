// Pause, resume and drain, for whoever has typed the key. The key stays in this variable: it is in no storage, cookie or
// address, and a page that is loaded again asks for it again.
import { html, nothing } from "./vendor/lit-html.js";
import { number } from "./format.js";

const state = { key: "", busy: "", said: "", bad: false };

const offered = (store) => Boolean(store.sections.control?.offered);

export const unlocked = (store) => offered(store) && state.key !== "";

async function send(key, action, engine = "") {
  const response = await fetch("/api/control", {
    method: "POST",
    headers: { "Content-Type": "application/json", Authorization: `Bearer ${key}` },
    body: JSON.stringify({ action, engine }),
  });
  const answer = await response.json();
  if (response.status === 401) state.key = "";
  if (!response.ok) throw new Error(answer.error);
  const errors = Object.entries(answer.errors).map(([id, error]) => `${id}: ${error}`);
  if (errors.length) throw new Error(errors.join("; "));
}

async function unlock(event, refresh) {
  event.preventDefault();
  if (state.busy) return;
  const key = new FormData(event.target).get("key").trim();
  await attempt("checking the key", "The key is right.", () => send(key, "check").then(() => { state.key = key; }), refresh);
  focusControl();
}

// What had the focus is gone once the page is drawn.
const focusControl = () => requestAnimationFrame(() => document.querySelector(state.key ? "#control button" : "#key")?.focus());

// Say what is done, do it, and say how it ended.
async function attempt(doing, done, act, refresh) {
  Object.assign(state, { busy: doing, said: `${doing}…`, bad: false });
  refresh();
  try {
    await act();
    state.said = done;
  } catch (error) {
    Object.assign(state, { said: `Not done: ${error.message}`, bad: true });
  }
  state.busy = "";
  refresh();
}

// Ask in a dialog; what the mesh named is text there too.
function confirm(title, words, yes) {
  const dialog = document.getElementById("confirm");
  document.getElementById("confirm-title").textContent = title;
  document.getElementById("confirm-words").textContent = words;
  document.getElementById("confirm-yes").textContent = yes;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

const asked = (action, engine, [title, words, yes], doing, done, refresh) => async () => {
  if (state.busy) return; // the button keeps the focus meanwhile
  if (await confirm(title, words, yes)) await attempt(doing, done, () => send(state.key, action, engine), refresh);
};

export function controlBar(store, engines, refresh) {
  if (!offered(store)) return nothing;
  const many = engines.length === 1 ? "the engine" : `all ${number(engines.length)} engines`;
  const pause = asked("pause", "", [`Pause ${many}?`, "Running steps stop and keep their tokens. Nothing is generated until you resume, or a trainer does.", "Pause"],
    `pausing ${many}`, "All engines are paused.", refresh);
  const resume = asked("resume", "", [`Resume ${many}?`, "Steps go on where they stopped. A trainer that has paused the engines to change weights may still need them paused.", "Resume"],
    `resuming ${many}`, "All engines generate again.", refresh);
  const forget = () => {
    Object.assign(state, { key: "", said: "The key is forgotten.", bad: false });
    refresh();
    focusControl();
  };
  return html`<div id="control" class="controls" role="group" aria-label="Control">
      ${state.key ? html`<button type="button" aria-disabled=${state.busy !== ""} @click=${pause}>Pause ${many}</button>
          <button type="button" aria-disabled=${state.busy !== ""} @click=${resume}>Resume ${many}</button>
          <button type="button" @click=${forget}>Forget the key</button>`
        : html`<form class="controls" @submit=${(event) => unlock(event, refresh)}>
          <label>Control key <input id="key" name="key" type="password" autocomplete="off" required></label>
          <button type="submit" aria-disabled=${state.busy !== ""}>Unlock pause and drain</button></form>`}
      <span id="control-said" role="status" class=${state.bad ? "bad" : "faint"}>${state.said}</span>
    </div>`;
}

export function drainButton(engine, refresh) {
  const { id, draining } = engine;
  const drain = asked("drain", id, [`Drain ${id}?`, `It gets no more steps, and its ${number(engine.trajectories)} trajectories go on at other engines. What runs there ends there.`, "Drain"],
    `draining ${id}`, `${id} gets no more steps.`, refresh);
  const undo = asked("undrain", id, [`Use ${id} again?`, "New steps and trajectories go there.", "Use again"],
    `ending the drain of ${id}`, `${id} takes steps again.`, refresh);
  return html`<button type="button" aria-disabled=${state.busy !== ""} aria-label=${draining ? `Use ${id} again` : `Drain ${id}`} @click=${draining ? undo : drain}>${draining ? "Use again" : "Drain"}</button>`;
}
