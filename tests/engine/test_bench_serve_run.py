"""The load generator against a test server that answers, dies, stalls or sends invalid data.

No test depends on timing: the server waits for events of the test, and the tests check counts.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from weft.bench.serve_api import ServerError
from weft.bench.serve_client import Client
from weft.bench.serve_load import Item, Phase
from weft.bench.serve_measure import Targets
from weft.bench.serve_run import PhaseResult, Report, measure
from weft.cli import main as cli

Handler = Callable[["Call"], Awaitable[None]]


class Call:
    """A received request, and methods to answer it."""

    def __init__(
        self,
        path: str,
        headers: str,
        body: dict[str, Any],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.path, self.headers, self.body, self.reader, self.writer = path, headers, body, reader, writer

    @property
    def prompt(self) -> Any:
        return self.body["messages"][0]["content"] if "messages" in self.body else self.body["prompt"]

    @property
    def is_probe(self) -> bool:
        return self.body["max_tokens"] == 2

    def raw(self, data: bytes) -> None:
        self.writer.write(data)

    def whole(self, status: str, document: object) -> None:
        body = json.dumps(document).encode()
        self.raw(f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n".encode())
        self.raw(b"content-length: %d\r\n\r\n%s" % (len(body), body))

    def begin(self) -> None:
        self.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    def event(self, payload: object) -> None:
        data = payload if isinstance(payload, bytes) else b"data: %s\n\n" % json.dumps(payload).encode()
        self.raw(b"%x\r\n%s\r\n" % (len(data), data))

    def token(self) -> None:
        part: dict[str, Any] = {"delta": {"content": "x"}} if "messages" in self.body else {"text": "x"}
        self.event({"choices": [{"index": 0, **part, "finish_reason": None}]})

    def end(self, count: int) -> None:
        usage = {"prompt_tokens": len(self.prompt), "completion_tokens": count}
        if "stream_options" in self.body:
            self.event({"choices": [], "usage": usage})
        self.event(b"data: [DONE]\n\n")
        self.raw(b"0\r\n\r\n")

    async def answer(self) -> None:
        self.begin()
        for _ in range(self.body["max_tokens"]):
            self.token()
            await asyncio.sleep(0)
        self.end(self.body["max_tokens"])


class Server:
    """A minimal HTTP server. Every completion goes to `handler`; probes are answered directly."""

    def __init__(self, handler: Handler, answer_probe: bool = True) -> None:
        self.handler, self.answer_probe = handler, answer_probe
        self.calls: list[Call] = []
        self.num_connections = 0

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
                body = await reader.readexactly(length)
                path = head.split(" ")[1]
                call = Call(path, head, json.loads(body) if body else {}, reader, writer)
                if path.endswith("/v1/models"):
                    call.whole("200 OK", {"data": [{"id": "test-model"}]})
                elif self.answer_probe and call.is_probe:
                    await call.answer()
                else:
                    self.calls.append(call)
                    await self.handler(call)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def load(server: Server | str, phase: Phase, seconds: float = 30.0, **options: Any) -> Report:
    url = server if isinstance(server, str) else server.url
    options = {"targets": Targets(), "decode": lambda ids: " ".join(map(str, ids)), **options}
    return await measure(Client(url), [phase], seconds=seconds, print_status=lambda line: None, **options)


def measured(
    handler: Handler, phase: Phase, seconds: float = 30.0, answer_probe: bool = True, **options: Any
) -> tuple[PhaseResult, Server]:
    async def test() -> tuple[PhaseResult, Server]:
        async with Server(handler, answer_probe) as server:
            report = await load(server, phase, seconds, **options)
            return report.phases[0], server

    return asyncio.run(asyncio.wait_for(test(), 60))


def items(count: int, max_tokens: int = 3, at: float = 0.0) -> tuple[Item, ...]:
    return tuple(Item((number, 7, 8), max_tokens, at) for number in range(count))


# ---------------------------------------------------------------------- load


def test_every_request_of_a_closed_loop_is_answered_on_reused_connections() -> None:
    result, server = measured(Call.answer, Phase("p", items(20, max_tokens=5), clients=4))
    summary = result.summary
    assert (summary.requests, summary.answered, summary.failures) == (20, 20, {})
    assert (summary.output_tokens, summary.prompt_tokens) == (100, 60)
    assert summary.tokens_from_usage and summary.short_answers == 0
    assert all(len(record.chunk_times) == 5 for record in result.records)
    assert all(r.began <= r.chunk_times[0] <= r.chunk_times[-1] <= r.ended for r in result.records)
    assert server.num_connections == 4
    assert sorted(call.prompt[0] for call in server.calls) == list(range(20))


def test_a_closed_loop_never_has_more_open_requests_than_clients() -> None:
    num_open, most = 0, 0

    async def handler(call: Call) -> None:
        nonlocal num_open, most
        num_open += 1
        most = max(most, num_open)
        await asyncio.sleep(0.001)
        num_open -= 1  # before the answer: after its end the client may send its next request
        await call.answer()

    measured(handler, Phase("p", items(30), clients=3))
    assert most == 3


def test_arrivals_do_not_wait_for_answers() -> None:
    count, all_arrived = 12, asyncio.Event()
    received: list[Call] = []

    async def handler(call: Call) -> None:
        received.append(call)
        if len(received) == count:
            all_arrived.set()
        await all_arrived.wait()  # a closed loop would wait here forever
        await call.answer()

    phase = Phase("p", tuple(Item((n,), 3, 0.002 * (n // 4)) for n in range(count)))
    result, server = measured(handler, phase)
    assert result.summary.answered == count
    assert server.num_connections == count
    assert [record.due for record in result.records] == [item.at for item in phase.items]
    assert all(record.due is not None and record.began >= record.due for record in result.records)


def test_connections_are_open_before_the_clock_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.bench.serve_run.LEAD", 0.0)  # the connections must not depend on the lead time
    connections_at_first_request: list[int] = []

    async def test() -> None:
        async def handler(call: Call) -> None:
            connections_at_first_request.append(server.num_connections)
            await call.answer()

        async with Server(handler) as server:
            await load(server, Phase("p", items(6)))

    asyncio.run(asyncio.wait_for(test(), 60))
    assert connections_at_first_request[0] == 6


def test_gaps_are_between_chunks_even_if_one_read_brings_several() -> None:
    async def handler(call: Call) -> None:
        call.begin()
        one = json.dumps({"choices": [{"text": "x", "finish_reason": None}]}).encode()
        call.event((b"data: %s\n\n" % one) * 3)
        call.end(7)

    result, _ = measured(handler, Phase("p", items(1, max_tokens=7), clients=1))
    (record,) = result.records
    assert len(record.gaps) == 2 and record.output_tokens == 7
    assert record.gaps == [0.0, 0.0]
    assert result.summary.tokens_per_chunk == pytest.approx(7 / 3)


def test_warm_up_requests_are_not_measured_and_share_no_prefix() -> None:
    phase = Phase(
        "p", tuple(Item((n, 50, 60 + n), 3) for n in range(4)), clients=2, warm_up=(Item((99,), 1),)
    )
    result, server = measured(Call.answer, phase, num_warm_up=2)
    assert [call.prompt for call in server.calls[:3]] == [[60, 50, 0], [61, 50, 1], [99]]
    assert result.summary.requests == 4 and len(server.calls) == 7


def test_goodput_is_counted_on_a_real_run() -> None:
    result, _ = measured(
        Call.answer, Phase("p", items(4), clients=2), targets=Targets(end_to_end=1e-9, first_token=100.0)
    )
    assert result.summary.good_share == 0.0
    result, _ = measured(Call.answer, Phase("p", items(4), clients=2), targets=Targets(end_to_end=100.0))
    assert result.summary.good_share == 1.0 and result.summary.goodput is not None


# ---------------------------------------------------------------------- faults of servers


async def refuse(call: Call) -> None:
    call.whole("503 Service Unavailable", {"error": {"message": "busy"}})


async def die_before(call: Call) -> None:
    call.writer.transport.abort()


async def die_in_the_answer(call: Call) -> None:
    call.begin()
    call.token()
    await call.writer.drain()
    call.writer.close()


async def stall_before(call: Call) -> None:
    await call.reader.read()  # until the client disconnects


async def stall_in_the_answer(call: Call) -> None:
    call.begin()
    call.token()
    await call.writer.drain()
    await call.reader.read()  # until the client disconnects


async def send_junk(call: Call) -> None:
    call.raw(b"\x00\xff this is no HTTP\r\n\r\n")


async def send_junk_events(call: Call) -> None:
    call.begin()
    call.event(b"data: {not json}\n\n")


async def send_error_event(call: Call) -> None:
    call.begin()
    call.token()
    call.event({"error": {"message": "the engine died"}})
    call.raw(b"0\r\n\r\n")


async def answer_whole(call: Call) -> None:
    call.whole("200 OK", {"choices": [{"text": "all at once"}]})


async def answer_nothing(call: Call) -> None:
    call.begin()
    call.end(0)


async def stop_without_end(call: Call) -> None:
    call.begin()
    call.token()
    call.raw(b"0\r\n\r\n")


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (refuse, "HTTP 503"),
        (die_before, "closed before the first token"),
        (die_in_the_answer, "closed in the answer"),
        (send_junk, "junk"),
        (send_junk_events, "junk"),
        (send_error_event, "error event"),
        (answer_whole, "not streamed"),
        (answer_nothing, "no tokens"),
        (stop_without_end, "cut short"),
    ],
)
def test_a_fault_is_counted_by_its_kind_and_the_other_requests_are_answered(
    fault: Handler, kind: str
) -> None:
    async def handler(call: Call) -> None:
        await (fault(call) if call.prompt[0] % 2 else call.answer())

    result, _ = measured(handler, Phase("p", items(6), clients=2))
    assert result.summary.failures == {kind: 3}
    assert [record.failure_kind for record in result.records] == [None, kind] * 3
    assert all(record.failure_detail for record in result.records if record.failure_kind)
    assert all(record.ended >= record.began for record in result.records)


def test_a_request_to_a_server_that_stalls_ends_at_its_timeout() -> None:
    result, _ = measured(stall_before, Phase("p", items(3), clients=1), seconds=0.1)
    assert result.summary.failures == {"timed out before the first token": 3}
    for seconds in (0.2, 2.0, 20.0):  # long enough for the first token, which is sent at once
        result, _ = measured(stall_in_the_answer, Phase("p", items(3), clients=3), seconds=seconds)
        if result.summary.failures == {"timed out in the answer": 3}:
            break
    assert result.summary.failures == {"timed out in the answer": 3}
    assert all(record.failure_detail == f"not finished after {seconds:g} s" for record in result.records)


def test_requests_to_a_server_that_has_ended_are_counted_as_refused() -> None:
    async def test() -> PhaseResult:
        async def handler(call: Call) -> None:
            if call.prompt[0] == 2:
                server._server.close()
                call.writer.transport.abort()
            else:
                await call.answer()

        async with Server(handler) as server:
            return (await load(server, Phase("p", items(6), clients=1))).phases[0]

    result = asyncio.run(asyncio.wait_for(test(), 60))
    assert [record.failure_kind is None for record in result.records] == [True, True, *[False] * 4]
    assert result.summary.failures == {"refused": 4}


def test_a_request_on_a_connection_that_the_server_closed_is_sent_again_and_answered() -> None:
    used: set[asyncio.StreamWriter] = set()

    async def handler(call: Call) -> None:
        if call.writer in used:  # closed without a response, as a server closes idle connections
            call.writer.transport.abort()
        else:
            used.add(call.writer)
            await call.answer()

    result, server = measured(handler, Phase("p", items(5), clients=1))
    assert result.summary.answered == 5
    assert result.reconnects == 4 and server.num_connections == 5


def test_a_body_without_an_end_does_not_fail_a_complete_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.bench.serve_client.CLOSING_SECONDS", 0.01)

    async def handler(call: Call) -> None:
        call.begin()
        call.token()
        call.event(b"data: [DONE]\n\n")
        await call.writer.drain()
        await call.reader.read()  # until the client disconnects

    result, _ = measured(handler, Phase("p", items(2, max_tokens=1), clients=1))
    assert result.summary.answered == 2


# ---------------------------------------------------------------------- probing the API


def probe_server(refuses: Callable[[dict[str, Any]], bool], **options: Any) -> tuple[Report, list[Call]]:
    async def handler(call: Call) -> None:
        if refuses(call.body):
            call.whole("400 Bad Request", {"error": {"message": "not that"}})
        else:
            await call.answer()

    async def test() -> tuple[Report, list[Call]]:
        async with Server(handler, answer_probe=False) as server:
            return await load(server, Phase("p", items(2), clients=1), **options), server.calls

    return asyncio.run(asyncio.wait_for(test(), 60))


def test_a_server_that_accepts_every_field_gets_all_of_them() -> None:
    report, calls = probe_server(lambda body: False)
    assert report.dialect.takes_ids and report.dialect.takes_exact_length and report.dialect.takes_usage
    assert len(calls) == 3, "one probe"
    assert calls[0].prompt == [8, 7, 0], "reversed, so that the first measured request gets no prefix hit"
    assert report.dialect.model == "test-model"


def test_a_server_without_ignore_eos_or_token_ids_gets_requests_without_them() -> None:
    report, calls = probe_server(lambda body: "ignore_eos" in body)
    assert report.dialect.takes_ids and not report.dialect.takes_exact_length
    report, calls = probe_server(lambda body: isinstance(body["prompt"], list))
    assert not report.dialect.takes_ids and report.dialect.takes_exact_length
    assert calls[-1].prompt == "1 7 8"
    report, calls = probe_server(
        lambda body: isinstance(body["prompt"], list) or "ignore_eos" in body or "stream_options" in body
    )
    assert report.phases[0].summary.answered == 2
    assert not report.phases[0].summary.tokens_from_usage


def test_a_chat_is_sent_as_messages() -> None:
    report, calls = probe_server(lambda body: False, api="chat")
    assert {call.path for call in calls} == {"/v1/chat/completions"}
    assert report.phases[0].summary.answered == 2
    assert calls[-1].prompt == "1 7 8"


def test_a_server_that_refuses_every_request_is_not_measured() -> None:
    with pytest.raises(ServerError, match=r"did not answer a request of two tokens: HTTP 400.*not that"):
        probe_server(lambda body: True)


def test_a_missing_server_and_a_missing_list_of_models_are_reported() -> None:
    with pytest.raises(ServerError, match=r"no HTTP server answers at http://127.0.0.1:1:"):
        asyncio.run(load("http://127.0.0.1:1", Phase("p", items(1))))

    async def lost(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        writer.close()  # since Python 3.12, a closing server waits for its connections

    async def test() -> None:
        async with await asyncio.start_server(lost, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            await load(f"http://127.0.0.1:{port}", Phase("p", items(1)))

    with pytest.raises(ServerError, match="--served-model"):
        asyncio.run(asyncio.wait_for(test(), 60))


# ---------------------------------------------------------------------- the command


@pytest.fixture
def running_server() -> Any:
    """A server in its own thread, for commands with their own event loop."""
    started, loop = threading.Event(), asyncio.new_event_loop()
    found: list[Server] = []

    async def handler(call: Call) -> None:
        await (refuse(call) if call.prompt == "refuse me" else call.answer())

    async def serve() -> None:
        async with Server(handler) as server:
            found.append(server)
            started.set()
            await stop.wait()

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(30)
    yield found[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join()


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["weft", "bench", "serve", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


def test_the_command_prints_and_writes_its_measurements(
    running_server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"at": 0.01 * n, "prompt": f"prompt {n}", "max_tokens": 3 + n} for n in range(5)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    document, page = tmp_path / "report.json", tmp_path / "report.html"
    options = ("--trace", str(trace), "--json", str(document), "--html", str(page), "--ttft", "10s")
    code = command(monkeypatch, running_server.url, *options, "--api-key", "very-secret")
    out = capsys.readouterr()
    assert code == 0, out.err
    assert "output tokens/s" in out.out and "trace.jsonl" in out.out
    (phase,) = json.loads(document.read_text())["phases"]
    assert phase["summary"]["output_tokens"] == 3 + 4 + 5 + 6 + 7
    assert [request["output_tokens"] for request in phase["requests"]] == [3, 4, 5, 6, 7]
    assert all("\r\nAuthorization: Bearer very-secret\r\n" in call.headers for call in running_server.calls)
    for text in (out.out, out.err, document.read_text(), page.read_text()):
        assert "very-secret" not in text


def test_the_command_ends_with_1_if_requests_failed_and_with_2_if_an_option_is_invalid(
    running_server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trace = tmp_path / "trace.jsonl"
    prompts = ("fine", "refuse me")
    trace.write_text(
        "\n".join(json.dumps({"at": 0, "prompt": prompt, "max_tokens": 3}) for prompt in prompts)
    )
    assert command(monkeypatch, running_server.url, "--trace", str(trace)) == 1
    assert "1 of 2 failed, HTTP 503" in capsys.readouterr().out
    assert command(monkeypatch, running_server.url, "--trace", str(trace), "--clients", "4") == 2
    assert "give one" in capsys.readouterr().err
    assert command(monkeypatch, running_server.url, "--ttft", "250") == 2
    assert "250ms" in capsys.readouterr().err
    assert command(monkeypatch, "http://127.0.0.1:1", "--trace", str(trace)) == 1
    assert "Is the server running?" in capsys.readouterr().err


def test_the_tokens_per_second_that_the_client_reads_are_printed() -> None:
    """The criterion is 50,000 on one core. Here server and client share a core, so the figure is only printed."""

    async def handler(call: Call) -> None:
        one = (
            b"data: %s\n\n"
            % json.dumps({"choices": [{"index": 0, "text": " x", "finish_reason": None}]}).encode()
        )
        call.begin()
        call.raw((b"%x\r\n%s\r\n" % (len(one), one)) * call.body["max_tokens"])
        call.end(call.body["max_tokens"])

    start = time.process_time()
    result, _ = measured(handler, Phase("p", items(32, max_tokens=1000), clients=8))
    seconds = time.process_time() - start
    assert result.summary.output_tokens == 32_000
    assert all(len(record.chunk_times) == 1000 for record in result.records)
    print(f"client and server: {32_000 / seconds:,.0f} tokens per second of CPU time")
