// The timeline: what part of a step is seen, how it is moved, what is pointed at.
"use strict";

const GUTTER_PX = 150;
const AXIS_PX = 24;
const RIGHT_PX = 24;
const TALLEST_PX = 680;
const LANE_PX = 26;
const DRAG_PX = 5;
const PAPER_PX = 1000; // of A4 at the zoom of page.css
const PAPER_AFTER_MS = 300;
const MOST_ARROWS = 3000;
const LEAST_TICKS = 20;

class Timeline {
  constructor(root, readStep) {
    this.root = root;
    this.readStep = readStep; // of the number of a held step
    this.bars = root.querySelector("canvas.bars");
    this.marks = root.querySelector("canvas.marks");
    this.paper = root.querySelector(".paper");
    this.tip = root.querySelector(".tip");
    this.chosen = document.getElementById("chosen");
    this.step = null;
    this.selected = -1;
    this.showsMessages = false;
    this.path = null;
    this._listen();
    new ResizeObserver(() => this.step && this.width !== root.clientWidth && this.draw()).observe(root);
  }

  async show(number) {
    this.number = number;
    const step = await this.readStep(number);
    if (this.number !== number) return; // another was chosen meanwhile
    const isSameLanes = this.step && this.step.lanes === step.lanes;
    const view = isSameLanes ? this.view : { firstLane: 0, numLanes: step.lanes.length };
    this.step = step;
    this.view = { ...view, ...this._wholeStep() };
    this.select(-1);
    this.showPath(this.path !== null);
  }

  _wholeStep() {
    const ticks = Math.max(1, this.step.facts.ticks);
    return { from: -0.005 * ticks, to: 1.005 * ticks };
  }

  showAll() {
    this._move({ ...this._wholeStep(), firstLane: 0, numLanes: this.step.lanes.length });
  }

  showMessages(isOn) {
    this.showsMessages = isOn;
    this._drawMarks();
  }

  showPath(isOn) {
    this.path = isOn ? this.step.findPath(this.step.facts.path ?? []) : null;
    this.draw();
  }

  select(row) {
    this.selected = row;
    this.chosen.textContent = row < 0 ? "" : this.step.describe(row).join(" · ");
    if (this.room) this._drawMarks();
  }

  // Drawing.

  draw() {
    this.palette = readPalette(document.documentElement);
    this._drawOn(this.root.clientWidth, window.devicePixelRatio || 1);
    clearTimeout(this.paperDue);
    this.paperDue = setTimeout(() => this._drawPaper(), PAPER_AFTER_MS);
  }

  // A picture for printing: a canvas that is drawn as printing begins comes out blank.
  _drawPaper() {
    const { bars, marks, palette } = this;
    [this.bars, this.marks] = [1, 2].map(() => document.createElement("canvas"));
    this.palette = readPalette(this.paper);
    this._drawOn(PAPER_PX, 2);
    this.bars.getContext("2d").drawImage(this.marks, 0, 0);
    this.bars.toBlob((blob) => {
      URL.revokeObjectURL(this.paper.src);
      this.paper.src = URL.createObjectURL(blob);
    });
    [this.bars, this.marks, this.palette] = [bars, marks, palette];
    this._place(this.root.clientWidth);
  }

  _place(width) {
    const high = Math.max(2 * LANE_PX, Math.min(TALLEST_PX, this.step.lanes.length * LANE_PX));
    this.width = width;
    this.room = { left: GUTTER_PX, top: AXIS_PX, width: width - GUTTER_PX - RIGHT_PX, height: high };
    return high;
  }

