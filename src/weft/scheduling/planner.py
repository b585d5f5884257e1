"""Decides what one step computes: which sequences, how many tokens of each, who is admitted and who gives way."""

from __future__ import annotations

from operator import itemgetter

from weft.clock import Clock
from weft.config import SchedulerConfig
from weft.plan import BackendInfo
from weft.request import RequestState
from weft.scheduling.cache.block_pool import Blocks
from weft.scheduling.draft_tokens import Speculation
from weft.scheduling.plan_builder import PlanBuilder
from weft.scheduling.policy import AdmissionPolicy, PolicyKey, StepCostModel
from weft.scheduling.preemption import choose_victims, is_below, work_lost
from weft.scheduling.prompt_order import PromptOrder, StepSize
from weft.scheduling.sequence import Phase, Sequence
from weft.scheduling.sequence_table import SequenceTable

MAX_LOOKED_PAST = 16
"""Waiting requests that one plan may pass over because they cannot start just now. Keeps planning flat in the queue."""

ONE_BLOCK = Blocks(1)


class Planner:
    """Fills drafts. What it changes is in the roster; its own state is whose turn it is."""

    def __init__(
        self,
        config: SchedulerConfig,
        info: BackendInfo,
        roster: SequenceTable,
        policy: AdmissionPolicy,
        cost_model: StepCostModel,
        clock: Clock,
    ) -> None:
        self._config = config
        self._info = info
        self._roster = roster
        self._policy = policy
        self._clock = clock
        self._size = StepSize(config, info, cost_model)
        self._order = PromptOrder(policy, self._size)
        self.speculation = Speculation(config, info)
        self._last_prefill_step = -1
        self._batch_is_open = True

    def plan(self, draft: PlanBuilder) -> None:
        """Plans over all that run and wait; once more where everyone whose turn it was gave way."""
        while True:
            num_victims = len(draft.preempted)
            if self._config.prefer_pure_decode:
                self._plan_pure(draft)
            else:
                self._plan_mixed(draft, self._roster.running, may_admit=True)
            if draft.decodes or draft.prefills or len(draft.preempted) == num_victims:
                break
        if self.speculation.may_have_drafts(draft):
            room = self._size.room_for_drafts(draft.decodes, draft.budget.tokens)
            self.speculation.add_drafts(draft, self._roster.kv_cache, room)

    def plan_only(self, draft: PlanBuilder, sequences: list[Sequence]) -> None:
        """Plans a step over these alone."""
        self._plan_mixed(draft, sequences, may_admit=False)

    # ------------------------------------------------------------------ the shape of a step

    def _plan_mixed(self, draft: PlanBuilder, sequences: list[Sequence], may_admit: bool) -> None:
        """Decodes first, then prompts, both those under way and new ones."""
        may_admit = may_admit and bool(self._roster.queue) and self._joins_open()
        places = draft.budget.sequences
        is_full = len(sequences) >= places
        if may_admit and is_full and (self._roster.kv_cache.free_rows or self._first_outranks_someone()):
            # A place for arrivals, or sequences that run would keep them out for good.
            places = places - 1 if places > 1 else draft.step % 2
        decodes, prefills, others = self._split(sequences, places)
        self._take_decodes(draft, decodes)
        if prefills or others or may_admit:
            self._plan_prompts(draft, prefills, may_admit)
        # Places that nobody took whose turn it was go to the others, in turn.
        for sequence in others:
            if not draft.budget.sequences or not draft.budget.tokens:
                break
            if sequence.state is not RequestState.RUNNING:
                continue  # preempted while this plan was made
            if _is_decode(sequence):
                self._take_decodes(draft, [sequence])
            elif draft.budget.for_prefill:
                self._continue_prefill(draft, sequence)

    def _plan_pure(self, draft: PlanBuilder) -> None:
        """Either prompts or decodes: a full round of decodes, then one step of prompts if there are any."""
        decodes, prefills, _ = self._split(self._roster.running, len(self._roster.running))
        may_admit = bool(self._roster.queue) and self._joins_open()
        round_is_over = all(
            s.last_step > self._last_prefill_step and self._is_on_time(draft.step, s) for s in decodes
        )
        if round_is_over and (prefills or may_admit):
            self._plan_prompts(draft, prefills, may_admit)
        if draft.prefills:
            self._last_prefill_step = draft.step
        else:
            still_running = [s for s in decodes if s.state is RequestState.RUNNING]
            self._take_decodes(draft, still_running[: draft.budget.sequences])

    def _plan_prompts(self, draft: PlanBuilder, prefills: list[Sequence], may_admit: bool) -> None:
        """Whoever is due first goes first, until something needed is used up: a prompt under way, or the next of the queue."""
        self._size.begin_prompts(draft)
        queue = self._roster.queue
        under_way = [(self._due(sequence), sequence) for sequence in prefills]
        under_way.sort(key=itemgetter(0), reverse=True)
        passed: list[object] = []
        floor = -1
        while draft.budget.for_prefill:
            may_admit = may_admit and len(passed) < MAX_LOOKED_PAST
            first = self._first_to_admit(floor) if may_admit else None
            most = self._most_before(under_way, first) if first is not None else 0
            if under_way and not most:
                due, sequence = under_way.pop()
                awaited = self._continue_prefill(draft, sequence)
                if awaited is not None:
                    _lend(due, awaited, under_way)
            elif first is None:
                break
            elif self._roster.is_in_flight(first) or first.request_id in draft.preempted:
                # A victim of this very plan, or in flight. What is behind it must outrank it to pass.
                floor = max(floor, first.priority)
                passed.append(queue.set_aside())
            elif first.allocation is not None:
                may_admit = self._resume(draft, first)
            else:
                started = self._start(draft, first, most)
                may_admit = started is not False
                if isinstance(started, Sequence):
                    passed.append(queue.set_aside())
                    _lend(self._due(first), started, under_way)
        for entry in passed:
            queue.put_back(entry)

    def _split(
        self, sequences: list[Sequence], places: int
    ) -> tuple[list[Sequence], list[Sequence], list[Sequence]]:
        """Of the first `places` in turn, those that need one token computed to sample the next and those with more to
        compute; and all others, in turn."""
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        others: list[Sequence] = []
        for sequence in sequences:
            scheduled, target = sequence.scheduled, sequence.target
            if target >= sequence.limit:
                continue  # its last token is being sampled
            if sequence.sits_out and target > len(sequence.tokens):
                continue  # what its grammar allows next follows from a token that is being sampled
            if places <= 0:
                others.append(sequence)
            elif target - scheduled == 1 and scheduled >= sequence.prompt_length:
                decodes.append(sequence)
            else:
                prefills.append(sequence)
            places -= 1
        return decodes, prefills, others

    # ------------------------------------------------------------------ decodes

    def _take_decodes(self, draft: PlanBuilder, decodes: list[Sequence]) -> None:
        """Puts decodes into the step and gives those a block that stand at the end of theirs."""
        block_size = self._info.block_size
        draft.budget.take_decodes(len(decodes))
        draft.decodes += decodes
        if self._info.store_blocks:
            # The first position of a block needs it in full; the last one has a block behind the tail, which moves.
            growing = [s for s in decodes if (s.scheduled + 1) % block_size < 2]
        else:
            growing = [s for s in decodes if s.scheduled % block_size == 0 and _is_full(s, block_size)]
        kv_cache = self._roster.kv_cache
        if growing and len(growing) > kv_cache.fewest_available:
            growing.sort(key=lambda s: (-s.priority, s.order))
        for sequence in growing:
            if sequence.state is not RequestState.RUNNING:
                continue  # preempted for one before it
            needed = self._needed(sequence, 1) if self._info.store_blocks else ONE_BLOCK
            if not self._grow(draft, sequence, needed):
                if self._may_sit_out(draft, sequence):
                    draft.drop(sequence)
                else:
                    self._preempt(draft, sequence)  # nobody below it: it gives way itself

    def _needed(self, sequence: Sequence, count: int) -> Blocks:
        """What a running sequence must get to compute `count` more positions."""
        allocation, end = sequence.allocation, sequence.scheduled + count
        assert allocation is not None
        return self._roster.kv_cache.needed(len(allocation.blocks), allocation.stored, end)

    def _grow(self, draft: PlanBuilder, sequence: Sequence, needed: Blocks) -> bool:
        """Takes blocks for a running sequence, preempting others below it where memory is gone."""
        kv_cache, allocation = self._roster.kv_cache, sequence.allocation
        assert allocation is not None
        first = len(allocation.blocks)
        if not kv_cache.extend(allocation, needed, sequence.keys):
            if self._may_sit_out(draft, sequence):
                return False
            self._take_back_spare_blocks()
            below = [s for s in self._victims(draft) if is_below(s, sequence)]
            victims = choose_victims(below, sequence, needed - kv_cache.available, kv_cache, self._info)
            if victims is None:
                return False
            for victim in victims:
                self._preempt(draft, victim)
            if not kv_cache.extend(allocation, needed, sequence.keys):
                return False
        draft.note_tables(sequence, first)
        if needed.store:
            draft.moving.append(sequence)
        return True

    def _may_sit_out(self, draft: PlanBuilder, sequence: Sequence) -> bool:
        """Whether memory is about to come free by itself, and the sequence can wait for it without falling behind."""
        is_coming = bool(draft.moving) or self._roster.blocks_are_coming
        return is_coming and self._is_on_time(draft.step, sequence)

    def _is_on_time(self, step: int, sequence: Sequence) -> bool:
        """Whether it has not missed a turn since it last ran, or since it was admitted."""
        turn = -(-len(self._roster.running) // self._config.sequences_per_step)
        is_prompt_in_tiers = self._info.store_blocks and not _is_decode(sequence)
        if is_prompt_in_tiers and all(s.priority >= sequence.priority for s in self._roster.running):
            # Prompts pass through what the tails leave of the full tier, which may be little: they take turns at it. Only
            # one that is above somebody does not: it may push that one out instead.
            turn = max(turn, len(self._roster.running))
        return step - max(sequence.last_step, sequence.admitted_step - 1) <= turn

    def is_worth_waiting(self) -> bool:
        """Whether to let the step in flight end before another is planned, since guesses need its tokens. Not where prompts are
        next, or where there is no room for guesses."""
        roster = self._roster
        if roster.queue and roster.kv_cache.free_rows:
            return False
        return self.speculation.is_worth_waiting(roster.running) and bool(
            self._size.room_for_drafts(roster.running, self._config.max_tokens_per_step - len(roster.running))
        )

    # ------------------------------------------------------------------ prompts under way

    def _continue_prefill(self, draft: PlanBuilder, sequence: Sequence) -> Sequence | None:
        """Gives a prompt under way its next chunk, if it can go on. Returns the one that it waits for, if it does."""
        if sequence.state is not RequestState.RUNNING:
            return None  # preempted while this plan was made
        self._adopt_hits(draft, sequence)
        allocation, block_size, start = sequence.allocation, self._info.block_size, sequence.scheduled
        assert allocation is not None
        held = len(allocation.blocks) * block_size - start
        # NOTE: until it has run since it was admitted, nobody may push it out: it must neither wait for another
        # nor keep memory it cannot go on with, or the two would block each other for good.
        has_run = sequence.last_step >= sequence.admitted_step
        if held == 0 and has_run:
            awaited = self._roster.prefixes.awaited(sequence, len(allocation.blocks))
            if awaited is not None:
                return awaited
        count = self._size.chunk(draft, start, sequence.target - start)
        if not count:
            return None
        # Take what memory there is; only where there is none at all must someone give way.
        kv_cache = self._roster.kv_cache
        room = kv_cache.affordable(len(allocation.blocks), allocation.stored, start, kv_cache.available)
        count = min(count, room or block_size - start % block_size)
        if self._grow(draft, sequence, self._needed(sequence, count)):
            self._add_prefill(draft, sequence, count)
        elif not has_run and not self._may_sit_out(draft, sequence):
            self._preempt(draft, sequence)
        return None

    def _adopt_hits(self, draft: PlanBuilder, sequence: Sequence) -> None:
        """Takes over blocks that another sequence has filled, or fills in this step, since the last chunk."""
        allocation, block_size = sequence.allocation, self._info.block_size
        assert allocation is not None
        first = len(allocation.blocks)
        while sequence.scheduled == len(allocation.blocks) * block_size:
            block = self._roster.prefixes.next_hit(sequence, len(allocation.blocks))
            if block is None:
                break
            self._roster.kv_cache.adopt(allocation, block)
            sequence.scheduled += block_size
        draft.note_tables(sequence, first)

    def _add_prefill(self, draft: PlanBuilder, sequence: Sequence, count: int) -> None:
        start = sequence.scheduled
        sequence.scheduled = end = start + count
        samples = end == sequence.target
        if samples:
            sequence.target += 1
        sequence.last_step = draft.step
        self._size.take_chunk(draft, start, count)
        draft.prefills.append((sequence, start, count, samples))
        draft.registered += self._roster.prefixes.register(sequence, start, end)

    # ------------------------------------------------------------------ admission

    def _joins_open(self) -> bool:
        """Dynamic batching off: a batch is closed once its first member generates, until all are done."""
        if self._config.dynamic_batching:
            return True
        if not self._roster.running and not self._roster.resuming:
            self._batch_is_open = True
        elif any(s.target > s.prompt_length for s in self._roster.running):
            self._batch_is_open = False
        first = self._roster.queue.peek()
        return self._batch_is_open or (first is not None and first.state is RequestState.PREEMPTED)

    def _first_outranks_someone(self) -> bool:
        """Whether the next request to admit may push a running one out."""
        first = self._roster.queue.peek()
        if first is None or not self._policy.preempts:
            return False
        return any(s.priority < first.priority for s in self._roster.running)

    def _first_to_admit(self, floor: int) -> Sequence | None:
        """The next of the queue, if it may join. Where somebody was passed over, it must be above `floor` to pass too."""
        first = self._roster.queue.peek()
        if first is None or first.priority <= floor:
            return None
        return first if self._batch_is_open or first.state is not RequestState.PENDING else None

    def _most_before(self, under_way: list[tuple[PolicyKey, Sequence]], first: Sequence) -> int:
        """How many tokens the next of the queue may take before the last of those under way goes on. 0: none."""
        if not under_way:
            return self._config.max_tokens_per_step
        due, _ = under_way[-1]
        if self._due(first) < due:
            return self._config.max_tokens_per_step
        # It stands in the way of who is due behind it, since only who has started can be passed.
        is_in_the_way = self._config.chunked_prefill and any(
            self._due(sequence) < due for sequence in self._roster.queue.near_front(MAX_LOOKED_PAST)
        )
        return self._info.block_size if is_in_the_way else 0

    def _due(self, sequence: Sequence) -> PolicyKey:
        """When a prompt is due, as a key: the smallest goes first."""
        cached = sequence.cached_tokens
        if cached is None:
            # It waits. In two tiers to look for what is known takes too long to be done for every one near the front.
            hits = [] if self._info.store_blocks else self._roster.prefixes.hits(sequence)
            cached = len(hits) * self._info.block_size
        return self._order.key(sequence, cached)

    def _start(self, draft: PlanBuilder, sequence: Sequence, most: int) -> bool | Sequence:
        """Gives a waiting sequence a row, its prefix hits and a first chunk of at most so many tokens. False: no room; a
        sequence: not yet, since that one is about to compute what it needs next."""
        kv_cache, prefixes, block_size = self._roster.kv_cache, self._roster.prefixes, self._info.block_size
        if not kv_cache.free_rows and not self._policy.preempts:
            return False
        hits = prefixes.hits(sequence)
        if (awaited := prefixes.awaited(sequence, len(hits))) is not None:
            return awaited
        start = len(hits) * block_size
        count = min(most, self._size.chunk(draft, start, sequence.target - start))
        if not count:
            return False
        kv_cache.share(hits)  # held while room is made, or a victim's going would count them as room
        stored = kv_cache.num_stored(hits)
        if self._info.store_blocks:
            # A prompt passes through the full tier: where that is small, in smaller chunks.
            room = kv_cache.affordable(len(hits), stored, start, kv_cache.available - self._still_needed())
            count = min(count, room or block_size)
        needed = kv_cache.needed(len(hits), stored, start + count)
        needed_soon = kv_cache.needed_after(len(hits), stored, sequence.target + 1)
        has_room = self._make_room(draft, sequence, needed, needed_soon)
        allocation = kv_cache.allocate(sequence.request_id, needed, hits, sequence.keys) if has_room else None
        kv_cache.release(hits)
        if allocation is None:
            return False
        if needed.store:
            draft.moving.append(sequence)
        self._roster.queue.remove(sequence)
        sequence.allocation = allocation
        sequence.scheduled = start
        if sequence.cached_tokens is None:
            sequence.cached_tokens = start
        self._roster.join(sequence, draft.step, Phase.PREFILL, self._clock())
        self._add_prefill(draft, sequence, count)
        return True

    def _resume(self, draft: PlanBuilder, sequence: Sequence) -> bool:
        """Starts the copy of a swapped-out sequence back into blocks; it runs once the copy is there."""
        allocation = sequence.allocation
        assert allocation is not None
        needed = allocation.size
        if not self._make_room(draft, sequence, needed, needed + Blocks(1, self._info.store_blocks and 1)):
            return False
        task = self._roster.kv_cache.swap_in(allocation, after_step=draft.step - 1)
        if task is None:
            return False
        self._roster.queue.remove(sequence)
        draft.swap_in.append(task)
        sequence.swap_id = task.swap_id
        self._roster.resuming[task.swap_id] = sequence
        return True

    def _make_room(self, draft: PlanBuilder, sequence: Sequence, needed: Blocks, needed_soon: Blocks) -> bool:
        """Whether a row and the `needed` blocks are there for a waiting sequence, preempting for it where it may.

        Without preempting it starts only where all it needs soon is there beside what running prompts still need:
        a sequence that starts and is pushed out again has only cost time.
        """
        roster = self._roster
        available, has_row = roster.kv_cache.available, roster.kv_cache.free_rows > 0
        is_alone = not (roster.running or roster.resuming)
        if has_row and (is_alone or (available - self._still_needed()).covers(needed_soon)):
            return available.covers(needed)
        if not self._policy.preempts:
            return False
        below = [s for s in self._victims(draft) if s.priority < sequence.priority]
        if not below or (not has_row and roster.rows_are_coming):
            return False
        self._take_back_spare_blocks()
        shortage = needed - roster.kv_cache.available
        victims = choose_victims(below, sequence, shortage, roster.kv_cache, self._info)
        if victims is None:
            return False
        if not has_row and not victims:
            victims = [min(below, key=lambda s: (s.priority, work_lost(s, self._info), -s.order))]
        for victim in victims:
            self._preempt(draft, victim)
        if roster.kv_cache.free_rows:
            return True
        # The victim's row is in a step in flight. Next time this one is first, or the victim would be.
        roster.queue.promote(sequence)
        return False

    def _still_needed(self) -> Blocks:
        """Blocks that the prompts under way will still ask for, and those that come back from swap space."""
        kv_cache, total = self._roster.kv_cache, Blocks(0)
        for sequence in (*self._roster.running, *self._roster.resuming.values()):
            allocation = sequence.allocation
            if sequence.target - sequence.scheduled > 1 and allocation is not None:
                total += kv_cache.needed_after(len(allocation.blocks), allocation.stored, sequence.target + 1)
        return total

    # ------------------------------------------------------------------ giving way

    def _take_back_spare_blocks(self) -> None:
        """Frees the blocks that rejected drafts left with running sequences, before any of these is preempted. A sequence keeps
        the block of its next position: a decode of this plan needs it."""
        if not self.speculation.is_on:
            return
        for sequence in self._roster.running:
            allocation, keeps = sequence.allocation, sequence.scheduled // self._info.block_size + 1
            if allocation is not None and len(allocation.blocks) > keeps:
                self._roster.kv_cache.truncate(allocation, keeps)

    def _victims(self, draft: PlanBuilder) -> list[Sequence]:
        """Running sequences that have made progress since they were admitted and are not final in this plan."""
        return [
            s
            for s in self._roster.running
            if s.admitted_step <= s.last_step < draft.step and not s.is_finishing
        ]

    def _preempt(self, draft: PlanBuilder, sequence: Sequence) -> None:
        draft.drop(sequence)
        self._give_up_adopted(draft, sequence)
        task = self._roster.suspend(sequence, draft.step, self._clock())
        if task is not None:
            draft.swap_out.append(task)
        draft.preempted.append(sequence.request_id)

    def _give_up_adopted(self, draft: PlanBuilder, sequence: Sequence) -> None:
        """Gives back what it adopted in this very plan: only this step fills it, and a copy to swap space comes before."""
        allocation = sequence.allocation
        assert allocation is not None
        filled = {block for block, _ in draft.registered}
        for index, block in enumerate(allocation.blocks if filled else ()):
            if block in filled:
                self._roster.kv_cache.truncate(allocation, index)
                sequence.scheduled = index * self._info.block_size
                return


def _lend(due: PolicyKey, awaited: Sequence, under_way: list[tuple[PolicyKey, Sequence]]) -> None:
    """Lets who is waited for go on in the place of who waits, or it would be passed by all that are due before it."""
    for place, (_, sequence) in enumerate(under_way):
        if sequence is awaited:
            del under_way[place]
            under_way.append((due, awaited))
            return


def _is_decode(sequence: Sequence) -> bool:
    return sequence.target - sequence.scheduled == 1 and sequence.scheduled >= sequence.prompt_length


def _is_full(sequence: Sequence, block_size: int) -> bool:
    assert sequence.allocation is not None
    return len(sequence.allocation.blocks) * block_size == sequence.scheduled
