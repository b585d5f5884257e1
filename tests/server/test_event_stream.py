"""One event stream: events are written when tokens arrive, completely and in order, however fast the client reads."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h11
import pytest
import uvicorn
from in_process import InProcess, in_process
from uvicorn.server import ServerState

from weft.config import ServingEngineConfig
from weft.engine.ipc import wire
from weft.engine.ipc.client import EngineClient
from weft.engine.ipc.remote_answer import RemoteAnswer
from weft.errors import WeftError
from weft.request import (
    FinishReason,
    GenerationResult,
    InferenceRequest,
    Priority,
    RequestId,
    RequestState,
    SamplingParams,
)
from weft.server.api.answer_format import AnswerContext, AnswerWriter
from weft.server.api.chat import ChatWriter
from weft.server.api.completion import CompletionWriter
from weft.server.errors import ApiError
from weft.server.http.protocol import WRITER, TimedProtocol
from weft.server.metrics import ServerMetrics
from weft.server.stream import events as streaming
from weft.server.stream.choices import Choices, Piece
from weft.server.stream.events import EventStream
from weft.server.stream.loop_turns import LoopTurns
from weft.text.tokenizer import Tokenizer

TEXT = "one two three four five six seven eight nine ten"


class Engine(EngineClient):
    """An engine client whose answers are filled by the test."""

    def __init__(self) -> None:
        super().__init__("noop", {}, ServingEngineConfig())
        self.cancelled: list[str | None] = []

    async def submit(
        self,
        request: InferenceRequest,
        arrived: asyncio.Event,
        *,
        wake_every: int = 1,
        may_grow: Callable[[int], bool] = lambda num_bytes: True,
        **unused: Any,
    ) -> list[RemoteAnswer]:
        self.answer = RemoteAnswer(
            self, RequestId("0"), 0, 100, arrived, len(request.prompt), wake_every, may_grow
        )
        return [self.answer]

    def _cancel(self, answer: RemoteAnswer, reason: str | None) -> None:
        self.cancelled.append(reason)


class Writer:
    """A fake `BodyWriter`."""

    accepts_chunks = True

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.is_paused = False

    def write(self, piece: bytes) -> bool:
        if not self.is_paused:
            self.pieces.append(piece)
        return not self.is_paused


class Streamed:
    """A running stream, with its writer and its ASGI `send`."""

    def __init__(self, stream: EventStream, engine: Engine, tokens: list[int]) -> None:
        self.stream, self.engine, self.answer = stream, engine, engine.answer
        self.tokens = tokens
        self.writer = Writer()
        self.sent: list[dict[str, Any]] = []
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.is_gone = asyncio.Event()
        self.outcomes: list[Any] = []

    async def receive(self) -> dict[str, Any]:
        await self.is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.may_send.wait()
        self.sent.append(message)
        self.writer.pieces.append(message.get("body", b""))  # all bytes in order, written directly or sent

    async def put(self, count: int) -> None:
        """Delivers `count` tokens, one at a time."""
        for _ in range(count):
            self.answer.put_token(self.tokens.pop(0))
            await run_loop()

    async def end(self) -> None:
        """Delivers the remaining tokens and ends the answer."""
        await self.put(len(self.tokens))
        self.answer.put(wire.Output(0, None, finish_reason=FinishReason.LENGTH))
        self.answer.result = replace(RESULT, num_tokens=self.answer.num_tokens)

    @property
    def texts(self) -> list[str]:
        """The texts of all events, written directly or sent."""
        lines = b"".join(self.writer.pieces).decode().split("\n\n")
        events = [json.loads(line[6:]) for line in lines if line and line != "data: [DONE]"]
        return [one["choices"][0]["text"] for one in events if "choices" in one]


@pytest.mark.parametrize("kind", [ChatWriter, CompletionWriter])
def test_a_keep_alive_is_an_event_of_an_answer_that_has_not_ended(
    kind: type[ChatWriter | CompletionWriter], default_tokenizer: Tokenizer
) -> None:
    def indices(content: bytes) -> list[int]:
        events = [json.loads(one[6:]) for one in content.decode().split("\n\n") if one]
        return [choice["index"] for event in events for choice in event["choices"]]

    writer = kind(AnswerContext("m", default_tokenizer, "id", num_choices_per_prompt=3))
    begun = writer.begin()
    assert indices(writer.keep_alive()) == [0]
    for index in (0, 1):
        ended: Any = SimpleNamespace(index=index, result=RESULT, has_calls=False)
        writer.events([Piece(ended, "x", (1,), (), is_last=True)])
    kept = writer.keep_alive()
    # An answer that has no token yet begins as the first one did.
    assert set(indices(kept)) == {2} and kept.count(b'"role"') == begun.count(b'"role"')
    assert writer.keep_alive().count(b'"role"') == 0


RESULT = GenerationResult(
    RequestId("0"), (), "", RequestState.COMPLETED, FinishReason.LENGTH, None, 0, 0, 0, 0, 0,
    prompt_token_count=1, cached_token_count=0, preemptions=0, num_tokens=1,
)  # fmt: skip


async def nothing_to_store(choices: Choices) -> None:
    """Formats that store nothing do nothing at the end."""


async def run_loop(count: int = 10) -> None:
    """Runs `count` iterations of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


