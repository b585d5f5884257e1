"""weft in one process for `python -m benchmarks peers`: the real engine with the default model, and its report."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks.peers_drive import Driver, serving_config
from benchmarks.peers_engines import ENGINES, OURS_IN_PROCESS, Launch, PeerFiles
from benchmarks.peers_process import RunningEngine, driver_records
from benchmarks.peers_report import Report, document, print_report
from peer_cases import cell, driver
from weft.bench.serve_load import Item, Phase
from weft.llm_config import build_config


def test_the_driver_runs_the_requests_of_a_phase_at_their_times(
    tmp_path: Path, default_model_path: Path
) -> None:
    engine = next(engine for engine in ENGINES if engine.name == OURS_IN_PROCESS)
    launch = engine.prepare(PeerFiles(tmp_path, default_model_path, 0, lambda _: None))(0)
    assert launch.port is None and launch.command[0] == sys.executable
    running = RunningEngine(
        Launch(launch.command, None, {**os.environ, **launch.environment}), tmp_path / "log"
    )
    items = tuple(
        Item(tuple(range(start, start + 40)), 8 + start % 7, start / 4000) for start in range(100, 700, 100)
    )
    try:
        seconds, _ = running.first_token(range(1, 17))
        at_their_times, one_by_one = running.run([Phase("six", items), Phase("again", items[:2], clients=1)])
        records = running._drive(Phase("again", items), 60.0)
        in_turn = running._drive(Phase("again", items[:3], clients=1), 60.0)
    finally:
        running.end()
    assert seconds > 0
    assert at_their_times.summary.output_tokens == sum(item.max_tokens for item in items)
    assert at_their_times.summary.short_answers == 0 and at_their_times.peak_rss > 50 << 20
    assert one_by_one.summary.output_tokens == sum(item.max_tokens for item in items[:2])
    for item, record in zip(items, records, strict=True):
        assert record.is_answered and record.due == item.at
        assert record.began >= item.at
        assert record.began < record.chunk_times[0] <= record.chunk_times[-1] == record.ended
    for before, after in itertools.pairwise(in_turn):
        assert before.ended <= after.began


def test_the_driver_has_the_settings_of_the_server_and_of_the_library() -> None:
    assert serving_config() == build_config({}, "cpu")


def test_a_failed_request_has_too_few_tokens_and_does_not_block_the_driver(default_model_path: Path) -> None:
    made = Driver(str(default_model_path), dataclasses.replace(serving_config(), request_timeout=0.0))
    with made.engine:
        answer = made.run({"items": [{"prompt": [1, 2, 3], "max_tokens": 4, "at": 0.0}], "one_by_one": False})
    (record,) = driver_records(Phase("one", (Item((1, 2, 3), 4),)), json.dumps(answer).encode())
    assert record.failure_kind == "wrong length"


def test_tokens_of_one_step_are_one_chunk() -> None:
    answer = [{"began": 0.0, "tokens": [1.0, 1.5, 1.5, 1.5, 2.0], "ended": 2.0}]
    (record,) = driver_records(Phase("one", (Item((1,), 5),)), json.dumps(answer).encode())
    assert record.is_answered and record.output_tokens == 5
    assert record.gaps == [0.5, 0.5]


def test_in_process_is_compared_with_peers_in_process_and_is_never_the_criterion(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The fastest peer is a server here: weft over HTTP is compared with it, weft in process is not."""
    call_log = Path("call_log")
    library = dataclasses.replace(driver("library", call_log), is_in_process=True)
    ours = dataclasses.replace(driver(OURS_IN_PROCESS, call_log), is_in_process=True)
    engines = (driver("weft", call_log), ours, library, driver("server", call_log))
    speeds = {"weft": 100.0, OURS_IN_PROCESS: 120.0, "library": 40.0, "server": 50.0}
    cells = tuple(cell(name, "W8", tokens_per_second=speed) for name, speed in speeds.items())
    report = Report("a machine", "model.gguf", engines, ("W8",), cells, {}, None)
    print_report(report)
    out = capsys.readouterr().out
    rows = {
        line.split("│")[1].strip(): line.split("│")[2].strip()
        for line in reversed(out.splitlines())
        if line.count("│") == 3
    }
    assert rows["weft / best peer"] == "2.00x"
    assert rows["weft in process / best in process"] == "3.00x"
    assert rows[OURS_IN_PROCESS] == "120.0 (0.83x)"
    assert "is only for information: both sides run without HTTP" in " ".join(out.split())
    written = json.loads(json.dumps(document(report)))
    assert written["ratios_in_process"]["tokens_per_second"]["W8"] == {"library": 3.0}
    assert written["ratios"]["tokens_per_second"]["W8"]["server"] == 2.0
    without = dataclasses.replace(report, engines=(engines[0], *engines[2:]), cells=(cells[0], *cells[2:]))
    print_report(without)
    assert "in process" not in capsys.readouterr().out
