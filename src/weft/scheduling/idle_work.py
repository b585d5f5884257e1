"""Decides what idle work may use beside interactive requests (contract 15): no memory that they need, and only the time
that they leave."""

from __future__ import annotations

from collections.abc import Iterator

from weft.config import PriorityPolicy, SchedulerConfig
from weft.plan import BackendInfo
from weft.scheduling.budget import NO_LIMIT
from weft.scheduling.cache.block_pool import BlockCounts
from weft.scheduling.plan_builder import PlanBuilder
from weft.scheduling.policy import StepCostModel
from weft.scheduling.prompt_order import StepSize
from weft.scheduling.sequence import Sequence
from weft.scheduling.sequence_table import SequenceTable

_RECENT_SECONDS = 60.0
"""For this long after an interactive request, another one is expected."""
_SHORT_DECODES = 3.0
"""The time limit of a short step, as a multiple of the time of one decode. The prompt of an interactive request takes as
long as dozens of decodes, so waiting for a short step delays its first token little."""
_SHORTEST_SECONDS = 0.005
"""The time limit of a short step is at least this long."""


class IdlePlanner:
    """Reads the SequenceTable and changes nothing in it. The planner calls it only while idle requests exist."""

    def __init__(
        self,
        config: SchedulerConfig,
        info: BackendInfo,
        sequence_table: SequenceTable,
        size: StepSize,
        cost_model: StepCostModel,
    ) -> None:
        self._config = config
        self._info = info
        self._sequences = sequence_table
        self._size = size
        self._cost_model = cost_model
        self._shares_steps = (
            info.extra_rows_are_cheap
            and config.policy is PriorityPolicy.ADAPTIVE
            and config.chunked_prefill
            and config.dynamic_batching
            and not config.prefer_pure_decode
        )
        """Whether idle work may be in one step with interactive work. Only ADAPTIVE has a time target for steps."""
        self._has_short_steps = (
            not info.extra_rows_are_cheap
            and config.policy is PriorityPolicy.ADAPTIVE
            and config.chunked_prefill
            and config.dynamic_batching
            and not config.prefer_pure_decode
        )
        """Whether a step of idle work alone may have a time limit (`shorten`)."""

    # ------------------------------------------------------------------ memory

    def victims(self) -> Iterator[Sequence]:
        """The paused sequences to preempt, so that interactive ones have all memory that they can use in this step. The
        lowest priority is first, then the newest. The caller preempts each one before it asks for the next."""
        table, kv_cache = self._sequences, self._sequences.kv_cache
        if not table.paused:
            return
        rows = min(len(table.queue), kv_cache.num_rows - len(table.running))
        blocks = self._blocks_needed()
        for sequence in sorted(table.paused, key=lambda s: (s.priority, -s.order)):
            # The row of a sequence in flight becomes free only when its step ends. If the rows that are free by then
            # are enough, preempting it gains nothing.
            has_rows = kv_cache.free_rows >= rows or (
                table.is_in_flight(sequence) and kv_cache.free_rows + kv_cache.draining_rows >= rows
            )
            if not has_rows or not kv_cache.available.covers(blocks):
                yield sequence

    def _blocks_needed(self) -> BlockCounts:
        """The most blocks that interactive sequences can take in one step."""
        table, total = self._sequences, BlockCounts(0)
        num_drafts = self._config.max_draft_tokens if self._info.fixed_cost_rows else 0
        for sequence in (*table.running, *table.resuming.values(), *table.queue):
            if sequence.is_idle_work or sequence.is_finishing:
                continue
            allocation = sequence.allocation
            held, stored = (0, 0) if allocation is None else (len(allocation.blocks), allocation.stored)
            if allocation is not None and allocation.is_swapped:
                total += allocation.size  # a swap-in allocates all blocks again
                held, stored = allocation.size.full + allocation.size.store, allocation.stored
            total += table.kv_cache.needed(held, stored, sequence.target + 1 + num_drafts)
        return total

    # ------------------------------------------------------------------ time

    def shorten(self, builder: PlanBuilder, now: float) -> None:
        """Limits the time of a step with idle work alone, if an interactive request may arrive while the step runs. The
        request then waits for the end of the step."""
        is_recent = now - self._sequences.interactive_at < _RECENT_SECONDS
        if is_recent and self._has_short_steps and self._cost_model.is_ready:
            builder.budget.seconds = max(
                _SHORTEST_SECONDS, _SHORT_DECODES * self._cost_model.decode_seconds(1, 0)
            )

    def may_admit(self, builder: PlanBuilder) -> bool:
        """Whether one more sequence fits into the time of a short step. All sequences that run decode in each step."""
        running = self._sequences.running
        if builder.budget.seconds == NO_LIMIT or not running:
            return True
        context = sum(sequence.scheduled for sequence in running)
        return self._cost_model.decode_seconds(len(running) + 1, context) <= builder.budget.seconds

    def fill(self, builder: PlanBuilder) -> tuple[list[Sequence], bool]:
        """The paused sequences that fit into a step beside its interactive decodes, and whether idle requests may be
        admitted to it. A step with interactive prompts gets none: it would delay their first tokens."""
        if not self._shares_steps or not self._is_decode_step(builder):
            return [], False
        reserved = builder.reserved = self._blocks_needed()
        room = self._sequences.kv_cache.available - reserved
        num_drafts = sum(map(len, builder.draft_tokens.values()))
        builder.budget.tokens -= num_drafts
        seconds = self._size.spare_seconds(builder.decodes)
        seconds -= sum(
            self._cost_model.chunk_seconds(sequence.target, len(drafts))
            for sequence, drafts in builder.draft_tokens.items()
        )
        chosen: list[Sequence] = []
        for sequence in sorted(self._sequences.paused, key=lambda s: s.last_step):
            if len(chosen) == builder.budget.tokens:
                break
            if sequence.target - sequence.scheduled > 1:
                if not num_drafts and room.full > 0:
                    chosen.append(sequence)  # its chunk gets the tokens that the decodes leave
                continue
            allocation = sequence.allocation
            assert allocation is not None
            needed = self._sequences.kv_cache.needed(
                len(allocation.blocks), allocation.stored, sequence.target
            )
            seconds -= self._cost_model.chunk_seconds(sequence.scheduled, 1)
            if seconds < 0:
                break
            if room.covers(needed):
                room -= needed
                chosen.append(sequence)
        return chosen, seconds > 0 and not num_drafts and self._sequences.kv_cache.free_rows > 1

    def _is_decode_step(self, builder: PlanBuilder) -> bool:
        """Whether the step has decodes and room, no interactive sequence waits or has a prompt to compute, and the time
        of the step can be predicted."""
        table = self._sequences
        return (
            bool(builder.decodes)
            and builder.budget.sequences > 0
            and not builder.prefills
            and not table.queue
            and not builder.swap_in
            and not builder.swap_out
            and self._cost_model.is_ready
            and all(s.target - s.scheduled == 1 for s in table.running)
            and all(s.is_idle_work for s in table.resuming.values())
        )
