"""`python -m benchmarks idle-work`: what interactive clients see with and without a batch beside them.

In every second round the engine also has idle work, as from lines of batches. Rounds alternate, so that other load on
the machine affects both.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from weft.bench.report import machine, print_json, print_line, print_table, quantile

_PROMPT_TOKENS = (16, 256)
_ANSWER_TOKENS = (16, 64)
IDLE_SECONDS = 1.0
"""How long idle work runs before the first interactive request of a round."""


@dataclass
class Figures:
    """Latencies as clients measure them, in seconds."""

    first_token: list[float] = field(default_factory=list)
    gap: list[float] = field(default_factory=list)
    idle_tokens: int = 0
    seconds: float = 0.0


def main(
    *, backend: str, shape: str | None, seconds: float, rounds: int, clients: int, lines: int, json: bool
) -> None:
    if shape is None:
        # Imported here: only the measurement over HTTP needs the packages of the server.
        from benchmarks.idle_work_server import measure as measure_server

        figures = asyncio.run(measure_server(backend, seconds, rounds, clients, lines))
    else:
        from benchmarks.idle_work_engine import measure as measure_engine

        figures = asyncio.run(measure_engine(backend, shape, seconds, rounds, clients, lines))
    alone, beside = figures[False], figures[True]
    rows = []
    for name, one, other in (
        ("first token, ms", alone.first_token, beside.first_token),
        ("gap between tokens, ms", alone.gap, beside.gap),
    ):
        for share in (0.5, 0.99):
            before, after = quantile(one, share), quantile(other, share)
            ratio = f"{after / before:.2f}" if before else "-"
            rows.append((f"{name}: p{100 * share:g}", f"{1000 * before:.2f}", f"{1000 * after:.2f}", ratio))
    if json:
        print_json({"alone": alone, "beside_idle_work": beside, "rows": rows, "machine": machine()})
        return
    print_line(machine())
    print_table(
        f"{clients} interactive clients, with and without {lines} lines of idle work at once",
        ("", "without", "with", "ratio"),
        rows,
    )
    print_line(
        f"requests: {len(alone.first_token)} without, {len(beside.first_token)} with; idle work in the rounds with it: "
        f"{beside.idle_tokens / beside.seconds:.1f} tokens/s"
    )


def lengths(source: random.Random) -> tuple[int, int]:
    """The number of tokens of a prompt and of its answer."""
    return source.randint(*_PROMPT_TOKENS), source.randint(*_ANSWER_TOKENS)
