"""Which tries `python -m benchmarks peers` makes, and which count: disturbances, rounds, repeats, and stored cells."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.machine_speed import Gauge, Speed, SpeedProbe, open_gauge
from benchmarks.peers import Bench
from benchmarks.peers_cells import START, Cell, CellFiles, Try
from benchmarks.peers_engines import Engine
from benchmarks.peers_process import RunningEngine
from benchmarks.peers_report import Report, document, print_report
from peer_cases import cell, driver, make_bench, measured_calls, one_try, some_text

FULL = Speed(40e9, 450e9)
SLOW_TO_READ = Speed(0.59 * 40e9, 450e9)
SLOW_TO_MULTIPLY = Speed(40e9, 0.89 * 450e9)
A_LITTLE_SLOWER = Speed(0.61 * 40e9, 0.91 * 450e9)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "settle", lambda seconds=0.0: None)


@pytest.fixture(autouse=True)
def no_other_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes use the test machine; here only a fake probe reports a disturbance."""
    monkeypatch.setattr(peers, "_others_share", lambda use: 0.0)


def probe_of(speeds: Sequence[Speed], then: Speed = FULL) -> Callable[[], Speed]:
    left = iter(speeds)
    return lambda: next(left, then)


def rates(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tokens_per_second_of: dict[str, list[float]]
) -> list[tuple[str, int]]:
    """Replaces measurements by tries with these tokens per second. Returns engine and round of each try."""
    order: list[tuple[str, int]] = []
    left = {name: iter(values) for name, values in tokens_per_second_of.items()}

    def measure(engine: Engine, names: Sequence[str], number: int, attempt: int) -> list[Try]:
        order.append((engine.name, number))
        rate = next(left[engine.name])
        return [
            one_try(engine.name, name, round=number, attempt=attempt, tokens_per_second=rate)
            for name in names
        ]

    monkeypatch.setattr(bench, "_try_work", measure)
    return order


# --- disturbed runs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", (SLOW_TO_READ, SLOW_TO_MULTIPLY))
@pytest.mark.parametrize("is_after", (False, True))
def test_a_run_on_a_slow_machine_is_repeated_until_the_machine_is_fast(
    tmp_path: Path, slow: Speed, is_after: bool
) -> None:
    printed: list[str] = []
    # Speeds of the machine: before and after the first try, once while waiting, before and after the second.
    probe = probe_of([FULL, slow] if is_after else [slow, FULL])
    bench = make_bench(
        tmp_path,
        [driver("a", tmp_path / "call_log")],
        ["W8"],
        repeats=2,
        probe=probe,
        print_status=printed.append,
    )
    bench.gauge.remember(FULL)
    bench.run()
    measured = bench.cells["a", "W8"]
    assert [one.speed for one in measured.tries] == [slow, FULL]
    assert measured.figure.attempt == 1 and not measured.is_disturbed
    assert "DISTURBED: " in printed[0] and "of its best" in printed[0]
    assert printed[1].startswith("waiting for an idle machine")


def test_a_machine_a_little_below_its_best_speed_does_not_disturb_a_run(tmp_path: Path) -> None:
    bench = make_bench(
        tmp_path,
        [driver("a", tmp_path / "call_log")],
        ["W8"],
        repeats=2,
        probe=probe_of([], then=A_LITTLE_SLOWER),
    )
    bench.gauge.remember(FULL)
    bench.run()
    assert len(bench.cells["a", "W8"].tries) == 1
    assert not bench.cells["a", "W8"].is_disturbed


def test_the_wait_for_a_slow_machine_is_limited(tmp_path: Path) -> None:
    speeds: list[Speed] = []
    bench = make_bench(
        tmp_path,
        [driver("a", tmp_path / "call_log")],
        ["W8"],
        repeats=1,
        probe=lambda: (speeds.append(SLOW_TO_READ), SLOW_TO_READ)[1],
    )
    bench.gauge.remember(FULL)
    bench.run()
    assert len(speeds) == 2 + peers.QUIET_CHECKS + 2
    assert len(bench.cells["a", "W8"].tries) == 2 and bench.cells["a", "W8"].is_disturbed


