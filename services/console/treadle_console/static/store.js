// What the console has told this page: rows of trajectories, their spans in typed arrays, and everything else by name.
export const KINDS = ["queue", "prefill", "decode", "preempted", "tool", "move"];
const MOST_SPANS = 400000; // 10 MB; beyond, the oldest quarter goes
const MOST_EVENTS = 200;
const MOST_ROLLOUTS = 200; // as many of both as the console keeps
const MOST_TOOLS = 200;
const LIVE = { queued: 0, running: 2, preempted: 3, tool: 4 }; // the kind of span that a state becomes

class Spans {
  constructor() {
    this.length = 0;
    this.row = new Int32Array(4096);
    this.kind = new Uint8Array(4096);
    this.engine = new Int32Array(4096);
    this.start = new Float64Array(4096);
    this.last = new Float64Array(4096);
  }

  add(columns) {
    const more = columns.row.length;
    if (this.length + more > MOST_SPANS) this.forget(Math.max(MOST_SPANS / 4, this.length + more - MOST_SPANS));
    let room = this.row.length;
    while (room < this.length + more) room *= 2;
    for (const name of ["row", "kind", "engine", "start", "last"]) {
      if (room > this[name].length) {
        const larger = new this[name].constructor(room);
        larger.set(this[name].subarray(0, this.length));
        this[name] = larger;
      }
      this[name].set(columns[name], this.length);
    }
    this.length += more;
  }

  forget(count) {
    const gone = Math.min(count, this.length);
    for (const name of ["row", "kind", "engine", "start", "last"]) this[name].copyWithin(0, gone, this.length);
    this.length -= gone;
  }
}

// changed: the last change first. Beyond `most`, those that changed first go, as in the console.
function putChanged(known, changed, key, most) {
  for (const each of changed.reverse()) {
    known.delete(each[key]);
    known.set(each[key], each);
  }
  for (const name of known.keys()) {
    if (known.size <= most) break;
    known.delete(name);
  }
}

export class Store {
  constructor() {
    this.clear();
    this.ahead_ms = 0; // of the server's clock over this one
  }

  clear() {
    this.rows = new Map();
    this.ids = new Map();
    this.spans = new Spans();
    this.rollouts = new Map();
    this.tools = new Map();
    this.sections = {};
    this.events = [];
    this.floor = 0;
    this.heard_ms = 0;
    this.revision = 0;
  }

  now() {
    return Date.now() + this.ahead_ms;
  }

  apply(message) {
    if (message.reset) this.clear();
    this.revision += 1;
    this.ahead_ms = message.now_ms - Date.now();
    this.heard_ms = message.heard_ms;
    const columns = message.rows;
    const names = Object.keys(columns);
    for (let at = 0; at < columns.n.length; at += 1) {
      const row = {};
      for (const name of names) row[name] = columns[name][at];
      this.rows.set(row.n, row);
      this.ids.set(row.id, row.n);
    }
    for (; this.floor < message.floor; this.floor += 1) {
      const gone = this.rows.get(this.floor);
      if (gone) {
        this.ids.delete(gone.id);
        this.rows.delete(this.floor);
      }
    }
    this.spans.add(message.spans);
    putChanged(this.rollouts, message.rollouts, "id", MOST_ROLLOUTS);
    putChanged(this.tools, message.tools, "name", MOST_TOOLS);
    Object.assign(this.sections, message.sections);
    this.events.push(...message.events);
    this.events.splice(0, this.events.length - MOST_EVENTS);
  }

  engineName(index) {
    return index < 0 ? "" : (this.sections.engine_names?.[index] ?? "");
  }

  live(row) {
    return row.closed_ms || !(row.state in LIVE) ? -1 : LIVE[row.state];
  }

  // Rollouts as training steps, in the order in which they began.
  steps() {
    return [...this.rollouts.values()].sort((a, b) => a.began_ms - b.began_ms);
  }

  newest() {
    return this.steps().at(-1) ?? null;
  }
}
