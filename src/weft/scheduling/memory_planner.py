"""Finds memory for the sequences of a plan: allocates blocks, and preempts sequences that rank below."""

from __future__ import annotations

from weft.clock import Clock
from weft.config import SchedulerConfig
from weft.plan import BackendInfo
from weft.scheduling.cache.block_pool import BlockCounts
from weft.scheduling.plan_builder import PlanBuilder
from weft.scheduling.preemption import PreemptionCause, choose_victims, is_below, work_lost
from weft.scheduling.sequence import Sequence
from weft.scheduling.sequence_table import SequenceTable


class MemoryPlanner:
    """Has no state. Preempts sequences in the SequenceTable."""

    def __init__(
        self,
        config: SchedulerConfig,
        info: BackendInfo,
        sequence_table: SequenceTable,
        clock: Clock,
        *,
        preempts: bool,
        has_spare_blocks: bool,
    ) -> None:
        """`preempts`: waiting sequences may preempt running ones. `has_spare_blocks`: sequences may hold blocks of
        rejected draft tokens."""
        self._config = config
        self._info = info
        self._sequences = sequence_table
        self._clock = clock
        self._preempts = preempts
        self._has_spare_blocks = has_spare_blocks

    # ------------------------------------------------------------------ blocks of running sequences

    def needed(self, sequence: Sequence, count: int) -> BlockCounts:
        """Blocks that a running sequence lacks to compute `count` more positions."""
        allocation, end = sequence.allocation, sequence.scheduled + count
        assert allocation is not None
        return self._sequences.kv_cache.needed(len(allocation.blocks), allocation.stored, end)

    def grow(self, builder: PlanBuilder, sequence: Sequence, needed: BlockCounts) -> bool:
        """Allocates blocks for a running sequence. Preempts sequences that rank below it if memory is short."""
        kv_cache, allocation = self._sequences.kv_cache, sequence.allocation
        assert allocation is not None
        first = len(allocation.blocks)
        if not kv_cache.extend(allocation, needed, sequence.block_hashes):
            if self.may_skip_step(builder, sequence):
                return False
            self._release_spare_blocks()
            below = [s for s in self._victims(builder) if is_below(s, sequence)]
            victims = choose_victims(below, sequence, needed - kv_cache.available, kv_cache, self._info)
            if victims is None:
                return False
            for victim in victims:
                self.preempt(builder, victim, PreemptionCause.MEMORY)
            if not kv_cache.extend(allocation, needed, sequence.block_hashes):
                return False
        builder.note_tables(sequence, first)
        if needed.store:
            builder.moving.append(sequence)
        return True

    def may_skip_step(self, builder: PlanBuilder, sequence: Sequence) -> bool:
        """Whether this step or those in flight will free blocks, and the sequence may still wait for them."""
        blocks_are_coming = bool(builder.moving) or self._sequences.blocks_will_be_freed
        return blocks_are_coming and self.is_on_time(builder.step, sequence)

    def victim_is_in_plan(self, builder: PlanBuilder, sequence: Sequence) -> bool:
        """Whether the sequence may wait, because a later step can preempt for it a prompt of this plan that ranks below it.

        NOTE: without this wait, two sequences that need each other's blocks could preempt themselves in turn forever.
        """
        outranks = any(is_below(prompt, sequence) for prompt, *_ in builder.prefills)
        return outranks and self.is_on_time(builder.step, sequence)

    def is_on_time(self, step: int, sequence: Sequence) -> bool:
        """Whether the sequence ran or was admitted at most one rotation ago. A rotation is as many steps as all running
        sequences need to run once."""
        rotation = -(-len(self._sequences.running) // self._config.sequences_per_step)
        is_prompt_in_tiers = self._info.store_blocks and not sequence.is_decode
        if is_prompt_in_tiers and all(s.priority >= sequence.priority for s in self._sequences.running):
            # Prompts share the full blocks that the tails leave free. These may be few, so a prompt may have to wait for
            # every other running sequence: allow one step for each. A prompt with a higher priority than a running
            # sequence need not wait for it: it can preempt that sequence.
            rotation = max(rotation, len(self._sequences.running))
        return step - max(sequence.last_step, sequence.admitted_step - 1) <= rotation

    # ------------------------------------------------------------------ room for waiting sequences

    def make_room(
        self, builder: PlanBuilder, sequence: Sequence, needed: BlockCounts, needed_soon: BlockCounts
    ) -> bool:
        """Whether a row and the `needed` blocks are free for a waiting sequence. May preempt others for it.

        While other sequences run, it starts without a preemption only if `needed_soon` blocks are left after the prompts
        in progress have taken theirs. Otherwise it could be preempted right after its start, which only costs time.
        """
        kv_cache = self._sequences.kv_cache
        available, has_row = kv_cache.available, kv_cache.free_rows > 0
        if builder.reserved is not None:
            # Idle work beside interactive sequences leaves a row and blocks for them.
            available, has_row = available - builder.reserved, kv_cache.free_rows > 1
        is_alone = not (self._sequences.running or self._sequences.resuming)
        if has_row and (is_alone or (available - self.still_needed()).covers(needed_soon)):
            return available.covers(needed)
        if not self._preempts:
            return False
        below = [s for s in self._victims(builder) if s.priority < sequence.priority]
        if not below or (not has_row and self._sequences.rows_will_be_freed):
            return False
        self._release_spare_blocks()
        victims = choose_victims(below, sequence, needed - kv_cache.available, kv_cache, self._info)
        if victims is None:
            return False
        if not has_row and not victims:
            victims = [min(below, key=lambda s: (s.priority, work_lost(s, self._info), -s.order))]
        for victim in victims:
            self.preempt(builder, victim, PreemptionCause.PRIORITY)
        if kv_cache.free_rows:
            return True
        # The victim's row is still in a step in flight, so this sequence must wait. It is promoted: otherwise the
        # victim could be admitted before it.
        self._sequences.active_queue.promote(sequence)
        return False

    def still_needed(self) -> BlockCounts:
        """Blocks that prompts in progress, and sequences whose swap-in is in flight, will still allocate."""
        kv_cache, total = self._sequences.kv_cache, BlockCounts(0)
        for sequence in (*self._sequences.running, *self._sequences.resuming.values()):
            allocation = sequence.allocation
            if sequence.target - sequence.scheduled > 1 and allocation is not None:
                end = sequence.target + 1
                total += kv_cache.needed_over_steps(len(allocation.blocks), allocation.stored, end)
        return total

    # ------------------------------------------------------------------ preemption

    def preempt(self, builder: PlanBuilder, sequence: Sequence, cause: PreemptionCause) -> None:
        builder.drop(sequence)
        self._release_adopted(builder, sequence)
        task = self._sequences.preempt(sequence, builder.step, self._clock())
        if task is not None:
            builder.swap_out.append(task)
        builder.preempted.append(sequence.request_id)
        builder.preemption_causes.append(cause)

    def _release_adopted(self, builder: PlanBuilder, sequence: Sequence) -> None:
        """A preempted sequence may have adopted blocks that another sequence fills in the step of this plan. Releases
        these and all blocks after them: a swap-out would copy them before that step."""
        allocation = sequence.allocation
        assert allocation is not None
        filled = {block for block, _ in builder.registered}
        for index, block in enumerate(allocation.blocks if filled else ()):
            if block in filled:
                self._sequences.kv_cache.truncate(allocation, index)
                sequence.scheduled = index * self._info.block_size
                return

    def _release_spare_blocks(self) -> None:
        """Frees blocks of rejected draft tokens. A sequence keeps the block of its next position."""
        if not self._has_spare_blocks:
            return
        for sequence in self._sequences.running:
            allocation, num_kept = sequence.allocation, sequence.scheduled // self._info.block_size + 1
            if allocation is not None and len(allocation.blocks) > num_kept:
                self._sequences.kv_cache.truncate(allocation, num_kept)

    def _victims(self, builder: PlanBuilder) -> list[Sequence]:
        """Sequences that may be preempted. Not among them: prefills of this plan, and sequences that just started or
        are finishing."""
        running = self._sequences.running
        return [s for s in running if s.admitted_step <= s.last_step < builder.step and not s.is_finishing]
