// A picture of trajectories as a part of a page: the canvas, what is under the pointer, and its legend.
import { html, nothing } from "./vendor/lit-html.js";
import { legend, seconds, stateWord, trajectoryLink } from "./format.js";
import { drawGantt, findAt } from "./gantt.js";
import { KINDS } from "./store.js";

const LOOK_EVERY_MS = 100; // each look draws the page again
let under = null; // what is under the pointer: {canvas name, words}
let looked_ms = 0;
let refresh = () => {};

export function onPointer(render) {
  refresh = render;
}

// name: of this picture on its page. rows, from_ms, until_ms: as in drawGantt. size: "", "half" or "small".
export function gantt(store, name, rows, from_ms, until_ms, size = "") {
  const open = rows.filter((row) => !row.closed_ms).length;
  const words = `${rows.length} trajectories over ${seconds((until_ms - from_ms) / 1000)}, ${open} of them open`;
  const find = (event) => {
    const canvas = event.currentTarget;
    return findAt(canvas, store, rows, canvas.rowHeight, from_ms, until_ms, event);
  };
  const move = (event) => {
    if (Date.now() - looked_ms < LOOK_EVERY_MS) return;
    looked_ms = Date.now();
    const found = find(event);
    under = found && { name, words: describe(found, from_ms) };
    refresh();
  };
  const leave = () => {
    under = null;
    refresh();
  };
  const open_page = (event) => {
    const found = find(event);
    if (found) window.location.hash = trajectoryLink(found.row.id);
  };
  return html`<div class="gantt ${size}">
      <canvas role="img" aria-label=${words} data-rows=${rows.length} .picture=${{ rows, from_ms, until_ms }}
        @pointermove=${move} @pointerleave=${leave} @click=${open_page}></canvas>
      ${under && under.name === name ? html`<div class="tip">${under.words}</div>` : nothing}
    </div>
    ${size === "small" ? nothing : legend([...KINDS, "open"])}`;
}

function describe(found, from_ms) {
  const { row, at_ms, kind, last_ms, engine } = found;
  const doing = kind ? `${kind} ${seconds(last_ms / 1000)}${engine ? ` on ${engine}` : ""}` : row.closed_ms && at_ms > row.closed_ms ? "over" : "open, between steps or held";
  return `${row.prompt || row.id} #${row.sample}, at ${seconds((at_ms - from_ms) / 1000)}: ${doing}. ${row.tokens} tokens, ${stateWord(row)}`;
}

// Draws every picture that is on the page.
export function paint(store) {
  for (const canvas of document.querySelectorAll(".gantt canvas")) {
    const { rows, from_ms, until_ms } = canvas.picture;
    canvas.rowHeight = drawGantt(canvas, store, rows, from_ms, until_ms);
  }
}
