"""`python -m benchmarks learned`: its traces repeat no request, both engines answer, and a missed bar is an exit code."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import learned
from benchmarks.__main__ import app
from benchmarks.learned import Part
from benchmarks.traces import TRACES, Messages, Trace

EDITS, LETTERS, AGENT, UNRELATED = TRACES


def asked(trace: Trace, count: int, streams: int, answer: str = "done") -> list[Messages]:
    """The requests of a replay in which the model always answers the same."""
    earlier: list[list[tuple[int, str]]] = [[] for _ in range(streams)]
    requests = []
    for number in range(count):
        requests.append(trace.request(number, earlier[number % streams]))
        earlier[number % streams].append((number, answer))
    return requests


@pytest.mark.parametrize("streams", [1, 8])
@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.name)
def test_no_request_of_a_trace_occurs_twice(trace: Trace, streams: int) -> None:
    answer = "```python\nclass Account:\n    pass\n```"
    requests = [json.dumps(request) for request in asked(trace, 200, streams, answer)]
    assert len(set(requests)) == 200


def test_an_edit_builds_on_the_file_of_the_answer_before_and_begins_again() -> None:
    requests = [request[0]["content"] for request in asked(EDITS, 8, 1, "```python\nnew = 1\n```")]
    assert ["new = 1" in text for text in requests] == [False, *[True] * 5, False, True]
    no_file = [request[0]["content"] for request in asked(EDITS, 3, 1, "I cannot.")]
    assert all("class Account:" in text for text in no_file)


def test_an_agent_has_its_own_answers_in_its_history() -> None:
    requests = asked(AGENT, 6, 1, "I look at it.")
    assert [[one["role"] for one in request].count("assistant") for request in requests] == [0, 1, 2, 3, 0, 1]
    assert requests[1][:2] == requests[0] and requests[1][2]["content"] == "I look at it."
    assert requests[2][: len(requests[1])] == requests[1]


def test_both_engines_answer_all_parts(
    default_model_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(learned, "MAX_TOKENS", 12)
    learned.main(str(default_model_path), requests=16, streams=8, trace=LETTERS.name, keep=tmp_path)
    parts = json.loads((tmp_path / f"{LETTERS.name}-8.json").read_text())
    assert [part["name"] for part in parts] == ["first", "last"]
    for part in parts:
        assert part["is_same"] and part["streams"] == 8 and 0 < part["tokens"] <= 8 * 11
        assert min(part["seconds_cold"], part["seconds_warm"]) > 0
        assert 0 <= part["low"] <= part["ratio"] <= part["high"]
    parts = [dataclasses.asdict(part) for part in learned.measure(str(default_model_path), UNRELATED, 4, 1)]
    assert [part["name"] for part in parts] == [f"quarter {number}" for number in (1, 2, 3, 4)]
    assert all(part["is_same"] for part in parts)


def part(trace: Trace, name: str, ratio: float, streams: int = 1, is_same: bool = True) -> Part:
    return Part(trace.name, streams, name, 100, ratio, 1.0, 5, 4, is_same, ratio, ratio - 0.1, ratio + 0.1)


@pytest.mark.parametrize(
    ("found", "is_met"),
    [
        (part(EDITS, "last", 1.61), True),
        (part(EDITS, "last", 1.59), False),
        (part(EDITS, "first", 0.5), True),
        (part(AGENT, "last", 1.21, streams=8), True),
        (part(AGENT, "last", 1.19, streams=8), False),
        (part(UNRELATED, "quarter 2", 0.99), True),
        (part(UNRELATED, "quarter 2", 0.97), False),
        (part(LETTERS, "last", 2.0, is_same=False), False),
    ],
)
@pytest.mark.parametrize("json_option", [[], ["--json"]])
def test_a_missed_bar_or_another_answer_is_exit_code_1(
    found: Part, is_met: bool, json_option: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = found.trace
    monkeypatch.setattr(learned, "measure", lambda *_: [found])
    arguments = ["learned", "--trace", name, "--streams", "1", *json_option]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == (0 if is_met else 1), result.output
    if json_option:
        document = json.loads(result.output)
        assert document["parts"][0]["trace"] == name and len(document["checks"]) >= 1


def test_an_unknown_trace_is_refused_with_the_known_ones() -> None:
    with pytest.raises(learned.InvalidRequestError, match="allowed: edits of one file, templated answers"):
        learned.main(trace="edits")
