// Draws the memory of the KV cache as a map of blocks.

import { announce, make } from "./dom.js";
import { channels, palette, setAttribute, setText, Surface } from "./live_canvas.js";
import { aggregate, grid, STATES } from "./live_cells.js";
import { percent, plural, whole } from "./live_numbers.js";
import { SwapView } from "./live_swap.js";

/** [letter, words, colour, strength of the colour]. A block of the quantised store has the colour of its state, and a hole. */
const KINDS = [
  ["u", "used by one request", "data-1", 1],
  ["s", "shared by prefix", "data-3", 1],
  ["c", "cached", "data-5", .75],
  ["h", "hot by session", "data-7", 1],
  ["i", "idle content", "data-6", .75],
  ["f", "free", "data-empty", 1],
];

export class BlocksView {
  constructor(root) {
    this._history = null;
    /** The first block of the cell that the arrow keys moved to, or null. */
    this._active = null;
    this._canvas = make("canvas", { class: "blocks", role: "img", tabindex: "0", onkeydown: (event) => this._onKey(event), onblur: () => this._leave() });
    this._tip = make("div", { class: "tip", hidden: true });
    this._head = make("span", { class: "figure" });
    this._note = make("p", { class: "hint note" });
    this._legend = make("dl", { class: "legend counts" });
    this._counts = new Map();
    root.append(make("header", {}, make("h2", {}, "KV memory"), this._head),
      make("div", { class: "blocks-box" }, this._canvas, this._tip), this._note, this._legend);
    this._swap = new SwapView(root);
    this._surface = new Surface(this._canvas, () => this.draw());
    this._small = document.createElement("canvas");
    this._canvas.addEventListener("pointermove", (event) => this._onPoint(event));
    this._canvas.addEventListener("pointerleave", () => { this._tip.hidden = true; });
  }

  update(history) {
    this._history = history;
    const { frame, info, blocks } = history;
    if (!this._counts.size) this._makeLegend(info);
    const total = info.num_blocks + info.store_blocks;
    const used = frame.blocks_used;
    setText(this._head, `${percent(used / Math.max(1, info.num_blocks))} used · ${whole(frame.blocks_cached)} cached · ${plural(info.num_blocks, "block")} of ${plural(info.block_size, "token")}`);
    for (const [letter, element] of this._counts) {
      const number = letter === "store" ? frame.store_blocks_used : blocks.count(letter) + (info.store_blocks ? blocks.count(letter.toUpperCase()) : 0);
      setText(element, letter === "store" ? `${whole(number)} of ${whole(info.store_blocks)}` : whole(number));
    }
    this._swap.update(history);
    this._summary = `Map of ${plural(total, "block")}, ${percent(used / Math.max(1, info.num_blocks))} used. The arrow keys read single blocks.`;
    if (this._active === null) setAttribute(this._canvas, "aria-label", this._summary);
    const unknown = blocks.count("");
    const { perCell } = this._grid() || { perCell: 1 };
    const parts = [];
    if (perCell > 1) parts.push(`A cell stands for ${whole(perCell)} blocks.`);
    if (unknown) parts.push(`${percent(1 - unknown / Math.max(1, total))} of the map has arrived.`);
    setText(this._note, parts.join(" "));
    this._note.hidden = !parts.length;
    this.draw();
  }

  _makeLegend(info) {
    const add = (letter, words, kind) => {
      const count = make("dd", {});
      this._legend.append(make("div", {}, make("dt", {}, make("i", { class: "swatch block-" + kind }), words), count));
      this._counts.set(letter, count);
    };
    for (const [letter, words] of KINDS) add(letter, words, letter);
    if (info.store_blocks) add("store", "quantised tier", "store");
  }

  _grid() {
    if (!this._surface.width || !this._history) return null;
    return grid(this._history.blocks.codes.length, this._surface.width, this._surface.height);
  }

  draw() {
    const shape = this._grid();
    if (!shape || !this._surface.begin()) return;
    const { states, shares } = aggregate(this._history.blocks.codes, shape.perCell);
    const { columns, rows, size } = shape;
    const image = new ImageData(columns, rows);
    const colours = cellColours();
    for (let cell = 0; cell < states.length; cell++) {
      const [red, green, blue, strength] = colours[states[cell]];
      const share = shape.perCell === 1 ? 1 : shares[cell];
      // A cell is paler the more of its blocks are free, but it stays visible.
      const alpha = share === 0 || shape.perCell === 1 ? strength : strength * (.35 + .65 * share);
      image.data.set([red, green, blue, Math.round(alpha * 255)], cell * 4);
    }
    this._small.width = columns;
    this._small.height = rows;
    this._small.getContext("2d").putImageData(image, 0, 0);
    const { context } = this._surface;
    context.imageSmoothingEnabled = false;
    context.drawImage(this._small, 0, 0, columns * size, rows * size);
    if (size >= 4) this._cutGaps(context, shape);
    if (this._history.info.store_blocks) this._markStore(context, states, shape);
    if (this._active !== null) this._markActive(context, shape);
  }

