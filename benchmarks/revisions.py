"""`python -m benchmarks revisions`: two revisions of weft on the same workloads, in turn, on this machine.

A revision is a checkout with its own `.venv` (`make kernels` there). Each round starts the server of both, one after
the other, and sends both the same requests over HTTP. The order alternates. Every round gives one ratio for each
workload; the table shows the geometric mean of the ratios with its 95% interval.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.peers_engines import Launch
from benchmarks.peers_environment import engine_environment
from benchmarks.peers_process import RunningEngine, free_port, settle
from weft.bench.ratios import Ratios
from weft.bench.report import machine
from weft.bench.serve_load import WORKLOADS, Text, workloads
from weft.bench.serve_measure import Summary
from weft.errors import InvalidRequestError
from weft.loading.checkpoint import open_checkpoint
from weft.loading.pull import pull
from weft.text.model_text import open_tokenizer

ALLOWED_LOSS = 0.03
"""A workload counts as slower if the lower end of the 95% interval of its change is -ALLOWED_LOSS or less."""
SHORT = {"W1": 5, "W8": 5}
"""Workloads of a second or less run this many times after one start of the server. The median run counts."""
USUAL = ("W1", "W8", "W32", "Wmix")
_START_PROMPT = 16


def main(before: Path, after: Path, *, work: Sequence[str], rounds: int) -> bool:
    """Measures and prints. Returns True if no workload counts as slower (see `ALLOWED_LOSS`)."""
    pythons = {"before": _python_of(before), "after": _python_of(after)}
    model = pull("default")
    tokenizer = open_tokenizer(open_checkpoint(model))
    ids: list[int] = []

    def encode(whole: str) -> list[int]:
        ids.extend(tokenizer.encode(whole, add_bos=False) if not ids else ())
        return ids

    speeds = {name: Ratios() for name in work}
    first_tokens = {name: Ratios() for name in work}
    for number in range(rounds):
        order = ("before", "after") if number % 2 == 0 else ("after", "before")
        for name in work:
            for revision in order:
                summary = _run(pythons[revision], str(model), name, encode, number)
                getattr(speeds[name], revision).append(summary.output_tokens_per_second)
                if summary.first_token is not None:
                    getattr(first_tokens[name], revision).append(summary.first_token.p99)
        done = ", ".join(f"{name} {ratio.change()[0]:+.1%}" for name, ratio in speeds.items())
        print(f"round {number + 1} of {rounds}: {done}", file=sys.stderr, flush=True)
    print(f"{machine()}\nbefore: {before}\nafter:  {after}\n{rounds} rounds")
    _print_table("output tokens/s", speeds)
    _print_table("p99 time to first token, ms", first_tokens, scale=1000.0)
    return all(ratio.change()[1] > -ALLOWED_LOSS for ratio in speeds.values())


def _python_of(checkout: Path) -> Path:
    python = checkout / ".venv" / "bin" / "python"
    if not python.exists():
        raise InvalidRequestError(f"{checkout} has no .venv; run `make kernels` there", field="checkout")
    return python.absolute()


def _run(python: Path, model: str, name: str, encode: Callable[[str], Sequence[int]], number: int) -> Summary:
    """The median run of a workload on a new server. Both revisions get the same prompts in a round."""
    port, times = free_port(), SHORT.get(name, 1)
    command = (str(python), "-P", "-m", "weft.cli.main", "serve", model, "--port", str(port))
    running = RunningEngine(Launch(command, port, engine_environment()), Path(os.devnull))
    try:
        # Reversed, so that no prompt of a workload begins with these tokens and finds them in the prefix cache.
        running.first_token(Text(encode).take(_START_PROMPT)[::-1])
        phases = [
            phase
            for attempt in range(times)
            for phase in workloads([name], Text(encode, number * times + attempt))
        ]
        summaries = [outcome.summary for outcome in running.run(phases)]
    finally:
        running.end()
        settle()
    return sorted(summaries, key=lambda summary: summary.output_tokens_per_second)[len(summaries) // 2]


def _print_table(title: str, figures: Mapping[str, Ratios], scale: float = 1.0) -> None:
    print(f"\n{title:28} {'before':>9} {'after':>9}   change, 95% interval")
    for name, ratios in figures.items():
        mean, low, high = ratios.change()
        before, after = (median(values) * scale for values in (ratios.before, ratios.after))
        print(f"{name:28} {before:9.1f} {after:9.1f}   {mean:+.1%} [{low:+.1%}, {high:+.1%}]")


def choose_work(names: str | None) -> tuple[str, ...]:
    chosen = USUAL if names is None else tuple(name.strip() for name in names.split(",") if name.strip())
    for name in chosen:
        if name not in WORKLOADS:
            raise InvalidRequestError(
                f"no workload {name!r}; there are {', '.join(WORKLOADS)}", field="--work"
            )
    return chosen
