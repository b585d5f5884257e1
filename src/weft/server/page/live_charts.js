// Draws the charts of the last minutes.

import { make } from "./dom.js";
import { palette, setAttribute, setText, Surface } from "./live_canvas.js";
import { brief, duration, percent, roundAbove } from "./live_numbers.js";

const CHARTS = [
  { title: "Step time", write: duration, lines: [["step", "mean", "data-1"], ["slowest", "slowest", "data-quiet"]], target: true },
  { title: "Tokens per second", write: brief, lines: [["tokens", "generated", "data-1"], ["prefilled", "prefilled", "data-2"]] },
  { title: "Time to first token", write: duration, lines: [["first50", "median", "data-1"], ["first99", "99%", "data-4"]] },
  { title: "Gap between tokens", write: duration, lines: [["gap50", "median", "data-1"], ["gap99", "99%", "data-4"]] },
  { title: "Prefix hits", write: percent, lines: [["hits", "of prompt tokens", "data-3"]], most: 1 },
  { title: "Requests", write: brief, lines: [["running", "running", "data-1"], ["waiting", "waiting", "data-quiet"]] },
];
const LEFT = 4, RIGHT = 4, TOP = 6, BOTTOM = 16;

export class ChartsView {
  /** `end`: the label at the right end of the time axis. */
  constructor(root, { end }) {
    const box = make("div", { class: "charts" });
    root.append(make("h2", { class: "unseen" }, "The last minutes"), box);
    this._charts = CHARTS.map((chart) => new Chart(box, { ...chart, end }, (at) => this._point(at)));
  }

  update(history) {
    const points = history.series();
    const target = history.info.step_target;
    for (const chart of this._charts) chart.update(points, target, history.binSeconds);
  }

  /** Shows the values of one moment in all charts. */
  _point(at) {
    for (const chart of this._charts) chart.point(at);
  }
}

class Chart {
  constructor(root, definition, onPoint) {
    this._definition = definition;
    this._onPoint = onPoint;
    this._points = [];
    this._at = null;
    this._canvas = make("canvas", { role: "img", tabindex: "0" });
    this._values = definition.lines.map(() => make("b", {}));
    this._when = make("span", { class: "when" });
    const keys = definition.lines.map(([, name, colour], index) =>
      make("span", { class: "key" }, make("i", { class: "swatch line-" + colour }), name + " ", this._values[index]));
    root.append(make("figure", { class: "chart" },
      make("figcaption", {}, make("h3", {}, definition.title), this._when, make("div", { class: "legend" }, keys)), this._canvas));
    this._surface = new Surface(this._canvas, () => this.draw());
    this._canvas.addEventListener("pointermove", (event) => this._onMove(event));
    this._canvas.addEventListener("pointerleave", () => onPoint(null));
    this._canvas.addEventListener("blur", () => onPoint(null));
    this._canvas.addEventListener("keydown", (event) => this._onKey(event));
  }

  update(points, target, binSeconds) {
    this._points = points;
    this._binSeconds = binSeconds;
    this._target = this._definition.target ? target : null;
    this.draw();
  }

  point(at) {
    this._at = at;
    this.draw();
  }

  /** The point whose values are shown: the nearest to the pointer, otherwise the newest. */
  _read() {
    const points = this._points;
    if (!points.length) return null;
    if (this._at === null) return points[points.length - 1];
    return points.reduce((best, one) => (Math.abs(one.at - this._at) < Math.abs(best.at - this._at) ? one : best));
  }

  /** The times at both ends of the chart, at least 60 points apart. */
  _span() {
    const points = this._points;
    const end = points[points.length - 1].at;
    const shortest = this._binSeconds * 60;
    return { start: Math.min(points[0].at, end - shortest), end };
  }

  _onMove(event) {
    if (!this._points.length) return;
    const box = this._canvas.getBoundingClientRect();
    const { start, end } = this._span();
    this._onPoint(start + (event.clientX - box.left - LEFT) / Math.max(1, box.width - LEFT - RIGHT) * (end - start));
  }

  _onKey(event) {
    const points = this._points;
    const read = this._read();
    if (!read) return;
    const index = points.indexOf(read);
    const to = { ArrowLeft: index - 1, ArrowRight: index + 1, PageUp: index - 20, PageDown: index + 20, Home: 0, End: points.length - 1 }[event.key];
    if (to === undefined && event.key !== "Escape") return;
    event.preventDefault();
    event.stopPropagation();
    this._onPoint(event.key === "Escape" ? null : points[Math.max(0, Math.min(to, points.length - 1))].at);
  }

