// Draws the batch: one row for each row of the engine, with its request and a band of its last steps.

import { make } from "./dom.js";
import { MARKS } from "./live_band.js";
import { palette, Pool, setAttribute, setText, Surface } from "./live_canvas.js";
import { duration, percent, plural, shortId, whole } from "./live_numbers.js";

/** Heights of rows in pixels. Rows are as tall as the panel allows. In the overview they may be lower, and have no text. */
const TALLEST = 26, SHORTEST = 14, LOWEST = 3;
const COLUMN_WIDTH = 4;
/** At most this many rows are elements at the same time. */
const MAX_ELEMENTS = 64;

/** `open(id)` shows the life of a request. `idle` is the text that is shown while no request runs. */
export class BatchView {
  constructor(root, { open, idle }) {
    this._open = open;
    this._history = null;
    this._rows = [];
    this._active = 0;
    this._height = TALLEST;
    this._isOverview = false;
    this._chosen = null;
    this._canvas = make("canvas", { class: "band", "aria-hidden": "true" });
    this._space = make("div", { class: "batch-space", role: "presentation" });
    this._list = make("div", { class: "batch-list", role: "listbox", tabindex: "0", "aria-label": "Rows of the batch",
      onscroll: () => this.draw(), onkeydown: (event) => this._onKey(event), onfocus: () => this._markActive(),
      onblur: () => this._markActive() }, this._space);
    this._empty = make("p", { class: "empty" }, idle);
    this._tip = make("div", { class: "tip", hidden: true });
    this._head = make("span", { class: "figure" });
    this._box = make("div", { class: "batch-box" }, this._canvas, this._list, this._empty, this._tip);
    this._overview = make("button", { type: "button", class: "quiet small", "aria-pressed": "false", hidden: true,
      onclick: () => this._toggleOverview() }, "Overview");
    root.append(make("header", {}, make("h2", {}, "Batch"), this._head, make("span", { class: "grow" }), this._overview, legend()), this._box);
    this._surface = new Surface(this._canvas, () => this.draw());
    this._pool = new Pool(this._space, () => this._makeRow());
    this._list.addEventListener("pointermove", (event) => this._onPoint(event));
    this._list.addEventListener("pointerleave", () => { this._tip.hidden = true; });
    this._list.addEventListener("click", (event) => this._onClick(event));
  }

  /** `chosen`: the id of the request whose life is shown, or null. */
  update(history, chosen) {
    this._history = history;
    this._chosen = chosen;
    this._rows = rowsOf(history, this._columns());
    this._active = Math.max(0, Math.min(this._active, this._rows.length - 1));
    this.draw();
  }

  _stepsText() {
    const { band } = this._history;
    if (!band.count) return "";
    const first = band.column(Math.max(band.first, band.count - this._columns() + 1)).first, { last } = band.column(band.count - 1);
    return ` · steps ${whole(first)}–${whole(last)}`;
  }

  /** How many columns fit on the band. */
  _columns() {
    return Math.max(8, Math.ceil((this._surface.width - this._bandLeft() - this._right()) / COLUMN_WIDTH) + 1);
  }

  _toggleOverview() {
    this._isOverview = !this._isOverview;
    setAttribute(this._overview, "aria-pressed", String(this._isOverview));
    this._list.classList.toggle("is-overview", this._isOverview);
    this._list.scrollTop = 0;
    this.draw();
  }

  /** The x position where the band begins, in pixels. The labels of the rows are to the left of it. */
  _bandLeft() {
    if (this._isOverview) return 14;
    return this._surface.width < 480 ? 88 : 104;
  }

  /** The width to the right of the band, in pixels. The numbers of tokens are there. */
  _right() {
    if (this._isOverview) return 8;
    return this._surface.width < 480 ? 8 : 140;
  }