  _drawOn(width, scale) {
    const high = this._place(width);
    for (const canvas of [this.bars, this.marks]) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round((high + AXIS_PX) * scale);
      canvas.style.height = `${high + AXIS_PX}px`;
      canvas.style.width = `${width}px`;
    }
    const raster = new Raster(Math.round(this.room.width * scale), Math.round(high * scale));
    raster.draw(this.step, this.view, this.palette, scale);
    const pen = this.bars.getContext("2d");
    pen.fillStyle = `rgb(${this.palette.page})`;
    pen.fillRect(0, 0, this.bars.width, this.bars.height);
    pen.putImageData(raster.image, Math.round(GUTTER_PX * scale), Math.round(AXIS_PX * scale));
    pen.save();
    pen.scale(scale, scale);
    this._drawNumbers(pen, raster, scale);
    this._drawAxis(pen);
    this._drawLaneNames(pen);
    pen.restore();
    this._drawMarks();
  }

  _drawNumbers(pen, raster, scale) {
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    const colours = new Map(KINDS.map(({ name, on }) => [name, on]));
    for (const { row, left, right, top, bottom, kind } of raster.numbers) {
      const micro = this.step.microbatch[row];
      if (micro < 0) continue;
      const middle = (left + Math.min(right, raster.width)) / 2 / scale;
      pen.fillStyle = colours.get(kind) ?? "#fff";
      pen.fillText(micro, GUTTER_PX + middle, AXIS_PX + (top + bottom) / 2 / scale + 0.5);
    }
  }

  _drawAxis(pen) {
    const { from, to } = this.view;
    const least = ((to - from) * 90) / this.room.width;
    const power = 10 ** Math.floor(Math.log10(least));
    const apart = [1, 2, 5, 10].map((times) => times * power).find((ticks) => ticks >= least);
    pen.fillStyle = this.palette.soft;
    pen.textAlign = "center";
    pen.textBaseline = "alphabetic";
    pen.strokeStyle = this.palette.lines;
    for (let tick = Math.ceil(from / apart) * apart; tick <= to; tick += apart) {
      const x = Math.round(this._x(tick)) + 0.5;
      pen.fillText(Math.abs(tick) < apart / 2 ? "0" : inUnits(this.step.seconds(tick)), x, AXIS_PX - 9);
      pen.beginPath();
      pen.moveTo(x, AXIS_PX - 5);
      pen.lineTo(x, AXIS_PX);
      pen.stroke();
    }
  }

  _drawLaneNames(pen) {
    const { lanes } = this.step;
    const { firstLane, numLanes } = this.view;
    const high = this.room.height / numLanes;
    pen.textBaseline = "middle";
    let free = AXIS_PX;
    for (let at = 0; at < numLanes; at++) {
      const lane = lanes[firstLane + at];
      const before = lanes[firstLane + at - 1];
      const top = AXIS_PX + at * high;
      const isFirst = at === 0 || lane.stage !== before.stage;
      if (isFirst && at > 0) {
        pen.strokeStyle = this.palette.soft;
        pen.beginPath();
        pen.moveTo(0, Math.round(top) - 0.5);
        pen.lineTo(GUTTER_PX, Math.round(top) - 0.5);
        pen.stroke();
      }
      const middle = top + Math.max(high / 2, 6);
      if (middle - 6 < free || middle + 5 > AXIS_PX + this.room.height) continue;
      if (isFirst) {
        pen.textAlign = "left";
        pen.fillStyle = this.palette.ink;
        pen.fillText(lane.stage < 0 ? "no trace" : `stage ${lane.stage}`, 0, middle);
      }
      if (high >= 12 || isFirst) {
        pen.textAlign = "right";
        pen.fillStyle = this.palette.soft;
        pen.fillText(`rank ${lane.rank}`, GUTTER_PX - 8, middle);
        free = middle + 6;
      }
    }
  }

  _drawMarks() {
    if (!this.room) return;
    const scale = this.marks.width / this.width;
    const pen = this.marks.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, this.width, this.marks.height);
    pen.save();
    pen.beginPath();
    pen.rect(this.room.left, this.room.top, this.room.width, this.room.height);
    pen.clip();
    pen.strokeStyle = pen.fillStyle = this.palette.mark;
    if (this.path) this._drawPath(pen);
    if (this.showsMessages) this._drawMessages(pen);
    for (const row of [this.pointed ?? -1, this.selected]) {
      if (row < 0) continue;
      this._outline(pen, row, row === this.selected ? 2 : 1);
      this._drawArrow(pen, this.step.senderOf(row), row);
      this._drawArrow(pen, row, this.step.receiverOf(row));
    }
    if (this.drag) {
      const { left, top, right, bottom } = this._dragged();
      pen.globalAlpha = 0.2;
      pen.fillRect(left, top, right - left, bottom - top);
    }
    pen.restore();
  }

  _outline(pen, row, width) {
    const { left, right, top, bottom } = this._box(row);
    pen.lineWidth = width;
    pen.strokeRect(left, top + 0.5, Math.max(2, right - left), bottom - top - 1);
  }

  _drawPath(pen) {
    pen.lineWidth = 1.5;
    for (const row of this.path) this._outline(pen, row, 1.5);
    for (let at = 1; at < this.path.length; at++) this._drawLine(pen, this.path[at - 1], this.path[at]);
  }

  _drawMessages(pen) {
    const { step, view } = this;
    let drawn = 0;
    pen.lineWidth = 1;
    for (let lane = view.firstLane; lane < view.firstLane + view.numLanes; lane++) {
      const last = step.from[TRACKS * lane + 1];
      for (let row = step.find(TRACKS * lane, view.from); row < last; row++) {
        if (step.begin[row] >= view.to) break;
        if (step.senderOf(row) < 0) continue;
        if (drawn++ >= MOST_ARROWS) {
          this.chosen.textContent = `The first ${MOST_ARROWS} messages are drawn: zoom in for the others.`;
          return;
        }
        this._drawArrow(pen, step.senderOf(row), row);
      }
    }
  }

  // From the end of one event to where the other had its message.
  _drawArrow(pen, sender, receiver) {
    if (sender < 0 || receiver < 0) return;
    const [x, y] = this._drawLine(pen, sender, receiver);
    pen.beginPath();
    pen.moveTo(x, y);
    pen.lineTo(x - 6, y - 3);
    pen.lineTo(x - 6, y + 3);
    pen.fill();
  }

  _drawLine(pen, before, after) {
    const start = this._box(before);
    const end = this._box(after);
    const [x0, y0] = [start.right, (start.top + start.bottom) / 2];
    const [x1, y1] = [end.left, (end.top + end.bottom) / 2];
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
    return [x1, y1];
  }

  // Where things are, in CSS pixels.

  _x(tick) {
    const { from, to } = this.view;
    return this.room.left + ((tick - from) / (to - from)) * this.room.width;
  }

  _tick(x) {
    const { from, to } = this.view;
    return from + ((x - this.room.left) / this.room.width) * (to - from);
  }

  _box(row) {
    const track = this.step.trackOf(row);
    const high = this.room.height / this.view.numLanes;
    const top = this.room.top + (Math.floor(track / TRACKS) - this.view.firstLane) * high;
    const cut = high >= PAIR_PX ? top + high * SHARE_OF_WORK : top + high;
    const isBeside = high >= PAIR_PX && track % TRACKS === 1;
    return {
      left: this._x(this.step.ready[row]),
      right: this._x(this.step.end[row]),
      top: isBeside ? cut : top,
      bottom: isBeside ? top + high : cut,
    };
  }

  _laneAt(y) {
    const high = this.room.height / this.view.numLanes;
    return this.view.firstLane + Math.floor((y - this.room.top) / high);
  }

  _pick(x, y) {
    const { room, step, view } = this;
    const isInside = x >= room.left && x <= room.left + room.width && y >= room.top;
    const lane = this._laneAt(y);
    if (!isInside || lane < 0 || lane >= step.lanes.length) return -1;
    const high = room.height / view.numLanes;
    const within = ((y - room.top) % high) / high;
    const first = high >= PAIR_PX && within > SHARE_OF_WORK ? 1 : 0;
    const slack = (3 * (view.to - view.from)) / room.width;
    const row = step.pick(TRACKS * lane + first, this._tick(x), slack);
    return row >= 0 || high >= PAIR_PX ? row : step.pick(TRACKS * lane + 1, this._tick(x), slack);
  }

  // Moving.

  _move(view) {
    const whole = this._wholeStep();
    const length = Math.min(Math.max(view.to - view.from, LEAST_TICKS), whole.to - whole.from);
    const from = Math.min(Math.max(view.from, whole.from), whole.to - length);
    const lanes = this.step.lanes.length;
    const numLanes = Math.min(Math.max(1, view.numLanes), lanes);
    const firstLane = Math.min(Math.max(0, view.firstLane), lanes - numLanes);
    this.view = { from, to: from + length, firstLane, numLanes };
    this._drawSoon();
  }

  _drawSoon() {
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      this.draw();
    });
  }

  zoom(times, tick = (this.view.from + this.view.to) / 2) {
    const { from, to } = this.view;
    this._move({ ...this.view, from: tick - (tick - from) * times, to: tick + (to - tick) * times });
  }

  pan(share, lanes = 0) {
    const by = share * (this.view.to - this.view.from);
    const { from, to, firstLane } = this.view;
    this._move({ ...this.view, from: from + by, to: to + by, firstLane: firstLane + lanes });
  }

  // Along a lane by one event, or to the event of another lane at the same time.
  _walk(events, lanes) {
    const { step, selected } = this;
    if (selected < 0) {
      const middle = (this.view.from + this.view.to) / 2;
      this.select(step.pick(TRACKS * this.view.firstLane, middle, this.view.to - this.view.from));
      return;
    }
    const track = step.trackOf(selected);
    let row = selected + events;
    if (lanes) {
      const other = track + TRACKS * lanes;
      if (other < 0 || other >= step.from.length - 1) return;
      row = step.pick(other, step.ready[selected], step.facts.ticks);
      if (row < 0) return;
    } else if (row < step.from[track] || row >= step.from[track + 1]) return;
    this.select(row);
    const { from, to, firstLane, numLanes } = this.view;
    const lane = step.laneOf(row);
    if (step.end[row] < from || step.ready[row] > to) {
      this._move({ ...this.view, from: step.ready[row] - (to - from) / 2, to: step.ready[row] + (to - from) / 2 });
    }
    if (lane < firstLane || lane >= firstLane + numLanes) this._move({ ...this.view, firstLane: lane });
  }

  _listen() {
    const { marks } = this;
    const place = (event) => {
      const box = marks.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    marks.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      const [x, y] = place(event);
      marks.setPointerCapture(event.pointerId);
      this.drag = { x, y, toX: x, toY: y, isPan: event.shiftKey };
      this._point(-1);
    });
    marks.addEventListener("pointermove", (event) => {
      const [x, y] = place(event);
      if (!this.drag) {
        this._point(this._pick(x, y), x, y);
        return;
      }
      if (this.drag.isPan) this.pan((this.drag.toX - x) / this.room.width);
      [this.drag.toX, this.drag.toY] = [x, y];
      this._drawMarks();
    });
    marks.addEventListener("pointerup", (event) => this._drop(...place(event)));
    marks.addEventListener("pointercancel", () => this._drop());
    marks.addEventListener("pointerleave", () => this._point(-1));
    marks.addEventListener("dblclick", () => this.showAll());
    marks.addEventListener("wheel", (event) => this._wheel(event, place(event)[0]), { passive: false });
    marks.addEventListener("keydown", (event) => this._press(event));
  }

  _point(row, x, y) {
    if (row >= 0) {
      this.tip.textContent = this.step.describe(row).join("\n");
      this.tip.hidden = false;
      const isRight = x > this.width / 2;
      this.tip.style.left = isRight ? "" : `${x + 14}px`;
      this.tip.style.right = isRight ? `${this.width - x + 14}px` : "";
      this.tip.style.top = `${y + 14}px`;
    } else this.tip.hidden = true;
    if (row === (this.pointed ?? -1)) return;
    this.pointed = row;
    this._drawMarks();
  }

  // What a drag marked: all lanes unless it went over more than one.
  _dragged() {
    const { room, view, drag } = this;
    const high = room.height / view.numLanes;
    const isTall = Math.abs(drag.toY - drag.y) > Math.max(high, 4 * DRAG_PX);
    return {
      left: Math.max(room.left, Math.min(drag.x, drag.toX)),
      right: Math.min(room.left + room.width, Math.max(drag.x, drag.toX)),
      top: isTall ? Math.max(room.top, Math.min(drag.y, drag.toY)) : room.top,
      bottom: isTall ? Math.min(room.top + room.height - 1, Math.max(drag.y, drag.toY)) : room.top + room.height - 1,
    };
  }

  _drop(x, y) {
    const { drag } = this;
    if (!drag) return;
    const box = this._dragged();
    this.drag = null;
    if (x === undefined || drag.isPan) {
      this._drawMarks();
      return;
    }
    if (Math.abs(drag.toX - drag.x) < DRAG_PX && Math.abs(drag.toY - drag.y) < 4 * DRAG_PX) {
      this.select(this._pick(x, y));
      return;
    }
    const firstLane = this._laneAt(box.top);
    const view = { firstLane, numLanes: this._laneAt(box.bottom) - firstLane + 1 };
    const isWide = box.right - box.left >= DRAG_PX;
    const times = isWide ? { from: this._tick(box.left), to: this._tick(box.right) } : {};
    this._move({ ...this.view, ...view, ...times });
  }

  // A plain wheel scrolls the page, as everywhere.
  _wheel(event, x) {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      this.zoom(Math.exp(event.deltaY / 300), this._tick(x));
    } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      this.pan(event.deltaX / this.room.width);
    }
  }

  _press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.step) return;
    const does = {
      w: () => this.zoom(0.7),
      "+": () => this.zoom(0.7),
      s: () => this.zoom(1 / 0.7),
      "-": () => this.zoom(1 / 0.7),
      a: () => this.pan(-0.2),
      d: () => this.pan(0.2),
      PageUp: () => this.pan(0, -Math.ceil(this.view.numLanes / 2)),
      PageDown: () => this.pan(0, Math.ceil(this.view.numLanes / 2)),
      0: () => this.showAll(),
      ArrowLeft: () => this._walk(-1, 0),
      ArrowRight: () => this._walk(1, 0),
      ArrowUp: () => this._walk(0, -1),
      ArrowDown: () => this._walk(0, 1),
      Escape: () => this.select(-1),
    }[event.key];
    if (!does) return;
    event.preventDefault();
    does();
  }
}
