"""`python -m benchmarks peers` with real processes but no peers: engines are small scripts, or a server on noop."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks import peers, peers_environment
from benchmarks.peers import Bench, choose_engines, choose_work, groups
from benchmarks.peers_cells import START
from benchmarks.peers_engines import ENGINES, OURS_WITHOUT_DRAFTS, PEERS, Engine, Launch, PeerFiles
from benchmarks.peers_environment import Environment, PeerError, last_error, python_of, run_logged
from benchmarks.peers_process import RunningEngine, driver_records, free_port
from benchmarks.peers_report import Report, document, print_report, ratios
from peer_cases import DRIVER, cell, driver, make_bench, measured_calls
from weft.bench.serve_load import WORKLOADS, Item, Phase
from weft.bench.serve_machine import MachineUse
from weft.errors import InvalidRequestError

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "tests" / "server" / "launch.py"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "settle", lambda seconds=0.0: None)


def state_of(pid: int) -> str:
    """The state letter of the kernel; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return ""


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- runs and their order -----------------------------------------------------------------------------------------


def test_engines_take_turns_within_each_workload(tmp_path: Path) -> None:
    call_log = tmp_path / "call_log"
    bench = make_bench(tmp_path, [driver("a", call_log), driver("b", call_log)], ["W8", "W32"])
    bench.run()
    assert measured_calls(call_log) == ["a 8", "b 8", "a 32", "b 32"]
    assert bench.cells["a", "W8"].figure.output_tokens == 8 * 128
    assert bench.cells["b", "W32"].figure.first_token_p50 == pytest.approx(0.001)
    assert bench.cells["b", "W32"].figure.gap_p99 == pytest.approx(0.001)
    assert all(
        (measured.figure.peak_rss or 0) > 1 << 20 and (measured.figure.pss or 0) > 1 << 19
        for measured in bench.cells.values()
    )


def test_an_engine_that_fails_is_reported_with_its_reason_and_the_others_continue(tmp_path: Path) -> None:
    call_log = tmp_path / "call_log"

    def refuse(_: PeerFiles) -> Callable[[int], Launch]:
        raise PeerError("no such wheel")

    broken = "import sys; print('RuntimeError: no such model', file=sys.stderr); sys.exit(3)"
    engines = [
        Engine("unknown", "unknown", "1", refuse),
        driver("broken", call_log, program=broken),
        driver("fine", call_log),
    ]
    bench = make_bench(tmp_path, engines, ["W8"])
    bench.run()
    assert bench.problems["unknown"] == "no such wheel"
    assert "RuntimeError: no such model" in bench.problems["broken"]
    assert list(bench.cells) == [("fine", "W8")]


def test_an_engine_gets_only_the_workloads_that_it_supports(tmp_path: Path) -> None:
    call_log = tmp_path / "call_log"
    bench = make_bench(tmp_path, [driver("static", call_log, ("W8",)), driver("b", call_log)], ["W8", "W32"])
    bench.run()
    assert measured_calls(call_log) == ["static 8", "b 8", "b 32"]


def test_the_second_start_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[float] = []
    start = Bench._start

    def recorded(bench: Bench, engine: Engine) -> tuple[RunningEngine, float, MachineUse]:
        running, seconds, use = start(bench, engine)
        starts.append(seconds)
        return running, seconds, use

    monkeypatch.setattr(Bench, "_start", recorded)
    bench = make_bench(tmp_path, [driver("a", tmp_path / "call_log")], [START])
    bench.run()
    bench.end()
    assert len(starts) == 2
    assert bench.cells["a", START].figure.seconds == starts[1]


def test_an_engine_that_starts_slowly_is_kept_and_frozen_while_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "SLOW_START", 0.0)
    call_log = tmp_path / "call_log"
    bench = make_bench(tmp_path, [driver("a", call_log)], ["W8", "W32"])
    bench.run()
    pid = bench._running["a"]._process.pid
    wait_for(lambda: state_of(pid) == "T")  # stopped
    assert call_log.read_text().splitlines() == ["a 1", "a 2", "a 8", "a 2", "a 32"]  # one start in all
    bench.end()
    assert state_of(pid) == ""


def test_wshare_warm_runs_with_the_cache_that_wshare_filled() -> None:
    assert choose_work("W8,Wshare-warm") == ["W8", "Wshare", "Wshare-warm"]
    assert groups(["W8", "Wshare", "Wshare-warm"]) == [["W8"], ["Wshare", "Wshare-warm"]]
    assert choose_work(None) == [START, *WORKLOADS]


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequestError, match=r"no workload 'W9'; there are start, W1"):
        choose_work("W9")
    with pytest.raises(
        InvalidRequestError, match=r"no peer 'tgi'; there are weft-without-drafts, weft-in-process, llama"
    ):
        choose_engines("tgi")
    assert {engine.peer for engine in choose_engines("vllm")} == {"weft", "vllm"}
    assert (
        *("weft-without-drafts", "weft-in-process", "llama.cpp"),
        *("openvino", "openvino-f16", "onnxruntime", "vllm"),
    ) == PEERS


