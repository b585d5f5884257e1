// Shows the life of one request: what happened when, and a button that cancels it.

import { ApiError } from "./api.js";
import { announce, button, make, toast } from "./dom.js";
import { newLife } from "./live_history.js";
import { onTheme, palette, Pool, setAttribute, setText, Surface } from "./live_canvas.js";
import { brief, duration, percent, plural, priorityNames, requestOf, shortId, whole } from "./live_numbers.js";
import { endOf, inTime } from "./live_queue.js";

const PHASES = { waiting: ["queued", "data-quiet"], prefilling: ["prefill", "data-2"], decoding: ["decode", "data-1"],
  preempted: ["preempted", "bad"], paused: ["paused", "data-6"], swapped: ["swapped", "data-5"] };
const MAX_LINES = 120, MAX_OTHERS = 40;

/** The phases of a life: [{state, from, to}], from its events and from the states that frames showed. */
export function phasesOf(life, now) {
  const changes = [];
  const { request } = life;
  for (const { at, state } of life.samples) changes.push({ at, state });
  for (const event of life.events) {
    const state = { queued: "waiting", admitted: "prefilling", chunk: "prefilling", first_token: "decoding", swapped_in: "decoding",
      preempted: event.first ? "swapped" : "preempted" }[event.kind];
    if (state) changes.push({ at: event.at, state });
  }
  if (request) {
    changes.push({ at: request.arrived_at, state: "waiting" });
    if (request.admitted_at !== null) changes.push({ at: request.admitted_at, state: "prefilling" });
    if (request.first_token_at !== null) changes.push({ at: request.first_token_at, state: "decoding" });
  }
  changes.sort((a, b) => a.at - b.at);
  const phases = [];
  for (const { at, state } of changes) {
    const last = phases[phases.length - 1];
    if (last?.state === state) continue;
    if (last) last.to = at;
    phases.push({ state, from: at, to: null });
  }
  const end = life.end ? life.end.at : now;
  if (phases.length) phases[phases.length - 1].to = Math.max(end, phases[phases.length - 1].from);
  return phases.filter((phase) => phase.to > phase.from || phases.length === 1);
}

/** The events as lines: {at, text}. Consecutive chunks are one line. */
export function linesOf(life, reasons) {
  const lines = [];
  const { request } = life;
  let chunk = null;
  if (request && !life.events.some((event) => event.kind === "queued")) lines.push({ at: request.arrived_at, text: "queued" });
  if (request && request.admitted_at !== null && !life.events.some((event) => event.kind === "admitted")) {
    lines.push({ at: request.admitted_at, text: `admitted, ${plural(request.cached_tokens, "token")} from the prefix cache` });
  }
  for (const event of life.events) {
    if (event.kind === "chunk") {
      if (chunk) {
        chunk.number++;
        chunk.end = event.first + event.second;
        chunk.line.text = `prefill of the tokens ${whole(chunk.first)}–${whole(chunk.end)} in ${plural(chunk.number, "chunk")}, steps ${whole(chunk.step)}–${whole(event.step)}`;
      } else {
        const line = { at: event.at, text: `prefill of the tokens ${whole(event.first)}–${whole(event.first + event.second)} in one chunk, step ${whole(event.step)}` };
        lines.push(line);
        chunk = { line, number: 1, first: event.first, end: event.first + event.second, step: event.step };
      }
      continue;
    }
    chunk = null;
    lines.push({ at: event.at, text: eventText(event, life, reasons) });
  }
  if (life.end && !["finished", "failed"].includes(life.end.kind)) lines.push({ at: life.end.at, text: endOf(life, reasons) });
  if (request && request.first_token_at !== null && !life.events.some((event) => event.kind === "first_token")) {
    lines.push({ at: request.first_token_at, text: "first token" });
  }
  return lines.sort((a, b) => a.at - b.at);
}

function eventText(event, life, reasons) {
  switch (event.kind) {
    case "admitted": return `admitted to row ${event.first}, ${plural(event.second, "token")} from the prefix cache`;
    case "preempted": return event.first ? "preempted, its blocks moved to the swap space" : "preempted, its blocks freed";
    case "swapped_in": return "swapped in";
    case "first_token": return "first token";
    case "finished": return `finished: ${endOf(life, reasons) || reasons[event.first]}`;
    default: return event.kind;
  }
}

/** Whether a request ended before the sequence that it shared. */
function hasLeft({ id, readers }) {
  return readers.length > 0 && !readers.some((one) => one.request_id === id);
}

