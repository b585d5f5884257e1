"""Shared by all benchmarks: quantiles, checks, and printed tables."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from weft.errors import InvalidRequestError


@dataclass(frozen=True)
class Check:
    """A criterion, the measured value, the required value (the bar), and whether it is met."""

    criterion: str
    measured: str
    bar: str
    is_met: bool


def quantile(values: Iterable[float], share: float) -> float:
    """A quantile: the smallest value v such that at least the fraction `share` of the values are at most v."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def machine() -> str:
    """Processor, load and interpreter: times cannot be compared without them."""
    processor = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        processor = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    return f"{processor}, {load}, {platform.python_implementation()} {platform.python_version()}"


def print_json(document: dict[str, Any]) -> None:
    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.asdict(value)
        raise TypeError(f"{type(value).__name__} cannot be written as JSON")

    print(json.dumps(document, indent=2, default=plain))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table. Its first column is text, the others are figures."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    _console().print(table)


def print_checks(checks: Iterable[Check]) -> None:
    table = Table(title="Criteria", title_justify="left")
    for column in ("criterion", "measured", "required", "verdict"):
        table.add_column(column, overflow="fold")
    for check in checks:
        verdict = "[green]met[/]" if check.is_met else "[red]missed[/]"
        table.add_row(check.criterion, check.measured, check.bar, verdict)
    _console().print(table)


def print_line(text: str) -> None:
    _console().print(text, highlight=False)


def write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise InvalidRequestError(f"cannot write {path}: {error.strerror or error}") from error


def _console() -> Console:
    """A console. Its width is fixed if the output is not a terminal, so that tables in files and logs are not cut."""
    console = Console()
    return console if console.is_terminal else Console(width=140)
