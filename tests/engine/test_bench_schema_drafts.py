"""`python -m benchmarks schema-drafts` on the real model: every answer follows its schema and is the same without draft
tokens; and the benchmark notices an answer that does not."""

import json
from pathlib import Path

import pytest

from benchmarks import schema_drafts
from benchmarks.schema_drafts import SCHEMAS, Wave, check_answer, checks
from weft.request import FinishReason, GenerationResult, RequestId, RequestState


def test_short_run_finds_all_answers_valid_and_the_same_and_a_later_run_continues_it(
    default_model_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(schema_drafts, "ROUND", (*[1] * 8, 8, 8))
    monkeypatch.setattr(schema_drafts, "BARS", {1: 0.0, 8: 0.0, 32: 0.0})
    monkeypatch.setattr(schema_drafts, "LONG_NAMES_BAR", 0.0)
    keep = tmp_path / "waves.jsonl"
    for answers, total in ((12, 16), (32, 32)):  # 12 answers end in the middle of a wave
        assert schema_drafts.main(str(default_model_path), answers=answers, keep=keep, as_json=True)
        found = json.loads(capsys.readouterr().out)["checks"]
        assert [check["measured"] for check in found[:2]] == [f"{total} of {total}"] * 2
    waves = [json.loads(line) for line in keep.read_text().splitlines()]
    assert sum(wave["num_answers"] for wave in waves) == 32 and sum(wave["accepted"] for wave in waves) > 0
    assert [wave["streams"] for wave in waves] == [1] * 8 + [8] * 2 + [1] * 8


def result(text: str, reason: FinishReason = FinishReason.END_OF_SEQUENCE) -> GenerationResult:
    times = dict.fromkeys(("waiting_time", "prefill_time", "decode_time", "time_to_first_token"), 0.0)
    counts = dict.fromkeys(("decode_steps", "prompt_token_count", "cached_token_count", "preemptions"), 0)
    fields = {"tokens": (1,), "text": text, "state": RequestState.COMPLETED, "error": None}
    return GenerationResult(RequestId("a"), finish_reason=reason, **fields, **times, **counts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("long names", None, '{"customer_identification_number": 7}'),
        ("two strings", '{"name": "Oslo", "country": "Norway"}', '{"name": "Oslo", "country": 7}'),
        (
            "numbers",
            '{"sky": "clear", "degrees": 7, "wind": null}',
            '{"sky": "blue", "degrees": 7, "wind": 1}',
        ),
        ("array of objects", None, '{"order_items": []}'),
        ("enum", '"probably"', '"maybe"'),
        ("integer", "120", "121"),
        ("list of words", "[]", '["red", "red", "red", "red", "red"]'),
        ("string", '"twenty characters..."', '"twenty-one characters"'),
    ],
)
def test_an_answer_that_does_not_follow_its_schema_is_detected(
    name: str, right: str | None, wrong: str
) -> None:
    number = list(SCHEMAS).index(name)
    assert right is None or check_answer(number, result(right)) is None
    assert check_answer(number, result(wrong)) is not None
    assert check_answer(number, result(right or wrong, FinishReason.LENGTH)) is not None


def test_invalid_and_different_answers_fail_their_checks() -> None:
    good = Wave(1, "enum", 5, 1.0, 1.0, 0, 0, 1)
    bad = Wave(1, "enum", 5, 1.0, 1.0, 0, 0, 1, ["answer 0: not JSON"], ["answer 0: other"])
    assert all(check.is_met for check in checks([good, good]))
    assert [check.is_met for check in checks([good, bad])[:2]] == [False, False]
    slow = Wave(1, "long names", 5, 1.0, 1.1, 0, 0, 1)
    assert [check.is_met for check in checks([slow, slow])[2:]] == [False, False]
