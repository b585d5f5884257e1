"""Grammars of forced and strict tool calls: llguidance compiles them, and they allow exactly the valid answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from weft.request import Grammar
from weft.text.answer_parts import join_deltas
from weft.text.answer_reader import AnswerReader, AnswerSyntax
from weft.text.reasoning import ReasoningMarkers
from weft.text.tokenizer import Tokenizer
from weft.text.tool_formats import FORMATS, HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, ToolFormat
from weft.text.tool_grammar import Tool, after_reasoning, forced_calls, optional_calls

llguidance = pytest.importorskip("llguidance")

THINK = ReasoningMarkers("<think>", "</think>")
WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"days": {"type": "integer"}},
    },
    is_strict=True,
)
ALL = Tool("get", {"type": "object", "properties": {}, "additionalProperties": False})
PARIS = ("get_weather", '{"city": "Paris"}')
NOTHING = ("get", "{}")


class Vocabulary:
    """A model's vocabulary with the tokenizer interface of llguidance."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id = 2
        self.bos_token_id = 1
        self.special_token_ids = sorted(tokenizer.control_ids)
        self.tokens = [
            b"\xff" * (token in tokenizer.control_ids) + tokenizer.token_bytes(token)
            for token in range(tokenizer.vocabulary_size)
        ]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode())


@pytest.fixture(scope="module")
def matching(default_tokenizer: Tokenizer) -> Any:
    wrapped = llguidance.TokenizerWrapper(Vocabulary(default_tokenizer))
    return llguidance.LLTokenizer(wrapped, eos_token=[2])


