// Collects data from the frames, for the page to draw. It has the rows of the last steps (`Band`), the events of each
// request (`lives`), the points of the charts, and the states of KV blocks. The size of everything is bounded.

import { Band, groupSteps, MARKS, stepsWithin } from "./live_band.js";
import { BlockStates } from "./live_cells.js";
import { addCounts, countsSince, quantile, readEvent, readFrame, requestOf } from "./live_numbers.js";

const MAX_LIVES = 1500;
const MAX_EVENTS_OF_A_LIFE = 300;
const MAX_SAMPLES_OF_A_LIFE = 240;
const MAX_ENDED = 12;

export class History {
  /** `binSeconds`: the width of a point of the charts; `numBins`: how many of them are kept. */
  constructor(info, { binSeconds = 0.5, numBins = 600 } = {}) {
    this.info = info;
    this.binSeconds = binSeconds;
    this.numBins = numBins;
    this.band = new Band(Math.max(1, info.num_rows));
    this.blocks = new BlockStates(info.num_blocks + info.store_blocks);
    /** The newest frame, or null. */
    this.frame = null;
    this.lives = new Map();
    this.ended = [];
    this.bins = [];
    this._numbers = 0;
    this._byNumber = new Map();
    /** Events of steps that are in no frame yet. */
    this._late = [];
  }

  /** The life of a request: what frames have said about it, or the server's entry (`held`) if it is not in the engine yet. A
   *  coalesced request has the life of the sequence that it reads. `sequence`: the id of that sequence, if it is known. */
  lifeOf(id, sequence = this._sequenceOf(id)) {
    const life = this.lives.get(sequence);
    if (life) {
      const reader = life.readers.find((one) => one.request_id === id);
      return { ...life, id, sequence, reader, key: reader?.key ?? (id === sequence ? life.key : null) };
    }
    if (this.lives.has(id)) return this.lives.get(id);
    const held = this.frame?.held.find((one) => one.request_id === id);
    return held && { ...newLife(id, 0), held, key: held.key, lastAt: this.frame.at };
  }

  /** The id of the sequence that a coalesced request reads. */
  _sequenceOf(id) {
    for (const life of this.lives.values()) if (life.readers.some((one) => one.request_id === id)) return life.id;
    return undefined;
  }

  lifeOfNumber(number) {
    return this._byNumber.get(number);
  }

  /** Adds a frame in the form that the server sends. */
  add(sent) {
    const frame = readFrame(sent);
    const before = this.frame;
    const isOther = before && (frame.at < before.at || frame.step < before.step);
    if (isOther) this._startAgain();
    const older = isOther ? null : before;
    this.blocks.write(frame.first_block, frame.blocks);
    this._addLives(frame, older);
    this._addReaders(frame);
    this._addColumns(frame, older);
    this._addBin(frame, older);
    this._closeLives(frame);
    this.frame = frame;
  }

  /** The engine started again: its clock and its steps begin at zero, its requests are gone. */
  _startAgain() {
    for (const life of this.lives.values()) if (!life.end) this._end(life, { at: life.lastAt, step: life.lastStep, kind: "lost" });
    this.bins = [];
    this._late = [];
    this.blocks = new BlockStates(this.blocks.codes.length);
  }

  // --- the lives of requests ---

  _life(id) {
    let life = this.lives.get(id);
    if (!life) {
      life = newLife(id, ++this._numbers);
      this.lives.set(id, life);
      this._byNumber.set(life.number, life);
    }
    return life;
  }

  /** Adds the events and the requests of a frame to the lives. `older`: the frame before it. */
  _addLives(frame, older) {
    for (const event of frame.events) {
      const life = this._life(event.request_id);
      if (life.events.length < MAX_EVENTS_OF_A_LIFE) life.events.push(event);
      else {
        // The newest event replaces the one before it, so that the first events and the end remain.
        life.events[life.events.length - 1] = event;
        life.leftOut++;
      }
      if (event.kind === "admitted") life.row = event.first;
      if (event.kind === "finished" || event.kind === "failed") this._end(life, event);
    }
    for (const request of frame.requests) {
      const life = this._life(request.request_id);
      // If the request is older than the frame before, the number of its new tokens is not known.
      if (!life.request) life.tokens = older && request.arrived_at >= older.at ? request.prompt_length : null;
      life.request = request;
      life.key = frame.keys[request.request_id] ?? frame.keys[requestOf(request.request_id)] ?? life.key;
      life.lastAt = frame.at;
      life.lastStep = frame.step;
      if (request.row >= 0) life.row = request.row;
      sample(life, frame.at, request);
    }
  }

