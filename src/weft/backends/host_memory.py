"""Memory of the host that may still be taken: what is available, within the limits of every cgroup around this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_NO_LIMIT = 1 << 60
"""Version 1 of cgroups writes a number beyond this where there is no limit."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes. Files in the page cache count as free: reading a model fills it."""

    available: int | None
    """What can be taken without swapping, inside every limit. None: unknown."""
    total: int | None
    limit: int | None = None
    """Of the cgroup with the least room; None: no cgroup has one."""
    room: int = 0
    """What that cgroup leaves."""


def host_memory(root: Path = Path("/")) -> HostMemory:
    """`root` is the folder that has /proc and /sys in it."""
    sizes = _sizes(root / "proc/meminfo")
    available = sizes.get("MemAvailable:")
    total = sizes.get("MemTotal:")
    rooms = [*_rooms(root)]
    if not rooms:
        return HostMemory(available, total)
    room, limit = min(rooms)
    return HostMemory(room if available is None else min(available, room), total, limit, room)


def _rooms(root: Path) -> Iterator[tuple[int, int]]:
    """What each cgroup leaves, and its limit: the cgroup of this process and all around it, of versions 1 and 2."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, place = line.split(":", 2)
        if not controllers:
            base, names, of_files = "sys/fs/cgroup", ("memory.max", "memory.current"), ""
        elif "memory" in controllers.split(","):
            base, of_files = "sys/fs/cgroup/memory", "total_"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # In a container the process's cgroup may be mounted as the top, and its path not exist inside.
        inner = PurePosixPath(place.removeprefix("/"))
        for part in (inner, *inner.parents):
            folder = root / base / part
            limit, used = (_read(folder / name).strip() for name in names)
            if limit.isdigit() and used.isdigit() and int(limit) < _NO_LIMIT:
                stat = _sizes(folder / "memory.stat")
                files = stat.get(f"{of_files}inactive_file", 0) + stat.get(f"{of_files}active_file", 0)
                yield max(0, int(limit) - int(used) + files), int(limit)


def _sizes(path: Path) -> dict[str, int]:
    """Lines of a name, a number, and perhaps kB."""
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
