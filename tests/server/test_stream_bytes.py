"""The fast paths of a stream write the same bytes as the general ones."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import msgspec
import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from uvicorn.protocols.http.flow_control import FlowControl

from weft.config import ServingEngineConfig
from weft.engine.ipc.client import EngineClient
from weft.engine.ipc.shared_answers import SharedAnswers
from weft.errors import EngineStoppedError
from weft.request import Priority, SamplingParams
from weft.server.api.answer_format import AnswerContext
from weft.server.api.chat import ChatWriter
from weft.server.api.completion import CompletionWriter
from weft.server.http.protocol import BodyWriter, _Connection
from weft.server.metrics import _TOKEN_SECONDS, ServerMetrics
from weft.text.answer_text import AnswerText
from weft.text.tokenizer import Tokenizer

TEXTS = ("", "a", ' "quoted" \\ / \n\t\x00\x7f', "naïve 日本 \U0001f600", '"",[]', "[]")


@pytest.mark.parametrize("kind", [ChatWriter, CompletionWriter])
@pytest.mark.parametrize("more", [{}, {"usage": None}])
def test_a_chunk_from_cached_parts_equals_the_encoded_chunk(
    kind: type[ChatWriter | CompletionWriter], more: dict[str, Any], default_tokenizer: Tokenizer
) -> None:
    writer = kind(AnswerContext('a "model" [] ""', default_tokenizer, "id"), include_usage=bool(more))
    for index in (0, 1, 0, 12):
        for text in TEXTS:
            choice = writer.text(index, text)
            whole = b"data: " + msgspec.json.encode(writer.chunk([choice], **more)) + b"\n\n"
            assert writer.text_event(index, text) == writer.event(choice) == whole


def begin(connection: h11.Connection, http_version: bytes) -> None:
    """Receives a request, so that a response can be sent."""
    connection.receive_data(b"GET / HTTP/" + http_version + b"\r\nhost: localhost\r\n\r\n")
    while not isinstance(connection.next_event(), h11.EndOfMessage):
        pass


def sent_by(connection: h11.Connection, http_version: bytes, headers: list[tuple[str, str]]) -> list[bytes]:
    begin(connection, http_version)
    pieces = (b"data: 1\n\n", b"", b"x" * 300)
    events = [
        h11.Response(status_code=200, headers=headers),
        *(h11.Data(data=piece) for piece in pieces),
        h11.EndOfMessage(),
    ]
    return [connection.send(event) or b"" for event in events]


@pytest.mark.parametrize("http_version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("headers", [[], [("content-length", "309")], [("Transfer-Encoding", "chunked")]])
def test_a_connection_sends_what_h11_sends(http_version: bytes, headers: list[tuple[str, str]]) -> None:
    ours, theirs = _Connection(h11.SERVER), h11.Connection(h11.SERVER)
    assert sent_by(ours, http_version, headers) == sent_by(theirs, http_version, headers)
    if http_version == b"1.1":
        for connection in (ours, theirs):
            connection.start_next_cycle()
        lengths = [("content-length", "309")]
        assert sent_by(ours, http_version, lengths) == sent_by(theirs, http_version, lengths)


class Wire(asyncio.Transport):
    """A transport that records the written bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.has_closed = False

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return self.has_closed


@pytest.mark.parametrize("http_version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("headers", [[], [("content-length", "309")]])
def test_a_directly_written_piece_equals_what_h11_sends(
    http_version: bytes, headers: list[tuple[str, str]]
) -> None:
    async def run() -> None:
        ours, theirs, wire = _Connection(h11.SERVER), h11.Connection(h11.SERVER), Wire()
        expected = b"".join(sent_by(theirs, http_version, headers)[1:4])
        writer = BodyWriter(ours, wire, FlowControl(wire))
        assert not writer.accepts_chunks, "no response has begun"
        begin(ours, http_version)
        ours.send(h11.Response(status_code=200, headers=headers))
        assert writer.accepts_chunks == (http_version == b"1.1" and not headers)
        if writer.accepts_chunks:
            assert writer.write(b"data: 1\n\n") and writer.write(b"x" * 300)
            assert b"".join(wire.written) == expected
            ours.send(h11.EndOfMessage())
            assert not writer.accepts_chunks, "the response has ended"

    asyncio.run(run())


def test_a_piece_is_refused_for_a_slow_client_and_dropped_for_a_disconnected_one() -> None:
    async def run() -> None:
        connection, wire = _Connection(h11.SERVER), Wire()
        flow = FlowControl(wire)
        writer = BodyWriter(connection, wire, flow)
        begin(connection, b"1.1")
        connection.send(h11.Response(status_code=200, headers=[]))
        flow.pause_writing()
        assert not writer.write(b"1")
        flow.resume_writing()
        assert writer.write(b"2") and len(wire.written) == 1
        wire.has_closed = True
        assert writer.write(b"3") and len(wire.written) == 1

    asyncio.run(run())


def test_nothing_can_be_sent_after_the_end_of_a_response() -> None:
    connection = _Connection(h11.SERVER)
    sent_by(connection, b"1.1", [])
    with pytest.raises(h11.LocalProtocolError):
        connection.send(h11.Data(data=b"more"))


class NoEngine(EngineClient):
    def __init__(self) -> None:
        self.restarts = self.stalls = 0
        self.shared_answers = SharedAnswers({}, print, True, ServingEngineConfig())

    async def metrics(self) -> Any:
        raise EngineStoppedError("there is none")


def test_the_fast_histogram_exports_the_same_lines_as_that_of_the_library() -> None:
    metrics, registry = ServerMetrics('m "1"'), CollectorRegistry()
    name, bounds = "weft:inter_token_latency_seconds", _TOKEN_SECONDS
    theirs = Histogram(name, "", ["model_name", "priority"], registry=registry, buckets=bounds)
    for priority in Priority:
        theirs.labels('m "1"', priority.name.lower())
    for scrape in range(2):  # every scrape
        for gap in (*reversed(bounds), 0.0, 1e-9, 0.017, 0.017, 4.9, 5.1, 1000.0):
            metrics.token_times(Priority.HIGH).delivery(gap * 4, 4)
            theirs.labels('m "1"', "high").observe(gap)
        exported = asyncio.run(metrics.text(NoEngine())).decode().splitlines()
        expected = [
            line for line in generate_latest(registry).decode().splitlines() if "_created" not in line
        ]
        assert len(expected) == len(Priority) * (len(bounds) + 3) + 2, scrape
        ours = [line for line in exported if name in line]
        assert ours[1:] == expected[1:], "all lines but the help text"


def test_text_decoded_token_by_token_equals_the_text_of_all_tokens(default_tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        tokens = default_tokenizer.encode(text, add_bos=False)
        one_by_one, together = (AnswerText(default_tokenizer, SamplingParams()) for _ in range(2))
        pieces = [one_by_one.add_one(token) for token in tokens]
        assert "".join(pieces) == together.add_all(tokens, None)
        assert one_by_one.num_tokens == together.num_tokens == len(tokens)
