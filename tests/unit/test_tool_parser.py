"""Parsing tool calls: which text is a call, which is content, and which deltas are reported when."""

from __future__ import annotations

import pytest

from weft.text.answer_parts import AnswerParts, Content, Delta, ToolCallArguments, ToolCallStart, join_deltas
from weft.text.tool_formats import HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, ToolFormat
from weft.text.tool_parser import ToolParser

NAMES = {"f", "g"}
CALL = '{"name": "f", "arguments": {"a": 1}}'


def parts(tool_format: ToolFormat, text: str, **options: int) -> AnswerParts:
    parser = ToolParser(tool_format, NAMES, **options)
    return join_deltas(parser.add(text) + parser.finish())


def read(tool_format: ToolFormat, text: str, **options: int) -> tuple[str, list[tuple[str, str]]]:
    found = parts(tool_format, text, **options)
    return found.content, [(call.name, call.arguments) for call in found.calls]


@pytest.mark.parametrize(
    ("tool_format", "text", "content", "calls"),
    [
        (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", [("f", '{"a": 1}')]),
        (HERMES, f"<tool_call>{CALL}</tool_call>", "", [("f", '{"a": 1}')]),
        (HERMES, f"Let me see.\n<tool_call>{CALL}</tool_call>", "Let me see.", [("f", '{"a": 1}')]),
        (
            HERMES,
            f"<tool_call>{CALL}</tool_call>\n<tool_call>\n{{'name'}}",
            "<tool_call>\n{'name'}",
            [("f", '{"a": 1}')],
        ),
        (
            HERMES,
            f'<tool_call>{CALL}</tool_call>\n<tool_call>{{"name":"g","arguments":{{}}}}</tool_call>',
            "",
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
        (HERMES, f"<tool_call>\n{CALL}\n{CALL}\n</tool_call>", "", [("f", '{"a": 1}')] * 2),
        (HERMES, f"<tool_call>[{CALL}, {CALL}]</tool_call>", "", [("f", '{"a": 1}')] * 2),
        (HERMES, f"<tool_call>{CALL}", "", [("f", '{"a": 1}')]),
        (HERMES, f"a <tool_call>{CALL}</tool_call>\n b ", "a b ", [("f", '{"a": 1}')]),
        (LLAMA3, '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        (LLAMA3, '\n{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
        (
            LLAMA3,
            '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
            "",
            [("f", "{}"), ("g", "{}")],
        ),
        (
            LLAMA3,
            '[{"name": "f", "parameters": {}}, {"name": "g", "parameters": {}}]',
            "",
            [("f", "{}"), ("g", "{}")],
        ),
        (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        (LLAMA3, 'Sure. <|python_tag|>{"name": "f", "parameters": {}}', "Sure.", [("f", "{}")]),
        (MISTRAL, f"[TOOL_CALLS][{CALL}]", "", [("f", '{"a": 1}')]),
        (MISTRAL, f"[TOOL_CALLS] [{CALL}, {CALL}]", "", [("f", '{"a": 1}')] * 2),
        (
            MISTRAL,
            '[TOOL_CALLS][{"name": "f", "arguments": {"a": [1]}, "id": "123456789"}]',
            "",
            [("f", '{"a": [1]}')],
        ),
        (MISTRAL, '[TOOL_CALLS]f{"a": 1}', "", [("f", '{"a": 1}')]),
        (MISTRAL_ARGS, 'Now[TOOL_CALLS]f[ARGS]{"a": 1}', "Now", [("f", '{"a": 1}')]),
        (MISTRAL_ARGS, "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{}", "", [("f", "{}"), ("g", "{}")]),
        (MISTRAL_ARGS, "[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{}", "", [("f", "{}")]),
    ],
)
def test_calls_are_parsed_in_every_known_format_and_variant(
    tool_format: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read(tool_format, text) == (content, calls)


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        (HERMES, "Hello, world!  \n"),
        (HERMES, "Use <tool_call> to call a tool."),
        (HERMES, "<tool_call>\n"),
        (HERMES, "<tool_call>{}</tool_call>"),
        (HERMES, '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f"'),
        (HERMES, '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "type": κ, "arguments": {}}</tool_call>'),
        (HERMES, "ends with half a marker <tool_c"),
        (HERMES, CALL),
        (LLAMA3, '{"answer": 42}'),
        (LLAMA3, "[1, 2, 3]"),
        (LLAMA3, '{"name": "Hamlet", "parameters": {"year": 1600}}'),
        (LLAMA3, 'Sure: {"name": "f", "parameters": {}}'),
        (LLAMA3, "<|python_tag|>print('hello')"),
        (MISTRAL, "[TOOL_CALLS] are for tools"),
        (MISTRAL, "[TOOL_CALLS][]"),
        (MISTRAL_ARGS, "[TOOL_CALLS]f[ELSE]{}"),
        (MISTRAL_ARGS, "[TOOL_CALLS]f[ARGS] none"),
    ],
)
def test_text_without_a_valid_call_is_content_to_the_last_character(
    tool_format: ToolFormat, text: str
) -> None:
    assert read(tool_format, text) == (text, [])


@pytest.mark.parametrize(
    "call",
    [
        '{"arguments": {"a": 1}, "name": "f"}',
        '{"name": "f", "parameters": {"a": 1}}',
        '{"name": "f", "arguments": "{\\"a\\": 1}"}',
        '{"id": [1, {"x": "}"}], "name": "f", "more": null, "arguments": {"a": 1}, "type": "function"}',
    ],
)
def test_the_keys_of_a_call_may_come_in_any_order_among_other_keys(call: str) -> None:
    assert read(HERMES, f"<tool_call>{call}</tool_call>") == ("", [("f", '{"a": 1}')])


@pytest.mark.parametrize("rest", ["}", ', "arguments": null}'])
def test_a_call_without_arguments_has_an_empty_object(rest: str) -> None:
    assert read(HERMES, f'<tool_call>{{"name": "f"{rest}</tool_call>') == ("", [("f", "{}")])


def test_arguments_are_reported_exactly_as_the_model_wrote_them() -> None:
    arguments = '{ "a" :"}{\\"\\\\" ,\n"é🎉":[ 1.50,{"b":null}] , "c": "<tool_call>" }'
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert read(HERMES, text) == ("", [("f", arguments)])


def test_a_call_is_reported_when_its_arguments_start_and_the_arguments_are_streamed() -> None:
    parser = ToolParser(HERMES)
    deltas: list[Delta] = []
    for piece in ("Hm ", "<tool", '_call>{"name": "f', '", "arguments"', ": ", '{"a', '": "b', '"}', "}"):
        deltas = parser.add(piece)
        if piece == "Hm ":
            assert deltas == [Content("Hm")]
        elif piece == '{"a':
            start, arguments = deltas
            assert isinstance(start, ToolCallStart) and (start.index, start.name) == (0, "f")
            assert arguments == ToolCallArguments(0, '{"a')
        elif piece in ('": "b', '"}'):
            assert deltas == [ToolCallArguments(0, piece)]
        else:
            assert deltas == []


def test_a_truncated_call_keeps_its_partial_arguments() -> None:
    assert read(HERMES, '<tool_call>{"name": "f", "arguments": {"a": "b') == ("", [("f", '{"a": "b')])


def test_text_after_malformed_arguments_is_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": ]}}</tool_call> so'
    assert read(HERMES, text) == ("]}}</tool_call> so", [("f", '{"a": ')])


def test_second_arguments_are_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}, "arguments": {"b": 1}}</tool_call>'
    assert read(HERMES, text) == (', "arguments": {"b": 1}}</tool_call>', [("f", "{}")])


def test_a_call_is_found_after_text_that_only_looks_like_a_call() -> None:
    assert read(HERMES, f"<tool_call>oops <tool_call>{CALL}</tool_call>") == (
        "<tool_call>oops",
        [("f", '{"a": 1}')],
    )


def test_call_ids_are_unique_and_have_nine_characters_for_mistral() -> None:
    ids = [call.id for call in parts(HERMES, f"<tool_call>{CALL}{CALL}</tool_call>").calls]
    assert len(set(ids)) == 2 and all(one.startswith("call_") for one in ids)
    [short] = [call.id for call in parts(MISTRAL, f"[TOOL_CALLS][{CALL}]").calls]
    assert len(short) == 9 and short.isalnum()


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        (HERMES, f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"),
        (LLAMA3, '{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {}}'),
        (MISTRAL, f"[TOOL_CALLS][{CALL}, {CALL}]"),
        (MISTRAL_ARGS, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[ARGS]{}'),
    ],
)
def test_text_after_the_last_allowed_call_is_ignored(tool_format: ToolFormat, text: str) -> None:
    parser = ToolParser(tool_format, NAMES, max_calls=1)
    deltas = parser.add(text)
    assert parser.is_over
    found = join_deltas(deltas + parser.add(" more") + parser.finish())
    assert [(call.name, call.arguments) for call in found.calls] == [("f", '{"a": 1}')]
    assert found.content == ""


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 40_000,
        "<tool_call>{" * 40_000,
        '<tool_call>{"name": "' + "a" * 400_000,
        '<tool_call>{"arguments": {"a": "' + "a" * 400_000,
        '<tool_call>{"name": "f", "arguments": {"a": "' + "\\" * 400_000,
        '<tool_call>{"name": "f", "arguments": ' + '{"a": [' * 60_000,
        " " * 400_000,
        "<" * 400_000,
    ],
    ids=lambda text: text[:40].strip() or "white space",
)
def test_the_text_held_back_is_bounded_and_reported_in_the_end(text: str) -> None:
    parser = ToolParser(HERMES)
    deltas: list[Delta] = []
    num_reported = 0
    for start in range(0, len(text), 4):
        new = parser.add(text[start : start + 4])
        num_reported += sum(len(delta.text) for delta in new if not isinstance(delta, ToolCallStart))
        deltas += new
        assert start - num_reported < 20_000
    found = join_deltas(deltas + parser.finish())
    whole = found.content + "".join(call.arguments for call in found.calls)
    assert text.endswith(whole) and len(whole) > len(text) - 50
