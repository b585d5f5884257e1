"""Helpers for the tests of `python -m benchmarks peers`. An engine is a small script; the machine's speed is invented."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.machine_speed import Gauge, Speed
from benchmarks.peers import Bench
from benchmarks.peers_cells import Cell, CellFiles, Try
from benchmarks.peers_engines import Engine, Launch, PeerFiles
from weft.bench.serve_load import WORKLOADS, Text

# Answers every phase at once, with one token per millisecond, and logs the phase.
DRIVER = """
import json, sys
call_log = open(sys.argv[1], "a")
for line in sys.stdin:
    phase = json.loads(line)
    print(sys.argv[2], len(phase["items"]), file=call_log, flush=True)
    answer = [
        {"began": item["at"], "tokens": [item["at"] + 0.001 * (n + 1) for n in range(item["max_tokens"])],
         "ended": item["at"] + 0.001 * item["max_tokens"]}
        for item in phase["items"]
    ]
    print(json.dumps(answer), flush=True)
"""


def driver(name: str, call_log: Path, work: tuple[str, ...] = WORKLOADS, program: str = DRIVER) -> Engine:
    command = (sys.executable, "-c", program, str(call_log), name)
    return Engine(name, name, "1", lambda _: lambda port: Launch(command, None, dict(os.environ)), work)


def some_text(run: int = 0) -> Text:
    return Text(lambda _: list(range(60_000)), run)


def make_bench(
    tmp_path: Path,
    engines: Sequence[Engine],
    columns: Sequence[str],
    rounds: int = 1,
    repeats: int = 0,
    keep: Path | None = None,
    probe: Callable[[], Speed] | None = None,
    print_status: Callable[[str], None] = lambda _: None,
) -> Bench:
    bench = Bench(engines, columns, CellFiles(keep), rounds, repeats, some_text, print_status, Gauge(probe))
    bench.prepare(PeerFiles(tmp_path, tmp_path / "model.gguf", 0, lambda _: None))
    return bench


def measured_calls(call_log: Path) -> list[str]:
    """The logged phases, without warm-ups (two requests) and starts (one request)."""
    return [line for line in call_log.read_text().splitlines() if line.split()[1] not in ("1", "2")]


def one_try(engine: str, work: str, **fields: object) -> Try:
    usual = {"round": 0, "attempt": 0, "seconds": 1.0, "others": 0.0, "tokens_per_second": 100.0}
    return Try(engine, work, **{**usual, **fields})  # type: ignore[arg-type]


def cell(engine: str, work: str, **fields: object) -> Cell:
    """A cell with a single try."""
    return Cell((one_try(engine, work, **fields),), None)
