"""Answers with tool calls and thoughts in the OpenAI API: whole, and accumulated from a stream."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from weft.config import ServingEngineConfig
from weft.engine.ipc import wire
from weft.engine.ipc.client import EngineClient
from weft.engine.ipc.remote_answer import RemoteAnswer
from weft.request import (
    FinishReason,
    GenerationResult,
    RequestId,
    RequestState,
    SamplingParams,
    TokenOutput,
)
from weft.server.api.answer_format import AnswerContext
from weft.server.api.chat import ChatWriter
from weft.server.http.byte_budget import ByteBudget, RequestBytes, answer_budget_error
from weft.server.stream.choices import Choice, Choices
from weft.server.stream.loop_turns import LoopTurns
from weft.server.stream.whole_answer import WholeAnswer
from weft.text.answer_reader import AnswerReader, AnswerSyntax
from weft.text.answer_text import AnswerText
from weft.text.reasoning import ReasoningMarkers
from weft.text.tokenizer import Tokenizer
from weft.text.tool_formats import HERMES, ToolFormat

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
THINK = ReasoningMarkers("<think>", "</think>")
TOOLS = AnswerSyntax(tool_format=HERMES)


def answered(
    text: str, tokenizer: Tokenizer, reason: FinishReason, capacity: int = 1000
) -> tuple[RemoteAnswer, list[wire.Output]]:
    """An answer as `EngineClient` has it, and its outputs."""
    tokens = tokenizer.encode(text, allow_control=True, add_bos=False)
    client = EngineClient("noop", {}, ServingEngineConfig())
    answer = RemoteAnswer(client, RequestId("0"), 0, capacity, asyncio.Event(), prompt_length=7)
    outputs = [
        TokenOutput(RequestId("0"), token, "", -0.5, False, None, position, ((token, -0.5),))
        for position, token in enumerate(tokens)
    ]
    outputs.append(TokenOutput(RequestId("0"), None, "", None, True, reason, len(tokens)))
    answer.result = GenerationResult(
        RequestId("0"), (), "", RequestState.COMPLETED, reason, None, 0, 0, 0, 0, 0, prompt_token_count=7,
        cached_token_count=0, preemptions=0, num_tokens=len(tokens),
    )  # fmt: skip
    return answer, [wire.Output.of(one, 0) for one in outputs]


class ReadAnswer:
    """Reads one answer, `step` tokens at a time: as chunks of a stream, and as a whole response."""

    def __init__(
        self,
        text: str,
        tokenizer: Tokenizer,
        form: AnswerSyntax,
        *,
        step: int = 1,
        reason: FinishReason = FinishReason.END_OF_SEQUENCE,
        is_named_call: bool = False,
        wants_logprobs: bool = False,
        custom_tools: frozenset[str] = frozenset(),
    ) -> None:
        answer, outputs = answered(text, tokenizer, reason)
        params = SamplingParams(logprobs=0)
        answer_text = AnswerText(
            tokenizer, params, visible_control_ids=form.visible_control_ids(tokenizer), keeps_text=False
        )
        self.choice = Choice(0, answer, answer_text, AnswerReader(form))
        context = AnswerContext("m", tokenizer, "id", has_parts=True, wants_logprobs=wants_logprobs)
        writer = ChatWriter(context, is_named_call=is_named_call, custom_tools=custom_tools)
        events = b""
        whole = WholeAnswer(writer, RequestBytes(ByteBudget(1 << 20, 1 << 20, answer_budget_error)))
        for start in range(0, len(outputs), step):
            for output in outputs[start : start + step]:
                answer.put(output)
            piece = self.choice.take(effort=10_000)
            assert piece is not None
            events += writer.events([piece])
            whole.add([piece])
        assert self.choice.result is not None
        self.chunks = [json.loads(event.removeprefix(b"data: ")) for event in events.strip().split(b"\n\n")]
        choices = Choices(answer._client, tokenizer)
        choices._choices = [self.choice]
        asyncio.run(whole.write(choices, LoopTurns()))
        self.whole = ChatCompletion.model_validate_json(b"".join(whole._body)).choices[0]
        state: Any = ChatCompletionStreamState()
        for chunk in self.chunks:
            # The package has no type for chunks with custom tools. Its client does not check types either.
            state.handle_chunk(
                ChatCompletionChunk.construct(**chunk)
                if custom_tools
                else ChatCompletionChunk.model_validate(chunk)
            )
        self.added_up = state.current_completion_snapshot.choices[0]

    def check_same(self) -> None:
        """Checks that a client accumulates the whole answer from the stream."""
        whole, streamed = self.whole.message, self.added_up.message
        assert (streamed.content or None) == (whole.content or None)
        calls = [
            [
                (call.id, call.type, call.function.name, call.function.arguments)
                for call in message.tool_calls or []
            ]
            for message in (whole, streamed)
        ]
        assert calls[0] == calls[1]
        assert self.added_up.finish_reason == self.whole.finish_reason
        assert streamed.role == "assistant"


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_an_answer_of_calls_only_has_no_content_and_the_finish_reason_tool_calls(
    default_tokenizer: Tokenizer, step: int
) -> None:
    read = ReadAnswer(f"{CALL}\n{OTHER}", default_tokenizer, TOOLS, step=step)
    read.check_same()
    message = read.whole.message
    assert message.content is None and read.whole.finish_reason == "tool_calls"
    assert read.added_up.message.content is None
    calls: Any = message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("get_weather", '{"city": "Paris"}'),
        ("get_time", "{}"),
    ]
    assert all(call.type == "function" and call.id.startswith("call_") for call in calls)


def test_the_first_delta_of_a_call_has_its_name_and_the_others_its_arguments(
    default_tokenizer: Tokenizer,
) -> None:
    read = ReadAnswer(CALL, default_tokenizer, TOOLS)
    deltas = [chunk["choices"][0]["delta"] for chunk in read.chunks]
    assert deltas[0] == {"role": "assistant", "content": None} and deltas[-1] == {}
    [first, *others] = [delta["tool_calls"][0] for delta in deltas[1:-1]]
    assert set(first) == {"index", "id", "type", "function"}
    assert first["function"] == {"name": "get_weather", "arguments": ""}
    assert len(others) > 3 and all(set(other) == {"index", "function"} for other in others)
    assert "".join(other["function"]["arguments"] for other in others) == '{"city": "Paris"}'


PATCH = '<tool_call>\n{"name": "patch", "arguments": {"input": "say \\"hi\\"\\nbye"}}\n</tool_call>'


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_a_call_of_a_custom_tool_has_its_input_as_text(default_tokenizer: Tokenizer, step: int) -> None:
    text = f"{PATCH}\n{CALL}\n{PATCH}"
    read = ReadAnswer(text, default_tokenizer, TOOLS, step=step, custom_tools=frozenset(["patch"]))
    calls: Any = read.whole.message.tool_calls
    assert [call.type for call in calls] == ["custom", "function", "custom"]
    assert calls[0].custom.name == "patch" and calls[0].custom.input == 'say "hi"\nbye'
    assert calls[1].function.arguments == '{"city": "Paris"}' and read.whole.finish_reason == "tool_calls"
    streamed = [call.model_dump(exclude_none=True) for call in read.added_up.message.tool_calls or ()]
    for call in streamed:
        call.pop("index", None)
    assert streamed == [call.model_dump() for call in calls]


@pytest.mark.parametrize("step", [1, 1000])
def test_the_input_of_a_custom_call_that_was_cut_is_kept(default_tokenizer: Tokenizer, step: int) -> None:
    text, tools = PATCH[: PATCH.index("bye") + 2], frozenset(["patch"])
    read = ReadAnswer(
        text, default_tokenizer, TOOLS, step=step, reason=FinishReason.LENGTH, custom_tools=tools
    )
    calls: Any = read.whole.message.tool_calls
    streamed: Any = read.added_up.message.tool_calls
    assert calls[0].custom.input == streamed[0].custom["input"] == 'say "hi"\nby'
    assert read.whole.finish_reason == read.added_up.finish_reason == "length"


def test_content_before_a_call_is_kept(default_tokenizer: Tokenizer) -> None:
    read = ReadAnswer(f"Let me see.\n{CALL}", default_tokenizer, TOOLS)
    read.check_same()
    assert read.whole.message.content == "Let me see." and read.whole.finish_reason == "tool_calls"


def test_a_call_of_a_named_tool_has_the_finish_reason_stop(default_tokenizer: Tokenizer) -> None:
    read = ReadAnswer(
        CALL, default_tokenizer, AnswerSyntax(tool_format=HERMES, max_calls=1), is_named_call=True
    )
    read.check_same()
    assert read.whole.message.tool_calls and read.whole.finish_reason == "stop"


@pytest.mark.parametrize("text", [CALL[:60], CALL[:25]], ids=["in the arguments", "before them"])
def test_30_a_truncated_call_keeps_its_text_and_has_the_finish_reason_length(
    default_tokenizer: Tokenizer, text: str
) -> None:
    read = ReadAnswer(text, default_tokenizer, TOOLS, reason=FinishReason.LENGTH)
    read.check_same()
    assert read.whole.finish_reason == "length"
    message = read.whole.message
    if message.tool_calls:
        call: Any = message.tool_calls[0]
        assert call.function.name == "get_weather" and text.endswith(call.function.arguments)
        assert message.content is None
    else:
        assert message.content == text


def test_without_parallel_calls_the_answer_ends_after_the_first_call(default_tokenizer: Tokenizer) -> None:
    read = ReadAnswer(f"{CALL}\n{OTHER}", default_tokenizer, AnswerSyntax(tool_format=HERMES, max_calls=1))
    read.check_same()
    assert len(read.whole.message.tool_calls or ()) == 1 and read.whole.finish_reason == "tool_calls"
    assert read.choice.result is not None
    assert len(read.choice.result.tokens) < len(default_tokenizer.encode(CALL))


def test_thoughts_are_separated_from_content_and_counted(default_tokenizer: Tokenizer) -> None:
    form = AnswerSyntax(THINK, starts_in_reasoning=True, tool_format=HERMES)
    read = ReadAnswer(f"The user asks.\n</think>\n\n{CALL}", default_tokenizer, form)
    read.check_same()
    message: Any = read.whole.message
    assert message.reasoning_content == "The user asks." and message.content is None and message.tool_calls
    deltas = [chunk["choices"][0]["delta"] for chunk in read.chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "The user asks."
    thoughts = default_tokenizer.encode("The user asks.\n</think>", add_bos=False)
    assert read.choice.num_reasoning_tokens == len(thoughts)


def test_logprobs_cover_the_tokens_of_thoughts_and_calls_too(default_tokenizer: Tokenizer) -> None:
    form = AnswerSyntax(THINK, tool_format=HERMES)
    text = f"<think>hm</think>{CALL}"
    read = ReadAnswer(text, default_tokenizer, form, wants_logprobs=True)
    whole: Any = read.whole.logprobs
    assert "".join(entry.token for entry in whole.content) == text
    streamed: Any = read.added_up.logprobs
    assert [entry.token for entry in streamed.content] == [entry.token for entry in whole.content]


def test_control_tokens_reach_the_parser_only_if_they_are_markers(
    default_tokenizer: Tokenizer,
) -> None:
    """Control tokens of the default model stand for `[TOOL_CALLS]` and `[ARGS]`."""
    control = ToolFormat(
        "test", ("<file_sep>",), before_name="<file_sep>", before_arguments="[ARGS]", has_named_calls=True
    )
    read = ReadAnswer(
        "Now<jupyter_code><file_sep>f[ARGS]{}", default_tokenizer, AnswerSyntax(tool_format=control)
    )
    read.check_same()
    call: Any = (read.whole.message.tool_calls or [None])[0]
    assert read.whole.message.content == "Now" and call.function.name == "f"


def test_an_answer_without_calls_is_plain_content(default_tokenizer: Tokenizer) -> None:
    read = ReadAnswer("Paris, <b>of course</b>.\n", default_tokenizer, TOOLS)
    read.check_same()
    assert read.whole.message.content == "Paris, <b>of course</b>.\n" and not read.whole.message.tool_calls
    assert read.whole.finish_reason == "stop"
    assert read.whole.logprobs is None
