// Draws the swap space: a cell for each slot, in the order of the requests whose blocks are there.

import { make } from "./dom.js";
import { palette, setAttribute, setText, Surface } from "./live_canvas.js";
import { grid } from "./live_cells.js";
import { plural, shortId, whole } from "./live_numbers.js";

/** The requests with blocks in the swap space: [{id, first, end}] with slots counted from zero. Frames say only how many
 *  slots a request has, so the positions are assigned in request order. */
export function slotsOf({ requests, swap_blocks_used: used }) {
  const found = [];
  let first = 0;
  for (const request of requests) {
    if (request.state !== "swapped") continue;
    const end = Math.min(used, first + request.num_blocks);
    if (end > first) found.push({ id: request.request_id, first, end });
    first = end;
  }
  return found;
}

export class SwapView {
  constructor(root) {
    this._slots = [];
    this._total = this._used = 0;
    this._canvas = make("canvas", { role: "img" });
    this._tip = make("div", { class: "tip", hidden: true });
    this._text = make("span", {});
    this._element = make("div", { class: "swap", hidden: true }, make("div", { class: "swap-head" }, make("span", {}, "Swap space"), this._text),
      make("div", { class: "swap-box" }, this._canvas, this._tip));
    root.append(this._element);
    this._surface = new Surface(this._canvas, () => this._draw());
    this._canvas.addEventListener("pointermove", (event) => this._onPoint(event));
    this._canvas.addEventListener("pointerleave", () => { this._tip.hidden = true; });
  }

  update({ info, frame }) {
    this._element.hidden = !info.swap_blocks;
    if (!info.swap_blocks) return;
    this._total = info.swap_blocks;
    this._used = frame.swap_blocks_used;
    this._slots = slotsOf(frame);
    setText(this._text, `${whole(this._used)} of ${plural(this._total, "slot")}`);
    const of = this._slots.map(({ id, first, end }) => `${shortId(id)} ${whole(end - first)}`);
    setAttribute(this._canvas, "aria-label", `Swap space: ${whole(this._used)} of ${plural(this._total, "slot")} in use${of.length ? `; ${of.slice(0, 8).join(", ")}` : ""}`);
    this._draw();
  }

  _grid() {
    return this._surface.width && this._total ? grid(this._total, this._surface.width, this._surface.height, { largest: 12 }) : null;
  }

  _draw() {
    const shape = this._grid();
    if (!shape || !this._surface.begin()) return;
    const { columns, size, perCell } = shape, { context } = this._surface;
    const colours = palette(), gap = size >= 6 ? 2 : 1;
    const starts = new Set(this._slots.map(({ first }) => Math.floor(first / perCell)));
    let isOdd = false;
    for (let cell = 0; cell * perCell < this._total; cell++) {
      // Neighbouring requests have different shades.
      if (starts.has(cell)) isOdd = !isOdd;
      const isUsed = cell * perCell < this._used;
      context.fillStyle = colours[isUsed ? "data-5" : "data-empty"];
      context.globalAlpha = isUsed && isOdd ? .6 : 1;
      context.fillRect((cell % columns) * size, Math.floor(cell / columns) * size, size - gap, size - gap);
    }
    context.globalAlpha = 1;
  }

  _onPoint(event) {
    const shape = this._grid();
    if (!shape) return;
    const box = this._canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const slot = (Math.floor(y / shape.size) * shape.columns + Math.floor(x / shape.size)) * shape.perCell;
    this._tip.hidden = slot >= this._total || x >= shape.columns * shape.size;
    if (this._tip.hidden) return;
    const owner = this._slots.find(({ first, end }) => first <= slot && slot < end);
    setText(this._tip, owner ? `request ${shortId(owner.id)}: ${plural(owner.end - owner.first, "slot")}` : slot < this._used ? "in use" : "free");
    const left = Math.max(0, Math.min(x + 12, box.width - this._tip.offsetWidth));
    this._tip.style.transform = `translate(${left}px, -1.9rem)`;
  }
}
