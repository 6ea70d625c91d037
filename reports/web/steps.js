// One step's events as columns, and what can be asked of them. Drawn by raster.js.
"use strict";

const KIND_NAMES = {
  F: "forward",
  f: "forward, keeping only its inputs",
  R: "recompute",
  B: "backward",
  I: "backward of the inputs",
  W: "backward of the weights",
  O: "copy of a graph out of memory",
  L: "copy of a graph back",
  detail: "span",
  other: "span",
};
const FORWARDS = "Ff";
const BACKWARDS = "BI";
const TRACKS = 2;

class Step {
  // `facts` and `bytes` as of reports/page/timeline.py; `lanes` are the attempt's.
  constructor(facts, lanes, bytes) {
    this.facts = facts;
    this.lanes = lanes;
    this.labels = facts.labels.map(([kind, stage, size, what]) => ({ kind, stage, size, what }));
    const reader = new PlaneReader(bytes);
    const counts = reader.read(TRACKS * lanes.length);
    const gaps = reader.read(facts.events);
    const waits = reader.read(facts.events);
    const works = reader.read(facts.events);
    this.label = reader.read(facts.events);
    this.microbatch = reader.read(facts.events);
    this.begin = new Int32Array(facts.events);
    this.ready = new Int32Array(facts.events);
    this.end = new Int32Array(facts.events);
    // The latest end of a track so far: a sorted column, which begins alone are not enough for.
    this.reach = new Int32Array(facts.events);
    this.from = new Int32Array(counts.length + 1);
    let row = 0;
    counts.forEach((count, track) => {
      let now = 0;
      let reach = 0;
      for (const last = row + count; row < last; row++) {
        this.begin[row] = now + gaps[row];
        this.ready[row] = this.begin[row] + waits[row];
        now = this.end[row] = this.ready[row] + works[row];
        reach = this.reach[row] = Math.max(reach, now);
      }
      this.from[track + 1] = row;
    });
  }

  // The first row of a track that ends after `tick`; the track's last one if none does.
  find(track, tick) {
    let low = this.from[track];
    let high = this.from[track + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.reach[middle] > tick) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  // The row of a track nearest to `tick`, if within `slack` of it; else -1.
  pick(track, tick, slack) {
    let best = -1;
    let least = slack;
    const last = this.from[track + 1];
    for (let row = this.find(track, tick - slack); row < last; row++) {
      if (this.begin[row] > tick + slack) break;
      const apart = Math.max(this.begin[row] - tick, tick - this.end[row], 0);
      if (apart <= least) [best, least] = [row, apart];
    }
    return best;
  }

  trackOf(row) {
    let low = 0;
    let high = this.from.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (this.from[middle] <= row) low = middle;
      else high = middle;
    }
    return low;
  }

  laneOf(row) {
    return Math.floor(this.trackOf(row) / TRACKS);
  }

  // Messages: a forward takes the activation of the stage before, a backward the gradient of the
  // stage after. Both ways are found once, when first asked for.

  senderOf(row) {
    return this._links().sender[row];
  }

  receiverOf(row) {
    return this._links().receiver[row];
  }

  _links() {
    if (this.links) return this.links;
    const count = this.facts.events;
    const sender = new Int32Array(count).fill(-1);
    const receiver = new Int32Array(count).fill(-1);
    const ways = this.labels.map(({ kind }) => (FORWARDS.includes(kind) ? -1 : BACKWARDS.includes(kind) ? 1 : 0));
    const stages = this.labels.map(({ stage }) => stage);
    // One number for a way, replica, stage and micro-batch; stages may be one less or more.
    const numStages = Math.max(...stages) + 3;
    const numReplicas = Math.max(...this.lanes.map(({ replica }) => replica)) + 2;
    const name = (way, replica, stage, micro) =>
      ((micro * numStages + stage + 1) * numReplicas + replica + 1) * 2 + (way > 0 ? 1 : 0);
    const made = new Map();
    const forEachAction = (does) => {
      for (let lane = 0; lane < this.lanes.length; lane++) {
        const { replica } = this.lanes[lane];
        for (let row = this.from[TRACKS * lane]; row < this.from[TRACKS * lane + 1]; row++) {
          const way = ways[this.label[row]];
          if (way) does(row, way, replica, stages[this.label[row]], this.microbatch[row]);
        }
      }
    };
    forEachAction((row, way, replica, stage, micro) => {
      const own = name(way, replica, stage, micro);
      if (!made.has(own)) made.set(own, row);
    });
    forEachAction((row, way, replica, stage, micro) => {
      const from = made.get(name(way, replica, stage + way, micro));
      if (from === undefined) return;
      sender[row] = from;
      if (receiver[from] < 0) receiver[from] = row;
    });
    this.links = { sender, receiver };
    return this.links;
  }

  // Rows of the critical path's actions, each given as [rank, "0F3"].
  findPath(pieces) {
    const rows = new Map();
    this.lanes.forEach((lane, at) => {
      for (let row = this.from[TRACKS * at]; row < this.from[TRACKS * at + 1]; row++) {
        const { kind, stage } = this.labels[this.label[row]];
        rows.set(`${lane.rank} ${stage}${kind}${this.microbatch[row]}`, row);
      }
    });
    return pieces.map(([rank, action]) => rows.get(`${rank} ${action}`)).filter((row) => row >= 0);
  }

  seconds(ticks) {
    return ticks * this.facts.tick_s;
  }

  // Lines of text that say all there is to say of an event.
  describe(row) {
    const { kind, stage, size, what } = this.labels[this.label[row]];
    const lane = this.lanes[this.laneOf(row)];
    const micro = this.microbatch[row];
    const lines = [
      (KIND_NAMES[kind] ?? kind) + (what ? ` (${what})` : "") + (micro >= 0 ? `, micro-batch ${micro}` : ""),
      `rank ${lane.rank}, stage ${stage < 0 ? lane.stage : stage}, replica ${lane.replica}` +
        (lane.host ? `, ${lane.host}` : ""),
      `${inUnits(this.seconds(this.end[row] - this.ready[row]))} from ` +
        `${inUnits(this.seconds(this.ready[row]))} on`,
    ];
    const wait = this.ready[row] - this.begin[row];
    if (wait > 0) lines.push(`waited ${inUnits(this.seconds(wait))} before`);
    if (size > 0) lines.push(`${size.toLocaleString("en")} bytes`);
    return lines;
  }
}

// As reports/analysis/findings.py writes seconds.
function inUnits(seconds) {
  const short = (number) => String(Number(number.toPrecision(4)));
  if (Math.abs(seconds) < 1e-3) return `${short(seconds * 1e6)} µs`;
  if (Math.abs(seconds) < 1) return `${short(seconds * 1e3)} ms`;
  return `${short(seconds)} s`;
}
