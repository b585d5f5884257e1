// Reads frames from the server, and connects again when the stream ends.

import { ApiError } from "./api.js";

const PAUSES = [0.5, 1, 2, 4, 8, 15];
/** After a connection of at least this many seconds, the pauses start again with the shortest one. */
const GOOD_SECONDS = 5;

/** The pause before the next attempt, in seconds. `wanted`: the pause that the server asks for, or null. */
export function pauseAfter(failures, wanted) {
  return Math.max(PAUSES[Math.min(failures, PAUSES.length - 1)], wanted || 0);
}

export class LiveSource {
  /** `onFrame(frame)`; `onState(name, detail)`: "connecting", "open", "waiting" (with the seconds and the error), "stopped",
   *  "refused" (with the error: the page does not try again). */
  constructor(api, { onFrame, onState }) {
    this._api = api;
    this._onFrame = onFrame;
    this._onState = onState;
    this._run = null;
  }

  start() {
    if (this._run) return;
    const run = { controller: new AbortController() };
    this._run = run;
    this._loop(run);
  }

  stop() {
    if (!this._run) return;
    this._run.controller.abort();
    this._run = null;
    this._onState("stopped");
  }

  /** Reads one stream after the other until `stop`, with a pause between two. */
  async _loop(run) {
    let failures = 0;
    while (this._run === run) {
      const started = performance.now();
      let problem = null;
      this._onState("connecting");
      try {
        for await (const event of this._api.events("live", { signal: run.controller.signal })) {
          if (this._run !== run) return;
          if (event.event !== "message") continue;
          this._onState("open");
          this._onFrame(JSON.parse(event.data));
        }
        problem = new ApiError("The server closed the stream.");
      } catch (error) {
        if (this._run !== run) return;
        if (error.name !== "AbortError" && !(error instanceof ApiError)) throw error;
        problem = error;
      }
      if (problem.status === 401 || problem.status === 403 || problem.status === 404) {
        this._run = null;
        this._onState("refused", { problem });
        return;
      }
      failures = performance.now() - started > GOOD_SECONDS * 1000 ? 0 : failures;
      const seconds = pauseAfter(failures++, problem.retryAfter);
      this._onState("waiting", { problem, seconds });
      await this._sleep(seconds, run.controller.signal);
    }
  }

  _sleep(seconds, signal) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, seconds * 1000);
      signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
    });
  }
}
