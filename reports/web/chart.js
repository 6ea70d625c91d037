// Draws figures of reports/page as SVG: of plotly's JSON what they use, in rows over one axis.
"use strict";

const AXIS_BELOW_PX = 40;
const TITLE_PX = 24;
const LETTER_PX = 6.2;
const SCALE_PX = 94;
const REACH_PX = 60; // how far along the axis a pointer finds a value

function addShape(parent, name, values, text) {
  const shape = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(values)) shape.setAttribute(key, value);
  if (text !== undefined) shape.textContent = text;
  parent.append(shape);
  return shape;
}

// Texts of users are escaped for plotly, which reads tags.
const unescape = (text) =>
  String(text).replace(/<[^>]*>/g, "").replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");

function showNumber(value) {
  if (typeof value !== "number") return String(value);
  return String(Number.isInteger(value) && Math.abs(value) < 1e15 ? value : Number(value.toPrecision(4)));
}

// The least and the greatest of numbers; 0 and 1 where there are none.
function findEnds(values) {
  let [least, most] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < least) least = value;
    if (value > most) most = value;
  }
  return least > most ? [0, 1] : [least, most];
}

// A scale's colour at a share of it.
function mixColour(scale, share) {
  const next = Math.max(1, scale.findIndex(([at]) => at >= share));
  const [[from, one], [to, other]] = [scale[next - 1], scale[next]];
  const part = (share - from) / (to - from);
  return [1, 3, 5].map((at) => {
    const [low, high] = [one, other].map((colour) => parseInt(colour.slice(at, at + 2), 16));
    return Math.round(low + part * (high - low));
  });
}

class Chart extends View {
  // `choose` is called with the attempt and the step of a value that somebody clicks.
  constructor(place, { data, layout }, choose) {
    const tools = Object.assign(document.createElement("div"), { className: "series" });
    const tip = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
    const title = place.parentElement.querySelector("figcaption").textContent;
    tip.setAttribute("role", "status");
    place.append(tools);
    super(addShape(place, "svg", {
      tabindex: 0,
      role: "application",
      "aria-label": `${title}. Arrow keys go from value to value, w and s zoom, a and d move, 0 shows all.`,
    }), tip);
    place.append(tip);
    Object.assign(this, { place, layout, choose, hidden: new Set(), spot: null, isLog: false });
    this.rows = Object.keys(layout).filter((key) => key.startsWith("yaxis")).map((key, at) => this._readRow(data, key, at));
    this.series = this.rows.flatMap(({ series }) => series);
    const [low, high] = findEnds(this.series.flatMap((one) => one.ends));
    const margin = 0.015 * (high - low || 1);
    this.whole = { from: this.series.some(({ kind }) => kind === "bar") ? 0 : low - margin, to: high + margin };
    this.unit = this.series.every(({ x }) => x.every(Number.isInteger)) ? 1 : 0; // no marks between steps
    this.least = (this.whole.to - this.whole.from) / 1e4;
    this.view = this.whole;
    this.keys = {
      ArrowLeft: () => this._walk(-1, 0),
      ArrowRight: () => this._walk(1, 0),
      ArrowUp: () => this._walk(0, -1),
      ArrowDown: () => this._walk(0, 1),
      Enter: () => this._choose(),
      Escape: () => this._show(null),
    };
    this._fillTools(tools);
    this.draw();
    new ResizeObserver(() => {
      if (this.width !== place.clientWidth) this.draw();
    }).observe(place);
  }

  // A row's values as series: of a heat map one a line, of other traces one each.
  _readRow(data, key, number) {
    const { layout } = this;
    const axis = layout[key];
    const traces = data.filter((trace) => (trace.yaxis ?? "y") === key.replace("axis", ""));
    const names = traces.some(({ type }) => type !== "scatter") ? [...new Set(traces.flatMap(({ y }) => y))] : null;
    const row = { axis, names, title: unescape(layout.annotations?.[number]?.text ?? "") };
    const sums = new Map();
    row.series = traces.flatMap((trace) => {
      const lines = trace.type === "heatmap" ? trace.z : [trace.y];
      return lines.map((line, own) => {
        const one = { kind: trace.type, trace, row, y: trace.type === "heatmap" ? line.map(() => trace.y[own]) : line };
        if (trace.type === "heatmap") {
          one.values = line;
          one.x = line.map((_, at) => trace.x0 + at * trace.dx);
          one.from = one.x.map((x) => x - trace.dx / 2);
          one.to = one.x.map((x) => x + trace.dx / 2);
        } else if (trace.type === "bar") {
          one.values = one.x = trace.x;
          one.from = one.y.map((name) => (layout.barmode === "stack" && sums.get(name)) || 0);
          one.to = one.from.map((from, at) => from + (trace.x[at] ?? 0));
          one.y.forEach((name, at) => sums.set(name, one.to[at]));
        } else {
          one.x = one.from = one.to = trace.x;
          one.values = trace.x.map((x, at) => (x === null ? null : trace.y[at]));
        }
        const known = one.values.flatMap((value, at) => (value === null ? [] : [one.from[at], one.to[at]]));
        one.ends = trace.type === "heatmap" ? [one.from[0], one.to.at(-1)] : findEnds(known);
        return one;
      });
    });
    return row;
  }

