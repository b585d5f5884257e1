"""Reads how much host memory is available, within the limits of all cgroups of this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_NO_LIMIT = 1 << 60
"""cgroups version 1 reports a number above this when there is no limit."""


@dataclass(frozen=True)
class HostMemory:
    """Sizes in bytes. The page cache counts as free: reading the model file fills it."""

    available: int | None
    """Memory that can be allocated without swapping, within all cgroup limits. None: unknown."""
    total: int | None
    limit: int | None = None
    """The limit of the cgroup with the least memory left. None: no cgroup has a limit."""
    left_in_limit: int = 0
    """The memory that this cgroup has left."""


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Reads the memory of this machine. `root` is the folder that contains proc and sys."""
    sizes = _sizes(root / "proc/meminfo")
    available = sizes.get("MemAvailable:")
    total = sizes.get("MemTotal:")
    cgroups = [*_limited_cgroups(root)]
    if not cgroups:
        return HostMemory(available, total)
    left, limit = min(cgroups)
    return HostMemory(left if available is None else min(available, left), total, limit, left)


def _limited_cgroups(root: Path) -> Iterator[tuple[int, int]]:
    """Yields (memory left, limit) for each cgroup of this process that has a limit: its own and all parents. Reads
    cgroups of version 1 and 2."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, names, stat_prefix = "sys/fs/cgroup", ("memory.max", "memory.current"), ""
        elif "memory" in controllers.split(","):
            base, stat_prefix = "sys/fs/cgroup/memory", "total_"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # In a container, the cgroup of the process may be mounted as the root. Then `path` does not exist below it, and
        # only the root is read.
        inner = PurePosixPath(path.removeprefix("/"))
        for part in (inner, *inner.parents):
            folder = root / base / part
            limit, used = (_read(folder / name).strip() for name in names)
            if limit.isdigit() and used.isdigit() and int(limit) < _NO_LIMIT:
                stat = _sizes(folder / "memory.stat")
                files = stat.get(f"{stat_prefix}inactive_file", 0) + stat.get(f"{stat_prefix}active_file", 0)
                yield max(0, int(limit) - int(used) + files), int(limit)


def _sizes(path: Path) -> dict[str, int]:
    """Parses lines of the form `name number [kB]`."""
    found = {}
    for line in _read(path).splitlines():
        name, number, *unit = line.split() + [""] * 2
        if number.isdigit():
            found[name] = int(number) << (10 if unit[0] == "kB" else 0)
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