def test_an_engine_outside_the_default_is_measured_if_it_is_named() -> None:
    unusual = ("weft-in-process", "openvino-f16")
    assert choose_engines(None) == [engine for engine in ENGINES if engine.peer not in unusual]
    assert [engine.name for engine in choose_engines("openvino-f16")] == [
        "weft",
        "OpenVINO GenAI int4, 16-bit cache",
    ]


# --- a running engine ---------------------------------------------------------------------------------------------


def test_a_server_is_measured_from_the_start_of_its_process_to_its_last_token(
    tmp_path: Path, default_model_path: Path
) -> None:
    port = free_port()
    settings = {
        "model": str(default_model_path),
        "names": ["tried"],
        "port": port,
        "backend": "noop",
        "backend_options": {"vocabulary_size": 49152, "max_context": 2048},
    }
    command = (sys.executable, str(LAUNCH), json.dumps(settings))
    began = time.perf_counter()
    running = RunningEngine(Launch(command, port, dict(os.environ)), tmp_path / "log")
    try:
        seconds, _ = running.first_token(range(1, 17))
        assert 0 < seconds <= time.perf_counter() - began
        wait_for(lambda: running._memory.peak > 0)
        items = tuple(Item(tuple(range(start, start + 64)), 16) for start in (100, 200, 300, 400))
        first, second = running.run([Phase("four", items), Phase("again", items)])
    finally:
        running.end()
    assert first.summary.output_tokens == 64
    assert first.machine.server is not None and first.machine.others is not None
    assert first.peak_rss >= first.pss * 0.9 > 1 << 20
    # Start and warm-up leave nothing in the cache that the first phase hits; the second phase repeats the first.
    assert first.summary.cached_tokens == 0 < second.summary.cached_tokens
    assert state_of(running._process.pid) == ""


def test_a_server_that_ends_while_it_starts_fails_at_once(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "raise SystemExit('ValueError: no memory')")
    running = RunningEngine(Launch(command, free_port(), dict(os.environ)), tmp_path / "log")
    try:
        with pytest.raises(PeerError, match=r"exit code 1; ValueError: no memory \(see .*log\)"):
            running.first_token([1, 2, 3])
    finally:
        running.end()


def test_a_child_that_outlives_its_engine_is_ended_too(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys; child = subprocess.Popen(['sleep', '600']);"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); {DRIVER.strip().splitlines()[0]}\n"
        + "\n".join(DRIVER.strip().splitlines()[1:])
    )
    command = (sys.executable, "-c", program, str(tmp_path / "call_log"), "a")
    running = RunningEngine(Launch(command, None, dict(os.environ)), tmp_path / "log")
    running.first_token([1, 2, 3])
    child = int((tmp_path / "pid").read_text())
    assert state_of(child) != ""
    running.end()
    wait_for(lambda: state_of(child) in ("", "Z"))  # gone, or a zombie until its new parent waits for it


