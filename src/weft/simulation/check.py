"""Runs many scenarios, in several processes, and reports the first violation."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from weft.errors import WeftError
from weft.simulation.run import Outcome, Simulation
from weft.simulation.scenario import draw

BATCH = 100


class SimulationFailed(WeftError):
    """A scenario violated an invariant. The message holds its seed."""

    def __init__(self, seed: int, finding: str) -> None:
        super().__init__(
            f"scenario {seed}: {finding}. Repeat it with: weft simulate-check --scenarios 1 --seed {seed}"
        )
        self.seed = seed


@dataclass(slots=True)
class Report:
    scenarios: int = 0
    seconds: float = 0.0
    outcome: Outcome = field(default_factory=Outcome)


def check(
    scenarios: int, first_seed: int = 0, jobs: int = 1, progress: Callable[[int], None] | None = None
) -> Report:
    """Runs `scenarios` scenarios with seeds from `first_seed` on. Raises SimulationFailed at the first violation."""
    report, start = Report(), time.perf_counter()
    last = first_seed + scenarios
    batches = [(seed, min(seed + BATCH, last)) for seed in range(first_seed, last, BATCH)]
    for count, outcome, failure in _run_batches(batches, jobs):
        if failure is not None:
            raise SimulationFailed(*failure)
        report.scenarios += count
        report.outcome.add(outcome)
        report.seconds = time.perf_counter() - start
        if progress is not None:
            progress(count)
    return report


_BatchResult = tuple[int, Outcome, tuple[int, str] | None]


def _run_batches(batches: list[tuple[int, int]], jobs: int) -> Iterator[_BatchResult]:
    if jobs == 1:
        yield from map(_run_batch, batches)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(_run_batch, batches)


def _run_batch(batch: tuple[int, int]) -> _BatchResult:
    total = Outcome()
    for seed in range(*batch):
        try:
            total.add(Simulation(draw(seed)).run())
        except Exception as error:
            return 0, total, (seed, f"{type(error).__name__}: {error}")
    return batch[1] - batch[0], total, None
