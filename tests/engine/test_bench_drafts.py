"""`python -m benchmarks drafts` on the real model: both ways are asked, drafts are really checked, and answers are compared."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks import drafts
from weft.llm import LLM


def test_both_ways_are_measured_and_answer_the_same(
    default_model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        drafts, "QUESTIONS", {"repeating": ("Repeat: one two three one two three one two three",)}
    )
    monkeypatch.setattr(drafts, "MAX_TOKENS", 24)
    assert drafts.main(str(default_model_path), rounds=1, json=True)
    document = json.loads(capsys.readouterr().out)
    greedy, drawn = document["gains"]
    assert (greedy["temperature"], drawn["temperature"]) == (0.0, 0.8)
    assert 0 < greedy["accepted"] <= greedy["drafted"] and greedy["is_same"]
    assert min(greedy["seconds_with"], greedy["seconds_without"]) > 0
    assert document["checks"][0]["is_met"]


def test_an_answer_that_is_another_with_drafts_is_noticed() -> None:
    def speaking(*tokens: int) -> LLM:
        stats = SimpleNamespace(tokens_drafted=0, drafts_accepted=0)
        result = SimpleNamespace(tokens=tokens, decode_time=1.0, decode_steps=len(tokens) - 1)
        llm: Any = type("Speaking", (), {"chat": lambda self, messages, params: result})()
        llm.engine = SimpleNamespace(scheduler=SimpleNamespace(stats=stats))
        return cast("LLM", llm)

    plain = speaking(1, 2, 3)
    assert drafts.measure(speaking(1, 2, 3), plain, "kind", ("question",), 0.0, 2).is_same
    gain = drafts.measure(speaking(1, 2, 4), plain, "kind", ("question",), 0.0, 2)
    assert not gain.is_same and gain.tokens == 4 and gain.ratio == 1.0
