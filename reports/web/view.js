// A picture over an axis: which part of it is seen, and how pointer, wheel and keys move that part.
"use strict";

const DRAG_PX = 5;

// A picture has `view` and `whole`, each from and to on the axis, `least` (the shortest view), `room`
// (where the axis is in it, in pixels), `draw`, `drawMarks`, `point`, `click` and `keys`.
class View {
  constructor(surface, tip) {
    Object.assign(this, { surface, tip, drag: null });
    const place = (event) => {
      const box = surface.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    surface.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      const [x, y] = place(event);
      surface.setPointerCapture(event.pointerId);
      this.drag = { x, y, toX: x, toY: y, isPan: event.shiftKey };
      this.point(null);
    });
    surface.addEventListener("pointermove", (event) => {
      const [x, y] = place(event);
      if (!this.drag) {
        this.point(x, y);
        return;
      }
      if (this.drag.isPan) this.pan((this.drag.toX - x) / this.room.width);
      [this.drag.toX, this.drag.toY] = [x, y];
      this.drawMarks();
    });
    surface.addEventListener("pointerup", (event) => this._drop(...place(event)));
    surface.addEventListener("pointercancel", () => this._drop());
    surface.addEventListener("pointerleave", () => this.point(null));
    surface.addEventListener("dblclick", () => this.showAll());
    surface.addEventListener("wheel", (event) => this._wheel(event, place(event)[0]), { passive: false });
    surface.addEventListener("keydown", (event) => this._press(event));
  }

  showAll() {
    this.move(this.whole);
  }

  move(view) {
    const { whole } = this;
    const length = Math.min(Math.max(view.to - view.from, this.least), whole.to - whole.from);
    const from = Math.min(Math.max(view.from, whole.from), whole.to - length);
    this.view = { ...view, from, to: from + length };
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      this.draw();
    });
  }

  zoom(times, at = (this.view.from + this.view.to) / 2) {
    const { from, to } = this.view;
    this.move({ ...this.view, from: at - (at - from) * times, to: at + (to - at) * times });
  }

  pan(share) {
    const { from, to } = this.view;
    const by = share * (to - from);
    this.move({ ...this.view, from: from + by, to: to + by });
  }

  // Where something is on the axis, and in the picture.
  at(x) {
    return this.view.from + ((x - this.room.left) / this.room.width) * (this.view.to - this.view.from);
  }

  x(at) {
    return this.room.left + ((at - this.view.from) / (this.view.to - this.view.from)) * this.room.width;
  }

  showTip(text, x, y) {
    const width = this.surface.clientWidth;
    const isRight = x > width / 2;
    this.tip.hidden = !text;
    this.tip.textContent = text;
    this.tip.style.left = isRight ? "" : `${x + 14}px`;
    this.tip.style.right = isRight ? `${width - x + 14}px` : "";
    this.tip.style.top = `${y + 14}px`;
  }

  // What a drag marked from top to bottom; null where nothing is to be seen of it.
  dragged() {
    if (!this.drag || this.drag.isPan) return null;
    const { room } = this;
    const { x, toX } = this.drag;
    return {
      left: Math.max(room.left, Math.min(x, toX)),
      right: Math.min(room.left + room.width, Math.max(x, toX)),
      top: room.top,
      bottom: room.top + room.height - 1,
    };
  }

  // The view that a marked box asks for.
  enter(box) {
    const isWide = box.right - box.left >= DRAG_PX;
    return isWide ? { ...this.view, from: this.at(box.left), to: this.at(box.right) } : this.view;
  }

  _drop(x, y) {
    const { drag } = this;
    if (!drag) return;
    const box = this.dragged();
    this.drag = null;
    const isClick = Math.abs(drag.toX - drag.x) < DRAG_PX && Math.abs(drag.toY - drag.y) < 4 * DRAG_PX;
    if (x === undefined || drag.isPan) this.drawMarks();
    else if (isClick) this.click(x, y);
    else this.move(this.enter(box));
  }

  // A plain wheel scrolls the page, as everywhere.
  _wheel(event, x) {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      this.zoom(Math.exp(event.deltaY / 300), this.at(x));
    } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      this.pan(event.deltaX / this.room.width);
    }
  }

  _press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.view) return;
    const does = {
      w: () => this.zoom(0.7),
      "+": () => this.zoom(0.7),
      s: () => this.zoom(1 / 0.7),
      "-": () => this.zoom(1 / 0.7),
      a: () => this.pan(-0.2),
      d: () => this.pan(0.2),
      0: () => this.showAll(),
      ...this.keys,
    }[event.key];
    if (!does) return;
    event.preventDefault();
    does();
  }
}

// The distance between the marks of an axis: 1, 2 or 5 times a power of ten, at least `least`.
function spaceMarks(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((times) => times * power).find((apart) => apart >= least);
}