def test_cpu_time_of_other_processes_disturbs_a_run_and_every_try_has_other_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = iter([0.5, 0.01, 0.01])  # the first try, while waiting, the second try
    monkeypatch.setattr(peers, "_others_share", lambda use: next(shares))
    texts: list[int] = []
    bench = make_bench(tmp_path, [driver("a", tmp_path / "call_log")], ["W8"], repeats=2)
    bench.open_text = lambda run: (texts.append(run), some_text(run))[1]
    bench.run()
    assert [one.others for one in bench.cells["a", "W8"].tries] == [0.5, 0.01]
    assert bench.cells["a", "W8"].figure.attempt == 1
    assert set(texts) == {0, 1}


def test_a_run_becomes_disturbed_when_the_machine_turns_out_to_be_faster(tmp_path: Path) -> None:
    # Both speeds around the first engine are slow, and no better one is known yet.
    bench = make_bench(
        tmp_path,
        [driver("a", tmp_path / "call_log"), driver("b", tmp_path / "call_log")],
        ["W8"],
        repeats=2,
        probe=probe_of([SLOW_TO_READ, SLOW_TO_READ]),
    )
    bench.run()
    assert bench.cells["a", "W8"].is_disturbed and not bench.cells["b", "W8"].is_disturbed


def test_the_machine_is_measured_while_the_engine_is_stopped_and_not_during_a_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    for name in ("freeze", "thaw", "first_token", "_outcome"):
        real = getattr(RunningEngine, name)

        def recorded(
            running: RunningEngine, *rest: object, name: str = name, real: Callable = real
        ) -> object:
            events.append(name)
            return real(running, *rest)

        monkeypatch.setattr(RunningEngine, name, recorded)
    bench = make_bench(
        tmp_path,
        [driver("a", tmp_path / "call_log")],
        ["Wshare", "Wshare-warm"],
        probe=lambda: (events.append("measure"), FULL)[1],
    )
    bench.run()
    measure = ["freeze", "measure", "thaw"]
    first = events.index("freeze")
    assert events[first : first + 11] == [*measure, "_outcome", *measure, "_outcome", *measure]
    assert bench.cells["a", "Wshare-warm"].figure.speed == FULL


def test_the_machine_is_measured_before_and_after_a_start_too(tmp_path: Path) -> None:
    bench = make_bench(
        tmp_path, [driver("a", tmp_path / "call_log")], [START], probe=probe_of([FULL, SLOW_TO_READ])
    )
    bench.run()
    bench.end()
    assert bench.cells["a", START].figure.speed == SLOW_TO_READ
    assert bench.cells["a", START].is_disturbed


# --- the probe ----------------------------------------------------------------------------------------------------


def test_without_kernels_there_is_no_probe_and_the_report_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "weft._kernels", None)
    monkeypatch.delattr("weft._kernels", raising=False)
    gauge = open_gauge()
    gauge.calibrate()
    assert gauge.is_disabled and gauge.measure() is None and gauge.best is None
    bench = make_bench(tmp_path, [driver("weft", tmp_path / "call_log")], ["W8"], repeats=2)
    bench.gauge = gauge
    bench.run()
    measured = bench.cells["weft", "W8"]
    assert measured.figure.speed is None and not measured.is_disturbed
    print_report(Report("a machine", "model", tuple(bench.engines), ("W8",), (measured,), {}, gauge.best))
    assert "weft's C++ kernels are missing" in capsys.readouterr().out


def test_the_real_probe_measures_bandwidth_and_products() -> None:
    kernels = pytest.importorskip("weft._kernels")
    probe = SpeedProbe(threads=2, data_bytes=8 << 20)
    speed = probe.measure()
    assert 1e8 < speed.reading < 1e13  # plausible for any machine
    assert (speed.products is None) == (kernels.measure_products(probe.pool, 0.0) == 0)
    gauge = Gauge(probe.measure)
    first, second = gauge.measure(), gauge.measure()
    assert first is not None and second is not None and gauge.best == first.faster(second)


