"""Steps with draft tokens, from the plan to the reported tokens: the same answer in fewer steps."""

from __future__ import annotations

from typing import Any

import pytest

from weft.clock import VirtualClock
from weft.config import PreemptionMode, SchedulerConfig
from weft.plan import BackendInfo, DecodeTask, IterationPlan, StepResult
from weft.request import (
    Failure,
    FailureKind,
    FinishReason,
    GenerationResult,
    InferenceRequest,
    RequestId,
    RequestState,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)
from weft.scheduling.scheduler import ContinuousBatchScheduler
from weft.scheduling.sequence import Sequence
from weft.scheduling.views import BatchStats, BatchType, ScheduledBatch

WRONG = 777
"""Sampled after a rejected draft token."""
LOOP = (1, 2, 3, 4, 5)


class Script:
    """A scheduler whose backend samples a given text for each request, and WRONG after a rejected draft token."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        max_context: int = 512,
        eos: frozenset[int] = frozenset(),
        tiers: dict[str, int] | None = None,
        **options: Any,
    ) -> None:
        self.clock = VirtualClock()
        self.info = BackendInfo(
            vocabulary_size=1000,
            max_context=max_context,
            num_blocks=num_blocks,
            block_size=block_size,
            swap_blocks=64,
            bytes_per_block=8,
            eos_token_ids=eos,
            fixed_cost_rows=1000.0,
            **(tiers or {}),
        )
        config = SchedulerConfig(**{"max_running": 8, **options})
        self.scheduler = ContinuousBatchScheduler(config, self.info, self.clock)
        self.texts: dict[RequestId, tuple[int, ...]] = {}
        self.outputs: dict[RequestId, list[TokenOutput]] = {}
        self.results: dict[RequestId, GenerationResult] = {}
        self.plans: list[IterationPlan] = []

    def add(
        self,
        prompt: tuple[int, ...],
        answer: tuple[int, ...],
        rate: float = 0.95,
        prediction: tuple[int, ...] = (),
        **params: Any,
    ) -> Sequence:
        request_id = RequestId(str(len(self.texts)))
        fields = {"max_tokens": len(answer), "logprobs": 0, **params}
        request = InferenceRequest(
            prompt, SamplingParams(**fields), request_id=request_id, prediction=prediction
        )
        sequence = Sequence(request, seed=1)
        self.texts[request_id] = prompt + answer
        self.scheduler.add(sequence)
        if sequence.draft_proposer is not None:
            sequence.draft_proposer.own_rate = rate
        return sequence

    def plan(self) -> IterationPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        self.plans.append(plan)
        return plan

    def result(self, plan: IterationPlan) -> StepResult:
        tokens: list[int] = []
        drafts = ((),) * plan.num_decodes + plan.drafts + ((),) * plan.num_prefills
        for entry, request_id in enumerate(plan.request_ids):
            if not plan.samples[entry]:
                continue
            text = (*self.texts[request_id], *([WRONG] * 64))
            first = plan.starts[entry] + plan.counts[entry] - len(drafts[entry])
            for number in range(len(drafts[entry]) + 1):
                is_right = drafts[entry][:number] == text[first : first + number]
                tokens.append(text[first + number] if is_right else WRONG)
        logprobs = [TokenLogprobs(-token / 8) for token in tokens]
        return StepResult(tokens=tokens, logprobs=logprobs, finished_swaps=_swaps(plan))

    def apply(self, plan: IterationPlan) -> None:
        self.clock.advance(0.01)
        self.scheduler.apply(plan, self.result(plan), 0.01)
        self.collect()

    def collect(self) -> None:
        self.scheduler.check_integrity()
        outputs, results = self.scheduler.take_outputs()
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        self.results.update((result.request_id, result) for result in results)

    def step(self) -> IterationPlan:
        plan = self.plan()
        self.apply(plan)
        return plan

    def run(self) -> Script:
        for _ in range(500):
            if not self.scheduler.has_work:
                return self
            self.step()
        raise AssertionError("some requests never end")

    def reported(self, number: int = 0) -> list[int]:
        """The reported tokens. They must be those of the result, with the right logprobs and lengths."""
        request_id = RequestId(str(number))
        outputs = self.outputs[request_id]
        tokens = [output.token_id for output in outputs if output.token_id is not None]
        prompt_length = len(self.texts[request_id]) - len(self.answer(number))
        lengths = [output.sequence_length for output in outputs if output.token_id is not None]
        assert lengths == [prompt_length + 1 + index for index in range(len(tokens))]
        assert [output.logprob for output in outputs if output.token_id is not None] == [
            -t / 8 for t in tokens
        ]
        assert [output.is_final for output in outputs] == [False] * (len(outputs) - 1) + [True]
        result = self.results[request_id]
        assert list(result.tokens) == tokens and result.logprobs is not None
        assert [one.logprob for one in result.logprobs] == [-token / 8 for token in tokens]
        return tokens

    def answer(self, number: int = 0) -> tuple[int, ...]:
        request_id = RequestId(str(number))
        result = self.results[request_id]
        return self.texts[request_id][result.prompt_token_count :]


def _swaps(plan: IterationPlan) -> tuple[int, ...]:
    return tuple(task.swap_id for task in (*plan.swap_out, *plan.swap_in))


# ---------------------------------------------------------------------- the plan


def test_a_plan_has_decodes_first_then_decodes_with_draft_tokens_and_so_do_its_views() -> None:
    script = Script(max_chunk_tokens=4)
    script.add(tuple(range(30, 40)), tuple(range(40, 60)))
    script.add(LOOP * 3, LOOP * 4)
    while not all(s.generated for s in script.scheduler.running) or len(script.scheduler.running) < 2:
        script.step()
    lengths = {s.request_id: len(s.tokens) for s in script.scheduler.running}
    plan = script.plan()
    assert plan.request_ids == ("0", "1") and plan.num_decodes == 1 and plan.first_prefill == 2
    assert plan.starts == (lengths[RequestId("0")] - 1, lengths[RequestId("1")] - 1)
    (drafts,) = plan.drafts
    assert (
        len(drafts) == 11
        and drafts == script.texts[RequestId("1")][lengths[RequestId("1")] : lengths[RequestId("1")] + 11]
    )
    assert plan.counts == (1, 12) and plan.samples == (True, True)
    assert plan.num_tokens == 13 and plan.num_samples == 13 and plan.num_prefills == 0
    assert plan.decode_tasks == [
        DecodeTask(RequestId("0"), plan.rows[0], lengths[RequestId("0")] - 1),
        DecodeTask(RequestId("1"), plan.rows[1], lengths[RequestId("1")] - 1, drafts),
    ]
    assert plan.prefill_tasks == []
    batch = ScheduledBatch(plan, script.scheduler.sequences)
    known = [sequence.tokens[-1] for sequence in script.scheduler.sequences.values()]
    assert batch.micro_batches(99)[0].token_ids() == [*known, *drafts]
    assert batch.batch_type is BatchType.DECODE
    assert batch.stats == BatchStats(sequences=2, tokens=13, prefill_tokens=0, decode_tokens=13, samples=13)
    tokens = list(batch.tokens)
    assert [token.position for token in tokens] == [
        lengths[RequestId("0")] - 1,
        *range(lengths[RequestId("1")] - 1, lengths[RequestId("1")] + 11),
    ]
    assert all(token.is_decode and token.samples for token in tokens)
    assert len(script.result(plan).tokens) == plan.num_samples


def test_a_step_with_a_prompt_has_no_draft_tokens() -> None:
    script = Script(max_chunk_tokens=4)
    script.add(LOOP * 2, LOOP * 6)
    script.step()
    while not script.step().drafts:
        pass
    script.add(tuple(range(20, 30)), (9,))
    plans = [script.step() for _ in range(3)]
    assert [plan.num_prefills for plan in plans] == [1, 1, 1]
    assert not any(plan.drafts for plan in plans)
    while not script.step().drafts:
        pass
    script.run()
    assert script.reported() == list(script.answer())


def test_a_step_that_has_only_decodes_with_draft_tokens_is_a_decode_batch() -> None:
    script = Script()
    script.add(LOOP * 2, LOOP * 4)
    script.step()
    plan = script.plan()
    assert plan.num_decodes == 0 and len(plan.drafts) == 1
    assert ScheduledBatch(plan).batch_type is BatchType.DECODE


# ---------------------------------------------------------------------- results


@pytest.mark.parametrize("num_right", range(12))
def test_the_accepted_draft_tokens_and_one_more_token_are_reported(num_right: int) -> None:
    script = Script()
    answer = (*(LOOP * 4)[: 1 + num_right], 50, 51, 52)
    sequence = script.add(LOOP * 2, answer)
    script.step()
    plan = script.step()
    assert plan.counts == (min(12, len(answer) - 1),)
    assert sequence.generated == list(answer[: 2 + num_right]), (
        "the accepted ones, and the token after the last"
    )
    assert sequence.computed == sequence.scheduled == 10 + 1 + num_right
    assert sequence.target == len(sequence.tokens)
    stats = script.scheduler.stats
    assert (stats.tokens_drafted, stats.drafts_accepted) == (len(plan.drafts[0]), num_right)
    assert stats.tokens_generated == 2 + num_right
    script.run()
    assert script.reported() == list(answer)


def test_the_answer_is_the_same_with_and_without_draft_tokens_and_takes_fewer_steps() -> None:
    answer = (*LOOP, *LOOP[:3], 60, *LOOP[3:], *LOOP, 61, 60, *LOOP[3:], *LOOP)
    steps = []
    for max_draft_tokens in (0, 1, 11):
        script = Script(max_draft_tokens=max_draft_tokens)
        script.add(LOOP * 2, answer)
        script.run()
        assert script.reported() == list(answer)
        steps.append(len(script.plans))
    assert steps[0] == len(answer) and steps[0] > steps[1] > steps[2]


@pytest.mark.parametrize("kind", ["stop", "eos"])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_draft_tokens_end_before_a_stop_token_and_nothing_is_reported_after_it(kind: str, after: int) -> None:
    """The prompt contains the stop token and tokens after it, so both could be proposed."""
    loop = (*LOOP[: 4 - after], 99, *LOOP[4 - after :])
    script = Script(eos=frozenset({99}) if kind == "eos" else frozenset())
    stops = () if kind == "eos" else (99,)
    script.add(loop * 2, loop * 2, stop_token_ids=stops, max_tokens=50)
    script.run()
    drafts = [proposed for plan in script.plans for proposed in plan.drafts]
    assert not any(99 in proposed for proposed in drafts)
    assert max(map(len, drafts), default=0) == max(0, 3 - after)
    assert script.reported() == list(loop[: loop.index(99) + 1])
    assert script.scheduler.stats.drafts_accepted == len(script.reported()) - len(script.plans)
    assert script.results[RequestId("0")].finish_reason is (
        FinishReason.STOP if kind == "stop" else FinishReason.END_OF_SEQUENCE
    )
    used = script.scheduler.kv_cache.stats()
    assert (used.rows_used, used.blocks_used) == (0, 0)


def test_before_min_tokens_a_stop_token_among_draft_tokens_does_not_end_the_answer() -> None:
    script = Script()
    loop = (1, 99, 3)
    script.add(loop * 3, loop * 5, stop_token_ids=(99,), min_tokens=7)
    script.run()
    assert script.reported() == list((loop * 5)[:8]), "the first stop after the seventh token"


@pytest.mark.parametrize("max_tokens", range(1, 16))
def test_max_tokens_is_exact(max_tokens: int) -> None:
    script = Script()
    sequence = script.add(LOOP * 2, LOOP * 4, max_tokens=max_tokens)
    script.run()
    assert script.reported() == list((LOOP * 4)[:max_tokens])
    assert script.results[RequestId("0")].finish_reason is FinishReason.LENGTH
    ends = [
        start + count for plan in script.plans for start, count in zip(plan.starts, plan.counts, strict=True)
    ]
    assert max(ends) < sequence.limit, "no position is computed after which no token can be sampled"


def test_the_longest_context_is_reached_and_not_exceeded() -> None:
    script = Script(max_context=24, num_blocks=3, block_size=8)
    script.add(LOOP * 2, LOOP * 10, max_tokens=50)
    script.run()
    assert script.reported() == list((LOOP * 10)[:14])
    assert max(plan.starts[0] + plan.counts[0] for plan in script.plans) == 23


@pytest.mark.parametrize("budget", [8, 9, 12, 19])
def test_draft_tokens_stay_within_the_token_budget(budget: int) -> None:
    script = Script(max_tokens_per_step=budget, max_prefill_tokens=8, max_running=4)
    for number in range(4):
        loop = tuple(10 * (number + 1) + digit for digit in range(5))
        script.add(loop * 2, loop * 4)
    script.run()
    assert max(plan.num_tokens for plan in script.plans) == budget
    assert any(plan.drafts for plan in script.plans)
    for number in range(4):
        assert script.reported(number) == list(script.answer(number))


def test_without_free_blocks_draft_tokens_use_the_held_blocks_and_preempt_nothing() -> None:
    # Prompts of 10 tokens in 3 blocks of 4: two positions are left in each, and no free block.
    script = Script(num_blocks=6, block_size=4, prefix_caching=False)
    first = script.add(LOOP * 2, LOOP[:2])
    second = script.add(tuple(10 + t for t in LOOP * 2), tuple(10 + t for t in LOOP[:2]))
    script.step()
    for sequence in (first, second):
        sequence.limit += 40  # both could generate much more
        script.texts[sequence.request_id] += (WRONG,)
    plan = script.plan()
    assert script.scheduler.kv_cache.available.full == 0
    assert plan.starts == (10, 10) and plan.counts == (2, 2) and [len(d) for d in plan.drafts] == [1, 1]
    assert not plan.preempted and script.scheduler.stats.preemptions_by_recompute == 0


def test_draft_tokens_allocate_free_blocks_and_rejected_ones_leave_them_for_later_tokens() -> None:
    script = Script(block_size=4)
    sequence = script.add(LOOP * 2, (1, 2, *(WRONG + n for n in range(20))))
    script.step()
    plan = script.step()
    assert plan.counts == (12,) and plan.starts == (10,) and plan.table_indices == (3, 4, 5)
    assert sequence.allocation is not None and len(sequence.allocation.blocks) == 6
    held = list(sequence.allocation.blocks)
    while len(sequence.tokens) < 23:
        plan = script.step()
        assert plan.table_rows == () and sequence.allocation.blocks == held
    script.run()
    assert script.reported() == list(script.answer())


def test_with_two_tiers_no_draft_token_completes_a_block() -> None:
    tiers = {"store_blocks": 32, "tail_blocks": 1, "bytes_per_store_block": 4, "store_swap_blocks": 32}
    script = Script(block_size=8, tiers=tiers)
    script.add(LOOP * 2, LOOP * 10)
    script.run()
    assert script.reported() == list(LOOP * 10)
    entries = [(plan.starts[0], plan.counts[0]) for plan in script.plans[1:]]
    assert any(count > 1 for _, count in entries)
    assert all(count == 1 or start % 8 + count <= 7 for start, count in entries)
    assert any(count > 1 and start % 8 + count == 7 for start, count in entries), "as many as possible"


# ---------------------------------------------------------------------- steps in flight


def test_only_a_step_with_draft_tokens_forbids_planning_ahead() -> None:
    script = Script()
    sequence = script.add(LOOP * 2, (*LOOP, 50, 51, 52, 53, 54))
    first = script.plan()
    assert script.scheduler.may_plan_ahead, "the end of a step with a prompt is known"
    script.apply(first)
    plan = script.plan()
    assert plan.drafts and not script.scheduler.may_plan_ahead
    assert sequence.scheduled == 10 + plan.counts[0] and sequence.target == sequence.scheduled + 1, (
        "as if all were accepted"
    )
    script.apply(plan)


def test_a_sequence_whose_last_token_is_being_sampled_gets_no_draft_tokens() -> None:
    script = Script()
    script.add(LOOP * 2, LOOP * 3)
    prompt = script.plan()
    later = script.plan()
    assert later.drafts == () and later.num_decodes == 1
    script.apply(prompt)
    script.apply(later)
    assert script.plan().drafts


def test_a_failed_step_with_draft_tokens_is_rolled_back_and_retried_without_them() -> None:
    script = Script(block_size=4)
    sequence = script.add(LOOP * 2, LOOP * 4)
    script.step()
    before = (sequence.computed, list(sequence.tokens))
    plan = script.plan()
    assert plan.drafts
    script.scheduler.fail(StepResult(error="of the whole step"))
    script.collect()
    assert (sequence.computed, list(sequence.tokens)) == before
    assert sequence.scheduled == sequence.computed and sequence.target == len(sequence.tokens)
    assert sequence.allocation is not None and len(sequence.allocation.blocks) == 3, (
        "no block for draft tokens is kept"
    )
    again = script.step()
    assert again.row_starts[0].tokens == (*LOOP, *LOOP, 1) and not again.drafts
    script.run()
    assert script.reported() == list(LOOP * 4)
    assert any(plan.drafts for plan in script.plans[3:])


def test_an_error_of_one_request_in_a_step_with_draft_tokens_ends_only_that_request() -> None:
    script = Script()
    script.add(LOOP * 2, LOOP * 4)
    other = tuple(10 + token for token in LOOP)
    script.add(other * 2, other * 4)
    script.step()
    plan = script.plan()
    assert len(plan.drafts) == 2
    script.scheduler.fail(StepResult(errors={RequestId("0"): Failure(FailureKind.STEP, "of one request")}))
    script.run()
    assert script.results[RequestId("0")].state is RequestState.FAILED and script.results[
        RequestId("0")
    ].tokens == (1,)
    assert script.reported(1) == list(other * 4)


@pytest.mark.parametrize("how", ["cancel", "finish"])
def test_a_request_that_ends_while_its_draft_tokens_are_in_flight_reports_none_of_them(how: str) -> None:
    script = Script()
    sequence = script.add(LOOP * 2, LOOP * 4)
    script.step()
    script.step()
    reported = list(sequence.generated)
    plan = script.plan()
    assert plan.drafts
    if how == "cancel":
        assert script.scheduler.cancel(sequence.request_id)
    else:
        assert script.scheduler.finish(sequence.request_id, 2)
        reported = reported[:2]
    script.apply(plan)
    assert list(script.results[RequestId("0")].tokens) == reported
    assert [o.is_final for o in script.outputs[RequestId("0")]].count(True) == 1 and script.outputs[
        RequestId("0")
    ][-1].is_final
    assert not script.scheduler.has_work
    used = script.scheduler.kv_cache.stats()
    assert (used.rows_used, used.blocks_used) == (0, 0)


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_sequences_with_draft_tokens_are_preempted_and_resumed(mode: PreemptionMode) -> None:
    script = Script(num_blocks=14, block_size=4, preemption=mode)
    for number in range(3):
        loop = tuple(10 * (number + 1) + digit for digit in range(5))
        script.add(loop * 2, (*loop * 3, 500 + number, *loop * 2))
    script.run()
    stats = script.scheduler.stats
    swaps, recomputes = stats.preemptions_by_swap, stats.preemptions_by_recompute
    assert (swaps if mode is PreemptionMode.SWAP else recomputes) > 0
    assert stats.drafts_accepted > 0
    for number in range(3):
        assert script.reported(number) == list(script.answer(number))


def test_a_block_filled_by_accepted_draft_tokens_is_a_prefix_hit_for_a_later_request() -> None:
    script = Script(block_size=4)
    script.add(LOOP * 2, LOOP * 3)
    script.run()
    assert script.scheduler.stats.drafts_accepted > 8
    script.add(LOOP * 4, (9,))
    script.run()
    assert script.results[RequestId("1")].cached_token_count == 16, (
        "four blocks of 20 tokens: the last token is computed"
    )


def test_a_block_with_a_rejected_draft_token_is_no_prefix_hit() -> None:
    script = Script(block_size=4)
    script.add(LOOP * 2, (1, 2, 50, 51, 52, 53, 54, 55, 56))
    script.run()
    script.add(LOOP * 4, (9,))
    script.run()
    assert script.results[RequestId("1")].cached_token_count == 12, (
        "the prompt, 1 and 2; other tokens followed"
    )
    script.add((*LOOP, *LOOP, 1, 2, 50, 51, 52, 53, 54, 55, 56, 57), (9,))
    script.run()
    assert script.results[RequestId("2")].cached_token_count == 16
