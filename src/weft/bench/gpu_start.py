"""How long a new process takes to its first token on a model of random weights: with an empty cache of compiled kernels,
and with what the process before it left there.

Run as a module, this is that process: `python -m weft.bench.gpu_start SHAPE DEVICE BEGAN`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

from weft.errors import WeftError

_PATIENCE_SECONDS = 180.0
_WARM_STARTS = 2
_PROMPT_TOKENS = 128


@dataclass(frozen=True)
class Start:
    """Seconds of a process from its launch to its first token, and how they were spent."""

    shape: str
    kernels: str
    """"cold" or "warm": whether the cache of compiled kernels was empty."""
    seconds: float
    phases: dict[str, float]


def measure_starts(shape: str, device: str) -> Iterator[Start]:
    """One cold start, then warm ones, each in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="weft-kernels-") as cache:
        environment = {
            **os.environ,
            # Where Triton keeps what it compiled, and CUDA what it made of PTX.
            "TRITON_CACHE_DIR": os.path.join(cache, "triton"),
            "CUDA_CACHE_PATH": os.path.join(cache, "cuda"),
        }
        for kernels in ("cold", *["warm"] * _WARM_STARTS):
            yield _start(shape, device, kernels, environment)


def _start(shape: str, device: str, kernels: str, environment: dict[str, str]) -> Start:
    began = time.time()
    command = [sys.executable, "-m", "weft.bench.gpu_start", shape, device, repr(began)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_PATIENCE_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise WeftError(f"{shape}: the process had no first token after {_PATIENCE_SECONDS:.0f} s") from None
    if done.returncode != 0:
        raise WeftError(f"{shape}: the process ended with exit code {done.returncode}: {done.stderr[-2000:]}")
    phases: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return Start(shape, kernels, sum(phases.values()), phases)


def _be_the_process(shape: str, device: str, began: float) -> None:
    """Prints how long each phase took. The clock is the machine's: the launch is the parent's moment."""
    from weft.bench.gpu import STEP_TOKENS, Options
    from weft.request import SamplingParams

    phases: dict[str, float] = {}
    last = began

    def note(phase: str) -> None:
        nonlocal last
        now = time.time()
        phases[phase] = now - last
        last = now

    note("imports of weft")
    if device != "cpu":
        import_module("weft.backends.cuda.runner")
        note("imports of torch")
    with Options(device, invariant=False, step_tokens=STEP_TOKENS).open(shape) as llm:
        note("open")
        llm.generate([list(range(_PROMPT_TOKENS))], SamplingParams(max_tokens=1, temperature=0.0))
        note("first token")
        print(json.dumps(phases), flush=True)


if __name__ == "__main__":
    _be_the_process(sys.argv[1], sys.argv[2], float(sys.argv[3]))