  draw() {
    if (!this._history) return;
    const rows = this._rows;
    const running = rows.filter((row) => row.request && row.row >= 0).length;
    setText(this._head, `${whole(running)} of ${plural(this._history.info.num_rows, "row")} in use${this._stepsText()}`);
    const fitting = Math.floor(this._surface.height / Math.max(1, rows.length));
    this._overview.hidden = fitting >= SHORTEST && !this._isOverview;
    this._empty.hidden = rows.length > 0;
    this._list.hidden = rows.length === 0;
    this._height = Math.max(this._isOverview ? LOWEST : SHORTEST, Math.min(TALLEST, fitting));
    this._list.style.setProperty("--row", this._height + "px");
    this._space.style.height = rows.length * this._height + "px";
    const top = this._list.scrollTop;
    const first = Math.max(0, Math.floor(top / this._height));
    const end = Math.min(rows.length, Math.ceil((top + this._list.clientHeight) / this._height));
    this._shown = this._isOverview ? [Math.max(first, Math.min(this._active, end - 1))] : Array.from({ length: Math.min(end - first, MAX_ELEMENTS) }, (_, index) => first + index);
    this._pool.show(this._shown.map((index) => ({ ...rows[index], index })));
    this._markActive();
    if (!this._surface.begin()) return;
    const context = this._surface.context;
    const left = this._bandLeft(), right = this._surface.width - this._right();
    context.save();
    context.beginPath();
    context.rect(left, 0, right - left, this._surface.height);
    context.clip();
    this._drawGaps(context, left, right);
    for (let index = first; index < end; index++) {
      const y = index * this._height - top;
      const row = rows[index];
      const isLow = this._height < SHORTEST;
      const height = isLow ? this._height - 1 : this._height - 5;
      if (!isLow) {
        context.fillStyle = palette().line;
        context.fillRect(left, y + this._height - 1, right - left, 1);
      }
      if (row.row >= 0) this._drawBand(context, row.row, isLow ? y : y + 2, height, left, right, isLow);
      else hatch(context, left, y + 2, right - left, height, colourOfState(row.request.state));
    }
    context.restore();
  }

  /** Draws a dashed line where steps are missing between two columns. */
  _drawGaps(context, left, right) {
    const { band } = this._history;
    context.fillStyle = palette().edge;
    for (let number = band.count - 1, x = right - COLUMN_WIDTH; number >= band.first && x > left - COLUMN_WIDTH; number--, x -= COLUMN_WIDTH) {
      if (band.column(number).gap) for (let y = 0; y < this._surface.height; y += 6) context.fillRect(x - .5, y, 1, 3);
    }
  }

  /** Draws the cells of one row, the newest at the right end. If `isLow`, the row is too low for marks: each step has one colour only. */
  _drawBand(context, row, y, height, left, right, isLow) {
    const { band } = this._history;
    const colours = palette();
    const base = y + height;
    let x = right - COLUMN_WIDTH;
    const marks = [];
    // Equal neighbouring cells are drawn as one rectangle.
    let run = null;
    const flush = () => {
      if (run) {
        context.globalAlpha = run.alpha;
        context.fillStyle = run.colour;
        context.fillRect(run.x, base - run.height, run.width, run.height);
        context.globalAlpha = 1;
      }
      run = null;
    };
    for (let number = band.count - 1; number >= band.first && x > left - COLUMN_WIDTH; number--, x -= COLUMN_WIDTH) {
      const cell = band.at(number, row);
      if (!band.owner[cell]) { flush(); continue; }
      let next;
      if (band.prefill[cell] > 0) {
        next = { colour: colours["data-2"], alpha: Math.min(1, .45 + Math.log2(1 + band.prefill[cell]) / 18), height, width: COLUMN_WIDTH - 1 };
      } else if (band.decode[cell] > 0) {
        next = { colour: colours[isLow && band.accepted[cell] > 0 ? "data-3" : "data-1"], alpha: 1, width: COLUMN_WIDTH,
          height: isLow ? height : Math.max(2, Math.round(height * .42 * Math.min(1, band.decode[cell]))) };
      } else next = { colour: colours["data-empty"], alpha: 1, height: Math.min(2, height), width: COLUMN_WIDTH };
      const isPrefill = next.width < COLUMN_WIDTH;
      if (run && !isPrefill && run.colour === next.colour && run.height === next.height) { run.x = x; run.width += COLUMN_WIDTH; }
      else { flush(); run = { ...next, x }; if (isPrefill) flush(); }
      if (isLow) continue;
      if (band.accepted[cell] > 0 || band.rejected[cell] > 0) this._drawDrafts(context, cell, x, y, height);
      if (band.marks[cell]) marks.push([x, band.marks[cell]]);
    }
    flush();
    for (const [at, mark] of marks) drawMarks(context, mark, at, y, height);
  }