def test_a_killed_benchmark_leaves_no_stopped_engine_behind(tmp_path: Path) -> None:
    program = f"""
import os, signal, sys
from pathlib import Path
from benchmarks.peers_engines import Launch
from benchmarks.peers_process import RunningEngine
running = RunningEngine(Launch(("sleep", "600"), None, dict(os.environ)), Path({str(tmp_path / "log")!r}))
running.freeze()
print(running._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    printed = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, check=False
    ).stdout
    wait_for(lambda: state_of(int(printed)) in ("", "Z"))


def test_the_answer_of_a_driver_is_checked() -> None:
    phase = Phase("two", (Item((1, 2), 2), Item((3,), 3, at=1.0)))
    whole = [
        {"began": 0.0, "tokens": [0.5, 0.7], "ended": 0.7},
        {"began": 1.0, "tokens": [2.0], "ended": 2.0},
    ]
    first, second = driver_records(phase, json.dumps(whole).encode())
    assert first.is_answered and first.first_token == 0.5 and first.prompt_tokens == 2
    assert second.failure_kind == "wrong length" and second.due == 1.0
    for junk in (b"oh no\n", b"{}\n", b"[1, 2]\n", json.dumps(whole[:1]).encode()):
        with pytest.raises(PeerError, match="which is not a list of requests"):
            driver_records(phase, junk)


# --- environments -------------------------------------------------------------------------------------------------


def test_an_environment_is_made_once_and_again_when_its_versions_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, ...]] = []

    def run(command: Sequence[str], log: Path, problem: str) -> None:
        ran.append(tuple(command))
        (log.parent / "bin").mkdir(exist_ok=True)
        (log.parent / "bin" / "python").touch()

    monkeypatch.setattr(peers_environment, "run_logged", run)
    printed: list[str] = []
    first = Environment("peer", "Peer 1", ("peer==1",), 1, unwanted=("ballast",))
    python = python_of(first, tmp_path, printed.append)
    assert python == tmp_path / "peer" / "bin" / "python"
    assert printed[0] == f"installing Peer 1 into {tmp_path / 'peer'}, 1 MB, some minutes"
    assert [command[-1] for command in ran] == [str(tmp_path / "peer"), "peer==1", "ballast"]
    python_of(first, tmp_path, printed.append)
    assert len(ran) == 3
    python_of(Environment("peer", "Peer 2", ("peer==2",), 1), tmp_path, printed.append)
    assert ran[-1][-1] == "peer==2"


def test_a_failed_install_reports_its_reason_and_is_tried_again_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: Sequence[str], log: Path, problem: str) -> None:
        raise PeerError(f"{problem}: no network")

    monkeypatch.setattr(peers_environment, "run_logged", fail)
    environment = Environment("peer", "Peer 1", ("peer==1",), 1)
    for _ in range(2):
        with pytest.raises(PeerError, match="no network"):
            python_of(environment, tmp_path, lambda _: None)
    with pytest.raises(PeerError, match=r"needs about .* MB in .* are free"):
        python_of(Environment("huge", "Huge", ("huge==1",), 1 << 40), tmp_path, lambda _: None)


def test_a_failed_command_is_reported_with_the_line_that_contains_the_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = "print('ERROR: no matching wheel'); print('a hint'); raise SystemExit(2)"
    with pytest.raises(PeerError, match=r"it broke \(exit code 2\): ERROR: no matching wheel \(see "):
        run_logged((sys.executable, "-c", program), log, "it broke")
    assert last_error(tmp_path / "none").startswith("no output")


# --- the report ---------------------------------------------------------------------------------------------------


def some_report() -> Report:
    call_log = Path("call_log")
    engines = (driver("weft", call_log), driver("fast", call_log), driver("slow", call_log))
    cells = (
        cell("weft", "W8", first_token_p99=0.5, peak_rss=300 << 20, pss=200 << 20),
        cell("fast", "W8", tokens_per_second=50.0, first_token_p99=1.0, peak_rss=600 << 20, others=0.2),
        cell("slow", "W8", tokens_per_second=25.0, first_token_p99=4.0),
        cell("weft", START, seconds=0.5, tokens_per_second=None),
        cell("fast", START, seconds=1.0, tokens_per_second=None),
    )
    return Report("a machine", "model.gguf", engines, (START, "W8"), cells, {"gone": "no wheel"}, None)


def test_a_ratio_is_how_many_times_better_weft_is() -> None:
    report = some_report()
    assert ratios(report, "W8", lambda measured: measured.tokens_per_second, True) == {
        "fast": 2.0,
        "slow": 4.0,
    }
    assert ratios(report, "W8", lambda measured: measured.first_token_p99, False) == {
        "fast": 2.0,
        "slow": 8.0,
    }
    written = json.loads(json.dumps(document(report)))
    assert written["ratios"]["start"] == {"fast": 2.0}
    assert written["ratios"]["peak_rss"]["W8"] == {"fast": 2.0}
    assert [entry["is_disturbed"] for entry in written["cells"]] == [False, True, False, False, False]


def test_the_tables_show_the_best_peer_mark_disturbed_runs_and_list_missing_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """weft without drafts is in the tables, but is no peer, even if it is faster."""
    report = some_report()
    without_drafts = driver(OURS_WITHOUT_DRAFTS, Path("call_log"))
    faster = cell(OURS_WITHOUT_DRAFTS, "W8", tokens_per_second=80.0, first_token_p99=0.5)
    report = dataclasses.replace(
        report, engines=(*report.engines, without_drafts), cells=(*report.cells, faster)
    )
    print_report(report)
    printed = capsys.readouterr().out
    assert "50.0* (2.00x)" in printed and "25.0 (4.00x)" in printed
    assert (
        next(line for line in printed.splitlines() if "weft / best peer" in line).split("│")[2].strip()
        == "2.00x"
    )
    assert "300 / 200" in printed
    assert "gone: not measured, or only in part: no wheel" in printed
