// Shows the queue by priority and key, what the server holds back, and the requests that ended lately.

import { make } from "./dom.js";
import { Pool, setAttribute, setText } from "./live_canvas.js";
import { duration, plural, priorityNames, shortId, whole } from "./live_numbers.js";

const MAX_ROWS = 40, MAX_OF_A_GROUP = 8;

/** Groups the waiting requests by place, priority and key. Groups in the engine come first, then those of higher priority.
 *  In a group, the request that waits longest is first. */
export function groupQueue(waiting) {
  const groups = new Map();
  for (const one of waiting) {
    const name = `${one.place}\n${one.priority}\n${one.key ?? ""}`;
    let group = groups.get(name);
    if (!group) groups.set(name, group = { place: one.place, priority: one.priority, key: one.key, members: [], longest: 0, deadline: null });
    group.members.push(one);
    group.longest = Math.max(group.longest, one.age);
    if (one.left !== null) group.deadline = group.deadline === null ? one.left : Math.min(group.deadline, one.left);
  }
  for (const group of groups.values()) group.members.sort((a, b) => b.age - a.age);
  return [...groups.values()].sort((a, b) => (a.place === b.place ? 0 : a.place === "engine" ? -1 : 1) || (b.priority ?? -1) - (a.priority ?? -1)
    || b.longest - a.longest);
}

/** Requests that wait in the engine, then those that the server holds. Ages and remaining times are in seconds. */
export function waitingOf(history) {
  const { frame, lives } = history;
  const inEngine = frame.requests.filter((request) => request.row < 0).flatMap((request) => {
    const life = lives.get(request.request_id);
    const own = { request_id: request.request_id, key: life?.key ?? null, age: Math.max(0, frame.at - request.arrived_at),
      left: request.deadline_at === null ? null : request.deadline_at - frame.at };
    // A shared sequence has an entry for each of its readers.
    return (life?.readers.length ? life.readers : [own]).map(({ request_id: id, key, age, left }) => ({
      place: "engine", id, key, priority: request.priority, state: request.state, age, isIdleWork: request.is_idle_work, left,
      size: request.prompt_length }));
  });
  const held = frame.held.map((request) => ({
    place: "server", id: request.request_id, key: request.key, priority: request.priority, state: request.state, age: request.age,
    isIdleWork: false, left: request.left, size: request.prompt_tokens, answers: request.answers }));
  return [...inEngine, ...held];
}

