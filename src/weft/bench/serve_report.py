"""What a run of `weft bench serve` says: tables for a person, a JSON document for programs, and the notes in both.

Notes are what a reader has to know before quoting a figure: failures, other work on the machine, how tokens were counted.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.markup import escape

from weft import __version__
from weft.bench.report import machine, print_line, print_table
from weft.bench.serve_measure import Distribution, Record, Summary, describe_sweep
from weft.bench.serve_run import PhaseResult, Report
from weft.errors import InvalidRequestError
from weft.terminal import printable

LATE = 0.005
"""Seconds by which the generator may be late at p99 before it is said."""
MEASURES = (
    ("first token", "first_token"),
    ("gap", "gap"),
    ("per token", "per_token"),
    ("end to end", "end_to_end"),
)


def print_report(report: Report) -> None:
    print_line(_plain_text(f"{report.url}{report.dialect.describe()}"))
    has_targets = report.targets.is_given
    print_table(
        "Throughput" + (f", and goodput within {describe_targets(report)}" if has_targets else ""),
        throughput_columns(has_targets),
        [_plain_row(throughput_row(phase, has_targets)) for phase in report.phases],
    )
    print_table(
        "Latency, ms",
        ("work", "", "p50", "p90", "p99", "max", "mean", "count"),
        map(_plain_row, latency_rows(report.phases)),
    )
    for note in notes(report):
        print_line(_plain_text(note))


def _plain_text(text: str) -> str:
    """What a server or a file wrote, without effect on a terminal or on how rich writes."""
    return escape(printable(text))


def _plain_row(row: Sequence[str]) -> list[str]:
    return [_plain_text(cell) for cell in row]


def throughput_columns(has_targets: bool) -> tuple[str, ...]:
    columns = ("work", "requests", "failed", "seconds", "requests/s", "output tokens/s", "prompt tokens/s")
    return (*columns, "within targets", "goodput, requests/s") if has_targets else columns


def throughput_row(phase: PhaseResult, has_targets: bool) -> tuple[str, ...]:
    s = phase.summary
    row = (
        phase.name,
        f"{s.requests:,}",
        f"{s.requests - s.answered:,}",
        f"{s.seconds:.2f}",
        f"{s.requests_per_second:.2f}",
        f"{s.output_tokens_per_second:,.1f}",
        f"{s.prompt_tokens_per_second:,.1f}",
    )
    if not has_targets:
        return row
    return (*row, f"{s.good_share or 0.0:.1%}", f"{s.goodput or 0.0:.2f}")


def latency_rows(phases: Sequence[PhaseResult]) -> list[tuple[str, ...]]:
    rows = []
    for phase in phases:
        name = phase.name
        for label, field in MEASURES:
            found: Distribution | None = getattr(phase.summary, field)
            if found is not None:
                figures = (found.p50, found.p90, found.p99, found.max, found.mean)
                rows.append((name, label, *(f"{1000 * value:,.1f}" for value in figures), f"{found.count:,}"))
                name = ""
    return rows


def describe_targets(report: Report) -> str:
    targets = report.targets
    parts = (("first token", targets.first_token), ("gap", targets.gap), ("end to end", targets.end_to_end))
    return ", ".join(f"{name} {1000 * value:g} ms" for name, value in parts if value is not None)


def notes(report: Report) -> list[str]:
    """What has to be known about the figures, most serious first."""
    said = []
    for phase in report.phases:
        said += [f"{phase.name}: {note}" for note in _phase_notes(phase)]
    if report.phases and all(phase.machine.server is None for phase in report.phases):
        said.append(
            "The server's processes were not found on this machine: load on its own machine is not seen."
        )
    return said + describe_sweep(report.sweep)


def _phase_notes(phase: PhaseResult) -> list[str]:
    summary, use = phase.summary, phase.machine
    said = []
    for kind, count in summary.failures.items():
        detail = next(r.failure_detail for r in phase.records if r.failure_kind == kind)
        said.append(f"{count} of {summary.requests} failed, {kind}: {' '.join((detail or '').split())[:160]}")
    if phase.reconnects:
        said.append(
            f"{phase.reconnects} requests found their connection closed by the server and were sent again"
        )
    if use.is_disturbed:
        who = f" ({', '.join(use.loudest)})" if use.loudest else ""
        said.append(
            f"DISTURBED: others used {use.others:.2f} of {use.cores} cores{who}, load average {use.load_average:.1f}; "
            "measure again on a quiet machine"
        )
    if use.client_is_busy:
        said.append(f"the client itself used {use.client:.0%} of a core: the figures may be its own")
    if summary.late_start is not None and summary.late_start.p99 > LATE:
        said.append(
            f"requests were sent late, {1000 * summary.late_start.p99:.1f} ms at p99: the client had too little CPU time"
        )
    due = [record.due for record in phase.records if record.due is not None]
    if phase.rate is not None and due and summary.end_to_end is not None:
        span = max(due) - min(due)
        if span < 2 * summary.end_to_end.p50:
            said.append(
                f"requests arrived for {span:.1f} s and an answer takes {summary.end_to_end.p50:.1f} s: "
                "starting and stopping weigh on the throughput, ask for more requests"
            )
    return said + _counting_notes(summary)


def _counting_notes(summary: Summary) -> list[str]:
    said = []
    if summary.short_answers:
        said.append(f"{summary.short_answers} of {summary.answered} answers were shorter than asked")
    if summary.answered and not summary.tokens_from_usage:
        said.append("the server does not count tokens (no usage): each chunk was taken for one")
    elif summary.tokens_per_chunk > 1.05:
        said.append(
            f"a chunk carries {summary.tokens_per_chunk:.2f} tokens on average: gaps are between chunks"
        )
    if summary.cached_tokens:
        said.append(
            f"{summary.cached_tokens / summary.prompt_tokens:.0%} of the prompt tokens came from a cache"
        )
    return said


def document(report: Report) -> dict[str, Any]:
    """Everything that was measured, in seconds, down to the gaps of every request."""
    return {
        "weft": __version__,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "url": report.url,
        "requests": dataclasses.asdict(report.dialect),
        "targets": dataclasses.asdict(report.targets),
        "notes": notes(report),
        "phases": [
            {
                "name": phase.name,
                "rate": phase.rate,
                "summary": dataclasses.asdict(phase.summary),
                "reconnects": phase.reconnects,
                "machine": {**dataclasses.asdict(phase.machine), "is_disturbed": phase.machine.is_disturbed},
                "requests": [_plain(record) for record in phase.records],
            }
            for phase in report.phases
        ],
    }


def write_json(report: Report, path: Path) -> None:
    write_text(path, json.dumps(document(report)) + "\n")


def write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise InvalidRequestError(f"cannot write {path}: {error.strerror}") from error


def _plain(record: Record) -> dict[str, Any]:
    fields = {name: value for name, value in dataclasses.asdict(record).items() if name != "chunk_times"}
    first = record.first_token
    return {
        **{name: round(value, 6) if isinstance(value, float) else value for name, value in fields.items()},
        "first_token": None if first is None else round(first, 6),
        "gaps": [round(gap, 6) for gap in record.gaps],
    }
