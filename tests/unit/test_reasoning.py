"""Thoughts before an answer: split off where the model's template knows them, and nowhere else."""

from __future__ import annotations

import pytest

from weft.text.answer_parts import joined
from weft.text.answer_reader import AnswerForm, AnswerReader
from weft.text.reasoning import ReasoningMarkers, markers_in
from weft.text.tool_formats import HERMES

THINK = ReasoningMarkers("<think>", "</think>")


def read(text: str, *, begins_inside: bool = False) -> tuple[str, str]:
    reader = AnswerReader(AnswerForm(THINK, begins_inside=begins_inside))
    found = joined(reader.add(text) + reader.finish())
    return found.reasoning, found.content


@pytest.mark.parametrize(
    ("text", "begins_inside", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nYes.\n", False, "hm", "Yes.\n"),
        ("\n<think>hm</think>Yes.", False, "hm", "Yes."),
        ("hm\n</think>\n\nYes.", True, "hm", "Yes."),
        ("<think>hm</think>Yes.", True, "hm", "Yes."),  # some repeat what their template wrote
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("Yes.", False, "", "Yes."),
        ("  Yes, <think> is a marker</think>", False, "", "  Yes, <think> is a marker</think>"),
        ("<think>a <thi </thin </think>b</think>", False, "a <thi </thin", "b</think>"),
        ("<think>cut he", False, "cut he", ""),
        ("cut here </thi", True, "cut here </thi", ""),
        ("<thin", False, "", "<thin"),
    ],
)
def test_thoughts_come_first_and_are_split_off(
    text: str, begins_inside: bool, reasoning: str, content: str
) -> None:
    assert read(text, begins_inside=begins_inside) == (reasoning, content)


def test_thoughts_are_told_as_they_come() -> None:
    reader = AnswerReader(AnswerForm(THINK))
    told = [
        joined(reader.add(piece)).reasoning
        for piece in ("<thi", "nk>", "\nI ", "see", " </", "think>", "Yes")
    ]
    assert told == ["", "", "I", " see", "", "", ""]
    assert not reader.is_thinking


def test_a_call_in_the_thoughts_is_none_and_one_behind_them_is() -> None:
    reader = AnswerReader(AnswerForm(THINK, tools=HERMES))
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    found = joined(reader.add(f"<think>maybe {call}</think>\n{call}") + reader.finish())
    assert found.reasoning == f"maybe {call}" and found.content == "" and len(found.calls) == 1


def test_the_markers_are_those_that_the_template_knows() -> None:
    assert markers_in(["{{ content.split('</think>')[-1] }}"]) == THINK
    assert markers_in(["", "[THINK]{{ x }}[/THINK]"]) == ReasoningMarkers("[THINK]", "[/THINK]")
    assert markers_in(["{{ messages }}"]) is None