  /** Draws accepted draft tokens above the token of the step, and rejected ones from the top of the row downwards. */
  _drawDrafts(context, cell, x, y, height) {
    const { band } = this._history;
    const colours = palette();
    const unit = Math.max(2, height * .14);
    const token = Math.max(2, Math.round(height * .42 * Math.min(1, band.decode[cell])));
    const accepted = Math.min(height * .4, band.accepted[cell] * unit);
    context.fillStyle = colours["data-3"];
    context.fillRect(x, y + height - token - accepted, COLUMN_WIDTH, accepted);
    const rejected = Math.min(height * .25, band.rejected[cell] * unit * .7);
    context.fillStyle = colours["data-4"];
    context.fillRect(x, y - 1, COLUMN_WIDTH, rejected);
  }

  // --- the rows as elements: only those in view ---

  _makeRow() {
    const dot = make("i", { class: "dot" });
    const name = make("span", { class: "mono name" });
    const state = make("span", { class: "unseen" });
    const meter = make("span", { class: "meter" }, make("i"));
    const tokens = make("span", { class: "tokens" });
    const element = make("div", { class: "batch-row", role: "option", "aria-selected": "false" }, dot, name, state, tokens, meter);
    const update = (row, position) => {
      const { request, life, index } = row;
      element.id = "batch-row-" + position;
      element.style.transform = `translateY(${index * this._height}px)`;
      setAttribute(element, "aria-posinset", index + 1);
      element.classList.toggle("is-chosen", Boolean(life) && life.id === this._chosen);
      setAttribute(element, "aria-setsize", this._rows.length);
      setAttribute(element, "data-state", request ? request.state : life ? "ended" : "idle");
      setAttribute(element, "data-id", life?.id ?? "");
      setText(name, life ? nameOf(life) : "–");
      setText(state, request ? request.state : life ? "ended" : "idle");
      const shown = life?.request;
      setText(tokens, shown ? `${whole(shown.num_tokens)} / ${whole(shown.limit)}` : "");
      const share = shown ? Math.min(1, shown.num_tokens / Math.max(1, shown.limit)) : 0;
      meter.firstChild.style.width = Math.round(share * 100) + "%";
      meter.hidden = !shown;
      if (document.activeElement === this._list) setAttribute(element, "aria-label", row.row >= 0 ? `Row ${row.row}: ${describe(row)}` : describe(row));
    };
    return { element, update };
  }

  _markActive() {
    const hasFocus = document.activeElement === this._list;
    this._pool.items.forEach(({ element }, index) => {
      const isActive = hasFocus && !element.hidden && this._shown[index] === this._active;
      setAttribute(element, "aria-selected", isActive ? "true" : "false");
      if (isActive) setAttribute(this._list, "aria-activedescendant", element.id);
    });
    if (!hasFocus) setAttribute(this._list, "aria-activedescendant", null);
  }

