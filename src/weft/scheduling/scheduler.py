"""Owns the running sequences: plans every step over them, and applies what came back.

One iteration: `schedule()` makes a plan, the backend runs it, `apply()` commits it (or `fail()` rolls it back).
Planning ahead is allowed: `schedule()` may be called again before the last plan was applied.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from weft.clock import Clock
from weft.config import PriorityPolicy, SchedulerConfig
from weft.errors import InvalidRequestError
from weft.plan import BackendInfo, IterationPlan, StepResult
from weft.request import FinishReason, GenerationResult, RequestId, RequestState, TokenOutput
from weft.scheduling.blocks import BlockKey
from weft.scheduling.budget import TokenBudget
from weft.scheduling.draft import Draft
from weft.scheduling.kv_cache import KvCacheManager
from weft.scheduling.policy import AdmissionPolicy, StepCostModel
from weft.scheduling.preemption import choose_victims, is_below, prefers_swap, work_lost
from weft.scheduling.queue import RequestQueue
from weft.scheduling.sequence import NEVER, Phase, Sequence

MAX_LOOKED_PAST = 16
"""Waiting requests that one plan may pass over because they cannot start just now. Keeps planning flat in the queue."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A plan that was submitted and not applied yet, with the sequences of its entries."""

    plan: IterationPlan
    sequences: list[Sequence]
    registered: list[tuple[int, BlockKey]]
    is_retry: bool


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start."""

    steps: int = 0
    tokens_computed: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    tokens_generated: int = 0
    preemptions_by_recompute: int = 0
    preemptions_by_swap: int = 0
    steps_failed: int = 0
    swaps_failed: int = 0
    ttft_targets_missed: int = 0


class ContinuousBatchScheduler:
    """The brain. Not thread-safe: one owner calls it. Deterministic: same calls and clock, same plans."""

    def __init__(self, config: SchedulerConfig, info: BackendInfo, clock: Clock) -> None:
        self.config = config
        self.info = info
        self.stats = SchedulerStats()
        self.cost_model = StepCostModel()
        self.kv_cache = KvCacheManager(
            info.num_blocks, config.max_running, info.swap_blocks, info.bytes_per_block
        )
        self.max_sequence_length = min(info.max_context, info.num_blocks * info.block_size)
        self._clock = clock
        self._policy = AdmissionPolicy(config)
        self.queue = RequestQueue(config, self._policy)
        self.running: list[Sequence] = []
        """Least recently scheduled first: that is the rotation."""
        self.sequences: dict[RequestId, Sequence] = {}
        """All that are not over."""
        self._resuming: dict[int, Sequence] = {}
        """Swap-ins under way: the sequence holds row and blocks and runs once its copy is there."""
        self._draining: list[Sequence] = []
        """Over, but in a step in flight: their memory is held until that step is over."""
        self._held_rows: list[tuple[int, int]] = []
        """(step, row) of victims that are in a step in flight."""
        self._promises: dict[BlockKey, Sequence] = {}
        """Blocks that a running sequence is going to compute, so that others may wait for them."""
        self._in_flight: deque[Flight] = deque()
        self._retries: deque[list[Sequence]] = deque()
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._outputs: list[TokenOutput] = []
        self._results: list[GenerationResult] = []
        self.token_gaps: dict[float, int] = {}
        """Seconds between a sequence's tokens -> how often, since the engine last took them."""
        self._next_order = 0
        self._next_step = 0
        self._applied_step = -1
        self._last_prefill_step = -1
        self._batch_is_open = True

    # ------------------------------------------------------------------ requests come and go

    def check(self, sequence: Sequence) -> None:
        """Refuses what can never run, saying both numbers, and what the queue has no room for."""
        prompt, vocabulary = sequence.request.prompt, self.info.vocabulary_size
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < vocabulary:
                raise InvalidRequestError(
                    f"prompt holds token id {token}; allowed: 0 to {vocabulary - 1}", field="prompt"
                )
        longest = self.max_sequence_length
        if sequence.request.max_sequence_length is not None:
            longest = min(longest, sequence.request.max_sequence_length)
        if len(prompt) >= longest:
            raise InvalidRequestError(
                f"prompt has {len(prompt)} tokens; allowed: at most {longest - 1}, so that one new token fits "
                f"the longest sequence of {longest}; shorten it",
                field="prompt",
                code="context_length_exceeded",
            )
        if not self.config.chunked_prefill and len(prompt) > self.config.longest_whole_prompt:
            raise InvalidRequestError(
                f"prompt has {len(prompt)} tokens; allowed: at most {self.config.longest_whole_prompt} in one step; "
                "shorten it, or turn chunked_prefill on",
                field="prompt",
            )
        if sequence.request_id in self.sequences:
            raise InvalidRequestError(f"request_id {sequence.request_id} is in use", field="request_id")
        self.queue.check_room(len(prompt))

    def add(self, sequence: Sequence) -> None:
        """Takes a new request in, or raises InvalidRequestError or QueueFullError and changes nothing."""
        self.check(sequence)
        request, now = sequence.request, self._clock()
        longest = request.max_sequence_length or self.max_sequence_length
        sequence.limit = min(sequence.limit, longest, self.max_sequence_length)
        if not request.params.ignore_eos:
            sequence.stop_ids |= self.info.eos_token_ids
        sequence.order = self._next_order
        self._next_order += 1
        sequence.arrival = sequence.since = now
        if self.config.prefix_caching:
            sequence.extend_keys(self.info.block_size)
        if request.deadline is not None:
            sequence.deadline_at = now + request.deadline
            heapq.heappush(self._deadlines, (sequence.deadline_at, sequence.order, sequence))
        self.sequences[sequence.request_id] = sequence
        self.queue.push(sequence)
        self.stats.prompt_tokens += sequence.prompt_length

    def cancel(self, request_id: RequestId, reason: str | None = None) -> bool:
        """Ends a request in whatever state it is. False: it is over already, or never was."""
        sequence = self.sequences.get(request_id)
        if sequence is None:
            return False
        self._end(sequence, RequestState.CANCELLED, FinishReason.CANCELLED, reason)
        return True

    def fail_request(self, request_id: RequestId, error: str) -> bool:
        """Ends one request in error, for a cause outside the step. False: it is over already."""
        sequence = self.sequences.get(request_id)
        if sequence is None:
            return False
        self._end(sequence, RequestState.FAILED, FinishReason.ERROR, error)
        return True

    def take_outputs(self) -> tuple[list[TokenOutput], list[GenerationResult]]:
        """What happened since the last call: tokens and ends in order, and the results of those that ended."""
        outputs, results = self._outputs, self._results
        self._outputs, self._results = [], []
        return outputs, results

    @property
    def has_work(self) -> bool:
        return bool(self.sequences or self._in_flight)

    @property
    def may_plan_ahead(self) -> bool:
        """Not while a failed step is tried again in halves: each half must be seen to succeed on its own."""
        return not self._retries and not (self._in_flight and self._in_flight[-1].is_retry)

    # ------------------------------------------------------------------ planning

    def schedule(self) -> IterationPlan | None:
        """Plans one step over everything that waits and runs. None: there is nothing to do just now."""
        self._expire()
        config = self.config
        budget = TokenBudget(
            config.max_tokens_per_step, config.max_prefill_tokens, config.sequences_per_step
        )
        draft = Draft(self._next_step, budget)
        is_retry = self._plan_retry(draft)
        if not is_retry and config.prefer_pure_decode:
            self._plan_pure(draft)
        elif not is_retry:
            self._plan_mixed(draft, self.running)
        plan, sequences = draft.freeze(self.kv_cache)
        swaps_awaited = bool(self._resuming) and not self._in_flight
        if not (sequences or plan.swap_out or plan.swap_in or swaps_awaited):
            return None
        self._rotate(draft.step)
        self._next_step += 1
        self._in_flight.append(Flight(plan, sequences, draft.registered, is_retry))
        return plan

    def _plan_retry(self, draft: Draft) -> bool:
        """Plans the next half of a failed step, alone. False: there is none, or none of it can run just now."""
        while self._retries:
            group = [s for s in self._retries.popleft() if s.state is RequestState.RUNNING]
            self._plan_mixed(draft, group, may_admit=False)
            if draft.decodes or draft.prefills:
                return True
        return False

    def _plan_mixed(self, draft: Draft, sequences: list[Sequence], may_admit: bool = True) -> None:
        """A mixed step: decodes first, then prompts, both those under way and new ones."""
        may_admit = may_admit and bool(self.queue) and self._joins_open()
        places = draft.budget.sequences
        if may_admit and len(sequences) >= places and self.kv_cache.free_rows:
            # A place for arrivals, or sequences that run would keep them out for good.
            places = places - 1 if places > 1 else draft.step % 2
        decodes, prefills, num_now = self._split(sequences, places)
        self._take_decodes(draft, decodes[:num_now])
        self._plan_prompts(draft, prefills, may_admit)
        left = min(draft.budget.sequences, draft.budget.tokens)
        later = [s for s in decodes[num_now:] if s.state is RequestState.RUNNING]
        self._take_decodes(draft, later[:left])  # places that no prompt took

    def _plan_pure(self, draft: Draft) -> None:
        """Either prompts or decodes: a full round of decodes, then one step of prompts if there are any."""
        decodes, prefills, _ = self._split(self.running, len(self.running))
        may_admit = bool(self.queue) and self._joins_open()
        round_is_over = all(s.last_step > self._last_prefill_step for s in decodes)
        if round_is_over and (prefills or may_admit):
            self._plan_prompts(draft, prefills, may_admit)
        if draft.prefills:
            self._last_prefill_step = draft.step
        else:
            still_running = [s for s in decodes if s.state is RequestState.RUNNING]
            self._take_decodes(draft, still_running[: draft.budget.sequences])

    def _plan_prompts(self, draft: Draft, prefills: list[Sequence], may_admit: bool) -> None:
        """Prompts under way and new ones; they take turns at being first."""
        self._size_prefill(draft)
        if may_admit and self._arrivals_go_first(draft.step, prefills):
            self._admit(draft)
            may_admit = False
        self._continue_prefills(draft, prefills)
        if may_admit:
            self._admit(draft)

    def _split(self, sequences: list[Sequence], places: int) -> tuple[list[Sequence], list[Sequence], int]:
        """Those that need one token computed to sample the next; those with more to compute; and how many of the
        former are among the first `places` in turn."""
        decodes, prefills, num_now = [], [], 0
        for sequence in sequences:
            scheduled, target = sequence.scheduled, sequence.target
            if target >= sequence.limit:
                continue  # its last token is being sampled
            if target - scheduled == 1 and scheduled >= sequence.prompt_length:
                num_now += len(decodes) + len(prefills) < places
                decodes.append(sequence)
            else:
                prefills.append(sequence)
        return decodes, prefills, num_now

    def _take_decodes(self, draft: Draft, decodes: list[Sequence]) -> None:
        """Puts decodes into the step and gives those a block that stand at the end of theirs."""
        block_size = self.info.block_size
        draft.budget.take_decodes(len(decodes))
        draft.decodes += decodes
        growing = [
            s
            for s in decodes
            if s.scheduled % block_size == 0 and len(s.allocation.blocks) * block_size == s.scheduled  # type: ignore[union-attr]
        ]
        if len(growing) > self.kv_cache.pool.available:
            growing.sort(key=lambda s: (-s.priority, s.order))
        for sequence in growing:
            if sequence.state is RequestState.RUNNING and not self._grow(draft, sequence, 1):
                if self._may_sit_out(draft.step, sequence):
                    draft.drop(sequence)
                else:
                    self._preempt(draft, sequence)  # nobody below it: it gives way itself

    def _may_sit_out(self, step: int, sequence: Sequence) -> bool:
        """Whether memory is about to come free by itself, and the sequence can wait for it without falling behind."""
        turn = -(-len(self.running) // self.config.sequences_per_step)
        return bool(self._draining) and step - sequence.last_step <= turn

    def _grow(self, draft: Draft, sequence: Sequence, num_blocks: int) -> bool:
        """Extends a block table, preempting others below it where memory is gone."""
        allocation = sequence.allocation
        assert allocation is not None
        first = len(allocation.blocks)
        if not self.kv_cache.extend(allocation, num_blocks):
            if self._may_sit_out(draft.step, sequence):
                return False
            shortage = num_blocks - self.kv_cache.pool.available
            if not self._preempt_below(draft, sequence, shortage):
                return False
            if not self.kv_cache.extend(allocation, num_blocks):
                return False
        draft.note_tables(sequence, first)
        return True

    def _size_prefill(self, draft: Draft) -> None:
        """ADAPTIVE: no more prompt tokens than the learned cost of a step allows beside the decodes."""
        if self.config.policy is not PriorityPolicy.ADAPTIVE:
            return
        smallest = self.info.block_size
        if not self.cost_model.is_ready:
            # Not two alike: from steps of one size nothing can be learned about size.
            affordable = smallest * (1 + 2 * (draft.step % 3))
        else:
            context = sum(s.scheduled for s in draft.decodes)
            target = self.config.target_inter_token_latency
            affordable = self.cost_model.affordable_tokens(len(draft.decodes), context, target)
        draft.budget.prefill_tokens = min(draft.budget.prefill_tokens, max(affordable, smallest))

    def _continue_prefills(self, draft: Draft, prefills: list[Sequence]) -> None:
        """Gives the prompts under way their next chunk, the one that waited longest first."""
        block_size = self.info.block_size
        for sequence in prefills:
            if not draft.budget.for_prefill:
                break
            if sequence.state is not RequestState.RUNNING:
                continue  # preempted while this plan was made
            self._adopt_hits(draft, sequence)
            if self._waits_for_another(sequence, sequence.scheduled // block_size):
                continue
            allocation = sequence.allocation
            assert allocation is not None
            count = self._chunk(draft, sequence.target - sequence.scheduled)
            held = len(allocation.blocks) * block_size - sequence.scheduled
            if count > held:
                # Take what memory there is; only where there is none at all must someone give way.
                wanted = -(-(count - held) // block_size)
                wanted = min(wanted, max(self.kv_cache.pool.available, 0 if held else 1))
                if wanted and not self._grow(draft, sequence, wanted):
                    wanted = 0
                count = min(count, held + wanted * block_size)
            if count:
                self._add_prefill(draft, sequence, count)

    def _chunk(self, draft: Draft, remaining: int) -> int:
        """How many of the remaining tokens go into this step. 0: wait for a step with more room."""
        room = draft.budget.for_prefill
        if self.config.chunked_prefill:
            return min(remaining, room, self.config.max_chunk_tokens)
        if remaining > room and remaining <= self.config.longest_whole_prompt:
            return 0
        return min(remaining, room)  # a replay after preemption may be longer than a step: then it is split

    def _add_prefill(self, draft: Draft, sequence: Sequence, count: int) -> None:
        start = sequence.scheduled
        sequence.scheduled = end = start + count
        samples = end == sequence.target
        if samples:
            sequence.target += 1
        sequence.last_step = draft.step
        draft.budget.take_prefill(count)
        draft.prefills.append((sequence, start, count, samples))
        self._register(sequence, start, end, draft.registered)

    def _rotate(self, step: int) -> None:
        skipped = [s for s in self.running if s.last_step != step]
        if skipped and len(skipped) < len(self.running):
            self.running = skipped + [s for s in self.running if s.last_step == step]

    # ------------------------------------------------------------------ admission

    def _joins_open(self) -> bool:
        """Dynamic batching off: a batch is closed once its first member generates, until all are done."""
        if self.config.dynamic_batching:
            return True
        if not self.running and not self._resuming:
            self._batch_is_open = True
        elif any(s.target > s.prompt_length for s in self.running):
            self._batch_is_open = False
        first = self.queue.peek()
        return self._batch_is_open or (first is not None and first.state is RequestState.PREEMPTED)

    def _arrivals_go_first(self, step: int, prefills: list[Sequence]) -> bool:
        """New prompts and those under way take turns at the budget; who outranks a running one does not wait."""
        first = self.queue.peek()
        if first is not None and self._policy.preempts:
            if any(s.priority < first.priority for s in self.running):
                return True
        return step % 2 == 0 or not prefills

    def _admit(self, draft: Draft) -> None:
        """Admits in the order of the policy until something needed is used up."""
        passed: list[object] = []
        floor = -1
        while len(passed) < MAX_LOOKED_PAST and draft.budget.for_prefill:
            sequence = self.queue.peek()
            if sequence is None or sequence.priority <= floor:
                break
            if not self._batch_is_open and sequence.state is RequestState.PENDING:
                break
            if sequence.last_step > self._applied_step or sequence.request_id in draft.preempted:
                # A victim of this very plan, or in flight. What is behind it must outrank it to pass.
                floor = max(floor, sequence.priority)
                passed.append(self.queue.set_aside())
                continue
            if sequence.allocation is None and self._waits_for_another(sequence, self._num_hits(sequence)):
                passed.append(self.queue.set_aside())
                continue
            admitted = self._resume(draft, sequence) if sequence.allocation else self._start(draft, sequence)
            if not admitted:
                break
        for entry in passed:
            self.queue.put_back(entry)

    def _start(self, draft: Draft, sequence: Sequence) -> bool:
        """Gives a waiting sequence a row, its prefix hits and its first chunk."""
        pool, block_size = self.kv_cache.pool, self.info.block_size
        keys = sequence.keys[: self._num_hits(sequence)]
        hits = [block for key in keys if (block := pool.lookup(key)) is not None]
        start = len(hits) * block_size
        count = self._chunk(draft, sequence.target - start)
        if not count:
            return False
        needed = -(-(start + count) // block_size) - len(hits)
        needed_soon = -(-(sequence.target + 1) // block_size) - len(hits)
        taken = sum(pool.references(block) == 0 for block in hits)
        if not self._make_room(draft, sequence, needed + taken, needed_soon + taken):
            return False
        allocation = self.kv_cache.allocate(sequence.request_id, needed, hits)
        if allocation is None:
            return False
        self.queue.remove(sequence)
        sequence.allocation = allocation
        sequence.scheduled = start
        if sequence.cached_tokens is None:
            sequence.cached_tokens = start
            self.stats.prompt_tokens_cached += start
        self._join(sequence, draft.step, Phase.PREFILL)
        self._add_prefill(draft, sequence, count)
        return True

    def _resume(self, draft: Draft, sequence: Sequence) -> bool:
        """Starts the copy of a swapped-out sequence back into blocks; it runs once the copy is there."""
        allocation = sequence.allocation
        assert allocation is not None
        needed = len(allocation.swap_slots)
        if not self._make_room(draft, sequence, needed, needed + 1):
            return False
        task = self.kv_cache.swap_in(allocation, after_step=draft.step - 1)
        if task is None:
            return False
        self.queue.remove(sequence)
        draft.swap_in.append(task)
        sequence.swap_id = task.swap_id
        self._resuming[task.swap_id] = sequence
        return True

    def _make_room(self, draft: Draft, sequence: Sequence, needed: int, needed_soon: int) -> bool:
        """Whether a row and `needed` blocks are there for a waiting sequence, preempting for it where it may.

        Without preempting it starts only where all it needs soon is there beside what running prompts still need:
        a sequence that starts and is pushed out again has only cost time.
        """
        available = self.kv_cache.pool.available
        has_row = self.kv_cache.free_rows > 0
        if has_row and (available - self._still_needed() >= needed_soon or not (self.running or self._resuming)):
            return available >= needed
        if not self._policy.preempts:
            return False
        below = [s for s in self._victims(draft) if s.priority < sequence.priority]
        if not below or (not has_row and (self._held_rows or self._draining)):
            return False  # rows held by steps in flight are about to come free
        victims = choose_victims(below, sequence, needed - available, self.kv_cache.pool, self.info)
        if victims is None:
            return False
        if not has_row and not victims:
            victims = [min(below, key=lambda s: (s.priority, work_lost(s, self.info), -s.order))]
        for victim in victims:
            self._preempt(draft, victim)
        if self.kv_cache.free_rows:
            return True
        # The victim's row is in a step in flight. Next time this one is first, or the victim would be.
        self.queue.promote(sequence)
        return False

    def _still_needed(self) -> int:
        """Blocks that the prompts under way will still ask for."""
        block_size = self.info.block_size
        return sum(
            -(-(s.target + 1) // block_size) - len(s.allocation.blocks)  # type: ignore[union-attr]
            for s in self.running
            if s.target - s.scheduled > 1
        )

    def _join(self, sequence: Sequence, step: int, phase: Phase) -> None:
        sequence.state = RequestState.RUNNING
        sequence.admitted_step = step
        sequence.row_known = False
        sequence.enter(phase, self._clock())
        self.running.append(sequence)

    # ------------------------------------------------------------------ prefix hits

    def _num_hits(self, sequence: Sequence) -> int:
        """Leading blocks found in the cache. At least one token is left to compute: it gives the logits."""
        hits = 0
        for key in sequence.keys[: self._max_hits(sequence)]:
            if self.kv_cache.pool.lookup(key) is None:
                break
            hits += 1
        return hits

    def _max_hits(self, sequence: Sequence) -> int:
        if not self.config.prefix_caching or sequence.request.params.prompt_logprobs is not None:
            return 0
        return min(len(sequence.keys), (len(sequence.tokens) - 1) // self.info.block_size)

    def _adopt_hits(self, draft: Draft, sequence: Sequence) -> None:
        """Takes over blocks that another sequence has filled, or fills in this step, since the last chunk."""
        allocation, block_size = sequence.allocation, self.info.block_size
        assert allocation is not None
        first = len(allocation.blocks)
        while sequence.scheduled == len(allocation.blocks) * block_size:
            index = len(allocation.blocks)
            block = None
            if index < self._max_hits(sequence):
                block = self.kv_cache.pool.lookup(sequence.keys[index])
            if block is None:
                break
            self.kv_cache.adopt(allocation, block)
            sequence.scheduled += block_size
        draft.note_tables(sequence, first)

    def _waits_for_another(self, sequence: Sequence, index: int) -> bool:
        """Whether the block it needs next is going to be computed by a running sequence that it gives way to.

        Only by one it gives way to: the other can then always push it out, so the two never wait for each other.
        """
        if index >= self._max_hits(sequence):
            return False
        if sequence.allocation and len(sequence.allocation.blocks) > index:
            return False
        owner = self._promises.get(sequence.keys[index])
        return owner is not None and owner is not sequence and is_below(sequence, owner)

    def _register(
        self, sequence: Sequence, start: int, end: int, registered: list[tuple[int, BlockKey]] | None
    ) -> None:
        """Makes the blocks findable that are full at `end`, and promises those that come later."""
        if not self.config.prefix_caching:
            return
        assert sequence.allocation is not None
        block_size, blocks = self.info.block_size, sequence.allocation.blocks
        for index in range(start // block_size, min(end // block_size, len(sequence.keys))):
            key = sequence.keys[index]
            if self.kv_cache.pool.register(blocks[index], key) and registered is not None:
                registered.append((blocks[index], key))
            if self._promises.get(key) is sequence:
                del self._promises[key]
        if not sequence.promised:
            sequence.promised = True
            for key in sequence.keys[end // block_size :]:
                self._promises.setdefault(key, sequence)

    def _withdraw_promises(self, sequence: Sequence) -> None:
        if sequence.promised:
            sequence.promised = False
            for key in sequence.keys:
                if self._promises.get(key) is sequence:
                    del self._promises[key]

    # ------------------------------------------------------------------ preemption and the end

    def _victims(self, draft: Draft) -> list[Sequence]:
        """Running sequences that have made progress since they were admitted and are not final in this plan."""
        return [s for s in self.running if s.admitted_step <= s.last_step < draft.step]

    def _preempt_below(self, draft: Draft, sequence: Sequence, shortage: int) -> bool:
        below = [s for s in self._victims(draft) if is_below(s, sequence)]
        victims = choose_victims(below, sequence, shortage, self.kv_cache.pool, self.info)
        if victims is None:
            return False
        for victim in victims:
            self._preempt(draft, victim)
        return True

    def _preempt(self, draft: Draft, sequence: Sequence) -> None:
        """Takes a running sequence's memory away, by copying it out or by dropping it, and lets it wait again."""
        allocation = sequence.allocation
        assert allocation is not None
        draft.drop(sequence)
        self.running.remove(sequence)
        self._withdraw_promises(sequence)
        self.kv_cache.truncate(allocation, -(-sequence.scheduled // self.info.block_size))
        swap = None
        if prefers_swap(sequence, self.config.preemption, self.kv_cache, self.info):
            # NOTE: the sequence may be in the step in flight; the copy is made after it.
            swap = self.kv_cache.swap_out(allocation, after_step=draft.step - 1)
        if swap is not None:
            task, row = swap
            draft.swap_out.append(task)
            sequence.swap_id = task.swap_id
            self.stats.preemptions_by_swap += 1
        else:
            freed_row = self.kv_cache.free(allocation)
            assert freed_row is not None
            row = freed_row
            self._forget_computed(sequence)
            self.stats.preemptions_by_recompute += 1
        self._give_row_back(sequence, row)
        if self.config.prefix_caching:
            sequence.extend_keys(self.info.block_size)
        sequence.state = RequestState.PREEMPTED
        sequence.preemptions += 1
        sequence.enter(Phase.WAITING, self._clock())
        self.queue.push(sequence)
        draft.preempted.append(sequence.request_id)

    def _forget_computed(self, sequence: Sequence) -> None:
        sequence.allocation = None
        sequence.computed = sequence.scheduled = 0
        sequence.admitted_step = NEVER

    def _give_row_back(self, sequence: Sequence, row: int) -> None:
        """A row is given to another only when no step in flight uses it."""
        if sequence.last_step > self._applied_step:
            self._held_rows.append((sequence.last_step, row))
        else:
            self.kv_cache.free_row(row)

    def _end(
        self, sequence: Sequence, state: RequestState, reason: FinishReason, error: str | None = None
    ) -> None:
        """Ends a request, once, from any state, with everything it holds given back."""
        if sequence.queue_entry is not None:
            self.queue.remove(sequence)
        elif sequence.state is RequestState.RUNNING:
            self.running.remove(sequence)
        elif sequence.swap_id is not None:
            self._resuming.pop(sequence.swap_id, None)
        self._withdraw_promises(sequence)
        sequence.state, sequence.finish_reason, sequence.error = state, reason, error
        sequence.enter(Phase.WAITING, self._clock())
        del self.sequences[sequence.request_id]
        if sequence.allocation is not None:
            if sequence.allocation.row is not None and sequence.last_step > self._applied_step:
                self._draining.append(sequence)
            else:
                self._release(sequence)
        self._results.append(sequence.result())
        if reason in (FinishReason.CANCELLED, FinishReason.ERROR):
            length = len(sequence.tokens)
            self._outputs.append(
                TokenOutput(sequence.request_id, None, "", None, True, reason, length)
            )

    def _release(self, sequence: Sequence) -> None:
        assert sequence.allocation is not None
        row = self.kv_cache.free(sequence.allocation)
        sequence.allocation = None
        if row is not None:
            self.kv_cache.free_row(row)

    def _release_what_is_over(self) -> None:
        """Frees what was held for steps that are now applied."""
        applied = self._applied_step
        if self._draining:
            over = [s for s in self._draining if s.last_step <= applied]
            self._draining = [s for s in self._draining if s.last_step > applied]
            for sequence in over:
                self._release(sequence)
        if self._held_rows:
            held, self._held_rows = self._held_rows, []
            for step, row in held:
                if step <= applied:
                    self.kv_cache.free_row(row)
                else:
                    self._held_rows.append((step, row))

    def _expire(self) -> None:
        """Ends what is past its deadline, wherever it is."""
        deadlines = self._deadlines
        if not deadlines:
            return
        now = self._clock()
        while deadlines and deadlines[0][0] <= now:
            sequence = heapq.heappop(deadlines)[2]
            if not sequence.state.is_over:
                waited = now - sequence.arrival
                self._end(
                    sequence,
                    RequestState.CANCELLED,
                    FinishReason.CANCELLED,
                    f"deadline of {sequence.request.deadline:g} s passed after {waited:.3f} s",
                )
        if len(deadlines) > 64 and len(deadlines) > 4 * len(self.sequences):
            self._deadlines = [entry for entry in deadlines if not entry[2].state.is_over]
            heapq.heapify(self._deadlines)

    @property
    def next_deadline(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    # ------------------------------------------------------------------ what came back

    def apply(self, plan: IterationPlan, result: StepResult, seconds: float | None = None) -> None:
        """Commits a step that succeeded. `seconds` it took, where the engine measured it."""
        flight = self._in_flight.popleft()
        assert flight.plan is plan, "steps are applied in the order they were planned"
        self._applied_step = plan.step
        now = self._clock()
        sequences = flight.sequences
        expected = plan.num_decodes + sum(plan.samples[plan.num_decodes :])
        assert len(result.tokens) == expected, f"{len(result.tokens)} tokens for {expected} samples"
        tokens = iter(result.tokens)
        logprobs = iter(result.logprobs or ())
        ended = False
        for sequence, start, count, samples in zip(
            sequences, plan.starts, plan.counts, plan.samples, strict=True
        ):
            token = next(tokens) if samples else -1
            logprob = next(logprobs, None) if samples else None
            if sequence.finish_reason is not None:
                continue  # it ended while the step was in flight: the token is discarded
            if sequence.admitted_step <= plan.step:
                sequence.computed = start + count
            if samples:
                ended |= self._take_token(sequence, token, logprob, now)
        if ended:
            self.running = [s for s in self.running if s.finish_reason is None]
        self._finish_swaps(result)
        self._release_what_is_over()
        self._account(flight, seconds)

    def _take_token(self, sequence: Sequence, token: int, logprob: float | None, now: float) -> bool:
        """Appends a sampled token; True where it ends its request."""
        tokens = sequence.tokens
        tokens.append(token)
        length = len(tokens)
        if logprob is not None:
            sequence.logprobs.append(logprob)
        if sequence.first_token_at is None:
            sequence.first_token_at = now
            target = sequence.request.ttft_target
            if target is not None and now - sequence.arrival > target:
                self.stats.ttft_targets_missed += 1
        else:
            sequence.decode_steps += 1
            gap = now - sequence.last_token_at
            self.token_gaps[gap] = self.token_gaps.get(gap, 0) + 1
        sequence.last_token_at = now
        if sequence.phase is Phase.PREFILL:
            sequence.enter(Phase.DECODE, now)
        reason = None
        if token in sequence.stop_ids and length >= sequence.min_length:
            is_eos = token in self.info.eos_token_ids and not sequence.request.params.ignore_eos
            reason = FinishReason.END_OF_SEQUENCE if is_eos else FinishReason.STOP
        elif length >= sequence.limit:
            reason = FinishReason.LENGTH
        self._outputs.append(
            TokenOutput(sequence.request_id, token, "", logprob, reason is not None, reason, length)
        )
        if sequence.computed % self.info.block_size == 0 and sequence.computed and sequence.allocation:
            self._cache_generated(sequence)
        if reason is None:
            return False
        if sequence.state is RequestState.RUNNING:
            # `running` is filtered once for all that end in this step.
            sequence.state = RequestState.COMPLETED
        self._end(sequence, RequestState.COMPLETED, reason)
        return True

    def _cache_generated(self, sequence: Sequence) -> None:
        """A block that decoding filled is found by its content from now on: its tokens are known at last."""
        if self.config.prefix_caching and not sequence.allocation.is_swapped:  # type: ignore[union-attr]
            sequence.extend_keys(self.info.block_size)
            start = sequence.computed - self.info.block_size
            self._register(sequence, start, sequence.computed, None)

    def _account(self, flight: Flight, seconds: float | None) -> None:
        plan, stats = flight.plan, self.stats
        num_tokens = plan.num_tokens
        stats.steps += 1
        stats.tokens_computed += num_tokens
        if seconds is not None and self.config.policy is PriorityPolicy.ADAPTIVE and num_tokens:
            context = sum(plan.starts) + num_tokens
            self.cost_model.learn(num_tokens - plan.num_decodes, num_tokens, context, seconds)

    def _finish_swaps(self, result: StepResult) -> None:
        """Books copies that are over. One that failed costs a recompute, nothing else."""
        for swap_id in (*result.finished_swaps, *result.failed_swaps):
            self.kv_cache.finish_swap(swap_id)
            resumed = self._resuming.pop(swap_id, None)
            failed = swap_id in result.failed_swaps
            self.stats.swaps_failed += failed
            if resumed is not None:
                resumed.swap_id = None
                if failed:
                    resumed.computed = resumed.scheduled = 0
                self._join(resumed, self._next_step, Phase.PREFILL if failed else Phase.DECODE)
                if not failed:
                    self._register(resumed, 0, resumed.computed, None)
            elif failed:
                self._drop_swapped(swap_id)

    def _drop_swapped(self, swap_id: int) -> None:
        """The copy out failed: its sequence, if it still waits for it, is computed again."""
        for sequence in self.queue:
            if sequence.swap_id == swap_id and sequence.allocation is not None:
                self.kv_cache.free(sequence.allocation)
                sequence.swap_id = None
                self._forget_computed(sequence)
                return

    def fail(self, result: StepResult, behind: Iterable[StepResult] = ()) -> None:
        """Rolls back the oldest step in flight, which failed, and all behind it, whose results are discarded.

        Requests that the failure belongs to end; the rest is planned again. A failure that belongs to nobody is
        tried once more in halves, and ends the requests of the half that fails again.
        """
        failed = self._in_flight[0]
        self.stats.steps_failed += 1
        self._roll_back()
        for step_result in (result, *behind):
            self._finish_swaps(step_result)
        culprits = [self.sequences[rid] for rid in result.errors if rid in self.sequences]
        for sequence in culprits:
            self._end(
                sequence, RequestState.FAILED, FinishReason.ERROR, result.errors[sequence.request_id]
            )
        if culprits:
            return
        message = result.error or "; ".join(result.errors.values())
        alive = [s for s in failed.sequences if s.finish_reason is None]
        if failed.is_retry:
            for sequence in alive:
                self._end(sequence, RequestState.FAILED, FinishReason.ERROR, message)
        else:
            half = (len(alive) + 1) // 2
            self._retries.extend(part for part in (alive[:half], alive[half:]) if part)

    def _roll_back(self) -> None:
        """Back to what was committed. Rows are sent anew, since nobody knows what the backend still has."""
        block_size = self.info.block_size
        touched = {s.request_id: s for flight in self._in_flight for s in flight.sequences}
        touched.update((s.request_id, s) for s in self.running)
        for flight in self._in_flight:
            for block, key in flight.registered:
                self.kv_cache.pool.forget(block, key)
        self._in_flight.clear()
        self._applied_step = self._next_step - 1
        for sequence in touched.values():
            if sequence.finish_reason is not None:
                continue
            sequence.scheduled = sequence.computed
            sequence.target = len(sequence.tokens)
            sequence.row_known = False
            self._withdraw_promises(sequence)
            if sequence.allocation is not None:
                self.kv_cache.truncate(sequence.allocation, -(-sequence.computed // block_size))
                if sequence.allocation.row is None and not sequence.allocation.is_swapped:
                    self._forget_computed(sequence)
        self._release_what_is_over()

    # ------------------------------------------------------------------ for tests

    def check_integrity(self) -> None:
        """Raises AssertionError where blocks, rows, swap space or requests do not add up."""
        draining_rows = [row for _, row in self._held_rows]
        self.kv_cache.check_integrity(draining_rows)
        self.queue.check_integrity()
        waiting = {s.request_id for s in self.queue}
        running = {s.request_id for s in self.running}
        resuming = {s.request_id for s in self._resuming.values()}
        assert len(running) == len(self.running), "a sequence runs twice"
        assert not (waiting & running or waiting & resuming or running & resuming), "a request is in two places"
        assert waiting | running | resuming == self.sequences.keys(), "a request was lost"
        for sequence in self.running:
            held = len(sequence.allocation.blocks) * self.info.block_size  # type: ignore[union-attr]
            assert sequence.computed <= sequence.scheduled <= held, "more is scheduled than there are blocks for"
        assert all(a.plan.step + 1 == b.plan.step for a, b in pairwise(self._in_flight)), "a step is missing"
        assert set(self._promises.values()) <= set(self.running), "a promise of a sequence that does not run"
