"""Answers of the Anthropic API with tool calls and thoughts: whole, and as a stream."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from anthropic_types import EventStream, message_of
from test_answer_shapes import CALL, OTHER, THINK, TOOLS, answered

from weft.request import FinishReason, SamplingParams
from weft.server.api.answer_format import AnswerContext
from weft.server.api.messages_writer import SIGNATURE, MessagesWriter
from weft.server.http.byte_budget import ByteBudget, RequestBytes, answer_budget_error
from weft.server.stream.choices import Choice, Choices
from weft.server.stream.loop_turns import LoopTurns
from weft.server.stream.whole_answer import WholeAnswer
from weft.text.answer_reader import AnswerReader, AnswerSyntax
from weft.text.answer_text import AnswerText
from weft.text.tokenizer import Tokenizer
from weft.text.tool_formats import FORMATS, HERMES

LENGTH = FinishReason.LENGTH
THOUGHT = "<think>The user asks.</think>\n\n"


def read(
    text: str,
    tokenizer: Tokenizer,
    form: AnswerSyntax | None = TOOLS,
    *,
    step: int = 1,
    reason: FinishReason = FinishReason.END_OF_SEQUENCE,
    stop: tuple[str, ...] = (),
    max_tokens: int | None = None,
) -> tuple[EventStream, Any]:
    """The stream and the whole answer of a text, `step` tokens at a time. Default for `max_tokens`: its length."""
    answer, outputs = answered(text, tokenizer, reason)
    shown = frozenset() if form is None else form.visible_control_ids(tokenizer)
    answer_text = AnswerText(
        tokenizer, SamplingParams(stop=stop), visible_control_ids=shown, keeps_text=False
    )
    choice = Choice(0, answer, answer_text, None if form is None else AnswerReader(form))
    context = AnswerContext("m", tokenizer, "id", prompt_tokens=7, has_parts=form is not None)
    assert answer.result is not None
    limit = answer.result.completion_token_count if max_tokens is None else max_tokens
    writer = MessagesWriter(context, limit)
    choices = Choices(answer._client, tokenizer)
    choices._choices = [choice]
    whole = WholeAnswer(writer, RequestBytes(ByteBudget(1 << 20, 1 << 20, answer_budget_error)))
    events = writer.begin()
    for start in range(0, len(outputs), step):
        if choice.result is not None:
            break
        for output in outputs[start : start + step]:
            answer.put(output)
        piece = choice.take(effort=10_000)
        assert piece is not None
        events += writer.events([piece]) + writer.keep_alive()
        whole.add([piece])
        if answer_text.is_cut and choice.result is None:  # the engine ends the answer
            answer.put(outputs[-1])
            piece = choice.take(effort=10_000)
            assert piece is not None
            events += writer.events([piece])
            whole.add([piece])
    asyncio.run(whole.write(choices, LoopTurns()))
    stream = EventStream(events + writer.end(choices))
    message = message_of(b"".join(whole._body))
    assert stream.stop_reason == message.stop_reason and stream.stop_sequence == message.stop_sequence
    assert stream.usage["output_tokens"] == message.usage.output_tokens
    return stream, message


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_calls_are_blocks_with_an_object_as_input(default_tokenizer: Tokenizer, step: int) -> None:
    stream, message = read(f"Let me see.\n{CALL}\n{OTHER}", default_tokenizer, step=step)
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
    text, first, second = message.content
    assert text.text == "Let me see." and first.input == {"city": "Paris"} and second.input == {}
    assert first.id.startswith("toolu_") and first.id != second.id
    assert message.stop_reason == "tool_use"
    assert stream.texts == ["Let me see.", '{"city": "Paris"}', "{}"]
    assert [block.get("id") for block in stream.blocks] == [None, first.id, second.id]
    assert stream.num_pings


def test_every_format_of_calls_gives_the_same_blocks(default_tokenizer: Tokenizer) -> None:
    for form in FORMATS.values():
        if form.has_unmarked_calls or not form.openings:
            continue
        text = form.render_calls([("get_weather", '{"city": "Paris"}')])
        syntax = AnswerSyntax(tool_format=form, tool_names=frozenset({"get_weather"}))
        for step in (1, 2, 1000):
            stream, message = read(text, default_tokenizer, syntax, step=step)
            [call] = message.content
            assert (call.name, call.input) == ("get_weather", {"city": "Paris"}), form.name
            assert stream.blocks[0]["id"] == call.id and call.id.startswith("toolu_")


@pytest.mark.parametrize("step", [1, 1000])
def test_thoughts_are_the_first_block_and_have_a_signature(default_tokenizer: Tokenizer, step: int) -> None:
    form = AnswerSyntax(THINK, tool_format=HERMES)
    stream, message = read(f"{THOUGHT}Rome.", default_tokenizer, form, step=step)
    thinking, text = message.content
    assert (thinking.type, thinking.thinking, thinking.signature) == (
        "thinking",
        "The user asks.",
        SIGNATURE,
    )
    assert text.text == "Rome." and message.stop_reason == "end_turn"
    assert stream.texts == ["The user asks.", "Rome."]
    assert stream.blocks[0]["signature"] == SIGNATURE


@pytest.mark.parametrize("step", [1, 1000])
def test_thoughts_before_a_call(default_tokenizer: Tokenizer, step: int) -> None:
    form = AnswerSyntax(THINK, tool_format=HERMES)
    stream, message = read(f"{THOUGHT}{CALL}", default_tokenizer, form, step=step)
    assert [block.type for block in message.content] == ["thinking", "tool_use"]
    assert [block["type"] for block in stream.blocks] == ["thinking", "tool_use"]


@pytest.mark.parametrize("end", [60, 31])
def test_30_a_cut_call_has_the_stop_reason_max_tokens_and_keeps_its_text(
    default_tokenizer: Tokenizer, end: int
) -> None:
    stream, message = read(CALL[:end], default_tokenizer, reason=LENGTH)
    assert message.stop_reason == "max_tokens"
    # As a tool_use block a client would run the call, with a wrong input.
    [text] = message.content
    assert text.type == "text" and "get_weath" in text.text
    if stream.blocks[0]["type"] == "tool_use":
        assert CALL[:end].endswith(stream.texts[0]) and text.text.endswith(stream.texts[0])
    else:
        assert stream.texts == [CALL[:end]] == [text.text]


def test_an_answer_that_the_context_ends_says_so(default_tokenizer: Tokenizer) -> None:
    for max_tokens, expected in ((3, "max_tokens"), (4, "model_context_window_exceeded")):
        _, message = read("a b c", default_tokenizer, None, reason=LENGTH, max_tokens=max_tokens)
        assert (message.usage.output_tokens, message.stop_reason) == (3, expected)


def test_a_complete_call_before_a_cut_one_is_kept(default_tokenizer: Tokenizer) -> None:
    _, message = read(f"{OTHER}\n{CALL[:60]}", default_tokenizer, reason=LENGTH)
    call, text = message.content
    assert call.name == "get_time" and message.stop_reason == "max_tokens"
    assert text.text == CALL[:60]


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("form", [None, TOOLS], ids=["text", "with tools"])
def test_the_stop_sequence_that_ended_the_answer_is_in_it(
    default_tokenizer: Tokenizer, form: AnswerSyntax | None, step: int
) -> None:
    stream, message = read("one two three four", default_tokenizer, form, step=step, stop=("four", "three"))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "three")
    assert message.content[0].text.rstrip() == stream.texts[0].rstrip() == "one two"


@pytest.mark.parametrize("form", [None, TOOLS, AnswerSyntax(THINK)], ids=["text", "tools", "thoughts"])
def test_an_empty_answer_has_one_empty_text_block(
    default_tokenizer: Tokenizer, form: AnswerSyntax | None
) -> None:
    stream, message = read("", default_tokenizer, form)
    assert [block.text for block in message.content] == [""] and stream.texts == [""]
    assert message.stop_reason == "end_turn"


def test_without_parallel_calls_the_answer_ends_after_the_first_call(default_tokenizer: Tokenizer) -> None:
    form = AnswerSyntax(tool_format=HERMES, max_calls=1)
    _, message = read(f"{CALL}\n{OTHER}", default_tokenizer, form)
    assert [block.type for block in message.content] == ["tool_use"] and message.stop_reason == "tool_use"


def test_an_input_that_is_no_object_is_text(default_tokenizer: Tokenizer) -> None:
    text = '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]'
    _, message = read(text, default_tokenizer, AnswerSyntax(tool_format=FORMATS["mistral"]))
    assert message.content[0].input == {"a": 1}
    assert json.dumps(message.content[0].input)
