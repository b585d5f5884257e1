"""A client whose engine is a script: it has no process, computes a token when the test says so, and time stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from weft.config import ServingEngineConfig
from weft.engine.ipc import remote_answer, shared_answers, wire
from weft.engine.ipc.client import EngineClient
from weft.live import LiveInfo
from weft.plan import BackendInfo
from weft.request import (
    FailureKind,
    FinishReason,
    GenerationResult,
    InferenceRequest,
    RequestState,
    TokenOutput,
)

INFO = BackendInfo(1000, 4096, 100, 16, 0, 1, answers_are_exact=True)


class FrozenLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when a test says so."""

    now = 0.0

    def time(self) -> float:
        return self.now


@dataclass
class _Sequence:
    request: InferenceRequest
    began: float
    deadline: float | None
    count: int = 0


def prefix(request: InferenceRequest, count: int) -> list[int]:
    return [token_of(request, index) for index in range(count)]


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [output.token_id for output in outputs if output.token_id is not None]


def token_of(request: InferenceRequest, index: int) -> int:
    """The tokens of an answer follow from its prompt and seed."""
    return hash((request.prompt, request.params.seed, index)) % 1000


class ScriptedEngine:
    """Takes the messages of a client, as a `Connection` does."""

    def __init__(
        self, loop: FrozenLoop, coalesce: bool | None, config: ServingEngineConfig, info: BackendInfo
    ) -> None:
        self.loop = loop
        self.sequences: dict[int, _Sequence] = {}
        self.sent: list[wire.Message] = []
        self._inbox: list[tuple[float, wire.Message]] = []
        """Messages that the engine has not handled yet, with the time at which they were sent."""
        self.num_computed = 0
        self.client = EngineClient("noop", {}, config, coalesce=coalesce)
        self.client._connection = self  # type: ignore[assignment]
        live = LiveInfo(100, 0, 16, 0, 8, info.max_context, "fcfs", None)
        self.client._take(wire.Ready(info, info.max_context, live))

    # -- what a client calls

    def send(self, message: wire.Message) -> None:
        self.sent.append(message)
        self._inbox.append((self.loop.now, message))

    async def drain(self) -> None:
        pass

    def close(self) -> None:
        pass

    # -- what a test calls

    def handle_messages(self) -> None:
        """Handles what the client sent. `step` does it too."""
        inbox, self._inbox = self._inbox, []
        for sent_at, message in inbox:
            self._handle(message, sent_at)

    def _handle(self, message: wire.Message, sent_at: float) -> None:
        if isinstance(message, wire.Submit):
            request = message.whole_request
            (handle,) = message.handles
            self.sequences[handle] = _Sequence(request, sent_at, request.deadline)
        elif isinstance(message, wire.DropDeadline) and message.handle in self.sequences:
            self._checked(message).deadline = None
        elif isinstance(message, wire.Cancel) and message.handle in self.sequences:
            self._checked(message)
            self._end(message.handle, FinishReason.CANCELLED, FailureKind.CANCELLED, message.reason)
        elif isinstance(message, wire.Finish) and message.handle in self.sequences:
            self._checked(message).count = message.num_tokens
            self._end(message.handle, FinishReason.STOP)

    def step(self, handle: int | None = None) -> None:
        """One token of all sequences, or of one."""
        self.handle_messages()
        for each, sequence in list(self.sequences.items()):
            if handle not in (None, each):
                continue
            if sequence.deadline is not None and sequence.began + sequence.deadline <= self.loop.now:
                self._end(each, FinishReason.CANCELLED, FailureKind.DEADLINE, "deadline of the sequence")
                continue
            token = token_of(sequence.request, sequence.count)
            sequence.count += 1
            self.num_computed += 1
            if sequence.count == sequence.request.params.max_tokens:
                self._end(each, FinishReason.LENGTH, token=token)
            elif sequence.request.params.logprobs is not None:
                self._report(outputs=(wire.Output(each, token, -1.0),))
            else:
                self._report((each,), (token,))

    async def pass_time(self, seconds: float) -> None:
        """Time passes, and timers fire."""
        self.loop.now += seconds
        for _ in range(3):
            await asyncio.sleep(0)

    def messages(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]

    def _checked(self, message: Any) -> _Sequence:
        sequence = self.sequences[message.handle]
        assert message.request_id == sequence.request.request_id, "the engine knows this id only"
        return sequence

    def _end(
        self,
        handle: int,
        reason: FinishReason,
        failure: FailureKind | None = None,
        error: str | None = None,
        token: int | None = None,
    ) -> None:
        sequence = self.sequences.pop(handle)
        state = RequestState.COMPLETED if failure is None else RequestState.CANCELLED
        seconds = self.loop.now - sequence.began
        result = GenerationResult(
            sequence.request.request_id, (), "", state, reason, error, waiting_time=min(1.0, seconds),
            prefill_time=min(1.0, max(0.0, seconds - 1.0)), decode_time=max(0.0, seconds - 2.0),
            time_to_first_token=min(2.0, seconds), decode_steps=max(0, sequence.count - 1),
            prompt_token_count=len(sequence.request.prompt), cached_token_count=0, preemptions=0,
            num_tokens=sequence.count, failure=failure,
        )  # fmt: skip
        logprob = None if sequence.request.params.logprobs is None or token is None else -1.0
        self._report(outputs=(wire.Output(handle, token, logprob, reason),), ended=(result,))

    def _report(
        self,
        handles: tuple[int, ...] = (),
        tokens: tuple[int, ...] = (),
        outputs: tuple[wire.Output, ...] = (),
        ended: tuple[GenerationResult, ...] = (),
    ) -> None:
        self.client._take(wire.StepReport(handles, tokens, outputs, ended))


def with_scripted_engine(
    monkeypatch: pytest.MonkeyPatch,
    test: Callable[[ScriptedEngine], Awaitable[None]],
    *,
    coalesce: bool | None = None,
    info: BackendInfo = INFO,
    stream_buffer: int = 1024,
    **config: Any,
) -> None:
    loop = FrozenLoop()
    for module in (shared_answers, remote_answer):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=loop.time))

    async def run() -> None:
        engine = ScriptedEngine(
            loop, coalesce, ServingEngineConfig(stream_buffer=stream_buffer, **config), info
        )
        await test(engine)

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()
