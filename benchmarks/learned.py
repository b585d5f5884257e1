"""`python -m benchmarks learned`: how much faster requests become with draft tokens from finished answers.

Two engines run the same model. One keeps finished answers; the other keeps none, as at a cold start. They get the same
requests in turn, since the speed of a shared machine changes from minute to minute. Both must give the same answers,
token for token. Requests that are not measured go to the first engine only, so that it learns from them.

One stream: the time after the first token. 8 streams: the time of a wave of 8 requests, prompts included. A ratio is the
geometric mean over the requests or waves, with its 95% interval: a stall of the machine changes one of many.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.peers_environment import draw_chart
from benchmarks.traces import TRACES, Trace
from weft.bench.ratios import Ratios
from weft.bench.report import Check, machine, print_checks, print_json, print_line, print_table
from weft.errors import InvalidRequestError
from weft.llm import LLM
from weft.request import GenerationResult, SamplingParams

MAX_TOKENS = 160
STREAMS = (1, 8)
BARS = {1: 1.6, 8: 1.2}
"""Number of streams -> required speed in the last quarter of related requests, relative to the engine without finished
answers."""
UNRELATED_BAR = 0.98
"""The required relative speed in each quarter of unrelated requests."""
PARTS = 4


@dataclass(frozen=True)
class Part:
    """The figures of the requests of one part of a trace."""

    trace: str
    streams: int
    name: str
    tokens: int
    seconds_cold: float
    seconds_warm: float
    learned_drafts: int
    learned_drafts_accepted: int
    is_same: bool
    ratio: float
    """How many times as fast the warm engine was."""
    low: float
    high: float
    """The 95% interval of `ratio`."""


def main(
    model: str = "default",
    *,
    requests: int = 200,
    trace: str | None = None,
    streams: int | None = None,
    keep: Path | None = None,
    plot: Path | None = None,
    as_json: bool = False,
) -> bool:
    """Measures and prints. Returns False if an answer differs or a bar is missed."""
    if trace is not None and trace not in {one.name for one in TRACES}:
        names = ", ".join(one.name for one in TRACES)
        raise InvalidRequestError(f"the trace is {trace!r}; allowed: {names}")
    parts = [
        part
        for one in TRACES
        for count in STREAMS
        if trace in (None, one.name) and streams in (None, count) and (one.is_related or count == 1)
        for part in measure(model, one, requests, count)
    ]
    found = checks(parts)
    result = {"machine": machine(), "parts": [asdict(part) for part in parts], "checks": found}
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{trace or 'all'}-{streams or 'all'}.json").write_text(json.dumps(result["parts"]))
    if as_json:
        print_json(result)
    else:
        print_table(
            f"Tokens/s without and with draft tokens from finished answers ({requests} requests of each trace)",
            ("trace", "streams", "requests", "tokens", "cold", "warm", "times", "learned drafts", "accepted"),
            [_row(part) for part in parts],
        )
        print_checks(found)
        print_line(machine())
    if plot is not None:
        kept = (
            [one for path in sorted(keep.glob("*.json")) for one in json.loads(path.read_text())]
            if keep
            else []
        )
        draw_chart("plot_learned", kept or [asdict(part) for part in parts], plot)
    return all(check.is_met for check in found)


def checks(parts: list[Part]) -> list[Check]:
    is_same = all(part.is_same for part in parts)
    found = [Check("answers", "the same" if is_same else "some differ", "token for token", is_same)]
    related = {one.name: one.is_related for one in TRACES}
    for part in parts:
        if related[part.trace] and part.name != "last":
            continue
        bar = BARS[part.streams] if related[part.trace] else UNRELATED_BAR
        name = f"{part.trace}, streams: {part.streams}, {part.name}"
        measured = f"{part.ratio:.2f} times [{part.low:.2f}, {part.high:.2f}]"
        found.append(Check(name, measured, f"{bar} times", part.ratio >= bar))
    return found


def measure(model: str, trace: Trace, requests: int, streams: int) -> list[Part]:
    """Runs a trace and returns its parts. A trace of related requests has two: the first tenth and the last quarter. A
    trace of unrelated requests has its four quarters."""
    quarter = max(1, requests // PARTS)
    # `ends`: end of a part -> its name. A part without a name is not measured: the warm engine only learns from it.
    if trace.is_related:
        ends = {max(1, requests // 10): "first", requests - quarter: "", requests: "last"}
    else:
        ends = {quarter * number: f"quarter {number}" for number in range(1, PARTS + 1)}
    parts, first = [], 0
    with LLM(model) as warm, LLM(model, max_learned_bytes=0) as cold:
        replay = _Replay(trace, streams, warm, cold)
        for end, name in ends.items():
            parts += [replay.run(first, end, name)] if name else []
            for number in range(first, end if not name else first, streams):
                replay.learn(number)
            first = max(first, end)
    return parts


class _Replay:
    """Runs the streams of a trace in waves. A wave has one request of each stream."""

    def __init__(self, trace: Trace, streams: int, warm: LLM, cold: LLM) -> None:
        self._trace, self._warm, self._cold = trace, warm, cold
        self._earlier: list[list[tuple[int, str]]] = [[] for _ in range(streams)]

    def learn(self, first: int) -> None:
        """Sends the wave that begins with request `first` to the warm engine only. Nothing is measured."""
        self._note(first, self._ask(self._warm, first)[0])

    def run(self, first: int, end: int, name: str) -> Part:
        """Sends the waves of requests `first` to `end` to both engines, and returns the figures as the part `name`."""
        stats = self._warm.engine.scheduler.stats
        drafts, accepted = stats.learned_drafts, stats.learned_drafts_accepted
        seconds: dict[LLM, list[float]] = {self._warm: [], self._cold: []}
        tokens, is_same = 0, True
        for number, wave in enumerate(range(first, end, len(self._earlier))):
            answers: dict[LLM, list[GenerationResult]] = {}
            for llm in (self._warm, self._cold) if number % 2 else (self._cold, self._warm):
                answers[llm], took = self._ask(llm, wave)
                seconds[llm].append(took)
            self._note(wave, answers[self._warm])
            tokens += sum(answer.decode_steps for answer in answers[self._warm])
            both = zip(answers[self._warm], answers[self._cold], strict=True)
            is_same = is_same and all(one.tokens == other.tokens for one, other in both)
        # An answer of one token has no time after it.
        pairs = [pair for pair in zip(seconds[self._warm], seconds[self._cold], strict=True) if min(pair) > 0]
        change = Ratios([warm for warm, _ in pairs], [cold for _, cold in pairs]).change()
        return Part(
            self._trace.name,
            len(self._earlier),
            name,
            tokens,
            sum(seconds[self._cold]),
            sum(seconds[self._warm]),
            stats.learned_drafts - drafts,
            stats.learned_drafts_accepted - accepted,
            is_same,
            *(1 + one for one in change),
        )

    def _ask(self, llm: LLM, first: int) -> tuple[list[GenerationResult], float]:
        """The answers to a wave, one for each stream, and the seconds that they took."""
        numbers = range(first, first + len(self._earlier))
        asked = [self._trace.request(*one) for one in zip(numbers, self._earlier, strict=True)]
        params = [
            SamplingParams(max_tokens=MAX_TOKENS, temperature=self._trace.temperature, seed=number)
            for number in numbers
        ]
        prompts = [llm.text.encode_chat(messages) for messages in asked]
        started = time.perf_counter()
        answers = llm.generate(prompts, params, show_progress=False)
        took = time.perf_counter() - started
        return answers, took if len(asked) > 1 else answers[0].decode_time

    def _note(self, first: int, answers: list[GenerationResult]) -> None:
        """Adds a wave and its answers to the history of the streams."""
        for stream, answer in enumerate(answers):
            self._earlier[stream].append((first + stream, answer.text))


def _row(part: Part) -> tuple[str, ...]:
    return (
        part.trace,
        str(part.streams),
        part.name,
        f"{part.tokens:,}",
        f"{part.tokens / part.seconds_cold:.0f}",
        f"{part.tokens / part.seconds_warm:.0f}",
        f"{part.ratio:.2f} [{part.low:.2f}, {part.high:.2f}]",
        f"{part.learned_drafts:,}",
        f"{part.learned_drafts_accepted / max(1, part.learned_drafts):.0%}",
    )
