// The timeline: which part of a step is seen, how it is moved, what is pointed at.
"use strict";

const PAPER_PX = 1000; // of A4 at the zoom of page.css
const PAPER_AFTER_MS = 300;
const DRAG_PX = 5;
const LEAST_TICKS = 20;

class Timeline {
  constructor(root, readStep) {
    this.root = root;
    this.readStep = readStep; // of the number of a held step
    this.marks = root.querySelector("canvas.marks");
    this.painter = new Painter(root.querySelector("canvas.bars"), this.marks);
    this.paper = root.querySelector(".paper");
    this.tip = root.querySelector(".tip");
    this.chosen = document.getElementById("chosen");
    this.step = null;
    this.selected = this.pointed = -1;
    this.showsMessages = false;
    this.path = null;
    this._listen();
    new ResizeObserver(() => {
      if (this.step && this.painter.width !== root.clientWidth) this.draw();
    }).observe(root);
  }

  async show(number) {
    this.number = number;
    const step = await this.readStep(number);
    if (this.number !== number) return; // another was chosen meanwhile
    const old = this.step;
    const isSameLanes = old && old.lanes.length === step.lanes.length && old.lanes.every(({ rank }, at) => rank === step.lanes[at].rank);
    const view = isSameLanes ? this.view : { firstLane: 0, numLanes: step.lanes.length };
    this.step = step;
    this.view = { ...view, ...this._wholeStep() };
    this.selected = this.pointed = -1;
    this.tip.hidden = true;
    this.showPath(this.path !== null);
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
    this._drawMarks();
  }

  _wholeStep() {
    const ticks = Math.max(1, this.step.facts.ticks);
    return { from: -0.005 * ticks, to: 1.005 * ticks };
  }

  draw() {
    const width = this.root.clientWidth;
    if (width < 2 * GUTTER_PX) return; // as good as hidden
    const palette = readPalette(document.documentElement);
    this.painter.paintBars(this.step, this.view, width, window.devicePixelRatio || 1, palette);
    this._drawMarks();
    clearTimeout(this.paperDue);
    this.paperDue = setTimeout(() => this._drawPaper(), PAPER_AFTER_MS);
  }

  _drawMarks() {
    const isTooMuch = this.painter.paintMarks({
      outlined: [this.pointed, this.selected].filter((row) => row >= 0),
      path: this.path,
      showsMessages: this.showsMessages,
      box: this.drag && !this.drag.isPan ? this._dragged() : null,
    });
    const note = isTooMuch ? `${MOST_ARROWS} messages are drawn: zoom in for the others.` : "";
    const text = this.selected < 0 ? note : this.step.describe(this.selected).join(" · ");
    if (this.chosen.textContent !== text) this.chosen.textContent = text; // it is read aloud
  }

  // A picture for printing: a canvas that is drawn as printing begins comes out blank.
  _drawPaper() {
    const [bars, marks] = [1, 2].map(() => document.createElement("canvas"));
    const painter = new Painter(bars, marks);
    painter.paintBars(this.step, this.view, PAPER_PX, 2, readPalette(this.paper));
    painter.paintMarks({ outlined: [], path: this.path, showsMessages: this.showsMessages, box: null });
    bars.getContext("2d").drawImage(marks, 0, 0);
    bars.toBlob((blob) => {
      URL.revokeObjectURL(this.paper.src);
      this.paper.src = URL.createObjectURL(blob);
    });
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
    const { from, to, firstLane } = this.view;
    const by = share * (to - from);
    this._move({ ...this.view, from: from + by, to: to + by, firstLane: firstLane + lanes });
  }

  // Along a lane by one event, or to the event of another lane at the same time.
  _walk(events, lanes) {
    const { step, selected, view } = this;
    if (selected < 0) {
      this.select(step.pick(TRACKS * view.firstLane, (view.from + view.to) / 2, view.to - view.from));
      return;
    }
    const track = step.trackOf(selected) + TRACKS * lanes;
    if (track < 0 || track >= step.from.length - 1) return;
    const row = lanes ? step.pick(track, step.ready[selected], step.facts.ticks) : selected + events;
    if (row < step.from[track] || row >= step.from[track + 1]) return;
    this.select(row);
    const half = (view.to - view.from) / 2;
    const isSeen = step.end[row] >= view.from && step.ready[row] <= view.to;
    const times = isSeen ? {} : { from: step.ready[row] - half, to: step.ready[row] + half };
    const lane = step.laneOf(row);
    const isLaneSeen = lane >= view.firstLane && lane < view.firstLane + view.numLanes;
    if (!isSeen || !isLaneSeen) {
      this._move({ ...view, ...times, firstLane: isLaneSeen ? view.firstLane : lane });
    }
  }

  // What is done with pointer, wheel and keys.

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
        this._point(this.painter.pick(x, y), x, y);
        return;
      }
      if (this.drag.isPan) this.pan((this.drag.toX - x) / this.painter.room.width);
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
    this.tip.hidden = row < 0;
    if (row >= 0) {
      this.tip.textContent = this.step.describe(row).join("\n");
      const { width } = this.painter;
      const isRight = x > width / 2;
      this.tip.style.left = isRight ? "" : `${x + 14}px`;
      this.tip.style.right = isRight ? `${width - x + 14}px` : "";
      this.tip.style.top = `${y + 14}px`;
    }
    if (row === this.pointed) return;
    this.pointed = row;
    this._drawMarks();
  }

  // What a drag marked: all lanes unless it went over more than one.
  _dragged() {
    const { room, laneHeight } = this.painter;
    const { x, y, toX, toY } = this.drag;
    const isTall = Math.abs(toY - y) > Math.max(laneHeight, 4 * DRAG_PX);
    const bottom = room.top + room.height - 1;
    return {
      left: Math.max(room.left, Math.min(x, toX)),
      right: Math.min(room.left + room.width, Math.max(x, toX)),
      top: isTall ? Math.max(room.top, Math.min(y, toY)) : room.top,
      bottom: isTall ? Math.min(bottom, Math.max(y, toY)) : bottom,
    };
  }

  _drop(x, y) {
    const { drag, painter } = this;
    if (!drag) return;
    const box = this._dragged();
    this.drag = null;
    const isClick = Math.abs(drag.toX - drag.x) < DRAG_PX && Math.abs(drag.toY - drag.y) < 4 * DRAG_PX;
    if (x === undefined || drag.isPan) this._drawMarks();
    else if (isClick) this.select(painter.pick(x, y));
    else {
      const firstLane = painter.laneAt(box.top);
      const lanes = { firstLane, numLanes: painter.laneAt(box.bottom) - firstLane + 1 };
      const isWide = box.right - box.left >= DRAG_PX;
      const times = isWide ? { from: painter.tick(box.left), to: painter.tick(box.right) } : {};
      this._move({ ...this.view, ...lanes, ...times });
    }
  }

  // A plain wheel scrolls the page, as everywhere.
  _wheel(event, x) {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      this.zoom(Math.exp(event.deltaY / 300), this.painter.tick(x));
    } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      this.pan(event.deltaX / this.painter.room.width);
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