  _onKey(event) {
    const page = Math.max(1, Math.floor(this._list.clientHeight / this._height) - 1);
    const to = { ArrowDown: this._active + 1, ArrowUp: this._active - 1, PageDown: this._active + page, PageUp: this._active - page,
      Home: 0, End: this._rows.length - 1 }[event.key];
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      event.stopPropagation();
      const life = this._rows[this._active]?.life;
      if (life) this._open(life.id);
    } else if (to !== undefined) {
      event.preventDefault();
      event.stopPropagation();
      this._active = Math.max(0, Math.min(to, this._rows.length - 1));
      const top = this._active * this._height;
      if (top < this._list.scrollTop) this._list.scrollTop = top;
      else if (top + this._height > this._list.scrollTop + this._list.clientHeight) this._list.scrollTop = top + this._height - this._list.clientHeight;
      this.draw();
    }
  }

  /** What is under the pointer: {} or {index, row, x}; on a column of the band also {cell, column, life}. */
  _find(event) {
    const box = this._list.getBoundingClientRect();
    const index = Math.floor((event.clientY - box.top + this._list.scrollTop) / this._height);
    const row = this._rows[index];
    const x = event.clientX - box.left;
    const right = this._surface.width - this._right();
    if (!row) return {};
    if (x < this._bandLeft() || x >= right || row.row < 0) return { index, row, x };
    const { band } = this._history;
    const number = band.count - 1 - Math.floor((right - x) / COLUMN_WIDTH);
    if (number < band.first || number < 0) return { index, row, x };
    const cell = band.at(number, row.row);
    return { index, row, x, cell, column: band.column(number), life: this._history.lifeOfNumber(band.owner[cell]) };
  }

  _onClick(event) {
    const { index, row, life } = this._find(event);
    if (!row) return;
    this._active = index;
    const chosen = life || row.life;
    if (chosen) this._open(chosen.id);
  }

  _onPoint(event) {
    if (!this._history) return;
    const { index, cell, column, life, x } = this._find(event);
    this._tip.hidden = cell === undefined || !life;
    if (this._tip.hidden) return;
    setText(this._tip, cellText(this._history.band, cell, column, life));
    const y = (index + 1) * this._height - this._list.scrollTop + 4;
    const isLow = y > this._list.clientHeight - 40;
    this._tip.style.transform = `translate(${Math.max(4, Math.min(x - 60, this._surface.width - this._tip.offsetWidth - 4))}px, ${isLow ? y - this._height - 34 : y}px)`;
  }
}

/** The rows to draw: rows of the engine with content, then requests that have no row any more. */
function rowsOf(history, columns) {
  const { band, frame } = history;
  const inRow = new Map(), rest = [];
  for (const request of frame.requests) {
    if (request.row >= 0) inRow.set(request.row, request);
    else if (["preempted", "swapped", "paused"].includes(request.state)) rest.push(request);
  }
  let number = Math.min(band.numRows, band.rowsInUse(columns));
  for (const row of inRow.keys()) number = Math.max(number, row + 1);
  const rows = [];
  for (let row = 0; row < number; row++) {
    const request = inRow.get(row) || null;
    rows.push({ row, request, life: request ? history.lives.get(request.request_id) : lastOwner(history, row, columns) });
  }
  for (const request of rest.slice(0, 64)) rows.push({ row: -1, request, life: history.lives.get(request.request_id) });
  return rows;
}

/** The id, and the number of requests that share the sequence. The column has room for nine letters. */
function nameOf({ id, readers }) {
  const number = readers.length > 1 ? "×" + readers.length : "";
  return shortId(id).slice(0, number ? 9 - number.length : undefined) + number;
}

/** The request that ended in a row. Null if it continues in another row or waits. */
function lastOwner(history, row, columns) {
  const { band } = history;
  for (let number = band.count - 1; number >= Math.max(band.first, band.count - columns); number--) {
    const owner = band.owner[band.at(number, row)];
    const life = owner && history.lifeOfNumber(owner);
    if (life) return life.end ? life : null;
  }
  return null;
}

function describe({ request, life }) {
  if (!request) return life ? `request ${shortId(life.id)}, ended` : "idle";
  const number = life?.readers.length ?? 0;
  return `request ${shortId(request.request_id)}${number > 1 ? `, shared by ${number} requests` : ""}, ${request.state}, ${whole(request.num_tokens)} of ${plural(request.limit, "token")}`;
}

