"""`python -m benchmarks kv-cache` with small sizes: admission, facts, speed, and criteria."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import kv_cache, kv_cache_admission, kv_cache_quality, kv_cache_speed, peers_environment
from benchmarks.kv_cache import Options, Report
from benchmarks.kv_cache_admission import Admission, JointRun, largest
from benchmarks.kv_cache_kinds import FULL, Kind, Setup, engine_config, kinds
from benchmarks.kv_cache_quality import Fact, Reading, Retrieval, evaluate, is_found, make_facts
from benchmarks.kv_cache_speed import Speed
from benchmarks.peers_environment import PeerError, draw_chart
from benchmarks.perplexity import Difference
from weft.bench.gpu_work import open_shape
from weft.config import KvCachePoolConfig
from weft.errors import InvalidRequestError, WeftError
from weft.plan import BackendInfo
from weft.text.tokenizer import Tokenizer

CONTEXT = 128
TINY = Setup(open_shape("tiny"), "cpu")
TWO_TIER = kinds(32)[1:]


def plain_info(num_blocks: int) -> BackendInfo:
    return BackendInfo(
        vocabulary_size=100,
        max_context=CONTEXT,
        num_blocks=num_blocks,
        block_size=16,
        swap_blocks=0,
        bytes_per_block=1,
    )


def count(info: BackendInfo) -> int:
    return len(largest(info, engine_config(KvCachePoolConfig(), 32), CONTEXT)[0])


# --- admission ----------------------------------------------------------------------------------------------------


def test_as_many_contexts_are_admitted_as_have_blocks_for_their_full_length() -> None:
    assert count(plain_info(3 * 8)) == 3
    assert count(plain_info(3 * 8 - 1)) == 2
    assert count(plain_info(3 * 8 + 7)) == 3


@pytest.mark.parametrize(
    ("changes", "fits"),
    [({}, True), ({"most": 3}, False), ({"preemptions": 1}, False), ({"shortest": CONTEXT - 32}, False)],
)
def test_contexts_fit_if_all_ran_at_once_at_full_length_without_preemption(
    changes: dict[str, int], fits: bool
) -> None:
    joint = JointRun(
        CONTEXT, requested=4, most=4, preemptions=0, shortest=CONTEXT - 31, first_steps=(1, 2, 3, 4)
    )
    assert dataclasses.replace(joint, **changes).fits is fits  # type: ignore[arg-type]


def test_a_wrong_estimate_is_corrected_by_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for estimate in (1, 5):
        monkeypatch.setattr(kv_cache_admission, "_estimate", lambda info, context, fixed=estimate: fixed)
        assert count(plain_info(3 * 8)) == 3


def test_contexts_run_together_at_nearly_their_full_length() -> None:
    """With equal answers, the first context would end before the last one starts."""
    lengths, joint = largest(plain_info(6 * 8), engine_config(KvCachePoolConfig(), 32), CONTEXT)
    assert joint.shortest >= CONTEXT - 8 and not joint.preemptions
    assert [prompt + answer for prompt, answer in lengths] == [CONTEXT] * 6
    answers = [answer for _, answer in lengths]
    assert answers == sorted(answers, reverse=True)


def test_with_confirm_the_real_backend_computes_what_was_planned() -> None:
    planned = kv_cache_admission.admit(TINY, Kind(FULL, None), CONTEXT, contexts=6, memory=None)
    assert planned.contexts == 6 and planned.seconds is None
    found = kv_cache_admission.admit(TINY, Kind(FULL, None), CONTEXT, contexts=6, memory=None, confirm=True)
    assert found.contexts == 6 and found.shortest >= CONTEXT - 8 and found.seconds is not None


def test_a_memory_too_small_for_one_context_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at most 63, so that one new token fits"):
        count(plain_info(4))


@pytest.mark.parametrize("kind", TWO_TIER, ids=lambda kind: kind.name)
def test_a_two_tier_cache_admits_what_fits_into_its_memory(kind: Kind) -> None:
    full = kv_cache_admission.admit(TINY, Kind(FULL, None), 512, contexts=4, memory=None)
    found = kv_cache_admission.admit(TINY, kind, 512, contexts=4, memory=full.memory, confirm=True)
    assert full.contexts == 4
    # Heads of 16 values: a token takes 26 bytes in full, 18 or 10 in the store; 464 of the 512 tokens are in the store.
    in_store = {8: 18 / 26, 4: 10 / 26}[kind.bits or 0]
    expected = 4 / (48 / 512 + 464 / 512 * in_store)
    assert 0.95 * expected - 1 <= found.contexts <= expected
    assert found.memory <= full.memory and found.shortest >= 512 - 32


# --- perplexity and retrieval -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TWO_TIER, ids=lambda kind: kind.name)
def test_a_two_tier_cache_scores_text_a_little_differently(kind: Kind, default_model_path: Path) -> None:
    setup = Setup(kv_cache.open_checkpoint(default_model_path), "cpu")
    words = tuple(range(1000, 1000 + 96))
    full, other = kv_cache_quality.score_text(setup, [Kind(FULL, None), kind], [words])
    assert full.difference.share == 0 and full.scored_tokens == 48
    assert 0 < other.difference.of_a_token < 0.5


def test_facts_are_before_the_tail_and_are_fixed_by_their_seed(default_tokenizer: Tokenizer) -> None:
    facts = make_facts(default_tokenizer, 12, (200, 300), tail_length=64)
    assert facts == make_facts(default_tokenizer, 12, (200, 300), tail_length=64)
    assert facts != make_facts(default_tokenizer, 12, (200, 300), tail_length=64, seed=1)
    assert len({fact.prompt[:32] for fact in facts}) == 12, "contexts have no common prefix"
    for fact in facts:
        assert 200 <= len(fact.prompt) <= 300
        before = default_tokenizer.decode(fact.prompt[:-64])
        whole = default_tokenizer.decode(fact.prompt)
        assert f"is {fact.code}." in before and whole.count(fact.code) == 1
        assert whole.endswith(" is ")
    assert min(fact.depth for fact in facts) < 0.3 and max(fact.depth for fact in facts) > 0.5


def test_a_fact_is_found_if_the_answer_is_its_code_and_not_a_longer_number() -> None:
    fact = Fact((1,), "12345", 0.5)
    assert is_found(fact, "12345.\n") and is_found(fact, "12345")
    assert not is_found(fact, "123456") and not is_found(fact, "1234") and not is_found(fact, "The 12345")


def test_only_facts_that_the_full_cache_finds_count_for_the_others() -> None:
    facts = [Fact((1,), str(code), 0.5) for code in (10001, 10002, 10003, 10004)]
    full = ["10001", "10002.", "99999", "10004"]
    found = evaluate(Kind("8 bits", 8), facts, ["10001", "none", "10003", "10004"], full)
    assert (found.asked, found.found, found.kept, found.expected) == (4, 3, 2, 3)
    assert found.share == pytest.approx(2 / 3) and found.lost == ("10002 at 50%: 'none'",)
    assert evaluate(Kind("8 bits", 8), facts, full, ["none"] * 4).share == 0


def test_the_real_model_finds_a_fact_in_every_kind_of_cache(
    default_model_path: Path, default_tokenizer: Tokenizer
) -> None:
    setup = Setup(kv_cache.open_checkpoint(default_model_path), "cpu")
    facts = make_facts(default_tokenizer, 2, (400, 500), tail_length=64)
    for kind in kinds(64):
        answers = kv_cache_quality.answer_facts(setup, kind, default_tokenizer, facts)
        assert [is_found(fact, answer) for fact, answer in zip(facts, answers, strict=True)] == [True, True]


# --- speed --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", kinds(32), ids=lambda kind: kind.name)
def test_only_steps_of_the_whole_batch_are_measured(kind: Kind) -> None:
    entered = []

    class Quiet:
        def __enter__(self) -> None:
            entered.append("in")

        def __exit__(self, *error: object) -> None:
            entered.append("out")

    speed = kv_cache_speed.decode_speed(TINY, kind, batch=3, context=160, rounds=2, quietly=Quiet)
    assert (speed.kind, speed.batch, speed.context) == (kind.name, 3, 160)
    assert len(speed.step_seconds) == 2 and all(seconds > 0 for seconds in speed.step_seconds)
    assert entered == ["in", "out"]


def test_the_speed_is_that_of_the_median_round_after_the_last_context_started() -> None:
    # Steps of 1 s until the second context begins at 10; then rounds of 16 steps of 0.5, 4 and 1 s.
    moments = [float(moment) for moment in range(11)]
    for seconds in (0.5, 4.0, 1.0):
        moments += [moments[-1] + seconds * step for step in range(1, 17)]
    rate, rounds = kv_cache_speed._rate([moments, moments[10:]], since=5.0, batch=2, rounds=3)
    assert rounds == pytest.approx((0.5, 4.0, 1.0)) and rate == pytest.approx(2 / 1.0)
    # Steps before `since` do not count: from 18 on, one round of 4 s and one of 1 s.
    assert kv_cache_speed._rate([moments, moments[10:]], since=18.0, batch=2, rounds=3)[1] == (4.0, 1.0)


def test_contexts_that_never_ran_together_give_no_speed() -> None:
    with pytest.raises(WeftError, match="never decoded together"):
        kv_cache_speed._rate([[1.0, 2.0], [3.0]], since=0.0, batch=2, rounds=1)


# --- the command ----------------------------------------------------------------------------------------------------


def report(contexts: int, rise: float, kept: int, speed: float, device: str = "cuda") -> Report:
    """A report of a full cache and one with 8 bits."""
    return Report(
        "a machine",
        "a model",
        device,
        Options(),
        [
            Admission(FULL, 1 << 30, 4096, 10, 4090, 1.0),
            Admission("8 bits", 1 << 30, 4096, contexts, 4090, 1.0),
        ],
        [
            Reading(FULL, 20.0, 1024, Difference(0.0, 0.0, 0.0)),
            Reading("8 bits", 20.0 * (1 + rise), 1024, Difference(rise, 0.001, 0.01)),
        ],
        [Retrieval(FULL, 60, 50, 50, 50, ()), Retrieval("8 bits", 60, kept, kept, 50, ())],
        [Speed(FULL, 16, 4096, 100.0, (0.16,)), Speed("8 bits", 16, 4096, speed, (0.16,))],
    )


def test_every_part_has_its_own_criterion() -> None:
    assert [check.is_met for check in report(18, 0.002, 49, 100.0).checks] == [True] * 4
    assert [check.is_met for check in report(17, 0.002, 49, 100.0).checks] == [False, True, True, True]
    assert report(14, 0.002, 49, 100.0, "cpu").checks[0].is_met, "its full cache is smaller"
    assert not report(13, 0.002, 49, 100.0, "cpu").checks[0].is_met
    assert [check.is_met for check in report(18, 0.0021, 49, 100.0).checks] == [True, False, True, True]
    assert [check.is_met for check in report(18, 0.002, 48, 100.0).checks] == [True, True, False, True]
    assert [check.is_met for check in report(18, 0.002, 49, 99.0).checks] == [True, True, True, False]


def test_the_table_has_a_column_for_each_part_and_the_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    kv_cache.print_report(report(18, 0.001, 48, 120.0))
    printed = " ".join(capsys.readouterr().out.split())
    assert "18 / 10 = 1.80" in printed and "+0.10% (± 0.10)" in printed and "48 of 50 = 96.0%" in printed
    assert "missed" in printed and printed.count("met") >= 3


def test_the_command_writes_its_measurements_part_by_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kv_cache, "pull", lambda model: model)
    monkeypatch.setattr(kv_cache, "open_checkpoint", lambda path: open_shape("tiny"))
    written = tmp_path / "kv-cache.json"
    options = Options(context=160, contexts=3, batch=2, tail_length=32)
    kv_cache.main(
        "tiny",
        device="cpu",
        threads=1,
        part=["speed,admission"],
        text=None,
        options=options,
        json_path=written,
        plot_path=None,
    )
    found = json.loads(written.read_text())
    assert [one["kind"] for one in found["admissions"]] == ["full", "8 bits", "4 bits"]
    assert found["admissions"][0]["contexts"] == 3 and len(found["speeds"]) == 3
    assert found["readings"] == found["retrievals"] == [] and len(found["checks"]) == 4
    printed = capsys.readouterr().out
    assert "admission, full: 3 contexts of 160 tokens" in printed and "speed, 4 bits:" in printed


def run_main(**changes: Any) -> None:
    arguments: dict[str, Any] = {
        "device": "cpu",
        "threads": 1,
        "part": [],
        "text": None,
        "options": Options(),
        "json_path": None,
        "plot_path": None,
    }
    kv_cache.main("default", **{**arguments, **changes})


def test_a_wrong_part_or_tail_is_refused_before_a_model_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "pull", lambda model: pytest.fail("a model was downloaded"))
    with pytest.raises(InvalidRequestError, match="--part is 'sped'; allowed: admission, perplexity"):
        run_main(part=["sped"])
    with pytest.raises(InvalidRequestError, match="tail_length is 40 and block_size 16"):
        run_main(options=Options(tail_length=40))


def test_the_chart_gets_the_document_and_a_failure_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plotting library has its own environment; here a script replaces it."""
    shell = tmp_path / "python"
    shell.write_text(f'#!/bin/sh\ncat > "{tmp_path}/input.json"\necho "$2" > "{tmp_path}/target"\n')
    shell.chmod(0o755)
    monkeypatch.setattr(peers_environment, "peers_directory", lambda: tmp_path / "home")
    monkeypatch.setattr(peers_environment, "python_of", lambda environment, home, print_status: shell)
    chart = kv_cache.document(report(18, 0.001, 49, 120.0))
    draw_chart("plot_kv_cache", chart, tmp_path / "chart.png")
    assert json.loads((tmp_path / "input.json").read_text())["admissions"][1]["contexts"] == 18
    assert (tmp_path / "target").read_text().strip() == str(tmp_path / "chart.png")
    shell.write_text("#!/bin/sh\necho 'no display' >&2\nexit 1\n")
    with pytest.raises(PeerError, match="the chart could not be drawn: no display"):
        draw_chart("plot_kv_cache", chart, tmp_path / "chart.png")
