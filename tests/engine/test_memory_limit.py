"""A process with a memory limit: the KV cache adapts to it, or one message says what does not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

MIB = 1 << 20
ANSWER = """
import json, sys
from weft.backends.host_memory import host_memory
from weft.llm import LLM
from weft.request import SamplingParams

with LLM(device="cpu", **json.loads(sys.argv[1])) as llm:
    use = llm.memory
    prompts = [[number, *range(5, 500)] for number in range(1, int(sys.argv[2]) + 1)]
    results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4), show_progress=False)
print(json.dumps({
    "limit": host_memory().limit, "kv_cache": use.kv_cache, "swap": use.swap, "weights": use.weights,
    "tokens": [len(result.tokens) for result in results],
}))
"""


class Cgroup:
    """A new cgroup inside that of the tests."""

    def __init__(self, folder: Path, limit_name: str) -> None:
        self.folder = folder
        self._limit_name = limit_name

    def run(self, limit: int, *command: str) -> subprocess.CompletedProcess[str]:
        (self.folder / self._limit_name).write_text(str(limit))
        entered = f'echo $$ > "{self.folder}/cgroup.procs"; exec "$@"'
        return subprocess.run(
            ["sh", "-c", entered, "sh", *command], capture_output=True, text=True, timeout=240
        )


def find_place() -> tuple[Path, str]:
    """The folder in which a cgroup can be created, and the file name of its memory limit."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        if controllers == "memory":
            return Path("/sys/fs/cgroup/memory") / own.lstrip("/"), "memory.limit_in_bytes"
        if not controllers and Path("/sys/fs/cgroup/cgroup.controllers").exists():
            return Path("/sys/fs/cgroup") / own.lstrip("/"), "memory.max"
    raise OSError("no cgroup of this process has memory")


@pytest.fixture
def cgroup() -> Iterator[Cgroup]:
    try:
        place, limit_name = find_place()
        folder = place / f"weft-test-{os.getpid()}"
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        if not (folder / limit_name).exists():
            pytest.skip("memory is not among the controllers that a cgroup inside this one gets")
        yield Cgroup(folder, limit_name)
    finally:
        folder.rmdir()


def test_44_the_default_cache_stays_below_the_limit_of_a_cgroup_even_when_it_is_full(
    cgroup: Cgroup, default_model_path: Path
) -> None:
    limit = 640 * MIB
    done = cgroup.run(limit, sys.executable, "-c", ANSWER, "{}", "24")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["limit"] == limit
    assert found["kv_cache"] + found["swap"] + found["weights"] < limit
    assert found["tokens"] == [4] * 24


@pytest.mark.parametrize("command", [["generate", "Hello"], ["serve", "--port", "0"]], ids=lambda c: c[0])
def test_44_a_cgroup_too_small_for_the_model_gives_one_message_and_exit_code_2(
    cgroup: Cgroup, default_model_path: Path, command: list[str]
) -> None:
    program = "import sys; from weft.cli.entry import main; sys.argv[0] = 'weft'; main()"
    done = cgroup.run(300 * MIB, sys.executable, "-c", program, *command, "--device", "cpu")
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert "MiB of memory are needed" in line and "limit of 300 MiB" in line and "raise the limit" in line


def test_44_a_cache_size_above_the_limit_is_refused_with_the_size_that_fits(
    cgroup: Cgroup, default_model_path: Path
) -> None:
    done = cgroup.run(600 * MIB, sys.executable, "-c", ANSWER, json.dumps({"memory": 1024 * MIB}), "1")
    assert "OutOfMemoryError" in done.stderr and "or set memory" in done.stderr
    options = json.dumps({"memory": 64 * MIB})
    done = cgroup.run(600 * MIB, sys.executable, "-c", ANSWER, options, "1")
    assert done.returncode == 0, done.stderr


OPEN = """
import resource, sys
from pathlib import Path
import weft.backends.cpu.native_sampler, weft.ops.cpu.program, weft.ops.cpu.recording_ops
from weft.backends.cpu.runner import open_cpu_backend
from weft.errors import OutOfMemoryError
from weft.loading.checkpoint import open_checkpoint

checkpoint = open_checkpoint(sys.argv[1])
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), -1))
try:
    open_cpu_backend(checkpoint, threads=1)
except OutOfMemoryError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize("kernels", ["", "numpy"])
def test_weights_that_do_not_fit_give_one_message(
    default_model_path: Path, tmp_path: Path, kernels: str
) -> None:
    """Limits the address space to that of the interpreter and 64 MiB, less than the weights need."""
    environment = {**os.environ, "WEFT_HOME": str(tmp_path), "OPENBLAS_NUM_THREADS": "1"}
    environment |= {"WEFT_KERNELS": kernels} if kernels else {}
    command = [sys.executable, "-c", OPEN, str(default_model_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 2, done.stderr
    (line,) = done.stdout.splitlines()
    assert "MiB of memory are needed" in line and "; free memory, raise the limits of this process" in line
