"""Plans one step: which sequences it computes, how many tokens of each, which are admitted and which preempted."""

from __future__ import annotations

from operator import itemgetter

from weft.clock import Clock
from weft.config import SchedulerConfig
from weft.plan import BackendInfo
from weft.request import Priority, RequestState
from weft.scheduling.cache.block_pool import BlockCounts
from weft.scheduling.draft_tokens import Speculation
from weft.scheduling.idle_work import IdlePlanner
from weft.scheduling.plan_builder import PlanBuilder
from weft.scheduling.policy import AdmissionPolicy, SortKey, StepCostModel
from weft.scheduling.preemption import choose_victims, is_below, work_lost
from weft.scheduling.prompt_order import PromptOrder, StepSize
from weft.scheduling.sequence import Phase, Sequence
from weft.scheduling.sequence_table import SequenceTable

MAX_SKIPPED = 16
"""The maximum number of waiting sequences that one plan skips because they cannot start yet. It keeps planning time
independent of the queue."""

ONE_BLOCK = BlockCounts(1)

_BELOW_ALL = -len(Priority) - 1

_Prompts = list[tuple[SortKey, Sequence]]


class Planner:
    """Fills a PlanBuilder, and admits and preempts sequences in the SequenceTable."""

    def __init__(
        self,
        config: SchedulerConfig,
        info: BackendInfo,
        sequence_table: SequenceTable,
        policy: AdmissionPolicy,
        cost_model: StepCostModel,
        clock: Clock,
    ) -> None:
        self._config = config
        self._info = info
        self._sequences = sequence_table
        self._policy = policy
        self._clock = clock
        self._size = StepSize(config, info, cost_model)
        self._order = PromptOrder(policy, self._size)
        self.speculation = Speculation(config, info)
        self._idle = IdlePlanner(config, info, sequence_table, self._size, cost_model)
        self._last_prefill_step = -1
        self._batch_is_open = True

    def plan(self, builder: PlanBuilder) -> None:
        """Plans over all running and waiting sequences. Repeats if preemptions left the step empty."""
        if self._sequences.num_idle:
            self._divide(builder)
        while True:
            num_victims = len(builder.preempted)
            if self._config.prefer_pure_decode:
                self._plan_pure(builder)
            else:
                self._plan_mixed(builder, self._sequences.running, may_admit=True)
            if builder.decodes or builder.prefills or len(builder.preempted) == num_victims:
                break
        if self.speculation.may_have_drafts(builder):
            room = self._size.room_for_drafts(builder.decodes, builder.budget.tokens)
            self.speculation.add_draft_tokens(builder, self._sequences.kv_cache, room)
        if self._sequences.num_idle:
            self._fill(builder)

    def plan_only(self, builder: PlanBuilder, sequences: list[Sequence]) -> None:
        """Plans a step over `sequences` alone."""
        self._plan_mixed(builder, sequences, may_admit=False)

    # ------------------------------------------------------------------ idle work

    def _divide(self, builder: PlanBuilder) -> None:
        """Decides whether the plan is made from interactive sequences or from idle ones. Preempts idle ones if
        interactive ones need their memory."""
        now = self._clock()
        if not self._sequences.has_interactive_work:
            self._sequences.resume_idle(now)
            return
        self._sequences.pause_idle()
        for victim in self._idle.victims():
            self._preempt(builder, victim)

    def _fill(self, builder: PlanBuilder) -> None:
        """Adds idle work to a step with interactive sequences."""
        if self._sequences.active_queue is self._sequences.idle_queue:
            return  # no interactive sequence is in the step
        sequences, may_admit = self._idle.fill(builder)
        if sequences or may_admit:
            self._sequences.active_queue = self._sequences.idle_queue
            self._plan_mixed(builder, sequences, may_admit)
            self._sequences.pause_idle()

    # ------------------------------------------------------------------ the shape of a step

    def _plan_mixed(self, builder: PlanBuilder, sequences: list[Sequence], may_admit: bool) -> None:
        """Adds decodes first, then prompts: those in progress and new ones."""
        may_admit = may_admit and bool(self._sequences.active_queue) and self._admission_is_open()
        places = builder.budget.sequences
        is_full = len(sequences) >= places
        if may_admit and is_full and (self._sequences.kv_cache.free_rows or self._first_may_preempt()):
            # Keeps one place in the step for new sequences: otherwise running sequences would block them forever. If
            # the step has one place only, it is kept for them in every second step.
            places = places - 1 if places > 1 else builder.step % 2
        decodes, prefills, others = self._split(sequences, places)
        self._take_decodes(builder, decodes)
        if prefills or others or may_admit:
            self._plan_prompts(builder, prefills, may_admit)
        # Gives the unused places to the remaining sequences, in rotation order.
        for sequence in others:
            if not builder.budget.sequences or not builder.budget.tokens:
                break
            if sequence.state is not RequestState.RUNNING:
                continue  # preempted while this plan was made
            if _is_decode(sequence):
                self._take_decodes(builder, [sequence])
            elif builder.budget.for_prefill:
                self._continue_prefill(builder, sequence)

    def _plan_pure(self, builder: PlanBuilder) -> None:
        """Plans a step with prompts only, or with decodes only. After a step of prompts, every running sequence decodes
        before the next step of prompts."""
        decodes, prefills, _ = self._split(self._sequences.running, len(self._sequences.running))
        may_admit = bool(self._sequences.active_queue) and self._admission_is_open()
        all_decoded = all(
            s.last_step > self._last_prefill_step and self._is_on_time(builder.step, s) for s in decodes
        )
        if all_decoded and (prefills or may_admit):
            self._plan_prompts(builder, prefills, may_admit)
        if builder.prefills:
            self._last_prefill_step = builder.step
        else:
            still_running = [s for s in decodes if s.state is RequestState.RUNNING]
            self._take_decodes(builder, still_running[: builder.budget.sequences])

    def _plan_prompts(self, builder: PlanBuilder, prefills: list[Sequence], may_admit: bool) -> None:
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
            # 0: the next prompt in progress goes first.
            max_tokens = self._max_tokens_before(in_progress, first) if first is not None else 0
            if in_progress and not max_tokens:
                sort_key, sequence = in_progress.pop()
                producer = self._continue_prefill(builder, sequence)
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

    def _split(
        self, sequences: list[Sequence], places: int
    ) -> tuple[list[Sequence], list[Sequence], list[Sequence]]:
        """Splits the running sequences into decodes, prefills and others, in rotation order. The first two get `places`
        sequences in all."""
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        others: list[Sequence] = []
        for sequence in sequences:
            scheduled, target = sequence.scheduled, sequence.target
            if target >= sequence.limit:
                continue  # its last token is being sampled
            if sequence.needs_last_token and target > len(sequence.tokens):
                continue  # its grammar mask depends on a token that is being sampled
            if places <= 0:
                others.append(sequence)
            elif target - scheduled == 1 and scheduled >= sequence.prompt_length:
                decodes.append(sequence)
            else:
                prefills.append(sequence)
            places -= 1
        return decodes, prefills, others

    # ------------------------------------------------------------------ decodes

    def _take_decodes(self, builder: PlanBuilder, decodes: list[Sequence]) -> None:
        """Adds decodes to the step. Allocates a block for each one whose last block is complete."""
        block_size = self._info.block_size
        builder.budget.take_decodes(len(decodes))
        builder.decodes += decodes
        if self._info.store_blocks:
            # The first position of a block needs a new full block; the last one moves an older block to the store.
            growing = [s for s in decodes if (s.scheduled + 1) % block_size < 2]
        else:
            growing = [s for s in decodes if s.scheduled % block_size == 0 and _is_full(s, block_size)]
        kv_cache = self._sequences.kv_cache
        if growing and len(growing) > kv_cache.min_available:
            growing.sort(key=lambda s: (-s.priority, s.order))
        for sequence in growing:
            if sequence.state is not RequestState.RUNNING:
                continue  # preempted for an earlier sequence of this loop
            needed = self._needed(sequence, 1) if self._info.store_blocks else ONE_BLOCK
            if not self._grow(builder, sequence, needed):
                if self._may_skip_step(builder, sequence) or self._victim_is_in_plan(builder, sequence):
                    builder.drop(sequence)
                else:
                    # preempting sequences of lower rank would not free enough blocks
                    self._preempt(builder, sequence)

    def _needed(self, sequence: Sequence, count: int) -> BlockCounts:
        """Blocks that a running sequence lacks to compute `count` more positions."""
        allocation, end = sequence.allocation, sequence.scheduled + count
        assert allocation is not None
        return self._sequences.kv_cache.needed(len(allocation.blocks), allocation.stored, end)

    def _grow(self, builder: PlanBuilder, sequence: Sequence, needed: BlockCounts) -> bool:
        """Allocates blocks for a running sequence. Preempts sequences that rank below it if memory is short."""
        kv_cache, allocation = self._sequences.kv_cache, sequence.allocation
        assert allocation is not None
        first = len(allocation.blocks)
        if not kv_cache.extend(allocation, needed, sequence.block_hashes):
            if self._may_skip_step(builder, sequence):
                return False
            self._release_spare_blocks()
            below = [s for s in self._victims(builder) if is_below(s, sequence)]
            victims = choose_victims(below, sequence, needed - kv_cache.available, kv_cache, self._info)
            if victims is None:
                return False
            for victim in victims:
                self._preempt(builder, victim)
            if not kv_cache.extend(allocation, needed, sequence.block_hashes):
                return False
        builder.note_tables(sequence, first)
        if needed.store:
            builder.moving.append(sequence)
        return True

    def _may_skip_step(self, builder: PlanBuilder, sequence: Sequence) -> bool:
        """Whether this step or those in flight will free blocks, and the sequence may still wait for them."""
        blocks_are_coming = bool(builder.moving) or self._sequences.blocks_will_be_freed
        return blocks_are_coming and self._is_on_time(builder.step, sequence)

    def _victim_is_in_plan(self, builder: PlanBuilder, sequence: Sequence) -> bool:
        """Whether a prompt of this plan ranks below the sequence, so that a later step can preempt it.

        NOTE: without this wait, two sequences that need each other's blocks could preempt themselves in turn forever.
        """
        outranks = any(is_below(prompt, sequence) for prompt, *_ in builder.prefills)
        return outranks and self._is_on_time(builder.step, sequence)

    def _is_on_time(self, step: int, sequence: Sequence) -> bool:
        """Whether the sequence ran or was admitted at most one rotation ago. A rotation is as many steps as all running
        sequences need to run once."""
        rotation = -(-len(self._sequences.running) // self._config.sequences_per_step)
        is_prompt_in_tiers = self._info.store_blocks and not _is_decode(sequence)
        if is_prompt_in_tiers and all(s.priority >= sequence.priority for s in self._sequences.running):
            # Prompts share the full blocks that the tails leave free. These may be few, so a prompt may have to wait for
            # every other running sequence: allow one step for each. A prompt with a higher priority than a running
            # sequence need not wait for it: it can preempt that sequence.
            rotation = max(rotation, len(self._sequences.running))
        return step - max(sequence.last_step, sequence.admitted_step - 1) <= rotation

    def should_wait_for_tokens(self) -> bool:
        """Whether the next step should wait for the tokens of the step in flight, so that it can have draft tokens.
        False if prompts come next, or if the step has no room for draft tokens."""
        queue, running = self._sequences.active_queue, self._sequences.running
        if queue and self._sequences.kv_cache.free_rows:
            return False
        return self.speculation.should_wait_for_tokens(running) and bool(
            self._size.room_for_drafts(running, self._config.max_tokens_per_step - len(running))
        )

    # ------------------------------------------------------------------ prompts in progress

    def _continue_prefill(self, builder: PlanBuilder, sequence: Sequence) -> Sequence | None:
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
        if self._grow(builder, sequence, self._needed(sequence, count)):
            self._add_prefill(builder, sequence, count)
        elif not has_run and not self._may_skip_step(builder, sequence):
            self._preempt(builder, sequence)
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
            self._sequences.kv_cache.pool.note_interactive(sequence.allocation.blocks)

    # ------------------------------------------------------------------ admission

    def _admission_is_open(self) -> bool:
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

    def _first_may_preempt(self) -> bool:
        """Whether the first waiting sequence may preempt a running one."""
        first = self._sequences.active_queue.peek()
        if first is None or not self._policy.preempts:
            return False
        return any(s.priority < first.priority for s in self._sequences.running)

    def _first_to_admit(self, skipped_priority: int) -> Sequence | None:
        """The first waiting sequence, if it may be admitted. It must outrank every sequence that was skipped before
        it."""
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
        # Must come before `_make_room`: without this reference, the hits would count as free blocks.
        kv_cache.share(hits)
        stored = kv_cache.num_stored(hits)
        if self._info.store_blocks:
            # Every token of a prompt first needs a full block. If few are free, the chunk is smaller.
            room = kv_cache.affordable(len(hits), stored, start, kv_cache.available - self._still_needed())
            count = min(count, room or block_size)
        needed = kv_cache.needed(len(hits), stored, start + count)
        needed_soon = kv_cache.needed_over_steps(len(hits), stored, sequence.target + 1)
        has_room = self._make_room(builder, sequence, needed, needed_soon)
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
        if sequence.cached_tokens is None:
            sequence.cached_tokens = start
        self._sequences.add_running(sequence, builder.step, Phase.PREFILL, self._clock())
        self._add_prefill(builder, sequence, count)
        return True

    def _resume(self, builder: PlanBuilder, sequence: Sequence) -> bool:
        """Starts the swap-in of a sequence. The sequence runs once the copy is finished."""
        allocation = sequence.allocation
        assert allocation is not None
        needed = allocation.size
        if not self._make_room(
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

    def _make_room(
        self, builder: PlanBuilder, sequence: Sequence, needed: BlockCounts, needed_soon: BlockCounts
    ) -> bool:
        """Whether a row and the `needed` blocks are free for a waiting sequence. May preempt others for it.

        Without preempting, and while other sequences run, `needed_soon` blocks must be free after the prompts in
        progress have taken theirs. Otherwise the sequence could be preempted right after its start, which only costs
        time.
        """
        kv_cache = self._sequences.kv_cache
        available, has_row = kv_cache.available, kv_cache.free_rows > 0
        if builder.reserved is not None:
            # Idle work beside interactive sequences leaves a row and blocks for them.
            available, has_row = available - builder.reserved, kv_cache.free_rows > 1
        is_alone = not (self._sequences.running or self._sequences.resuming)
        if has_row and (is_alone or (available - self._still_needed()).covers(needed_soon)):
            return available.covers(needed)
        if not self._policy.preempts:
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
            self._preempt(builder, victim)
        if kv_cache.free_rows:
            return True
        # The victim's row is still in a step in flight, so this sequence must wait. It is promoted: otherwise the
        # victim could be admitted before it.
        self._sequences.active_queue.promote(sequence)
        return False

    def _still_needed(self) -> BlockCounts:
        """Blocks that prompts in progress, and sequences whose swap-in is in flight, will still allocate."""
        kv_cache, total = self._sequences.kv_cache, BlockCounts(0)
        for sequence in (*self._sequences.running, *self._sequences.resuming.values()):
            allocation = sequence.allocation
            if sequence.target - sequence.scheduled > 1 and allocation is not None:
                end = sequence.target + 1
                total += kv_cache.needed_over_steps(len(allocation.blocks), allocation.stored, end)
        return total

    # ------------------------------------------------------------------ preemption

    def _release_spare_blocks(self) -> None:
        """Frees blocks of rejected draft tokens. A sequence keeps the block of its next position."""
        if not self.speculation.is_on:
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

    def _preempt(self, builder: PlanBuilder, sequence: Sequence) -> None:
        builder.drop(sequence)
        self._release_adopted(builder, sequence)
        task = self._sequences.preempt(sequence, builder.step, self._clock())
        if task is not None:
            builder.swap_out.append(task)
        builder.preempted.append(sequence.request_id)

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


def _inherit_rank(sort_key: SortKey, producer: Sequence, in_progress: _Prompts) -> None:
    """Priority inheritance: the producer gets the rank of the sequence that waits for it."""
    for index, (_, sequence) in enumerate(in_progress):
        if sequence is producer:
            del in_progress[index]
            in_progress.append((sort_key, producer))
            return


def _is_decode(sequence: Sequence) -> bool:
    return sequence.target - sequence.scheduled == 1 and sequence.scheduled >= sequence.prompt_length


def _is_full(sequence: Sequence, block_size: int) -> bool:
    assert sequence.allocation is not None
    return len(sequence.allocation.blocks) * block_size == sequence.scheduled