@asynccontextmanager
async def streamed(
    tokenizer: Tokenizer, writer: type[AnswerWriter] = CompletionWriter, silence_seconds: float = 60
) -> AsyncIterator[Streamed]:
    engine = Engine()
    choices = Choices(engine, tokenizer)
    await choices.submit([InferenceRequest((1,), SamplingParams(max_tokens=100))])
    stream = EventStream(
        choices,
        writer(AnswerContext("m", tokenizer, "id")),
        ServerMetrics("m").token_times(Priority.NORMAL),
        loop_turns=LoopTurns(),
        began=0.0,
        silence_seconds=silence_seconds,
        headers={},
        finish=nothing_to_store,
        on_end=lambda outcome: found.outcomes.append(outcome),
    )
    found = Streamed(stream, engine, tokenizer.encode(TEXT, add_bos=False))
    scope: Any = {"type": "http", "state": {WRITER: found.writer}}
    task = asyncio.create_task(stream(scope, found.receive, found.send))
    await run_loop()
    try:
        yield found
        await asyncio.wait_for(task, 60)
    finally:
        task.cancel()


def run(tokenizer: Tokenizer, work: Callable[[Streamed], Any]) -> Streamed:
    async def go() -> Streamed:
        async with streamed(tokenizer) as found:
            await work(found)
        return found

    return asyncio.run(go())


def test_every_token_is_written_when_it_arrives(default_tokenizer: Tokenizer) -> None:
    async def work(found: Streamed) -> None:
        for number in range(1, 6):
            await found.put(1)
            assert len(found.texts) == number
        await found.end()

    found = run(default_tokenizer, work)
    kinds = [message["type"] for message in found.sent]
    assert kinds == ["http.response.start", "http.response.body"], "no piece went through send"
    assert "".join(found.texts) == TEXT
    assert found.writer.pieces[-1] == b"data: [DONE]\n\n"
    assert [len(outcome) for outcome in found.outcomes] == [1]


def test_the_first_event_is_sent_before_the_first_token(default_tokenizer: Tokenizer) -> None:
    async def go() -> None:
        async with streamed(default_tokenizer, ChatWriter) as found:
            [event] = [piece for piece in found.writer.pieces if piece]
            assert json.loads(event[6:])["choices"][0]["delta"]["role"] == "assistant"
            await found.end()
        assert b"".join(found.writer.pieces).count(b'"role"') == 1

    asyncio.run(go())


def test_a_silent_stream_sends_events_without_content(default_tokenizer: Tokenizer) -> None:
    async def go() -> Streamed:
        async with streamed(default_tokenizer, silence_seconds=0.01) as found:
            while len(found.texts) < 2:
                await asyncio.sleep(0.01)
            await found.put(2)
            found.may_send.clear()
            found.writer.is_paused = True
            await asyncio.sleep(0.1)  # several times the silence; the client reads nothing
            found.writer.is_paused = False
            found.may_send.set()
            await found.end()
            return found

    found = asyncio.run(asyncio.wait_for(go(), 60))
    assert found.texts[:2] == ["", ""] and "".join(found.texts) == TEXT
    assert [len(outcome) for outcome in found.outcomes] == [1]


def test_a_stream_whose_tokens_are_held_back_is_silent(default_tokenizer: Tokenizer) -> None:
    """The arguments of some calls are sent when they are complete. Their tokens arrive, and the client gets nothing."""

    class HoldsBack(CompletionWriter):
        def events(self, pieces: Sequence[Piece]) -> bytes:
            return b""

    async def go() -> None:
        async with streamed(default_tokenizer, HoldsBack, silence_seconds=0.5) as found:
            while len(found.texts) < 2:
                found.answer.put_token(found.tokens[0])
                await asyncio.sleep(0.01)
            await found.end()

    asyncio.run(asyncio.wait_for(go(), 60))


