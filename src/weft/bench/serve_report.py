"""The report of `weft bench serve`: tables for the terminal, a JSON document, and the notes in both.

Notes are warnings about the figures: failures, other load on the machine, how tokens were counted.
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
from weft.bench.report import machine, print_line, print_table, write_text
from weft.bench.serve_measure import Distribution, Record, Summary, describe_sweep
from weft.bench.serve_run import PhaseResult, Report
from weft.terminal import printable

LATE = 0.005
"""A note is added if the load generator sends requests later than this, in seconds at p99."""
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
    """Escapes text from a server or a file, so that it can control neither the terminal nor rich's markup."""
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
            values: Distribution | None = getattr(phase.summary, field)
            if values is not None:
                figures = (values.p50, values.p90, values.p99, values.max, values.mean)
                rows.append(
                    (name, label, *(f"{1000 * value:,.1f}" for value in figures), f"{values.count:,}")
                )
                name = ""
    return rows


def describe_targets(report: Report) -> str:
    targets = report.targets
    parts = (("first token", targets.first_token), ("gap", targets.gap), ("end to end", targets.end_to_end))
    return ", ".join(f"{name} {1000 * value:g} ms" for name, value in parts if value is not None)


def notes(report: Report) -> list[str]:
    """Warnings about the figures, the most serious first."""
    collected = []
    for phase in report.phases:
        collected += [f"{phase.name}: {note}" for note in _phase_notes(phase)]
    if report.phases and all(phase.machine.server is None for phase in report.phases):
        collected.append(
            "The server's processes were not found on this machine: load on its machine is not measured."
        )
    return collected + describe_sweep(report.sweep)


def _phase_notes(phase: PhaseResult) -> list[str]:
    summary, use = phase.summary, phase.machine
    collected = []
    for kind, count in summary.failures.items():
        detail = next(r.failure_detail for r in phase.records if r.failure_kind == kind)
        collected.append(
            f"{count} of {summary.requests} failed, {kind}: {' '.join((detail or '').split())[:160]}"
        )
    if phase.reconnects:
        collected.append(
            f"{phase.reconnects} requests were sent again, because the server had closed their connection"
        )
    if use.is_disturbed:
        names = f" ({', '.join(use.loudest)})" if use.loudest else ""
        collected.append(
            f"DISTURBED: other processes used {use.others:.2f} of {use.cores} cores{names}, load average {use.load_average:.1f}; "
            "measure again on an idle machine"
        )
    if use.client_is_busy:
        collected.append(f"the client itself used {use.client:.0%} of a core: it may limit the figures")
    if summary.late_start is not None and summary.late_start.p99 > LATE:
        collected.append(
            f"requests were sent late, {1000 * summary.late_start.p99:.1f} ms at p99: the client got too little CPU time"
        )
    due = [record.due for record in phase.records if record.due is not None]
    if phase.rate is not None and due and summary.end_to_end is not None:
        span = max(due) - min(due)
        if span < 2 * summary.end_to_end.p50:
            collected.append(
                f"requests arrived for {span:.1f} s and an answer takes {summary.end_to_end.p50:.1f} s: "
                "start and end distort the throughput; send more requests"
            )
    return collected + _counting_notes(summary)


def _counting_notes(summary: Summary) -> list[str]:
    collected = []
    if summary.short_answers:
        collected.append(f"{summary.short_answers} of {summary.answered} answers were shorter than requested")
    if summary.answered and not summary.tokens_from_usage:
        collected.append("the server reports no token counts (usage): each chunk was counted as one token")
    elif summary.tokens_per_chunk > 1.05:
        collected.append(
            f"a chunk has {summary.tokens_per_chunk:.2f} tokens on average: gaps are between chunks"
        )
    if summary.cached_tokens:
        collected.append(
            f"{summary.cached_tokens / summary.prompt_tokens:.0%} of the prompt tokens came from a cache"
        )
    return collected


def document(report: Report) -> dict[str, Any]:
    """All measurements, in seconds, including the gaps of every request."""
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
                "requests": [_record_fields(record) for record in phase.records],
            }
            for phase in report.phases
        ],
    }


def write_json(report: Report, path: Path) -> None:
    write_text(path, json.dumps(document(report)) + "\n")


def _record_fields(record: Record) -> dict[str, Any]:
    fields = {name: value for name, value in dataclasses.asdict(record).items() if name != "chunk_times"}
    first = record.first_token
    return {
        **{name: round(value, 6) if isinstance(value, float) else value for name, value in fields.items()},
        "first_token": None if first is None else round(first, 6),
        "gaps": [round(gap, 6) for gap in record.gaps],
    }