export class RequestView {
  /** `onClose()` is called after the panel was closed. */
  constructor(root, { info, api, onClose }) {
    this._api = api;
    this._info = info;
    this._onClose = onClose;
    this._priorities = priorityNames(info.priorities);
    this._life = null;
    this._title = make("h2", { id: "request-title", tabindex: "-1" });
    this._facts = make("dl", { class: "facts" });
    this._factNodes = new Map();
    this._canvas = make("canvas", { class: "life", role: "img" });
    this._legend = make("div", { class: "legend" });
    this._lifeBox = make("div", { class: "life-box" }, this._canvas);
    this._linesHead = make("h3", {}, "Events");
    this._lines = make("ol", { class: "lines" });
    this._note = make("p", { class: "hint" });
    this._lineNodes = [];
    this._text = make("div", { class: "texts" });
    this._othersHead = make("h3", {});
    this._others = make("ul", { class: "ended" });
    this._otherRows = new Pool(this._others, () => this._makeOther());
    this._cancel = make("button", { type: "button", class: "danger", onclick: () => this._cancelRequest() });
    this._showText = make("button", { type: "button", class: "quiet", onclick: () => this._loadText() }, "Show its text");
    this.element = make("aside", { class: "request panel", "aria-labelledby": "request-title", hidden: true },
      make("header", {}, this._title, make("span", { class: "grow" }), button("close", "Close", () => this.close())),
      this._facts, this._lifeBox, this._legend,
      make("div", { class: "row" }, this._cancel, this._showText), this._text, this._othersHead, this._others, this._linesHead, this._note, this._lines);
    this.element.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.close();
    });
    root.append(this.element);
    for (const [name, colour] of Object.values(PHASES)) this._legend.append(make("span", { class: "key" }, make("i", { class: "swatch line-" + colour }), name));
    this._surface = new Surface(this._canvas, () => this._drawLife());
    this._offTheme = onTheme(() => this._drawLife());
  }

  get isOpen() {
    return !this.element.hidden;
  }

  get id() {
    return this._life?.id ?? null;
  }

  /** The id of the sequence that the request reads. The batch has its row under this id. */
  get sequence() {
    return this._life?.sequence ?? this.id;
  }

  open(history, id) {
    const life = history.lifeOf(id);
    if (!life) return;
    this._before = this.isOpen ? this._before : document.activeElement;
    if (this._life?.id !== id) this._text.replaceChildren();
    this._life = life;
    this.element.hidden = false;
    this.update(history);
    this._title.focus();
  }

  close() {
    this.element.hidden = true;
    this._life = null;
    this._before?.focus?.();
    this._onClose();
  }

  update(history) {
    if (!this.isOpen || !this._life) return;
    // A seek in a replay begins a new history, which may not have this request.
    const known = history.lifeOf(this._life.id, this._life.sequence);
    this._life = known || (this._info.mode === "replay" ? newLife(this._life.id, 0) : this._life);
    this._history = history;
    this._now = history.frame.at;
    const life = this._life, { request, held, reader } = life;
    const isHeld = Boolean(held && known);
    setText(this._title, `Request ${shortId(life.id)}`);
    setAttribute(this._title, "title", life.id);
    const start = this._start();
    const facts = [["Id", life.id], ["State", this._stateOf(life, isHeld)]];
    if (life.key) facts.push(["Key", life.key]);
    if (held) facts.push(...this._factsOfHeld(held, isHeld));
    if (request) {
      facts.push(["Priority", `${this._priorities.get(request.priority) ?? request.priority}${request.is_idle_work ? ", idle work" : ""}`],
        ["Prompt", `${plural(request.prompt_length, "token")}, ${whole(request.cached_tokens)} from the prefix cache`],
        ["Answer", `${plural(Math.max(0, request.num_tokens - request.prompt_length), "token")}, at most ${whole(request.limit - request.prompt_length)}`],
        ["KV memory", plural(request.num_blocks, "block")]);
      if (request.first_token_at !== null && this.sequence === life.id) {
        facts.push(["First token", `after ${duration(request.first_token_at - request.arrived_at)}`]);
        const end = life.end?.at ?? this._now, tokens = request.num_tokens - request.prompt_length - 1;
        if (tokens > 0 && end > request.first_token_at) facts.push(["Speed", `${brief(Math.round(10 * tokens / (end - request.first_token_at)) / 10)} tokens/s`]);
      }
      if (request.num_drafted) facts.push(["Drafts", `${whole(request.num_accepted)} of ${whole(request.num_drafted)} accepted (${percent(request.num_accepted / request.num_drafted)})`]);
      if (request.preemptions) facts.push(["Preemptions", whole(request.preemptions)]);
      const left = reader ? reader.left : request.deadline_at === null ? null : request.deadline_at - this._now;
      if (left !== null && !life.end && !hasLeft(life)) facts.push(["Deadline", inTime(left)]);
    }
    if (reader) facts.push([life.end ? "Took" : "Age", duration(Math.round(reader.age * 10) / 10)]);
    else if (!held && !hasLeft(life)) facts.push([life.end ? "Took" : "Age", duration(Math.round(((life.end?.at ?? this._now) - start) * 1000) / 1000)]);
    this._showFacts(facts);
    const isOver = Boolean(life.end || hasLeft(life) || (held && !isHeld));
    const hasOthers = requestOf(life.id) !== life.id || held?.answers > 1;
    setText(this._cancel, hasOthers ? "Cancel this request with all its answers" : "Cancel this request");
    this._cancel.hidden = isOver || this._info.mode === "replay";
    this._showText.hidden = isOver || this._info.mode === "replay" || !this._info.show_prompts;
    // A request that waits in the server, not yet in the engine, has no steps and no events.
    for (const part of [this._lifeBox, this._legend, this._linesHead]) part.hidden = Boolean(held);
    const others = life.readers.filter((one) => one.request_id !== life.id);
    this._othersHead.hidden = this._others.hidden = !others.length || Boolean(life.end);
    setText(this._othersHead, `${plural(others.length, "identical request")} ${others.length === 1 ? "reads" : "read"} this sequence`);
    this._otherRows.show(others.slice(0, MAX_OTHERS));
    this._showLines(linesOf(life, this._info.reasons || []), start);
    this._drawLife();
  }

  _makeOther() {
    const name = make("button", { type: "button", class: "link mono" });
    const text = make("span", {});
    let shown = null;
    name.addEventListener("click", () => this.open(this._history, shown));
    const update = ({ request_id: id, key, age }) => {
      shown = id;
      setText(name, shortId(id));
      setText(text, `${key === null ? "" : `${key} · `}${duration(Math.round(age * 10) / 10)}`);
    };
    return { element: make("li", {}, name, text), update };
  }

  _stateOf(life, isHeld) {
    if (hasLeft(life)) return "ended: identical requests go on with its sequence";
    if (life.end) return `ended: ${endOf(life, this._info.reasons || [])}`;
    if (!life.held) return life.request?.state ?? "not in the engine at this step";
    if (!isHeld) return "the server holds it no longer";
    return life.held.state === "held" ? "held by the server until the engine has room" : "its prompt is being prepared";
  }

  _factsOfHeld({ priority, prompt_tokens: tokens, answers, age, left }, isHeld) {
    const facts = [["Priority", priority === null ? "not known yet" : this._priorities.get(priority) ?? String(priority)],
      ["Prompt", tokens === null ? "not known yet" : plural(tokens, "token")], ["Age", duration(Math.round(age * 10) / 10)]];
    if (answers > 1) facts.push(["Answers held back", whole(answers)]);
    if (left !== null && isHeld) facts.push(["Deadline", inTime(left)]);
    return facts;
  }

  _start() {
    const { request, events } = this._life;
    return request?.arrived_at ?? events[0]?.at ?? this._now;
  }

  _showFacts(facts) {
    const names = new Set(facts.map(([name]) => name));
    for (const [name, value] of facts) {
      let node = this._factNodes.get(name);
      if (!node) {
        node = { box: make("div", {}, make("dt", {}, name), make("dd", {})) };
        this._factNodes.set(name, node);
        this._facts.append(node.box);
      }
      setText(node.box.lastChild, value);
    }
    for (const [name, { box }] of this._factNodes) box.hidden = !names.has(name);
  }

  _showLines(lines, start) {
    const { events, leftOut, held } = this._life;
    const notes = [];
    if (!held && !events.some((event) => event.kind === "queued")) notes.push("Earlier events are not shown.");
    if (leftOut) notes.push(`${plural(leftOut, "event")} before the newest one ${leftOut === 1 ? "is" : "are"} not shown.`);
    if (lines.length > MAX_LINES) notes.push(`${plural(lines.length - MAX_LINES, "line")} in the middle ${lines.length - MAX_LINES === 1 ? "is" : "are"} not shown.`);
    setText(this._note, notes.join(" "));
    this._note.hidden = !notes.length;
    const shown = lines.length > MAX_LINES ? [...lines.slice(0, MAX_LINES / 2), ...lines.slice(-MAX_LINES / 2)] : lines;
    while (this._lineNodes.length < shown.length) {
      const node = make("li", {}, make("time", {}), make("span", {}));
      this._lineNodes.push(node);
      this._lines.append(node);
    }
    this._lineNodes.forEach((node, index) => {
      node.hidden = index >= shown.length;
      if (node.hidden) return;
      setText(node.firstChild, "+" + duration(Math.max(0, shown[index].at - start)));
      setText(node.lastChild, shown[index].text);
    });
  }

  // --- the drawing: phases above, tokens over time below ---

  _drawLife() {
    if (!this._life || !this._surface.begin()) return;
    const { context, width, height } = this._surface;
    const colours = palette();
    const phases = phasesOf(this._life, this._now);
    if (!phases.length) return;
    const start = phases[0].from, end = Math.max(phases[phases.length - 1].to, start + 1e-6);
    const x = (at) => Math.max(0, Math.min(width, (at - start) / (end - start) * width));
    setAttribute(this._canvas, "aria-label", "Phases: " + phases.map((phase) => `${PHASES[phase.state]?.[0] ?? phase.state} ${duration(phase.to - phase.from)}`).join(", "));
    for (const phase of phases) {
      context.fillStyle = colours[PHASES[phase.state]?.[1] ?? "data-quiet"];
      context.fillRect(x(phase.from), 0, Math.max(1.5, x(phase.to) - x(phase.from) - 1), 14);
    }
    context.fillStyle = colours.ink;
    for (const event of this._life.events) {
      if (event.kind === "chunk") context.fillRect(x(event.at), 14, 1, 4);
      else if (event.kind === "first_token" || event.kind === "preempted") context.fillRect(x(event.at) - 1, 0, 2, 18);
    }
    this._drawTokens(context, colours, x, end, width, height);
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = colours.soft;
    context.textBaseline = "bottom";
    context.textAlign = "left";
    context.fillText("0 s", 0, height);
    context.textAlign = "right";
    context.fillText(duration(end - start), width, height);
  }

  /** Draws the computed tokens over time. The full height is the number of tokens that the request has now. */
  _drawTokens(context, colours, x, end, width, height) {
    const { samples, request } = this._life;
    if (!request || !samples.length) return;
    const top = 24, bottom = height - 16;
    const most = Math.max(request.num_tokens, request.prompt_length, 1);
    const y = (tokens) => bottom - (bottom - top) * Math.min(1, tokens / most);
    context.fillStyle = colours.line;
    context.fillRect(0, bottom, width, 1);
    context.beginPath();
    context.moveTo(0, bottom);
    let last = bottom;
    // Points before the first frame that had the request.
    const known = [[request.admitted_at, 0], [request.first_token_at, request.prompt_length]];
    for (const [at, tokens] of known) if (at !== null && at < samples[0].at) context.lineTo(x(at), last = y(tokens));
    samples.forEach(({ at, computed, state }, index) => {
      // Nothing was computed until a waiting request was admitted.
      if (index && samples[index - 1].state === "waiting" && state !== "waiting") context.lineTo(x(request.admitted_at ?? at), last);
      context.lineTo(x(at), last = y(computed));
    });
    context.lineTo(x(this._life.end ? this._life.end.at : end), last);
    context.strokeStyle = colours["data-1"];
    context.lineWidth = 1.6;
    context.stroke();
    context.fillStyle = colours.soft;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "top";
    context.textAlign = "left";
    context.fillText(`${whole(most)} tokens`, 2, top);
  }

  // --- requests to the server ---

  async _cancelRequest() {
    const { id } = this._life;
    setAttribute(this._cancel, "aria-disabled", "true");
    try {
      await this._withBase(id, (one) => this._api.request(`admin/requests/${encodeURIComponent(one)}`, { method: "DELETE" }));
      announce(`Request ${shortId(id)} is cancelled.`);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      toast(error.message);
    } finally {
      setAttribute(this._cancel, "aria-disabled", null);
    }
  }

  /** Calls `ask(id)`. If the server does not know the id of an answer (`ID-1`), asks for the id of its request (`ID`). */
  async _withBase(id, ask) {
    try {
      return await ask(id);
    } catch (error) {
      const base = requestOf(id);
      if (!(error instanceof ApiError) || error.status !== 404 || base === id) throw error;
      return ask(base);
    }
  }

  async _loadText() {
    const { id } = this._life;
    try {
      const response = await this._withBase(id, (one) => this._api.request(`live/requests/${encodeURIComponent(one)}`));
      const found = await response.json();
      if (this.id !== id) return;
      const parts = Object.entries(found).filter(([, value]) => typeof value === "string" && value && value !== id);
      this._text.replaceChildren(...parts.flatMap(([name, value]) => [make("h3", {}, name[0].toUpperCase() + name.slice(1)), make("pre", { tabindex: "0" }, value)]));
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      toast(error.message);
    }
  }
}