def test_outputs_that_arrive_before_submit_returns_are_not_lost(default_tokenizer: Tokenizer) -> None:
    """The connection to the engine is full, so that outputs arrive before `submit` returns. The reader calls `take`
    meanwhile."""

    class Slow(Engine):
        may_return = asyncio.Event()

        async def submit(self, *arguments: Any, **options: Any) -> list[RemoteAnswer]:
            answers = await super().submit(*arguments, **options)
            await self.may_return.wait()
            return answers

    async def run() -> None:
        engine, tokens = Slow(), default_tokenizer.encode(TEXT, add_bos=False)
        choices = Choices(engine, default_tokenizer)
        request = InferenceRequest((1,), SamplingParams(max_tokens=100))
        submitting = asyncio.create_task(choices.submit([request]))
        await run_loop()
        for token in tokens:
            engine.answer.put_token(token)
        await choices.wait()
        assert choices.take() == []
        engine.may_return.set()
        await submitting
        await asyncio.wait_for(choices.wait(), 60)
        assert "".join(piece.text for piece in choices.take()) == TEXT

        quiet = Choices(Engine(), default_tokenizer)
        await quiet.submit([request])
        assert not quiet._arrived.is_set(), (
            "no event is set before the first output: the status of a stream waits for it"
        )

    asyncio.run(run())


def test_without_a_writer_all_events_go_through_send(default_tokenizer: Tokenizer) -> None:
    async def work(found: Streamed) -> None:
        found.stream._writer = None
        await found.end()

    found = run(default_tokenizer, work)
    assert "".join(found.texts) == TEXT
    assert len(found.sent) == len(found.texts) + 2


def test_a_slow_client_gets_all_events_in_order(
    default_tokenizer: Tokenizer,
) -> None:
    async def work(found: Streamed) -> None:
        await found.put(2)
        found.may_send.clear()
        found.writer.is_paused = True
        await found.put(3)
        found.writer.is_paused = False
        await found.put(1)
        assert len(found.texts) == 2, "later events must not overtake waiting bytes"
        found.may_send.set()
        await run_loop()
        assert len(found.texts) == 4, "the waiting event, and one with all later tokens"
        await found.put(1)
        assert len(found.texts) == 5
        await found.end()

    found = run(default_tokenizer, work)
    assert "".join(found.texts) == TEXT
    assert len(found.sent) == 3


def test_a_turn_while_bytes_wait_to_be_sent_writes_nothing(
    default_tokenizer: Tokenizer,
) -> None:
    async def work(found: Streamed) -> None:
        found.writer.is_paused = True
        for _ in range(3):
            found.answer.put_token(found.tokens.pop(0))
            found.stream._write()
        found.writer.is_paused = False
        await run_loop()
        await found.end()

    assert "".join(run(default_tokenizer, work).texts) == TEXT


def test_the_answer_of_a_client_that_does_not_read_is_cancelled(default_tokenizer: Tokenizer) -> None:
    async def work(found: Streamed) -> None:
        found.may_send.clear()
        found.writer.is_paused = True
        found.tokens = found.tokens * 20
        await found.put(102)
        assert found.engine.cancelled == ["slow reader"]
        found.may_send.set()

    found = run(default_tokenizer, work)
    assert b"tokens are unread" in found.writer.pieces[-1] and b"[DONE]" not in found.writer.pieces[-1]
    assert isinstance(found.outcomes[0], ApiError)


