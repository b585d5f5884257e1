"""Time from the launch of a process to its first token, on a model with random weights.

It is measured with an empty and with a filled cache of compiled kernels. The measured process is this module:
`python -m weft.bench.gpu_start SHAPE DEVICE BEGAN`.
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

_TIMEOUT_SECONDS = 180.0
_WARM_STARTS = 2
_PROMPT_TOKENS = 128


@dataclass(frozen=True)
class Start:
    """Seconds from the launch of a process to its first token, in total and by phase."""

    shape: str
    kernels: str
    """"cold" (the cache of compiled kernels was empty) or "warm"."""
    seconds: float
    phases: dict[str, float]


def measure_starts(shape: str, device: str) -> Iterator[Start]:
    """One cold start, then warm ones, each in a new process."""
    with tempfile.TemporaryDirectory(prefix="weft-kernels-") as cache:
        environment = {
            **os.environ,
            # The kernel caches of Triton and of CUDA.
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
            command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise WeftError(f"{shape}: the process had no first token after {_TIMEOUT_SECONDS:.0f} s") from None
    if done.returncode != 0:
        raise WeftError(f"{shape}: the process ended with exit code {done.returncode}: {done.stderr[-2000:]}")
    phases: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return Start(shape, kernels, sum(phases.values()), phases)


def _run_measured_process(shape: str, device: str, began: float) -> None:
    """Prints the seconds of each phase. `began` is the wall-clock time at which the parent launched this process."""
    from weft.bench.gpu import STEP_TOKENS, Options
    from weft.request import SamplingParams

    phases: dict[str, float] = {}
    last = began

    def end_phase(phase: str) -> None:
        nonlocal last
        now = time.time()
        phases[phase] = now - last
        last = now

    end_phase("imports of weft")
    if device != "cpu":
        import_module("weft.backends.cuda.runner")
        end_phase("imports of torch")
    with Options(device, invariant=False, step_tokens=STEP_TOKENS).open(shape) as llm:
        end_phase("open")
        llm.generate([list(range(_PROMPT_TOKENS))], SamplingParams(max_tokens=1, temperature=0.0))
        end_phase("first token")
        print(json.dumps(phases), flush=True)


if __name__ == "__main__":
    _run_measured_process(sys.argv[1], sys.argv[2], float(sys.argv[3]))
