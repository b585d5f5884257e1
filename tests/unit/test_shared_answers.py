"""Identical requests in flight share one sequence: who joins, what each reader gets, and how each of them ends."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from scripted_engine import INFO, ScriptedEngine, prefix, tokens, with_scripted_engine
from weft.engine.ipc import wire
from weft.engine.ipc.client import EngineDiedError
from weft.engine.ipc.remote_answer import RemoteAnswer, SlowReaderError
from weft.errors import QueueFullError, WeftError
from weft.lengths import ExpectedLength
from weft.request import (
    FailureKind,
    FinishReason,
    Grammar,
    InferenceRequest,
    Priority,
    RequestId,
    RequestState,
    SamplingParams,
)
from weft.server.admission.active_requests import ActiveRequests
from weft.server.metrics import ServerMetrics
from weft.server.settings import ServerSettings

PROMPT = tuple(range(1, 50))


def request(max_tokens: int = 8, temperature: float = 0.0, **fields: Any) -> InferenceRequest:
    names = {field.name for field in dataclasses.fields(InferenceRequest)}
    own = {name: value for name, value in fields.items() if name in names}
    others = {name: value for name, value in fields.items() if name not in names}
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, **others)
    return InferenceRequest(**{"prompt": PROMPT, **own}, params=params)


async def submit(engine: ScriptedEngine, one: InferenceRequest | None = None, **options: Any) -> RemoteAnswer:
    [answer] = await engine.client.submit(one or request(), **options)
    return answer


def read(answer: RemoteAnswer, limit: int | None = None) -> list[int]:
    return tokens(answer.take(limit))


def test_requests_that_differ_in_their_expected_length_alone_share_a_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(engine: ScriptedEngine) -> None:
        lengths = (None, ExpectedLength(5, 4, 9), ExpectedLength(700, 600, 900))
        answers = [await submit(engine, request(expected=one)) for one in lengths]
        for _ in range(8):
            engine.step()
        assert engine.num_computed == 8 and len(engine.messages(wire.Submit)) == 1
        assert len({tuple(read(answer)) for answer in answers}) == 1

    with_scripted_engine(monkeypatch, test)


def test_identical_requests_are_computed_once_and_each_gets_the_whole_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(engine: ScriptedEngine) -> None:
        answers = [await submit(engine) for _ in range(5)]
        for _ in range(8):
            engine.step()
        assert engine.num_computed == 8 and len(engine.messages(wire.Submit)) == 1
        for answer in answers:
            outputs = answer.take()
            assert tokens(outputs) == prefix(request(), 8)
            assert [output.sequence_length for output in outputs] == list(range(50, 58))
            assert {output.request_id for output in outputs} == {answer.request_id}
            assert answer.result is not None and answer.result.request_id == answer.request_id
            assert answer.result.completion_token_count == answer.num_tokens == 8
            assert answer.result.finish_reason is FinishReason.LENGTH
        assert len({answer.request_id for answer in answers}) == 5
        shared = engine.client.shared_answers
        assert (shared.num_requests, shared.num_tokens) == (4, 4 * 8)
        assert not engine.client.num_unfinished and not shared._by_key and not shared._by_handle

    with_scripted_engine(monkeypatch, test)


@pytest.mark.parametrize(
    ("first", "other", "is_shared"),
    [
        (request(), request(), True),
        (request(temperature=1.0, seed=3), request(temperature=1.0, seed=3), True),
        (request(logprobs=2), request(logprobs=2), True),
        (request(metadata={"a": 1}), request(metadata={"b": 2}), True),
        (request(is_idle_work=True), request(is_idle_work=True), True),
        (request(logit_bias={1: 2.0}), request(logit_bias={1: 2.0}), True),
        (request(temperature=1.0), request(temperature=1.0), False),
        (request(n=2), request(n=2), False),
        (request(prompt_logprobs=0), request(prompt_logprobs=0), False),
        (request(), request(prompt=(*PROMPT, 1)), False),
        (request(temperature=1.0, seed=3), request(temperature=1.0, seed=4), False),
        (request(), request(max_tokens=9), False),
        (request(), request(stop=("x",)), False),
        (request(), request(logprobs=0), False),
        (request(), request(logit_bias={1: 2.0}), False),
        (request(), request(grammar=Grammar("regex", "a")), False),
        (request(), request(cache_salt="x"), False),
        (request(), request(priority=Priority.HIGH), False),
        (request(), request(session_id="x"), False),
        (request(), request(max_sequence_length=60), False),
        (request(), request(ttft_target=1.0), False),
        (request(), request(is_idle_work=True), False),
        (request(), request(prediction=(1, 2)), False),
        (request(), request(learns_prompt=True), False),
    ],
)  # fmt: skip
def test_only_requests_that_agree_in_all_that_the_answer_and_its_schedule_depend_on_share(
    monkeypatch: pytest.MonkeyPatch, first: InferenceRequest, other: InferenceRequest, is_shared: bool
) -> None:
    async def test(engine: ScriptedEngine) -> None:
        await engine.client.submit(first)
        await engine.client.submit(other)
        assert engine.client.shared_answers.num_requests == is_shared
        assert len(engine.messages(wire.Submit)) == 2 - is_shared

    with_scripted_engine(monkeypatch, test)


@pytest.mark.parametrize(
    ("coalesce", "is_exact", "is_on"),
    [(None, True, True), (None, False, False), (True, False, True), (False, True, False)],
)
def test_the_setting_decides_and_the_default_is_on_where_answers_are_exact(
    monkeypatch: pytest.MonkeyPatch, coalesce: bool | None, is_exact: bool, is_on: bool
) -> None:
    async def test(engine: ScriptedEngine) -> None:
        await submit(engine)
        await submit(engine)
        assert engine.client.shared_answers.num_requests == is_on

    info = dataclasses.replace(INFO, answers_are_exact=is_exact)
    with_scripted_engine(monkeypatch, test, coalesce=coalesce, info=info)


@pytest.mark.parametrize("num_read", [0, 2, 4])
def test_a_late_reader_gets_all_earlier_tokens_first(monkeypatch: pytest.MonkeyPatch, num_read: int) -> None:
    """Those that the first reader has read, and those that it has not."""

    async def test(engine: ScriptedEngine) -> None:
        first = await submit(engine)
        for _ in range(4):
            engine.step()
        seen = read(first, num_read) if num_read else []
        late = await submit(engine)
        assert late.is_readable and late.arrived.is_set() and late.num_tokens == 4
        assert read(late) == prefix(request(), 4)
        seen += read(first)
        later = await submit(engine)
        for _ in range(4):
            engine.step()
        assert seen + read(first) == read(later) == prefix(request(), 8)
        assert read(late) == prefix(request(), 8)[4:]
        assert engine.num_computed == 8 and engine.client.shared_answers.num_tokens == 16

    with_scripted_engine(monkeypatch, test)


def test_with_logprobs_only_requests_before_the_first_token_join(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: ScriptedEngine) -> None:
        one = request(logprobs=1)
        answers = []
        for number in (1, 2, 2):
            answers += [await submit(engine, one) for _ in range(number)]
            engine.step()
        for _ in range(7):
            engine.step()
        for answer in answers:
            outputs = answer.take()
            assert tokens(outputs) == prefix(one, 8) and {output.logprob for output in outputs} == {-1.0}
        assert engine.num_computed == 24, "one sequence for each group"

    with_scripted_engine(monkeypatch, test)


def test_after_its_end_an_answer_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: ScriptedEngine) -> None:
        for number in range(1, 3):
            await submit(engine)
            for _ in range(8):
                engine.step()
            assert engine.num_computed == 8 * number

    with_scripted_engine(monkeypatch, test)


@pytest.mark.parametrize("leaves", [0, 1, 2])
def test_a_cancel_ends_one_reader_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, leaves: int) -> None:
    async def test(engine: ScriptedEngine) -> None:
        answers = [await submit(engine) for _ in range(3)]
        for _ in range(3):
            engine.step()
        gone = answers[leaves]
        gone.cancel("the client is gone")
        gone.cancel("again")
        assert not engine.messages(wire.Cancel)
        assert gone.result is not None and gone.result.state is RequestState.CANCELLED
        assert gone.result.failure is FailureKind.CANCELLED and gone.result.error == "the client is gone"
        assert gone.result.request_id == gone.request_id and gone.result.completion_token_count == 3
        late = await submit(engine)
        for _ in range(5):
            engine.step()
        outputs = gone.take()
        assert tokens(outputs) == prefix(request(), 3) and outputs[-1].finish_reason is FinishReason.CANCELLED
        for answer in [late, *(one for one in answers if one is not gone)]:
            assert read(answer) == prefix(request(), 8)
        assert engine.num_computed == 8

    with_scripted_engine(monkeypatch, test)


def test_the_last_reader_that_leaves_cancels_the_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: ScriptedEngine) -> None:
        answers = [await submit(engine) for _ in range(3)]
        engine.step()
        for answer in answers:
            assert not engine.messages(wire.Cancel)
            answer.cancel("gone")
        [cancel] = engine.messages(wire.Cancel)
        assert (cancel.request_id, cancel.reason) == (answers[0].request_id, "gone")
        assert engine.client.num_unfinished == 1, "until the engine reports the end"
        fresh = await submit(engine)
        engine.step()
        assert engine.client.num_unfinished == 1 and len(engine.messages(wire.Submit)) == 2
        assert read(fresh) == prefix(request(), 1), "it joined no sequence that ends"
        assert all(answer.take()[-1].is_final for answer in answers)

    with_scripted_engine(monkeypatch, test)


def test_a_cancelled_or_finished_sequence_with_one_reader_gets_no_second_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(engine: ScriptedEngine) -> None:
        cancelled, finished = request(), request(9)
        answers = [await submit(engine, cancelled), await submit(engine, finished)]
        engine.step()
        answers[0].cancel("gone")
        answers[1].finish(1)
        others = [await submit(engine, cancelled), await submit(engine, finished)]
        assert engine.client.shared_answers.num_requests == 0
        engine.step()
        assert [answer.take()[-1].is_final for answer in answers] == [True, True]
        assert [read(other) for other in others] == [prefix(cancelled, 1), prefix(finished, 1)]

    with_scripted_engine(monkeypatch, test)


def test_each_reader_is_cut_at_its_own_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: ScriptedEngine) -> None:
        first, second, third = [await submit(engine) for _ in range(3)]
        for _ in range(5):
            engine.step()
        first.finish(2)
        second.finish(4)
        assert not engine.messages(wire.Finish)
        for answer, count in ((first, 2), (second, 4)):
            assert answer.result is not None and answer.result.state is RequestState.COMPLETED
            assert answer.result.completion_token_count == count and answer.result.failure is None
            assert answer.take()[-1].finish_reason is FinishReason.STOP
        third.finish(5)
        assert [(one.request_id, one.num_tokens) for one in engine.messages(wire.Finish)] == [
            (first.request_id, 5)
        ]
        assert third.result is not None and third.result.completion_token_count == 5
        engine.step()
        assert not engine.client.num_unfinished and engine.num_computed == 5

    with_scripted_engine(monkeypatch, test)


@pytest.mark.parametrize("deadlines", [(5.0, None, 9.0), (9.0, 5.0, None), (None, 9.0, 5.0)])
def test_each_reader_keeps_its_own_deadline(
    monkeypatch: pytest.MonkeyPatch, deadlines: tuple[float | None, ...]
) -> None:
    async def test(engine: ScriptedEngine) -> None:
        answers = {deadline: await submit(engine, request(deadline=deadline)) for deadline in deadlines}
        engine.step()
        assert len(engine.messages(wire.Submit)) == 1
        for seconds, over in ((4.5, ()), (1.0, (5.0,)), (4.0, (5.0, 9.0))):
            await engine.pass_time(seconds)
            engine.step()
            assert {one for one, answer in answers.items() if answer.result is not None} == set(over)
        for deadline in (5.0, 9.0):
            result = answers[deadline].result
            assert result is not None and result.failure is FailureKind.DEADLINE
            assert result.state is RequestState.CANCELLED
            waited = 5.5 if deadline == 5.0 else 9.5
            assert result.error == f"deadline of {deadline:g} s passed after {waited:.3f} s"
        for _ in range(4):
            engine.step()
        assert read(answers[None]) == prefix(request(), 8)
        assert not engine.messages(wire.Cancel)

    with_scripted_engine(monkeypatch, test)


def test_a_deadline_counts_from_arrival_and_the_default_of_the_engine_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(engine: ScriptedEngine) -> None:
        waited = await submit(engine, request(deadline=9.0), waited=4.0)
        default = await submit(engine)
        engine.step()
        await engine.pass_time(5.0)
        assert waited.result is not None and waited.result.failure is FailureKind.DEADLINE
        assert default.result is None
        await engine.pass_time(2.0)
        assert default.result is not None and default.result.failure is FailureKind.DEADLINE
        assert len(engine.messages(wire.Cancel)) == 1, "both have ended"

    with_scripted_engine(monkeypatch, test, request_timeout=7.0)


def test_no_request_joins_a_sequence_whose_deadline_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: ScriptedEngine) -> None:
        first = await submit(engine, request(deadline=5.0))
        await engine.pass_time(4.5)
        second = await submit(engine, request(deadline=5.0))
        await engine.pass_time(1.0)
        engine.step()
        assert first.result is not None and second.result is None
        third = await submit(engine)
        assert not engine.messages(wire.Cancel) and len(engine.messages(wire.Submit)) == 2
        assert third.handle == second.handle, "the end of the first left the second open"

    with_scripted_engine(monkeypatch, test)


def test_a_slow_reader_is_cancelled_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: ScriptedEngine) -> None:
        one = request(40)
        slow, reader, unbounded = [
            await submit(engine, one, is_unbounded=last) for last in (False, False, True)
        ]
        got = []
        for _ in range(40):
            engine.step()
            got += read(reader)
        with pytest.raises(SlowReaderError):
            slow.take()
        assert slow.result is not None and slow.result.failure is FailureKind.CANCELLED
        assert got == read(unbounded) == prefix(one, 40)

    with_scripted_engine(monkeypatch, test, stream_buffer=10)


def test_earlier_tokens_do_not_count_against_the_buffer_of_a_late_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(engine: ScriptedEngine) -> None:
        one = request(100)
        first = await submit(engine, one)
        for _ in range(50):
            engine.step()
            first.take()
        late, slow = await submit(engine, one), await submit(engine, one)
        for _ in range(10):
            engine.step()
            first.take()
        got = read(late, 30)
        assert len(got) == 30 and late.is_readable
        got += read(late)
        for _ in range(10):
            engine.step()
            first.take()
        got += read(late)
        assert got == prefix(one, 70), "ten unread tokens are allowed, and the earlier ones"
        with pytest.raises(SlowReaderError):
            slow.take()
        for _ in range(11):
            engine.step()
            first.take()
        with pytest.raises(SlowReaderError):
            late.take()

    with_scripted_engine(monkeypatch, test, stream_buffer=10)


def test_joining_a_long_answer_copies_none_of_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts memory blocks: each copied token would be one."""

    async def test(engine: ScriptedEngine) -> None:
        one = request(3_000, prompt=(1, 2))
        first = await submit(engine, one)
        for _ in range(2_000):
            engine.step()
            first.take()
        late = [await submit(engine, one)]
        before = sys.getallocatedblocks()
        late += [await submit(engine, one) for _ in range(200)]
        assert sys.getallocatedblocks() - before < 200 * 200
        for answer in late[:3]:
            parts = []
            while answer.arrived.is_set():
                answer.arrived.clear()
                parts.append(read(answer, 512))
            assert [len(part) for part in parts] == [512, 512, 512, 464]
            assert [token for part in parts for token in part] == prefix(one, 2_000)
        engine.step()
        assert read(late[0]) == prefix(one, 2_001)[2_000:]
        assert read(late[3]) == prefix(one, 2_001), "earlier tokens and later ones"

    with_scripted_engine(monkeypatch, test)


