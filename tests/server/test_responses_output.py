"""The stream and the body of a response with thoughts, texts and calls, from prepared parts of an answer."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
from responses_checks import checked_events, checked_response

from weft.request import FinishReason, TokenLogprobs
from weft.server.api.answer_format import AnswerContext
from weft.server.api.responses import ResponsesFormat, ResponsesRequest
from weft.server.api.responses_items import conversation_items
from weft.server.api.responses_tools import function_tools
from weft.server.api.schema import read
from weft.server.errors import ApiError
from weft.server.stream.choices import Piece
from weft.text.answer_parts import Content, Reasoning, ToolCallArguments, ToolCallStart
from weft.text.conversation import (
    Conversation,
    Item,
    Message,
    Thought,
    ToolCall,
    ToolResult,
    from_start,
    starts_of_rest,
)
from weft.text.custom_calls import custom_input
from weft.text.json_string_grammar import NotRewritableError, in_json_string

PATCH = {"type": "custom", "name": "patch"}
MATH = {
    "type": "namespace",
    "name": "math",
    "description": "",
    "tools": [{"type": "function", "name": "add"}],
}
SERVICES: Any = SimpleNamespace(settings=SimpleNamespace(response_days=1))
CALLER: Any = SimpleNamespace(services=SERVICES)

Parts = list[Any]
PARTS: dict[str, Parts] = {
    "text": [Content("Hel"), Content("lo")],
    "nothing": [],
    "thought and text": [Reasoning("H"), Reasoning("m"), Content("Hello")],
    "call": [ToolCallStart(0, "c1", "look"), ToolCallArguments(0, '{"a":'), ToolCallArguments(0, "1}")],
    "all": [
        Reasoning("Hm"),
        Content("I look."),
        ToolCallStart(0, "c1", "look"),
        ToolCallArguments(0, "{}"),
        ToolCallStart(1, "c2", "math__add"),
        ToolCallArguments(1, '{"a": 1}'),
        ToolCallStart(2, "c3", "patch"),
        ToolCallArguments(2, '{"input": "say \\"hi\\"\\n'),
        ToolCallArguments(2, 'bye"}'),
        Content("Done."),
    ],
}


def writer(**fields: Any) -> Any:
    given = {"input": "Hello", "tools": [PATCH, MATH], "store": False, **fields}
    request, _ = read(ResponsesRequest, json.dumps(given).encode())
    tokenizer: Any = SimpleNamespace(token_bytes=lambda token: b"%d " % token)
    context = AnswerContext("m", tokenizer, "id", wants_logprobs=request.wants_logprobs, has_parts=True)
    return ResponsesFormat().writer(request, context)


def choices(reason: FinishReason) -> Any:
    result = SimpleNamespace(
        finish_reason=reason, prompt_token_count=5, completion_token_count=3, cached_token_count=2
    )
    return SimpleNamespace(results=[result], num_reasoning_tokens=1)


def pieces(parts: Parts) -> list[Piece]:
    none: Any = None
    return [Piece(none, "", (), (), [part]) for part in parts]


def streamed(parts: Parts, reason: FinishReason = FinishReason.STOP, **fields: Any) -> list[dict[str, Any]]:
    one, given = writer(stream=True, **fields), choices(reason)
    content = one.begin() + b"".join(one.events([piece]) for piece in pieces(parts))
    asyncio.run(one.finish(CALLER, given))
    return checked_events(content + one.end(given))


def body(parts: Parts, reason: FinishReason = FinishReason.STOP, **fields: Any) -> dict[str, Any]:
    one, given = writer(**fields), choices(reason)
    assert one.collect(pieces(parts)) >= 0
    asyncio.run(one.finish(CALLER, given))
    content, rest = one.answer(0, given.results[0], "")
    assert rest == b""
    return checked_response(content)


@pytest.mark.parametrize("summary", [None, "auto"])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_a_stream_has_its_events_in_order_and_the_items_of_a_body(parts: Parts, summary: str | None) -> None:
    fields = {"reasoning": {"summary": summary}, "include": ["reasoning.encrypted_content"]}
    events, whole = streamed(parts, **fields), body(parts, **fields)
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"] == whole["output"] != []
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}


def test_all_parts_become_items_of_their_types() -> None:
    output = body(PARTS["all"])["output"]
    assert [item["type"] for item in output] == [
        *("reasoning", "message", "function_call", "function_call"),
        *("custom_tool_call", "message"),
    ]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "Hm"}] and output[0]["summary"] == []
    assert (output[2]["name"], output[2].get("namespace")) == ("look", None)
    assert (output[3]["name"], output[3]["namespace"]) == ("add", "math")
    assert (output[4]["name"], output[4]["input"]) == ("patch", 'say "hi"\nbye')
    assert len({item["id"] for item in output}) == len(output)


@pytest.mark.parametrize("summary", [None, "auto"])
def test_items_of_an_answer_can_be_sent_back(summary: str | None) -> None:
    output = body(PARTS["all"], reasoning={"summary": summary}, include=["reasoning.encrypted_content"])[
        "output"
    ]
    items = conversation_items(output)
    calls = [item for item in items if isinstance(item, ToolCall)]
    assert [call.name for call in calls] == ["look", "math__add", "patch"]
    assert json.loads(calls[2].arguments) == {"input": 'say "hi"\nbye'}
    assert [item for item in items if isinstance(item, Thought)] == [Thought("Hm")]
    hidden = {**output[0], "summary": [], "content": None}
    assert conversation_items([hidden]) == [Thought("Hm")]


def test_a_call_that_the_token_limit_cuts_is_incomplete_and_keeps_its_text() -> None:
    parts = [ToolCallStart(0, "c1", "patch"), ToolCallArguments(0, '{"input": "half \\u00e9 of\\u00')]
    events = streamed(parts, FinishReason.LENGTH)
    response = events[-1]["response"]
    assert (events[-1]["type"], response["status"]) == ("response.incomplete", "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    [item] = response["output"]
    assert (item["status"], item["input"]) == ("incomplete", "half é of")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "a"}', "a"),
        ('{"patch": "a"}', "a"),
        ('{"a": "b", "c": "d"}', '{"a": "b", "c": "d"}'),
        ('{"a": 1}', '{"a": 1}'),
        ("{}", "{}"),
        ('{"input', '{"input'),
        ('{"input": "', ""),
        ('{"input": "a\\', "a"),
        ('{"input": "a\\n', "a\n"),
    ],
)
def test_the_input_of_a_custom_call_is_read_from_any_arguments(arguments: str, expected: str) -> None:
    assert custom_input(arguments) == expected


def test_a_stream_that_fails_ends_with_the_items_that_are_done_and_a_code_that_clients_know() -> None:
    for error, code in (
        (ApiError(400, "m", code="context_length_exceeded"), "context_length_exceeded"),
        (ApiError(429, "m"), "rate_limit_exceeded"),
        (ApiError(503, "m", code="engine_died"), "server_error"),
    ):
        one = writer(stream=True)
        content = one.begin() + one.events(pieces(PARTS["thought and text"])) + one.keep_alive()
        content += one.error(error)
        events = [json.loads(block.split("data: ")[1]) for block in content.decode().split("\n\n")[:-1]]
        last = events[-1]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"] == {"code": code, "message": "m"}
        assert [item["type"] for item in last["response"]["output"]] == ["reasoning"]


def test_logprobs_belong_to_the_text_and_not_to_thoughts_or_calls() -> None:
    one = writer(include=["message.output_text.logprobs"])
    none: Any = None

    def piece(token: int, *parts: Any) -> Piece:
        return Piece(none, "", (token,), (TokenLogprobs(-1.0, ()),), parts)

    one.collect(
        [
            piece(1, Reasoning("Hm")),
            piece(2),
            piece(3, Reasoning("!")),
            piece(4),
            piece(5, Content("ab")),
            piece(6, ToolCallStart(0, "c", "look")),
            piece(7, ToolCallArguments(0, "{}")),
        ]
    )
    asyncio.run(one.finish(CALLER, choices(FinishReason.STOP)))
    output = checked_response(one.answer(0, None, "")[0])["output"]
    assert [entry["token"] for entry in output[1]["content"][0]["logprobs"]] == ["4 ", "5 "]


def test_a_conversation_that_loses_items_keeps_thoughts_calls_and_results_together() -> None:
    talk: list[Item] = [
        Message("system", "Be brief."),
        *(Message("user", "1"), Thought("a"), ToolCall("x", "f", "{}"), ToolCall("y", "f", "{}")),
        *(Message("user", "2"), ToolResult("x", "1"), ToolResult("y", "2"), Message("assistant", "3")),
        *(Thought("b"), Message("assistant", "4"), Message("user", "5")),
    ]
    starts = starts_of_rest(talk)
    assert starts == [1, 2, 8, 9, 11]
    shorter = from_start(Conversation(talk), 9).items
    assert shorter == [talk[0], *talk[9:]]


APPLY_PATCH = """
start: "*** Begin Patch" LF hunk+ "*** End Patch" LF?
hunk: "*** Add File: " /(.+)/ LF add_line+
add_line: "+" /(.*)/ LF -> line
%import common.LF
"""


@pytest.mark.parametrize(
    ("lark", "good", "bad"),
    [
        (APPLY_PATCH, '*** Begin Patch\n*** Add File: a "b"\n+\t\\é\n+\n*** End Patch', "*** Begin Patch\n"),
        (r'start: /[^"\n]+/ "\n"', "a\\b\tc\n", 'a"b\n'),
        (r'start: "say \"hi\""i X*' + '\nX: "a".."c"', 'SAY "HI"cab', 'say "hi"d'),
        (r"start: /(?i:\s+[x\\]{2,3})/ NEWLINE?" + "\n%import common.NEWLINE", "\r\n X\\\r\n", "xx"),
        (r"start: (A | B)~2" + '\nA: "a"\nB: /b?\\//', "a/", "a"),
        (r"start: /(?s:.)*/ // anything" + "\n", '"\x00\n\\', None),
        ("start: NUMBER\n%import common.NUMBER", "-1"[1:], "x"),
    ],
)
def test_a_rewritten_grammar_matches_the_same_texts_inside_a_json_string(
    lark: str, good: str, bad: str | None
) -> None:
    llguidance = pytest.importorskip("llguidance")
    rewritten = in_json_string(lark)
    grammar = f'start: "\\"" body "\\""\nbody: %lark {{\n{rewritten}\n}}'

    def matches(text: str) -> bool:
        written = json.dumps(text, ensure_ascii=False).encode()
        matcher = llguidance.LLMatcher(
            llguidance.LLTokenizer("byte"), llguidance.grammar_from("lark", grammar)
        )
        assert not matcher.get_error()
        return bool(matcher.try_consume_tokens(list(written)) == len(written) and matcher.is_accepting())

    assert matches(good) and (bad is None or not matches(bad))


@pytest.mark.parametrize(
    "lark",
    [
        *("start: ~/a/", "start: <|end|>", "start: /(?=a)b/", "start: %json {}", "start: /^a/", "start: /(/"),
        *("%import other.X\nstart: X", "start: A\n%ignore A", 'start: "a', "start: @sub", "start: /a/ & /b/"),
    ],
)
def test_a_grammar_without_a_form_in_json_strings_is_refused(lark: str) -> None:
    with pytest.raises(NotRewritableError):
        in_json_string(lark)


@pytest.mark.parametrize(
    "lark",
    [
        "start: /" + "(?:" * 40 + "a" + "){2,}" * 40 + "/",
        "start: /" + "." * 100_000 + "/",
        "start: /" + "|".join(["(?:" * 9 + "." + "){2,}" * 9] * 1000) + "/",
        "start: " + "/[^a]/ " * 10_000,
        "%import common.FLOAT\n" * 5_000,
    ],
    ids=["nested repetitions", "dots", "branches", "classes", "imports"],
)
def test_a_grammar_that_grows_when_it_is_rewritten_is_refused_before_it_is_large(lark: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(NotRewritableError, match="more than 262144 characters"):
            in_json_string(lark)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_the_grammars_of_all_tools_together_are_bounded() -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": "start: /" + "." * 500 + "/"}
    tools = [{"type": "custom", "name": f"tool{index}", "format": form} for index in range(3)]
    assert len(function_tools(tools[:1])) == 1
    with pytest.raises(ApiError, match="together"):
        function_tools(tools)
