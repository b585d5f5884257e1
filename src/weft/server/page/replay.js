// Replays the frames of a log: a slider, play and pause, single steps, the speed.

import { ApiError } from "./api.js";
import { announce, icon, make } from "./dom.js";
import { setAttribute, setText } from "./live_canvas.js";
import { duration, percent, whole } from "./live_numbers.js";
import { OverviewStrip } from "./replay_overview.js";

const PAGE = 96;
const MAX_PAGES = 24;
/** Seconds until the page asks again how many frames there are, while the server still reads the log. */
const ASK_AGAIN = 1;
/** Frames before the shown one that fill the band and the charts. */
const WINDOW = 240;
const SPEEDS = [0.1, 0.25, 0.5, 1, 2, 5, 10, 50];
const SHORTEST_TICK = 1 / 20;

/** Keeps the pages of frames that were used last. `load(start, count)` resolves to the frames that are there: the last page may be
 *  short, and is loaded again when the log has more frames. */
export class FramePages {
  constructor(load, { size = PAGE, limit = MAX_PAGES } = {}) {
    this._load = load;
    this._size = size;
    this._limit = limit;
    this._pages = new Map();
    /** Number of frames that the server has. */
    this.total = 0;
  }

  /** The frames from `first` to before `end`. Several callers may wait for the same page. */
  async frames(first, end) {
    const numbers = [];
    for (let page = Math.floor(first / this._size); page * this._size < Math.min(end, this.total); page++) numbers.push(page);
    if (!numbers.length) return [];
    const pages = await Promise.all(numbers.map((number) => this._page(number)));
    return pages.flat().slice(first - numbers[0] * this._size, end - numbers[0] * this._size);
  }

  get count() {
    return this._pages.size;
  }

  _page(number) {
    const start = number * this._size;
    let page = this._pages.get(number);
    this._pages.delete(number);
    const hasMore = page && page.length < this._size && start + page.length < this.total;
    if (!page || hasMore) {
      page = { length: Infinity, frames: this._load(start, this._size) };
      const loaded = page;
      page.frames.then((frames) => { loaded.length = frames.length; }, () => {
        if (this._pages.get(number) === loaded) this._pages.delete(number);
      });
    }
    this._pages.set(number, page);
    for (const old of this._pages.keys()) {
      if (this._pages.size <= this._limit) break;
      this._pages.delete(old);
    }
    return page.frames;
  }
}

/** The controls of a replay. `show(frames, last, isSeek, binSeconds)` gets the frames to add, up to the frame `last`; after
 *  a seek they begin a new history. `onNotice(text)` gets what the user has to know, or null. */
export class ReplayControls {
  constructor(root, { info, api, show, onNotice }) {
    this._info = info;
    this._show = show;
    this._onNotice = onNotice;
    this._api = api;
    this._pages = new FramePages((start, count) => api.json(`replay/frames?start=${start}&count=${count}`));
    this._wanted = 0;
    this._shown = -1;
    this._isLoading = false;
    this._isPlaying = false;
    this._slider = make("input", { type: "range", min: "0", max: "0", step: "1", value: "0", "aria-label": "Frame",
      oninput: () => { this.pause(); this.seek(Number(this._slider.value)); } });
    this._text = make("output", { class: "mono position" });
    this._play = make("button", { type: "button", class: "icon-button", onclick: () => this.toggle() });
    const step = (name, text, by) => make("button", { type: "button", class: "icon-button", "aria-label": text, title: text,
      onclick: () => { this.pause(); this.seek(this._wanted + by); } }, icon(name));
    this._speed = make("select", { "aria-label": "Speed", onchange: () => { this._anchor = null; } },
      SPEEDS.map((speed) => make("option", { value: speed, selected: speed === 1 }, `${speed}×`)));
    this._next = make("button", { type: "button", class: "icon-button", "aria-label": "Next preemption", title: "Next preemption", disabled: true,
      onclick: () => this._seekPreemption() }, icon("skip"));
    this._overview = new OverviewStrip((index) => { this.pause(); this.seek(index); });
    this.element = make("div", { class: "replay-bar", role: "group", "aria-label": "Replay" }, this._overview.element,
      step("left", "One frame back", -1), this._play, step("right", "One frame forward", 1), this._next, this._slider, this._text, this._speed);
    root.append(this.element);
    this._showPlaying();
  }

  get _last() {
    return Math.max(0, this._info.num_frames - 1);
  }

  /** Shows the first frame, and updates the controls until the server has read the whole log. */
  async start() {
    for (;;) {
      this._takeInfo();
      try {
        this._overview.update(await this._api.json("replay/overview"));
        this._next.disabled = !this._overview.hasPreemptions;
        if (this._info.is_complete || this._info.problem) return;
        await new Promise((resolve) => setTimeout(resolve, ASK_AGAIN * 1000));
        this._info = await this._api.json("live/info");
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
        this._onNotice(error.message);
        return;
      }
    }
  }

  _takeInfo() {
    const { num_frames: number, is_complete: isComplete, problem, progress } = this._info;
    this._pages.total = number;
    this._slider.max = String(this._last);
    this._slider.disabled = !number;
    if (problem) this._onNotice(problem);
    else if (!isComplete) this._onNotice(`The server reads the log: ${percent(progress || 0)}.`);
    else this._onNotice(number ? null : "This log has no steps.");
    if (number && this._shown < 0) this.seek(0);
    this._showPosition();
  }

