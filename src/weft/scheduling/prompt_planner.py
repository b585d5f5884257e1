"""Plans the prompts of a step: those in progress, and those that are admitted from the queue."""

from __future__ import annotations

from operator import itemgetter

from weft.clock import Clock
from weft.config import SchedulerConfig
from weft.plan import BackendInfo
from weft.request import Priority, RequestState
from weft.scheduling.cache.block_pool import BlockCounts
from weft.scheduling.memory_planner import MemoryPlanner
from weft.scheduling.plan_builder import PlanBuilder
from weft.scheduling.policy import AdmissionPolicy, SortKey
from weft.scheduling.preemption import PreemptionCause
from weft.scheduling.prompt_order import PromptOrder, StepSize
from weft.scheduling.sequence import Phase, Sequence
from weft.scheduling.sequence_table import SequenceTable

MAX_SKIPPED = 16
"""The maximum number of waiting sequences that one plan skips because they cannot start yet. It keeps planning time
independent of the queue."""

_BELOW_ALL = -len(Priority) - 1

_Prompts = list[tuple[SortKey, Sequence]]


class PromptPlanner:
    """Adds chunks of prompts to a plan, and admits sequences from the queue. With `dynamic_batching=False` it remembers
    whether the current batch still admits sequences."""

    def __init__(
        self,
        config: SchedulerConfig,
        info: BackendInfo,
        sequence_table: SequenceTable,
        policy: AdmissionPolicy,
        size: StepSize,
        memory: MemoryPlanner,
        clock: Clock,
    ) -> None:
        self._config = config
        self._info = info
        self._sequences = sequence_table
        self._policy = policy
        self._size = size
        self._order = PromptOrder(policy, size)
        self._memory = memory
        self._clock = clock
        self._batch_is_open = True

    def plan(self, builder: PlanBuilder, prefills: list[Sequence], may_admit: bool) -> None:
        """Adds prompts, in progress and waiting, in the order of `PromptOrder`, until a budget or memory is used up."""
        self._size.begin_prompts(builder)
        queue = self._sequences.active_queue
        in_progress = [(self._prefill_sort_key(sequence), sequence) for sequence in prefills]
        in_progress.sort(key=itemgetter(0), reverse=True)
        skipped: list[object] = []
        skipped_priority = _BELOW_ALL
        while builder.budget.for_prefill:
            may_admit = may_admit and len(skipped) < MAX_SKIPPED
            first = self._first_to_admit(skipped_priority) if may_admit else None
            # 0 tokens: the next prompt in progress is planned before `first`.
            max_tokens = self._max_tokens_before(in_progress, first) if first is not None else 0
            if in_progress and not max_tokens:
                sort_key, sequence = in_progress.pop()
                producer = self.continue_prefill(builder, sequence)
                if producer is not None:
                    _inherit_rank(sort_key, producer, in_progress)
            elif first is None:
                break
            elif self._sequences.is_in_flight(first) or first.request_id in builder.preempted:
                # This plan preempted it, or it is still in a step in flight. Only a sequence of higher priority may
                # overtake it.
                skipped_priority = max(skipped_priority, first.priority)
                skipped.append(queue.set_aside())
            elif first.allocation is not None:
                may_admit = self._resume(builder, first)
            else:
                started = self._start(builder, first, max_tokens)
                may_admit = started is not False
                if isinstance(started, Sequence):
                    skipped.append(queue.set_aside())
                    _inherit_rank(self._prefill_sort_key(first), started, in_progress)
        for item in skipped:
            queue.put_back(item)

    # ------------------------------------------------------------------ prompts in progress

    def continue_prefill(self, builder: PlanBuilder, sequence: Sequence) -> Sequence | None:
        """Adds the next chunk of a prompt. If it waits for a block of another sequence, returns that sequence."""
        if sequence.state is not RequestState.RUNNING:
            return None  # preempted while this plan was made
        self._adopt_hits(builder, sequence)
        allocation, block_size, start = sequence.allocation, self._info.block_size, sequence.scheduled
        assert allocation is not None
        held = len(allocation.blocks) * block_size - start
        # NOTE: a sequence that has not run since its admission must not wait here. Until it has run it cannot be
        # preempted, so its blocks stay taken. If the other sequence needs them, both would wait forever.
        has_run = sequence.last_step >= sequence.admitted_step
        if held == 0 and has_run:
            producer = self._sequences.prefixes.producer(sequence, len(allocation.blocks))
            if producer is not None:
                return producer
        count = self._size.chunk(builder, start, sequence.target - start)
        if not count:
            return None
        # A smaller chunk is better than a preemption. So the planner preempts only if there is no block for even one
        # position.
        kv_cache = self._sequences.kv_cache
        available = kv_cache.available if builder.reserved is None else kv_cache.available - builder.reserved
        room = kv_cache.affordable(len(allocation.blocks), allocation.stored, start, available)
        if not room and builder.reserved is not None:
            return None
        count = min(count, room or block_size - start % block_size)
        if self._memory.grow(builder, sequence, self._memory.needed(sequence, count)):
            self._add_prefill(builder, sequence, count)
        elif not has_run and not self._memory.may_skip_step(builder, sequence):
            self._memory.preempt(builder, sequence, PreemptionCause.MEMORY)
        return None

    def _adopt_hits(self, builder: PlanBuilder, sequence: Sequence) -> None:
        """Adopts (shares) blocks that another sequence has filled since the last chunk, or fills in this step."""
        allocation, block_size = sequence.allocation, self._info.block_size
        assert allocation is not None
        first = len(allocation.blocks)
        while sequence.scheduled == len(allocation.blocks) * block_size:
            block = self._sequences.prefixes.next_hit(sequence, len(allocation.blocks))
            if block is None:
                break
            self._sequences.kv_cache.adopt(allocation, block)
            sequence.scheduled += block_size
        builder.note_tables(sequence, first)

    def _add_prefill(self, builder: PlanBuilder, sequence: Sequence, count: int) -> None:
        start = sequence.scheduled
        sequence.scheduled = end = start + count
        samples = end == sequence.target
        if samples:
            sequence.target += 1
        sequence.last_step = builder.step
        self._size.take_chunk(builder, start, count)
        builder.prefills.append((sequence, start, count, samples))
        builder.registered += self._sequences.prefixes.register(sequence, start, end)
        if not sequence.is_idle_work and sequence.allocation is not None:
            for pool in (self._sequences.kv_cache.pool, self._sequences.kv_cache.store):
                pool.note_interactive(sequence.allocation.blocks)

    # ------------------------------------------------------------------ admission

    def admission_is_open(self) -> bool:
        """Whether sequences may be admitted. Without dynamic batching, a batch closes when its first sequence
        generates, and the next one opens when all have ended. A preempted sequence may return to a closed batch."""
        if self._config.dynamic_batching:
            return True
        if not self._sequences.running and not self._sequences.resuming:
            self._batch_is_open = True
        elif any(s.target > s.prompt_length for s in self._sequences.running):
            self._batch_is_open = False
        first = self._sequences.active_queue.peek()
        return self._batch_is_open or (first is not None and first.state is RequestState.PREEMPTED)

    def first_may_preempt(self) -> bool:
        """Whether the first waiting sequence may preempt a running one."""
        first = self._sequences.active_queue.peek()
        if first is None or not self._policy.preempts:
            return False
        return any(s.priority < first.priority for s in self._sequences.running)

    def _first_to_admit(self, skipped_priority: int) -> Sequence | None:
        """The first waiting sequence, or None if it must not be admitted now. Its priority must be above
        `skipped_priority`. A new sequence needs an open batch; a preempted one does not."""
        first = self._sequences.active_queue.peek()
        if first is None or first.priority <= skipped_priority:
            return None
        return first if self._batch_is_open or first.state is not RequestState.PENDING else None

    def _max_tokens_before(self, in_progress: _Prompts, first: Sequence) -> int:
        """How many tokens the first waiting sequence may take before the next prompt in progress. 0: it must wait
        for that prompt."""
        if not in_progress:
            return self._config.max_tokens_per_step
        next_key, _ = in_progress[-1]
        if self._prefill_sort_key(first) < next_key:
            return self._config.max_tokens_per_step
        # `first` is less urgent than the prompt in progress, but a later prompt in the queue may be more urgent. Only a
        # prompt that has started can be overtaken. So `first` starts with one block.
        delays_others = self._config.chunked_prefill and any(
            self._prefill_sort_key(sequence) < next_key
            for sequence in self._sequences.active_queue.near_front(MAX_SKIPPED)
        )
        return self._info.block_size if delays_others else 0

    def _prefill_sort_key(self, sequence: Sequence) -> SortKey:
        """Sort key of a prompt, by the target of its first token. The smallest goes first."""
        cached = sequence.cached_tokens
        if cached is None:
            # The sequence is waiting, so its prefix hits are not known. With two tiers the lookup is too slow to be
            # done for every sequence near the front.
            hits = [] if self._info.store_blocks else self._sequences.prefixes.hits(sequence)
            cached = len(hits) * self._info.block_size
        return self._order.sort_key(sequence, cached)

    def _start(self, builder: PlanBuilder, sequence: Sequence, max_tokens: int) -> bool | Sequence:
        """Admits a waiting sequence: it gets a row, its prefix hits, and a first chunk of at most `max_tokens`.

        Returns whether it was admitted. If another sequence is about to compute the next block that it needs, returns
        that sequence instead.
        """
        kv_cache, prefixes, block_size = (
            self._sequences.kv_cache,
            self._sequences.prefixes,
            self._info.block_size,
        )
        if not kv_cache.free_rows and not self._policy.preempts:
            return False
        hits = prefixes.hits(sequence)
        if (producer := prefixes.producer(sequence, len(hits))) is not None:
            return producer
        start = len(hits) * block_size
        count = min(max_tokens, self._size.chunk(builder, start, sequence.target - start))
        if not count:
            return False
        # Must come before `make_room`: without this reference, it would count the hits as available blocks.
        kv_cache.share(hits)
        stored = kv_cache.num_stored(hits)
        if self._info.store_blocks:
            # Every token of a prompt first needs a full block. If few are free, the chunk is smaller.
            room = kv_cache.affordable(
                len(hits), stored, start, kv_cache.available - self._memory.still_needed()
            )
            count = min(count, room or block_size)
        needed = kv_cache.needed(len(hits), stored, start + count)
        needed_soon = kv_cache.needed_over_steps(len(hits), stored, sequence.target + 1)
        has_room = self._memory.make_room(builder, sequence, needed, needed_soon)
        allocation = (
            kv_cache.allocate(sequence.request_id, needed, hits, sequence.block_hashes) if has_room else None
        )
        kv_cache.release(hits)
        if allocation is None:
            return False
        if needed.store:
            builder.moving.append(sequence)
        self._sequences.active_queue.remove(sequence)
        sequence.allocation = allocation
        sequence.scheduled = start
        now = self._clock()
        if sequence.cached_tokens is None:
            sequence.cached_tokens = start
            sequence.admitted_at = now
        if now < self._sequences.history.until:
            row = allocation.row
            assert row is not None
            event = now, builder.step, "admitted", sequence.request_id, row, start
            self._sequences.history.events.append(event)
        self._sequences.add_running(sequence, builder.step, Phase.PREFILL, now)
        self._add_prefill(builder, sequence, count)
        return True

    def _resume(self, builder: PlanBuilder, sequence: Sequence) -> bool:
        """Starts the swap-in of a sequence. The sequence runs once the copy is finished."""
        allocation = sequence.allocation
        assert allocation is not None
        needed = allocation.size
        if not self._memory.make_room(
            builder, sequence, needed, needed + BlockCounts(1, self._info.store_blocks and 1)
        ):
            return False
        task = self._sequences.kv_cache.swap_in(allocation, after_step=builder.step - 1)
        if task is None:
            return False
        self._sequences.active_queue.remove(sequence)
        builder.swap_in.append(task)
        sequence.swap_id = task.swap_id
        self._sequences.resuming[task.swap_id] = sequence
        return True


def _inherit_rank(sort_key: SortKey, producer: Sequence, in_progress: _Prompts) -> None:
    """Priority inheritance: the producer gets the rank of the sequence that waits for it."""
    for index, (_, sequence) in enumerate(in_progress):
        if sequence is producer:
            del in_progress[index]
            in_progress.append((sort_key, producer))
            return
