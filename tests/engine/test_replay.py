"""A recorded run replays exactly; a log that was changed is refused, with the line."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from recorded_run import record
from typer.testing import CliRunner

from weft.backends.noop import NoopBackend
from weft.cli.main import app
from weft.clock import VirtualClock
from weft.config import (
    KvCachePoolConfig,
    PreemptionMode,
    PriorityPolicy,
    SchedulerConfig,
    ServingEngineConfig,
)
from weft.engine.replay import ReplayDifference, replay
from weft.engine.serving import ServingEngine
from weft.errors import InvalidRequestError
from weft.learned_costs import LearnedCosts, LearnedText
from weft.lengths import ExpectedLength
from weft.request import (
    InferenceRequest,
    RequestState,
    SamplingParams,
    numbered_ids,
)
from weft.scheduling.policy import StepCostModel


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ServingEngine]:
    path = tmp_path_factory.mktemp("log") / "run.jsonl"
    return path, record(path)


def test_restored_costs_change_plans_and_are_replayed(tmp_path: Path) -> None:
    """Without the event that restores them, the replay makes other plans."""
    path = tmp_path / "run.jsonl"
    model = StepCostModel()
    for tokens in (4, 8, 16, 32) * 10:
        model.learn(tokens, tokens, 0, 0, 0.05 * tokens)
    costs = LearnedCosts.of(**model.sums)
    record(path, watch=lambda engine, clock: engine.restore_costs(costs))
    assert replay(str(path)).steps
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["event"] != "restore_costs"]
    assert len(kept) == len(lines) - 1
    path.write_text("".join(kept))
    with pytest.raises(ReplayDifference, match="planned"):
        replay(str(path))


@pytest.mark.parametrize("is_forgetful", [False, True])
def test_forgotten_answers_give_no_drafts_and_are_replayed(tmp_path: Path, is_forgetful: bool) -> None:
    """The noop backend gives the same answer to the same prompt and seed, so the second one has learned draft tokens."""
    path = tmp_path / "run.jsonl"
    backend = NoopBackend(fixed_cost_rows=100.0)
    config = ServingEngineConfig(log_path=str(path))
    engine = ServingEngine(backend, config, clock=VirtualClock(), new_id=numbered_ids())
    for _ in range(2):
        engine.submit(InferenceRequest(tuple(range(20)), SamplingParams(max_tokens=60, seed=1)))
        engine.run_until_idle()
        assert engine.metrics().learned_tokens > 0
        if is_forgetful:
            engine.forget_learned()
            assert engine.metrics().learned_tokens == 0
    engine.stop()
    stats = engine.stats()[0]
    assert (stats.learned_drafts_accepted > 0) is not is_forgetful
    assert replay(str(path)).requests == 2


def test_restored_answers_give_drafts_and_are_replayed(tmp_path: Path) -> None:
    texts: tuple[LearnedText, ...] = ()
    accepted = []
    for number in range(2):
        path = tmp_path / f"{number}.jsonl"
        backend = NoopBackend(fixed_cost_rows=100.0)
        config = ServingEngineConfig(log_path=str(path))
        engine = ServingEngine(backend, config, clock=VirtualClock(), new_id=numbered_ids())
        assert engine.new_answers() == ()
        engine.restore_answers((*texts, LearnedText("", (1 << 30,) * 20, 0)))  # one of another model
        assert engine.new_answers() == (), "restored answers are not new"
        engine.submit(InferenceRequest(tuple(range(20)), SamplingParams(max_tokens=60, seed=1)))
        engine.run_until_idle()
        texts = engine.new_answers()
        assert [len(text.tokens) for text in texts] == [12 + 60] and engine.new_answers() == ()
        accepted.append(engine.stats()[0].learned_drafts_accepted)
        engine.stop()
        assert replay(str(path)).requests == 1
    assert accepted[0] == 0 < accepted[1]


def test_a_recorded_run_with_preemption_cancels_and_faults_replays_exactly(
    recorded: tuple[Path, ServingEngine],
) -> None:
    path, engine = recorded
    report = replay(str(path))
    stats, metrics = engine.stats()[0], engine.metrics()
    assert (
        stats.preemptions_by_swap
        and stats.preemptions_by_recompute
        and stats.steps_failed
        and stats.swaps_failed
    )
    assert metrics.requests_completed and metrics.requests_failed and metrics.requests_cancelled
    assert report.requests == 50
    assert report.steps >= stats.steps
    assert report.tokens >= metrics.generated_tokens > 0


@pytest.mark.parametrize("seed", [2, 3, 4])
@pytest.mark.parametrize("mode", list(PreemptionMode))
def test_other_runs_replay_too(tmp_path: Path, seed: int, mode: PreemptionMode) -> None:
    path = tmp_path / "run.jsonl"
    engine = record(
        path, seed, preemption=mode, policy=list(PriorityPolicy)[seed % 4], prefer_pure_decode=seed == 3
    )
    assert replay(str(path)).requests == sum(engine._metrics.ended.values())


def test_a_run_with_a_dropped_deadline_replays(tmp_path: Path) -> None:
    path, clock = tmp_path / "run.jsonl", VirtualClock()
    config = ServingEngineConfig(cache=KvCachePoolConfig(200, 16), log_path=str(path))
    engine = ServingEngine(NoopBackend(), config, clock=clock, seed=1)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    ids = [engine.submit(InferenceRequest((one, 2, 3), params, deadline=5.0)) for one in range(2)]
    engine.run_iteration()
    assert engine.drop_deadline(ids[0])
    clock.advance(6.0)
    engine.run_until_idle()
    engine.stop()
    results = [engine.get_result(one) for one in ids]
    assert [one and one.state for one in results] == [RequestState.COMPLETED, RequestState.CANCELLED]
    report = replay(str(path))
    assert (report.requests, report.is_cut) == (2, False) and report.tokens >= 40


def test_the_expected_length_of_a_request_is_in_the_log_and_a_log_with_another_one_is_refused(
    tmp_path: Path,
) -> None:
    path, clock = tmp_path / "run.jsonl", VirtualClock()
    scheduler = SchedulerConfig(policy=PriorityPolicy.SHORTEST_JOB_FIRST, max_running=1)
    config = ServingEngineConfig(scheduler, KvCachePoolConfig(200, 16), log_path=str(path))
    engine = ServingEngine(NoopBackend(), config, clock=clock, seed=1)
    for mean in (50.0, 40.0, 30.0):
        expected = ExpectedLength(mean, mean, mean)
        engine.submit(InferenceRequest((1, 2, 3), SamplingParams(max_tokens=60), expected=expected))
    engine.run_until_idle()
    engine.stop()
    assert replay(str(path)).requests == 3
    lines = path.read_text().splitlines()
    added = [number for number, line in enumerate(lines) if '"event": "add"' in line]
    event = json.loads(lines[added[2]])
    assert event["requests"][0]["request"]["expected"] == {"mean": 30.0, "p50": 30.0, "p90": 30.0}
    event["requests"][0]["request"]["expected"]["mean"] = 45.0
    path.write_text("\n".join([*lines[: added[2]], json.dumps(event), *lines[added[2] + 1 :]]) + "\n")
    with pytest.raises(ReplayDifference, match="planned"):
        replay(str(path))


@pytest.mark.parametrize("seed", [14, 36])
def test_a_run_with_draft_tokens_replays_and_a_log_with_other_draft_tokens_is_refused(
    tmp_path: Path, seed: int
) -> None:
    path = tmp_path / "run.jsonl"
    engine = record(path, seed, words=2)
    stats = engine.stats()[0]
    assert 0 < stats.drafts_accepted < stats.tokens_drafted and stats.steps_failed
    report = replay(str(path))
    assert report.requests == sum(engine._metrics.ended.values()) and report.steps >= stats.steps
    lines = path.read_text().splitlines()
    changed = next(n for n, line in enumerate(lines) if '"drafts": [[' in line)
    event = json.loads(lines[changed])
    event["plan"]["drafts"][0][0] ^= 1
    path.write_text("\n".join([*lines[:changed], json.dumps(event), *lines[changed + 1 :]]) + "\n")
    with pytest.raises(ReplayDifference, match=rf"line {changed + 1}: planned drafts"):
        replay(str(path))


def test_a_run_with_real_threads_and_the_real_clock_replays(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    config = ServingEngineConfig(
        scheduler=SchedulerConfig(max_running=3), cache=KvCachePoolConfig(12, 4), log_path=str(path)
    )
    with ServingEngine(NoopBackend(), config) as engine:
        ids = [
            engine.submit(InferenceRequest((1, 2, number), SamplingParams(max_tokens=30)))
            for number in range(8)
        ]
        engine.cancel(ids[3])
        for request_id in ids:
            assert engine.get_result(request_id, wait=20) is not None
    assert replay(str(path)).requests == 8


Edit = Callable[[list[dict[str, Any]]], int]
"""Changes a log and returns the number (from 1) of the first line that is wrong."""


def index_of(events: list[dict[str, Any]], matches: Callable[[dict[str, Any]], bool], skip: int = 5) -> int:
    return [number for number, event in enumerate(events) if matches(event)][skip]


def is_full_plan(event: dict[str, Any]) -> bool:
    return event["event"] == "plan" and event["plan"] is not None and bool(event["plan"]["rows"])


def change_a_plan(events: list[dict[str, Any]]) -> int:
    number = index_of(events, is_full_plan)
    events[number]["plan"]["counts"][0] += 1
    return number + 1


def move_a_block(events: list[dict[str, Any]]) -> int:
    number = index_of(events, lambda e: is_full_plan(e) and bool(e["plan"]["row_starts"]))
    events[number]["plan"]["row_starts"][0][4][0] += 1
    return number + 1


def erase_a_plan(events: list[dict[str, Any]]) -> int:
    number = index_of(events, is_full_plan)
    events[number]["plan"] = None
    return number + 1


def lose_a_token(events: list[dict[str, Any]]) -> int:
    number = index_of(events, lambda e: e["event"] == "apply" and bool(e["result"]["tokens"]))
    events[number]["result"]["tokens"].pop()
    return number + 1


def add_a_token(events: list[dict[str, Any]]) -> int:
    number = index_of(events, lambda e: e["event"] == "apply" and bool(e["result"]["tokens"]))
    events[number]["result"]["tokens"].append(9)
    return number + 1


def lose_a_clock_reading(events: list[dict[str, Any]]) -> int:
    number = index_of(events, lambda e: bool(e["clock"]) and e["event"] == "apply")
    events[number]["clock"].pop()
    return number + 1


def add_a_clock_reading(events: list[dict[str, Any]]) -> int:
    number = index_of(events, lambda e: bool(e["clock"]) and e["event"] == "apply")
    events[number]["clock"].append(events[number]["clock"][-1])
    return number + 1


def apply_twice(events: list[dict[str, Any]]) -> int:
    number = index_of(events, lambda e: e["event"] == "apply")
    # Applies both steps in flight, then one more.
    events[number + 1 : number + 1] = [events[number], events[number]]
    return -1


def invent_an_event(events: list[dict[str, Any]]) -> int:
    events.insert(9, {"event": "dance", "clock": []})
    return 10


def drop_a_field(events: list[dict[str, Any]]) -> int:
    number = index_of(events, lambda e: e["event"] == "add")
    del events[number]["requests"][0]["seed"]
    return number + 1


def change_a_prompt(events: list[dict[str, Any]]) -> int:
    number = index_of(
        events, lambda e: e["event"] == "add" and len(e["requests"][0]["request"]["prompt"]) > 4
    )
    events[number]["requests"][0]["request"]["prompt"] = []
    return number + 1


def claim_another_version(events: list[dict[str, Any]]) -> int:
    events[0]["version"] = 99
    return 1


def drop_the_beginning(events: list[dict[str, Any]]) -> int:
    del events[0]
    return 1


@pytest.mark.parametrize(
    "edit",
    [
        change_a_plan,
        move_a_block,
        erase_a_plan,
        lose_a_token,
        add_a_token,
        lose_a_clock_reading,
        add_a_clock_reading,
        apply_twice,
        invent_an_event,
        drop_a_field,
        change_a_prompt,
        claim_another_version,
        drop_the_beginning,
    ],
    ids=lambda edit: edit.__name__,
)
def test_a_log_that_was_changed_is_refused_with_the_line(
    recorded: tuple[Path, ServingEngine], tmp_path: Path, edit: Edit
) -> None:
    events = [json.loads(line) for line in recorded[0].read_text().splitlines()]
    line = edit(events)
    path = tmp_path / "changed.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    with pytest.raises(ReplayDifference) as caught:
        replay(str(path))
    assert f"{path}, line " in str(caught.value)
    if line > 0:
        assert f", line {line}: " in str(caught.value)


def test_a_log_with_an_incomplete_last_line_is_replayed_up_to_it(
    recorded: tuple[Path, ServingEngine], tmp_path: Path
) -> None:
    lines = recorded[0].read_text().splitlines(keepends=True)
    path = tmp_path / "cut.jsonl"
    path.write_text("".join(lines[:40]))
    whole = replay(str(path))
    assert whole.requests and not whole.is_cut
    for rest in (lines[40][:20], lines[40][:-1], "\0" * 100):
        path.write_text("".join(lines[:40]) + rest)
        assert replay(str(path)) == dataclasses.replace(whole, is_cut=True)
        result = CliRunner().invoke(app, ["replay", str(path)])
        assert result.exit_code == 0 and "up to the last line, which is incomplete" in result.stdout
    path.write_text("".join(lines[:40]) + lines[40][:20] + "\n" + lines[41])
    with pytest.raises(ReplayDifference, match="line 41: not a weft log, or cut short"):
        replay(str(path))


def one_request(path: Path, number: int = 1) -> None:
    """Records a run of `number` requests."""
    config = ServingEngineConfig(cache=KvCachePoolConfig(64, 4), log_path=str(path))
    engine = ServingEngine(NoopBackend(), config)
    for _ in range(number):
        engine.submit(InferenceRequest((1, 2), SamplingParams(max_tokens=3)))
    engine.run_until_idle()
    engine.stop()


def test_every_start_writes_a_new_log_and_keeps_the_older_ones(tmp_path: Path) -> None:
    assert requests_of_logs(tmp_path, dict.fromkeys(range(1, 9), 3600.0)) == [8, 7, 6, 5, 4, 3]


def test_the_first_log_of_many_crashes_in_a_row_is_kept(tmp_path: Path) -> None:
    """Starts 7 to 20 are a few seconds apart. The log of 7 says why, that of 19 is of the last crash."""
    starts = {number: 3600.0 if number < 8 else 5.0 for number in range(1, 21)}
    kept = requests_of_logs(tmp_path, starts)
    assert kept[:2] == [20, 19] and 7 in kept and len(kept) == 6
    assert kept == sorted(kept, reverse=True)


def requests_of_logs(folder: Path, starts: dict[int, float]) -> list[int]:
    """Records runs of so many requests, each so many seconds after the one before. Returns the requests of the logs that
    are kept, the newest first."""
    path, names = folder / "run.jsonl", ["run.jsonl", *(f"run.jsonl.{number}" for number in range(1, 6))]
    for number, seconds in starts.items():
        for older in folder.iterdir():
            ended = older.stat().st_mtime - seconds
            os.utime(older, (ended, ended))
        one_request(path, number)
    assert sorted(file.name for file in folder.iterdir()) == names
    return [replay(str(folder / name)).requests for name in names]


def test_only_the_owner_may_read_a_log_even_one_that_existed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    (tmp_path / "run.jsonl.1").write_text("older\n")
    path.write_text("old\n")
    for file in tmp_path.iterdir():
        file.chmod(0o644)
    empty = tmp_path / "empty.jsonl"
    empty.touch(0o666)
    before = os.umask(0)
    try:
        one_request(path)
        one_request(empty)
    finally:
        os.umask(before)
    assert {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == dict.fromkeys(
        ("run.jsonl", "run.jsonl.1", "run.jsonl.2", "empty.jsonl"), 0o600
    )
    assert (tmp_path / "run.jsonl.1").read_text() == "old\n"


def test_a_log_path_that_is_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    link = tmp_path / "run.jsonl"
    link.symlink_to(tmp_path / "logs" / "real.jsonl")
    one_request(link)
    one_request(link)
    assert link.is_symlink()
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["real.jsonl", "real.jsonl.1"]


FULL_DISK = """
import json, logging, resource, sys
from weft.backends.noop import NoopBackend
from weft.config import KvCachePoolConfig, ServingEngineConfig
from weft.engine.serving import ServingEngine
from weft.request import InferenceRequest, RequestState, SamplingParams

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
engine = ServingEngine(NoopBackend(), ServingEngineConfig(cache=KvCachePoolConfig(64, 4), log_path=sys.argv[1]))
with engine:
    ids = [engine.submit(InferenceRequest((1, 2, n), SamplingParams(max_tokens=20))) for n in range(30)]
    ended = [engine.get_result(i, wait=60).state is RequestState.COMPLETED for i in ids]
