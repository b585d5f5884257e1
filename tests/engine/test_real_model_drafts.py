"""The default model with and without draft tokens: the same tokens and logprobs, bit by bit, for every parameter and
batch.

The prompts repeat themselves, so that many draft tokens are accepted. Their number depends on the cost of a row, which
differs between processors. Tests that count draft tokens set this cost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from test_cpu_company import SHAPE
from test_real_model import Model, run
from test_real_model_tiers import make_engine

from weft.backends.cpu.runner import CpuBackend, open_cpu_backend, open_native
from weft.config import KvCachePoolConfig, PreemptionMode, SchedulerConfig, ServingEngineConfig
from weft.engine.serving import ServingEngine
from weft.loading.checkpoint import open_checkpoint
from weft.loading.pull import pull
from weft.loading.random_checkpoint import random_checkpoint
from weft.plan import BackendInfo, IterationPlan
from weft.request import GenerationResult, InferenceRequest, SamplingParams
from weft.text.tokenizer import Tokenizer

NEW_TOKENS = 20
FREE_ROWS = 1e6
EXPENSIVE_ROWS = 1e-3
"""Arguments of `set_step_cost`."""
COLOURS = "red, blue, green, amber, grey, black, white, brown, "
TEXTS = [
    COLOURS * 3,
    "for i in range(10):\n    print(i)\n" * 3 + "for i in",
    "one two three four five six seven eight " * 3 + "one",
    "The cat sat on the mat. The dog sat on the rug. The cat sat on the mat. The dog",
]
SHAPES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 1.2},
    "top_k": {"temperature": 0.9, "top_k": 12},
    "top_p": {"temperature": 0.9, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "typical_p": {"temperature": 0.8, "typical_p": 0.9},
    "xtc": {"temperature": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.1},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.05},
    "frequency and presence": {"temperature": 0.6, "frequency_penalty": 0.1, "presence_penalty": 0.05},
    "logit_bias": {"temperature": 0.0, "logit_bias": {30: -100.0, 28: 1.0}},
}


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(*open_native(open_checkpoint(pull("default")), None, 1, None))


@pytest.fixture(scope="module")
def requests(default_tokenizer: Tokenizer) -> list[InferenceRequest]:
    """Twenty requests: every shape on two texts. The last two are replaced by ones with stop tokens, with and without
    min_tokens."""
    encoded = [tuple(default_tokenizer.encode(text)) for text in TEXTS]
    common: dict[str, Any] = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 2}
    made = [
        InferenceRequest(
            encoded[(number + turn) % len(TEXTS)], SamplingParams(seed=number, **common, **shape)
        )
        for turn in range(2)
        for number, shape in enumerate(SHAPES.values())
    ]
    (black,) = set(default_tokenizer.encode(" black")[-1:])
    for index, least in ((18, 0), (19, 14)):
        stopped = SamplingParams(temperature=0.0, stop_token_ids=(black,), min_tokens=least, **common)
        made[index] = InferenceRequest(encoded[0], stopped)
    return made


@pytest.fixture(scope="module")
def plain(model: Model, requests: list[InferenceRequest]) -> list[GenerationResult]:
    """The results without draft tokens."""
    engine = make_engine(model, None, blocks=256, max_running=32, max_draft_tokens=0)
    results = run(engine, requests)
    assert engine.stats()[0].tokens_drafted == 0
    engine.stop()
    return results


def assert_same(results: Sequence[GenerationResult], plain: Sequence[GenerationResult]) -> None:
    assert [result.tokens for result in results] == [result.tokens for result in plain]
    assert [result.logprobs for result in results] == [result.logprobs for result in plain]
    assert [result.finish_reason for result in results] == [result.finish_reason for result in plain]


def assert_drafted(engine: ServingEngine) -> None:
    """Some draft tokens were accepted, some rejected, and no step failed."""
    stats = engine.stats()[0]
    assert 0 < stats.drafts_accepted < stats.tokens_drafted
    assert stats.steps_failed == 0
    engine.stop()


def set_step_cost(monkeypatch: pytest.MonkeyPatch, fixed_cost_rows: float) -> None:
    """Sets the fixed cost of a step, in rows, of all backends that are built later."""
    allocate = CpuBackend.allocate

    def stated(self: CpuBackend, *args: Any, **options: Any) -> BackendInfo:
        return dataclasses.replace(allocate(self, *args, **options), fixed_cost_rows=fixed_cost_rows)

    monkeypatch.setattr(CpuBackend, "allocate", stated)


def test_every_request_alone_gets_the_same_tokens_in_fewer_steps(
    model: Model,
    requests: list[InferenceRequest],
    plain: list[GenerationResult],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_step_cost(monkeypatch, FREE_ROWS)
    engine = make_engine(model, None, blocks=64)
    accepted = []
    for request, expected in zip(requests, plain, strict=True):
        before = engine.stats()[0]
        assert_same(run(engine, [request]), [expected])
        after = engine.stats()[0]
        accepted.append(after.drafts_accepted - before.drafts_accepted)
        num_steps = after.steps - before.steps
        assert num_steps == len(expected.tokens) - accepted[-1], "each accepted draft token saves a step"
    assert sum(accepted) > 0.3 * sum(len(one.tokens) for one in plain), accepted
    is_drawn = [request.params.temperature > 0.0 for request in requests]
    assert sum(n for n, drawn in zip(accepted, is_drawn, strict=True) if drawn) > 0, (
        "also for random sampling"
    )
    assert plain[18].tokens[-1] in requests[18].params.stop_token_ids and len(plain[18].tokens) < NEW_TOKENS
    assert_drafted(engine)


def test_no_draft_tokens_are_made_if_a_row_costs_as_much_as_a_step(
    model: Model,
    requests: list[InferenceRequest],
    plain: list[GenerationResult],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_step_cost(monkeypatch, EXPENSIVE_ROWS)
    engine = make_engine(model, None, blocks=64)
    assert_same(run(engine, requests[:1]), plain[:1])
    stats = engine.stats()[0]
    assert stats.tokens_drafted == 0 and stats.steps == NEW_TOKENS
    engine.stop()


@pytest.mark.parametrize(("count", "cost"), [(8, "measured"), (8, "free rows"), (20, "free rows")])
def test_in_a_batch_every_request_gets_the_same_tokens(
    model: Model,
    requests: list[InferenceRequest],
    plain: list[GenerationResult],
    count: int,
    cost: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With free rows every sequence has draft tokens in nearly every step. With the measured cost of this machine, the
    number of draft tokens is unknown and not checked."""
    if cost == "free rows":
        set_step_cost(monkeypatch, FREE_ROWS)
    engine = make_engine(model, None, blocks=256, max_running=32)
    plans = watched(engine)
    assert_same(run(engine, requests[:count]), plain[:count])
    if cost == "free rows":
        having = {rid for plan in plans for rid in plan.request_ids[plan.num_decodes : plan.first_prefill]}
        assert len(having) > 0.7 * count, "too few requests had draft tokens"
        assert max(len(plan.drafts) for plan in plans) > count // 3
        assert_drafted(engine)
    engine.stop()