export class QueueView {
  constructor(root, { info, open }) {
    this._open = open;
    this._priorities = priorityNames(info.priorities);
    this._reasons = info.reasons || [];
    this._isReplay = info.mode === "replay";
    this._isAll = false;
    this._head = make("span", { class: "figure" });
    this._find = make("input", { type: "search", class: "find", placeholder: "Id or key", "aria-label": "Find a request that waits by its id or key",
      autocomplete: "off", spellcheck: "false", hidden: true, oninput: () => this.update(this._history) });
    this._body = make("tbody", {});
    this._table = make("table", {}, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "Request"),
      make("th", { scope: "col" }, "State"), make("th", { scope: "col", class: "number" }, "Prompt"),
      make("th", { scope: "col", class: "number" }, "Waits"), make("th", { scope: "col", class: "number" }, "Deadline"))), this._body);
    this._empty = make("p", { class: "empty" }, "Nothing waits.");
    this._moreText = make("span", {});
    this._all = make("button", { type: "button", class: "link", onclick: () => this._toggleAll() });
    this._more = make("p", { class: "hint" }, this._moreText, " ", this._all);
    this._ended = make("ul", { class: "ended" });
    this._endedHead = make("h3", {}, "Ended lately");
    root.append(make("header", {}, make("h2", {}, "Queue"), this._head, make("span", { class: "grow" }), this._find),
      make("div", { class: "queue-box", tabindex: "0", role: "region", "aria-label": "Requests that wait" }, this._table, this._empty, this._more),
      make("div", { class: "ended-box" }, this._endedHead, this._ended));
    this._rows = new Pool(this._body, () => this._makeRow());
    this._endedRows = new Pool(this._ended, () => this._makeEnded());
  }

  update(history) {
    this._history = history;
    const { frame } = history;
    const waiting = waitingOf(history), wanted = this._find.value.trim().toLowerCase();
    const found = wanted ? waiting.filter(({ id, key }) => id.toLowerCase().startsWith(wanted) || key?.toLowerCase().includes(wanted)) : waiting;
    // A search shows the requests that the groups leave out.
    const mostOfAGroup = this._isAll || wanted ? Infinity : MAX_OF_A_GROUP, mostRows = this._isAll ? Infinity : MAX_ROWS;
    const rows = [];
    let number = 0;
    for (const group of groupQueue(found)) {
      if (rows.length >= mostRows) break;
      rows.push({ group, isCut: group.members.length > mostOfAGroup });
      for (const member of group.members.slice(0, Math.max(0, Math.min(mostOfAGroup, mostRows - rows.length)))) {
        rows.push({ member, longest: group.longest });
        number++;
      }
    }
    const total = wanted ? found.length : frame.num_waiting + frame.num_held;
    setText(this._head, `${whole(frame.num_waiting)} in the engine${this._isReplay ? "" : ` · ${whole(frame.num_held)} held by the server`}`);
    this._table.hidden = !rows.length;
    this._empty.hidden = rows.length > 0;
    setText(this._empty, wanted ? "No request that waits has such an id or key." : "Nothing waits.");
    this._find.hidden = !wanted && waiting.length <= MAX_OF_A_GROUP && document.activeElement !== this._find;
    this._more.hidden = total <= number && !this._isAll;
    // A frame lists only some hundred requests, so not all of `total` can be shown.
    setText(this._moreText, total > number ? `And ${whole(total - number)} more.` : "");
    this._all.hidden = !this._isAll && number >= found.length;
    setText(this._all, this._isAll ? "Show fewer" : "Show all");
    this._rows.show(rows);
    this._endedHead.hidden = !history.ended.length;
    this._endedRows.show(history.ended);
  }

  _toggleAll() {
    this._isAll = !this._isAll;
    this.update(this._history);
  }

  _makeRow() {
    const title = make("td", { colspan: "5" });
    const name = make("button", { type: "button", class: "link mono" });
    const state = make("td", {});
    const size = make("td", { class: "number" });
    const age = make("td", { class: "number age" });
    const left = make("td", { class: "number" });
    const first = make("td", {}, name);
    const element = make("tr", {}, title, first, state, size, age, left);
    let shown = null;
    name.addEventListener("click", () => this._open(shown));
    const update = ({ group, isCut, member, longest }) => {
      title.hidden = !group;
      for (const cell of [first, state, size, age, left]) cell.hidden = Boolean(group);
      setAttribute(element, "class", group ? "group" : "");
      if (group) {
        // The rows have waits and deadlines. The title repeats them only if rows are left out.
        const place = group.place === "engine" ? "" : " · held by the server";
        setText(title, `${group.priority === null ? "priority not known yet" : this._priorities.get(group.priority) ?? group.priority}${group.key ? ` · ${group.key}` : ""}${place} · ${plural(group.members.length, "request")}` +
          (isCut ? ` · up to ${duration(group.longest)}${group.deadline === null ? "" : ` · next deadline ${inTime(group.deadline)}`}` : ""));
        return;
      }
      shown = member.id;
      setText(name, shortId(member.id) + (member.answers > 1 ? ` ×${member.answers}` : ""));
      setText(state, member.state + (member.isIdleWork ? ", idle work" : ""));
      setText(size, member.size === null ? "" : whole(member.size));
      setText(age, duration(roughly(member.age)));
      age.style.setProperty("--share", `${Math.round(100 * member.age / Math.max(1e-9, longest))}%`);
      setText(left, member.left === null ? "" : inTime(member.left));
      setAttribute(left, "class", member.left !== null && member.left < 1 ? "number bad" : "number");
    };
    return { element, update };
  }

  _makeEnded() {
    const name = make("button", { type: "button", class: "link mono" });
    const text = make("span", {});
    const element = make("li", {}, name, text);
    let shown = null;
    name.addEventListener("click", () => this._open(shown));
    const update = (life) => {
      shown = life.id;
      setText(name, shortId(life.id));
      const tokens = life.request ? ` · ${plural(life.request.num_tokens, "token")}` : "";
      const start = life.request?.arrived_at ?? life.events[0]?.at;
      setText(text, `${endOf(life, this._reasons)}${tokens} · ${duration(life.end.at - start)}`);
    };
    return { element, update };
  }
}

/** How a life ended, in words. */
export function endOf(life, reasons) {
  if (!life.end) return "";
  if (life.end.kind === "finished") return String(reasons[life.end.first] ?? "finished").replaceAll("_", " ");
  return { failed: "failed", lost: "lost: the engine started again", gone: "ended" }[life.end.kind] || life.end.kind;
}

/** The remaining time of a deadline in words. */
export function inTime(seconds) {
  return seconds < 0 ? `passed ${duration(roughly(-seconds))} ago` : `in ${duration(roughly(seconds))}`;
}

/** Rounds an age to tenths of a second, because it changes with every frame. */
function roughly(seconds) {
  return Math.round(seconds * 10) / 10;
}