print(json.dumps([len(ended), all(ended), len(engine.scheduler._readings.readings)]))
"""


def run_with_a_full_disk(path: str, most_bytes: int) -> subprocess.CompletedProcess[str]:
    """Runs an engine in a process with a limit on the file size. All its requests must complete."""
    command = [sys.executable, "-c", FULL_DISK, path, str(most_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    count, all_completed, readings = json.loads(done.stdout)
    assert (count, all_completed) == (30, True)
    assert readings < 10  # clock readings that were not written are not kept
    return done


@pytest.mark.parametrize("most_bytes", [100, 3_000, 20_000])
def test_a_full_disk_ends_the_log_at_a_whole_line_and_fails_no_request(
    tmp_path: Path, most_bytes: int
) -> None:
    path = tmp_path / "run.jsonl"
    done = run_with_a_full_disk(str(path), most_bytes)
    (warning,) = done.stderr.splitlines()
    written = path.read_bytes()
    assert str(path) in warning and f"after {len(written)} bytes" in warning
    assert len(written) <= most_bytes
    assert all(json.loads(line) for line in written.splitlines())
    assert written[-1:] in (b"\n", b"")
    if most_bytes > 1_000:
        assert replay(str(path)).requests > 0
    one_request(path)  # the next start keeps the cut log
    assert replay(str(path)).requests == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
def test_a_device_that_is_full_is_left_as_it_is(tmp_path: Path) -> None:
    before = os.stat("/dev/full").st_mode
    done = run_with_a_full_disk("/dev/full", 1 << 30)
    assert "No space left on device" in done.stderr
    assert os.stat("/dev/full").st_mode == before


def test_an_invalid_log_path_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "folder.jsonl"):
        with pytest.raises(InvalidRequestError, match=r"log_path .* cannot be written"):
            one_request(path)


@pytest.mark.parametrize("content", ["", "\n", "[]\n", "null\n", "hello\n", '{"event": "start"}\n'], ids=repr)
def test_a_file_that_is_not_a_log_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "no.jsonl"
    path.write_text(content)
    with pytest.raises(ReplayDifference, match="not a weft log"):
        replay(str(path))


def test_a_request_with_values_that_json_cannot_represent_can_be_recorded(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    config = ServingEngineConfig(cache=KvCachePoolConfig(16, 4), log_path=str(path))
    engine = ServingEngine(NoopBackend(), config)
    params = SamplingParams(max_tokens=3, logit_bias=MappingProxyType({1: 0.5}))
    request_id = engine.submit(InferenceRequest((1, 2), params, metadata={"anything": object()}))
    engine.run_until_idle()
    engine.stop()
    result = engine.get_result(request_id)
    assert result is not None and result.state is RequestState.COMPLETED
    assert replay(str(path)).requests == 1
