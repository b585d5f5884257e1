"""What a stream writes for every token by a short way is byte for byte what the long way writes."""

from __future__ import annotations

import asyncio
from typing import Any, get_args

import h11
import msgspec
import pytest

from weft.engine.client import EngineClient
from weft.errors import EngineStoppedError
from weft.server.chunks import Chunks
from weft.server.metrics import ServerMetrics
from weft.server.openai import Form, Shape
from weft.server.protocol import _Connection
from weft.text.tokenizer import Tokenizer

TEXTS = ("", "a", ' "quoted" \\ / \n\t\x00\x7f', "naïve 日本 \U0001f600", '"",[]', "[]")


@pytest.mark.parametrize("form", get_args(Form))
@pytest.mark.parametrize("more", [{}, {"usage": None}])
def test_a_chunk_in_pieces_is_the_chunk_encoded_whole(
    form: Form, more: dict[str, Any], default_tokenizer: Tokenizer
) -> None:
    shape = Shape(form, 'a "model" [] ""', default_tokenizer)
    chunks = Chunks(shape, include_usage=bool(more))
    for index in (0, 1, 0, 12):
        for text in TEXTS:
            choice = shape.text(index, text)
            whole = b"data: " + msgspec.json.encode(shape.chunk([choice], **more)) + b"\n\n"
            assert chunks.text(index, text) == chunks.event(choice) == whole


def sent_by(connection: h11.Connection, http_version: bytes, headers: list[tuple[str, str]]) -> list[bytes]:
    connection.receive_data(b"GET / HTTP/" + http_version + b"\r\nhost: localhost\r\n\r\n")
    while not isinstance(connection.next_event(), h11.EndOfMessage):
        pass
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


def test_nothing_is_sent_behind_the_end_of_an_answer() -> None:
    connection = _Connection(h11.SERVER)
    sent_by(connection, b"1.1", [])
    with pytest.raises(h11.LocalProtocolError):
        connection.send(h11.Data(data=b"more"))


class NoEngine(EngineClient):
    def __init__(self) -> None:
        self.restarts = 0

    async def metrics(self) -> Any:
        raise EngineStoppedError("there is none")


@pytest.mark.parametrize("count", [3, 1000])
def test_every_gap_between_tokens_is_in_the_histogram_whenever_somebody_looks(count: int) -> None:
    metrics = ServerMetrics("m")
    for _ in range(2):
        for _ in range(count):
            metrics.delivery(0.5, 2)
        text = asyncio.run(metrics.text(NoEngine())).decode()
    assert f'weft:inter_token_latency_seconds_count{{model_name="m"}} {2 * count:.1f}' in text
    assert f'weft:inter_token_latency_seconds_sum{{model_name="m"}} {2 * count * 0.25:.1f}' in text