  /** Sets the readers of each sequence. A sequence that has ended keeps its last readers. */
  _addReaders({ readers, keys }) {
    const found = new Map();
    for (const reader of readers) {
      const id = reader.request_id, { sequence_id: sequence } = reader;
      if (!found.has(sequence)) found.set(sequence, []);
      found.get(sequence).push({ ...reader, key: keys[id] ?? keys[requestOf(id)] ?? null });
    }
    for (const [sequence, list] of found) if (this.lives.has(sequence)) this.lives.get(sequence).readers = list;
  }

  /** Adds the events of a request from before the first frame. They are the response of /replay/requests/{id}. */
  addEarlier(id, { events, left_out: leftOut }) {
    if (!events.length) return;
    const life = this._life(id);
    const earlier = events.map(readEvent);
    const textOf = (event) => JSON.stringify(Object.values(event));
    const known = new Set(earlier.map(textOf)), { at } = earlier[earlier.length - 1];
    life.events = [...earlier, ...life.events.filter((event) => event.at >= at && !known.has(textOf(event)))];
    life.leftOut = leftOut;
    life.end ??= life.events.find(({ kind }) => kind === "finished" || kind === "failed") ?? null;
  }

  _end(life, event) {
    if (life.end) return;
    life.end = event;
    life.lastAt = event.at;
    // The request got its last tokens after the last frame that had it.
    if (life.request && event.kind === "finished" && this.info.reasons?.[event.first] === "length") {
      life.request = { ...life.request, num_tokens: life.request.limit };
    }
    this.ended.unshift(life);
    this.ended.length = Math.min(this.ended.length, MAX_ENDED);
  }

  /** A request that is missing in a complete frame has ended, even if the event was left out. */
  _closeLives(frame) {
    if (frame.requests.length >= frame.num_running + frame.num_waiting) {
      for (const life of this.lives.values()) {
        if (!life.end && life.request && life.lastAt < frame.at) this._end(life, { at: frame.at, step: frame.step, kind: "gone" });
      }
    }
    if (this.lives.size <= MAX_LIVES) return;
    for (const [id, life] of this.lives) {
      if (!life.end || this.ended.includes(life)) continue;
      this.lives.delete(id);
      this._byNumber.delete(life.number);
      if (this.lives.size <= MAX_LIVES * 0.8) break;
    }
  }

  // --- the band ---

  /** Adds the steps of a frame to the band. */
  _addColumns(frame, older) {
    const events = [...this._late, ...frame.events];
    this._late = [];
    const groups = groupSteps(frame.steps);
    if (!groups.length) {
      this._late = events.slice(-MAX_EVENTS_OF_A_LIFE);
      this._setDecodes(frame, []);
      return;
    }
    const last = groups[groups.length - 1].last;
    if (older && groups[0].first > older.step + 1) groups[0].gap = groups[0].first - older.step - 1;
    for (const group of groups) group.number = this.band.add(group);
    const ends = new Map();
    for (const event of events) {
      if (event.step > last) this._late.push(event);
      else this._addEvent(event, groups, ends);
    }
    this._setDecodes(frame, groups, ends, older);
  }

