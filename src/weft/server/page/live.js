// The live view and the replay. `info` is the response of /live/info; its `mode` is "live" or "replay".

import { ApiError } from "./api.js";
import { announce, icon, make } from "./dom.js";
import { BatchView } from "./live_batch.js";
import { BlocksView } from "./live_blocks.js";
import { onTheme, setAttribute, setText } from "./live_canvas.js";
import { ChartsView } from "./live_charts.js";
import { History } from "./live_history.js";
import { brief, duration, short, whole } from "./live_numbers.js";
import { QueueView } from "./live_queue.js";
import { RequestView } from "./live_request.js";
import { LiveSource } from "./live_source.js";
import { ReplayControls } from "./replay.js";

/** Milliseconds between two drawings of the charts, which change less often than frames arrive. */
const CHART_PAUSE = 450;

/** Draws into `root`. The page calls `hide()` when another tab is opened, and `show()` when it is opened again.
 *  `onOtherInfo(info)` is called if the server or its engine started again with another `info`. */
export function mountLive(root, { info, api, onOtherInfo }) {
  return new LiveView(root, { info, api, onOtherInfo });
}

class LiveView {
  constructor(root, { info, api, onOtherInfo }) {
    this._info = info;
    this._onOtherInfo = onOtherInfo;
    /** Whether the server or its engine may have started again since `info` was read. */
    this._mayDiffer = false;
    this._api = api;
    this._isReplay = info.mode === "replay";
    this._history = new History(info);
    this._isShown = true;
    this._isPaused = false;
    this._isDue = false;
    this._chartsAt = 0;
    this._cost = { milliseconds: 0, frames: 0, first: 0 };
    this._numFrames = 0;
    const open = (id) => this._openRequest(id);
    const panel = (name, label) => make("section", { class: `panel ${name}`, "aria-label": label });
    this._batchPanel = panel("batch", "Batch");
    const blocks = panel("kv", "KV memory"), queue = panel("queue", "Queue"), charts = panel("chart-panel", "Charts");
    this._notice = make("p", { class: "live-notice", role: "status", hidden: true });
    this._main = make("div", { class: "live-grid" }, this._batchPanel, blocks, charts, queue);
    this._view = make("div", { class: "live" }, make("h1", { class: "unseen" }, this._isReplay ? "Replay" : "Live"), this._makeBar(), this._notice, this._main);
    root.append(this._view);
    const idle = this._isReplay ? "No request runs at this step." : "No request runs. Send one from the chat, and its row appears here.";
    this._batch = new BatchView(this._batchPanel, { open, idle });
    this._blocks = new BlocksView(blocks);
    this._queue = new QueueView(queue, { info, open });
    this._charts = new ChartsView(charts, { end: this._isReplay ? "this frame" : "now" });
    this._request = new RequestView(this._view, { info, api, onClose: () => this._view.classList.remove("has-request") });
    this._offTheme = onTheme(() => this._schedule(true));
    if (this._isReplay) this._startReplay(api);
    else this._startLive(api);
  }

  // --- the bar above ---

  _makeBar() {
    this._state = make("span", { class: "chip", "data-state": "connecting" }, make("i", {}), make("span", {}, "Connecting"));
    this._pause = make("button", { type: "button", class: "icon-button", "aria-label": "Pause", title: "Pause", onclick: () => this._togglePause() },
      icon("pause"));
    this._tiles = new Map();
    const tiles = make("dl", { class: "tiles" });
    for (const [name, words] of [["step", "step"], ["running", "running"], ["waiting", "waiting"], ["tokens", "tokens/s"], ["time", "a step"], ["hits", "prefix hits"], ["preempted", "preemptions"], ["feedback", "feedback"]]) {
      const value = make("dd", {}, "–");
      this._tiles.set(name, value);
      tiles.append(make("div", {}, make("dt", {}, words), value));
    }
    this._tiles.get("feedback").parentElement.hidden = true;
    this._rate = make("span", { class: "hint rate", title: "Frames a second, and what drawing one costs" });
    return make("div", { class: "live-bar" }, this._isReplay ? null : [this._state, this._pause],
      make("span", { class: "model", title: String(this._info.model ?? "") }, String(this._info.model ?? "")), tiles, make("span", { class: "grow" }), this._rate);
  }

