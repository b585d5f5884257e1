"""Streams of every API, with the text of the answer cut into pieces at any places: the order of events is that of the
documentation, and the joined stream is the whole answer."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest
from every_api import APIS, Answer, Api, Tool, Turn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_answer_shapes import THINK, answered

from weft.request import FinishReason, SamplingParams
from weft.server.api.answer_format import AnswerContext
from weft.server.api.formats import FORMATS
from weft.server.api.schema import read
from weft.server.errors import ApiError
from weft.server.http.byte_budget import ByteBudget, RequestBytes, answer_budget_error
from weft.server.stream.choices import Choice, Choices, Piece
from weft.server.stream.loop_turns import LoopTurns
from weft.server.stream.whole_answer import WholeAnswer
from weft.text.answer_parts import ToolCallStart
from weft.text.answer_reader import AnswerReader, AnswerSyntax
from weft.text.answer_text import AnswerText
from weft.text.tokenizer import Tokenizer
from weft.text.tool_formats import FORMATS as TOOL_FORMATS
from weft.text.tool_formats import HERMES, ToolFormat

TURNS = [Turn("user", "x")]
TOOLS = [Tool("f", "d", {"type": "object"})]
SYNTAX = AnswerSyntax(THINK, tool_format=HERMES, tool_names=frozenset({"f", "g"}))
_TEXT = st.text(st.sampled_from('ab \n<>{}é🧵"\\'), max_size=12)
_ARGUMENTS = st.dictionaries(st.sampled_from("xyé"), st.one_of(_TEXT, st.integers(), st.none()), max_size=2)
_CALL = st.tuples(st.sampled_from("fg"), _ARGUMENTS)
ANSWERS = st.tuples(
    st.one_of(st.none(), _TEXT), st.lists(st.one_of(_TEXT, _CALL), max_size=4), st.lists(st.integers(1, 400), max_size=12)
)  # fmt: skip


def text_of(thought: str | None, parts: Sequence[Any]) -> str:
    text = "" if thought is None else f"<think>{thought}</think>\n\n"
    for part in parts:
        text += (
            part if isinstance(part, str) else "\n" + HERMES.render_calls([(part[0], json.dumps(part[1]))])
        )
    return text


_NUM_TOKENS = 5
"""Of each answer, and the limit of its request."""


class Written:
    """The bytes that the writer of an API makes of an answer whose text arrives in `pieces`."""

    def __init__(
        self,
        api: Api,
        pieces: Sequence[str],
        tokenizer: Tokenizer,
        reason: FinishReason,
        error: ApiError | None = None,
        syntax: AnswerSyntax = SYNTAX,
    ) -> None:
        self._syntax = syntax
        self.stream = self._write(api, pieces, tokenizer, reason, True, error)
        self.body = b"" if error is not None else self._write(api, pieces, tokenizer, reason, False)

    def _write(
        self,
        api: Api,
        pieces: Sequence[str],
        tokenizer: Tokenizer,
        reason: FinishReason,
        is_streamed: bool,
        error: ApiError | None = None,
    ) -> bytes:
        api_format = FORMATS[api.path]
        body = json.dumps(api.body(TURNS, TOOLS, stream=is_streamed, max_tokens=_NUM_TOKENS)).encode()
        api_request, _ = read(api_format.request_type, body)
        remote, _ = answered("", tokenizer, reason)
        assert remote.result is not None
        choice = Choice(0, remote, AnswerText(tokenizer, SamplingParams(), keeps_text=False), None)
        choices = Choices(remote._client, tokenizer)
        choices._choices = [choice]
        context = AnswerContext("m", tokenizer, "id", prompt_tokens=7, has_parts=True, prompts=[(1,) * 7])
        writer = api_format.writer(api_request, context)
        whole = WholeAnswer(writer, RequestBytes(ByteBudget(1 << 24, 1 << 24, answer_budget_error)))
        reader, sent = AnswerReader(self._syntax), writer.begin()
        for index, text in enumerate(pieces):
            is_last = error is None and index == len(pieces) - 1
            choice.num_reasoning_tokens += reader.is_in_reasoning
            deltas = reader.add(text)
            if is_last:
                deltas += reader.finish()
                choice.result = dataclasses.replace(remote.result, num_tokens=_NUM_TOKENS)
            choice.has_calls = choice.has_calls or any(isinstance(one, ToolCallStart) for one in deltas)
            piece = Piece(choice, text, (5,), (), deltas, is_last)
            if is_streamed:
                sent += writer.events([piece])
                if index % 3 == 0 and not is_last:
                    sent += writer.keep_alive()
            else:
                whole.add([piece])
        if error is not None:
            return sent + writer.error(error)
        asyncio.run(writer.finish(None, choices))  # type: ignore[arg-type]  # nothing is stored
        if is_streamed:
            return sent + writer.end(choices)
        asyncio.run(whole.write(choices, LoopTurns()))
        return b"".join(whole._body)


def cut(text: str, lengths: Sequence[int]) -> list[str]:
    """The text in pieces of these lengths; then its rest."""
    pieces, position = [], 0
    for length in lengths:
        pieces.append(text[position : position + length])
        position += length
    return [*pieces, text[position:]]


def check(api: Api, pieces: Sequence[str], tokenizer: Tokenizer, reason: FinishReason) -> Answer:
    written = Written(api, pieces, tokenizer, reason)
    whole, streamed = api.whole(written.body), api.streamed(written.stream)
    assert whole == streamed, (pieces, written.stream)
    return whole


@pytest.mark.parametrize("api", APIS, ids=str)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ANSWERS)
def test_any_answer_in_any_pieces_has_events_in_order_and_the_parts_of_the_body(
    default_tokenizer: Tokenizer, api: Api, drawn: Any
) -> None:
    thought, parts, lengths = drawn
    check(api, cut(text_of(thought, parts), lengths), default_tokenizer, FinishReason.END_OF_SEQUENCE)


MIXED = text_of("Hm é.", ["Text. ", ("f", {"x": 'a"b<}'}), ("g", {}), " More 🧵."])


@pytest.mark.parametrize("api", APIS, ids=str)
def test_one_answer_with_all_parts_is_the_same_at_every_split(default_tokenizer: Tokenizer, api: Api) -> None:
    found = [
        check(api, [MIXED[:place], MIXED[place:]], default_tokenizer, FinishReason.END_OF_SEQUENCE)
        for place in range(0, len(MIXED) + 1, 2)
    ]
    found.append(check(api, list(MIXED), default_tokenizer, FinishReason.END_OF_SEQUENCE))
    assert found == [found[0]] * len(found)
    assert (found[0].thoughts, found[0].calls, found[0].stop) == (
        "Hm é.",
        [("f", {"x": 'a"b<}'}), ("g", {})],
        "calls",
    )
    assert found[0].text.split() == ["Text.", "More", "🧵."]


@pytest.mark.parametrize("tool_format", TOOL_FORMATS.values(), ids=lambda one: one.name)
@pytest.mark.parametrize("api", APIS, ids=str)
def test_calls_of_every_tool_format_are_calls_of_every_api_at_every_split(
    default_tokenizer: Tokenizer, api: Api, tool_format: ToolFormat
) -> None:
    calls = [("f", {"x": 'a"b<}'}), ("g", {})]
    text = tool_format.render_calls([(name, json.dumps(arguments)) for name, arguments in calls])
    syntax = dataclasses.replace(SYNTAX, reasoning=None, tool_format=tool_format)
    for place in range(len(text) + 1):
        pieces = [text[:place], text[place:]]
        written = Written(api, pieces, default_tokenizer, FinishReason.END_OF_SEQUENCE, syntax=syntax)
        whole, streamed = api.whole(written.body), api.streamed(written.stream)
        assert whole == streamed and (whole.text, whole.calls, whole.stop) == ("", calls, "calls"), pieces


@pytest.mark.parametrize("api", APIS, ids=str)
def test_an_answer_that_ends_anywhere_because_of_the_token_limit_has_events_in_order(
    default_tokenizer: Tokenizer, api: Api
) -> None:
    for place in range(1, len(MIXED), 3):
        written = Written(api, list(MIXED[:place]), default_tokenizer, FinishReason.LENGTH)
        whole, streamed = api.whole(written.body), api.streamed(written.stream)
        assert whole.stop == streamed.stop == "length"
        assert whole.thoughts == streamed.thoughts
        # Only calls that are complete are objects: a client would run them.
        complete = [call for call in whole.calls if isinstance(call[1], dict)]
        assert complete == [call for call in streamed.calls if isinstance(call[1], dict)]
        assert complete == [("f", {"x": 'a"b<}'}), ("g", {})][: len(complete)]


@pytest.mark.parametrize("api", APIS, ids=str)
def test_a_stream_that_fails_anywhere_ends_with_one_error_of_its_api(
    default_tokenizer: Tokenizer, api: Api
) -> None:
    error = ApiError(504, "the deadline passed", code="deadline_exceeded")
    for place in range(1, len(MIXED), 5):
        stream = Written(api, list(MIXED[:place]), default_tokenizer, FinishReason.LENGTH, error).stream
        _, message = api.failed(stream)
        assert "deadline" in message
