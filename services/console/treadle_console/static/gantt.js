// The picture of trajectories over time, on a canvas: a line each, in the order in which they ended, the open ones last.
import { KINDS } from "./store.js";

const LEFT = 54; // pixels for the engine's or row's label
const BOTTOM = 22; // for the axis
const LEAST_ROW = 1;
const MOST_ROW = 26;
const TICKS = 6;

function niceStep(span_s) {
  const rough = span_s / TICKS;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough) ?? 10 * power;
}

// rows: those to draw. from_ms, until_ms: the time that is shown. Returns the height of a row, in CSS pixels.
export function drawGantt(canvas, store, rows, from_ms, until_ms) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (!width || !height) return 0;
  if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
  if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
  const style = getComputedStyle(canvas);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const ctx = canvas.getContext("2d", { alpha: false });
  ctx.setTransform(scale, 0, 0, scale, 0, 0);
  ctx.fillStyle = colour("panel");
  ctx.fillRect(0, 0, width, height);
  ctx.font = `12px ${style.fontFamily}`;
  const room = height - BOTTOM;
  const tall = Math.min(MOST_ROW, room / Math.max(rows.length, 1));
  const thick = Math.max(LEAST_ROW, tall > 4 ? tall - 2 : tall);
  const span_ms = Math.max(until_ms - from_ms, 1); // the clock of the facts may be before this one
  const perMs = (width - LEFT) / span_ms;
  const x = (ms) => LEFT + (ms - from_ms) * perMs;

  ctx.strokeStyle = colour("line");
  ctx.fillStyle = colour("faint");
  ctx.lineWidth = 1;
  ctx.textAlign = "center";
  const step_s = niceStep(span_ms / 1000);
  for (let at_s = 0; at_s * 1000 <= span_ms; at_s += step_s) {
    const at = Math.round(x(from_ms + at_s * 1000)) + 0.5;
    ctx.beginPath();
    ctx.moveTo(at, 0);
    ctx.lineTo(at, room);
    ctx.stroke();
    ctx.fillText(`${Number(at_s.toFixed(2))} s`, Math.min(at, width - 16), height - 7);
  }
  if (tall >= 13) {
    ctx.textAlign = "right";
    rows.forEach((row, at) => ctx.fillText(`#${row.n}`, LEFT - 6, at * tall + tall / 2 + 4));
  } else if (rows.length) {
    ctx.textAlign = "right";
    ctx.fillText("1", LEFT - 6, 10);
    ctx.fillText(String(rows.length), LEFT - 6, Math.min(room, rows.length * tall));
  }

  // The place of each row, or -1.
  const places = new Int32Array(maxNumber(store) + 1 - store.floor).fill(-1);
  rows.forEach((row, at) => (places[row.n - store.floor] = at));
  const { spans } = store;
  ctx.save();
  ctx.beginPath();
  ctx.rect(LEFT, 0, width - LEFT, room);
  ctx.clip();
  ctx.fillStyle = colour("rest");
  const line = Math.max(thick / 4, LEAST_ROW);
  rows.forEach((row, at) => ctx.fillRect(x(row.opened_ms), at * tall + (thick - line) / 2, ((row.closed_ms || store.now()) - row.opened_ms) * perMs, line));
  for (let kind = 0; kind < KINDS.length; kind += 1) {
    ctx.fillStyle = colour(KINDS[kind]);
    const inset = KINDS[kind] === "move" ? thick / 3 : 0; // a move runs beside a tool
    for (let at = 0; at < spans.length; at += 1) {
      if (spans.kind[at] !== kind) continue;
      const place = spans.row[at] < store.floor ? -1 : places[spans.row[at] - store.floor];
      if (place === undefined || place < 0) continue;
      const start = spans.start[at];
      if (start > until_ms || start + spans.last[at] < from_ms) continue;
      ctx.fillRect(x(start), place * tall + inset, Math.max(spans.last[at] * perMs, 0.6), thick - 2 * inset);
    }
    rows.forEach((row, at) => {
      if (store.live(row) === kind) ctx.fillRect(x(row.since_ms), at * tall, Math.max((store.now() - row.since_ms) * perMs, 1), thick);
    });
  }
  ctx.restore();
  return tall;
}

function maxNumber(store) {
  let most = store.floor;
  for (const number of store.rows.keys()) if (number > most) most = number;
  return most;
}

// Trajectories of a rollout (of all where it is null) that are open or have ended since then, the first to end first.
export function rowsOf(store, rollout, since_ms = 0) {
  const found = [];
  for (const row of store.rows.values()) {
    if ((rollout === null || row.rollout === rollout) && (!row.closed_ms || row.closed_ms >= since_ms)) found.push(row);
  }
  const end = (row) => row.closed_ms || Infinity;
  return found.sort((a, b) => (end(a) === end(b) ? a.n - b.n : end(a) - end(b)));
}

// The row under a place of the picture, and what it did there.
export function findAt(canvas, store, rows, tall, from_ms, until_ms, event) {
  const box = canvas.getBoundingClientRect();
  const row = rows[Math.floor((event.clientY - box.top) / tall)];
  if (!row || event.clientX - box.left < LEFT) return null;
  const at_ms = from_ms + ((event.clientX - box.left - LEFT) / (box.width - LEFT)) * (until_ms - from_ms);
  for (let at = store.spans.length - 1; at >= 0; at -= 1) {
    if (store.spans.row[at] !== row.n) continue;
    if (at_ms >= store.spans.start[at] && at_ms <= store.spans.start[at] + store.spans.last[at]) {
      return { row, at_ms, kind: KINDS[store.spans.kind[at]], last_ms: store.spans.last[at], engine: store.engineName(store.spans.engine[at]) };
    }
  }
  const kind = store.live(row);
  if (kind >= 0 && at_ms >= row.since_ms && at_ms <= store.now()) {
    return { row, at_ms, kind: KINDS[kind], last_ms: store.now() - row.since_ms, engine: store.engineName(row.engine) };
  }
  return { row, at_ms, kind: "", last_ms: 0, engine: "" };
}
