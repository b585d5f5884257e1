"""The report of `python -m benchmarks peers`: tables with ratios, JSON, and a bar chart."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

from benchmarks.machine_speed import PRODUCTS_SHARE, READING_SHARE, Speed
from benchmarks.peers_cells import START, Cell, Try
from benchmarks.peers_engines import OUR_ENGINES, OURS, OURS_IN_PROCESS, Engine, PeerFiles
from benchmarks.peers_environment import PLOT, PeerError, clean_environment, script
from weft import __version__
from weft.bench.report import print_line, print_table
from weft.bench.serve_machine import DISTURBED
from weft.bench.serve_report import write_text

NO_PROBE = "speed not measured, since weft's C++ kernels are missing"
_BAR = "weft / best peer"
_IN_PROCESS = "weft in process / best in process"
_MIB = 1 << 20


@dataclass(frozen=True)
class Report:
    machine: str
    model: str
    engines: tuple[Engine, ...]
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]
    problems: Mapping[str, str]
    best: Speed | None
    """The best speed of the machine during the run; None if it was not measured."""

    def cell(self, engine: str, work: str) -> Cell | None:
        return next((cell for cell in self.cells if (cell.engine, cell.work) == (engine, work)), None)

    @property
    def work(self) -> list[str]:
        return [name for name in self.columns if name != START]

    def rows(self) -> list[str]:
        """The engines with at least one figure."""
        return [
            engine.name for engine in self.engines if any(cell.engine == engine.name for cell in self.cells)
        ]

    def peers(self, in_process: bool = False) -> list[str]:
        """The rows that are not weft: all, or only those that run in a driver."""
        in_driver = {engine.name for engine in self.engines if engine.is_in_process or not in_process}
        return [name for name in self.rows() if name in in_driver and name not in OUR_ENGINES]


Figure = Callable[[Try], float | None]


def ratios(
    report: Report, work: str, figure: Figure, is_better_high: bool, ours: str = OURS
) -> dict[str, float]:
    """How many times better weft is than each other engine; below 1 it is worse."""
    our_cell = report.cell(ours, work)
    our_value = figure(our_cell.figure) if our_cell else None
    found = {}
    for name in report.rows():
        cell = report.cell(name, work)
        their_value = figure(cell.figure) if cell and name != ours else None
        if our_value and their_value:
            found[name] = our_value / their_value if is_better_high else their_value / our_value
    return found


def ratios_in_process(report: Report, work: str, figure: Figure, is_better_high: bool) -> dict[str, float]:
    """How many times better weft is than each peer, both without HTTP."""
    found = ratios(report, work, figure, is_better_high, OURS_IN_PROCESS)
    return {name: found[name] for name in report.peers(in_process=True) if name in found}


def print_report(report: Report) -> None:
    print_line(f"{report.machine}; {report.model}")
    print_line(
        f"Best speed of the machine in this run: {report.best}" if report.best else f"Machine: {NO_PROBE}"
    )
    _print(
        report,
        "Output tokens/s, prefill included",
        report.work,
        attrgetter("tokens_per_second"),
        "{:,.1f}",
        True,
    )
    _print_pairs(
        report, "First token p50 / p99, s", ("first_token_p50", "first_token_p99"), 1, "{:.2f}", "p99"
    )
    _print_pairs(
        report, "Gap between tokens p50 / p99, ms", ("gap_p50", "gap_p99"), 1, "{:.1f}", "p99", 1000.0
    )
    title = "Peak resident memory, MiB / with shared pages counted once"
    _print_pairs(report, title, ("peak_rss", "pss"), 0, "{:,.0f}", "peak", 1 / _MIB)
    if START in report.columns:
        _print(
            report,
            "Start to first token (second start), s",
            [START],
            attrgetter("seconds"),
            "{:.2f}",
            False,
        )
    _print_tries(report)
    if report.peers(in_process=True) and OURS_IN_PROCESS in report.rows():
        print_line(
            f"{_BAR} is the criterion: weft over HTTP, with server and client on the same cores, against the best of all "
            f"peers. {_IN_PROCESS} is only for information: both sides run without HTTP, weft against the best of "
            f"{', '.join(report.peers(in_process=True))}."
        )
    if any(cell.is_disturbed for cell in report.cells):
        print_line(
            f"* disturbed in every try: other processes used more than {DISTURBED:.0%} of the CPU time, or, right before "
            f"or after, memory bandwidth was below {READING_SHARE:.0%} or arithmetic below {PRODUCTS_SHARE:.0%} of the "
            "best in this run"
        )
    for name, problem in report.problems.items():
        print_line(f"{name}: not measured, or only in part: {problem}")


def _print(
    report: Report, title: str, work: list[str], figure: Figure, form: str, is_better_high: bool
) -> None:
    """Prints a table of one figure with its ratio to weft; the last rows compare weft with the best peer."""
    by_work = {name: ratios(report, name, figure, is_better_high) for name in work}

    def text(engine: str, name: str) -> str:
        cell = report.cell(engine, name)
        value = figure(cell.figure) if cell else None
        if cell is None or value is None:
            return ""
        ratio = by_work[name].get(engine)
        return form.format(value) + ("*" if cell.is_disturbed else "") + (f" ({ratio:.2f}x)" if ratio else "")

    rows = [[engine, *(text(engine, name) for name in work)] for engine in report.rows()]
    below = _best_rows(report, work, figure, is_better_high)
    print_table(f"{title} (how many times better weft is)", ("engine", *work), [*rows, *below])


def _print_pairs(
    report: Report, title: str, names: tuple[str, str], counts: int, form: str, word: str, scale: float = 1.0
) -> None:
    """Prints a table with two figures per cell: the attributes `names`. The last rows compare weft with the best peer. They
    use one of the two figures, names[counts]."""
    if not report.work:
        return

    def text(engine: str, work: str) -> str:
        cell = report.cell(engine, work)
        values = [getattr(cell.figure, name) for name in names] if cell else []
        return " / ".join("-" if value is None else form.format(scale * value) for value in values)

    rows = [[engine, *(text(engine, work) for work in report.work)] for engine in report.rows()]
    below = _best_rows(report, report.work, attrgetter(names[counts]), False, f", {word}")
    print_table(title, ("engine", *report.work), [*rows, *below])


def _best_rows(
    report: Report, work: list[str], figure: Figure, is_better_high: bool, of: str = ""
) -> list[list[str]]:
    """Rows that compare weft with the best peer and, if measured, weft without HTTP with the best peer without HTTP."""

    def best(found: Mapping[str, float], peers: list[str]) -> str:
        of_peers = [ratio for name, ratio in found.items() if name in peers]
        return f"{min(of_peers):.2f}x" if of_peers else ""

    rows = [
        [
            f"{_BAR}{of}",
            *(best(ratios(report, name, figure, is_better_high), report.peers()) for name in work),
        ]
    ]
    in_driver = report.peers(in_process=True)
    in_process = [best(ratios_in_process(report, name, figure, is_better_high), in_driver) for name in work]
    if any(in_process):
        rows.append([f"{_IN_PROCESS}{of}", *in_process])
    return rows


def _print_tries(report: Report) -> None:
    """Prints the spread of the tries, if any cell has more than one."""
    if all(len(cell.tries) == 1 for cell in report.cells):
        return

    def text(engine: str, work: str) -> str:
        cell = report.cell(engine, work)
        if cell is None:
            return ""
        return f"{cell.spread:.2f} ({len(cell.undisturbed)}/{len(cell.tries)})"

    rows = [[engine, *(text(engine, work) for work in report.columns)] for engine in report.rows()]
    title = "Fastest / slowest of the tries that count (undisturbed tries / all)"
    print_table(title, ("engine", *report.columns), rows)


def document(report: Report) -> dict[str, Any]:
    return {
        "weft": __version__,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": report.machine,
        "model": report.model,
        "engines": {engine.name: engine.version or f"weft {__version__}" for engine in report.engines},
        "problems": dict(report.problems),
        "speed": {
            "best": None if report.best is None else dataclasses.asdict(report.best),
            "reading_share": READING_SHARE,
            "products_share": PRODUCTS_SHARE,
        },
        "cells": [_cell_document(cell) for cell in report.cells],
        "ratios": _ratios_document(report, ratios),
        "ratios_in_process": _ratios_document(report, ratios_in_process),
    }


def _ratios_document(
    report: Report, compare: Callable[[Report, str, Figure, bool], dict[str, float]]
) -> dict[str, Any]:
    by_figure = {
        name: {
            work: compare(report, work, attrgetter(name), name == "tokens_per_second") for work in report.work
        }
        for name in ("tokens_per_second", "first_token_p99", "gap_p99", "peak_rss")
    }
    return {**by_figure, "start": compare(report, START, attrgetter("seconds"), False)}


def _cell_document(cell: Cell) -> dict[str, Any]:
    """A cell for the JSON report: the try that counts, and a short form of every try."""
    tries = [
        {
            **{
                name: getattr(one, name)
                for name in ("round", "attempt", "seconds", "tokens_per_second", "others")
            },
            "speed": None if one.speed is None else dataclasses.asdict(one.speed),
            "troubles": one.troubles(cell.best),
        }
        for one in cell.tries
    ]
    return {**dataclasses.asdict(cell.figure), "is_disturbed": cell.is_disturbed, "tries": tries}


def write_report(report: Report, path: Path) -> None:
    write_text(path, json.dumps(document(report), indent=1) + "\n")


def draw(report: Report, path: Path, files: PeerFiles) -> None:
    """Draws a bar chart, with matplotlib in its own environment: weft does not depend on it."""
    columns = []
    for work in report.work:
        found = [cell for name in report.rows() if (cell := report.cell(name, work))]
        bars = [
            {"engine": cell.engine, "value": cell.figure.tokens_per_second, "is_disturbed": cell.is_disturbed}
            for cell in found
            if cell.figure.tokens_per_second is not None
        ]
        columns.append({"name": work, "bars": bars})
    chart = {"title": f"{report.model} on {report.machine}", "engines": report.rows(), "columns": columns}
    command = (files.python(PLOT), str(script("plot_peers")), str(path))
    log = files.log("plot")
    with log.open("wb") as output:
        done = subprocess.run(
            command, input=json.dumps(chart).encode(), stdout=output, stderr=output, env=clean_environment()
        )
    if done.returncode:
        raise PeerError(f"the chart could not be drawn; see {log}")