def tokens_of(text: str, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(text, allow_control=True, add_bos=False)


def allows(grammar: Grammar, text: str, tokenizer: Tokenizer, matching: Any) -> bool:
    """Whether the grammar accepts the text as a complete answer."""
    matcher = llguidance.LLMatcher(matching, llguidance.LLMatcher.grammar_from_lark(grammar.definition))
    assert not matcher.get_error(), matcher.get_error()
    tokens = tokens_of(text, tokenizer)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def check(
    grammar: Grammar | None, tokenizer: Tokenizer, matching: Any, good: Sequence[str], bad: Sequence[str]
) -> None:
    assert grammar is not None and grammar.kind == "lark"
    for text in good:
        assert allows(grammar, text, tokenizer, matching), text
    for text in bad:
        assert not allows(grammar, text, tokenizer, matching), text


@pytest.mark.parametrize("name", FORMATS)
def test_a_forced_call_names_a_tool_and_its_arguments_match_the_schema(
    name: str, default_tokenizer: Tokenizer, matching: Any
) -> None:
    tool_format = FORMATS[name]
    grammar = forced_calls([WEATHER, ALL], AnswerSyntax(tool_format=tool_format), default_tokenizer)
    good = [[PARIS], [NOTHING], [("get_weather", '{"city": "", "days": 3}')]]
    bad = [
        [("get_weather", "{}")],
        [("get_weather", '{"city": 1}')],
        [("get_weather", '{"city": "", "days": "3"}')],
        [("get", '{"city": "Paris"}')],
        [("set", "{}")],
    ]
    texts = [tool_format.render_calls(calls) for calls in good]
    check(
        grammar,
        default_tokenizer,
        matching,
        texts,
        ["", "Hello", *(tool_format.render_calls(calls) for calls in bad), texts[0] + " Done."],
    )
    several = tool_format.render_calls([PARIS, NOTHING, PARIS])
    assert allows(grammar, several, default_tokenizer, matching) == (not tool_format.is_single_call)
    # The parser must read the forced calls.
    for calls in good:
        reader = AnswerReader(AnswerSyntax(tool_format=tool_format, tool_names={"get", "get_weather"}))
        found = join_deltas(reader.add(tool_format.render_calls(calls)) + reader.finish())
        assert [(call.name, call.arguments) for call in found.calls] == calls and not found.content


@pytest.mark.parametrize(
    "tool_format", [HERMES, MISTRAL, MISTRAL_ARGS], ids=lambda tool_format: tool_format.name
)
def test_without_parallel_calls_only_one_call_is_allowed(
    tool_format: ToolFormat, default_tokenizer: Tokenizer, matching: Any
) -> None:
    grammar = forced_calls([ALL], AnswerSyntax(tool_format=tool_format, max_calls=1), default_tokenizer)
    one, two = tool_format.render_calls([NOTHING]), tool_format.render_calls([NOTHING, NOTHING])
    check(grammar, default_tokenizer, matching, [one], [two])
    grammar = forced_calls(
        [ALL], AnswerSyntax(tool_format=tool_format), default_tokenizer, is_single_call=True
    )
    check(grammar, default_tokenizer, matching, [one], [two])


def test_a_call_of_another_tool_than_the_named_one_is_not_allowed(
    default_tokenizer: Tokenizer, matching: Any
) -> None:
    grammar = forced_calls([ALL], AnswerSyntax(tool_format=HERMES), default_tokenizer)
    check(
        grammar, default_tokenizer, matching, [HERMES.render_calls([NOTHING])], [HERMES.render_calls([PARIS])]
    )


@pytest.mark.parametrize(
    ("starts_in_reasoning", "good", "bad"),
    [
        (
            False,
            ["{call}", "<think>\nhm\n</think>\n\n{call}", "<think>{call}</think>{call}"],
            ["hm</think>{call}"],
        ),
        (True, ["hm</think>{call}", "\nhm {call}\n</think>\n\n{call}"], ["{call}", "hm"]),
    ],
)
def test_reasoning_is_allowed_before_a_forced_call(
    starts_in_reasoning: bool, good: list[str], bad: list[str], default_tokenizer: Tokenizer, matching: Any
) -> None:
    syntax = AnswerSyntax(THINK, starts_in_reasoning=starts_in_reasoning, tool_format=HERMES)
    call = HERMES.render_calls([PARIS])
    check(
        forced_calls([WEATHER], syntax, default_tokenizer),
        default_tokenizer,
        matching,
        [text.replace("{call}", call) for text in good],
        [text.replace("{call}", call) for text in bad],
    )


@pytest.mark.parametrize(
    "tool_format", [HERMES, MISTRAL, MISTRAL_ARGS, LLAMA3], ids=lambda tool_format: tool_format.name
)
@pytest.mark.parametrize("reasoning", [None, THINK])
def test_arguments_of_an_optional_call_of_a_strict_tool_match_the_schema(
    tool_format: ToolFormat, reasoning: ReasoningMarkers | None, default_tokenizer: Tokenizer, matching: Any
) -> None:
    grammar = optional_calls(
        [WEATHER, ALL], AnswerSyntax(reasoning, tool_format=tool_format), default_tokenizer, None
    )
    before = "" if tool_format.has_unmarked_calls else "Let me <see>. "
    good = [
        "Hello, world!",
        "Is 1 < 2 [sic]?",
        before + tool_format.render_calls([PARIS]),
        tool_format.render_calls([("get", '{"any": [1]}')]),  # not strict: any object
    ]
    bad = [
        before + tool_format.render_calls([("get_weather", '{"town": "Paris"}')]),
        tool_format.render_calls([("set", "{}")]),
        before + tool_format.render_calls([PARIS])[:-4],
    ]
    if reasoning is not None:
        good.append(
            f"<think>hm {tool_format.render_calls([PARIS])}</think>\n\n"
            + before
            + tool_format.render_calls([PARIS])
        )
        bad.append("<think>hm " + tool_format.render_calls([PARIS]))
    if not tool_format.is_single_call:
        good.append(tool_format.render_calls([PARIS, NOTHING]))
    check(grammar, default_tokenizer, matching, good, bad)


def test_unsupported_schema_keywords_are_refused_only_for_strict_tools(
    default_tokenizer: Tokenizer, matching: Any
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "uniqueItems": True}},
        "required": ["a"],
    }
    for is_strict in (False, True):
        grammar = forced_calls(
            [Tool("f", schema, is_strict)], AnswerSyntax(tool_format=HERMES), default_tokenizer
        ).definition
        error = llguidance.LLMatcher.validate_grammar(
            llguidance.LLMatcher.grammar_from_lark(grammar), matching
        )
        assert ("uniqueItems" in error) == is_strict


