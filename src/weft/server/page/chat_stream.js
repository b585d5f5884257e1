// Reads the events of a chat stream into answers, and says what went wrong in sentences.

import { ApiError } from "./api.js";

/** Adds one chunk to `answers`, the nodes of one request. `answerAt(index)` makes a missing one; `now` is a time in
 *  milliseconds. */
export function applyChunk(chunk, answers, answerAt, now) {
  if (chunk.error) {
    throw new ApiError(chunk.error.message || "The server could not complete the answer.", { code: chunk.error.code || null });
  }
  for (const choice of chunk.choices ?? []) {
    const answer = answerAt(choice.index);
    answer.model = chunk.model;
    if (applyDelta(answer, choice)) {
      answer.times.first ??= now;
      answer.times.last = now;
    }
    if (choice.finish_reason) answer.finish = choice.finish_reason;
    if (choice.timings) answer.timings = choice.timings;
  }
  if (chunk.usage) for (const answer of answers) if (answer) answer.usage = chunk.usage;
}

/** Adds a delta to an answer. Returns whether the delta had content. */
function applyDelta(answer, { delta, logprobs }) {
  let hasContent = false;
  if (delta?.content) {
    answer.text += delta.content;
    hasContent = true;
  }
  if (delta?.reasoning_content) {
    answer.thoughts += delta.reasoning_content;
    hasContent = true;
  }
  for (const part of delta?.tool_calls ?? []) {
    const call = (answer.calls[part.index] ??= { id: "", type: "function", name: "", text: "" });
    const { function: named, custom } = part;
    if (part.id) call.id = part.id;
    if (part.type) call.type = part.type;
    call.name += named?.name ?? custom?.name ?? "";
    call.text += named?.arguments ?? custom?.input ?? "";
    hasContent = true;
  }
  if (logprobs?.content?.length) {
    answer.tokens ??= [];
    answer.tokens.push(...logprobs.content.map(compactToken));
    hasContent = true;
  }
  return hasContent;
}

/** [bytes, logprob, [[text, logprob], ...]]: a token may be a part of a character, so its text comes from its bytes. */
function compactToken({ bytes, logprob, top_logprobs: others }) {
  return [bytes, logprob, (others ?? []).map((other) => [other.token, other.logprob])];
}

/** Seconds to the first token, tokens and tokens per second of an answer, as far as they are known. `usage` is the sum of
 *  all answers of the request. */
export function figuresOf({ usage, timings, request, times, countedTokens }) {
  const reported = timings?.completion_tokens ?? (request?.n > 1 ? null : usage?.completion_tokens) ?? null;
  const tokens = reported ?? countedTokens ?? null;
  const seconds = (times.last - times.first) / 1000;
  return {
    firstSeconds: times.first === undefined ? null : (times.first - times.sent) / 1000,
    tokens,
    isEstimate: reported === null && tokens !== null,
    // The seconds between the first and the last token belong to all tokens but the first.
    rate: tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null,
    promptTokens: usage?.prompt_tokens ?? null,
    cachedTokens: usage?.prompt_tokens_details?.cached_tokens ?? null,
  };
}

/** What went wrong, as {text, hint}. */
export function explained(error) {
  if (!(error instanceof ApiError)) return { text: `The page failed: ${sentence(error.message)}`, hint: "" };
  const wait = error.retryAfter === null ? "" : `Ask again in ${secondsIn(error.retryAfter)}.`;
  const hint = {
    context_length_exceeded: "The conversation is too long for the model. Start a new chat, or edit an earlier message.",
    engine_not_ready: wait,
    draining: "Open the page of another server, or wait until this one is back.",
  }[error.code];
  return { text: sentence(error.message), hint: hint ?? wait };
}

function secondsIn(number) {
  const whole = Math.max(1, Math.ceil(number));
  return whole === 1 ? "1 second" : `${whole} seconds`;
}

/** The messages of the API begin with a small letter and have no full stop. */
export function sentence(message) {
  const text = message.trim();
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

/** How an answer ended, in words. Empty for an ordinary end. */
export function endOf({ state, finish, calls }) {
  if (state === "stopped") return "Stopped before its end.";
  if (state === "done" && finish === "length") return "Cut: the limit of tokens was reached.";
  if (state === "done" && finish === "tool_calls") return calls.length === 1 ? "The model calls a tool." : `The model makes ${calls.length} calls.`;
  return "";
}
