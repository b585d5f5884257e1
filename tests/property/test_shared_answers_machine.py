"""Random requests, reads, steps, cancels, finishes and deadlines: each reader gets a prefix of the one answer, and its own
end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripted_engine import ScriptedEngine, prefix, tokens, with_scripted_engine
from weft.engine.ipc.remote_answer import RemoteAnswer, SlowReaderError
from weft.request import (
    FailureKind,
    FinishReason,
    InferenceRequest,
    RequestState,
    SamplingParams,
    TokenOutput,
)

LENGTH, BUFFER = 12, 6
EVENTS = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 1), st.sampled_from([None, 1.5, 3.0, 6.0])),
    st.tuples(st.just("step"), st.integers(1, 4), st.none()),
    st.tuples(st.just("read"), st.integers(0, 9), st.sampled_from([None, 1, 3])),
    st.tuples(st.just("cancel"), st.integers(0, 9), st.none()),
    st.tuples(st.just("finish"), st.integers(0, 9), st.integers(1, LENGTH)),
    st.tuples(st.just("time"), st.sampled_from([0.2, 1.0, 2.5]), st.none()),
)


class Reader:
    """One request, and what it must get."""

    def __init__(self, answer: RemoteAnswer, request: InferenceRequest, now: float) -> None:
        self.answer = answer
        self.request = request
        self.ends_at = None if request.deadline is None else now + request.deadline
        self.got: list[TokenOutput] = []
        self.is_cancelled = self.is_slow = False
        self.finished_at: int | None = None

    def read(self, limit: int | None = None) -> None:
        if self.is_slow:
            return
        try:
            self.got += self.answer.take(limit)
        except SlowReaderError:
            self.is_slow = True
        assert tokens(self.got) == prefix(self.request, len(tokens(self.got)))
        lengths = [output.sequence_length for output in self.got if output.token_id is not None]
        assert lengths == list(range(3, 3 + len(lengths)))
        assert not any(output.is_final for output in self.got[:-1])

    @property
    def is_over(self) -> bool:
        return self.is_slow or (bool(self.got) and self.got[-1].is_final)

    def check_end(self, now: float) -> None:
        result = self.answer.result
        assert result is not None and result.request_id == self.answer.request_id
        if self.is_slow:
            assert result.completion_token_count >= BUFFER
        elif result.state is RequestState.COMPLETED:
            reason, count = result.finish_reason, result.completion_token_count
            assert count == self.finished_at if reason is FinishReason.STOP else count == LENGTH
        elif result.failure is FailureKind.DEADLINE:
            assert self.ends_at is not None and self.ends_at <= now
        else:
            assert result.failure is FailureKind.CANCELLED and self.is_cancelled


@settings(max_examples=400)
@given(st.lists(EVENTS, max_size=40))
def test_every_reader_gets_a_prefix_of_the_one_answer_and_its_own_end(events: list[Any]) -> None:
    async def test(engine: ScriptedEngine) -> None:
        readers: list[Reader] = []
        now = engine.loop.time
        for kind, first, second in events:
            if kind == "submit":
                params = SamplingParams(max_tokens=LENGTH, temperature=0)
                request = InferenceRequest((1, first), params, deadline=second)
                [answer] = await engine.client.submit(request)
                readers.append(Reader(answer, request, now()))
            elif kind == "step":
                for _ in range(first):
                    engine.step()
            elif kind == "time":
                await engine.pass_time(first)
                engine.step()
            elif first < len(readers):
                reader = readers[first]
                if kind == "read":
                    reader.read(second)
                elif kind == "cancel":
                    reader.is_cancelled = True
                    reader.answer.cancel("gone")
                elif reader.finished_at is None and second <= reader.answer.num_tokens:
                    reader.finished_at = second
                    reader.answer.finish(second)
            for reader in readers:
                has_passed = reader.ends_at is not None and reader.ends_at <= now()
                assert not has_passed or reader.answer.result is not None, "a deadline has passed"
        for _ in range(LENGTH + 1):
            for reader in readers:
                reader.read()
            engine.step()
        for reader in readers:
            reader.read()
            assert reader.is_over
            reader.check_end(now())
            if not (reader.is_cancelled or reader.is_slow or reader.finished_at or reader.request.deadline):
                assert tokens(reader.got) == prefix(reader.request, LENGTH)
        shared = engine.client.shared_answers
        assert not (engine.sequences or engine.client.num_unfinished or shared._by_key or shared._by_handle)
        assert not any(timer for timer in engine.loop._scheduled if not timer.cancelled())  # type: ignore[attr-defined]

    with pytest.MonkeyPatch.context() as monkeypatch:
        with_scripted_engine(monkeypatch, test, stream_buffer=BUFFER)
