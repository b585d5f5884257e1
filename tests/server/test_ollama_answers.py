"""Answers in Ollama's API: thoughts, tool calls and logprobs, whole and from a stream, at every split of the text."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ollama_lines import Answer, streamed, whole
from test_answer_shapes import CALL, OTHER, THINK, TOOLS, answered

from weft.request import FinishReason, SamplingParams
from weft.server.api.answer_format import AnswerContext
from weft.server.api.ollama_chat import OllamaChatWriter
from weft.server.api.ollama_generate import OllamaGenerateWriter
from weft.server.http.byte_budget import ByteBudget, RequestBytes, answer_budget_error
from weft.server.stream.choices import Choice, Choices
from weft.server.stream.loop_turns import LoopTurns
from weft.server.stream.whole_answer import WholeAnswer
from weft.text.answer_reader import AnswerReader, AnswerSyntax
from weft.text.answer_text import AnswerText
from weft.text.tokenizer import Tokenizer
from weft.text.tool_formats import HERMES

CHAT, GENERATE = "/api/chat", "/api/generate"
STEPS = pytest.mark.parametrize("step", [1, 3, 1000])
CUT = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par'


def read(
    text: str,
    tokenizer: Tokenizer,
    form: AnswerSyntax | None,
    step: int,
    *,
    path: str = CHAT,
    reason: FinishReason = FinishReason.END_OF_SEQUENCE,
    **context: Any,
) -> tuple[Answer, Answer]:
    """One answer, read `step` tokens at a time: whole, and from a stream."""
    tokens = tokenizer.encode(text, allow_control=True, add_bos=False)
    both = []
    for is_streamed in (False, True):
        answer, outputs = answered(text, tokenizer, reason)
        shown = frozenset() if form is None else form.visible_control_ids(tokenizer)
        answer_text = AnswerText(
            tokenizer, SamplingParams(logprobs=0), visible_control_ids=shown, keeps_text=False
        )
        choice = Choice(0, answer, answer_text, None if form is None else AnswerReader(form))
        given = AnswerContext("m", tokenizer, "id", has_parts=form is not None, prompts=[(1, 2)], **context)
        writer = OllamaChatWriter(given) if path == CHAT else OllamaGenerateWriter(given, keeps_tokens=True)
        body = WholeAnswer(writer, RequestBytes(ByteBudget(1 << 20, 1 << 20, answer_budget_error)))
        sent = writer.begin() + writer.keep_alive()
        for start in range(0, len(outputs), step):
            for output in outputs[start : start + step]:
                answer.put(output)
            piece = choice.take(effort=10_000)
            assert piece is not None
            if is_streamed:
                sent += writer.events([piece])
            else:
                body.add([piece])
        choices = Choices(answer._client, tokenizer)
        choices._choices = [choice]
        if is_streamed:
            both.append(streamed(path, sent + writer.end(choices)))
        else:
            asyncio.run(body.write(choices, LoopTurns()))
            both.append(whole(path, b"".join(body._body)))
        if path == GENERATE:
            assert both[-1].last["context"] == [1, 2, *tokens]
    return both[0], both[1]


@STEPS
def test_tool_calls_are_sent_whole_with_objects_as_arguments(default_tokenizer: Tokenizer, step: int) -> None:
    for answer in read(f"{CALL}\n{OTHER}", default_tokenizer, TOOLS, step):
        first, second = answer.calls
        assert first["function"] == {"index": 0, "name": "get_weather", "arguments": {"city": "Paris"}}
        assert second["function"] == {"index": 1, "name": "get_time", "arguments": {}}
        assert first["id"] != second["id"] and answer.text == "" and answer.last["done_reason"] == "stop"


@STEPS
def test_text_before_and_after_a_call_is_content(default_tokenizer: Tokenizer, step: int) -> None:
    for answer in read(f"Let me look. {CALL} Done.", default_tokenizer, TOOLS, step):
        assert len(answer.calls) == 1
        assert answer.text.split() == ["Let", "me", "look.", "Done."]


@STEPS
def test_a_call_that_was_cut_is_text_and_the_reason_is_length(
    default_tokenizer: Tokenizer, step: int
) -> None:
    for answer in read(f"{OTHER}\n{CUT}", default_tokenizer, TOOLS, step, reason=FinishReason.LENGTH):
        assert [call["function"]["name"] for call in answer.calls] == ["get_time"]
        assert answer.text == CUT
        assert answer.last["done_reason"] == "length"


@pytest.mark.parametrize(
    "arguments",
    ['{"a": 1e400}', '{"a": "\\ud800"}', '{"a": 1, "b": [', '{"a":' * 2000],
    ids=["too large", "surrogate", "syntax", "depth"],
)
def test_arguments_that_are_no_json_object_are_not_lost(default_tokenizer: Tokenizer, arguments: str) -> None:
    text = f'<tool_call>\n{{"name": "get_time", "arguments": {arguments}}}\n</tool_call>'
    for answer in read(text, default_tokenizer, TOOLS, 1000):
        assert not answer.calls and arguments in answer.text


def test_line_breaks_in_arguments_do_not_break_the_lines_of_a_stream(default_tokenizer: Tokenizer) -> None:
    text = (
        '<tool_call>\n{"name": "get_time", "arguments": {\n  "a": "x\\ny",\r\n "b": [1,\n2]}}\n</tool_call>'
    )
    for answer in read(text, default_tokenizer, TOOLS, 1):
        assert answer.calls[0]["function"]["arguments"] == {"a": "x\ny", "b": [1, 2]}


@STEPS
@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_thoughts_come_first_and_apart_from_the_text(
    default_tokenizer: Tokenizer, path: str, step: int
) -> None:
    form = AnswerSyntax(THINK)
    for answer in read("<think>Two and two.</think>\n\nFour.", default_tokenizer, form, step, path=path):
        assert (answer.thinking, answer.text) == ("Two and two.", "Four.")


@STEPS
def test_thoughts_and_calls_in_one_answer(default_tokenizer: Tokenizer, step: int) -> None:
    form = AnswerSyntax(THINK, tool_format=HERMES)
    for answer in read(f"<think>hm</think>{CALL}", default_tokenizer, form, step):
        assert answer.thinking == "hm" and answer.text == "" and len(answer.calls) == 1


@STEPS
@pytest.mark.parametrize("path", [CHAT, GENERATE])
@pytest.mark.parametrize("form", [None, AnswerSyntax(THINK)], ids=["plain", "parts"])
def test_each_token_has_its_logprob(
    default_tokenizer: Tokenizer, path: str, step: int, form: AnswerSyntax | None
) -> None:
    text = "Grüße, 世界!"
    cut = FinishReason.LENGTH
    for answer in read(text, default_tokenizer, form, step, path=path, reason=cut, wants_logprobs=True):
        assert answer.text == text
        assert bytes(b"".join(bytes(entry["bytes"]) for entry in answer.logprobs)).decode() == text
        assert all(entry["top_logprobs"][0]["logprob"] == -0.5 for entry in answer.logprobs)


def test_generated_text_in_a_plain_stream_is_escaped(default_tokenizer: Tokenizer) -> None:
    text = 'A "quote"\n\tand \\ more \u2028'
    for answer in read(text, default_tokenizer, None, 1, reason=FinishReason.LENGTH):
        assert answer.text == text
