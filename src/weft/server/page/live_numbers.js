// Names the fields of a frame, computes quantiles, and writes numbers as text. Nothing here draws.

/** The fields of `LiveRequest`, `LiveStep` and `LiveEvent` in `weft/live.py`, in their order. */
const REQUEST_FIELDS = ["request_id", "row", "state", "priority", "is_idle_work", "prompt_length", "cached_tokens", "computed",
  "num_tokens", "limit", "num_drafted", "num_accepted", "preemptions", "num_blocks", "arrived_at", "admitted_at",
  "first_token_at", "deadline_at"];
const STEP_FIELDS = ["step", "seconds", "num_decodes", "num_drafts", "num_prefills", "prefill_tokens"];
const EVENT_FIELDS = ["at", "step", "kind", "request_id", "first", "second"];
/** The fields of `HeldRequest` in `weft/server/live/held.py`. */
const HELD_FIELDS = ["request_id", "key", "state", "priority", "age", "answers", "prompt_tokens", "left"];
/** The fields of `SharedReader` in `weft/engine/ipc/shared_answers.py`. */
const READER_FIELDS = ["request_id", "sequence_id", "age", "left"];

function named(fields, values) {
  const found = {};
  for (let index = 0; index < fields.length; index++) found[fields[index]] = values[index];
  return found;
}

/** An event as an object. */
export function readEvent(values) {
  return named(EVENT_FIELDS, values);
}

/** A frame with its lists as objects. */
export function readFrame(frame) {
  return {
    ...frame,
    requests: frame.requests.map((values) => named(REQUEST_FIELDS, values)),
    steps: frame.steps.map((values) => named(STEP_FIELDS, values)),
    events: frame.events.map(readEvent),
    held: (frame.held || []).map((values) => named(HELD_FIELDS, values)),
    num_held: frame.num_held ?? 0,
    keys: frame.keys || {},
    readers: (frame.readers || []).map((values) => named(READER_FIELDS, values)),
  };
}

/** The names of the priorities by number. `priorities` is a list, or an object by name or by number. */
export function priorityNames(priorities) {
  if (Array.isArray(priorities)) return new Map(priorities.map((name, index) => [index, String(name)]));
  return new Map(Object.entries(priorities || {}).map(([name, value]) =>
    typeof value === "number" ? [value, name] : [Number(name), String(value)]));
}

/** `newer` minus `older`: counts by bucket. The counts of a restarted engine begin at zero. */
export function countsSince(newer, older) {
  const found = new Map();
  for (const [bucket, count] of Object.entries(newer || {})) {
    const before = older?.[bucket] || 0;
    const more = count >= before ? count - before : count;
    if (more) found.set(Number(bucket), more);
  }
  return found;
}

export function addCounts(sum, counts) {
  for (const [bucket, count] of counts) sum.set(bucket, (sum.get(bucket) || 0) + count);
  return sum;
}

/** The quantile `share` (0 to 1) of counts by bucket, in seconds: the middle of its bucket. Null without counts. */
export function quantile(counts, share, [first, growth]) {
  let total = 0;
  for (const count of counts.values()) total += count;
  if (!total) return null;
  const rank = Math.max(1, Math.ceil(share * total));
  let seen = 0;
  for (const bucket of [...counts.keys()].sort((a, b) => a - b)) {
    seen += counts.get(bucket);
    if (seen >= rank) return bucket <= 0 ? first : first * growth ** (bucket - 0.5);
  }
  return null;
}

/** Seconds as a short text: "840 µs", "12.4 ms", "3.2 s", "4 min 10 s". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 0.001) return `${short(seconds * 1e6)} µs`;
  if (size < 1) return `${short(seconds * 1e3)} ms`;
  if (size < 60) return `${short(seconds)} s`;
  const whole = Math.round(seconds);
  if (size < 3600) return `${Math.trunc(whole / 60)} min ${Math.abs(whole % 60)} s`;
  return `${Math.trunc(whole / 3600)} h ${Math.trunc(Math.abs(whole % 3600) / 60)} min`;
}

/** Three digits: 1.24, 12.4, 124. */
export function short(value) {
  const size = Math.abs(value);
  if (size >= 100 || Number.isInteger(value)) return String(Math.round(value));
  return value.toFixed(size >= 10 ? 1 : 2);
}

const WHOLE = new Intl.NumberFormat("en");

/** 12,345 */
export function whole(value) {
  return WHOLE.format(Math.round(value));
}

/** A large number in few letters: 999, 12.4k, 3.1M. */
export function brief(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${short(value / 1e6)}M`;
  if (size >= 1e4) return `${short(value / 1e3)}k`;
  return size >= 100 || Number.isInteger(value) ? whole(value) : short(value);
}

export function percent(share) {
  return `${Math.round(share * 100)}%`;
}

export function plural(number, word) {
  return `${whole(number)} ${word}${number === 1 ? "" : "s"}`;
}

/** A round number above `value`, for the end of an axis. */
export function roundAbove(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  for (const factor of [1, 1.5, 2, 3, 4, 5, 6, 8, 10]) if (factor * power >= value * 0.999) return factor * power;
  return 10 * power;
}

/** The id of the request that the answer `id` belongs to: `ID` of `ID-1` and `ID-1-0`. */
export function requestOf(id) {
  return id.replace(/(-\d{1,4}){1,2}$/, "");
}

/** The first characters of a request id, enough to tell the requests on the screen apart. With the number of an answer,
 *  fewer characters are shown, so that both fit in the column of names. */
export function shortId(id) {
  const [, base, child] = /^(.*?)((?:-\d{1,4}){0,2})$/.exec(id);
  const room = child ? Math.max(3, 9 - child.length) : 8;
  return (base.length > room ? base.slice(0, room) : base) + child;
}