  /** Shows the frame `index`. Frames that were requested earlier and are not shown yet are skipped. */
  seek(index) {
    this._wanted = Math.max(0, Math.min(index, this._last));
    this._showPosition();
    return this._load();
  }

  async _load() {
    if (this._isLoading || !this._info.num_frames) return;
    this._isLoading = true;
    try {
      while (this._shown !== this._wanted) {
        const wanted = this._wanted;
        const isNext = wanted > this._shown && this._shown >= 0 && wanted - this._shown <= WINDOW;
        const first = isNext ? this._shown + 1 : Math.max(0, wanted - WINDOW + 1);
        // After a seek, the frames ahead are loaded too: the width of a point of the charts depends on them.
        const found = await this._pages.frames(first, isNext ? wanted + 1 : Math.min(this._last + 1, first + WINDOW));
        const frames = found.slice(0, wanted + 1 - first);
        if (frames.length <= wanted - first) throw new ApiError("The server did not send all frames.");
        this._show(frames, wanted, !isNext, binOf(found));
        this._shown = wanted;
        this._at = frames[frames.length - 1].at;
        this._start ??= first === 0 ? frames[0].at : null;
        this._showPosition();
      }
    } catch (error) {
      this._wanted = Math.max(0, this._shown);
      this.pause();
      if (!(error instanceof ApiError)) throw error;
      this._onNotice(error.message);
    } finally {
      this._isLoading = false;
    }
  }

  async _seekPreemption() {
    this.pause();
    try {
      const { frame } = await this._api.json(`replay/preemption?after=${this._wanted}`);
      if (frame === null || frame > this._last) announce("There is no later preemption.");
      else await this.seek(frame);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this._onNotice(error.message);
    }
  }

  // --- playing ---

  toggle() {
    if (this._isPlaying) this.pause();
    else this.play();
  }

  play() {
    if (this._isPlaying || !this._info.num_frames) return;
    if (this._wanted >= this._last) this.seek(0);
    this._isPlaying = true;
    this._anchor = null;
    this._showPlaying();
    this._tick();
  }

  pause() {
    this._isPlaying = false;
    clearTimeout(this._timer);
    this._showPlaying();
  }

  /** Shows the frames that are due when the engine's clock runs at the chosen speed. Several may be due at once. */
  async _tick() {
    if (!this._isPlaying) return;
    const speed = Number(this._speed.value);
    const now = performance.now() / 1000;
    if (!this._anchor && !this._isLoading) this._anchor = { real: now, at: this._at };
    if (this._anchor && !this._isLoading) {
      const due = this._anchor.at + (now - this._anchor.real) * speed;
      const ahead = await this._pages.frames(this._shown + 1, Math.min(this._last + 1, this._shown + 1 + PAGE)).catch(() => []);
      if (!this._isPlaying) return;
      let number = 0;
      while (number < ahead.length && ahead[number].at <= due) number++;
      // A replay skips long pauses of the engine.
      if (!number && ahead.length && ahead[0].at - due > 2 * speed) { number = 1; this._anchor = null; }
      if (number) await this.seek(this._shown + number);
      if (this._shown >= this._last && (this._info.is_complete || this._info.problem)) { this.pause(); return; }
    }
    this._timer = setTimeout(() => this._tick(), SHORTEST_TICK * 1000);
  }

  // --- the keyboard ---

  /** Handles a key that no control of the view has used. Returns whether the replay used it. */
  key(event) {
    const isControl = /^(SELECT|INPUT|TEXTAREA)$/.test(event.target.tagName);
    const isButton = event.target.tagName === "BUTTON";
    const far = event.shiftKey ? 10 : 1;
    if (event.altKey || event.ctrlKey || event.metaKey || isControl) return false;
    if (event.key === " " && !isButton) this.toggle();
    else if (event.key === "ArrowLeft") { this.pause(); this.seek(this._wanted - far); }
    else if (event.key === "ArrowRight") { this.pause(); this.seek(this._wanted + far); }
    else if (event.key === "Home") { this.pause(); this.seek(0); }
    else if (event.key === "End") { this.pause(); this.seek(this._last); }
    else return false;
    event.preventDefault();
    return true;
  }

  // --- what the controls show ---

  _showPlaying() {
    const text = this._isPlaying ? "Pause" : "Play";
    setAttribute(this._play, "aria-label", text);
    setAttribute(this._play, "title", text);
    this._play.replaceChildren(icon(this._isPlaying ? "pause" : "play"));
  }

  _showPosition() {
    const number = this._info.num_frames ? this._wanted + 1 : 0;
    this._slider.value = String(this._wanted);
    this._overview.mark(this._wanted);
    const time = this._at === undefined ? "" : ` · ${duration(Math.round((this._at - (this._start ?? 0)) * 100) / 100)}`;
    setAttribute(this._slider, "aria-valuetext", `Frame ${number} of ${this._info.num_frames}${time}`);
    setText(this._text, `${whole(number)} / ${whole(this._info.num_frames)}${time}`);
  }
}

/** The seconds of a point of the charts, chosen so that the window has about 120 points. */
function binOf(frames) {
  const span = frames[frames.length - 1].at - frames[0].at;
  return Math.max(1e-4, span / 120);
}
