"""Prompts that get a vector instead of tokens pass the real scheduler, the engine's process and the event log."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from pathlib import Path

import pytest

from weft.backends.noop import NoopBackend
from weft.backends.noop_model import vector_of
from weft.embedding import EmbeddingSpec
from weft.engine.ipc.client import EngineClient
from weft.engine.replay import replay
from weft.engine.serving import ServingEngine
from weft.errors import InvalidRequestError
from weft.plan import IterationPlan, SwapTask
from weft.request import Failure, FailureKind, InferenceRequest, RequestId, SamplingParams

SPEC = EmbeddingSpec("embed", "mean", dimensions=8, max_tokens=64)
ONE_TOKEN = SamplingParams(max_tokens=1)
OPTIONS = {"max_context": SPEC.max_tokens + 1, "vector_size": SPEC.dimensions}


def prompts(count: int, seed: int = 1) -> list[tuple[int, ...]]:
    numbers = random.Random(seed)
    lengths = [numbers.randint(1, SPEC.max_tokens) for _ in range(count)]
    return [tuple(numbers.randrange(1000) for _ in range(length)) for length in lengths]


def alone(prompt: tuple[int, ...]) -> bytes:
    return vector_of([position << 32 | token for position, token in enumerate(prompt)], SPEC.dimensions)


@pytest.mark.parametrize("overlap", [True, False])
def test_every_prompt_of_a_batch_gets_the_vector_that_it_gets_alone(overlap: bool) -> None:
    config = dataclasses.replace(SPEC.engine_config(), overlap=overlap)
    engine, asked = ServingEngine(NoopBackend(**OPTIONS), config), prompts(700)
    ids = [engine.submit(InferenceRequest(prompt, ONE_TOKEN)) for prompt in asked]
    engine.run_until_idle()
    for request_id, prompt in zip(ids, asked, strict=True):
        result = engine.get_result(request_id)
        assert result is not None and result.vector == alone(prompt)
    steps = engine.stats()[0].steps
    tokens = sum(map(len, asked))
    assert steps < 2 * tokens / SPEC.engine_config().scheduler.max_prefill_tokens, "steps hold many prompts"


@pytest.mark.parametrize("overlap", [True, False])
def test_a_prompt_alone_gets_its_vector_in_one_iteration(overlap: bool) -> None:
    config = dataclasses.replace(SPEC.engine_config(), overlap=overlap)
    engine, [prompt] = ServingEngine(NoopBackend(**OPTIONS), config), prompts(1)
    request_id = engine.submit(InferenceRequest(prompt, ONE_TOKEN))
    [output] = engine.run_iteration()
    result = engine.get_result(request_id)
    assert output.is_final and result is not None and result.vector == alone(prompt)


def test_a_prompt_longer_than_the_model_allows_is_refused_with_both_numbers() -> None:
    engine = ServingEngine(NoopBackend(**OPTIONS), SPEC.engine_config())
    with pytest.raises(InvalidRequestError, match=r"65.*65"):
        engine.submit(InferenceRequest((1,) * 65, ONE_TOKEN))
    longest = (1,) * 64
    request_id = engine.submit(InferenceRequest(longest, ONE_TOKEN))
    engine.run_until_idle()
    result = engine.get_result(request_id)
    assert result is not None and result.vector == alone(longest)


class FirstStepFails:
    """The first step fails, and the last prompt of the second has an error of its own."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.failed: RequestId | None = None

    def at_submit(self, plan: IterationPlan) -> str | None:
        return None

    def at_result(self, plan: IterationPlan) -> tuple[str | None, dict[RequestId, Failure]]:
        self.num_steps += 1
        if self.num_steps == 2:
            self.failed = plan.request_ids[-1]
            return None, {
                self.failed: Failure(FailureKind.STEP, "the vector has a value that is not a number")
            }
        return ("the device failed" if self.num_steps == 1 else None), {}

    def at_wait(self, plan: IterationPlan) -> str | None:
        return None

    def at_swap(self, task: SwapTask) -> str | None:
        return None


def test_a_failed_step_is_computed_again_and_the_error_of_one_prompt_ends_no_other() -> None:
    faults = FirstStepFails()
    config = dataclasses.replace(SPEC.engine_config(), overlap=False)  # the second step is not discarded
    engine = ServingEngine(NoopBackend(**OPTIONS, faults=faults), config)
    asked = prompts(60)
    ids = [engine.submit(InferenceRequest(prompt, ONE_TOKEN)) for prompt in asked]
    engine.run_until_idle()
    assert faults.failed is not None
    for request_id, prompt in zip(ids, asked, strict=True):
        result = engine.get_result(request_id)
        assert result is not None
        if request_id == faults.failed:
            assert result.vector is None and "not a number" in (result.error or "")
        else:
            assert result.vector == alone(prompt)


def test_vectors_pass_the_process_of_the_engine() -> None:
    async def run() -> None:
        client = EngineClient("noop", OPTIONS, SPEC.engine_config())
        await client.start()
        try:
            assert client.info is not None and client.info.vector_size == SPEC.dimensions
            asked = prompts(300)
            arrived = asyncio.Event()
            answers = [
                (await client.submit(InferenceRequest(prompt, ONE_TOKEN), arrived))[0] for prompt in asked
            ]
            for answer, prompt in zip(answers, asked, strict=True):
                while answer.result is None:
                    await answer.read()
                assert answer.result.vector == alone(prompt)
        finally:
            await client.stop()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_an_event_log_of_vectors_replays(tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    config = dataclasses.replace(SPEC.engine_config(), log_path=path)
    with ServingEngine(NoopBackend(**OPTIONS), config) as engine:
        for prompt in prompts(40):
            engine.submit(InferenceRequest(prompt, ONE_TOKEN))
        engine.run_until_idle()
    assert replay(path).steps > 0
