"""`python -m benchmarks idle-work`: the latencies of interactive clients with and without a batch beside them.

In every second round the engine also has idle work, as from lines of batches. Rounds alternate, so that other load on
the machine affects both. The two rounds of a pair have the same requests, but different cache salts: neither gets prefix
hits or draft tokens from the other.
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


Pairs = list[tuple[Figures, Figures]]
"""For each pair of rounds, which have the same requests: without and with idle work."""


def is_idle_round(number: int) -> bool:
    """Whether a round has idle work. The order alternates from pair to pair: first without idle work, or first with it."""
    return number % 4 in (1, 2)


def main(
    *, backend: str, shape: str | None, seconds: float, rounds: int, clients: int, lines: int, json: bool
) -> None:
    if shape is None:
        # Imported here: only the measurement over HTTP needs the packages of the server.
        from benchmarks.idle_work_server import measure as measure_server

        pairs = asyncio.run(measure_server(backend, seconds, rounds, clients, lines))
    else:
        from benchmarks.idle_work_engine import measure as measure_engine

        pairs = asyncio.run(measure_engine(backend, shape, seconds, rounds, clients, lines))
    rows = []
    for name, unit in (("first_token", "first token, ms"), ("gap", "gap between tokens, ms")):
        for share in (0.5, 0.99):
            before, after = (_pooled(pairs, side, name, share) for side in (0, 1))
            low, high = _interval(pairs, name, share)
            ratio = f"{after / before:.2f} [{low:.2f}, {high:.2f}]" if before else "-"
            rows.append((f"{unit}: p{100 * share:g}", f"{1000 * before:.2f}", f"{1000 * after:.2f}", ratio))
    if json:
        print_json({"pairs": pairs, "rows": rows, "machine": machine()})
        return
    print_line(machine())
    print_table(
        f"{clients} interactive clients, with and without {lines} lines of idle work at once, {rounds} pairs of rounds",
        ("", "without", "with", "ratio, 95% interval"),
        rows,
    )
    alone, beside = (sum(len(pair[side].first_token) for pair in pairs) for side in (0, 1))
    rate = sum(pair[1].idle_tokens for pair in pairs) / sum(pair[1].seconds for pair in pairs)
    print_line(
        f"requests: {alone} without, {beside} with; idle work in the rounds with it: {rate:.1f} tokens/s"
    )


def _pooled(pairs: Pairs, side: int, name: str, share: float) -> float:
    return quantile([value for pair in pairs for value in getattr(pair[side], name)], share)


def _interval(pairs: Pairs, name: str, share: float) -> tuple[float, float]:
    """The 95% bootstrap interval of the ratio of two quantiles. It resamples pairs of rounds."""
    source, ratios = random.Random(0), []
    for _ in range(400):
        drawn = source.choices(pairs, k=len(pairs))
        before = _pooled(drawn, 0, name, share)
        ratios.append(_pooled(drawn, 1, name, share) / before if before else 1.0)
    return quantile(ratios, 0.025), quantile(ratios, 0.975)


def lengths(source: random.Random) -> tuple[int, int]:
    """The number of tokens of a prompt and of its answer."""
    return source.randint(*_PROMPT_TOKENS), source.randint(*_ANSWER_TOKENS)
