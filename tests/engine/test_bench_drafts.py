"""`python -m benchmarks drafts` on the real model: both engines answer, draft tokens are used, and answers are compared."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from test_real_model_drafts import FREE_ROWS, set_step_cost

from benchmarks import drafts
from weft.llm import LLM


def test_with_and_without_drafts_the_answers_are_the_same(
    default_model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        drafts, "PROMPTS", {"repeating": ("Repeat: one two three one two three one two three",)}
    )
    monkeypatch.setattr(drafts, "MAX_TOKENS", 24)
    assert drafts.main(str(default_model_path), rounds=1, json=True)
    document = json.loads(capsys.readouterr().out)
    greedy, drawn = document["gains"]
    assert (greedy["temperature"], drawn["temperature"]) == (0.0, 0.8)
    assert 0 < greedy["accepted"] <= greedy["drafted"] and greedy["is_same"]
    assert min(greedy["seconds_with"], greedy["seconds_without"]) > 0
    assert document["checks"][0]["is_met"]


def test_an_answer_that_differs_with_drafts_is_detected() -> None:
    def fixed_llm(*tokens: int) -> LLM:
        stats = SimpleNamespace(tokens_drafted=0, drafts_accepted=0)
        result = SimpleNamespace(tokens=tokens, decode_time=1.0, decode_steps=len(tokens) - 1)
        llm: Any = type("FixedLLM", (), {"chat": lambda self, messages, params: result})()
        llm.engine = SimpleNamespace(scheduler=SimpleNamespace(stats=stats))
        return cast("LLM", llm)

    without_drafts = fixed_llm(1, 2, 3)
    assert drafts.measure(fixed_llm(1, 2, 3), without_drafts, "kind", ("prompt",), 0.0, 2).is_same
    gain = drafts.measure(fixed_llm(1, 2, 4), without_drafts, "kind", ("prompt",), 0.0, 2)
    assert not gain.is_same and gain.tokens == 4 and gain.ratio == 1.0


def test_a_wrong_prediction_is_paired_with_none_and_changes_no_answer(
    default_model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drafts, "PROMPTS", {"questions": ("What is the capital of Japan?",)})
    monkeypatch.setattr(drafts, "MAX_TOKENS", 24)
    set_step_cost(monkeypatch, FREE_ROWS)
    assert drafts.main_predictions(str(default_model_path), rounds=2, json=True)
    found = {one["kind"]: one for one in json.loads(capsys.readouterr().out)["predictions"]}
    assert list(found) == ["another text", "all drafts wrong"]
    assert all(len(one["without"]) == len(one["with_it"]) == 2 and one["is_same"] for one in found.values())
    assert all(min(one["without"] + one["with_it"]) > 0 for one in found.values())
    assert found["all drafts wrong"]["rejected"] > 0
