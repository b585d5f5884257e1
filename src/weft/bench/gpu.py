"""`weft bench gpu`: runs the workloads of `gpu_work` through `LLM.generate`, and compares the speed with vLLM.

The models have random weights. Prompts are token ids on the host, the whole engine runs, and sampling is greedy. Each
workload first runs once with short answers, so that kernels are compiled and graphs are captured before the
measurement.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from weft import __version__
from weft.backends import registry
from weft.bench.gpu_clocks import GpuState, GpuWatch
from weft.bench.gpu_start import Start, measure_starts
from weft.bench.gpu_work import (
    MAX_CONTEXT,
    MAX_RUNNING,
    RECORDED,
    SHAPES,
    START,
    WORK,
    Work,
    chosen,
    least_seconds,
    make_work,
    open_shape,
)
from weft.bench.report import machine, print_line
from weft.cli.machine import gpus
from weft.config import PriorityPolicy
from weft.errors import WeftError
from weft.llm import LLM
from weft.request import SamplingParams

STEP_TOKENS = 8192
_WARM_UP_TOKENS = 32
_WARM_UP_SHARE = 8
"""Warm-up answers have at most `_WARM_UP_TOKENS` tokens, or 1/`_WARM_UP_SHARE` of the longest answer if that is more.
Answers of different lengths end one after the other. The batch then passes through every size several times, so that
every graph is captured."""
_RUNS = 3
_SECONDS = 3.0
"""A workload is repeated until it has run `_RUNS` times or `_SECONDS` have passed."""
_HEADER = f"{'shape':<6}{'work':<16}{'tokens/s':>10}{'vLLM':>9}{'ratio':>7}{'at best':>9}{'share':>7}{'steps':>7}{'ms/step':>9}  seconds; state of the GPU"


@dataclass(frozen=True)
class Speed:
    """One workload on one shape. `seconds` has an entry per run; the speed is that of the median run."""

    shape: str
    work: str
    tokens: int
    seconds: tuple[float, ...]
    steps: int
    """Steps of the engine in the last run."""
    tokens_per_second: float
    recorded: float | None
    """The recorded speed of vLLM."""
    ratio: float | None
    at_best: float | None
    """Upper bound on an H200, in tokens per second."""
    share: float | None
    gpu: GpuState | None
    """State of the GPU during the runs."""


@dataclass(frozen=True)
class Options:
    device: str
    invariant: bool
    step_tokens: int

    @property
    def is_gpu(self) -> bool:
        return self.device != "cpu"

    def open(self, shape: str) -> LLM:
        return LLM(
            open_shape(shape),
            device=self.device,
            invariant=self.invariant,
            max_context=MAX_CONTEXT,
            policy=PriorityPolicy.FCFS,
            max_running=MAX_RUNNING,
            max_tokens_per_step=self.step_tokens + MAX_RUNNING,
            max_prefill_tokens=self.step_tokens,
            max_chunk_tokens=self.step_tokens,
            prefix_caching=False,
            max_draft_tokens=0,  # random weights repeat tokens: too many draft tokens would be accepted
        )


def main(
    shapes: list[str],
    work: list[str],
    device: str,
    invariant: bool,
    step_tokens: int,
    json_path: Path | None,
) -> None:
    device = registry.chosen(device, {})
    options = Options(device, invariant, step_tokens)
    names = chosen(work, WORK, "--work", default=WORK)
    models = chosen(shapes, tuple(SHAPES), "--shape", default=("0.6b", "8b"))
    found = gpus() or [] if options.is_gpu else []
    watch = GpuWatch() if options.is_gpu else None
    speeds: list[Speed] = []
    starts: list[Start] = []

    def save() -> None:
        """Called after every line, so that an interrupted run keeps its results."""
        if json_path is not None:
            document = {
                "weft": __version__,
                "machine": machine(),
                "gpus": found,
                **asdict(options),
                "speeds": [asdict(speed) for speed in speeds],
                "starts": [asdict(start) for start in starts],
            }
            json_path.write_text(json.dumps(document, indent=2) + "\n")

    mode = " in the batch-invariant mode" if invariant else ""
    print_line(f"{'; '.join([*found, machine()])}; weft {__version__} on {device}{mode}")
    print_line(
        f"Random weights, greedy, {MAX_RUNNING} sequences at most, {step_tokens} prompt tokens a step at most, "
        f"no prefix cache. Warm-up: each workload once with shortened answers ({_WARM_UP_TOKENS} tokens at most, or 1/"
        f"{_WARM_UP_SHARE} of the longest); then up to {_RUNS} runs while they take less than {_SECONDS:g} s; the "
        "median counts. vLLM: version 0.24.0, recorded on an H200. At best: the limit of that GPU's memory and arithmetic."
    )
    print(_HEADER, flush=True)
    try:
        for shape in models:
            if START in names:
                # This runs before this process loads the model, because the started processes need the GPU's memory.
                for start in measure_starts(shape, device):
                    starts.append(start)
                    _print_start(start)
                    save()
            if lists := [name for name in names if name != START]:
                with options.open(shape) as llm:
                    for name in lists:
                        speeds.append(measure(llm, shape, make_work(name, shape), options.is_gpu, watch))
                        _print_speed(speeds[-1])
                        save()
        if (gpu := next((speed.gpu for speed in speeds if speed.gpu), None)) is not None:
            print_line(
                f"Limits of the GPU: {gpu.most_megahertz:,.0f} MHz (memory {gpu.memory_megahertz:,.0f} MHz), "
                f"{gpu.most_watts:.0f} W."
            )
    finally:
        if watch is not None:
            watch.close()


def measure(llm: LLM, shape: str, work: Work, is_gpu: bool, watch: GpuWatch | None = None) -> Speed:
    """Measures one workload. It is compared with vLLM and with the upper bound only on a GPU."""
    run(llm, work.shortened(max(_WARM_UP_TOKENS, max(work.new_tokens) // _WARM_UP_SHARE)))
    seconds: list[float] = []
    steps = 0
    began = time.perf_counter()
    while not seconds or (len(seconds) < _RUNS and sum(seconds) < _SECONDS):
        before = llm.engine.metrics().steps
        seconds.append(run(llm, work))
        steps = llm.engine.metrics().steps - before
    speed = work.tokens / statistics.median(seconds)
    recorded = RECORDED.get(shape, {}).get(work.name) if is_gpu else None
    at_best = work.tokens / least_seconds(work, shape) if is_gpu else None
    return Speed(
        shape,
        work.name,
        work.tokens,
        tuple(seconds),
        steps,
        speed,
        recorded,
        speed / recorded if recorded else None,
        at_best,
        speed / at_best if at_best else None,
        watch.between(began, time.perf_counter()) if watch is not None else None,
    )


def run(llm: LLM, work: Work) -> float:
    """Runs the workload once. Returns the seconds from the first prompt to the last token."""
    params = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in work.new_tokens]
    began = time.perf_counter()
    results = llm.generate(work.prompts, params, show_progress=False)
    seconds = time.perf_counter() - began
    for result, count in zip(results, work.new_tokens, strict=True):
        if len(result.tokens) != count:
            raise WeftError(
                f"{work.name}: {len(result.tokens)} tokens of {count} were generated: {result.error or 'no error'}"
            )
    return seconds


def _print_speed(speed: Speed) -> None:
    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    each = " ".join(f"{seconds:.3f}" for seconds in speed.seconds)
    per_step = 1e3 * speed.seconds[-1] / max(1, speed.steps)
    print(
        f"{speed.shape:<6}{speed.work:<16}{speed.tokens_per_second:>10,.0f}{shown(speed.recorded, ',.0f'):>9}"
        f"{shown(speed.ratio, '.2f'):>7}{shown(speed.at_best, ',.0f'):>9}{shown(speed.share, '.0%'):>7}"
        f"{speed.steps:>7}{per_step:>9.3f}  {each}{'' if speed.gpu is None else f'; {speed.gpu}'}",
        flush=True,
    )


def _print_start(start: Start) -> None:
    recorded = RECORDED.get(start.shape, {}).get(START)
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in start.phases.items())
    beside = "" if recorded is None else f" (vLLM until ready: {recorded:g} s)"
    print(
        f"{start.shape:<6}{'start, ' + start.kernels:<16}{start.seconds:>8.2f} s to the first token{beside}: {phases}",
        flush=True,
    )
