"""Which tries of `python -m benchmarks peers` are made and which count: what disturbs a run, rounds, repeats, and the kept files."""

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
from peer_cases import asked, cell, driver, make_bench, one_try, some_text

FULL = Speed(40e9, 450e9)
SLOW_TO_READ = Speed(0.59 * 40e9, 450e9)
SLOW_TO_MULTIPLY = Speed(40e9, 0.89 * 450e9)
A_LITTLE_SLOWER = Speed(0.61 * 40e9, 0.91 * 450e9)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "settle", lambda seconds=0.0: None)


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that tests run on is used by others; here only a made-up probe disturbs."""
    monkeypatch.setattr(peers, "_others", lambda use: 0.0)


def probe_of(speeds: Sequence[Speed], then: Speed = FULL) -> Callable[[], Speed]:
    left = iter(speeds)
    return lambda: next(left, then)


def rates(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, made: dict[str, list[float]]
) -> list[tuple[str, int]]:
    """Has the bench make up its tries, each engine with its tokens a second in turn; gives who was tried, in which round."""
    order: list[tuple[str, int]] = []
    left = {name: iter(values) for name, values in made.items()}

    def measure(engine: Engine, names: Sequence[str], number: int, attempt: int) -> list[Try]:
        order.append((engine.name, number))
        rate = next(left[engine.name])
        return [
            one_try(engine.name, name, round=number, attempt=attempt, tokens_per_second=rate)
            for name in names
        ]

    monkeypatch.setattr(bench, "_try_work", measure)
    return order


# --- what disturbs a run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", (SLOW_TO_READ, SLOW_TO_MULTIPLY))
@pytest.mark.parametrize("is_after", (False, True))
def test_a_run_beside_a_slow_machine_is_repeated_until_the_machine_is_quiet(
    tmp_path: Path, slow: Speed, is_after: bool
) -> None:
    said: list[str] = []
    # The looks: before and after the first try; one while waiting; before and after the second.
    probe = probe_of([FULL, slow] if is_after else [slow, FULL])
    bench = make_bench(
        tmp_path, [driver("a", tmp_path / "diary")], ["W8"], repeats=2, probe=probe, say=said.append
    )
    bench.gauge.remember(FULL)
    bench.run()
    measured = bench.cells["a", "W8"]
    assert [one.speed for one in measured.tries] == [slow, FULL]
    assert measured.figure.attempt == 1 and not measured.is_disturbed
    assert "DISTURBED: the machine" in said[0] and "of its best" in said[0]
    assert said[1].startswith("waiting for a quiet machine")


def test_a_machine_that_gives_a_little_less_than_its_best_is_quiet(tmp_path: Path) -> None:
    bench = make_bench(
        tmp_path,
        [driver("a", tmp_path / "diary")],
        ["W8"],
        repeats=2,
        probe=probe_of([], then=A_LITTLE_SLOWER),
    )
    bench.gauge.remember(FULL)
    bench.run()
    assert len(bench.cells["a", "W8"].tries) == 1
    assert not bench.cells["a", "W8"].is_disturbed


def test_a_machine_that_stays_slow_is_not_waited_for_without_end(tmp_path: Path) -> None:
    looks: list[Speed] = []
    bench = make_bench(
        tmp_path,
        [driver("a", tmp_path / "diary")],
        ["W8"],
        repeats=1,
        probe=lambda: (looks.append(SLOW_TO_READ), SLOW_TO_READ)[1],
    )
    bench.gauge.remember(FULL)
    bench.run()
    assert len(looks) == 2 + peers.QUIET_CHECKS + 2
    assert len(bench.cells["a", "W8"].tries) == 2 and bench.cells["a", "W8"].is_disturbed


def test_cpu_time_of_others_disturbs_and_every_try_has_other_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = iter([0.5, 0.01, 0.01])  # the first try, while waiting, the second try
    monkeypatch.setattr(peers, "_others", lambda use: next(shares))
    texts: list[int] = []
    bench = make_bench(tmp_path, [driver("a", tmp_path / "diary")], ["W8"], repeats=2)
    bench.open_text = lambda run: (texts.append(run), some_text(run))[1]
    bench.run()
    assert [one.others for one in bench.cells["a", "W8"].tries] == [0.5, 0.01]
    assert bench.cells["a", "W8"].figure.attempt == 1
    assert set(texts) == {0, 1}


def test_a_run_that_looked_quiet_is_disturbed_once_the_machine_was_seen_faster(tmp_path: Path) -> None:
    # Both looks of the first engine are slow, and nothing better is known yet.
    bench = make_bench(
        tmp_path,
        [driver("a", tmp_path / "diary"), driver("b", tmp_path / "diary")],
        ["W8"],
        repeats=2,
        probe=probe_of([SLOW_TO_READ, SLOW_TO_READ]),
    )
    bench.run()
    assert bench.cells["a", "W8"].is_disturbed and not bench.cells["b", "W8"].is_disturbed


def test_the_machine_is_looked_at_while_the_engine_is_stopped_and_not_while_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    for name in ("freeze", "thaw", "first_token", "_outcome"):
        real = getattr(RunningEngine, name)

        def noted(running: RunningEngine, *rest: object, name: str = name, real: Callable = real) -> object:
            events.append(name)
            return real(running, *rest)

        monkeypatch.setattr(RunningEngine, name, noted)
    bench = make_bench(
        tmp_path,
        [driver("a", tmp_path / "diary")],
        ["Wshare", "Wshare-warm"],
        probe=lambda: (events.append("look"), FULL)[1],
    )
    bench.run()
    look = ["freeze", "look", "thaw"]
    begun = events.index("freeze")
    assert events[begun : begun + 11] == [*look, "_outcome", *look, "_outcome", *look]
    assert bench.cells["a", "Wshare-warm"].figure.speed == FULL


def test_a_start_is_looked_at_before_and_after_too(tmp_path: Path) -> None:
    bench = make_bench(
        tmp_path, [driver("a", tmp_path / "diary")], [START], probe=probe_of([FULL, SLOW_TO_READ])
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
    bench = make_bench(tmp_path, [driver("weft", tmp_path / "diary")], ["W8"], repeats=2)
    bench.gauge = gauge
    bench.run()
    measured = bench.cells["weft", "W8"]
    assert measured.figure.speed is None and not measured.is_disturbed
    print_report(Report("a machine", "model", tuple(bench.engines), ("W8",), (measured,), {}, gauge.best))
    assert "without weft's C++ kernels" in capsys.readouterr().out


def test_the_real_probe_gives_what_this_machine_reads_and_multiplies() -> None:
    kernels = pytest.importorskip("weft._kernels")
    probe = SpeedProbe(threads=2, data_bytes=8 << 20)
    speed = probe.measure()
    assert 1e8 < speed.reading < 1e13  # any machine that there is
    assert (speed.products is None) == (kernels.measure_products(probe.pool, 0.0) == 0)
    gauge = Gauge(probe.measure)
    first, second = gauge.measure(), gauge.measure()
    assert first is not None and second is not None and gauge.best == first.faster(second)


def test_speeds_are_compared_figure_by_figure() -> None:
    assert SLOW_TO_READ.slower(SLOW_TO_MULTIPLY) == Speed(SLOW_TO_READ.reading, SLOW_TO_MULTIPLY.products)
    assert SLOW_TO_READ.faster(SLOW_TO_MULTIPLY) == FULL
    assert FULL.slower(Speed(50e9, None)) == Speed(40e9, None)
    assert FULL.shortfalls(FULL) == A_LITTLE_SLOWER.shortfalls(FULL) == []
    assert SLOW_TO_READ.shortfalls(FULL) == ["the machine read at 59% of its best"]
    assert SLOW_TO_MULTIPLY.shortfalls(FULL) == ["the machine multiplied at 89% of its best"]
    assert str(FULL) == "reads 40.0 GB/s, multiplies 900 GOP/s"


# --- rounds, and the try that counts ------------------------------------------------------------------------------


def test_the_engines_take_turns_in_every_round_and_the_median_try_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diary = tmp_path / "diary"
    bench = make_bench(tmp_path, [driver("a", diary), driver("b", diary)], ["W8"], rounds=3)
    order = rates(bench, monkeypatch, {"a": [90.0, 300.0, 100.0], "b": [7.0, 5.0, 6.0]})
    bench.run()
    assert order == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert bench.cells["a", "W8"].figure.tokens_per_second == 100.0
    assert bench.cells["b", "W8"].figure.tokens_per_second == 6.0


def test_a_round_has_text_of_its_own_which_is_the_same_for_every_engine(tmp_path: Path) -> None:
    texts: list[int] = []
    diary = tmp_path / "diary"
    bench = make_bench(tmp_path, [driver("a", diary), driver("b", diary)], ["W8"], rounds=2)
    bench.open_text = lambda run: (texts.append(run), some_text(run))[1]
    bench._try_work(bench.engines[0], ["W8"], 1, 0)
    bench._try_work(bench.engines[1], ["W8"], 1, 0)
    bench._try_work(bench.engines[1], ["W8"], 1, 1)
    assert [text for text in texts if text] == [1, 1, 3]  # and 0 for what the starts are measured with


def test_disturbed_tries_do_not_count_while_one_is_quiet() -> None:
    values = [(10.0, 0.5), (20.0, 0.0), (30.0, 0.0), (40.0, 0.0), (50.0, 0.5)]
    tries = tuple(one_try("a", "W8", tokens_per_second=rate, others=others) for rate, others in values)
    assert Cell(tries, None).figure.tokens_per_second == 30.0
    assert Cell(tries[:2], None).figure.tokens_per_second == 20.0
    loud = Cell((tries[4], tries[0]), None)
    assert loud.is_disturbed and loud.figure.tokens_per_second == 10.0  # the slower of two
    starts = tuple(
        one_try("a", START, tokens_per_second=None, seconds=seconds) for seconds in (3.0, 1.0, 2.0)
    )
    assert Cell(starts, None).figure.seconds == 2.0


def test_tables_say_how_far_tries_went_apart_and_json_has_all_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = driver("weft", Path("diary"))
    tries = (
        one_try("weft", "W8", tokens_per_second=90.0, speed=FULL),
        one_try("weft", "W8", round=1, tokens_per_second=110.0, speed=FULL),
        one_try("weft", "W8", round=2, tokens_per_second=60.0, speed=SLOW_TO_READ),
    )
    report = Report("a machine", "model", (engine,), ("W8",), (Cell(tries, FULL),), {}, FULL)
    print_report(report)
    said = capsys.readouterr().out
    assert "reads 40.0 GB/s, multiplies 900 GOP/s" in said
    assert "1.22 (2/3)" in said  # 110 / 90
    written = json.loads(json.dumps(document(report)))
    assert written["speed"] == {
        "best": {"reading": 40e9, "products": 450e9},
        "reading_share": 0.6,
        "products_share": 0.9,
    }
    assert written["cells"][0]["tokens_per_second"] == 90.0
    assert [one["tokens_per_second"] for one in written["cells"][0]["tries"]] == [90.0, 110.0, 60.0]
    assert written["cells"][0]["tries"][2]["speed"] == {"reading": SLOW_TO_READ.reading, "products": 450e9}
    assert written["cells"][0]["tries"][2]["troubles"] == ["the machine read at 59% of its best"]


def test_the_note_below_the_tables_says_what_a_star_means(capsys: pytest.CaptureFixture[str]) -> None:
    slow = Cell((one_try("weft", "W8", speed=SLOW_TO_MULTIPLY),), FULL)
    engine = driver("weft", Path("diary"))
    print_report(Report("a machine", "model", (engine,), ("W8",), (slow,), {}, FULL))
    said = " ".join(capsys.readouterr().out.split())
    assert "100.0*" in said
    assert "more than 5% of the CPU time" in said and "less than 60%" in said and "less than 90%" in said


# --- kept files ---------------------------------------------------------------------------------------------------


def test_a_kept_cell_comes_back_as_it_was(tmp_path: Path) -> None:
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


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    diary, kept = tmp_path / "diary", tmp_path / "kept"
    CellFiles(kept).save(cell("a", "W8", tokens_per_second=77.0))
    CellFiles(kept).save(cell("a", "W32", others=0.5))  # disturbed: measured again
    bench = make_bench(tmp_path, [driver("a", diary)], ["W8", "W32"], keep=kept)
    bench.run()
    assert asked(diary) == ["a 32"]
    assert bench.cells["a", "W8"].figure.tokens_per_second == 77.0
    assert [one.attempt for one in bench.cells["a", "W32"].tries] == [0, 1]
    assert not bench.cells["a", "W32"].is_disturbed
    assert CellFiles(kept).load("a", "W32") == bench.cells["a", "W32"]


def test_more_rounds_than_a_kept_run_had_are_added_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    CellFiles(kept).save(Cell((one_try("a", "W8", tokens_per_second=10.0),), FULL))
    bench = make_bench(tmp_path, [driver("a", tmp_path / "diary")], ["W8"], rounds=3, keep=kept)
    order = rates(bench, monkeypatch, {"a": [30.0, 20.0]})
    bench.run()
    assert order == [("a", 1), ("a", 2)]
    assert bench.cells["a", "W8"].figure.tokens_per_second == 20.0
    assert bench.gauge.best == FULL  # what the kept run saw is still the best that is known


def test_kept_files_of_another_shape_are_measured_again(tmp_path: Path) -> None:
    diary, kept = tmp_path / "diary", tmp_path / "kept"
    kept.mkdir()
    flat = {"engine": "a", "work": "W8", "attempt": 0, "seconds": 1.0, "others": 0.0, "loudest": []}
    for number, junk in enumerate(
        (
            flat,  # of the weft before rounds
            {"best": None, "tries": []},
            {"best": None, "tries": [flat]},
            {"best": 3, "tries": [{**flat, "round": 0, "speed": None}]},
            [],
        )
    ):
        (kept / "a.W8.json").write_text(json.dumps(junk))
        assert CellFiles(kept).load("a", "W8") is None
        bench = make_bench(tmp_path, [driver("a", diary)], ["W8"], keep=kept)
        bench.run()
        assert asked(diary) == ["a 8"] * (number + 1)
        assert CellFiles(kept).load("a", "W8") == bench.cells["a", "W8"]
