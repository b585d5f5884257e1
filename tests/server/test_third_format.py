"""A third API format needs one class, one writer and one entry in the table of routes. This one sends lines of JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from in_process import InProcess, Reply, in_process

import weft
from weft.request import GenerationResult, SamplingParams
from weft.server.admission.keys import plain_keys
from weft.server.answer_requests import AnswerRequests
from weft.server.api.answer_format import (
    GENERATING,
    AnswerContext,
    AnswerFormat,
    AnswerWriter,
    Operation,
    ParsedRequest,
    ServedModel,
)
from weft.server.api.field_docs import Field
from weft.server.api.formats import FORMATS
from weft.server.errors import ApiError
from weft.server.stream.choices import Choices, Piece
from weft.server.stream.events import EventStream
from weft.text.answer_parts import AnswerParts
from weft.text.conversation import Conversation, Message

# ---------------------------------------------------------------------- the format


class LinesRequest(msgspec.Struct, frozen=True, kw_only=True):
    question: str
    length: int = 8
    live: bool = False
    model: str | None = None
    deadline: float | None = None


class LinesAnswer(msgspec.Struct):
    words: str
    nanoseconds: int


class Problem(msgspec.Struct):
    problem: str


class LinesFormat(AnswerFormat[LinesRequest]):
    request_type = LinesRequest
    operation = Operation(
        "Lines",
        "",
        "Generating",
        LinesAnswer,
        LinesRequest,
        LinesAnswer,
        errors=GENERATING,
        event_note="Each line is one object.",
        event_media_type="application/x-ndjson",
        error=Problem,
    )
    fields: Mapping[str, Field] = {
        "question": Field("What the user asks."),
        "length": Field("Number of tokens.", 1),
        "live": Field("Send lines while the answer is generated."),
    }

    def parse(self, api_request: LinesRequest, model: ServedModel) -> ParsedRequest:
        params = SamplingParams(max_tokens=api_request.length, seed=7, ignore_eos=True)
        conversation = Conversation([Message("user", api_request.question)])
        return ParsedRequest(conversation, params, api_request.live, deadline=api_request.deadline)

    def writer(self, api_request: LinesRequest, context: AnswerContext) -> AnswerWriter:
        return LinesWriter(context)

    def field_names(self, api_request: LinesRequest) -> Mapping[str, str]:
        return {"max_tokens": "length", "messages": "question"}

    def error(self, error: ApiError) -> tuple[int, Any]:
        return 422 if error.status == 400 else error.status, problem(error)


class LinesWriter(AnswerWriter):
    stream_type = "application/x-ndjson"

    def events(self, pieces: Sequence[Piece]) -> bytes:
        return b"".join(line({"words": piece.text}) for piece in pieces if piece.text)

    def end(self, choices: Choices) -> bytes:
        return line(summary(choices.results[0]))

    def error(self, error: ApiError) -> bytes:
        return line(problem(error))

    def answer(self, index: int, result: GenerationResult, answer: str | AnswerParts) -> tuple[bytes, bytes]:
        assert isinstance(answer, str)
        return msgspec.json.encode({"words": answer, **summary(result)}), b""


def line(content: Any) -> bytes:
    return msgspec.json.encode(content) + b"\n"


def summary(result: GenerationResult) -> dict[str, int]:
    return {
        "count": result.completion_token_count,
        "nanoseconds": int(1e9 * (result.prefill_time + result.decode_time)),
    }


def problem(error: ApiError) -> dict[str, Any]:
    return {"problem": error.message, "field": error.param}


# ---------------------------------------------------------------------- its tests

PATH = "/lines"
QUESTION = {"question": "Hello"}
LONG = {"question": "Hello", "length": 15_000, "live": True}


def served(path: Path, *bodies: dict[str, Any], work: Any = None, **options: Any) -> Any:
    """The replies to the bodies, or the result of `work`."""

    async def run() -> Any:
        async with in_process(path, formats={**FORMATS, PATH: LinesFormat()}, **options) as server:
            replies = await work(server) if work else [await send(server, body) for body in bodies]
            assert await server.server.wait_until_idle(60)
            return replies

    return asyncio.run(run())


async def send(server: InProcess, body: dict[str, Any], **options: Any) -> Reply:
    return await server.send(PATH, json.dumps(body).encode(), **options)


def lines_of(reply: Reply) -> list[dict[str, Any]]:
    return [json.loads(one) for one in reply.body.splitlines()]


def test_a_whole_answer_and_a_stream_of_lines_have_the_same_words(default_model_path: Path) -> None:
    whole, stream = served(default_model_path, QUESTION, {**QUESTION, "live": True})
    assert (whole.status, stream.status) == (200, 200)
    assert whole.headers[b"content-type"] == b"application/json"
    assert stream.headers[b"content-type"] == b"application/x-ndjson"
    answer = json.loads(whole.body)
    *pieces, last = lines_of(stream)
    assert "".join(piece["words"] for piece in pieces) == answer["words"] != ""
    assert last["count"] == answer["count"] == 8 and last["nanoseconds"] > 0


def test_errors_have_the_form_the_status_and_the_field_names_of_the_format(default_model_path: Path) -> None:
    bodies = ({**QUESTION, "length": -1}, {**QUESTION, "model": "x"}, {}, {**QUESTION, "odd": 1})
    length, model, missing, odd = served(default_model_path, *bodies)
    assert length.status == 422 and json.loads(length.body)["field"] == "length"
    assert model.status == 404 and "no model" in json.loads(model.body)["problem"]
    assert missing.status == 422 and json.loads(missing.body)["field"] == "question"
    assert odd.status == 200 and b"odd" in odd.headers[b"warning"]


def test_a_key_is_read_from_both_headers_on_every_route(default_model_path: Path) -> None:
    async def work(server: InProcess) -> list[Reply]:
        other = b'{"prompt": "Hello", "max_tokens": 1}'
        wrong, right = {b"x-api-key": b"wrong"}, {b"x-api-key": b"secret"}
        return [
            await send(server, QUESTION),
            await send(server, QUESTION, more_headers=wrong),
            await server.send("/v1/completions", other, more_headers=wrong),
            await send(server, QUESTION, key="secret"),
            await send(server, QUESTION, more_headers=right),
            await server.send("/v1/completions", other, more_headers=right),
            await server.send("/v1/models", method="GET", more_headers=right),
        ]

    none, wrong, other, *rest = served(default_model_path, work=work, api_keys=plain_keys(["secret"]))
    assert [none.status, wrong.status, other.status] == [401, 401, 401]
    assert [one.status for one in rest] == [200, 200, 200, 200]
    assert "problem" in json.loads(none.body) and "error" in json.loads(other.body)


def test_an_error_during_the_stream_is_its_last_line(default_model_path: Path) -> None:
    async def work(server: InProcess) -> Reply:
        active = server.server.active_requests
        sending = asyncio.create_task(send(server, LONG))
        while not EventStream.open_streams:
            await asyncio.sleep(0)
        active.cancel(active.described()[0]["id"])
        return await sending

    reply = served(default_model_path, work=work, max_context=16_384)
    assert reply.status == 200
    assert "operator" in lines_of(reply)[-1]["problem"]


def test_a_client_that_disconnects_ends_its_answer(default_model_path: Path) -> None:
    async def work(server: InProcess) -> Reply:
        reply = await send(server, LONG, leaves_after=0.02)
        while server.server.engine.num_unfinished:
            await asyncio.sleep(0.01)
        return reply

    reply = served(default_model_path, work=work, max_context=16_384)
    assert b"count" not in reply.body


def test_the_document_describes_the_format(default_model_path: Path) -> None:
    async def work(server: InProcess) -> Any:
        return json.loads((await server.send("/openapi.json", method="GET")).body)

    document = served(default_model_path, work=work)
    responses = document["paths"][PATH]["post"]["responses"]
    assert set(responses["200"]["content"]) == {"application/json", "application/x-ndjson"}
    assert responses["429"]["content"]["application/json"]["schema"]["$ref"].endswith("/Problem")
    properties = document["components"]["schemas"]["LinesRequest"]["properties"]
    assert all(content["description"] for content in properties.values())
    assert "/v1/chat/completions" in document["paths"]


def test_a_fault_of_the_server_costs_a_key_nothing(
    default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(server: InProcess) -> tuple[int, float, float]:
        async def charged() -> float:
            metrics = await server.send("/metrics", method="GET", key="secret")
            lines = metrics.body.decode().splitlines()
            return sum(
                float(one.rpartition(" ")[2]) for one in lines if one.startswith("weft:key_tokens_total{")
            )

        own = {b"x-api-key": b"secret"}
        with monkeypatch.context() as patched:
            patched.setattr(AnswerRequests, "_end", failing)
            failed = await send(server, QUESTION, more_headers=own)
        after_failure = await charged()
        assert (await send(server, QUESTION, more_headers=own)).status == 200
        return failed.status, after_failure, await charged()

    def failing(*_: Any) -> None:
        raise RuntimeError("a fault of the server")

    found = served(default_model_path, work=work, api_keys=plain_keys(["secret"]))
    status, after_failure, after_success = found
    assert (status, after_failure) == (500, 0) and after_success > 0


def test_only_the_rooms_of_the_apis_name_a_format_or_its_path() -> None:
    """Code elsewhere cannot ask which format a request has. The command line and `weft bench` are clients."""
    source = Path(weft.__file__).parent
    words = {"anthropic", *FORMATS, *(one.counting.path for one in FORMATS.values() if one.counting)}
    for file in sorted(source.rglob("*.py")):
        if not any(file.is_relative_to(source / room) for room in ("server/api", "cli", "bench")):
            found = [word for word in words if word in file.read_text("utf-8").lower()]
            assert not found, f"{file.relative_to(source)} names {found}"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        *(("/v1/chat/completions", "chat"), ("/v1/messages", "chat"), ("/v1/responses", "chat")),
        *(
            ("/api/chat", "chat"),
            ("/v1/completions", "text_completion"),
            ("/api/generate", "text_completion"),
        ),
    ],
)
def test_each_format_has_a_name_for_traces(path: str, name: str) -> None:
    assert FORMATS[path].operation_name == name
