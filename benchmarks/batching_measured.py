"""`python -m benchmarks batching --device`: continuous against static batching, measured on models with random weights.

The engines of a shape exist together and run the same jobs in turn, so that a change of the machine's speed affects all
of them. Speeds are medians; a ratio compares two runs of the same round.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from benchmarks.jobs import Job, mixed_jobs
from weft import __version__
from weft.backends import registry
from weft.bench.gpu_work import SHAPES, chosen, open_shape
from weft.bench.report import Check, machine, print_checks, print_json, print_line, print_table
from weft.cli.machine import gpus
from weft.config import KvCachePoolConfig, SchedulerConfig, ServingEngineConfig
from weft.engine.serving import ServingEngine
from weft.errors import WeftError
from weft.request import InferenceRequest, SamplingParams

ROWS = 16
ROUNDS = 3
_LONGEST = 512, 256
"""The longest prompt and answer of the mixed lengths."""
_ALL_ROWS = 256
_TOKEN_IDS = range(10, 500)


@dataclass(frozen=True)
class Measured:
    """64 requests at once, with continuous and with static batching; output tokens/s."""

    shape: str
    lengths: str
    equal: str
    """The resource of which both kinds of batching have the same amount: rows, or KV blocks."""
    continuous: float
    static: float
    padded: float
    """Speed of static batching with every batch padded to its longest prompt and answer."""
    ratios: tuple[float, ...]
    """Speed of continuous batching divided by that of static batching, one ratio per round."""

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


def main(device: str, shapes: list[str], json: bool) -> None:
    device = registry.chosen(device, {})
    names = chosen(shapes, tuple(SHAPES), "--shape", default=("0.6b", "8b"))
    found = gpus() or [] if device != "cpu" else []
    where = f"{'; '.join([*found, machine()])}; weft {__version__} on {device}"
    if not json:
        print_line(
            f"{where}. Random weights, greedy, no prefix cache, {ROUNDS} rounds after a warm-up, the engines in turn."
        )
    measured = [one for shape in names for one in measure(shape, device)]
    checks = [_check(one) for one in measured if one.lengths == "even"]
    if json:
        print_json({"where": where, "measured": [asdict(one) for one in measured], "checks": checks})
        return
    _print(measured)
    print_checks(checks)


def measure(shape: str, device: str, rounds: int = ROUNDS) -> Iterator[Measured]:
    blocks = ROWS * sum(_LONGEST) // KvCachePoolConfig().block_size
    with ExitStack() as stack:

        def open_engine(rows: int, is_dynamic: bool) -> ServingEngine:
            # The token budget allows a whole batch in one step: with less, a static batch would start half empty and
            # look worse.
            prompt_tokens = ROWS * _LONGEST[0]
            scheduler = SchedulerConfig(
                dynamic_batching=is_dynamic,
                max_running=rows,
                max_tokens_per_step=prompt_tokens + rows,
                max_prefill_tokens=prompt_tokens,
                max_chunk_tokens=prompt_tokens,
                prefix_caching=False,
                max_draft_tokens=0,  # random weights repeat tokens: too many draft tokens would be accepted
            )
            backend = registry.build(device, checkpoint=open_shape(shape), max_context=sum(_LONGEST))
            engine = ServingEngine(
                backend, ServingEngineConfig(scheduler, KvCachePoolConfig(num_blocks=blocks))
            )
            stack.callback(engine.stop)
            return engine

        static = open_engine(ROWS, is_dynamic=False)
        continuous = {
            f"{ROWS} rows": open_engine(ROWS, True),
            f"{blocks} blocks": open_engine(_ALL_ROWS, True),
        }
        for lengths in ("even", "skewed"):
            jobs = mixed_jobs(lengths)
            runs = {"static": (static, jobs), "padded": (static, _padded(jobs))}
            runs |= {equal: (engine, jobs) for equal, engine in continuous.items()}
            seconds: dict[str, list[float]] = {name: [] for name in runs}
            for number in range(rounds + 1):
                for name, (engine, work) in runs.items():
                    elapsed = run(engine, work)
                    if number:  # the first round compiles kernels and captures graphs
                        seconds[name].append(elapsed)
            tokens = sum(job.output for job in jobs)
            speeds = {name: tokens / statistics.median(each) for name, each in seconds.items()}
            for equal in continuous:
                pairs = zip(seconds["static"], seconds[equal], strict=True)
                ratios = tuple(before / after for before, after in pairs)
                yield Measured(
                    shape, lengths, equal, speeds[equal], speeds["static"], speeds["padded"], ratios
                )


def run(engine: ServingEngine, jobs: Sequence[Job]) -> float:
    """Returns the seconds of all jobs. They are submitted before the first step, so that static batches are full."""
    rng = random.Random(0)
    requests = [
        InferenceRequest(
            tuple(rng.choices(_TOKEN_IDS, k=job.prompt)),
            SamplingParams(max_tokens=job.output, temperature=0.0, ignore_eos=True),
        )
        for job in jobs
    ]
    began = time.perf_counter()
    ids = [engine.submit(request) for request in requests]
    engine.run_until_idle()
    seconds = time.perf_counter() - began
    for request_id, job in zip(ids, jobs, strict=True):
        result = engine.get_result(request_id)
        if result is None or len(result.tokens) != job.output:
            raise WeftError(f"an answer does not have its {job.output} tokens: {result and result.error}")
    return seconds


def _padded(jobs: Sequence[Job]) -> list[Job]:
    padded: list[Job] = []
    for first in range(0, len(jobs), ROWS):
        batch = jobs[first : first + ROWS]
        longest = Job(0.0, max(job.prompt for job in batch), max(job.output for job in batch))
        padded += [longest] * len(batch)
    return padded


def _check(one: Measured) -> Check:
    name = f"{one.shape}: continuous against static batching, the same {one.equal}"
    return Check(name, f"{one.ratio:.2f} times", "more than 2 times", one.ratio > 2)


def _print(measured: Sequence[Measured]) -> None:
    print_table(
        "Continuous against static batching: 64 requests, prompts 16-512, answers 16-256; output tokens/s",
        (
            *("shape", "lengths", "the same", "continuous", "static", "padded"),
            *("to static", "rounds", "to padded"),
        ),
        [
            (
                *(one.shape, one.lengths, one.equal),
                *(f"{speed:,.0f}" for speed in (one.continuous, one.static, one.padded)),
                *(f"{one.ratio:.2f}", f"{min(one.ratios):.2f}-{max(one.ratios):.2f}"),
                f"{one.continuous / one.padded:.2f}",
            )
            for one in measured
        ],
    )