def test_tokens_that_arrive_during_a_pause_share_one_event(
    default_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_SECONDS_PER_EVENT", 3600.0)
    monkeypatch.setattr(streaming, "_MAX_PAUSE", 3600.0)

    async def work(found: Streamed) -> None:
        await found.put(1)
        assert len(found.texts) == 1, "the first token is written at once"
        await found.put(4)
        assert len(found.texts) == 1
        assert found.stream._pause_timer is not None
        found.stream._pause_timer.cancel()
        found.stream._loop_turns.call_in_turn(found.stream._write)  # as if the pause were over
        await run_loop()
        assert len(found.texts) == 2
        monkeypatch.setattr(streaming, "_MAX_PAUSE", 0.0)
        found.stream._paused_until = 0.0
        await found.end()

    found = run(default_tokenizer, work)
    assert "".join(found.texts) == TEXT


def test_a_stream_whose_pause_is_over_needs_no_timer(
    default_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_SECONDS_PER_EVENT", 1e-9)
    monkeypatch.setattr(streaming, "_MIN_PAUSE", 0.0)

    async def work(found: Streamed) -> None:
        for _ in range(5):
            await found.put(1)
            assert found.stream._paused_until > 0 and found.stream._pause_timer is None
        await found.end()

    assert len(run(default_tokenizer, work).texts) > 5


def test_an_error_during_a_stream_is_its_last_event(default_tokenizer: Tokenizer) -> None:
    async def work(found: Streamed) -> None:
        await found.put(3)
        found.answer.fail(WeftError("the engine is gone"))

    found = run(default_tokenizer, work)
    assert b"the engine is gone" in found.writer.pieces[-1] and b"[DONE]" not in found.writer.pieces[-1]
    assert isinstance(found.outcomes[0], ApiError)


def test_an_error_during_a_stream_leaves_no_garbage(default_tokenizer: Tokenizer) -> None:
    async def once() -> None:
        async with streamed(default_tokenizer) as found:
            await found.put(3)
            found.answer.fail(WeftError("the engine is gone"))

    async def run() -> Counter[str]:
        await once()
        gc.collect()
        gc.disable()
        try:
            await once()
            await run_loop()
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            return Counter(type(one).__name__ for one in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()

    found = asyncio.run(run())
    # The test's own objects form cycles; objects of an error must not be among them.
    assert not {"Future", "traceback", "frame"} & found.keys(), found


def test_an_exception_while_writing_ends_only_its_own_stream(default_tokenizer: Tokenizer) -> None:
    seen: list[Streamed] = []

    async def work(found: Streamed) -> None:
        seen.append(found)
        found.writer.write = None  # type: ignore[assignment, method-assign]
        await found.put(1)

    with pytest.raises(TypeError):
        run(default_tokenizer, work)
    [found] = seen
    assert isinstance(found.outcomes[0], ApiError) and found.engine.cancelled


def test_nothing_is_written_after_the_client_disconnects(default_tokenizer: Tokenizer) -> None:
    async def work(found: Streamed) -> None:
        await found.put(2)
        found.answer.put_token(found.tokens.pop(0))  # its turn is requested, and comes after the disconnect
        found.is_gone.set()
        await run_loop()
        written = len(found.writer.pieces)
        await found.put(3)
        assert len(found.writer.pieces) == written

    found = run(default_tokenizer, work)
    assert found.outcomes == [None] and found.engine.cancelled == ["the client is gone"]


class Wire(asyncio.Transport):
    """A transport without a socket."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


async def body_and_messages(server: InProcess, http_version: str) -> tuple[list[tuple[bytes, bytes]], int]:
    """The texts of a stream's events, and the number of ASGI messages."""
    num_messages = 0

    async def counting(scope: Any, receive: Any, send: Any) -> None:
        async def count(message: Any) -> None:
            nonlocal num_messages
            num_messages += 1
            await send(message)

        await server._asgi(scope, receive, count)

    config = uvicorn.Config(
        counting, ws="none", lifespan="off", log_config=None, h11_max_incomplete_event_size=1 << 16
    )
    config.load()
    state, transport = ServerState(), Wire()
    protocol = TimedProtocol(config, state, header_seconds=10, body_seconds=10, stalled_reader_seconds=10)
    protocol.connection_made(transport)
    body = b'{"prompt": [1, 2, 3], "max_tokens": 40, "seed": 1, "ignore_eos": true, "stream": true}'
    head = (
        f"POST /v1/completions HTTP/{http_version}\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    protocol.data_received(head.encode() + body)
    await asyncio.wait_for(asyncio.gather(*state.tasks), 60)
    protocol.connection_lost(None)
    received = h11.Connection(h11.CLIENT)
    received.send(h11.Request(method="GET", target="/", headers=[("host", "localhost")]))
    received.send(h11.EndOfMessage())
    received.receive_data(transport.written)
    received.receive_data(b"")
    content = b""
    while not isinstance(one := received.next_event(), h11.EndOfMessage):
        content += one.data if isinstance(one, h11.Data) else b""
    return re.findall(rb'"text":("(?:[^"\\]|\\.)*")|\[(DONE)\]', content), num_messages


def test_an_error_before_the_application_has_an_id_of_the_injected_generator() -> None:
    async def no_app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("the request reached the application")

    async def run() -> bytes:
        config = uvicorn.Config(no_app, ws="none", log_config=None, h11_max_incomplete_event_size=1 << 16)
        config.load()
        seconds = {"header_seconds": 10.0, "body_seconds": 10.0, "stalled_reader_seconds": 10.0}
        protocol, transport = TimedProtocol(config, ServerState(), **seconds, new_id=lambda: "first"), Wire()
        protocol.connection_made(transport)
        protocol.data_received(b"not HTTP\r\n\r\n")
        protocol.connection_lost(None)
        return transport.written

    assert b"\r\nx-request-id: first\r\n\r\n" in asyncio.run(run())


def test_direct_writes_of_a_stream_give_the_same_text_as_asgi(default_model_path: Path) -> None:
    async def run() -> None:
        async with in_process(default_model_path) as server:
            short, num_short = await body_and_messages(server, "1.1")
            long, num_long = await body_and_messages(server, "1.0")  # HTTP/1.0 has no chunked encoding
            assert num_short == 2 < num_long, "only the head and the end go through ASGI"
            for events in (short, long):
                assert events[-1] == (b"", b"DONE")
            texts = [b"".join(text[1:-1] for text, _ in events) for events in (short, long)]
            assert texts[0] == texts[1] != b""

    asyncio.run(run())
