"""An answer cut into any pieces has the same parts, and no text is lost. All randomness is seeded."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from weft.text.answer_parts import AnswerParts, Content, join_deltas
from weft.text.answer_reader import AnswerReader, AnswerSyntax
from weft.text.reasoning import ReasoningMarkers
from weft.text.tool_formats import FORMATS, ToolFormat

NUM_TEXTS = 400
THINK = ReasoningMarkers("<think>", "</think>")
# The pieces of random answers: markers, halves of markers, parts of calls, and other text.
PIECES = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<tool_",
        "call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
    ),
    *(
        "<think>",
        "</think>",
        "</thi",
        "[",
        "]",
        "{",
        "}",
        '"',
        "\\",
        ",",
        ";",
        ":",
        " ",
        "\n",
        "é",
        "🎉",
        "word",
    ),
    *(
        '{"name": "f", "arguments": {"a": 1}}',
        '{"name": "f", "parameters": {"b": "}"}}',
        '"name"',
        '"f"',
        "f",
    ),
    *('{"name": "f", ', '"arguments": {', '"arguments"', "null", "-1.5e3", " " * 70, "{}"),
)


def random_text(source: random.Random, form: ToolFormat) -> str:
    pieces = (*PIECES, *[form.render_calls([("f", '{"a": "}"}'), ("f", "{}")]), form.openings[0]] * 3)
    return "".join(source.choice(pieces) for _ in range(source.randint(1, 25)))


def whole(form: AnswerSyntax, pieces: list[str]) -> AnswerParts:
    reader = AnswerReader(form)
    found = join_deltas([delta for piece in pieces for delta in reader.add(piece)] + reader.finish())
    for call in found.calls:
        call.id = ""
    return found


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("thinks", [False, True])
def test_any_cutting_gives_the_same_answer(name: str, thinks: bool) -> None:
    num_calls = 0
    for seed in range(NUM_TEXTS):
        source = random.Random(f"{name} {seed}")
        text = random_text(source, FORMATS[name])
        form = AnswerSyntax(
            THINK if thinks else None,
            starts_in_reasoning=thinks and source.random() < 0.3,
            tool_format=FORMATS[name],
            tool_names={"f"},
            max_calls=source.choice([None, None, 1]),
        )
        expected = whole(form, [text])
        num_calls += len(expected.calls)
        for _ in range(4):
            places = sorted(source.choices(range(len(text) + 1), k=source.randint(1, 12)))
            cut = [text[a:b] for a, b in pairwise([0, *places, len(text)])]
            assert whole(form, cut) == expected, f"seed {seed}: {cut}"
        assert whole(form, list(text)) == expected, f"seed {seed}, single characters: {text!r}"
    assert num_calls > 30


@pytest.mark.parametrize("name", FORMATS)
def test_content_is_part_of_the_text_and_all_of_it_if_there_are_no_calls(name: str) -> None:
    form = AnswerSyntax(tool_format=FORMATS[name], tool_names={"f"})
    for seed in range(NUM_TEXTS):
        text = random_text(random.Random(f"{name} {seed}"), FORMATS[name])
        reader = AnswerReader(form)
        deltas = reader.add(text) + reader.finish()
        if not join_deltas(deltas).calls:
            assert join_deltas(deltas).content == text, f"seed {seed}"
            continue
        place = 0
        for delta in deltas:
            if isinstance(delta, Content):
                for word in delta.text.split():
                    place = text.find(word, place) + len(word)
                    assert place >= len(word), f"seed {seed}: {word!r} of {text!r}"


@pytest.mark.parametrize("name", FORMATS)
def test_content_and_calls_are_read_as_they_were_written(name: str) -> None:
    form = FORMATS[name]
    for seed in range(NUM_TEXTS):
        source = random.Random(f"{name} {seed}")
        calls = [
            (source.choice("fg"), f'{{"n": {number}, "s": "<b>"}}') for number in range(source.randint(1, 4))
        ]
        before, after = (
            source.choice(["", "well ", "a <tool\n"]),
            source.choice(["", "\n", " that's all", "."]),
        )
        if form.has_unmarked_calls:
            before = ""
        found = whole(
            AnswerSyntax(tool_format=form, tool_names={"f", "g"}), [before + form.render_calls(calls) + after]
        )
        assert [(call.name, call.arguments) for call in found.calls] == calls, f"seed {seed}"
        assert found.content.split() == (before + after).split(), f"seed {seed}"
