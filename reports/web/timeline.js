// The timeline: which part of a step is seen, how it is moved, what is pointed at.
"use strict";

const PAPER_PX = 1000; // of A4 at the zoom of page.css
const PAPER_AFTER_MS = 300;

class Timeline extends View {
  constructor(root, readStep) {
    super(root.querySelector("canvas.marks"), root.querySelector(".tip"));
    this.root = root;
    this.readStep = readStep; // of the number of a held step
    this.painter = new Painter(root.querySelector("canvas.bars"), this.surface);
    this.paper = root.querySelector(".paper");
    this.least = 20;
    this.keys = {
      PageUp: () => this._scroll(-Math.ceil(this.view.numLanes / 2)),
      PageDown: () => this._scroll(Math.ceil(this.view.numLanes / 2)),
      ArrowLeft: () => this._walk(-1, 0),
      ArrowRight: () => this._walk(1, 0),
      ArrowUp: () => this._walk(0, -1),
      ArrowDown: () => this._walk(0, 1),
      Escape: () => this.select(-1),
    };
    this.chosen = document.getElementById("chosen");
    this.step = null;
    this.selected = this.pointed = -1;
    this.showsMessages = false;
    this.path = null;
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
    this.view = { ...view, ...this.whole };
    this.selected = this.pointed = -1;
    this.tip.hidden = true;
    this.showPath(this.path !== null);
  }

  showAll() {
    this.move({ ...this.whole, firstLane: 0, numLanes: this.step.lanes.length });
  }

  showMessages(isOn) {
    this.showsMessages = isOn;
    this.drawMarks();
  }

  showPath(isOn) {
    this.path = isOn ? this.step.findPath(this.step.facts.path ?? []) : null;
    this.draw();
  }

  select(row) {
    this.selected = row;
    this.drawMarks();
  }

  get room() {
    return this.painter.room;
  }

  get whole() {
    const ticks = Math.max(1, this.step.facts.ticks);
    return { from: -0.005 * ticks, to: 1.005 * ticks };
  }

  draw() {
    const width = this.root.clientWidth;
    if (width < 2 * GUTTER_PX) return; // as good as hidden
    const palette = readPalette(document.documentElement);
    this.painter.paintBars(this.step, this.view, width, window.devicePixelRatio || 1, palette);
    this.drawMarks();
    clearTimeout(this.paperDue);
    this.paperDue = setTimeout(() => this._drawPaper(), PAPER_AFTER_MS);
  }

  drawMarks() {
    const isTooMuch = this.painter.paintMarks({
      outlined: [this.pointed, this.selected].filter((row) => row >= 0),
      path: this.path,
      showsMessages: this.showsMessages,
      box: this.dragged(),
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

  move(view) {
    const lanes = this.step.lanes.length;
    const numLanes = Math.min(Math.max(1, view.numLanes), lanes);
    super.move({ ...view, numLanes, firstLane: Math.min(Math.max(0, view.firstLane), lanes - numLanes) });
  }

  _scroll(lanes) {
    this.move({ ...this.view, firstLane: this.view.firstLane + lanes });
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
      this.move({ ...view, ...times, firstLane: isLaneSeen ? view.firstLane : lane });
    }
  }

  // What is done with the pointer.

  point(x, y) {
    const row = x === null ? -1 : this.painter.pick(x, y);
    this.showTip(row < 0 ? "" : this.step.describe(row).join("\n"), x, y);
    if (row === this.pointed) return;
    this.pointed = row;
    this.drawMarks();
  }

  click(x, y) {
    this.select(this.painter.pick(x, y));
  }

  // All lanes, unless the drag went over more than one.
  dragged() {
    const box = super.dragged();
    if (!box || Math.abs(this.drag.toY - this.drag.y) <= Math.max(this.painter.laneHeight, 4 * DRAG_PX)) return box;
    const [top, bottom] = [this.drag.y, this.drag.toY].sort((one, other) => one - other);
    return { ...box, top: Math.max(box.top, top), bottom: Math.min(box.bottom, bottom) };
  }

  enter(box) {
    const firstLane = this.painter.laneAt(box.top);
    return { ...super.enter(box), firstLane, numLanes: this.painter.laneAt(box.bottom) - firstLane + 1 };
  }
}
