"""`weft simulate-check`: runs scenarios with a progress bar and prints what they covered."""

from __future__ import annotations

import dataclasses

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from weft.simulation.check import Report, check


def simulate_check_command(scenarios: int, seed: int, jobs: int) -> None:
    console = Console()
    columns = (
        TextColumn("simulating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=scenarios)
        report = check(scenarios, seed, jobs, lambda count: bar.advance(task, count))
    _print(console, report, jobs)


def _print(console: Console, report: Report, jobs: int) -> None:
    speed = report.scenarios / report.seconds
    console.print(
        f"{report.scenarios:,} scenarios held every invariant: {report.seconds:.1f} s, "
        f"{speed:,.0f} a second on {jobs} {'process' if jobs == 1 else 'processes'}"
    )
    covered = (f"{name.replace('_', ' ')} {value:,}" for name, value in _fields(report))
    console.print("covered: " + ", ".join(covered))


def _fields(report: Report) -> list[tuple[str, int]]:
    return [(f.name, getattr(report.outcome, f.name)) for f in dataclasses.fields(report.outcome)]
