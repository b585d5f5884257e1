"""Read-only views of plans and rows, for tests, logs and dashboards. The scheduler does not use them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from weft.metrics import Slot
from weft.plan import DecodeTask, IterationPlan, PrefillTask
from weft.request import RequestId
from weft.scheduling.scheduler import ContinuousBatchScheduler
from weft.scheduling.sequence import Sequence


class BatchType(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    EMPTY = "empty"
    """A plan without tokens. It has swaps only."""


class BatchToken(NamedTuple):
    """One token that a step computes."""

    request_id: RequestId
    row: int
    position: int
    is_decode: bool
    samples: bool
    """Whether the step samples the token that follows this one."""
    token_id: int | None = None
    """None: a step in flight samples it, or the view was made without `sequences`."""


@dataclass(frozen=True, slots=True)
class BatchStats:
    sequences: int
    tokens: int
    prefill_tokens: int
    decode_tokens: int
    samples: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A slice of the tokens of a step, in plan order."""

    tokens: tuple[BatchToken, ...]

    def token_ids(self) -> list[int | None]:
        return [token.token_id for token in self.tokens]

    def positions(self) -> list[int]:
        return [token.position for token in self.tokens]

    @property
    def batch_type(self) -> BatchType:
        kinds = {token.is_decode for token in self.tokens}
        return _batch_type(has_decodes=True in kinds, has_prefills=False in kinds)


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """The sequences of a step, and the positions that it computes of each."""

    request_ids: tuple[RequestId, ...]
    rows: tuple[int, ...]
    ranges: tuple[range, ...]


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """A plan as one batch. A plan holds positions only; token ids come from `sequences` (`scheduler.sequences`)."""

    plan: IterationPlan
    sequences: Mapping[RequestId, Sequence] = field(default_factory=dict)

    @property
    def batch_type(self) -> BatchType:
        return _batch_type(self.plan.first_prefill > 0, self.plan.num_prefills > 0)

    @property
    def requests(self) -> list[PrefillTask | DecodeTask]:
        return [*self.plan.decode_tasks, *self.plan.prefill_tasks]

    @property
    def stats(self) -> BatchStats:
        plan = self.plan
        prefill = sum(plan.counts[plan.first_prefill :])
        decode = plan.num_tokens - prefill
        return BatchStats(len(plan.rows), plan.num_tokens, prefill, decode, plan.num_samples)

    @property
    def tokens(self) -> Iterator[BatchToken]:
        plan = self.plan
        for entry, (start, count) in enumerate(zip(plan.starts, plan.counts, strict=True)):
            request_id, row, is_decode = plan.request_ids[entry], plan.rows[entry], entry < plan.first_prefill
            known = dict(enumerate(self._known(request_id)[start : start + count], start))
            if is_decode and entry >= plan.num_decodes:
                known |= enumerate(plan.drafts[entry - plan.num_decodes], start + 1)
            for position in range(start, start + count):
                samples = plan.samples[entry] and (is_decode or position == start + count - 1)
                yield BatchToken(request_id, row, position, is_decode, samples, known.get(position))

    def _known(self, request_id: RequestId) -> list[int]:
        sequence = self.sequences.get(request_id)
        return [] if sequence is None else sequence.tokens

    def micro_batches(self, max_tokens: int) -> list[MicroBatch]:
        tokens = tuple(self.tokens)
        return [MicroBatch(tokens[i : i + max_tokens]) for i in range(0, len(tokens), max_tokens)]

    @property
    def sequence_batch(self) -> SequenceBatch:
        plan = self.plan
        ranges = [range(start, start + count) for start, count in zip(plan.starts, plan.counts, strict=True)]
        return SequenceBatch(plan.request_ids, plan.rows, tuple(ranges))


def slots(scheduler: ContinuousBatchScheduler, now: float) -> tuple[Slot, ...]:
    """All rows, in order, each with its request, if any."""
    holders = (*scheduler.running, *scheduler.paused, *scheduler.resuming)
    by_row = {s.allocation.row: s for s in holders if s.allocation is not None}
    paused = {s.allocation.row for s in scheduler.paused if s.allocation is not None}
    return tuple(
        _slot(row, by_row.get(row), now, row in paused) for row in range(scheduler.kv_cache.num_rows)
    )


def _slot(row: int, sequence: Sequence | None, now: float, is_paused: bool) -> Slot:
    if sequence is None:
        return Slot(row, "idle", None, 0, 0, None)
    speed = None
    if sequence.first_token_at is not None and now > sequence.first_token_at:
        speed = sequence.decode_steps / (now - sequence.first_token_at)
    state = "paused" if is_paused else sequence.seq_state.value
    return Slot(row, state, sequence.request_id, sequence.computed, sequence.limit, speed)


def _batch_type(has_decodes: bool, has_prefills: bool) -> BatchType:
    if has_decodes and has_prefills:
        return BatchType.MIXED
    if has_decodes:
        return BatchType.DECODE
    return BatchType.PREFILL if has_prefills else BatchType.EMPTY