  // Buttons: a series each, and the scale of the first row.
  _fillTools(tools) {
    const add = (text, colour, press) => {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: text });
      if (colour) button.style.borderLeft = `12px solid ${colour}`;
      button.setAttribute("aria-pressed", Boolean(colour));
      button.addEventListener("click", () => {
        button.setAttribute("aria-pressed", press());
        this._show(null);
        this.draw();
      });
      tools.append(button);
    };
    if (this.layout.showlegend) {
      const shown = this.series.filter(({ trace }) => trace.showlegend !== false);
      const named = new Map(shown.map(({ trace }) => [trace.name, trace]));
      for (const [name, { line, marker }] of named) {
        const colour = line?.color ?? [marker.color].flat()[0];
        add(unescape(name), colour, () => {
          if (!this.hidden.delete(name)) this.hidden.add(name);
          return !this.hidden.has(name);
        });
      }
    }
    if (this.layout.updatemenus) add(`${this.rows[0].title} on a log scale`, "", () => (this.isLog = !this.isLog));
  }

  draw() {
    const { place, layout, surface, rows, view } = this;
    this.width = place.clientWidth;
    const labels = rows.flatMap(({ names, axis }) => axis.ticktext ?? names ?? ["-0.00000"]);
    const left = Math.min(150, 0.35 * this.width, 14 + LETTER_PX * Math.max(...labels.map((text) => unescape(text).length)));
    const space = layout.height - layout.margin.t - layout.margin.b;
    const top = rows[0].title ? TITLE_PX : 8;
    this.room = { left, top, width: Math.max(40, this.width - left - 16), height: space };
    const high = top + space + AXIS_BELOW_PX;
    surface.setAttribute("viewBox", `0 0 ${this.width} ${high}`);
    surface.replaceChildren();
    this._drawAxis(top + space);
    rows.forEach((row, at) => {
      const [bottom, above] = row.axis.domain ?? [0, 1];
      row.top = top + (1 - above) * space;
      row.height = (above - bottom) * space;
      this._drawRow(row, at === 0 && this.isLog);
    });
    for (const { x0, line } of layout.shapes ?? []) {
      if (x0 < view.from || x0 > view.to) continue;
      const x = this.x(x0);
      addShape(surface, "line", { x1: x, x2: x, y1: top, y2: top + space, stroke: line.color, "stroke-dasharray": "2 3" });
    }
    this.marks = addShape(surface, "g", { class: "marks" });
    this.drawMarks();
  }

  _drawAxis(bottom) {
    const { surface, view, room, layout } = this;
    const apart = spaceMarks(Math.max(this.unit, ((view.to - view.from) * 90) / room.width));
    for (let mark = Math.ceil(view.from / apart - 1e-9); mark * apart <= view.to; mark++) {
      const x = this.x(mark * apart);
      addShape(surface, "line", { class: "grid", x1: x, x2: x, y1: room.top, y2: bottom });
      addShape(surface, "text", { x, y: bottom + 15, "text-anchor": "middle" }, showNumber(Number((mark * apart).toPrecision(12))));
    }
    addShape(surface, "text", { x: room.left + room.width / 2, y: bottom + 33, "text-anchor": "middle" }, unescape(layout.xaxis.title.text));
  }

  _drawRow(row, isLog) {
    const { surface, room, width } = this;
    const { top, height, axis, names, title } = row;
    addShape(surface, "text", { class: "title", x: 0, y: top - 8 }, title);
    const place = this._placeValues(row, isLog);
    const label = (y, text, isGrid) => {
      if (isGrid) addShape(surface, "line", { class: "grid", x1: room.left, x2: room.left + room.width, y1: y, y2: y });
      addShape(surface, "text", { x: room.left - 6, y: y + 4, "text-anchor": "end" }, unescape(text));
    };
    const band = names ? height / names.length : 0;
    const each = Math.ceil(12 / (band || 12));
    if (names) names.forEach((name, at) => at % each || label(place(name), name, false));
    else if (axis.tickvals) axis.tickvals.forEach((value, at) => label(place(value), axis.ticktext[at], true));
    else for (const value of this._findMarks(row, isLog)) label(place(value), showNumber(value), true);
    const frame = addShape(surface, "svg", { x: room.left, y: top, width: room.width, height, class: "frame" });
    const area = addShape(frame, "g", { transform: `translate(${-room.left} ${-top})` });
    if (row.series[0].kind === "heatmap") this._drawCells(area, row, width);
    for (const one of row.series) {
      const { trace, values } = one;
      one.spots = values.map((value, at) => {
        const y = value === null || this.hidden.has(trace.name) ? NaN : place(one.y[at]);
        return Number.isFinite(y) ? { left: this.x(one.from[at]), right: this.x(one.to[at]), y } : null;
      });
      if (one.kind === "bar") this._drawBars(area, one, 0.75 * band);
      if (one.kind === "scatter") this._drawPoints(area, one);
    }
  }

  // Where a value is from top to bottom; not a number where it has no place.
  _placeValues(row, isLog) {
    const { top, height, axis, names } = row;
    if (names) return (name) => top + ((names.indexOf(name) + 0.5) / names.length) * height;
    const warp = isLog ? Math.log10 : (value) => value;
    const seen = row.series
      .filter(({ trace }) => !this.hidden.has(trace.name))
      .flatMap(({ x, y }) => y.filter((value, at) => value !== null && (!isLog || value > 0) && x[at] >= this.view.from && x[at] <= this.view.to));
    if (axis.rangemode === "tozero") seen.push(0);
    const [least, most] = findEnds(seen);
    const spread = 0.06 * (warp(most) - warp(least)) || 0.05 * Math.abs(warp(most)) || 1;
    const [low, high] = axis.range ?? [axis.rangemode === "tozero" ? 0 : warp(least) - spread, warp(most) + spread];
    row.bounds = [low, high];
    return (value) => top + height - ((warp(value) - low) / (high - low)) * height;
  }

  _findMarks({ bounds: [low, high], height }, isLog) {
    if (isLog && high - low > 0.7) {
      const powers = Array.from({ length: Math.ceil(high) - Math.floor(low) + 1 }, (_, at) => 10 ** (Math.floor(low) + at));
      const marks = high - low > 3 ? powers : powers.flatMap((power) => [power, 2 * power, 5 * power]);
      return marks.filter((value) => Math.log10(value) >= low && Math.log10(value) <= high);
    }
    const [from, to] = isLog ? [10 ** low, 10 ** high] : [low, high];
    const apart = spaceMarks(((to - from) * 28) / height);
    const first = Math.ceil(from / apart);
    return Array.from({ length: Math.floor(to / apart) - first + 1 }, (_, at) => Number(((first + at) * apart).toPrecision(12)));
  }

  // A heat map is a picture with a pixel a cell, which is stretched; its scale stands beside the title.
  _drawCells(area, row, width) {
    const { trace } = row.series[0];
    const { z, zmin = 0, zmax = findEnds(z.flat())[1] } = trace;
    const share = (value) => Math.min(1, Math.max(0, (value - zmin) / (zmax - zmin || 1)));
    if (!row.picture) {
      const canvas = Object.assign(document.createElement("canvas"), { width: z[0].length, height: z.length });
      const image = new ImageData(canvas.width, canvas.height);
      z.flat().forEach((value, at) => {
        if (value !== null) image.data.set([...mixColour(trace.colorscale, share(value)), 255], 4 * at);
      });
      canvas.getContext("2d").putImageData(image, 0, 0);
      row.picture = canvas.toDataURL();
    }
    const [from, to] = row.series[0].ends.map((at) => this.x(at));
    addShape(area, "image", { href: row.picture, x: from, y: row.top, width: to - from, height: row.height, preserveAspectRatio: "none" });
    if (width < 2 * SCALE_PX + LETTER_PX * row.title.length) return;
    const unit = trace.colorbar.ticksuffix;
    const right = width - 16 - LETTER_PX * (showNumber(zmax) + unit).length;
    for (let at = 0; at < 30; at++) {
      const fill = `rgb(${mixColour(trace.colorscale, at / 29)})`;
      addShape(this.surface, "rect", { x: right - SCALE_PX + 3 * at, y: row.top - 16, width: 3.5, height: 9, fill });
    }
    addShape(this.surface, "text", { x: right - SCALE_PX - 4, y: row.top - 8, "text-anchor": "end" }, showNumber(zmin) + unit);
    addShape(this.surface, "text", { x: right, y: row.top - 8 }, showNumber(zmax) + unit);
  }

  _drawBars(area, { spots, trace }, high) {
    spots.forEach((spot, at) => {
      if (!spot) return;
      const fill = Array.isArray(trace.marker.color) ? trace.marker.color[at] : trace.marker.color;
      addShape(area, "rect", { x: spot.left, y: spot.y - high / 2, width: spot.right - spot.left, height: high, fill });
    });
  }

  _drawPoints(area, { spots, trace: { line, marker, mode, opacity = 1 } }) {
    const known = spots.filter((spot) => spot);
    if (mode.includes("lines")) {
      const points = known.map(({ left, y }) => `${left.toFixed(1)},${y.toFixed(1)}`).join(" ");
      addShape(area, "polyline", { points, fill: "none", stroke: line.color, "stroke-width": line.width, opacity });
    }
    if (!mode.includes("markers")) return;
    const { symbol, size, color, line: { width = 0 } = {} } = marker ?? { size: 5, color: line.color };
    for (const { left, y } of known) {
      if (symbol === "line-ns-open") addShape(area, "rect", { x: left - width / 2, y: y - size / 2, width, height: size, fill: color });
      else if (symbol === "circle-open") addShape(area, "circle", { cx: left, cy: y, r: size / 2, fill: "none", stroke: color, "stroke-width": width });
      else addShape(area, "circle", { cx: left, cy: y, r: size / 2, fill: color, opacity });
    }
  }

  // What is pointed at, and what a drag marks.

  drawMarks() {
    const { room, spot } = this;
    this.marks.replaceChildren();
    const box = this.dragged();
    if (box) addShape(this.marks, "rect", { x: box.left, y: box.top, width: Math.max(0, box.right - box.left), height: room.height, opacity: 0.2 });
    const place = spot && spot.one.spots[spot.at];
    if (!place) return;
    const x = (place.left + place.right) / 2;
    addShape(this.marks, "line", { x1: x, x2: x, y1: room.top, y2: room.top + room.height });
    addShape(this.marks, "circle", { cx: x, cy: place.y, r: 5, fill: "none" });
  }

  point(x, y) {
    this._show(x === null ? null : this._pick(x, y));
  }

  click(x, y) {
    this._show(this._pick(x, y));
    this._choose();
  }

  _choose() {
    const chosen = this.spot && this.spot.one.trace.customdata?.[this.spot.at];
    if (chosen) this.choose(chosen);
  }

  _show(spot) {
    this.spot = spot;
    this.drawMarks();
    const place = spot && spot.one.spots[spot.at];
    this.showTip(place ? this._describe(spot) : "", place?.left, place?.y + this.surface.getBoundingClientRect().top - this.place.getBoundingClientRect().top);
  }

  // The nearest value of the row under a point, by its place on the axis rather than its height.
  _pick(x, y) {
    let best = null;
    let least = Infinity;
    for (const { series, top, height } of this.rows) {
      if (y < top - 4 || y > top + height + 4) continue;
      for (const one of series) {
        one.spots.forEach((spot, at) => {
          if (!spot || spot.right < this.room.left || spot.left > this.room.left + this.room.width) return;
          const apart = Math.max(spot.left - x, x - spot.right, 0);
          const far = Math.hypot(3 * apart, spot.y - y);
          if (apart <= REACH_PX && far < least) [best, least] = [{ one, at }, far];
        });
      }
    }
    return best;
  }

  // Along a series by one value, or to the value of another series at the same place.
  _walk(values, lines) {
    const all = this.series.filter(({ spots }) => spots.some((spot) => spot));
    if (!this.spot?.one.spots[this.spot.at]) {
      if (all.length) this._show({ one: all[0], at: all[0].spots.findIndex((spot) => spot) });
      return;
    }
    const { one, at } = this.spot;
    if (lines) {
      const next = all[all.indexOf(one) + lines];
      if (!next) return;
      const apart = next.spots.map((spot) => (spot ? Math.abs(spot.left - one.spots[at].left) : Infinity));
      this._show({ one: next, at: apart.indexOf(Math.min(...apart)) });
      return;
    }
    for (let to = at + values; to >= 0 && to < one.spots.length; to += values) {
      if (!one.spots[to]) continue;
      const half = (this.view.to - this.view.from) / 2;
      if (one.x[to] < this.view.from || one.x[to] > this.view.to) {
        this.view = { from: one.x[to] - half, to: one.x[to] + half };
        this.move(this.view);
      }
      this._show({ one, at: to });
      return;
    }
  }

  // What a trace's template says of a value: `step %{customdata[1]}: %{y:.4g}<extra>loss</extra>`.
  _describe({ one, at }) {
    const { trace, x, y, values } = one;
    const point = { x: x[at], y: y[at], z: values[at], text: trace.text?.[at], customdata: trace.customdata?.[at], fullData: trace };
    return unescape(
      trace.hovertemplate
        .replace(/%\{(\w+)(?:\[(\d)\]|\.(\w+))?(?::[^}]*)?\}/g, (_, name, index, field) => showNumber((index ?? field) === undefined ? point[name] : point[name][index ?? field]))
        .replace(/<extra>(.+)<\/extra>/, "\n$1"),
    );
  }
}