  draw() {
    const { lines, write, title, most } = this._definition;
    const read = this._read();
    lines.forEach(([name], index) => setText(this._values[index], read && read[name] !== null ? write(read[name]) : "–"));
    const ago = read && this._points.length ? this._points[this._points.length - 1].at - read.at : 0;
    setText(this._when, this._at === null || !read ? "" : `${duration(ago)} ago`);
    setAttribute(this._canvas, "aria-label", `${title}${this._at === null ? "" : `, ${duration(ago)} ago`}: ` +
      lines.map(([name, words]) => `${words} ${read && read[name] !== null ? write(read[name]) : "unknown"}`).join(", "));
    if (!this._surface.begin()) return;
    const { context, width, height } = this._surface;
    const colours = palette();
    const values = this._points.flatMap((point) => lines.map(([name]) => point[name])).filter((value) => value !== null);
    const largest = Math.max(0, ...values.slice(-4000), this._target && values.length ? this._target * 1.15 : 0);
    const top = most || roundAbove(largest);
    const y = (value) => TOP + (height - TOP - BOTTOM) * (1 - Math.min(1, value / top));
    this._drawAxis(context, colours, width, height, top, y);
    if (!this._points.length) return;
    const { start, end } = this._span();
    const x = (at) => LEFT + (width - LEFT - RIGHT) * (at - start) / Math.max(1e-9, end - start);
    if (this._target) dashed(context, colours.bad, LEFT, y(this._target), width - RIGHT);
    for (const [name, , colour] of [...lines].reverse()) this._drawLine(context, colours[colour], name, x, y, name === lines[0][0]);
    this._drawTop(context, colours, top, y);
    this._drawTimes(context, colours, width, height, end - start);
    if (this._at !== null && read) this._drawCross(context, colours, read, x, y, height);
  }

  _drawAxis(context, colours, width, height, top, y) {
    context.font = "11px system-ui, sans-serif";
    for (const value of [0, top / 2, top]) {
      context.fillStyle = colours.line;
      context.fillRect(LEFT, Math.round(y(value)), width - LEFT - RIGHT, 1);
    }
  }

  /** Writes the value at the top of the axis. */
  _drawTop(context, colours, top, y) {
    context.fillStyle = colours.soft;
    context.textBaseline = "top";
    const text = this._definition.write(top);
    // An outline keeps the text readable where a line crosses it.
    context.strokeStyle = colours.panel;
    context.lineWidth = 3;
    context.lineJoin = "round";
    context.strokeText(text, LEFT + 2, y(top) + 3);
    context.fillText(text, LEFT + 2, y(top) + 3);
  }

  _drawTimes(context, colours, width, height, span) {
    context.fillStyle = colours.soft;
    context.textBaseline = "bottom";
    context.textAlign = "left";
    context.fillText(`−${duration(span)}`, LEFT, height);
    context.textAlign = "right";
    context.fillText(this._definition.end, width - RIGHT, height);
    context.textAlign = "left";
  }

  _drawLine(context, colour, name, x, y, isFilled) {
    // A pause in the data is a gap in the line.
    const gap = this._binSeconds * 4;
    const parts = [];
    let part = null, last = null;
    for (const point of this._points) {
      const value = point[name];
      if (value === null) { part = null; continue; }
      if (!part || point.at - last > gap) parts.push(part = []);
      part.push([x(point.at), y(value)]);
      last = point.at;
    }
    context.strokeStyle = context.fillStyle = colour;
    context.lineWidth = 1.6;
    context.lineJoin = "round";
    for (const found of parts) {
      context.beginPath();
      found.forEach(([px, py], index) => (index ? context.lineTo(px, py) : context.moveTo(px, py)));
      if (found.length === 1) context.fillRect(found[0][0] - 1, found[0][1] - 1, 2, 2);
      context.stroke();
      if (!isFilled) continue;
      context.lineTo(found[found.length - 1][0], y(0));
      context.lineTo(found[0][0], y(0));
      context.globalAlpha = .12;
      context.fill();
      context.globalAlpha = 1;
    }
  }

  /** Marks the moment that is read, with a dot on each line. */
  _drawCross(context, colours, read, x, y, height) {
    context.fillStyle = colours.edge;
    context.fillRect(Math.round(x(read.at)), TOP, 1, height - TOP - BOTTOM);
    for (const [name, , colour] of this._definition.lines) {
      if (read[name] === null) continue;
      context.fillStyle = colours[colour];
      context.beginPath();
      context.arc(x(read.at), y(read[name]), 3.5, 0, 7);
      context.fill();
    }
  }
}

function dashed(context, colour, left, y, right) {
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.setLineDash([5, 4]);
  context.beginPath();
  context.moveTo(left, Math.round(y) + .5);
  context.lineTo(right, Math.round(y) + .5);
  context.stroke();
  context.setLineDash([]);
}
