"""Owns the lists of sequences: waiting, running, being swapped in, and ended but still in a step in flight."""

from __future__ import annotations

import math
from collections.abc import Iterable

from weft.config import SchedulerConfig
from weft.plan import BackendInfo, SwapTask
from weft.request import RequestId, RequestState
from weft.scheduling.cache.block_pool import BlockHash
from weft.scheduling.cache.manager import KvCacheManager
from weft.scheduling.cache.prefix import PrefixSharing
from weft.scheduling.cache.sessions import Sessions
from weft.scheduling.history import History
from weft.scheduling.policy import AdmissionPolicy
from weft.scheduling.preemption import is_swap_cheaper, prefers_swap
from weft.scheduling.queue import RequestQueue
from weft.scheduling.sequence import NEVER, Phase, Sequence


class SequenceTable:
    """Moves sequences between these lists, together with their memory. The planner and the scheduler share it."""

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
        """Interactive sequences that wait. `idle_queue` has those of idle work."""
        self.idle_queue = RequestQueue(config, policy)
        self.active_queue = self.queue
        """The queue that the current plan admits from."""
        self.sequences: dict[RequestId, Sequence] = {}
        """All sequences that have not ended."""
        self.num_idle = 0
        """How many of them are idle work."""
        self.interactive_at = -math.inf
        """When an interactive sequence arrived, or was planned beside idle ones, for the last time."""
        self.running: list[Sequence] = []
        """Running sequences in rotation order: least recently scheduled first."""
        self.paused: list[Sequence] = []
        """Running idle sequences that are not in `running`, because interactive ones have work. They hold a row and
        blocks."""
        self.resuming: dict[int, Sequence] = {}
        """Swap-ins in flight, by swap id. The sequence holds a row and blocks, and runs once the copy is finished."""
        self.history = History()
        self.applied_step = -1
        """The last step whose result was applied. Rows and blocks of later steps must not be reused."""
        self._draining: list[Sequence] = []
        """Sequences that ended, but are in a step in flight. Their memory is freed after that step."""
        self._held_rows: list[tuple[int, int]] = []
        """(step, row) of preempted sequences that are in a step in flight."""

    @property
    def blocks_will_be_freed(self) -> bool:
        """Whether blocks become free when the steps in flight end, without a preemption."""
        return (
            bool(self._draining)
            or self.kv_cache.has_moves_in_flight
            or any(s.is_finishing for s in self.running)
        )

    @property
    def rows_will_be_freed(self) -> bool:
        """Whether rows become free when the steps in flight end."""
        return bool(self._held_rows or self._draining) or any(s.is_finishing for s in self.running)

    def is_in_flight(self, sequence: Sequence) -> bool:
        return sequence.last_step > self.applied_step

    def queue_of(self, sequence: Sequence) -> RequestQueue:
        return self.idle_queue if sequence.is_idle_work else self.queue

    @property
    def has_interactive_work(self) -> bool:
        """Whether an interactive sequence has positions left to plan."""
        if len(self.sequences) == self.num_idle:
            return False
        return (
            bool(self.queue)
            or any(not s.is_idle_work for s in self.resuming.values())
            or any(not s.is_idle_work and not s.is_finishing for s in self.running)
        )

    def pause_idle(self) -> None:
        """Moves idle sequences from `running` to `paused`. Those whose last token is being sampled remain: they will
        free their memory."""
        self.active_queue = self.queue
        idle = [s for s in self.running if s.is_idle_work and not s.is_finishing]
        if idle:
            self.running = [s for s in self.running if not s.is_idle_work or s.is_finishing]
            self.paused += idle
        for sequence in self.paused:
            self.prefixes.withdraw(sequence)  # other sequences must not wait for blocks of a paused one

    def resume_idle(self, now: float) -> None:
        """Moves the paused sequences back to `running`, before the others. The sequence with the oldest last step comes
        first."""
        self.active_queue = self.idle_queue
        if self.paused:
            for sequence in self.paused:
                sequence.last_token_at = now  # so that the pause does not count as inter-token latency
            self.running = [*sorted(self.paused, key=lambda s: s.last_step), *self.running]
            self.paused = []

    def add_running(self, sequence: Sequence, step: int, phase: Phase, now: float) -> None:
        """Sets a sequence running from `step` on. It already holds a row and KV blocks."""
        sequence.state = RequestState.RUNNING
        sequence.admitted_step = step
        sequence.row_sent = False
        if sequence.preemptions:
            sequence.end_preemption(now)
        sequence.enter(phase, now)
        self.running.append(sequence)

    def rotate(self, step: int) -> None:
        """Moves the sequences that `step` left out to the front."""
        skipped = [s for s in self.running if s.last_step != step]
        if skipped and len(skipped) < len(self.running):
            self.running = skipped + [s for s in self.running if s.last_step == step]

    def preempt(self, sequence: Sequence, step: int, now: float) -> SwapTask | None:
        """Frees the memory of a running sequence and queues it again. Returns the swap-out, or None if the sequence
        will be recomputed."""
        allocation = sequence.allocation
        assert allocation is not None
        self._leave_running(sequence)
        self.prefixes.withdraw(sequence)
        self.kv_cache.truncate(allocation, -(-sequence.scheduled // self._info.block_size))
        swap = None
        if not sequence.is_idle_work and self.idle_queue.num_preempted:
            self._make_swap_room(sequence)
        if prefers_swap(sequence, self._config.preemption, self.kv_cache, self._info):
            # NOTE: the sequence may be in a step in flight. The copy runs after it.
            swap = self.kv_cache.swap_out(allocation, after_step=step - 1)
        if swap is not None:
            task, row = swap
            sequence.swap_id = task.swap_id
        else:
            task, freed_row = None, self.kv_cache.free(allocation)
            assert freed_row is not None
            row = freed_row
            self.reset_progress(sequence)
        if self.is_in_flight(sequence):
            self._held_rows.append((sequence.last_step, row))
        else:
            self.kv_cache.free_row(row)
        self.prefixes.extend_block_hashes(sequence)
        sequence.state = RequestState.PREEMPTED
        sequence.enter_preemption(task is not None, now)
        if now < self.history.until:
            by_swap = int(task is not None)
            self.history.events.append((now, step, "preempted", sequence.request_id, by_swap, 0))
        self.queue_of(sequence).push(sequence)
        return task

    def reset_progress(self, sequence: Sequence) -> None:
        """Resets a sequence whose K and V are lost: it computes all its tokens again."""
        sequence.allocation = sequence.swap_id = None
        sequence.computed = sequence.scheduled = 0
        sequence.admitted_step = NEVER

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that ended, from any list, and frees its memory."""
        if sequence.queue_item is not None:
            self.queue_of(sequence).remove(sequence)
        elif sequence.state is RequestState.RUNNING:
            self._leave_running(sequence)
        else:
            assert sequence.swap_id is not None
            del self.resuming[sequence.swap_id]
        self.prefixes.withdraw(sequence)
        del self.sequences[sequence.request_id]
        if sequence.is_idle_work:
            self.num_idle -= 1
            if not self.num_idle:
                self.active_queue = self.queue
        if sequence.allocation is not None:
            if sequence.allocation.row is not None and self.is_in_flight(sequence):
                self._draining.append(sequence)
            else:
                self._release(sequence)

    def settle(self, applied_step: int) -> None:
        """Frees the memory that was held for steps up to `applied_step`: these steps have ended."""
        self.applied_step = applied_step
        self.kv_cache.settle_moves(applied_step)
        if self._draining:
            ended = [s for s in self._draining if s.last_step <= applied_step]
            self._draining = [s for s in self._draining if s.last_step > applied_step]
            for sequence in ended:
                self._release(sequence)
        if self._held_rows:
            held, self._held_rows = self._held_rows, []
            for step, row in held:
                if step <= applied_step:
                    self.kv_cache.free_row(row)
                else:
                    self._held_rows.append((step, row))

    def finish_swap(self, swap_id: int, failed: bool, step: int, now: float) -> bool:
        """Ends a swap. A sequence that was swapped in runs from `step` on. After a failed swap its sequence is
        recomputed. Returns False if the swap had ended before."""
        if not self.kv_cache.finish_swap(swap_id):
            return False
        sequence = self.resuming.pop(swap_id, None)
        if sequence is not None:
            sequence.swap_id = None
            if failed:
                # NOTE: an earlier swap may still read these blocks. If they are allocated again, the new owner depends
                # on that swap.
                assert sequence.allocation is not None
                self.kv_cache.truncate(sequence.allocation, 0)
                sequence.computed = sequence.scheduled = 0
            is_prompt = sequence.target - sequence.scheduled > 1
            self.add_running(sequence, step, Phase.PREFILL if is_prompt else Phase.DECODE, now)
            if now < self.history.until:
                self.history.events.append((now, step, "swapped_in", sequence.request_id, int(failed), 0))
            if not failed:
                self.prefixes.register(sequence, 0, sequence.computed)
        elif failed:
            self._drop_swapped(swap_id)
        return True

    def _drop_swapped(self, swap_id: int) -> None:
        """Discards a failed swap-out: its sequence, if it still waits, will be recomputed."""
        for sequence in (*self.queue, *self.idle_queue):
            if sequence.swap_id == swap_id and sequence.allocation is not None:
                self.kv_cache.free(sequence.allocation)
                self.reset_progress(sequence)
                return

    def roll_back(
        self, in_steps: Iterable[Sequence], registered: Iterable[tuple[int, BlockHash]], last_step: int
    ) -> None:
        """Discards the steps in flight, up to `last_step`, and returns to the committed state.

        `in_steps` are the sequences of these steps, `registered` the blocks that they were to fill. All rows are sent
        again: the state of the backend is unknown.
        """
        touched = {s.request_id: s for s in in_steps}
        # Includes sequences outside the failed steps: they may share blocks that a failed step was to fill.
        touched.update((rid, self.sequences[rid]) for rid in self.kv_cache.holders if rid in self.sequences)
        for block, block_hash in registered:
            self.kv_cache.pool_of(block).unregister(block, block_hash)
        self.kv_cache.undo_moves()
        self.settle(last_step)
        for sequence in touched.values():
            if sequence.finish_reason is not None:
                continue
            sequence.scheduled = sequence.computed
            sequence.target = len(sequence.tokens)
            sequence.row_sent = False
            self.prefixes.withdraw(sequence)
            if sequence.allocation is not None:
                num_blocks = -(-sequence.computed // self._info.block_size)
                self.kv_cache.truncate(sequence.allocation, num_blocks)
                if sequence.allocation.row is None and not sequence.allocation.is_swapped:
                    self.reset_progress(sequence)

    def _leave_running(self, sequence: Sequence) -> None:
        (self.paused if sequence in self.paused else self.running).remove(sequence)

    def _make_swap_room(self, victim: Sequence) -> None:
        """Discards swapped copies of idle sequences, newest first, until the victim can be swapped out."""
        assert victim.allocation is not None
        if not is_swap_cheaper(victim, self._config.preemption, self._info):
            return
        for idle in sorted(self.idle_queue, key=lambda s: -s.order):
            if self.kv_cache.can_swap_out(victim.allocation):
                break
            if idle.allocation is not None:
                self.kv_cache.free(idle.allocation)
                self.reset_progress(idle)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.allocation is not None
        row = self.kv_cache.free(sequence.allocation)
        sequence.allocation = None
        if row is not None:
            self.kv_cache.free_row(row)

    def check_integrity(self) -> None:
        """Raises AssertionError if blocks, rows, swap slots or sequences are inconsistent."""
        self.kv_cache.check_integrity([row for _, row in self._held_rows])
        self.queue.check_integrity()
        self.idle_queue.check_integrity()
        self.prefixes.check_integrity([*self.running, *self.paused])
        self.sessions.check_integrity()
        assert not any(s.is_idle_work for s in self.queue), "idle work is in the interactive queue"
        assert all(s.is_idle_work for s in (*self.idle_queue, *self.paused)), (
            "an interactive request is paused"
        )
        assert self.num_idle == sum(s.is_idle_work for s in self.sequences.values()), (
            "idle work is counted wrongly"
        )
        held = [*self.running, *self.paused]
        waiting = {s.request_id for s in (*self.queue, *self.idle_queue)}
        running = {s.request_id for s in held}
        resuming = {s.request_id for s in self.resuming.values()}
        assert len(running) == len(held), "a sequence is twice in `running` or `paused`"
        assert len(waiting) + len(running) + len(resuming) == len(self.sequences), (
            "a request is in two places"
        )
        assert waiting | running | resuming == self.sequences.keys(), "a request was lost"
        for sequence in held:
            assert sequence.allocation is not None
            room = len(sequence.allocation.blocks) * self._info.block_size
            assert sequence.computed <= sequence.scheduled <= room, (
                "more tokens are scheduled than the blocks can hold"
            )
