// Bars to pixels. Every pixel is the mean of what lies in it, so a million events in a thousand
// pixels still show how busy each rank was, and no bar is lost when it is thinner than a pixel.
"use strict";

const PAIR_PX = 12; // Lanes at least this high show what ran beside the work in a strip of its own.
const SHARE_OF_WORK = 0.68;
const NUMBER_PX = 17; // Bars at least this wide show their micro-batch.
const MOST_NUMBERS = 4000;

class Raster {
  constructor(width, height) {
    this.width = width;
    this.height = height;
    this.image = new ImageData(width, height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.row = new Uint32Array(width);
    this.sums = [0, 1, 2, 3].map(() => new Float32Array(width)); // red, green, blue, covered
    this.numbers = [];
  }

  // `view` has from, to (ticks), firstLane, numLanes; `palette` as of readPalette.
  draw(step, view, palette, scale) {
    this.numbers = [];
    this.scale = this.width / (view.to - view.from);
    const high = this.height / view.numLanes;
    const isPair = high >= PAIR_PX * scale;
    let held = 0;
    for (let at = 0; at < view.numLanes; at++) {
      const track = TRACKS * (view.firstLane + at);
      const top = Math.round(at * high);
      const bottom = Math.round((at + 1) * high);
      if (isPair) {
        const middle = top + Math.round((bottom - top) * SHARE_OF_WORK);
        const gap = Math.max(1, Math.round(scale));
        this._cover(step, track, view, palette, scale, { top, bottom: middle });
        this._flush(top, middle, 1, palette.back);
        this._cover(step, track + 1, view, palette, scale, null);
        this._flush(middle, bottom - gap, 1, palette.back);
        this._flush(bottom - gap, bottom, 1, palette.page);
        continue;
      }
      this._cover(step, track, view, palette, scale, null);
      this._cover(step, track + 1, view, palette, scale, null);
      held++;
      if (bottom > top || at === view.numLanes - 1) {
        this._flush(top, Math.max(bottom, top + 1), held, palette.back);
        held = 0;
      }
    }
  }

  _cover(step, track, view, palette, scale, room) {
    const { begin, ready, end, label, microbatch, labels } = step;
    const last = step.from[track + 1];
    for (let row = step.find(track, view.from); row < last; row++) {
      if (begin[row] >= view.to) break;
      const left = (begin[row] - view.from) * this.scale;
      const middle = (ready[row] - view.from) * this.scale;
      const right = (end[row] - view.from) * this.scale;
      const { kind } = labels[label[row]];
      const shades = palette.kinds[kind] ?? palette.kinds.other;
      if (middle > left) this._fill(left, middle, palette.wait);
      // A gap between neighbours of one colour; bars of a few pixels have none to spare.
      const gap = right - middle > 4 * scale ? scale : 0;
      this._fill(middle, right - gap, shades[microbatch[row] & 1]);
      if (room && right - middle > NUMBER_PX * scale && this.numbers.length < MOST_NUMBERS) {
        this.numbers.push({ row, left: Math.max(0, middle), right, kind, ...room });
      }
    }
  }

  _fill(left, right, [r, g, b]) {
    left = Math.max(left, 0);
    right = Math.min(right, this.width);
    if (!(right > left)) return;
    const [red, green, blue, covered] = this.sums;
    const first = Math.floor(left);
    const last = Math.min(Math.ceil(right), this.width) - 1;
    for (let x = first; x <= last; x++) {
      const part = Math.min(right, x + 1) - Math.max(left, x);
      red[x] += part * r;
      green[x] += part * g;
      blue[x] += part * b;
      covered[x] += part;
    }
  }

  // The sums of `count` lanes as pixels of the lines from `top` to `bottom`; the sums are zero then.
  _flush(top, bottom, count, back) {
    const [red, green, blue, covered] = this.sums;
    const { row, width } = this;
    for (let x = 0; x < width; x++) {
      const whole = Math.max(covered[x], count);
      const bare = whole - covered[x];
      row[x] =
        0xff000000 |
        (((blue[x] + bare * back[2]) / whole) << 16) |
        (((green[x] + bare * back[1]) / whole) << 8) |
        ((red[x] + bare * back[0]) / whole);
    }
    for (const sum of this.sums) sum.fill(0);
    for (let y = top; y < Math.min(bottom, this.height); y++) this.pixels.set(row, y * width);
  }
}

// Colours from page.css: of each kind two shades, so that neighbouring micro-batches stay apart.
function readPalette(element) {
  const style = getComputedStyle(element);
  const read = (name) => parseColour(style.getPropertyValue(name));
  const back = read("--lane");
  const kinds = {};
  for (const kind of KINDS) {
    const full = read(`--kind-${kind.css}`);
    kinds[kind.name] = [full, full.map((value, at) => value + 0.22 * (back[at] - value))];
  }
  return {
    back,
    kinds,
    page: read("--page"),
    wait: read("--kind-wait"),
    ink: style.getPropertyValue("--ink"),
    soft: style.getPropertyValue("--soft"),
    mark: style.getPropertyValue("--mark"),
    lines: style.getPropertyValue("--line"),
  };
}

// `name` is the trace's, `css` the part of the variable, `text` for the legend, `on` the text on it.
const KINDS = [
  { name: "F", css: "forward", text: "forward", on: "#fff" },
  { name: "f", css: "forward", text: "", on: "#fff" },
  { name: "R", css: "recompute", text: "recompute", on: "#000" },
  { name: "B", css: "backward", text: "backward", on: "#000" },
  { name: "I", css: "inputs", text: "backward of inputs", on: "#000" },
  { name: "W", css: "weights", text: "backward of weights", on: "#fff" },
  { name: "O", css: "memcpy", text: "copies of graphs", on: "#000" },
  { name: "L", css: "memcpy", text: "", on: "#000" },
  { name: "compute", css: "compute", text: "compute", on: "#fff" },
  { name: "send", css: "send", text: "send", on: "#000" },
  { name: "all-reduce", css: "all-reduce", text: "all-reduce", on: "#fff" },
  { name: "communication", css: "communication", text: "communication", on: "#fff" },
  { name: "optimizer", css: "optimizer", text: "optimizer", on: "#000" },
  { name: "checkpoint", css: "checkpoint", text: "checkpoint", on: "#fff" },
  { name: "data", css: "data", text: "data", on: "#000" },
  { name: "detail", css: "detail", text: "spans inside others", on: "#000" },
  { name: "other", css: "other", text: "other", on: "#fff" },
];

function parseColour(text) {
  const digits = text.trim().slice(1);
  return [0, 2, 4].map((at) => parseInt(digits.slice(at, at + 2), 16));
}
