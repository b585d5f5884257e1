"""`python -m benchmarks kv-cache`: what a two-tier KV cache gains and costs against the full one, in 8 and in 4 bits.

Four parts: contexts that run at the same time in one memory, the perplexity of text, facts read back out of long contexts,
and the speed of decoding. Each has its bar.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.kv_cache_admission import Admission, admit
from benchmarks.kv_cache_kinds import FULL, Kind, Setup, kinds
from benchmarks.kv_cache_quality import Reading, Retrieval, ask, judge, make_facts, read_text
from benchmarks.kv_cache_speed import Speed, decode_speed
from benchmarks.peers_environment import (
    PLOT,
    PeerError,
    clean_environment,
    peers_directory,
    python_of,
    script,
)
from benchmarks.perplexity import cut
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
"""Times those of a full cache of 16 bits a value."""
FULL_BITS = {"cuda": 16, "cpu": 12}
LARGEST_RISE = {"8 bits": 0.002, "4 bits": 0.015}
LEAST_FOUND = 0.98
LEAST_SPEED = 1.0
WINDOW = 2048
"""Tokens of a window of text."""
FACT_LENGTHS = (1536, 3072)
"""Tokens of the contexts that facts are in."""


@dataclass(frozen=True)
class Options:
    """How much is measured."""

    context: int = 4096
    """Tokens of a context, for admission and speed."""
    contexts: int = 16
    """Of admission: so many take all of the memory with a full cache."""
    batch: int = 16
    """Of speed."""
    windows: int = 4
    facts: int = 100
    tail_length: int = 256
    confirm: bool = False
    """The contexts of admission are computed too, not planned alone."""


@dataclass
class Report:
    """What was measured so far, each with an entry for each kind of cache."""

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
    """Measures, prints and writes; whether every bar was met."""
    parts = chosen(list(part), PARTS, "--part", default=PARTS)
    device = registry.chosen(device, {"threads": threads})
    caches = kinds(options.tail_length)
    # Wrong options are found before anything is fetched or run for them.
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
            # After every part: a run that is cut off leaves what it had.
            json_path.write_text(json.dumps(document(report), indent=2) + "\n")
    print_report(report)
    if plot_path is not None:
        draw(report, plot_path)
    return all(check.is_met for check in report.checks)


def measure(part: str, setup: Setup, caches: Sequence[Kind], report: Report, text: Path | None) -> None:
    """One part, with every kind of cache; a line tells each figure as soon as it is known."""
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
                f"{found.memory / 2**20:,.0f} MiB, {how}; the shortest had {found.shortest:,}"
            )
    elif part == "perplexity":
        pieces = cut(open_tokenizer(setup.checkpoint), text, WINDOW, options.windows)
        report.readings += read_text(setup, caches, pieces)
        for reading in report.readings:
            print_line(f"perplexity, {reading.kind}: {reading.perplexity:.4f}")
    elif part == "retrieval":
        tokenizer = open_tokenizer(setup.checkpoint)
        facts = make_facts(tokenizer, options.facts, FACT_LENGTHS, options.tail_length)
        answers: dict[str, list[str]] = {}
        for kind in caches:
            answers[kind.name] = ask(setup, kind, tokenizer, facts)
            report.retrievals.append(judge(kind, facts, answers[kind.name], answers[FULL]))
            print_line(f"retrieval, {kind.name}: {report.retrievals[-1].found} of {len(facts)} facts")
    else:
        for kind in caches:
            speed = decode_speed(setup, kind, batch=options.batch, context=options.context)
            report.speeds.append(speed)
            print_line(f"speed, {kind.name}: {speed.tokens_per_second:,.1f} tokens/s")


# --- bars ---------------------------------------------------------------------------------------------------------


def _check_admissions(found: Sequence[Admission], share: float) -> list[Check]:
    """A full cache takes this share of the bytes of one of 16 bits a value."""
    return [
        Check(
            f"{one.kind}: contexts of {one.context:,} tokens at once, over those of a full cache",
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
            f"{one.kind}: facts found, of those that a full cache finds",
            f"{one.kept} of {one.expected} = {one.share:.1%}",
            f"at least {LEAST_FOUND:.0%}",
            one.share >= LEAST_FOUND,
        )
        for one in found[1:]
    ]


def _check_speeds(found: Sequence[Speed]) -> list[Check]:
    return [
        Check(
            f"{one.kind}: decode speed at batch {one.batch} over {one.context:,} tokens, over a full cache's",
            f"{one.tokens_per_second / found[0].tokens_per_second:.2f}",
            f"at least {LEAST_SPEED:.1f}",
            one.tokens_per_second >= LEAST_SPEED * found[0].tokens_per_second,
        )
        for one in found[1:]
    ]


# --- telling ------------------------------------------------------------------------------------------------------


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
    title = f"KV cache in full, and in two tiers with a tail of {report.options.tail_length} tokens"
    print_table(title, ("cache", *columns), rows)
    print_checks(report.checks)


def document(report: Report) -> dict[str, Any]:
    return {"weft": __version__, **asdict(report), "checks": [asdict(check) for check in report.checks]}


def draw(report: Report, path: Path) -> None:
    """A chart of every part, drawn by matplotlib in the environment that `python -m benchmarks peers` draws with."""
    home = peers_directory()
    home.mkdir(parents=True, exist_ok=True)
    command = (str(python_of(PLOT, home, print_line)), str(script("plot_kv_cache")), str(path))
    chart = json.dumps(document(report)).encode()
    done = subprocess.run(command, input=chart, capture_output=True, env=clean_environment())
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise PeerError(f"the chart could not be drawn: {said[-1] if said else 'no reason was given'}")