  /** Marks an event in the column of its step. */
  _addEvent(event, groups, ends) {
    const life = this.lives.get(event.request_id);
    if (!life) return;
    if (event.kind === "finished" || event.kind === "failed" || event.kind === "preempted") ends.set(life, event.step);
    else if (event.kind === "first_token") life.decodesAfter = event.step;
    // A sequence that was swapped in decodes in that step.
    else if (event.kind === "swapped_in") life.decodesAfter = event.step - 1;
    if (life.row < 0 || life.row >= this.band.numRows) return;
    const group = groups.find((one) => event.step <= one.last);
    const cell = this.band.at(group.number, life.row);
    if (event.kind === "chunk") {
      this.band.owner[cell] = life.number;
      this.band.prefill[cell] += event.second;
      return;
    }
    const mark = event.kind === "preempted" ? (event.first ? MARKS.swapped_out : MARKS.preempted)
      : MARKS[event.kind === "failed" ? "finished" : event.kind];
    if (!mark) return;
    if (event.kind === "admitted" || !this.band.owner[cell]) this.band.owner[cell] = life.number;
    this.band.marks[cell] |= mark;
  }

  /** Spreads the tokens that each request gained over the columns in which it decoded. */
  _setDecodes(frame, groups, ends = new Map(), older = null) {
    const more = (name) => (older ? Math.max(0, (frame.totals[name] || 0) - (older.totals[name] || 0)) : 0);
    const rest = { accepted: more("drafts_accepted"), drafted: more("tokens_drafted") };
    for (const request of frame.requests) {
      const life = this.lives.get(request.request_id);
      const isDecoding = request.state === "decoding";
      if (isDecoding && life.decodesAfter === null) life.decodesAfter = groups.length ? groups[0].first - 1 : frame.step;
      const first = life.decodesAfter;
      const tokens = life.tokens === null ? Infinity : Math.max(0, request.num_tokens - life.tokens);
      // A request that was preempted since the frame before may have decoded first.
      if (groups.length && first !== null && life.row >= 0 && (isDecoding || tokens > 0)) {
        const accepted = Math.max(0, request.num_accepted - life.accepted), drafted = Math.max(0, request.num_drafted - life.drafted);
        rest.accepted -= accepted;
        rest.drafted -= drafted;
        this._spread(life, groups, first, ends.get(life) ?? Infinity, { tokens, accepted, drafted });
      } else if (groups.length && request.row >= 0) this._own(life, groups);
      life.tokens = request.num_tokens;
      life.accepted = request.num_accepted;
      life.drafted = request.num_drafted;
      if (!isDecoding) life.decodesAfter = null;
    }
    // A request that ended since the frame before is not in the list of this one. An estimate: it got one token in each
    // step until its end, and a part of the draft tokens in the totals that the listed requests did not get.
    const ended = [...ends].filter(([life]) => life.end && life.decodesAfter !== null && life.row >= 0);
    for (const [life, step] of ended) {
      this._spread(life, groups, life.decodesAfter, step, { tokens: Infinity,
        accepted: Math.max(0, rest.accepted) / ended.length, drafted: Math.max(0, rest.drafted) / ended.length });
    }
  }

  /** Marks the cells of a request that has a row, but did not decode. */
  _own(life, groups) {
    if (life.row >= this.band.numRows) return;
    for (const group of groups) {
      const cell = this.band.at(group.number, life.row);
      if (!this.band.owner[cell]) this.band.owner[cell] = life.number;
    }
  }

  /** Writes the tokens of a request into its cells: the same number for each step in (after, until]. */
  _spread(life, groups, after, until, { tokens, accepted, drafted }) {
    if (life.row >= this.band.numRows) return;
    let steps = 0;
    for (const group of groups) steps += stepsWithin(group, after, until);
    if (!steps) return;
    const { band } = this;
    const each = tokens === Infinity ? 1 : Math.max(0, tokens - accepted) / steps;
    for (const group of groups) {
      const share = stepsWithin(group, after, until) / (group.last - group.first + 1);
      if (!share) continue;
      const cell = band.at(group.number, life.row);
      if (band.owner[cell] && band.owner[cell] !== life.number) continue;
      band.owner[cell] = life.number;
      band.decode[cell] = each * share;
      band.accepted[cell] = accepted / steps * share;
      band.rejected[cell] = Math.max(0, drafted - accepted) / steps * share;
    }
  }

  // --- series for the charts ---