def watched(engine: ServingEngine) -> list[IterationPlan]:
    plans: list[IterationPlan] = []
    submit = engine._backend.submit

    def watched_submit(plan: IterationPlan) -> Any:
        plans.append(plan)
        return submit(plan)

    engine._backend.submit = watched_submit  # type: ignore[method-assign]
    return plans


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_in_chunks_and_after_preemption_every_request_gets_the_same_tokens(
    model: Model,
    requests: list[InferenceRequest],
    plain: list[GenerationResult],
    mode: PreemptionMode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_step_cost(monkeypatch, FREE_ROWS)
    engine = make_engine(
        model,
        None,
        blocks=40,
        swap_blocks=64,
        max_running=32,
        preemption=mode,
        max_chunk_tokens=7,
        max_prefill_tokens=40,
        max_tokens_per_step=72,
    )
    assert_same(run(engine, requests[8:]), plain[8:])
    stats = engine.stats()[0]
    by_swap, by_recompute = stats.preemptions_by_swap, stats.preemptions_by_recompute
    assert by_swap > 0 if mode is PreemptionMode.SWAP else by_recompute > 0 and by_swap == 0
    assert stats.drafts_accepted > 0 and stats.steps_failed == 0
    engine.stop()


def test_with_prefix_hits_in_blocks_filled_by_draft_tokens_every_request_gets_the_same_tokens(
    model: Model,
    requests: list[InferenceRequest],
    plain: list[GenerationResult],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_step_cost(monkeypatch, FREE_ROWS)
    engine = make_engine(model, None, blocks=256, prefix_caching=True)
    assert_same(run(engine, requests[:1]), plain[:1])
    assert engine.stats()[0].drafts_accepted > 8, "too few draft tokens were accepted to fill blocks"
    # A greedy answer continues in the same way from its own text. Its blocks were filled by draft tokens.
    longer = InferenceRequest(requests[0].prompt + plain[0].tokens[:16], requests[0].params)
    bare = make_engine(model, None, blocks=256, max_draft_tokens=0)
    (expected,) = run(bare, [longer])
    bare.stop()
    (found,) = run(engine, [longer])
    assert found.cached_token_count > len(requests[0].prompt)
    assert_same([found], [expected])
    again = run(engine, requests[:8])
    assert_same(again, plain[:8])
    assert any(result.cached_token_count > 16 for result in again)
    assert_drafted(engine)


@pytest.mark.parametrize("bits", [8, 4])
def test_with_two_tiers_every_request_gets_the_same_tokens(
    model: Model, requests: list[InferenceRequest], bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = [requests[index] for index in (0, 1, 4, 7, 8, 18)]
    bare = make_engine(model, bits, max_draft_tokens=0)
    expected = run(bare, some)
    bare.stop()
    set_step_cost(monkeypatch, FREE_ROWS)
    engine = make_engine(model, bits)
    assert_same([run(engine, [request])[0] for request in some], expected)
    assert_drafted(engine)
    engine = make_engine(model, bits, blocks=24, store_blocks=40, swap_blocks=64, max_chunk_tokens=16)
    assert_same(run(engine, some), expected)
    assert_drafted(engine)


def test_numpy_has_no_draft_tokens_because_its_results_depend_on_the_batch() -> None:
    backend = open_cpu_backend(random_checkpoint(SHAPE), dtype=np.float32)
    assert backend.allocate(KvCachePoolConfig(num_blocks=4, block_size=8), 1).fixed_cost_rows == 0.0
    backend.close()


def test_numpy_gives_the_same_tokens_with_and_without_draft_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model in float64, where the order of summation cannot change a token. Draft tokens are forced on."""
    set_step_cost(monkeypatch, FREE_ROWS)
    requests = [
        InferenceRequest(
            tuple(range(60 + number, 70 + number)) * 2,
            SamplingParams(
                temperature=0.5 * (number % 2), seed=number, max_tokens=60, ignore_eos=True, logprobs=1
            ),
        )
        for number in range(4)
    ]
    found = []
    for most in (0, 11):
        config = ServingEngineConfig(
            scheduler=SchedulerConfig(max_draft_tokens=most),
            cache=KvCachePoolConfig(num_blocks=64, block_size=8),
        )
        backend = open_cpu_backend(random_checkpoint(SHAPE), dtype=np.float64)
        engine = ServingEngine(backend, config)
        found.append([run(engine, [request])[0] for request in requests])
        assert (engine.stats()[0].drafts_accepted > 0) is (most > 0)
        engine.stop()
    for bare, drafted in zip(*found, strict=True):
        assert bare.tokens == drafted.tokens
        values = [[one.logprob for one in result.logprobs or ()] for result in (bare, drafted)]
        np.testing.assert_allclose(*values, rtol=0, atol=1e-10)