def test_speeds_are_compared_value_by_value() -> None:
    assert SLOW_TO_READ.slower(SLOW_TO_MULTIPLY) == Speed(SLOW_TO_READ.reading, SLOW_TO_MULTIPLY.products)
    assert SLOW_TO_READ.faster(SLOW_TO_MULTIPLY) == FULL
    assert FULL.slower(Speed(50e9, None)) == Speed(40e9, None)
    assert FULL.shortfalls(FULL) == A_LITTLE_SLOWER.shortfalls(FULL) == []
    assert SLOW_TO_READ.shortfalls(FULL) == ["memory bandwidth was at 59% of its best"]
    assert SLOW_TO_MULTIPLY.shortfalls(FULL) == ["arithmetic was at 89% of its best"]
    assert str(FULL) == "reads 40.0 GB/s, multiplies 900 GOP/s"


# --- rounds, and the try that counts ------------------------------------------------------------------------------


def test_the_engines_alternate_in_every_round_and_the_median_try_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call_log = tmp_path / "call_log"
    bench = make_bench(tmp_path, [driver("a", call_log), driver("b", call_log)], ["W8"], rounds=3)
    order = rates(bench, monkeypatch, {"a": [90.0, 300.0, 100.0], "b": [7.0, 5.0, 6.0]})
    bench.run()
    assert order == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert bench.cells["a", "W8"].figure.tokens_per_second == 100.0
    assert bench.cells["b", "W8"].figure.tokens_per_second == 6.0


def test_a_round_has_its_own_text_for_all_engines(tmp_path: Path) -> None:
    texts: list[int] = []
    call_log = tmp_path / "call_log"
    bench = make_bench(tmp_path, [driver("a", call_log), driver("b", call_log)], ["W8"], rounds=2)
    bench.open_text = lambda run: (texts.append(run), some_text(run))[1]
    bench._try_work(bench.engines[0], ["W8"], 1, 0)
    bench._try_work(bench.engines[1], ["W8"], 1, 0)
    bench._try_work(bench.engines[1], ["W8"], 1, 1)
    assert [text for text in texts if text] == [1, 1, 3]  # 0 is the text of the starts


def test_disturbed_tries_do_not_count_if_one_is_undisturbed() -> None:
    values = [(10.0, 0.5), (20.0, 0.0), (30.0, 0.0), (40.0, 0.0), (50.0, 0.5)]
    tries = tuple(one_try("a", "W8", tokens_per_second=rate, others=others) for rate, others in values)
    assert Cell(tries, None).figure.tokens_per_second == 30.0
    assert Cell(tries[:2], None).figure.tokens_per_second == 20.0
    disturbed = Cell((tries[4], tries[0]), None)
    assert disturbed.is_disturbed and disturbed.figure.tokens_per_second == 10.0  # the slower of two
    starts = tuple(
        one_try("a", START, tokens_per_second=None, seconds=seconds) for seconds in (3.0, 1.0, 2.0)
    )
    assert Cell(starts, None).figure.seconds == 2.0


def test_the_tables_show_the_spread_of_the_tries_and_json_has_all_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = driver("weft", Path("call_log"))
    tries = (
        one_try("weft", "W8", tokens_per_second=90.0, speed=FULL),
        one_try("weft", "W8", round=1, tokens_per_second=110.0, speed=FULL),
        one_try("weft", "W8", round=2, tokens_per_second=60.0, speed=SLOW_TO_READ),
    )
    report = Report("a machine", "model", (engine,), ("W8",), (Cell(tries, FULL),), {}, FULL)
    print_report(report)
    printed = capsys.readouterr().out
    assert "reads 40.0 GB/s, multiplies 900 GOP/s" in printed
    assert "1.22 (2/3)" in printed  # 110 / 90
    written = json.loads(json.dumps(document(report)))
    assert written["speed"] == {
        "best": {"reading": 40e9, "products": 450e9},
        "reading_share": 0.6,
        "products_share": 0.9,
    }
    assert written["cells"][0]["tokens_per_second"] == 90.0
    assert [one["tokens_per_second"] for one in written["cells"][0]["tries"]] == [90.0, 110.0, 60.0]
    assert written["cells"][0]["tries"][2]["speed"] == {"reading": SLOW_TO_READ.reading, "products": 450e9}
    assert written["cells"][0]["tries"][2]["troubles"] == ["memory bandwidth was at 59% of its best"]