  /** Adds a frame to the newest point of the charts. */
  _addBin(frame, older) {
    const start = Math.floor(frame.at / this.binSeconds) * this.binSeconds;
    let bin = this.bins[this.bins.length - 1];
    if (!bin || bin.start < start) {
      bin = { start, seconds: 0, tokens: 0, prefilled: 0, prompt: 0, cached: 0, steps: 0, stepSeconds: 0, slowest: 0,
        firstTokens: new Map(), gaps: new Map(), running: 0, waiting: 0 };
      this.bins.push(bin);
      if (this.bins.length > this.numBins) this.bins.shift();
    }
    bin.running = frame.num_running;
    bin.waiting = frame.num_waiting;
    let prefilled = 0;
    for (const step of frame.steps) {
      if (step.seconds !== null) {
        bin.steps++;
        bin.stepSeconds += step.seconds;
        bin.slowest = Math.max(bin.slowest, step.seconds);
      }
      prefilled += step.prefill_tokens;
    }
    if (!older) return;
    const more = (name) => Math.max(0, (frame.totals[name] || 0) - (older.totals[name] || 0));
    bin.seconds += frame.at - older.at;
    bin.tokens += more("tokens_generated");
    // An estimate: a step that the frame leaves out has as many prompt tokens as one that it has, on average.
    bin.prefilled += prefilled * (1 + frame.steps_left_out / Math.max(1, frame.steps.length));
    this._addHits(frame, bin);
    addCounts(bin.firstTokens, countsSince(frame.first_token_counts, older.first_token_counts));
    addCounts(bin.gaps, countsSince(frame.gap_counts, older.gap_counts));
  }

  /** Counts prefix hits at the first admission: the totals of the scheduler have them only at the end of a request. */
  _addHits(frame, bin) {
    for (const event of frame.events) {
      const life = event.kind === "admitted" && this.lives.get(event.request_id);
      if (!life || life.wasAdmitted) continue;
      life.wasAdmitted = true;
      // A request that was admitted and ended between two frames is in no frame.
      const length = life.request?.prompt_length ?? life.events.find(({ kind }) => kind === "queued")?.first;
      if (length === undefined) continue;
      bin.prompt += length;
      bin.cached += event.second;
    }
  }

  /** A point for each bin: values that need many samples are taken over the last `window` bins. */
  series(window = 20) {
    return this.bins.map((bin, index) => {
      const recent = this.bins.slice(Math.max(0, index - window + 1), index + 1).filter((one) => bin.start - one.start < window * this.binSeconds);
      const firstTokens = recent.reduce((sum, one) => addCounts(sum, one.firstTokens), new Map());
      const gaps = recent.reduce((sum, one) => addCounts(sum, one.gaps), new Map());
      const prompt = recent.reduce((sum, one) => sum + one.prompt, 0);
      const cached = recent.reduce((sum, one) => sum + one.cached, 0);
      const { buckets } = this.info;
      return {
        at: bin.start,
        step: bin.steps ? bin.stepSeconds / bin.steps : null,
        slowest: bin.steps ? bin.slowest : null,
        tokens: bin.seconds ? bin.tokens / bin.seconds : null,
        prefilled: bin.seconds ? bin.prefilled / bin.seconds : null,
        hits: prompt ? Math.min(1, cached / prompt) : null,
        first50: quantile(firstTokens, 0.5, buckets), first99: quantile(firstTokens, 0.99, buckets),
        gap50: quantile(gaps, 0.5, buckets), gap99: quantile(gaps, 0.99, buckets),
        running: bin.running, waiting: bin.waiting,
      };
    });
  }
}

export function newLife(id, number) {
  return { id, number, request: null, held: null, readers: [], key: null, row: -1, events: [], leftOut: 0, samples: [], end: null,
    lastAt: 0, lastStep: 0, tokens: null, drafted: 0, accepted: 0, decodesAfter: null, wasAdmitted: false };
}

/** Keeps the number of tokens over time. When there are too many samples, every second one is dropped. */
function sample(life, at, { num_tokens: tokens, computed, state }) {
  const { samples } = life;
  const last = samples[samples.length - 1];
  if (last && last.tokens === tokens && last.computed === computed && last.state === state) return;
  samples.push({ at, tokens, computed, state });
  if (samples.length > MAX_SAMPLES_OF_A_LIFE) life.samples = samples.filter((one, index) => index % 2 === 0 || index === samples.length - 1);
}
