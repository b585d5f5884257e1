// Draws the whole log over the slider: step times, waiting requests and preemptions. A click moves to a frame.

import { make } from "./dom.js";
import { onTheme, palette, setText, Surface } from "./live_canvas.js";
import { duration, plural, whole } from "./live_numbers.js";

/** Pixels at the top that belong to the preemptions. */
const TOP = 8;

export class OverviewStrip {
  /** `seek(index)` shows a frame. */
  constructor(seek) {
    this._overview = null;
    this._total = 0;
    this._shown = 0;
    this._canvas = make("canvas", { "aria-hidden": "true", onclick: (event) => this._total && seek(this._frameAt(event)) });
    this._tip = make("div", { class: "tip", hidden: true });
    const key = (kind, text) => make("span", { class: "key" }, make("i", { class: "swatch " + kind }), text);
    this.element = make("div", { class: "overview", hidden: true },
      make("div", { class: "legend" }, key("line-bad", "preempted"), key("line-data-quiet", "waiting"), key("line-data-1", "step time")),
      make("div", { class: "overview-box" }, this._canvas, this._tip));
    this._surface = new Surface(this._canvas, () => this._draw());
    this._canvas.addEventListener("pointermove", (event) => this._onPoint(event));
    this._canvas.addEventListener("pointerleave", () => { this._tip.hidden = true; });
    onTheme(() => this._draw());
  }

  get hasPreemptions() {
    return Boolean(this._overview?.preemptions.some((number) => number > 0));
  }

  /** `overview` is the response of /replay/overview. */
  update(overview) {
    this._overview = overview;
    this._total = overview.num_frames;
    this.element.hidden = overview.waiting.length < 2;
    this._draw();
  }

  /** Marks the frame that is shown. */
  mark(index) {
    this._shown = index;
    this._draw();
  }

  _frameAt(event) {
    const box = this._canvas.getBoundingClientRect();
    const share = (event.clientX - box.left) / Math.max(1, box.width);
    return Math.max(0, Math.min(this._total - 1, Math.floor(share * this._total)));
  }

  _onPoint(event) {
    if (!this._total) return;
    const { frames_per_bin: size, step_seconds: seconds, waiting, preemptions } = this._overview;
    const bin = Math.min(waiting.length - 1, Math.floor(this._frameAt(event) / size));
    const first = bin * size + 1, last = Math.min(this._total, (bin + 1) * size);
    this._tip.hidden = false;
    setText(this._tip, `${first === last ? `frame ${whole(first)}` : `frames ${whole(first)}–${whole(last)}`}: longest step ${duration(seconds[bin])}, ` +
      `${whole(waiting[bin])} waiting, ${plural(preemptions[bin], "preemption")}`);
    const box = this._canvas.getBoundingClientRect();
    const left = Math.max(0, Math.min(event.clientX - box.left - 60, box.width - this._tip.offsetWidth));
    this._tip.style.transform = `translate(${left}px, -1.9rem)`;
  }

  _draw() {
    if (!this._total || !this._surface.begin()) return;
    const { context, width, height } = this._surface;
    const { frames_per_bin: size, step_seconds: seconds, waiting, preemptions } = this._overview;
    const colours = palette();
    const room = height - TOP;
    const each = width * size / this._total;
    const draw = (values, colour, alpha) => {
      const most = Math.max(...values);
      if (!most) return;
      context.fillStyle = colour;
      context.globalAlpha = alpha;
      values.forEach((value, bin) => {
        const tall = Math.round(room * value / most);
        context.fillRect(bin * each, height - tall, Math.max(1, each), tall);
      });
      context.globalAlpha = 1;
    };
    draw(waiting, colours["data-quiet"], .45);
    draw(seconds, colours["data-1"], .8);
    context.fillStyle = colours.bad;
    preemptions.forEach((number, bin) => { if (number) context.fillRect(bin * each, 0, Math.max(2, each), TOP - 2); });
    context.fillStyle = colours.ink;
    context.fillRect(Math.min(width - 2, (this._shown + .5) / this._total * width - 1), 0, 2, height);
  }
}