def test_a_late_reader_that_fails_reads_no_earlier_token(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: ScriptedEngine) -> None:
        await submit(engine)
        engine.step()
        late = await submit(engine)
        engine.client._fail_all(EngineDiedError("the engine's process died"))
        with pytest.raises(EngineDiedError):
            late.take()

    with_scripted_engine(monkeypatch, test)


def test_the_memory_limit_of_one_reader_ends_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: ScriptedEngine) -> None:
        one = request(logprobs=1)
        small = await submit(engine, one, may_grow=lambda size: size < 0)
        other = await submit(engine, one)
        for _ in range(8):
            engine.step()
        with pytest.raises(WeftError, match="memory"):
            small.take()
        assert read(other) == prefix(one, 8)

    with_scripted_engine(monkeypatch, test)


def test_a_refusal_and_the_end_of_the_engine_end_all_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: ScriptedEngine) -> None:
        client = engine.client
        refused = [await submit(engine, request(deadline=5.0)) for _ in range(3)]
        client._take(wire.Refused((refused[0].handle,), "QueueFullError", "the queue is full"))
        for answer in refused:
            with pytest.raises(QueueFullError, match="the queue is full"):
                answer.take()
        died = [await submit(engine, request(deadline=5.0)) for _ in range(3)]
        client._fail_all(EngineDiedError("the engine's process died"))
        for answer in died:
            with pytest.raises(EngineDiedError):
                answer.take()
            answer.cancel()
        await engine.pass_time(60.0)
        shared = client.shared_answers
        assert not client.num_unfinished and not shared._by_key and not shared._by_handle
        assert not engine.messages(wire.Cancel), "no timer is left"

    with_scripted_engine(monkeypatch, test)


