"""Describes this machine: processor, memory, GPU, memory bandwidth. Unknown values are None."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from weft.backends.host_memory import host_memory

_CPU_INFO = Path("/proc/cpuinfo")
_CGROUP = Path("/sys/fs/cgroup")
FEATURES = {
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx_vnni": "AVX VNNI",
    "amx_int8": "AMX",
    "asimd": "NEON",
    "asimddp": "NEON dot product",
    "i8mm": "NEON i8mm",
}
"""Processor features that matter for inference, by their names in /proc/cpuinfo."""
_MATRIX_SIDE = 8192
"""A matrix of 256 MiB, larger than the caches of most machines."""


@dataclass(frozen=True)
class Processor:
    name: str
    physical_cores: int | None
    usable_cores: int
    """Logical processors (hardware threads) that this process may use, by its affinity and the quota of its cgroup."""
    features: tuple[str, ...] | None


@dataclass(frozen=True)
class Memory:
    """Sizes in bytes. `available` can be allocated without swapping, within the limit of the cgroup."""

    total: int | None
    available: int | None
    limit: int | None


def processor(info: str | None = None) -> Processor:
    """Describes the processor. `info` is the content of /proc/cpuinfo; None: it is read."""
    if info is None:
        info = _read(_CPU_INFO) or ""
    name, flags, cores = "", None, set()
    package = core = ""
    for line in info.splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key in ("model name", "Model") and not name:
            name = value
        elif key in ("flags", "Features") and flags is None:
            flags = set(value.split())
        elif key == "physical id":
            package = value
        elif key == "core id":
            core = value
            cores.add((package, core))
    features = None if flags is None else tuple(word for flag, word in FEATURES.items() if flag in flags)
    return Processor(
        name or platform.processor() or platform.machine() or "unknown",
        len(cores) or None,
        _usable_cores(),
        features,
    )


def _usable_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = (_read(_CGROUP / "cpu.max") or "max").partition(" ")
    if quota != "max" and period.strip().isdigit() and int(period):
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def memory(root: Path = Path("/")) -> Memory:
    """Describes the memory of the host. `root` is the folder that contains /proc and /sys."""
    host = host_memory(root)
    return Memory(host.total, host.available, host.limit)


def gpus() -> list[str] | None:
    """Name, memory and driver of each GPU. Empty without nvidia-smi or without GPUs; None if nvidia-smi fails."""
    return _query_gpus("name,memory.total,driver_version")


def gpu_memory() -> Memory:
    """Memory of the first GPU."""
    lines = _query_gpus("memory.total,memory.free", units=False)
    try:
        total, free = (int(figure) << 20 for figure in (lines or [""])[0].split(","))
    except ValueError:
        return Memory(None, None, None)
    return Memory(total, free, None)


def _query_gpus(fields: str, units: bool = True) -> list[str] | None:
    """Asks nvidia-smi for `fields`. Returns one line per GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={fields}", f"--format=csv,noheader{'' if units else ',nounits'}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (
        [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else None
    )


def bytes_per_second(seconds: float = 0.8) -> float:
    """Measures the memory bandwidth by multiplying a matrix larger than the caches with a vector, as decoding does."""
    import numpy as np

    matrix = np.ones((_MATRIX_SIDE, _MATRIX_SIDE), np.float32)
    vector = np.ones(_MATRIX_SIDE, np.float32)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        began = time.perf_counter()
        matrix @ vector
        times.append(time.perf_counter() - began)
    return matrix.nbytes / statistics.median(times)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
