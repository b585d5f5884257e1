"""GPU memory, measured from another process: closed models free it, and too little of it gives an error of one line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MIB = 1 << 20
KEPT_BY_CUDA = 400 * MIB
"""An upper limit for kernel code and library workspaces, which CUDA keeps until the process ends. The weights of the
model take 1,137 MiB."""


def free_memory() -> int:
    import torch

    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def weft(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from weft.cli.entry import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_a_closed_model_frees_the_gpu_memory_every_time_and_so_does_a_failed_load() -> None:
    seen: list[tuple[str, int]] = []
    with process(str(HERE / "open_and_close.py")) as opening:
        assert opening.stdout is not None and opening.stdin is not None
        for line in opening.stdout:
            seen.append((line.strip(), free_memory()))
            opening.stdin.write("\n")
            opening.stdin.flush()
        assert opening.wait() == 0
    stages = [stage for stage, _ in seen]
    assert stages == ["bare", *["open", "closed"] * 3, "failed twice"]
    used = [(stage, seen[0][1] - free) for stage, free in seen]
    print([f"{stage} {size // MIB} MiB" for stage, size in used])
    assert all(size > 4096 * MIB for stage, size in used if stage == "open"), used
    assert all(size < KEPT_BY_CUDA for stage, size in used if stage != "open"), used
    # The memory in use does not grow with the number of models.
    closed = [size for stage, size in used if stage == "closed"]
    assert closed[2] - closed[0] < 64 * MIB, used


OCCUPY = """
import sys, torch
torch.zeros(1, device="cuda")
held = torch.empty(torch.cuda.mem_get_info()[0] - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print(torch.cuda.mem_get_info()[0], flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("left", [300 * MIB, 1500 * MIB, 2000 * MIB, 2800 * MIB])
def test_a_gpu_that_another_process_occupies_gives_one_line_that_names_the_process(left: int) -> None:
    """The memory left is too small for the CUDA context, the weights, the buffers of a step, and the KV cache."""
    with process("-c", OCCUPY, str(left)) as occupying:
        assert occupying.stdout is not None
        assert int(occupying.stdout.readline()) < left + 64 * MIB
        done = weft("bench", "gpu", "--shape", "0.6b", "--work", "single")
        print(left // MIB, done.returncode, done.stderr)
        assert done.returncode == 2, done.stderr
        (line,) = done.stderr.splitlines()
        assert line.startswith("weft: the memory of NVIDIA") and f"process {occupying.pid}, uses" in line
        assert "MiB are free" in line


def test_both_shapes_of_the_bench_run_in_one_process() -> None:
    done = weft("bench", "gpu", "--shape", "0.6b,8b", "--work", "single")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines() if " single " in line] == ["0.6b", "8b"]