def test_a_sequence_that_fails_fails_all_readers_with_its_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: ScriptedEngine) -> None:
        answers = [await submit(engine) for _ in range(2)]
        engine.step()
        engine._end(answers[0].handle, FinishReason.ERROR, FailureKind.STEP, "out of memory")
        for answer in answers:
            assert answer.take()[-1].finish_reason is FinishReason.ERROR
            assert answer.result is not None and answer.result.failure is FailureKind.STEP
            assert answer.result.error == "out of memory"

    with_scripted_engine(monkeypatch, test)


def test_a_request_with_the_id_of_the_sequence_goes_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine refuses the id."""

    async def test(engine: ScriptedEngine) -> None:
        one = request(request_id=RequestId("same"))
        await submit(engine, one)
        await submit(engine, one)
        assert len(engine.messages(wire.Submit)) == 2

    with_scripted_engine(monkeypatch, test)


def test_the_result_of_a_later_request_has_its_own_times_and_metadata(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(engine: ScriptedEngine) -> None:
        """The sequence waits for 1 s, computes its prompt for 1 s, and decodes for 8 s."""
        answers = []
        for number in range(4):
            answers.append(await submit(engine, request(metadata={"number": number})))
            engine.step()
            await engine.pass_time((0.5, 1.0, 6.5, 2.0)[number])
        for _ in range(4):
            engine.step()
        times = [(1, 1, 8, 2), (0.5, 1, 8, 1.5), (0, 0.5, 8, 0.5), (0, 0, 2, 0)]
        for number, (answer, expected) in enumerate(zip(answers, times, strict=True)):
            result = answer.result
            assert result is not None
            measured = (
                result.waiting_time,
                result.prefill_time,
                result.decode_time,
                result.time_to_first_token,
            )
            assert measured == pytest.approx(expected), number
            assert result.metadata == ({"number": number} if number else {})  # the script returns none
            assert result.cached_token_count == (48 if number else 0)

    with_scripted_engine(monkeypatch, test)


def test_the_result_of_an_answer_that_ends_early_has_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: ScriptedEngine) -> None:
        first = await submit(engine)
        await engine.pass_time(2.0)
        engine.step()
        await engine.pass_time(1.0)
        late = await submit(engine)
        await engine.pass_time(3.0)
        for answer, expected in ((first, (2.0, 4.0, 2.0)), (late, (0.0, 3.0, 0.0))):
            answer.cancel()
            result = answer.result
            assert result is not None and result.prompt_token_count == 49 and result.error is None
            assert (result.prefill_time, result.decode_time, result.time_to_first_token) == expected

    with_scripted_engine(monkeypatch, test)


def test_idle_followers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: ScriptedEngine) -> None:
        shared = engine.client.shared_answers
        answers = [await submit(engine, request(is_idle_work=True)) for _ in range(4)]
        await submit(engine)
        await submit(engine)
        assert shared.num_idle_followers == 3 and engine.client.num_unfinished == 2
        active_requests = ActiveRequests(ServerSettings(), engine.client, ServerMetrics("m"), lambda: 0.0)
        active_requests._idle_answers.num_answers = len(answers)
        assert active_requests._count_answers() == (1, 1), "the gate counts the interactive sequence only"
        answers[0].cancel()
        assert shared.num_idle_followers == 2
        for _ in range(8):
            engine.step()
        assert shared.num_idle_followers == 0

    with_scripted_engine(monkeypatch, test)


def instructions(work: Callable[[], object]) -> int:
    """Bytecode instructions of this thread."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_a_step_costs_the_same_instructions_while_no_sequence_has_a_second_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: dict[bool, int] = {}

    async def test(engine: ScriptedEngine) -> None:
        answers = [await submit(engine, request(prompt=(number, 2, 3))) for number in range(32)]
        report = wire.StepReport(tuple(answer.handle for answer in answers), (500,) * 32, (), ())
        engine.client._take_step(report)
        counts[engine.client.shared_answers.is_on] = instructions(lambda: engine.client._take_step(report))
        assert all(isinstance(one, RemoteAnswer) for one in engine.client._answers.values())

    for coalesce in (False, True):
        with_scripted_engine(monkeypatch, test, coalesce=coalesce)
    assert counts[True] == counts[False] > 0
