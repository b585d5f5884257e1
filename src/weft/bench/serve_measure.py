"""Evaluates a run: a record of each request, percentiles, throughput, goodput, and the request rate at which latency
begins to rise steeply."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weft.bench.report import quantile
from weft.bench.serve_load import Item
from weft.bench.serve_stream import Answer

BEND = 2.0
"""Latency bends at the first rate whose median is more than this many times the median at the lowest rate."""
MET = 0.9
"""A rate meets the targets if this fraction of its requests is within them."""


@dataclass(frozen=True)
class Record:
    """One request. Times are seconds after the start of its phase."""

    due: float | None
    """Scheduled send time; None in a closed loop."""
    began: float
    chunk_times: tuple[float, ...]
    ended: float
    asked_tokens: int
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int
    has_usage: bool
    """Whether the server reported token counts; otherwise each chunk counts as one token."""
    finish_reason: str | None
    failure_kind: str | None
    failure_detail: str | None

    @property
    def is_answered(self) -> bool:
        return self.failure_kind is None

    @property
    def first_token(self) -> float | None:
        return self.chunk_times[0] - self.began if self.chunk_times else None

    @property
    def gaps(self) -> list[float]:
        """Times between chunks. A chunk with several tokens has no gaps inside."""
        return [later - earlier for earlier, later in itertools.pairwise(self.chunk_times)]

    @property
    def end_to_end(self) -> float:
        return self.ended - self.began

    @property
    def per_token(self) -> float | None:
        """Mean time per token after the first chunk. Unlike gaps, it does not depend on the tokens per chunk."""
        if self.output_tokens < 2 or len(self.chunk_times) < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.output_tokens - 1)


def record_of(answer: Answer, item: Item, start: float, due: float | None) -> Record:
    has_usage = answer.completion_tokens is not None
    ids = item.prompt if isinstance(item.prompt, tuple) else ()
    return Record(
        due=due,
        began=answer.began - start,
        chunk_times=tuple(time - start for time in answer.chunk_times),
        ended=answer.ended - start,
        asked_tokens=item.max_tokens,
        output_tokens=answer.completion_tokens or len(answer.chunk_times),
        prompt_tokens=answer.prompt_tokens if answer.prompt_tokens is not None else len(ids),
        cached_tokens=answer.cached_tokens or 0,
        has_usage=has_usage,
        finish_reason=answer.finish_reason,
        failure_kind=answer.failure.kind if answer.failure else None,
        failure_detail=answer.failure.detail if answer.failure else None,
    )


@dataclass(frozen=True)
class Targets:
    """Latency limits in seconds; None means no limit. A request within all limits counts for goodput."""

    first_token: float | None = None
    gap: float | None = None
    """Limit for 99% of the gaps of a request: one slow gap in 100 is allowed."""
    end_to_end: float | None = None

    @property
    def is_given(self) -> bool:
        return any(target is not None for target in (self.first_token, self.gap, self.end_to_end))

    def are_met(self, record: Record) -> bool:
        if not record.is_answered:
            return False
        if self.first_token is not None and (
            record.first_token is None or record.first_token > self.first_token
        ):
            return False
        if self.gap is not None and record.gaps and quantile(record.gaps, 0.99) > self.gap:
            return False
        return self.end_to_end is None or record.end_to_end <= self.end_to_end


@dataclass(frozen=True)
class Distribution:
    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True)
class Summary:
    """Results of one phase. Latencies are in seconds, over the answered requests; None if there are none."""

    requests: int
    answered: int
    failures: dict[str, int]
    seconds: float
    """Time from the start of the first request to the end of the last."""
    requests_per_second: float
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int
    tokens_per_chunk: float
    tokens_from_usage: bool
    short_answers: int
    """Answers with fewer tokens than requested."""
    first_token: Distribution | None
    gap: Distribution | None
    per_token: Distribution | None
    end_to_end: Distribution | None
    good_share: float | None
    """The fraction of all requests that are within the targets; None without targets."""
    goodput: float | None
    """Requests per second within the targets."""
    late_start: Distribution | None
    """Delay of the load generator itself: actual minus scheduled send time. Not part of any latency."""


def distribution(values: Iterable[float]) -> Distribution | None:
    ordered = sorted(values)
    if not ordered:
        return None
    p50, p90, p99 = (quantile(ordered, share) for share in (0.5, 0.9, 0.99))
    return Distribution(len(ordered), sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


def summarise(records: Sequence[Record], targets: Targets) -> Summary:
    answered = [record for record in records if record.is_answered]
    begin = min((record.began for record in records), default=0.0)
    seconds = max((record.ended for record in records), default=0.0) - begin

    def rate(amount: float) -> float:
        return amount / seconds if seconds > 0 else 0.0

    output_tokens = sum(record.output_tokens for record in answered)
    prompt_tokens = sum(record.prompt_tokens for record in answered)
    chunks = sum(len(record.chunk_times) for record in answered)
    good = sum(targets.are_met(record) for record in records)
    return Summary(
        requests=len(records),
        answered=len(answered),
        failures=dict(
            Counter(record.failure_kind for record in records if record.failure_kind).most_common()
        ),
        seconds=seconds,
        requests_per_second=rate(len(answered)),
        output_tokens_per_second=rate(output_tokens),
        prompt_tokens_per_second=rate(prompt_tokens),
        output_tokens=output_tokens,
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(record.cached_tokens for record in answered),
        tokens_per_chunk=output_tokens / chunks if chunks else 0.0,
        tokens_from_usage=all(record.has_usage for record in answered),
        short_answers=sum(record.output_tokens < record.asked_tokens for record in answered),
        first_token=distribution(r.first_token for r in answered if r.first_token is not None),
        gap=distribution(gap for record in answered for gap in record.gaps),
        per_token=distribution(r.per_token for r in answered if r.per_token is not None),
        end_to_end=distribution(record.end_to_end for record in answered),
        good_share=good / len(records) if targets.is_given and records else None,
        goodput=rate(good) if targets.is_given else None,
        late_start=distribution(record.began - record.due for record in records if record.due is not None),
    )


def describe_sweep(points: Sequence[tuple[float, Summary]]) -> list[str]:
    """Sentences for the report: where latency bends as the rate grows, and the highest rate within the targets."""
    points = sorted(points, key=lambda point: point[0])
    measured = [(rate, s.end_to_end.p50) for rate, s in points if s.end_to_end is not None]
    if len(measured) < 2:
        return []
    lowest, base = measured[0]
    bent = [index for index, (_, median) in enumerate(measured) if median > BEND * base]
    if bent:
        (before, _), (rate, median) = measured[bent[0] - 1], measured[bent[0]]
        sentences = [
            f"Latency bends between {before:g} and {rate:g} requests/s: the median end to end is {median:.3f} s, "
            f"{median / base:.1f} times that at {lowest:g}."
        ]
    else:
        rate, median = measured[-1]
        sentences = [
            f"Latency does not bend up to {rate:g} requests/s: the median end to end is {median:.3f} s, "
            f"{median / base:.1f} times that at {lowest:g}."
        ]
    shares = [(rate, summary.good_share) for rate, summary in points if summary.good_share is not None]
    kept = list(itertools.takewhile(lambda point: point[1] >= MET, shares))
    if kept:
        sentences.append(
            f"{MET:.0%} of the requests are within the targets up to {kept[-1][0]:g} requests/s."
        )
    elif shares:
        sentences.append(f"At no rate are {MET:.0%} of the requests within the targets.")
    return sentences
