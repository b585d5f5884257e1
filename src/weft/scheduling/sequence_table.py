"""Owns where every sequence is: waiting, running, coming back from swap space, or over but still in a step."""

from __future__ import annotations

from collections.abc import Iterable

from weft.config import SchedulerConfig
from weft.plan import BackendInfo, SwapTask
from weft.request import RequestId, RequestState
from weft.scheduling.cache.block_pool import BlockKey
from weft.scheduling.cache.manager import KvCacheManager
from weft.scheduling.cache.prefix import PrefixSharing
from weft.scheduling.cache.sessions import Sessions
from weft.scheduling.policy import AdmissionPolicy
from weft.scheduling.preemption import prefers_swap
from weft.scheduling.queue import RequestQueue
from weft.scheduling.sequence import NEVER, Phase, Sequence


class SequenceTable:
    """Moves sequences between those places, with the memory they hold. The planner and the scheduler share it."""

    def __init__(self, config: SchedulerConfig, info: BackendInfo, policy: AdmissionPolicy) -> None:
        self._config = config
        self._info = info
        self.kv_cache = KvCacheManager(
            info.num_blocks,
            config.max_running,
            info.swap_blocks,
            info.bytes_per_block,
            info.eager_blocks,
            block_size=info.block_size,
            tail_blocks=info.tail_blocks,
            store_blocks=info.store_blocks,
            store_swap_blocks=info.store_swap_blocks,
            bytes_per_store_block=info.bytes_per_store_block,
        )
        self.prefixes = PrefixSharing(self.kv_cache, info.block_size, info.tail_blocks, config.prefix_caching)
        self.sessions = Sessions(
            self.kv_cache.pool,
            config.session_lifetime,
            self.kv_cache.store if info.store_blocks else None,
            info.tail_blocks,
        )
        self.queue = RequestQueue(config, policy)
        self.sequences: dict[RequestId, Sequence] = {}
        """All that are not over."""
        self.running: list[Sequence] = []
        """Least recently scheduled first: that is the rotation."""
        self.resuming: dict[int, Sequence] = {}
        """Swap-ins under way: the sequence holds row and blocks and runs once its copy is there."""
        self.applied_step = -1
        """The last step that is over. What a later one uses must not be given to anyone else."""
        self._draining: list[Sequence] = []
        """Over, but in a step in flight: their memory is held until that step is over."""
        self._held_rows: list[tuple[int, int]] = []
        """(step, row) of victims that are in a step in flight."""

    @property
    def blocks_are_coming(self) -> bool:
        """Whether blocks come free by themselves once the steps in flight are over."""
        return (
            bool(self._draining)
            or self.kv_cache.blocks_are_leaving
            or any(s.is_finishing for s in self.running)
        )

    @property
    def rows_are_coming(self) -> bool:
        """The same for rows: a sequence that has ended, or ends, gives its own back."""
        return bool(self._held_rows or self._draining) or any(s.is_finishing for s in self.running)

    def is_in_flight(self, sequence: Sequence) -> bool:
        return sequence.last_step > self.applied_step

    def join(self, sequence: Sequence, step: int, phase: Phase, now: float) -> None:
        """Into the running ones: it has a row and blocks, and takes part from `step` on."""
        sequence.state = RequestState.RUNNING
        sequence.admitted_step = step
        sequence.row_known = False
        sequence.enter(phase, now)
        self.running.append(sequence)

    def rotate(self, step: int) -> None:
        """Those that were left out of `step` are the first in turn now."""
        skipped = [s for s in self.running if s.last_step != step]
        if skipped and len(skipped) < len(self.running):
            self.running = skipped + [s for s in self.running if s.last_step == step]

    def suspend(self, sequence: Sequence, step: int, now: float) -> SwapTask | None:
        """Takes a running sequence's memory away and lets it wait again. Returns the copy to make, where it is
        swapped out; otherwise what it had computed is gone."""
        allocation = sequence.allocation
        assert allocation is not None
        self.running.remove(sequence)
        self.prefixes.withdraw(sequence)
        self.kv_cache.truncate(allocation, -(-sequence.scheduled // self._info.block_size))
        swap = None
        if prefers_swap(sequence, self._config.preemption, self.kv_cache, self._info):
            # NOTE: the sequence may be in the step in flight; the copy is made after it.
            swap = self.kv_cache.swap_out(allocation, after_step=step - 1)
        if swap is not None:
            task, row = swap
            sequence.swap_id = task.swap_id
        else:
            task, freed_row = None, self.kv_cache.free(allocation)
            assert freed_row is not None
            row = freed_row
            self.forget_computed(sequence)
        if self.is_in_flight(sequence):
            self._held_rows.append((sequence.last_step, row))
        else:
            self.kv_cache.free_row(row)
        self.prefixes.extend_keys(sequence)
        sequence.state = RequestState.PREEMPTED
        sequence.preemptions += 1
        sequence.enter(Phase.WAITING, now)
        self.queue.push(sequence)
        return task

    def forget_computed(self, sequence: Sequence) -> None:
        """Nothing of it is in memory any more: it starts from its tokens."""
        sequence.allocation = sequence.swap_id = None
        sequence.computed = sequence.scheduled = 0
        sequence.admitted_step = NEVER

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence that is over out of wherever it is, with everything it holds given back."""
        if sequence.queue_entry is not None:
            self.queue.remove(sequence)
        elif sequence.state is RequestState.RUNNING:
            self.running.remove(sequence)
        else:
            assert sequence.swap_id is not None
            del self.resuming[sequence.swap_id]
        self.prefixes.withdraw(sequence)
        del self.sequences[sequence.request_id]
        if sequence.allocation is not None:
            if sequence.allocation.row is not None and self.is_in_flight(sequence):
                self._draining.append(sequence)
            else:
                self._release(sequence)

    def settle(self, applied_step: int) -> None:
        """All steps up to this one are over: what was held for them is free."""
        self.applied_step = applied_step
        self.kv_cache.settle_moves(applied_step)
        if self._draining:
            over = [s for s in self._draining if s.last_step <= applied_step]
            self._draining = [s for s in self._draining if s.last_step > applied_step]
            for sequence in over:
                self._release(sequence)
        if self._held_rows:
            held, self._held_rows = self._held_rows, []
            for step, row in held:
                if step <= applied_step:
                    self.kv_cache.free_row(row)
                else:
                    self._held_rows.append((step, row))

    def finish_swap(self, swap_id: int, failed: bool, step: int, now: float) -> bool:
        """Books a copy that is over; whom it brought back runs from `step` on. One that failed costs a recompute, nothing
        else. False: it was given up before it was reported."""
        if not self.kv_cache.finish_swap(swap_id):
            return False
        sequence = self.resuming.pop(swap_id, None)
        if sequence is not None:
            sequence.swap_id = None
            if failed:
                # NOTE: an earlier copy may still read these blocks; taken anew they state it.
                assert sequence.allocation is not None
                self.kv_cache.truncate(sequence.allocation, 0)
                sequence.computed = sequence.scheduled = 0
            is_prompt = sequence.target - sequence.scheduled > 1
            self.join(sequence, step, Phase.PREFILL if is_prompt else Phase.DECODE, now)
            if not failed:
                self.prefixes.register(sequence, 0, sequence.computed)
        elif failed:
            self._drop_swapped(swap_id)
        return True

    def _drop_swapped(self, swap_id: int) -> None:
        """The copy out failed: its sequence, if it still waits for it, is computed again."""
        for sequence in self.queue:
            if sequence.swap_id == swap_id and sequence.allocation is not None:
                self.kv_cache.free(sequence.allocation)
                self.forget_computed(sequence)
                return

    def roll_back(
        self, in_steps: Iterable[Sequence], registered: Iterable[tuple[int, BlockKey]], last_step: int
    ) -> None:
        """The steps in flight, up to `last_step`, will not be: back to what was committed. They had these sequences in
        them and made these blocks findable. Rows are sent anew, since nobody knows what the backend still has."""
        touched = {s.request_id: s for s in in_steps}
        # Also those outside the steps: they may have adopted blocks that a failed step was going to fill.
        touched.update((rid, self.sequences[rid]) for rid in self.kv_cache.holders if rid in self.sequences)
        for block, key in registered:
            self.kv_cache.pool_of(block).forget(block, key)
        self.kv_cache.undo_moves()
        self.settle(last_step)
        for sequence in touched.values():
            if sequence.finish_reason is not None:
                continue
            sequence.scheduled = sequence.computed
            sequence.target = len(sequence.tokens)
            sequence.row_known = False
            self.prefixes.withdraw(sequence)
            if sequence.allocation is not None:
                num_blocks = -(-sequence.computed // self._info.block_size)
                self.kv_cache.truncate(sequence.allocation, num_blocks)
                if sequence.allocation.row is None and not sequence.allocation.is_swapped:
                    self.forget_computed(sequence)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.allocation is not None
        row = self.kv_cache.free(sequence.allocation)
        sequence.allocation = None
        if row is not None:
            self.kv_cache.free_row(row)

    def check_integrity(self) -> None:
        """Raises AssertionError where blocks, rows, swap space or requests do not add up."""
        self.kv_cache.check_integrity([row for _, row in self._held_rows])
        self.queue.check_integrity()
        self.prefixes.check_integrity(self.running)
        self.sessions.check_integrity()
        waiting = {s.request_id for s in self.queue}
        running = {s.request_id for s in self.running}
        resuming = {s.request_id for s in self.resuming.values()}
        assert len(running) == len(self.running), "a sequence runs twice"
        assert len(waiting) + len(running) + len(resuming) == len(self.sequences), (
            "a request is in two places"
        )
        assert waiting | running | resuming == self.sequences.keys(), "a request was lost"
        for sequence in self.running:
            assert sequence.allocation is not None
            held = len(sequence.allocation.blocks) * self._info.block_size
            assert sequence.computed <= sequence.scheduled <= held, (
                "more is scheduled than there are blocks for"
            )
