"""Answers of every tool format, split and cut anywhere: the same parts, no text lost, no thoughts in the content.

Greek letters mark where text belongs: theta to thoughts, kappa to content, alpha to arguments. No syntax has them.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.text.answer_parts import AnswerParts, Content, Delta, Reasoning, ToolCallStart, join_deltas
from weft.text.answer_reader import AnswerReader, AnswerSyntax
from weft.text.reasoning import ReasoningMarkers
from weft.text.tool_formats import FORMATS, ToolFormat

MARKERS = (None, ReasoningMarkers("<think>", "</think>"), ReasoningMarkers("[THINK]", "[/THINK]"))
ARGUMENTS = '{"p": "αα α{\\"[", "q": [1, {"αr": null}]}'
LETTERS = "θκα"

syntaxes = st.builds(
    lambda tool_format, markers, is_inside: AnswerSyntax(
        markers, markers is not None and is_inside, tool_format, frozenset({"f", "g"})
    ),
    st.sampled_from([*FORMATS.values()]),
    st.sampled_from(MARKERS),
    st.booleans(),
)


def deltas_of(syntax: AnswerSyntax, chunks: list[str]) -> list[Delta]:
    reader = AnswerReader(syntax)
    return [delta for chunk in chunks for delta in reader.add(chunk)] + reader.finish()


def known(parts: AnswerParts) -> tuple[str, str, list[tuple[str, str]]]:
    """The parts without the ids of calls, which are random."""
    return parts.content, parts.reasoning, [(call.name, call.arguments) for call in parts.calls]


def letters_of(text: str) -> str:
    return "".join(letter for letter in text if letter in LETTERS)


def split(text: str, places: list[int]) -> list[str]:
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(ends)]


def regular(syntax: AnswerSyntax, num_calls: int, before: str) -> str:
    """An answer as a model that knows the format writes it."""
    assert syntax.tool_format is not None
    text = ""
    if syntax.reasoning is not None:
        opening = "" if syntax.starts_in_reasoning else syntax.reasoning.opening
        text = f"{opening}\nθθ {{θ <tool θ\n{syntax.reasoning.closing}\n\n"
    if num_calls:
        calls = [("fg"[number % 2], ARGUMENTS) for number in range(num_calls)]
        content = "" if syntax.tool_format.has_unmarked_calls else before
        return f"{text}{content}{syntax.tool_format.render_calls(calls)}"
    return f"{text}{before}"


answers = syntaxes.flatmap(
    lambda syntax: st.tuples(
        st.just(syntax),
        st.builds(
            regular,
            st.just(syntax),
            st.integers(0, 3),
            st.sampled_from(("", "κκ κ. ", "κ < κ [ κ { κ", "κ\n\n")),
        ),
    )
)
places = st.lists(st.integers(0, 400), max_size=12)


@settings(max_examples=400, deadline=None)
@given(answers, places, st.none() | st.integers(0, 400))
def test_a_regular_answer_has_the_same_parts_however_it_is_split_and_cut(
    answer: tuple[AnswerSyntax, str], places: list[int], cut: int | None
) -> None:
    syntax, text = answer
    text = text if cut is None else text[: cut % (len(text) + 1)]
    parts = join_deltas(deltas_of(syntax, split(text, places)))
    assert known(parts) == known(join_deltas(deltas_of(syntax, [text])))
    assert set(letters_of(parts.reasoning)) <= {"θ"}
    assert "θ" not in parts.content, "thoughts leaked into the content"
    arguments = "".join(call.arguments for call in parts.calls)
    assert letters_of(parts.reasoning + parts.content + arguments) == letters_of(text), "text was lost"
    if cut is None:
        assert all(call.arguments == ARGUMENTS for call in parts.calls)
        assert "α" not in parts.content


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=lambda one: one.name)
def test_every_split_in_two_and_every_cut_of_two_parallel_calls_gives_the_same_parts(
    tool_format: ToolFormat,
) -> None:
    for markers in MARKERS:
        syntax = AnswerSyntax(markers, False, tool_format, frozenset({"f", "g"}))
        text = regular(syntax, 2, "κκ. ")
        whole = known(join_deltas(deltas_of(syntax, [text])))
        assert [name for name, _ in whole[2]] == ["f", "g"]
        assert known(join_deltas(deltas_of(syntax, [*text]))) == whole
        for place in range(len(text)):
            assert known(join_deltas(deltas_of(syntax, [text[:place], text[place:]]))) == whole
            cut = deltas_of(syntax, [text[:place]])
            assert letters_of(_written(cut)) == letters_of(text[:place])


def _written(deltas: list[Delta]) -> str:
    """All text of the deltas, in order."""
    return "".join(delta.name if isinstance(delta, ToolCallStart) else delta.text for delta in deltas)


PIECES = (
    *("θ", "κ", "α", " ", "\n", "{", "}", "[", "]", '"', "\\", ",", ";", ":", "x"),
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"),
    *(
        "<|python_tag|>",
        "<tool",
        "[TOOL",
        "</th",
        "[CALL_ID]",
        '{"name": "f", ',
        '"arguments": ',
        '"parameters": ',
    ),
    *('{"name": "f", "arguments": {"a": "α"}}', "f[ARGS]{}", '"name": "g"', "null", "1.5", '"κκ"', " " * 70),
)


@settings(max_examples=1000, deadline=None)
@given(syntaxes, st.lists(st.sampled_from(PIECES), max_size=24), places)
def test_of_any_text_nothing_is_lost_and_the_parts_do_not_depend_on_the_split(
    syntax: AnswerSyntax, pieces: list[str], places: list[int]
) -> None:
    text = "".join(pieces)
    deltas = deltas_of(syntax, split(text, places))
    parts = join_deltas(deltas)
    assert known(parts) == known(join_deltas(deltas_of(syntax, [text])))
    assert letters_of(_written(deltas)) == letters_of(text)
    is_after = False
    for delta in deltas:
        is_after = is_after or not isinstance(delta, Reasoning)
        assert not (is_after and isinstance(delta, Reasoning)), "thoughts come first"
    if not parts.calls and syntax.reasoning is None:
        assert parts.content == text
    assert all(delta.text for delta in deltas if isinstance(delta, Content | Reasoning))