  _markActive(context, { columns, size, perCell }) {
    const cell = Math.floor(this._active / perCell);
    context.strokeStyle = palette().ink;
    context.lineWidth = 2;
    context.strokeRect((cell % columns) * size, Math.floor(cell / columns) * size, size - 1, size - 1);
  }

  /** Clears the lines between the cells. */
  _cutGaps(context, { columns, rows, size }) {
    const gap = size >= 8 ? 2 : 1;
    context.globalCompositeOperation = "destination-out";
    context.fillStyle = "#000";
    for (let column = 1; column <= columns; column++) context.fillRect(column * size - gap, 0, gap, rows * size);
    for (let row = 1; row <= rows; row++) context.fillRect(0, row * size - gap, columns * size, gap);
    context.globalCompositeOperation = "source-over";
  }

  /** Blocks of the quantised store get a hole in the middle. */
  _markStore(context, states, { columns, size }) {
    const hole = Math.max(1, Math.round(size / 3));
    const shift = Math.floor((size - (size >= 8 ? 2 : 1) - hole) / 2);
    context.fillStyle = palette().panel;
    for (let cell = 0; cell < states.length; cell++) {
      if (states[cell] < STATES.indexOf("U")) continue;
      context.fillRect((cell % columns) * size + shift, Math.floor(cell / columns) * size + shift, hole, hole);
    }
  }

  _onPoint(event) {
    const shape = this._grid();
    if (!shape) return;
    const box = this._canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const column = Math.floor(x / shape.size);
    const first = (Math.floor(y / shape.size) * shape.columns + column) * shape.perCell;
    this._tip.hidden = column >= shape.columns || first >= this._history.blocks.codes.length;
    if (!this._tip.hidden) this._showTip(first, shape, x, y);
  }

  /** Shows near the point (x, y) what the cell with the block `first` stands for. Returns the text. */
  _showTip(first, { perCell }, x, y) {
    const { blocks } = this._history;
    const box = this._canvas.getBoundingClientRect();
    const end = Math.min(blocks.codes.length, first + perCell);
    const found = [...blocks.countWithin(first, end)].map(([letter, count]) => (perCell === 1 ? wordsOf(letter) : `${count} ${wordsOf(letter)}`));
    const text = `${end - first === 1 ? `block ${whole(first)}` : `blocks ${whole(first)}–${whole(end - 1)}`}: ${found.join(", ")}`;
    this._tip.hidden = false;
    setText(this._tip, text);
    const left = Math.max(0, Math.min(x + 12, box.width - this._tip.offsetWidth));
    this._tip.style.transform = `translate(${left}px, ${y > box.height - 48 ? y - 34 : y + 16}px)`;
    return text;
  }

  _onKey(event) {
    const shape = this._grid();
    if (!shape) return;
    const { columns, size, perCell } = shape;
    const last = Math.ceil(this._history.blocks.codes.length / perCell) - 1;
    const cell = this._active === null ? 0 : Math.floor(this._active / perCell);
    const to = { ArrowLeft: cell - 1, ArrowRight: cell + 1, ArrowUp: cell - columns, ArrowDown: cell + columns, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    // The first press of an arrow key chooses the first cell.
    const next = this._active === null && event.key !== "End" ? 0 : Math.max(0, Math.min(last, to));
    this._active = next * perCell;
    const text = this._showTip(this._active, shape, (next % columns) * size, Math.floor(next / columns) * size + size);
    setAttribute(this._canvas, "aria-label", text);
    announce(text);
    this.draw();
  }

  _leave() {
    this._active = null;
    this._tip.hidden = true;
    if (this._summary) setAttribute(this._canvas, "aria-label", this._summary);
    this.draw();
  }
}

function wordsOf(letter) {
  if (!letter) return "not known yet";
  const words = KINDS.find(([kind]) => kind === letter.toLowerCase())[1];
  return letter === letter.toLowerCase() ? words : `${words} (quantised)`;
}

/** The colour of each state of `STATES`: [red, green, blue, opacity]. */
function cellColours() {
  const colours = palette();
  return STATES.map((letter) => {
    if (!letter) return [...channels(colours.line), .6];
    const [, , name, strength] = KINDS.find(([kind]) => kind === letter.toLowerCase());
    return [...channels(colours[name]), strength];
  });
}
