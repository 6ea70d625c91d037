// Draws a part of a step on two canvases: bars with their axis and names, and marks over them.
// All places are in CSS pixels.
"use strict";

const GUTTER_PX = 150; // names of stages and ranks
const AXIS_PX = 24;
const RIGHT_PX = 24; // half of the axis' last number
const TALLEST_PX = 680;
const LANE_PX = 26;
const MOST_ARROWS = 3000;

class Painter {
  constructor(bars, marks) {
    this.bars = bars;
    this.marks = marks;
  }

  // `view` has from and to in ticks, firstLane and numLanes; `scale` is device pixels a pixel.
  paintBars(step, view, width, scale, palette) {
    Object.assign(this, { step, view, width, scale, palette });
    const high = Math.max(2 * LANE_PX, Math.min(TALLEST_PX, step.lanes.length * LANE_PX));
    this.room = { left: GUTTER_PX, top: AXIS_PX, width: width - GUTTER_PX - RIGHT_PX, height: high };
    for (const canvas of [this.bars, this.marks]) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round((high + AXIS_PX) * scale);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${high + AXIS_PX}px`;
    }
    const raster = new Raster(Math.round(this.room.width * scale), Math.round(high * scale));
    raster.draw(step, view, palette, scale);
    const pen = this.bars.getContext("2d");
    pen.fillStyle = `rgb(${palette.page})`;
    pen.fillRect(0, 0, this.bars.width, this.bars.height);
    pen.putImageData(raster.image, Math.round(GUTTER_PX * scale), Math.round(AXIS_PX * scale));
    pen.save();
    pen.scale(scale, scale);
    pen.font = "11px system-ui, sans-serif";
    this._paintNumbers(pen, raster);
    this._paintAxis(pen);
    this._paintLaneNames(pen);
    pen.restore();
  }

  _paintNumbers(pen, raster) {
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    const colours = new Map(KINDS.map(({ name, on }) => [name, on]));
    for (const { row, left, right, top, bottom, kind } of raster.numbers) {
      const micro = this.step.microbatch[row];
      if (micro < 0) continue;
      const middle = (left + Math.min(right, raster.width)) / 2 / this.scale;
      pen.fillStyle = colours.get(kind) ?? "#fff";
      pen.fillText(micro, GUTTER_PX + middle, AXIS_PX + (top + bottom) / 2 / this.scale + 0.5);
    }
  }

  _paintAxis(pen) {
    const { from, to } = this.view;
    const apart = spaceMarks(((to - from) * 90) / this.room.width);
    pen.fillStyle = this.palette.soft;
    pen.textAlign = "center";
    pen.textBaseline = "alphabetic";
    pen.strokeStyle = this.palette.lines;
    for (let tick = Math.ceil(from / apart) * apart; tick <= to; tick += apart) {
      const x = Math.round(this.x(tick)) + 0.5;
      const isZero = Math.abs(tick) < apart / 2;
      pen.fillText(isZero ? "0" : inUnits(this.step.seconds(tick)), x, AXIS_PX - 9);
      pen.beginPath();
      pen.moveTo(x, AXIS_PX - 5);
      pen.lineTo(x, AXIS_PX);
      pen.stroke();
    }
  }

  // A stage's name at its first lane, and ranks as far as there is room.
  _paintLaneNames(pen) {
    const { lanes } = this.step;
    const { firstLane, numLanes } = this.view;
    const high = this.room.height / numLanes;
    pen.textBaseline = "middle";
    let free = AXIS_PX;
    for (let at = 0; at < numLanes; at++) {
      const lane = lanes[firstLane + at];
      const top = AXIS_PX + at * high;
      const isFirst = at === 0 || lane.stage !== lanes[firstLane + at - 1].stage;
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

  // `outlined` are rows to show with their messages, `path` rows of the critical path or null,
  // `box` a rectangle or null. Returns whether there were too many messages to draw.
  paintMarks({ outlined, path, showsMessages, box }) {
    const pen = this.marks.getContext("2d");
    pen.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    pen.clearRect(0, 0, this.width, this.marks.height);
    pen.save();
    pen.beginPath();
    pen.rect(this.room.left, this.room.top, this.room.width, this.room.height);
    pen.clip();
    pen.strokeStyle = pen.fillStyle = this.palette.mark;
    pen.lineWidth = 1.5;
    for (const row of path ?? []) this._outline(pen, row);
    for (let at = 1; at < (path ?? []).length; at++) this._paintLine(pen, path[at - 1], path[at]);
    pen.lineWidth = 1;
    const isTooMuch = showsMessages && !this._paintMessages(pen);
    pen.lineWidth = 2;
    for (const row of outlined) {
      this._outline(pen, row);
      this._paintArrow(pen, this.step.senderOf(row), row);
      this._paintArrow(pen, row, this.step.receiverOf(row));
    }
    if (box) {
      pen.globalAlpha = 0.2;
      pen.fillRect(box.left, box.top, box.right - box.left, box.bottom - box.top);
    }
    pen.restore();
    return isTooMuch;
  }

  _outline(pen, row) {
    const { left, right, top, bottom } = this.box(row);
    pen.strokeRect(left, top + 0.5, Math.max(2, right - left), bottom - top - 1);
  }

  _paintMessages(pen) {
    const { step, view } = this;
    let drawn = 0;
    for (let lane = view.firstLane; lane < view.firstLane + view.numLanes; lane++) {
      const last = step.from[TRACKS * lane + 1];
      for (let row = step.find(TRACKS * lane, view.from); row < last; row++) {
        if (step.begin[row] >= view.to) break;
        if (step.senderOf(row) < 0) continue;
        if (drawn++ >= MOST_ARROWS) return false;
        this._paintArrow(pen, step.senderOf(row), row);
      }
    }
    return true;
  }

  // From the end of one event to where the other had its message.
  _paintArrow(pen, sender, receiver) {
    if (sender < 0 || receiver < 0) return;
    const [x, y] = this._paintLine(pen, sender, receiver);
    pen.beginPath();
    pen.moveTo(x, y);
    pen.lineTo(x - 6, y - 3);
    pen.lineTo(x - 6, y + 3);
    pen.fill();
  }

  _paintLine(pen, before, after) {
    const start = this.box(before);
    const end = this.box(after);
    const [x, y] = [end.left, (end.top + end.bottom) / 2];
    pen.beginPath();
    pen.moveTo(start.right, (start.top + start.bottom) / 2);
    pen.lineTo(x, y);
    pen.stroke();
    return [x, y];
  }

  // Where things are.

  x(tick) {
    const { from, to } = this.view;
    return this.room.left + ((tick - from) / (to - from)) * this.room.width;
  }

  tick(x) {
    const { from, to } = this.view;
    return from + ((x - this.room.left) / this.room.width) * (to - from);
  }

  laneAt(y) {
    return this.view.firstLane + Math.floor((y - this.room.top) / this.laneHeight);
  }

  get laneHeight() {
    return this.room.height / this.view.numLanes;
  }

  box(row) {
    const track = this.step.trackOf(row);
    const high = this.laneHeight;
    const top = this.room.top + (Math.floor(track / TRACKS) - this.view.firstLane) * high;
    const hasStrip = high >= PAIR_PX;
    const cut = hasStrip ? top + high * SHARE_OF_WORK : top + high;
    const isBeside = hasStrip && track % TRACKS === 1;
    return {
      left: this.x(this.step.ready[row]),
      right: this.x(this.step.end[row]),
      top: isBeside ? cut : top,
      bottom: isBeside ? top + high : cut,
    };
  }

  // The event under a point, or -1.
  pick(x, y) {
    const { room, step, view } = this;
    const isInside = x >= room.left && x <= room.left + room.width && y >= room.top;
    const lane = this.laneAt(y);
    if (!isInside || lane < 0 || lane >= step.lanes.length) return -1;
    const hasStrip = this.laneHeight >= PAIR_PX;
    const within = ((y - room.top) % this.laneHeight) / this.laneHeight;
    const isBeside = hasStrip && within > SHARE_OF_WORK;
    const slack = (3 * (view.to - view.from)) / room.width;
    const row = step.pick(TRACKS * lane + (isBeside ? 1 : 0), this.tick(x), slack);
    return row >= 0 || hasStrip ? row : step.pick(TRACKS * lane + 1, this.tick(x), slack);
  }
}
