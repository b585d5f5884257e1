"""The engine's process and its asyncio client: messages, and failures of either side."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from weft.config import KvCachePoolConfig, SchedulerConfig, ServingEngineConfig
from weft.engine.ipc import wire
from weft.engine.ipc.client import EngineClient, EngineDiedError, EngineState
from weft.engine.ipc.launch import launch_engine
from weft.engine.ipc.liveness import Liveness
from weft.engine.ipc.remote_answer import RemoteAnswer, SlowReaderError
from weft.errors import EngineStoppedError, InvalidRequestError, QueueFullError, WeftError
from weft.request import (
    FinishReason,
    Grammar,
    InferenceRequest,
    RequestId,
    RequestState,
    SamplingParams,
    TokenOutput,
)

CONFIG = ServingEngineConfig(cache=KvCachePoolConfig(num_blocks=1024))
SLOW = {"seconds_per_step": 0.01}
"""For an answer that must not end before the test acts on it."""


def request(max_tokens: int = 8, **params: object) -> InferenceRequest:
    return InferenceRequest((1, 2, 3), SamplingParams(max_tokens=max_tokens, **params))  # type: ignore[arg-type]


def with_client(
    use: Callable[[EngineClient], Awaitable[None]],
    config: ServingEngineConfig = CONFIG,
    backend: str = "noop",
    **options: object,
) -> None:
    async def run() -> None:
        client = EngineClient(backend, options, config)
        await client.start()
        try:
            await use(client)
        finally:
            await client.stop()

    asyncio.run(asyncio.wait_for(run(), 60))


async def outputs_of(answer: RemoteAnswer) -> list[TokenOutput]:
    return [output async for outputs in answer for output in outputs]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def until_free(client: EngineClient) -> None:
    """Waits until all blocks are free: a step in flight holds the blocks of a request that ended."""
    while (metrics := await client.metrics()).cache_utilisation:
        await asyncio.sleep(0.01)
    assert metrics.requests_running == 0


def test_tokens_logprobs_and_the_result_arrive_and_agree() -> None:
    async def use(client: EngineClient) -> None:
        [answer] = await client.submit(request(logprobs=2, seed=1))
        outputs = await outputs_of(answer)
        result = answer.result
        assert result is not None and result.state is RequestState.COMPLETED
        assert result.completion_token_count == len(outputs) == answer.num_tokens == 8
        assert [output.sequence_length for output in outputs] == list(range(4, 12))
        for output in outputs:
            assert output.token_id is not None and output.logprob is not None
            assert [logprob for _, logprob in output.top_logprobs] == [0.0, -1 / 8]
        assert result.finish_reason is FinishReason.LENGTH and outputs[-1].is_final
        assert client.num_unfinished == 0

    with_client(use)


def test_a_launched_process_is_used_first_and_its_replacement_has_the_same_options() -> None:
    async def run() -> None:
        options = {"vocabulary_size": 321}
        launched = launch_engine("noop", options, CONFIG)
        client = EngineClient("noop", options, CONFIG, launched=launched)
        await client.start()
        try:
            assert client._process is launched.process
            assert client.info is not None and client.info.vocabulary_size == 321
            launched.process.kill()
            await until(lambda: client.restarts == 1 and client.state is EngineState.READY)
            assert client._process is not launched.process and client.info.vocabulary_size == 321
        finally:
            await client.stop()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_launched_process_ends_when_its_connection_is_closed() -> None:
    launched = launch_engine("noop", {}, CONFIG)
    launched.connection.close()
    assert launched.process.wait(30) is not None


def test_wake_every_wakes_the_reader_at_the_first_token_then_at_groups_of_tokens_and_at_the_end() -> None:
    async def use(client: EngineClient) -> None:
        arrived = asyncio.Event()
        [answer] = await client.submit(request(100, seed=1, ignore_eos=True), arrived, wake_every=30)
        taken: list[list[TokenOutput]] = []
        while not taken or not taken[-1][-1].is_final:
            await arrived.wait()
            arrived.clear()
            taken.append(answer.take())
        assert sum(map(len, taken)) == answer.num_tokens == 100
        assert len(taken) <= 5  # the first token, then groups of at least 30, then the rest

    with_client(use)


def test_a_restart_estimates_its_duration_from_the_last_start() -> None:
    async def use(client: EngineClient) -> None:
        expected: list[float] = []
        client._log = lambda *event, **fields: expected.append(client.seconds_until_ready)
        assert client._process is not None
        client._process.kill()
        await until(lambda: client.restarts == 1 and client.state is EngineState.READY)
        assert expected[0] > 0

    with_client(use)


def test_finish_cuts_the_result_after_the_token_that_completes_the_stop_string() -> None:
    async def use(client: EngineClient) -> None:
        [answer] = await client.submit(request(5000))
        await answer.read()
        answer.finish(1)
        await outputs_of(answer)
        assert answer.result is not None and answer.result.completion_token_count == 1
        assert answer.result.finish_reason is FinishReason.STOP

    with_client(use, **SLOW)


def test_compiling_a_grammar_delays_no_other_request_and_can_be_cancelled_and_finished(
    default_model_path: Path,
) -> None:
    grammar = Grammar("regex", "[a-z ]{100,200}")

    async def use(client: EngineClient) -> None:
        assert client._process is not None
        os.kill(client._process.pid, signal.SIGSTOP)  # so that it receives all messages at once
        [cancelled, other] = await client.submit(request(100, grammar=grammar, n=2))
        cancelled.cancel("changed my mind")
        other.finish(0)
        # The first grammar compiles slowly, because it reads the vocabulary. Later messages are handled before it ends.
        [refused] = await client.submit(InferenceRequest((1,) * 9000))
        asking = asyncio.create_task(client.metrics())
        await asyncio.sleep(0)
        os.kill(client._process.pid, signal.SIGCONT)
        with pytest.raises(InvalidRequestError, match="9000"):
            await refused.read()
        seen = await asking
        begun = seen.requests_pending + seen.requests_running
        assert (begun, seen.requests_completed, seen.requests_cancelled) == (0, 0, 0), (
            "the metrics waited for the grammar"
        )
        await asyncio.gather(outputs_of(cancelled), outputs_of(other))
        assert cancelled.result is not None and cancelled.result.state is RequestState.CANCELLED
        assert other.result is not None and other.result.finish_reason is FinishReason.STOP
        assert other.result.completion_token_count == 0
        [wrong] = await client.submit(request(grammar=Grammar("regex", "a(")))
        with pytest.raises(InvalidRequestError, match="unclosed group") as refused_error:
            await wrong.read()
        assert (refused_error.value.field, refused_error.value.code) == ("grammar", "invalid_grammar")
        [right] = await client.submit(request(grammar=Grammar("choice", '["yes"]')))
        await outputs_of(right)
        assert right.result is not None and right.result.finish_reason is FinishReason.END_OF_SEQUENCE
        assert client.num_unfinished == 0

    with_client(use, backend="cpu", checkpoint=str(default_model_path), max_context=512)


def test_07_a_request_cancelled_before_its_grammar_is_compiled_is_never_compiled(
    default_model_path: Path,
) -> None:
    def heavy(number: int) -> Grammar:
        """A grammar that takes most of a second until it is refused."""
        properties = {f"p{index}": {"type": "string"} for index in range(150)}
        schema = {"title": f"{number}", "type": "object", "properties": properties, "minProperties": 1}
        return Grammar("json_schema", json.dumps({**schema, "additionalProperties": False}))

    async def use(client: EngineClient) -> None:
        assert client._process is not None
        [warm] = await client.submit(request(4, grammar=Grammar("regex", "[a-z]+")))
        await outputs_of(warm)
        os.kill(client._process.pid, signal.SIGSTOP)  # so that it receives all messages at once
        left = [
            answer
            for index in range(12)
            for answer in await client.submit(request(4, grammar=heavy(index), n=2))
        ]
        for answer in left:
            answer.cancel("the client is gone")
        [light] = await client.submit(request(4, grammar=Grammar("regex", "[0-9]+")))
        os.kill(client._process.pid, signal.SIGCONT)
        await outputs_of(light)
        num_dropped = 0
        for answer in left:
            try:
                await outputs_of(answer)
            except WeftError as error:
                num_dropped += "before its grammar was compiled" in str(error)
        # The two compiler threads may have started one grammar each.
        assert num_dropped >= len(left) - 4
        assert client.num_unfinished == 0

    with_client(use, backend="cpu", checkpoint=str(default_model_path), max_context=512)


def test_a_refused_request_raises_the_same_error_and_is_not_queued() -> None:
    async def use(client: EngineClient) -> None:
        [first, second] = await client.submit(
            InferenceRequest((1,) * 9000, SamplingParams(max_tokens=5, n=2))
        )
        for answer in (first, second):
            with pytest.raises(InvalidRequestError, match="9000") as refused:
                await answer.read()
            assert (refused.value.field, refused.value.code) == ("prompt", "context_length_exceeded")
        answers = [(await client.submit(request(5000)))[0] for _ in range(8)]
        with pytest.raises(QueueFullError):
            await asyncio.gather(*(outputs_of(answer) for answer in answers))

    config = ServingEngineConfig(scheduler=SchedulerConfig(max_running=1, max_waiting_requests=2))
    with_client(use, config)


def test_a_cancel_ends_an_answer_and_frees_its_blocks() -> None:
    async def use(client: EngineClient) -> None:
        [answer] = await client.submit(request(5000))
        await answer.read()
        answer.cancel("enough")
        await outputs_of(answer)
        assert answer.result is not None and answer.result.state is RequestState.CANCELLED
        await until_free(client)

    with_client(use, **SLOW)


def test_a_slow_reader_gets_an_error_and_its_request_is_cancelled() -> None:
    async def use(client: EngineClient) -> None:
        [slow] = await client.submit(request(4000))
        [quick] = await client.submit(request(300))
        # A fast reader loses no token, even with a small buffer.
        assert len(await outputs_of(quick)) == 300
        await until(lambda: client.num_unfinished == 0)
        with pytest.raises(SlowReaderError):
            await slow.read()
        await until_free(client)

    with_client(use, ServingEngineConfig(cache=CONFIG.cache, stream_buffer=512))


def test_the_final_output_is_accepted_even_if_the_buffer_is_full() -> None:
    async def use(client: EngineClient) -> None:
        [answer] = await client.submit(request(65))
        await until(lambda: client.num_unfinished == 0)
        assert len(await outputs_of(answer)) == 65

    with_client(use, ServingEngineConfig(cache=CONFIG.cache, stream_buffer=64))


def test_a_reader_is_not_slow_only_because_many_tokens_arrive_at_once() -> None:
    async def use(client: EngineClient) -> None:
        [answer] = await client.submit(request(3000))
        num_read = len(await answer.read())
        time.sleep(0.5)  # blocks the event loop while hundreds of tokens arrive at the socket
        assert num_read + len(await outputs_of(answer)) == 3000

    with_client(use, ServingEngineConfig(cache=CONFIG.cache, stream_buffer=64))


def test_a_killed_process_fails_its_answers_and_is_restarted() -> None:
    events: list[str] = []

    async def use(client: EngineClient) -> None:
        client._log = lambda name, *message, **fields: events.append(name)
        [answer] = await client.submit(request(8000))
        await answer.read()
        assert client._process is not None
        os.kill(client._process.pid, signal.SIGKILL)
        with pytest.raises(EngineDiedError):
            await outputs_of(answer)
        with pytest.raises(EngineStoppedError):
            await client.submit(request())
        await until(lambda: "engine_restarted" in events)
        assert client.restarts == 1 and events == ["engine_died", "engine_restarted"]
        [answer] = await client.submit(request())
        assert len(await outputs_of(answer)) == 8

    with_client(use, **SLOW)


def test_answers_end_even_if_watching_the_process_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: EngineClient) -> None:
        (answer,) = await client.submit(request(max_tokens=2000))
        await answer.read()
        monkeypatch.setattr(Liveness, "check", _no_descriptors)
        with pytest.raises(EngineDiedError):
            while True:
                await answer.read()
        assert client.num_unfinished == 0
        monkeypatch.undo()
        await until(lambda: client.state is EngineState.READY)
        assert len(await outputs_of((await client.submit(request(max_tokens=3)))[0])) == 3

    def _no_descriptors(liveness: Liveness) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with_client(test, seconds_per_step=0.01)


def test_stopping_raises_an_error_for_waiting_readers() -> None:
    async def use(client: EngineClient) -> None:
        [answer] = await client.submit(request(8000))
        await answer.read()
        await client.stop()
        with pytest.raises(EngineStoppedError):
            await outputs_of(answer)

    with_client(use, **SLOW)


def test_an_engine_that_cannot_be_built_raises_its_error_with_the_exit_code() -> None:
    async def run(backend: str, options: dict[str, object]) -> None:
        await EngineClient(backend, options, CONFIG).start()

    with pytest.raises(WeftError, match="backend is 'banana'") as unknown:
        asyncio.run(run("banana", {}))
    assert unknown.value.exit_code == 2
    with pytest.raises(WeftError, match=r"/nowhere/model\.gguf") as missing:
        asyncio.run(run("cpu", {"checkpoint": "/nowhere/model.gguf"}))
    assert missing.value.exit_code == 2


JUNK = [b"\xff" * 8, struct.pack("<I", 3) + b"abc", b"GET / HTTP/1.1\r\n\r\n" * 100, b"\x00\x00\x00\x00"]


@pytest.mark.parametrize("junk", JUNK, ids=["a huge length", "no message", "HTTP", "an empty message"])
@pytest.mark.parametrize("is_started", [True, False], ids=["after the start", "as the start"])
def test_36_junk_on_the_socket_ends_the_process_and_nothing_else(junk: bytes, is_started: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "weft.engine.ipc.process", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        if is_started:
            ours.sendall(wire.framed(wire.Start("noop", {}, CONFIG)))
            ours.recv(1 << 16)
        ours.sendall(junk)
        ours.shutdown(socket.SHUT_WR)
        assert process.wait(30) == (0 if is_started else 1)


def test_36_nothing_internal_listens_on_tcp() -> None:
    async def use(client: EngineClient) -> None:
        assert client._process is not None
        descriptors = Path(f"/proc/{client._process.pid}/fd")
        links = {os.readlink(link) for link in descriptors.iterdir() if link.is_symlink()}
        sockets = {link[8:-1] for link in links if link.startswith("socket:")}
        tcp = "".join(
            Path(f"/proc/net/{name}").read_text()
            for name in ("tcp", "tcp6")
            if Path(f"/proc/net/{name}").exists()
        )
        listening = {line.split()[9] for line in tcp.splitlines() if " 0A " in line}
        assert sockets and not sockets & listening

    with_client(use)


def test_frames_are_complete_for_every_split_of_the_bytes() -> None:
    messages = [wire.Cancel(RequestId(str(number)), number, "x" * number) for number in range(50)]
    stream = b"".join(map(wire.framed, messages))
    for size in (1, 3, 7, 1000):
        frames = wire.Frames()
        parts = [stream[start : start + size] for start in range(0, len(stream), size)]
        contents = [content for part in parts for content in frames.feed(part)]
        assert [wire.to_engine.decode(content) for content in contents] == messages
    with pytest.raises(ValueError, match="allowed"):
        list(wire.Frames().feed(b"\xff\xff\xff\xff"))


def test_a_request_that_cannot_be_encoded_raises_and_is_not_kept() -> None:
    async def run() -> int:
        client = EngineClient("noop", {"vocabulary_size": 100, "max_context": 64}, CONFIG)
        await client.start()
        try:
            with pytest.raises(OverflowError):
                await client.submit(InferenceRequest((1, 10**30)))
            return client.num_unfinished
        finally:
            await client.stop()

    assert asyncio.run(run()) == 0
