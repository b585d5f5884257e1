"""The benchmarks on a real model: the criteria of batching, and the perplexity of the kernels."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks import batching, criteria, perplexity
from benchmarks.jobs import Job, Run
from weft.backends.cost_model import ZEN3_SMOLLM2_135M
from weft.backends.cpu.kernels import instruction_set
from weft.config import SchedulerConfig
from weft.errors import InvalidRequestError
from weft.loading.checkpoint import open_checkpoint
from weft.text.tokenizer import Tokenizer

READING = Path(__file__).parents[1] / "data" / "reading.txt"


def run_on_the_cost_model(config: SchedulerConfig, jobs: Sequence[Job], num_blocks: int | None) -> Run:
    return batching.run(ZEN3_SMOLLM2_135M, config, jobs, num_blocks)


# ---------------------------------------------------------------------- criteria


def test_the_criteria_are_computed_from_the_runs() -> None:
    report = criteria.measure(run_on_the_cost_model)
    by_rows, by_memory = report.comparisons
    assert by_memory.ratio > by_rows.ratio > 1
    assert report.scalings[0].efficiency == 1.0 and report.scalings[-1].batch == 16
    assert report.mix.short_p99 > report.mix.short_p99_alone and report.mix.fragmentation < 0.15
    assert len(report.checks) == 6


def test_on_the_real_model_every_job_gets_its_tokens(default_model_path: Path) -> None:
    run = criteria.engine_runs(open_checkpoint(default_model_path), threads=None)
    result = run(SchedulerConfig(), [Job(0.0, 8, 3), Job(0.05, 20, 2)], None)
    assert sorted(len(trace.token_times) for trace in result.traces) == [2, 3]
    assert all(trace.first_token > 0 for trace in result.traces)
    assert result.seconds > 0.05 and 0 < result.unused_positions < result.held_positions


def test_the_criteria_are_printed_with_their_limits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(criteria, "engine_runs", lambda checkpoint, threads: run_on_the_cost_model)
    criteria.main("default", threads=2, json=False)
    table = capsys.readouterr().out
    assert "more than 2 times" in table and "more than 70%" in table and "at most 500 ms" in table
    criteria.main("default", threads=2, json=True)
    document = json.loads(capsys.readouterr().out)
    assert len(document["checks"]) == 6 and document["scalings"][-1]["batch"] == 16 and document["kernels"]


# ---------------------------------------------------------------------- perplexity


def test_the_perplexity_of_the_kernels_is_that_of_the_dequantised_reference(
    default_model_path: Path, default_tokenizer: Tokenizer
) -> None:
    """256 tokens determine the difference to half a percent; `python -m benchmarks perplexity` scores 2,048."""
    if instruction_set() is None:
        pytest.skip("weft is installed without kernels")
    checkpoint = open_checkpoint(default_model_path)
    windows = perplexity.make_windows(default_tokenizer, None, 512, 1)
    reference = perplexity.score(checkpoint, windows, "numpy", dtype=np.float32)
    kernels = perplexity.score(checkpoint, windows, "kernels")
    assert len(reference.logprobs) == len(kernels.logprobs) == 256
    found = perplexity.compare(kernels, reference)
    assert found.share < perplexity.LARGEST_RISE + 2 * found.error
    assert 0 < found.of_a_token < 0.1 and found.error < 0.01
    assert 1 < reference.perplexity < 100


def test_the_difference_is_computed_token_by_token() -> None:
    reference = perplexity.Scores("reference", (-1.0, -5.0), 0.0)
    worse = perplexity.Scores("worse", (-1.1, -5.1), 0.0)
    found = perplexity.compare(worse, reference)
    assert found.share == pytest.approx(worse.perplexity / reference.perplexity - 1)
    assert found.error == pytest.approx(0.0, abs=1e-12) and not found.is_small
    assert found.of_a_token == pytest.approx(0.1)
    assert reference.perplexity == pytest.approx(math.exp(3))


def test_a_text_is_split_into_whole_windows_and_a_short_one_is_refused(
    default_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    windows = perplexity.make_windows(default_tokenizer, READING, 64, 3)
    ids = default_tokenizer.encode(READING.read_text(encoding="utf-8"), add_bos=False)
    assert [len(window) for window in windows] == [64, 64, 64]
    assert [token for window in windows for token in window] == ids[: 3 * 64]
    short = tmp_path / "short.txt"
    short.write_text("Three words here")
    with pytest.raises(InvalidRequestError, match="has 3 tokens, and one window needs 64"):
        perplexity.make_windows(default_tokenizer, short, 64, 1)


def test_the_perplexity_benchmark_prints_its_table_and_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = {"numpy, f32": (-2.0, -3.0), "kernels, portable": (-2.001, -3.001)}
    monkeypatch.setattr(perplexity, "instruction_set", lambda: "portable")
    monkeypatch.setattr(
        perplexity, "score", lambda checkpoint, windows, name, **_: perplexity.Scores(name, scores[name], 1.0)
    )
    options = {"text": READING, "context": 32, "windows": 1, "quantize": None}
    perplexity.main("default", json=False, **options)
    table = capsys.readouterr().out
    assert "12.1825" in table and "+0.10%" in table and "met" in table
    perplexity.main("default", json=True, **options)
    document = json.loads(capsys.readouterr().out)
    assert document["checks"][0]["is_met"] and document["differences"][0]["share"] == pytest.approx(
        0.001, rel=0.01
    )
