"""`python -m benchmarks batching --device`: continuous against static batching on a real backend."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import batching_measured
from benchmarks.batching_measured import ROWS, Measured, measure
from benchmarks.jobs import Job
from weft.backends import registry
from weft.config import KvCachePoolConfig, SchedulerConfig, ServingEngineConfig
from weft.engine.serving import ServingEngine
from weft.errors import InvalidRequestError, WeftError

ROOT = Path(__file__).parents[2]


def test_every_static_batch_is_full_and_all_engines_do_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        batching_measured,
        "mixed_jobs",
        lambda lengths: [Job(0.0, 2 + number % 5, 3 + number % 7) for number in range(4 * ROWS)],
    )
    steps: list[tuple[bool, int]] = []
    original = batching_measured.run

    def counted(engine: ServingEngine, jobs: list[Job]) -> float:
        before = engine.stats()[0].steps
        seconds = original(engine, jobs)
        steps.append((engine.config.scheduler.dynamic_batching, engine.stats()[0].steps - before))
        return seconds

    monkeypatch.setattr(batching_measured, "run", counted)
    measured = list(measure("tiny", "cpu", rounds=2))
    assert [(one.lengths, one.equal) for one in measured] == [
        (lengths, equal) for lengths in ("even", "skewed") for equal in ("16 rows", "768 blocks")
    ]
    assert all(len(one.ratios) == 2 and min(one.ratios) > 0 for one in measured)
    # Four batches of sixteen. Each takes as many steps as its longest answer, nine.
    assert {count for is_dynamic, count in steps if not is_dynamic} == {4 * 9}
    assert max(count for is_dynamic, count in steps if is_dynamic) < 4 * 9
    assert len(steps) == 2 * 3 * 4


def test_batches_are_padded_to_their_longest() -> None:
    jobs = [Job(0.0, number, 100 - number) for number in range(1, ROWS + 3)]
    padded = batching_measured._padded(jobs)
    assert padded == [Job(0.0, ROWS, 99)] * ROWS + [Job(0.0, ROWS + 2, 99 - ROWS)] * 2


def test_the_ratio_is_the_median_of_the_rounds() -> None:
    one = Measured("8b", "even", "16 rows", 10.0, 5.0, 2.0, (1.0, 2.5, 1.5))
    assert one.ratio == 1.5
    assert not batching_measured._check(one).is_met


def test_answers_that_are_too_short_are_an_error() -> None:
    backend = registry.build("noop")
    config = ServingEngineConfig(SchedulerConfig(max_running=4), KvCachePoolConfig(num_blocks=64))
    engine = ServingEngine(backend, config)
    original = engine.submit

    def cancelled(request: object) -> object:
        request_id = original(request)  # type: ignore[arg-type]
        engine.cancel(request_id)
        return request_id

    engine.submit = cancelled  # type: ignore[method-assign, assignment]
    with pytest.raises(WeftError, match="does not have its 5 tokens"):
        batching_measured.run(engine, [Job(0.0, 3, 5)])
    engine.stop()


def test_the_command_measures_on_the_named_device() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"  # an import would fail
        "from benchmarks import batching_measured as m; m.ROUNDS = 1\n"
        "from benchmarks.jobs import Job; m.mixed_jobs = lambda lengths: [Job(0.0, 3, 4)] * 20\n"
        "m.measure.__defaults__ = (1,)\n"
        "from benchmarks.__main__ import app; app()"
    )
    command = [sys.executable, "-c", program, "batching", "--device", "cpu", "--shape", "tiny"]
    done = subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert len(document["measured"]) == 4 and len(document["checks"]) == 2
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "768 blocks" in done.stdout and "to padded" in done.stdout


def test_an_unknown_shape_and_a_missing_gpu_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(InvalidRequestError, match=r"--shape is '70b'; allowed: 0\.6b, 8b, tiny"):
        batching_measured.main("cpu", ["70b"], json=False)
    monkeypatch.setattr(registry, "why_no_gpu", lambda: "no GPU is here")
    with pytest.raises(InvalidRequestError, match="the device is cuda, but no GPU is here"):
        batching_measured.main("cuda", [], json=False)