  _showState(name, text) {
    setAttribute(this._state, "data-state", name);
    setText(this._state.lastChild, text);
  }

  _showTiles() {
    const { frame, bins } = this._history;
    const recent = bins.slice(-4);
    const seconds = recent.reduce((sum, bin) => sum + bin.seconds, 0);
    const steps = recent.reduce((sum, bin) => sum + bin.steps, 0);
    const prompt = bins.reduce((sum, bin) => sum + bin.prompt, 0);
    const tile = (name, text) => setText(this._tiles.get(name), text);
    tile("step", whole(frame.step));
    tile("running", whole(frame.num_running));
    tile("waiting", whole(frame.num_waiting + frame.num_held));
    tile("tokens", seconds ? brief(Math.round(recent.reduce((sum, bin) => sum + bin.tokens, 0) / seconds)) : "–");
    tile("time", steps ? duration(recent.reduce((sum, bin) => sum + bin.stepSeconds, 0) / steps) : "–");
    tile("hits", prompt ? `${Math.round(100 * bins.reduce((sum, bin) => sum + bin.cached, 0) / prompt)}%` : "–");
    const { feedback } = frame;
    this._tiles.get("feedback").parentElement.hidden = !feedback;
    if (feedback) {
      tile("feedback", `${brief(feedback.positive)} good, ${brief(feedback.negative)} bad`);
      setAttribute(this._tiles.get("feedback"), "title", `${whole(feedback.requests)} responses are kept, ${whole(feedback.corrected)} answers were corrected`);
    }
    tile("preempted", whole((frame.totals.preemptions_by_recompute || 0) + (frame.totals.preemptions_by_swap || 0)));
  }

  // --- live ---

  _startLive(api) {
    this._source = new LiveSource(api, { onFrame: (frame) => this._take(frame), onState: (...state) => this._onSource(...state) });
    document.addEventListener("visibilitychange", () => this._connect());
    this._connect();
  }

  /** The page reads frames only while the view is visible and not paused. */
  _connect() {
    if (!this._source) return;
    if (this._isShown && !this._isPaused && document.visibilityState !== "hidden") this._source.start();
    else this._source.stop();
  }

  _togglePause() {
    this._isPaused = !this._isPaused;
    const text = this._isPaused ? "Continue" : "Pause";
    setAttribute(this._pause, "aria-label", text);
    setAttribute(this._pause, "title", text);
    this._pause.replaceChildren(icon(this._isPaused ? "play" : "pause"));
    this._connect();
    announce(this._isPaused ? "The live view is paused." : "The live view continues.");
  }

  /** Shows the state of the connection. */
  _onSource(name, { problem, seconds } = {}) {
    if (name === "open") return;
    this._mayDiffer ||= name === "connecting" && this._history.frame !== null;
    if (name === "stopped") {
      this._showState("paused", this._isPaused ? "Paused" : "Stopped");
      this._showNotice(null);
    } else if (name === "connecting") this._showState("connecting", "Connecting");
    else {
      this._showState("broken", name === "refused" ? "Refused" : "Not connected");
      this._showNotice(name === "refused" ? `${problem.message} Reload the page to try again.`
        : `${problem.message ?? "The connection broke."} Next attempt in ${short(seconds)} s.`);
    }
    this._view.classList.toggle("is-stale", name === "waiting" || name === "refused");
  }

  _showNotice(text, kind = "bad") {
    this._notice.hidden = !text;
    setAttribute(this._notice, "data-kind", kind);
    setText(this._notice, text || "");
  }

  /** Takes a frame. While the engine is not ready, a frame has only its state. */
  _take(frame) {
    if (frame.engine && frame.engine !== "ready") {
      const isStarting = frame.engine === "starting";
      this._mayDiffer = true;
      this._showState(frame.engine, isStarting ? "Engine starts" : "Engine is silent");
      this._showNotice(isStarting ? "The engine starts. It loads the model, and is not ready for requests."
        : "The engine does not answer. The picture below is the last one that it sent.");
      this._view.classList.add("is-stale");
      return;
    }
    if (this._mayDiffer) this._checkInfo();
    this._showState("live", "Live");
    this._showNotice(null);
    this._view.classList.remove("is-stale");
    const start = performance.now();
    this._history.add(frame);
    this._count(performance.now() - start, 1);
    this._schedule();
  }