/** What the tip says about a cell. */
function cellText(band, cell, column, life) {
  const steps = column.first === column.last ? `step ${whole(column.first)}` : `steps ${whole(column.first)}–${whole(column.last)}`;
  const parts = [shortId(life.id), steps, duration(column.seconds)];
  if (band.prefill[cell]) parts.push(plural(band.prefill[cell], "prompt token"));
  if (band.decode[cell]) parts.push(`${(band.decode[cell] + band.accepted[cell]).toFixed(1)} tokens a step`);
  const drafted = band.accepted[cell] + band.rejected[cell];
  if (drafted) parts.push(`${percent(band.accepted[cell] / drafted)} of drafts accepted`);
  for (const [name, bit] of Object.entries(MARKS)) if (band.marks[cell] & bit) parts.push(name.replace("_", " "));
  return parts.join(" · ");
}

function colourOfState(state) {
  const colours = palette();
  return { swapped: colours["data-5"], preempted: colours.bad, paused: colours["data-quiet"] }[state] || colours["data-quiet"];
}

/** Fills a rectangle with diagonal lines. */
function hatch(context, x, y, width, height, colour) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = colour;
  context.globalAlpha = .45;
  context.lineWidth = 1.5;
  context.beginPath();
  for (let at = x - height; at < x + width; at += 7) { context.moveTo(at, y + height); context.lineTo(at + height, y); }
  context.stroke();
  context.restore();
}

/** Each mark has a shape of its own, so that colours are not needed to tell them apart. */
function drawMarks(context, marks, x, y, height) {
  const colours = palette();
  const middle = x + COLUMN_WIDTH / 2;
  if (marks & MARKS.admitted) {
    context.fillStyle = colours.ink;
    context.beginPath();
    context.moveTo(x - 1, y - 1);
    context.lineTo(x + 6, y + height / 2);
    context.lineTo(x - 1, y + height + 1);
    context.fill();
  }
  if (marks & MARKS.first_token) triangle(context, colours.ink, middle, y - 2, 1);
  if (marks & MARKS.finished) {
    context.fillStyle = colours.ink;
    const side = Math.min(8, height - 2);
    context.fillRect(middle - side / 2, y + (height - side) / 2, side, side);
  }
  if (marks & MARKS.preempted) cross(context, colours.bad, middle, y + height / 2);
  if (marks & MARKS.swapped_out) triangle(context, colours["data-5"], middle, y + height - 6, 1.5);
  if (marks & MARKS.swapped_in) triangle(context, colours["data-5"], middle, y + height, -1.5);
}

function triangle(context, colour, x, y, size) {
  context.fillStyle = colour;
  context.beginPath();
  context.moveTo(x - 4 * Math.abs(size), y);
  context.lineTo(x + 4 * Math.abs(size), y);
  context.lineTo(x, y + 5 * size);
  context.fill();
}

function cross(context, colour, x, y) {
  context.strokeStyle = colour;
  context.lineWidth = 2;
  context.beginPath();
  context.moveTo(x - 4, y - 4); context.lineTo(x + 4, y + 4);
  context.moveTo(x + 4, y - 4); context.lineTo(x - 4, y + 4);
  context.stroke();
}

function legend() {
  const glyph = (sign, text, kind = "") => make("span", { class: "key" }, make("span", { class: "glyph " + kind, "aria-hidden": "true" }, sign), text);
  const item = (kind, text) => make("span", { class: "key" }, make("i", { class: "swatch " + kind }), text);
  return make("div", { class: "legend" }, item("prefill", "prefill"), item("decode", "decode"), item("accepted", "accepted drafts"),
    item("rejected", "rejected drafts"), glyph("▸", "admitted"), glyph("▾", "first token"), glyph("■", "end"), glyph("✕", "preempted", "is-bad"), glyph("▼", "swapped out", "is-swap"),
    glyph("▲", "swapped in", "is-swap"), item("preempted", "waits to resume"), item("swapped", "waits in swap space"));
}
