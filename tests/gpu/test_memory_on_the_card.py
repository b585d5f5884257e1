"""Memory of the card, looked at from another process: closed models give it back, and too little of it is one sentence."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MIB = 1 << 20
LEFT_BEHIND = 400 * MIB
"""Code of kernels and workspaces of libraries, which CUDA keeps until the process ends; the model has 1,137 MiB of weights
alone."""


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


def test_a_closed_model_gives_the_card_back_again_and_again_and_so_does_a_failed_load() -> None:
    seen: list[tuple[str, int]] = []
    with process(str(HERE / "open_and_close.py")) as opening:
        assert opening.stdout is not None and opening.stdin is not None
        for line in opening.stdout:
            seen.append((line.strip(), free_memory()))
            opening.stdin.write("\n")
            opening.stdin.flush()
        assert opening.wait() == 0
    places = [place for place, _ in seen]
    assert places == ["bare", *["open", "closed"] * 3, "failed twice"]
    taken = [(place, seen[0][1] - free) for place, free in seen]
    print([f"{place} {size // MIB} MiB" for place, size in taken])
    assert all(size > 4096 * MIB for place, size in taken if place == "open"), taken
    assert all(size < LEFT_BEHIND for place, size in taken if place != "open"), taken
    # Nothing grows with the number of models.
    closed = [size for place, size in taken if place == "closed"]
    assert closed[2] - closed[0] < 64 * MIB, taken


OCCUPY = """
import sys, torch
torch.zeros(1, device="cuda")
held = torch.empty(torch.cuda.mem_get_info()[0] - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print(torch.cuda.mem_get_info()[0], flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("left", [300 * MIB, 1500 * MIB, 2000 * MIB, 2800 * MIB])
def test_a_card_that_another_process_occupies_is_one_sentence_that_names_it(left: int) -> None:
    """Too little for the CUDA context of the process, for weights, for the buffers of a step, and for a KV cache."""
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