  /** Reads `info` again: a new engine may have another number of blocks and rows. */
  async _checkInfo() {
    this._mayDiffer = false;
    try {
      const info = await this._api.json("live/info");
      if (this._source && JSON.stringify(info) !== JSON.stringify(this._info)) this._onOtherInfo(info);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this._mayDiffer = true;
    }
  }

  // --- replay ---

  _startReplay(api) {
    this._controls = new ReplayControls(this._view, { info: this._info, api,
      show: (...shown) => this._takeReplayed(...shown),
      onNotice: (text) => this._showNotice(text, "note") });
    this._view.addEventListener("keydown", (event) => this._controls.key(event));
    setText(this._view.querySelector(".model"), String(this._info.model ?? this._info.path ?? ""));
    this._controls.start();
  }

  /** Adds replayed frames to the history. After a seek, the history begins again. */
  _takeReplayed(frames, last, isSeek, binSeconds) {
    this._lastFrame = last;
    const start = performance.now();
    if (isSeek) this._history = new History(this._info, { binSeconds });
    for (const frame of frames) this._history.add(frame);
    this._count(performance.now() - start, frames.length);
    this._schedule(isSeek);
    if (isSeek) this._loadEarlier();
  }

  /** After a seek, the history has only the last frames. Earlier events of the open request come from the server's index. */
  async _loadEarlier() {
    const { id } = this._request, history = this._history;
    if (!this._isReplay || id === null) return;
    try {
      const found = await this._api.json(`replay/requests/${encodeURIComponent(id)}?until=${this._lastFrame}`);
      if (history !== this._history) return;
      history.addEarlier(id, found);
      this._schedule();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error; // the panel says that earlier events are missing
    }
  }

  // --- drawing ---

  /** Draws at most once for each animation frame, however many frames arrived. */
  _schedule(isForced = false) {
    this._isForced ||= isForced;
    if (this._isDue) return;
    this._isDue = true;
    requestAnimationFrame(() => {
      this._isDue = false;
      if (!this._history.frame || !this._isShown) return;
      const start = performance.now();
      this._draw();
      this._count(performance.now() - start, 0);
    });
  }

  _draw() {
    const history = this._history;
    this._showTiles();
    this._batch.update(history, this._request.sequence);
    this._blocks.update(history);
    this._queue.update(history);
    this._request.update(history);
    const now = performance.now();
    if (this._isForced || now - this._chartsAt > CHART_PAUSE) {
      this._chartsAt = now;
      this._charts.update(history);
    }
    this._isForced = false;
  }

  /** Adds to the cost of the page itself, and shows it every 2 s: milliseconds of scripting for each frame. */
  _count(milliseconds, frames) {
    const now = performance.now();
    this._cost.milliseconds += milliseconds;
    this._cost.frames += frames;
    this._numFrames += frames;
    if (now - this._cost.first < 2000) return;
    const seconds = (now - this._cost.first) / 1000;
    if (this._cost.first && this._cost.frames) {
      const each = this._cost.milliseconds / this._cost.frames;
      setText(this._rate, `${short(Math.round(10 * this._cost.frames / seconds) / 10)} frames/s · ${each.toFixed(1)} ms`);
      setAttribute(this._view, "data-script-ms", each.toFixed(2));
      setAttribute(this._view, "data-frames", this._numFrames);
      setAttribute(this._view, "data-at", this._history.frame?.at ?? 0);
    }
    this._cost = { milliseconds: 0, frames: 0, first: now };
  }

  _openRequest(id) {
    this._request.open(this._history, id);
    this._view.classList.toggle("has-request", this._request.isOpen);
    this._loadEarlier();
  }

  // --- called by the shell ---

  /** Called when another live view replaces this one. */
  close() {
    this._source?.stop();
    this._source = null;
    this._offTheme();
  }

  show() {
    this._isShown = true;
    this._connect();
    this._schedule(true);
  }

  hide() {
    this._isShown = false;
    this._connect();
    this._controls?.pause();
  }
}
