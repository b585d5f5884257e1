"""What a run of `weft bench peers` says: tables and ratios for a person, JSON for programs, and a bar chart."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from weft import __version__
from weft.bench.peers_engines import OURS, Engine, Workshop
from weft.bench.peers_environment import PLOT, PeerError, clean_environment, script
from weft.bench.report import print_line, print_table
from weft.bench.serve_machine import DISTURBED
from weft.bench.serve_report import write_text

START = "start"
_MIB = 1 << 20


@dataclass(frozen=True)
class Cell:
    """One engine on one workload, or its start. Times are in seconds, memory in bytes."""

    engine: str
    work: str
    attempt: int
    seconds: float
    """Of the work from the first request to the last token; of a start, to the first token."""
    others: float | None
    """The share of the machine's CPU time that went to neither the engine nor the bench."""
    loudest: tuple[str, ...] = ()
    tokens_per_second: float | None = None
    """Output tokens, over all the time, that of the prompts included."""
    output_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompts, where the engine says so."""
    first_token_p50: float | None = None
    first_token_p99: float | None = None
    gap_p50: float | None = None
    gap_p99: float | None = None
    peak_rss: int | None = None
    pss: int | None = None

    @property
    def is_disturbed(self) -> bool:
        return (self.others or 0.0) > DISTURBED

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Cell:
        return cls(**{**document, "loudest": tuple(document["loudest"])})

    def line(self) -> str:
        """One line while the bench runs."""
        said = (
            f"{self.seconds:.2f} s"
            if self.tokens_per_second is None
            else f"{self.tokens_per_second:.1f} tokens/s"
        )
        if self.is_disturbed:
            who = f" ({', '.join(self.loudest)})" if self.loudest else ""
            said += f", DISTURBED: others used {self.others or 0.0:.0%} of the machine{who}"
        return f"{self.work:12} {self.engine:32} {said}"


@dataclass(frozen=True)
class Report:
    machine: str
    model: str
    engines: tuple[Engine, ...]
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]
    problems: Mapping[str, str]

    def cell(self, engine: str, work: str) -> Cell | None:
        return next((cell for cell in self.cells if (cell.engine, cell.work) == (engine, work)), None)

    @property
    def work(self) -> list[str]:
        return [name for name in self.columns if name != START]

    def rows(self) -> list[str]:
        """The engines that have any figure."""
        return [
            engine.name for engine in self.engines if any(cell.engine == engine.name for cell in self.cells)
        ]


Figure = Callable[[Cell], float | None]


def ratios(report: Report, work: str, figure: Figure, is_better_high: bool) -> dict[str, float]:
    """How many times better weft is than each other engine; under 1 it is worse."""
    ours = report.cell(OURS, work)
    mine = figure(ours) if ours else None
    found = {}
    for name in report.rows():
        cell = report.cell(name, work)
        theirs = figure(cell) if cell and name != OURS else None
        if mine and theirs:
            found[name] = mine / theirs if is_better_high else theirs / mine
    return found


def print_report(report: Report) -> None:
    print_line(f"{report.machine}; {report.model}")
    _print(
        report,
        "Output tokens/s, prefill included",
        report.work,
        lambda cell: cell.tokens_per_second,
        "{:,.1f}",
        True,
    )
    for title, text in (
        ("First token p50 / p99, s", _pair("first_token_p50", "first_token_p99", 1.0, "{:.2f}")),
        ("Gap between tokens p50 / p99, ms", _pair("gap_p50", "gap_p99", 1000.0, "{:.1f}")),
        ("Peak resident memory, MiB / shared pages once", _pair("peak_rss", "pss", 1 / _MIB, "{:,.0f}")),
    ):
        _print_text(report, title, text)
    if START in report.columns:
        _print(
            report,
            "Start to first token (second start), s",
            [START],
            lambda cell: cell.seconds,
            "{:.2f}",
            False,
        )
    if any(cell.is_disturbed for cell in report.cells):
        print_line(f"* others used more than {DISTURBED:.0%} of the machine each time it was measured")
    for name, problem in report.problems.items():
        print_line(f"{name}: not measured, or not in full: {problem}")


def _print(
    report: Report, title: str, work: list[str], figure: Figure, form: str, is_better_high: bool
) -> None:
    """A table of one figure, the ratio to weft beside each, and the best of the others below."""
    by_work = {name: ratios(report, name, figure, is_better_high) for name in work}

    def text(engine: str, name: str) -> str:
        cell = report.cell(engine, name)
        value = figure(cell) if cell else None
        if cell is None or value is None:
            return ""
        ratio = by_work[name].get(engine)
        return form.format(value) + ("*" if cell.is_disturbed else "") + (f" ({ratio:.2f}x)" if ratio else "")

    rows = [[engine, *(text(engine, name) for name in work)] for engine in report.rows()]
    best = [f"{min(found.values()):.2f}x" if (found := by_work[name]) else "" for name in work]
    print_table(
        f"{title} (weft is so many times better)", ("engine", *work), [*rows, ["weft / best peer", *best]]
    )


def _print_text(report: Report, title: str, text: Callable[[Cell], str]) -> None:
    def of(engine: str, work: str) -> str:
        cell = report.cell(engine, work)
        return text(cell) if cell else ""

    rows = [[engine, *(of(engine, work) for work in report.work)] for engine in report.rows()]
    if report.work:
        print_table(title, ("engine", *report.work), rows)


def _pair(first: str, second: str, scale: float, form: str) -> Callable[[Cell], str]:
    def text(cell: Cell) -> str:
        values = (getattr(cell, first), getattr(cell, second))
        return " / ".join("-" if value is None else form.format(scale * value) for value in values)

    return text


def document(report: Report) -> dict[str, Any]:
    return {
        "weft": __version__,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": report.machine,
        "model": report.model,
        "engines": {engine.name: engine.version or f"weft {__version__}" for engine in report.engines},
        "problems": dict(report.problems),
        "cells": [{**dataclasses.asdict(cell), "is_disturbed": cell.is_disturbed} for cell in report.cells],
        "ratios": {
            "tokens_per_second": {
                work: ratios(report, work, lambda cell: cell.tokens_per_second, True) for work in report.work
            },
            "first_token_p99": {
                work: ratios(report, work, lambda cell: cell.first_token_p99, False) for work in report.work
            },
            "gap_p99": {work: ratios(report, work, lambda cell: cell.gap_p99, False) for work in report.work},
            "peak_rss": {
                work: ratios(report, work, lambda cell: cell.peak_rss, False) for work in report.work
            },
            "start": ratios(report, START, lambda cell: cell.seconds, False),
        },
    }


def write_report(report: Report, path: Path) -> None:
    write_text(path, json.dumps(document(report), indent=1) + "\n")


def draw(report: Report, path: Path, shop: Workshop) -> None:
    """A bar chart, drawn by matplotlib in an environment of its own: weft itself needs no library for plots."""
    columns = []
    for work in report.work:
        found = [cell for name in report.rows() if (cell := report.cell(name, work))]
        bars = [
            {"engine": cell.engine, "value": cell.tokens_per_second, "is_disturbed": cell.is_disturbed}
            for cell in found
            if cell.tokens_per_second is not None
        ]
        columns.append({"name": work, "bars": bars})
    chart = {"title": f"{report.model} on {report.machine}", "engines": report.rows(), "columns": columns}
    command = (shop.python(PLOT), str(script("plot_peers")), str(path))
    log = shop.log("plot")
    with log.open("wb") as output:
        done = subprocess.run(
            command, input=json.dumps(chart).encode(), stdout=output, stderr=output, env=clean_environment()
        )
    if done.returncode:
        raise PeerError(f"the chart could not be drawn; see {log}")
