"""Reasoning: it is split from the content, and its markers are detected in the model's template."""

from __future__ import annotations

import pytest

from weft.text.answer_parts import join_deltas
from weft.text.answer_reader import AnswerReader, AnswerSyntax
from weft.text.reasoning import ReasoningMarkers, detect_markers
from weft.text.tool_formats import HERMES

THINK = ReasoningMarkers("<think>", "</think>")


def read(text: str, *, starts_in_reasoning: bool = False) -> tuple[str, str]:
    reader = AnswerReader(AnswerSyntax(THINK, starts_in_reasoning=starts_in_reasoning))
    found = join_deltas(reader.add(text) + reader.finish())
    return found.reasoning, found.content


@pytest.mark.parametrize(
    ("text", "starts_in_reasoning", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nYes.\n", False, "hm", "Yes.\n"),
        ("\n<think>hm</think>Yes.", False, "hm", "Yes."),
        ("hm\n</think>\n\nYes.", True, "hm", "Yes."),
        ("<think>hm</think>Yes.", True, "hm", "Yes."),  # some models repeat the marker of the prompt
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("Yes.", False, "", "Yes."),
        ("  Yes, <think> is a marker</think>", False, "", "  Yes, <think> is a marker</think>"),
        ("<think>a <thi </thin </think>b</think>", False, "a <thi </thin", "b</think>"),
        ("<think>cut he", False, "cut he", ""),
        ("cut here </thi", True, "cut here </thi", ""),
        ("<thin", False, "", "<thin"),
    ],
)
def test_reasoning_at_the_start_is_split_from_the_content(
    text: str, starts_in_reasoning: bool, reasoning: str, content: str
) -> None:
    assert read(text, starts_in_reasoning=starts_in_reasoning) == (reasoning, content)


def test_reasoning_is_streamed() -> None:
    reader = AnswerReader(AnswerSyntax(THINK))
    reported = [
        join_deltas(reader.add(piece)).reasoning
        for piece in ("<thi", "nk>", "\nI ", "see", " </", "think>", "Yes")
    ]
    assert reported == ["", "", "I", " see", "", "", ""]
    assert not reader.is_in_reasoning


def test_a_call_counts_after_the_reasoning_but_not_inside_it() -> None:
    reader = AnswerReader(AnswerSyntax(THINK, tool_format=HERMES))
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    found = join_deltas(reader.add(f"<think>maybe {call}</think>\n{call}") + reader.finish())
    assert found.reasoning == f"maybe {call}" and found.content == "" and len(found.calls) == 1


def test_the_markers_are_detected_in_the_template() -> None:
    assert detect_markers(["{{ content.split('</think>')[-1] }}"]) == THINK
    assert detect_markers(["", "[THINK]{{ x }}[/THINK]"]) == ReasoningMarkers("[THINK]", "[/THINK]")
    assert detect_markers(["{{ messages }}"]) is None
