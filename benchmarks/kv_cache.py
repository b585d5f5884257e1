"""`python -m benchmarks kv-cache`: compares a two-tier KV cache, with 8 and 4 bits, with a full one.

Four parts, each with a criterion: contexts that fit into the same memory, perplexity, facts retrieved from long
contexts, and decode speed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.kv_cache_admission import Admission, admit
from benchmarks.kv_cache_kinds import FULL, Kind, Setup, kinds
from benchmarks.kv_cache_quality import Reading, Retrieval, answer_facts, evaluate, make_facts, score_text
from benchmarks.kv_cache_speed import Speed, decode_speed
from benchmarks.peers_environment import draw_chart
from benchmarks.perplexity import make_windows
from weft import __version__
from weft.backends import registry
from weft.bench.gpu_work import chosen
from weft.bench.report import Check, machine, print_checks, print_line, print_table
from weft.cli.machine import gpus
from weft.loading.checkpoint import open_checkpoint
from weft.loading.pull import pull
from weft.text.model_text import open_tokenizer

PARTS = ("admission", "perplexity", "retrieval", "speed")
MORE_CONTEXTS = {"8 bits": 1.8, "4 bits": 3.0}
"""Required number of contexts, relative to a full-precision cache with 16 bits per value."""
FULL_BITS = {"cuda": 16, "cpu": 12}
"""Bits per value of the full-precision cache, by device."""
LARGEST_RISE = {"8 bits": 0.002, "4 bits": 0.015}
LEAST_FOUND = 0.98
LEAST_SPEED = 1.0
WINDOW = 2048
"""Tokens of a window of the perplexity part."""
FACT_LENGTHS = (1536, 3072)
"""Shortest and longest context of the retrieval part, in tokens."""


@dataclass(frozen=True)
class Options:
    """Sizes of the measurements."""

    context: int = 4096
    """Tokens of a context in the admission and speed parts."""
    contexts: int = 16
    """The memory of the admission part is as large as this many contexts in a full-precision cache."""
    batch: int = 16
    """Batch size of the speed part."""
    windows: int = 4
    facts: int = 100
    tail_length: int = 256
    confirm: bool = False
    """Compute the contexts of the admission part on the real backend, after planning them."""


@dataclass
class Report:
    """The measurements so far. Each list has an entry per kind of cache."""

    machine: str
    model: str
    device: str
    options: Options
    admissions: list[Admission] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    retrievals: list[Retrieval] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)

    @property
    def checks(self) -> list[Check]:
        return [
            *_check_admissions(self.admissions, FULL_BITS[self.device] / 16),
            *_check_readings(self.readings),
            *_check_retrievals(self.retrievals),
            *_check_speeds(self.speeds),
        ]


def main(
    model: str,
    *,
    device: str,
    threads: int | None,
    part: Sequence[str],
    text: Path | None,
    options: Options,
    json_path: Path | None,
    plot_path: Path | None,
) -> bool:
    """Measures the chosen parts, prints the report, and writes it to the given files. Returns True if every criterion was
    met."""
    parts = chosen(list(part), PARTS, "--part", default=PARTS)
    device = registry.chosen(device, {"threads": threads})
    caches = kinds(options.tail_length)
    # Reject invalid options before anything is downloaded or run.
    for cache in caches:
        cache.pool_for(1, options.context)
    checkpoint = open_checkpoint(pull(model))
    setup = Setup(checkpoint, device, threads)
    where = "; ".join([*((gpus() or []) if device == "cuda" else []), machine()])
    report = Report(where, checkpoint.path.name, device, options)
    print_line(f"{where}; {checkpoint.path.name}, {checkpoint.stored_as}; weft {__version__} on {device}")
    for name in parts:
        measure(name, setup, caches, report, text)
        if json_path is not None:
            # Written after every part, so that an interrupted run keeps its results.
            json_path.write_text(json.dumps(document(report), indent=2) + "\n")
    print_report(report)
    if plot_path is not None:
        draw_chart("plot_kv_cache", document(report), plot_path)
    return all(check.is_met for check in report.checks)


def measure(part: str, setup: Setup, caches: Sequence[Kind], report: Report, text: Path | None) -> None:
    """Measures one part with every kind of cache. Prints each figure as soon as it is known."""
    options = report.options
    if part == "admission":
        for kind in caches:
            memory = report.admissions[0].memory if report.admissions else None
            found = admit(
                setup,
                kind,
                options.context,
                contexts=options.contexts,
                memory=memory,
                confirm=options.confirm,
            )
            report.admissions.append(found)
            how = "planned" if found.seconds is None else f"computed in {found.seconds:.0f} s"
            print_line(
                f"admission, {kind.name}: {found.contexts} contexts of {found.context:,} tokens in "
                f"{found.memory / 2**20:,.0f} MiB, {how}; the shortest had {found.shortest:,} tokens"
            )
    elif part == "perplexity":
        pieces = make_windows(open_tokenizer(setup.checkpoint), text, WINDOW, options.windows)
        report.readings += score_text(setup, caches, pieces)
        for reading in report.readings:
            print_line(f"perplexity, {reading.kind}: {reading.perplexity:.4f}")
    elif part == "retrieval":
        tokenizer = open_tokenizer(setup.checkpoint)
        facts = make_facts(tokenizer, options.facts, FACT_LENGTHS, options.tail_length)
        answers: dict[str, list[str]] = {}
        for kind in caches:
            answers[kind.name] = answer_facts(setup, kind, tokenizer, facts)
            report.retrievals.append(evaluate(kind, facts, answers[kind.name], answers[FULL]))
            print_line(f"retrieval, {kind.name}: {report.retrievals[-1].found} of {len(facts)} facts")
    else:
        for kind in caches:
            speed = decode_speed(setup, kind, batch=options.batch, context=options.context)
            report.speeds.append(speed)
            print_line(f"speed, {kind.name}: {speed.tokens_per_second:,.1f} tokens/s")


# --- criteria ---------------------------------------------------------------------------------------------------------


def _check_admissions(found: Sequence[Admission], share: float) -> list[Check]:
    """Compares each cache with found[0], the full-precision cache. MORE_CONTEXTS assumes that this one has 16 bits per
    value. `share` corrects for its real size on this device: its bits per value, divided by 16."""
    return [
        Check(
            f"{one.kind}: contexts of {one.context:,} tokens at once, relative to a full cache",
            f"{one.contexts} / {found[0].contexts} = {one.contexts / found[0].contexts:.2f}",
            f"at least {MORE_CONTEXTS[one.kind] * share:g}",
            one.contexts >= MORE_CONTEXTS[one.kind] * share * found[0].contexts,
        )
        for one in found[1:]
    ]


def _check_readings(found: Sequence[Reading]) -> list[Check]:
    return [
        Check(
            f"{one.kind}: perplexity above that of a full cache",
            f"{100 * one.difference.share:+.2f}% (± {100 * one.difference.error:.2f})",
            f"at most {100 * LARGEST_RISE[one.kind]:g}%",
            one.difference.share <= LARGEST_RISE[one.kind],
        )
        for one in found[1:]
    ]


def _check_retrievals(found: Sequence[Retrieval]) -> list[Check]:
    return [
        Check(
            f"{one.kind}: facts found, of those found with a full cache",
            f"{one.kept} of {one.expected} = {one.share:.1%}",
            f"at least {LEAST_FOUND:.0%}",
            one.share >= LEAST_FOUND,
        )
        for one in found[1:]
    ]


def _check_speeds(found: Sequence[Speed]) -> list[Check]:
    return [
        Check(
            f"{one.kind}: decode speed at batch {one.batch} with {one.context:,} tokens, relative to a full cache",
            f"{one.tokens_per_second / found[0].tokens_per_second:.2f}",
            f"at least {LEAST_SPEED:.1f}",
            one.tokens_per_second >= LEAST_SPEED * found[0].tokens_per_second,
        )
        for one in found[1:]
    ]


# --- report ------------------------------------------------------------------------------------------------------


def print_report(report: Report) -> None:
    columns: dict[str, dict[str, str]] = {}
    if report.admissions:
        first = report.admissions[0]
        columns[f"contexts of {first.context:,} in {first.memory / 2**20:,.0f} MiB"] = {
            one.kind: str(one.contexts) for one in report.admissions
        }
    if report.readings:
        columns[f"perplexity of {report.readings[0].scored_tokens:,} tokens"] = {
            one.kind: f"{one.perplexity:.4f}" for one in report.readings
        }
    if report.retrievals:
        columns[f"of {report.retrievals[0].asked} facts"] = {
            one.kind: str(one.found) for one in report.retrievals
        }
    if report.speeds:
        first_speed = report.speeds[0]
        columns[f"tokens/s, batch {first_speed.batch} over {first_speed.context:,}"] = {
            one.kind: f"{one.tokens_per_second:,.1f}" for one in report.speeds
        }
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    rows = [(name, *(column[name] for column in columns.values())) for name in names]
    title = f"Full KV cache, and two tiers with a tail of {report.options.tail_length} tokens"
    print_table(title, ("cache", *columns), rows)
    print_checks(report.checks)


def document(report: Report) -> dict[str, Any]:
    share = FULL_BITS[report.device] / 16
    required = {kind: contexts * share for kind, contexts in MORE_CONTEXTS.items()}
    checks = [asdict(check) for check in report.checks]
    return {"weft": __version__, **asdict(report), "required_admissions": required, "checks": checks}