def test_the_note_below_the_tables_explains_the_star(capsys: pytest.CaptureFixture[str]) -> None:
    slow = Cell((one_try("weft", "W8", speed=SLOW_TO_MULTIPLY),), FULL)
    engine = driver("weft", Path("call_log"))
    print_report(Report("a machine", "model", (engine,), ("W8",), (slow,), {}, FULL))
    printed = " ".join(capsys.readouterr().out.split())
    assert "100.0*" in printed
    assert "more than 5% of the CPU time" in printed and "below 60%" in printed and "below 90%" in printed


# --- stored cells ---------------------------------------------------------------------------------------------------


def test_a_stored_cell_is_loaded_unchanged(tmp_path: Path) -> None:
    whole = Cell(
        (
            one_try("llama.cpp, 8 slots", "W8", speed=SLOW_TO_READ, loudest=("cc1plus 90%",), others=0.4),
            one_try("llama.cpp, 8 slots", "W8", round=1, gap_p99=0.1, peak_rss=5),
        ),
        FULL,
    )
    CellFiles(tmp_path).save(whole)
    assert CellFiles(tmp_path).load("llama.cpp, 8 slots", "W8") == whole
    assert CellFiles(tmp_path).load("llama.cpp, 8 slots", "W32") is None
    assert CellFiles(None).load("llama.cpp, 8 slots", "W8") is None


def test_an_interrupted_run_continues(tmp_path: Path) -> None:
    call_log, kept = tmp_path / "call_log", tmp_path / "kept"
    CellFiles(kept).save(cell("a", "W8", tokens_per_second=77.0))
    CellFiles(kept).save(cell("a", "W32", others=0.5))  # disturbed: measured again
    bench = make_bench(tmp_path, [driver("a", call_log)], ["W8", "W32"], keep=kept)
    bench.run()
    assert measured_calls(call_log) == ["a 32"]
    assert bench.cells["a", "W8"].figure.tokens_per_second == 77.0
    assert [one.attempt for one in bench.cells["a", "W32"].tries] == [0, 1]
    assert not bench.cells["a", "W32"].is_disturbed
    assert CellFiles(kept).load("a", "W32") == bench.cells["a", "W32"]


def test_more_rounds_are_added_to_a_stored_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "kept"
    CellFiles(kept).save(Cell((one_try("a", "W8", tokens_per_second=10.0),), FULL))
    bench = make_bench(tmp_path, [driver("a", tmp_path / "call_log")], ["W8"], rounds=3, keep=kept)
    order = rates(bench, monkeypatch, {"a": [30.0, 20.0]})
    bench.run()
    assert order == [("a", 1), ("a", 2)]
    assert bench.cells["a", "W8"].figure.tokens_per_second == 20.0
    assert bench.gauge.best == FULL  # the best speed of the stored run is still the reference


def test_cells_in_files_of_another_format_are_measured_again(tmp_path: Path) -> None:
    call_log, kept = tmp_path / "call_log", tmp_path / "kept"
    kept.mkdir()
    flat = {"engine": "a", "work": "W8", "attempt": 0, "seconds": 1.0, "others": 0.0, "loudest": []}
    for number, junk in enumerate(
        (
            flat,  # the format before there were rounds
            {"best": None, "tries": []},
            {"best": None, "tries": [flat]},
            {"best": 3, "tries": [{**flat, "round": 0, "speed": None}]},
            [],
        )
    ):
        (kept / "a.W8.json").write_text(json.dumps(junk))
        assert CellFiles(kept).load("a", "W8") is None
        bench = make_bench(tmp_path, [driver("a", call_log)], ["W8"], keep=kept)
        bench.run()
        assert measured_calls(call_log) == ["a 8"] * (number + 1)
        assert CellFiles(kept).load("a", "W8") == bench.cells["a", "W8"]