def test_without_strict_tools_and_response_format_there_is_no_grammar(
    default_tokenizer: Tokenizer,
) -> None:
    assert optional_calls([ALL], AnswerSyntax(tool_format=HERMES), default_tokenizer, None) is None


@pytest.mark.parametrize(
    ("answer", "good", "bad"),
    [
        (Grammar("json_schema", '{"type": "object", "required": ["a"]}'), '{"a": 1}', '{"b": 1}'),
        (Grammar("regex", r"[a-c]+/\d"), "abc/1", "abd"),
        (Grammar("choice", '["yes", "no"]'), "yes", "maybe"),
        (Grammar("lark", 'start: "a" B\nB: /[0-9]+/'), "a12", "b"),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_with_tools_an_answer_matches_its_grammar_or_is_a_call(
    answer: Grammar, good: str, bad: str, default_tokenizer: Tokenizer, matching: Any
) -> None:
    syntax = AnswerSyntax(tool_format=HERMES)
    grammar = optional_calls([ALL], syntax, default_tokenizer, answer)
    call = HERMES.render_calls([NOTHING])
    check(grammar, default_tokenizer, matching, [good, call], [bad, "Hello", f"{good}{call}"])
    thinking = AnswerSyntax(THINK, starts_in_reasoning=True)
    check(
        after_reasoning(answer, thinking, default_tokenizer),
        default_tokenizer,
        matching,
        [f"hm</think>{good}", f"hm {bad}\n</think>\n{good}"],
        [good, f"hm</think>{bad}"],
    )
    assert after_reasoning(answer, syntax, default_tokenizer) is answer


def test_markers_that_are_control_tokens_are_forced_as_control_tokens(
    default_tokenizer: Tokenizer, matching: Any
) -> None:
    """Control tokens of the default model stand for `[TOOL_CALLS]` and `[ARGS]`."""
    opening, middle = "<file_sep>", "<jupyter_code>"
    tool_format = ToolFormat(
        "test", (opening, middle), before_name=opening, before_arguments=middle, separator=""
    )
    tokenizer = default_tokenizer
    ids = {text: token for token, text in tokenizer.control_tokens.items()}
    call = f"{opening}get{middle}{{}}"
    assert ids[opening] in tokens_of(call, tokenizer)
    good = [call, call + call]
    check(
        forced_calls([ALL], AnswerSyntax(tool_format=tool_format), tokenizer),
        tokenizer,
        matching,
        good,
        ["", "hm" + call],
    )
    strict = Tool("get", ALL.parameters, is_strict=True)
    check(
        optional_calls([strict], AnswerSyntax(tool_format=tool_format), tokenizer, None),
        tokenizer,
        matching,
        [*good, "hm", "hm " + call],
        [f"{opening}get{middle}{{1}}"],
    )
    markers = ReasoningMarkers("<issue_start>", "<issue_closed>")
    thinking = AnswerSyntax(markers, tool_format=tool_format)
    inside = AnswerSyntax(markers, starts_in_reasoning=True, tool_format=tool_format)
    check(
        forced_calls([ALL], thinking, tokenizer),
        tokenizer,
        matching,
        [call, "<issue_start>hm<issue_closed>\n" + call],
        ["<issue_start>hm" + call],
    )
    check(forced_calls([ALL], inside, tokenizer), tokenizer, matching, ["hm<issue_closed>" + call], [call])
    assert thinking.visible_control_ids(tokenizer) == {
        ids[text] for text in (opening, middle, "<issue_start>", "<issue_closed>")
    }
