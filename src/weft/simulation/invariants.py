"""Invariants of every plan, of every request, and of the end of a run."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Listing

from weft.backends.noop_model import ToyGrammar, generate_alone, score_alone
from weft.config import PriorityPolicy
from weft.plan import IterationPlan
from weft.request import (
    FinishReason,
    GenerationResult,
    InferenceRequest,
    Priority,
    RequestId,
    RequestState,
    TokenLogprobs,
    TokenOutput,
)
from weft.scheduling.answer_index import END, LENGTHS, PROMPT_TOKENS, RESUMED_LENGTHS
from weft.scheduling.policy import OVERTAKING_FACTOR
from weft.scheduling.scheduler import ContinuousBatchScheduler
from weft.scheduling.sequence import Sequence
from weft.simulation.require import require
from weft.simulation.tier_invariants import check_tiers


class PlanChecker:
    """Checks every plan when it is submitted: the scheduler is then in the state after planning."""

    def __init__(self, scheduler: ContinuousBatchScheduler) -> None:
        self._scheduler = scheduler
        self._running_counts: list[int] = []
        """How many sequences were running after each step was planned."""
        self._last_token_step: dict[RequestId, int] = {}
        """The last step that computed a token of each decoding request."""
        self._preempted_before: tuple[RequestId, ...] = ()
        self._last_ran: dict[RequestId, int] = {}
        """The last step of each request, before the current plan."""
        self._resident: set[RequestId] = set()
        """Requests that were running or being swapped in after the previous plan."""
        self._salts: dict[int, str] = {}
        """Block -> the cache salt of the request that filled it."""
        self._unfinished: dict[RequestId, Sequence] = {}
        self._answers: dict[str, list[Sequence]] = {}
        """Completed sequences, by cache salt. Only where the scheduler keeps answers for draft tokens."""
        self._newest_answers: dict[str, list[Sequence]] = {}
        """Of `_answers`, those that ended last and are long enough for the index."""
        self.preemptions = 0
        self.num_forced = 0
        """Forced draft tokens."""
        self.passed = 0
        """How often a waiting request was overtaken by a shorter one that arrived later."""

    def reset_rotation(self) -> None:
        """Called when a step failed or is retried in halves. Clears `_last_token_step`: the rotation starts anew."""
        self._last_token_step.clear()

    def check(self, plan: IterationPlan) -> None:
        self._check_budgets(plan)
        if self._scheduler.config.max_learned_bytes and self._scheduler.info.fixed_cost_rows:
            self._note_answers()
            self._check_answers()
        if plan.drafts:
            self._check_drafts(plan)
        if self._scheduler.is_retrying:
            self.reset_rotation()
        else:
            self._check_rotation(plan)
        if plan.preempted:
            self._check_victims(plan)
        self._check_order(plan)
        self._check_overtaking(plan)
        self._check_sharing(plan)
        if self._scheduler.info.store_blocks:
            check_tiers(plan, self._scheduler)
        if not self._scheduler.config.dynamic_batching:
            self._check_batch_is_closed(plan)
        self._preempted_before = plan.preempted
        residents = (*self._scheduler.running, *self._scheduler.paused, *self._scheduler.resuming)
        self._resident = {sequence.request_id for sequence in residents}
        self._last_ran.update(dict.fromkeys(plan.request_ids, plan.step))
        self.preemptions += len(plan.preempted)

    def _check_budgets(self, plan: IterationPlan) -> None:
        config = self._scheduler.config
        prompts = plan.counts[plan.first_prefill :]
        require(len(set(plan.rows)) == len(plan.rows), "a row occurs twice in one step")
        require(len(plan.rows) <= config.sequences_per_step, "too many sequences in a step")
        require(plan.num_tokens <= config.max_tokens_per_step, "token budget exceeded")
        require(sum(prompts) <= config.max_prefill_tokens, "prefill budget exceeded")
        require(all(count > 0 for count in plan.counts), "an entry has no tokens")
        if config.chunked_prefill:
            require(all(c <= config.max_chunk_tokens for c in prompts), "a chunk is too long")
        if config.prefer_pure_decode:
            require(not (plan.first_prefill and prompts), "a step is mixed although prefer_pure_decode is on")

    def _check_drafts(self, plan: IterationPlan) -> None:
        """Draft tokens follow the last known token of their sequence, and each could become part of the answer."""
        scheduler = self._scheduler
        for task in plan.decode_tasks[plan.num_decodes :]:
            sequence, name = scheduler.sequences[task.request_id], f"request {task.request_id}"
            end = task.position + 1 + len(task.drafts)
            require(
                0 < len(task.drafts) <= scheduler.config.max_draft_tokens,
                f"{name} has too many draft tokens, or none",
            )
            require(
                task.position + 1 == len(sequence.tokens),
                f"{name} has draft tokens after a token that is not known",
            )
            require(
                end < sequence.limit,
                f"{name} has draft tokens up to position {end}, and ends at {sequence.limit}",
            )
            forced = _forced(sequence, scheduler)[: len(task.drafts)]
            require(
                task.drafts[: len(forced)] == forced,
                f"{name} has the draft tokens {task.drafts}, and its grammar forces {forced}",
            )
            self.num_forced += len(forced)
            if len(forced) == len(task.drafts):
                continue
            require(
                _continues_a_match(sequence, task.drafts) or self._continues_an_answer(sequence, task.drafts),
                f"{name} has draft tokens that follow neither its own text, nor its prediction, nor an answer with its salt",
            )

    def _note_answers(self) -> None:
        """Adds the sequences that completed since the last plan to `_answers` and `_newest_answers`."""
        newest: dict[str, list[Sequence]] = {}
        for sequence in list(self._unfinished.values()):
            if sequence.finish_reason is not None:
                del self._unfinished[sequence.request_id]
                if sequence.state is RequestState.COMPLETED:
                    salt = sequence.request.cache_salt
                    self._answers.setdefault(salt, []).append(sequence)
                    num_tokens = len(sequence.tokens) - max(0, sequence.prompt_length - PROMPT_TOKENS)
                    is_cut = num_tokens > self._scheduler.speculation.answers.max_text_tokens
                    if len(sequence.tokens) - sequence.prompt_length >= LENGTHS[-1] and not is_cut:
                        newest.setdefault(salt, []).append(sequence)
        self._newest_answers |= newest
        self._unfinished |= self._scheduler.sequences

    def _check_answers(self) -> None:
        """An index drops its oldest answers first. So an index that exists has one of the newest answers."""
        answers = self._scheduler._planner.speculation.answers
        if answers.num_waiting:
            return
        for salt, newest in self._newest_answers.items():
            index = answers.of(salt)
            require(
                index is None or any(index.find(_last_ngram(sequence))[0] for sequence in newest),
                f"the newest answer with the salt {salt!r} was dropped, and older ones were kept",
            )

    def _continues_an_answer(self, sequence: Sequence, drafts: Listing[int]) -> bool:
        """Whether the tokens of the match, followed by the draft tokens, occur in a completed sequence with the same
        salt. A match that was resumed is in the answer that had the mismatch."""
        proposer = sequence.draft_proposer
        if proposer is None or not proposer.is_learned:
            return False
        if proposer.match_length in RESUMED_LENGTHS:
            assert proposer._left is not None
            if END in proposer._left[proposer._left_at : proposer._first]:
                return False
        text = [*sequence.tokens[len(sequence.tokens) - proposer.match_length :], *drafts]
        return any(
            answer.tokens[index : index + len(text)] == text
            for answer in self._answers.get(sequence.request.cache_salt, ())
            for index in range(len(answer.tokens) - len(text) + 1)
        )

    def _check_rotation(self, plan: IterationPlan) -> None:
        """At most 2 x ceil(running / sequences per step) steps are between two tokens of a running sequence."""
        scheduler, step = self._scheduler, plan.step
        running = scheduler.running
        self._running_counts += [len(running)] * (step + 1 - len(self._running_counts))
        token_steps: dict[RequestId, int] = {}
        for sequence in running:
            if sequence.target <= sequence.prompt_length or sequence.target - sequence.scheduled > 1:
                continue  # in prefill, or recomputing after a preemption
            rid = sequence.request_id
            last = self._last_token_step.get(rid)
            if sequence.last_step == step or sequence.target >= sequence.limit or last is None:
                token_steps[rid] = step
            else:
                token_steps[rid] = last
            if last is not None and step - last > 1:
                most = max(self._running_counts[last : step + 1])
                allowed = 2 * -(-most // scheduler.config.sequences_per_step)
                require(
                    step - last <= allowed,
                    f"request {rid} waited {step - last} steps for a token; allowed: {allowed}",
                )
        self._last_token_step = token_steps

    def _check_victims(self, plan: IterationPlan) -> None:
        """No request is preempted while a request of lower priority could be preempted instead, and none needlessly."""
        scheduler = self._scheduler
        require(not set(plan.preempted) & set(plan.request_ids), "a preempted request is still in the plan")
        victims = [scheduler.sequences[rid] for rid in plan.preempted if rid in scheduler.sequences]
        residents = (*scheduler.running, *scheduler.paused)
        spared = [s for s in residents if self._could_be_preempted(s, plan)]
        lowest = min((s.priority for s in spared), default=Priority.CRITICAL)
        for victim in victims:
            require(
                victim.priority <= lowest,
                f"request {victim.request_id} of priority {victim.priority} was preempted, one of {lowest} was not",
            )
        by_memory_alone = scheduler.config.policy in (PriorityPolicy.FCFS, PriorityPolicy.SHORTEST_JOB_FIRST)
        if (
            by_memory_alone
            and not scheduler.config.prefix_caching
            and not scheduler.info.store_blocks
            and victims
            and not victims[-1].is_idle_work
            and victims[-1].allocation is not None
        ):
            # The last victim held its computed tokens and the block of its next position. Its spare blocks were
            # released before. If more blocks than it held are available now, its preemption was not needed.
            num_held = victims[-1].scheduled // scheduler.info.block_size + 1
            require(scheduler.kv_cache.pool.available <= num_held, "a request was preempted needlessly")

    def _could_be_preempted(self, sequence: Sequence, plan: IterationPlan) -> bool:
        has_run = self._last_ran.get(sequence.request_id, -1) >= sequence.admitted_step
        was_finishing = sequence.is_finishing and sequence.last_step < plan.step
        is_final = sequence.request_id in plan.request_ids[plan.first_prefill :]
        # `own`: blocks that the sequence held alone before this plan, and whose content is not cached. Preempting the
        # sequence would have freed them. With two tiers, this check does not know which tier lacked blocks. So the
        # sequence counts only if it has own blocks in both tiers.
        kv_cache, allocation = self._scheduler.kv_cache, sequence.allocation
        blocks = allocation.blocks if allocation is not None else []
        new = {*plan.table_blocks, *plan.moved_to}
        own = [b for b in blocks if not kv_cache.pool_of(b).is_cached(b) and b not in new]
        holds_memory = len({id(kv_cache.pool_of(b)) for b in own}) == (
            2 if self._scheduler.info.store_blocks else 1
        )
        return has_run and holds_memory and not was_finishing and not is_final

    def _check_order(self, plan: IterationPlan) -> None:
        """No request of lower priority starts in a step while a CRITICAL request waits that could have started."""
        scheduler = self._scheduler
        ranks = scheduler.config.policy in (PriorityPolicy.PRIORITY, PriorityPolicy.ADAPTIVE)
        if not ranks or scheduler.config.prefix_caching or not scheduler.config.dynamic_batching:
            return
        if plan.preempted or self._preempted_before:
            return
        if any(s.priority < Priority.CRITICAL for s in self._started(plan)):
            waiting = [
                s for s in scheduler.queue if s.priority == Priority.CRITICAL and s.last_step < plan.step - 1
            ]
            require(not waiting, "a request started while a CRITICAL one waits")

    def _check_overtaking(self, plan: IterationPlan) -> None:
        """With SHORTEST_JOB_FIRST, requests start in the order of the times until which they can be overtaken. Prefix
        sharing may let requests start out of order."""
        scheduler = self._scheduler
        if (
            scheduler.config.policy is not PriorityPolicy.SHORTEST_JOB_FIRST
            or scheduler.config.prefix_caching
        ):
            return
        started = [s for s in self._started(plan) if not s.preemptions and not s.is_idle_work]
        latest = max((_overtaken_until(s) for s in started), default=0.0)
        for waiting in scheduler.queue if started else ():
            is_next = waiting.state is RequestState.PENDING and _overtaken_until(waiting) < latest
            require(
                not is_next,
                f"request {waiting.request_id} waits, and one that can be overtaken until a later time starts",
            )
            self.passed += waiting.order < max(s.order for s in started)

    def _check_sharing(self, plan: IterationPlan) -> None:
        """Requests with different cache salts never read each other's blocks."""
        scheduler, block_size = self._scheduler, self._scheduler.info.block_size
        for task in plan.swap_in:
            salt = scheduler.sequences[task.request_id].request.cache_salt
            self._salts.update(dict.fromkeys(task.blocks, salt))
        entries = list(zip(plan.request_ids, plan.starts, plan.counts, strict=True))
        for request_id, start, count in entries:
            sequence = scheduler.sequences[request_id]
            assert sequence.allocation is not None
            table = _full_table(sequence)
            written = table[start // block_size : -(-(start + count) // block_size)]
            self._salts.update(dict.fromkeys(written, sequence.request.cache_salt))
        by_row = dict(zip(plan.rows, plan.request_ids, strict=True))
        for row, origin, block in zip(plan.moved_rows, plan.moved_from, plan.moved_to, strict=True):
            if origin != -1:
                self._salts[block] = scheduler.sequences[by_row[row]].request.cache_salt
        for request_id, start, _ in entries[plan.first_prefill :]:
            sequence = scheduler.sequences[request_id]
            assert sequence.allocation is not None
            read = {*sequence.allocation.blocks, *_full_table(sequence)[: start // block_size]}
            salt = sequence.request.cache_salt
            require(
                all(self._salts[b] == salt for b in read), "a prefix hit on a block of another cache salt"
            )

    def _check_batch_is_closed(self, plan: IterationPlan) -> None:
        """Without dynamic batching: no new request joins once a request of the batch generates."""
        if not any(s.preemptions == 0 for s in self._started(plan)):
            return
        decoding = set(plan.request_ids[: plan.first_prefill])
        for sequence in self._scheduler.running:
            generates = sequence.target > sequence.prompt_length and sequence.last_step < plan.step
            require(
                sequence.request_id not in decoding and not generates,
                "a request joined a closed batch",
            )

    def _started(self, plan: IterationPlan) -> list[Sequence]:
        """Sequences that this plan admitted from the queue and that compute in it. Sequences that are swapped in are
        not among them."""
        return [
            s
            for s in self._scheduler.running
            if s.last_step == plan.step and s.request_id not in self._resident
        ]


def _forced(sequence: Sequence, scheduler: ContinuousBatchScheduler) -> tuple[int, ...]:
    """The tokens that the grammar of a sequence forces next."""
    grammar = ToyGrammar.of(sequence.request.params, scheduler.info, sequence.generated)
    return () if grammar is None else grammar.forced()


def _overtaken_until(sequence: Sequence) -> float:
    """The time after which no shorter request that arrives can overtake this one."""
    return sequence.arrival + OVERTAKING_FACTOR * sequence.cost


def _full_table(sequence: Sequence) -> list[int]:
    """The block table without the moves of the steps in flight."""
    allocation = sequence.allocation
    assert allocation is not None
    return [allocation.leaving.get(index, block) for index, block in enumerate(allocation.blocks)]


def _last_ngram(sequence: Sequence) -> bytes:
    """The bytes of the `LENGTHS[-1]` tokens before the last one: the shortest n-gram that the answer index finds."""
    return array("i", sequence.tokens[-LENGTHS[-1] - 1 : -1]).tobytes()


def _continues_a_match(sequence: Sequence, drafts: Listing[int]) -> bool:
    """Whether the last two tokens and the draft tokens follow each other somewhere in the sequence's text or in its
    prediction. In the prediction, the draft tokens may also follow a beginning that equals the whole answer so far."""
    tokens, prediction, count = sequence.tokens, sequence.request.prediction, len(drafts)
    for index in range(len(prediction) - count + 1):
        follows = index >= 2 and list(prediction[index - 2 : index]) == tokens[-2:]
        if prediction[index : index + count] == tuple(drafts) and (
            follows or list(prediction[:index]) == sequence.generated
        ):
            return True
    text = [*tokens, *drafts]
    return any(
        text[index - 2 : index] == tokens[-2:] and text[index : index + count] == list(drafts)
        for index in range(2, len(tokens))
    )


class OutputChecker:
    """Collects the outputs of one request, and checks that each is reported once, in order, with one final output."""

    def __init__(self, request: InferenceRequest, request_id: RequestId) -> None:
        self.request = request
        self.request_id = request_id
        self.tokens: list[int] = []
        self.outputs: list[TokenOutput] = []
        self.final: TokenOutput | None = None

    def take(self, output: TokenOutput) -> None:
        self.outputs.append(output)
        require(self.final is None, f"request {self.request_id} got an output after its final one")
        require(output.request_id == self.request_id, "an output was reported to the wrong request")
        if output.token_id is not None:
            self.tokens.append(output.token_id)
            expected = len(self.request.prompt) + len(self.tokens)
            require(
                output.sequence_length == expected,
                f"sequence length is {output.sequence_length}; expected {expected}",
            )
        if output.is_final:
            self.final = output


def check_result(
    checker: OutputChecker, result: GenerationResult, sequence: Sequence, scheduler: ContinuousBatchScheduler
) -> None:
    """Checks that a request got the tokens that it gets alone on an empty engine, or a prefix of them if it ended early."""
    rid = checker.request_id
    params = checker.request.params
    alone = generate_alone(checker.request.prompt, sequence.seed, params, sequence.limit, scheduler.info)
    tokens = list(result.tokens)
    if result.state is RequestState.COMPLETED:
        require(tokens == alone, f"request {rid} got {tokens}, alone it gets {alone}")
        ended_by_length = len(sequence.request.prompt) + len(tokens) == sequence.limit
        is_stop = _is_stop(tokens, sequence)
        if result.finish_reason is FinishReason.LENGTH:
            require(ended_by_length and not is_stop, f"request {rid} did not end by length")
        else:
            require(is_stop, f"request {rid} did not end by a stop token")
    else:
        require(tokens == alone[: len(tokens)], f"request {rid} got {tokens}, alone it gets {alone}")
    _check_logprobs(checker, result, scheduler)
    accepted, rejected = result.accepted_prediction_count, result.rejected_prediction_count
    require(accepted <= len(tokens), f"request {rid} has more accepted draft tokens than tokens")
    require(
        bool(sequence.request.prediction) or not (accepted or rejected),
        f"request {rid} has draft tokens from a prediction, and none was sent",
    )
    require(
        min(result.waiting_time, result.prefill_time, result.decode_time) >= 0,
        "the time of a phase is negative",
    )


def _check_logprobs(
    checker: OutputChecker, result: GenerationResult, scheduler: ContinuousBatchScheduler
) -> None:
    """Checks that a request got the logprobs that it gets alone. Prompt logprobs are checked if it generated any token."""
    params, prompt, info = checker.request.params, list(checker.request.prompt), scheduler.info
    rid = checker.request_id
    tokens = [*prompt, *result.tokens]
    if params.logprobs is not None:
        alone = score_alone(tokens, len(prompt), params.logprobs, info)
        require(list(result.logprobs or ()) == alone, f"request {rid} got other logprobs than alone")
        reported = [
            TokenLogprobs(o.logprob or 0.0, o.top_logprobs) for o in checker.outputs if o.token_id is not None
        ]
        require(reported == alone[: len(reported)], f"request {rid} was reported other logprobs")
    if params.prompt_logprobs is not None and result.tokens:
        alone = score_alone(prompt, 1, params.prompt_logprobs, info)
        require(
            result.prompt_logprobs == (None, *alone),
            f"request {rid} got other logprobs of its prompt than alone",
        )


def _is_stop(tokens: Listing[int], sequence: Sequence) -> bool:
    has_min_tokens = len(tokens) >= sequence.request.params.min_tokens
    return bool(tokens) and tokens[-1] in sequence.stop_ids and has_min_tokens


def check_empty(scheduler: ContinuousBatchScheduler) -> None:
    """Checks that all memory is free after the last request."""
    scheduler.check_integrity()
    stats = scheduler.kv_cache.stats()
    require(stats.blocks_used == 0, f"{stats.blocks_used} blocks are still in use")
    require(stats.rows_used == 0, f"{stats.rows_used} rows are still in use")
    require(stats.swap_blocks_used == 0, f"{stats.swap_blocks_used} swap blocks are still in use")
    require(stats.store_blocks_used == 0, f"{stats.store_blocks_used} blocks of the store are still in use")
    require(stats.store_swap_blocks_used == 0, "swap blocks of the store are still in use")
    require(not scheduler.has_work, "the scheduler still has work")
