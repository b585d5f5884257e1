"""One id for each request: made with it, used by every part, and refused while another request has it."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from weft.backends.noop import NoopBackend
from weft.clock import VirtualClock
from weft.config import KvCachePoolConfig, SchedulerConfig, ServingEngineConfig
from weft.engine.ipc.client import EngineClient
from weft.engine.replay import replay
from weft.engine.serving import ServingEngine
from weft.errors import InvalidRequestError
from weft.request import (
    FinishReason,
    Grammar,
    InferenceRequest,
    RequestId,
    RequestState,
    SamplingParams,
    TokenOutput,
    numbered_ids,
)
from weft.scheduling.scheduler import ContinuousBatchScheduler
from weft.scheduling.sequence import Sequence

POOL = KvCachePoolConfig(num_blocks=256, block_size=4)
MINE = RequestId("mine")


def request(max_tokens: int = 4, request_id: RequestId = MINE, n: int = 1, **fields: Any) -> InferenceRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True, n=n)
    return InferenceRequest((1, 2, 3, 4, 5), params, request_id=request_id, **fields)


def make(overlap: bool = True, clock: VirtualClock | None = None, **options: Any) -> ServingEngine:
    config = ServingEngineConfig(cache=POOL, overlap=overlap, **options)
    return ServingEngine(NoopBackend(), config, clock=clock or VirtualClock(), seed=1)


def test_an_engine_makes_a_new_uuid_for_each_request_without_an_id() -> None:
    engine, unnamed = make(), request(request_id=RequestId(""))
    ids = {engine.submit(unnamed) for _ in range(8)}
    assert len(ids) == 8 and all(re.fullmatch("[0-9a-f]{32}", request_id) for request_id in ids)
    assert all(uuid.UUID(request_id).version == 4 for request_id in ids)


def test_ids_come_from_the_generator_that_was_passed_in() -> None:
    engine = ServingEngine(NoopBackend(), ServingEngineConfig(cache=POOL), new_id=numbered_ids())
    unnamed = request(request_id=RequestId(""), n=2)
    assert engine.submit_choices(unnamed) == ("0-0", "0-1")
    assert engine.submit(request(request_id=RequestId(""))) == "1"


def test_the_id_of_a_request_is_in_its_outputs_its_result_the_metrics_and_the_event_log(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log"
    engine = make(log_path=str(path))
    outputs: list[TokenOutput] = []
    assert engine.submit_with_callback(request(), outputs.append) == MINE
    engine.run_iteration()
    assert [slot.request_id for slot in engine.metrics().slots if slot.state != "idle"] == [MINE]
    engine.run_until_idle()
    result = engine.get_result(MINE)
    assert result is not None and result.request_id == MINE and {one.request_id for one in outputs} == {MINE}
    engine.stop()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [one["request"]["request_id"] for event in events for one in event.get("requests", ())] == [MINE]
    assert {rid for event in events if event.get("plan") for rid in event["plan"]["request_ids"]} == {MINE}
    assert replay(str(path)).requests == 1


def test_answers_of_one_request_have_its_id_and_their_index() -> None:
    engine = make()
    assert engine.submit_choices(request(n=3)) == ("mine-0", "mine-1", "mine-2")
    assert engine.submit_choices(request(n=12, request_id=RequestId("b")), indices=range(9, 11)) == (
        "b-9",
        "b-10",
    )
    assert engine.submit_choices(request(request_id=RequestId("c"))) == ("c",), "one answer has the plain id"


@pytest.mark.parametrize("overlap", [True, False])
def test_an_id_of_an_unfinished_request_is_refused_and_nothing_is_lost(overlap: bool) -> None:
    engine = make(overlap)
    received: list[TokenOutput] = []
    engine.submit_with_callback(request(6), received.append)
    engine.submit(request(6, RequestId("other-1")))
    for _ in range(4):
        with pytest.raises(
            InvalidRequestError, match="request_id 'mine' belongs to a request that"
        ) as refused:
            engine.submit(request(2))
        assert (refused.value.field, refused.value.code) == ("request_id", "request_id_in_use")
        with pytest.raises(InvalidRequestError, match="'other-1'"):
            engine.submit_choices(request(2, RequestId("other"), n=3))
        engine.run_iteration()
    assert engine.metrics().requests_pending == 0 and len(engine.scheduler.sequences) == 2, (
        "no part was queued"
    )
    engine.run_until_idle()
    result = engine.get_result(MINE)
    assert result is not None and len(result.tokens) == len(received) == 6
    assert engine.metrics().requests_completed == 2


def test_an_id_can_be_used_again_after_the_end_of_its_request() -> None:
    engine = make(max_kept_results=2)
    for max_tokens in (2, 5, 3):
        received: list[TokenOutput] = []
        engine.submit_with_callback(request(max_tokens), received.append)
        engine.run_until_idle()
        result = engine.get_result(MINE)
        assert result is not None and len(result.tokens) == len(received) == max_tokens
        engine.submit(request(1, RequestId("between")))
        engine.run_until_idle()


@pytest.mark.parametrize("overlap", [True, False])
def test_an_id_is_free_once_the_last_step_of_a_cancelled_request_has_ended(overlap: bool) -> None:
    engine = make(overlap)
    engine.submit(request(50))
    other = engine.submit(request(50, RequestId("other")))
    for _ in range(4):
        engine.run_iteration()
    assert engine.cancel(MINE)
    num_refused = 0
    while True:
        try:
            engine.submit(request(3))
            break
        except InvalidRequestError:
            num_refused += 1
            engine.run_iteration()
            engine.scheduler.check_integrity()
    assert 1 <= num_refused <= 3
    engine.run_until_idle()
    engine.scheduler.check_integrity()
    result, untouched = engine.get_result(MINE), engine.get_result(other)
    assert result is not None and result.state is RequestState.COMPLETED and len(result.tokens) == 3
    assert untouched is not None and len(untouched.tokens) == 50


def test_the_scheduler_refuses_an_id_whose_request_holds_memory_for_a_step_in_flight() -> None:
    backend = NoopBackend()
    scheduler = ContinuousBatchScheduler(SchedulerConfig(), backend.allocate(POOL, 4), VirtualClock())
    scheduler.add(Sequence(request(), 1))
    plan = scheduler.schedule()
    assert plan is not None and scheduler.cancel(MINE) and MINE not in scheduler.sequences
    with pytest.raises(InvalidRequestError, match="'mine' belongs to a request"):
        scheduler.add(Sequence(request(), 1))
    scheduler.apply(plan, backend.submit(plan).result())
    scheduler.add(Sequence(request(), 1))
    scheduler.check_integrity()


def test_the_deadline_of_an_ended_request_does_not_end_a_new_one_with_its_id() -> None:
    clock = VirtualClock()
    engine = make(clock=clock)
    engine.submit(request(1, deadline=10.0))
    engine.run_until_idle()
    engine.submit(request(8))
    engine.run_iteration()
    clock.advance(11.0)
    engine.run_until_idle()
    result = engine.get_result(MINE)
    assert result is not None and result.finish_reason is FinishReason.LENGTH and len(result.tokens) == 8


def test_an_id_is_in_use_until_its_last_callback_has_returned() -> None:
    engine = make()
    refused: list[str] = []

    def again(output: TokenOutput) -> None:
        if output.is_final:
            with pytest.raises(InvalidRequestError) as error:
                engine.submit(request())
            refused.append(str(error.value))
            raise RuntimeError("the callback is broken")

    engine.submit_with_callback(request(2), again)
    engine.run_until_idle()
    failed = engine.get_result(MINE)
    assert len(refused) == 1 and failed is not None and failed.state is RequestState.FAILED
    engine.submit(request(3))
    engine.run_until_idle()
    result = engine.get_result(MINE)
    assert result is not None and result.state is RequestState.COMPLETED and not engine._delivery._callbacks


def test_a_stream_that_was_read_to_its_end_does_not_cancel_a_new_request_with_its_id() -> None:
    async def main(engine: ServingEngine) -> None:
        stream = engine.stream(request(2))
        async for output in stream:
            if output.is_final:
                break
        while True:  # the last callback may still run
            try:
                engine.submit(request(500))
                break
            except InvalidRequestError:
                await asyncio.sleep(0.001)
        await stream.aclose()  # type: ignore[attr-defined]
        assert not engine.is_complete(MINE)
        assert engine.cancel(MINE)

    with ServingEngine(NoopBackend(seconds_per_step=0.005), ServingEngineConfig(cache=POOL)) as engine:
        asyncio.run(main(engine))


def test_two_threads_cannot_both_submit_one_id() -> None:
    engine = make()
    results: list[object] = []
    barrier = threading.Barrier(8)

    def submit() -> None:
        barrier.wait(60)
        try:
            results.append(engine.submit(request()))
        except InvalidRequestError as error:
            results.append(error)

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results.count(MINE) == 1 and len(results) == 8


# ---------------------------------------------------------------------- over the process border


def with_client(use: Callable[[EngineClient], Awaitable[None]], **options: object) -> None:
    async def run() -> None:
        client = EngineClient(
            "noop", {"max_context": 4096, **options}, ServingEngineConfig(cache=POOL), new_id=numbered_ids()
        )
        await client.start()
        try:
            await use(client)
        finally:
            await client.stop()

    asyncio.run(asyncio.wait_for(run(), 300))


async def tokens_of(answer: Any) -> list[int]:
    return [one.token_id async for outputs in answer for one in outputs if one.token_id is not None]


def test_a_client_has_the_ids_of_its_answers_before_the_engine_responds() -> None:
    async def use(client: EngineClient) -> None:
        answers = await client.submit(request(n=3))
        assert [answer.request_id for answer in answers] == ["mine-0", "mine-1", "mine-2"]
        (unnamed,) = await client.submit(request(request_id=RequestId("")))
        assert unnamed.request_id == "0"
        for answer in (*answers, unnamed):
            outputs = [one async for outputs in answer for one in outputs]
            assert {one.request_id for one in outputs} == {answer.request_id}
            assert answer.result is not None and answer.result.request_id == answer.request_id

    with_client(use)


@pytest.mark.parametrize("grammar", [None, Grammar("regex", "a+")], ids=["plain", "with a grammar"])
def test_a_client_gets_an_error_for_an_id_in_use_and_the_first_answer_goes_on(
    grammar: Grammar | None,
) -> None:
    async def use(client: EngineClient) -> None:
        (first,) = await client.submit(request(30))
        params = SamplingParams(max_tokens=2, seed=1, n=2, grammar=grammar)
        clashing = InferenceRequest((1, 2), params, request_id=RequestId("min"))
        (second,) = await client.submit(InferenceRequest((1, 2), request(2).params, request_id=MINE))
        with pytest.raises(InvalidRequestError, match="'mine' belongs to a request") as refused:
            await second.read()
        assert refused.value.code == "request_id_in_use"
        second.cancel("it was refused")
        assert len(await tokens_of(first)) == 30
        (third,) = await client.submit(request(3))
        assert len(await tokens_of(third)) == 3, "the id is free as soon as the client has seen the end"
        for answer in await client.submit(clashing):
            answer.cancel()

    with_client(use, seconds_per_step=0.005)


def test_cancelling_an_ended_answer_does_not_cancel_a_new_one_with_its_id() -> None:
    async def use(client: EngineClient) -> None:
        (first,) = await client.submit(request(2))
        await tokens_of(first)
        client._answers[first.handle] = first  # as if its end had not arrived yet
        (second,) = await client.submit(request(40))
        first.cancel("late")
        first.finish(1)
        del client._answers[first.handle]
        assert len(await tokens_of(second)) == 40

    with_client(use, seconds_per_step=0.002)


def test_an_answer_can_be_cancelled_right_after_its_request_was_sent() -> None:
    async def use(client: EngineClient) -> None:
        for number in range(5):
            (answer,) = await client.submit(request(3000, RequestId(f"mine-{number}")))
            answer.cancel("changed my mind")
            outputs = [one async for outputs in answer for one in outputs]
            assert outputs[-1].finish_reason is FinishReason.CANCELLED
            assert answer.result is not None and answer.result.error == "changed my mind"

    with_client(use, seconds_per_step=0.002)
