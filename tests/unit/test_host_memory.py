"""How much memory of the host may be taken: what the system says, inside the limit of the cgroup."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.backends.opening import available_memory

MEMORY = "MemTotal:       64000 kB\nMemAvailable:   48000 kB\nHugePages_Total:       0\n"
STAT = "anon 100\ninactive_file 2000\nactive_file 1000\n"


def machine(root: Path, **cgroup: str) -> Path:
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(MEMORY)
    folder = root / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    for name, content in cgroup.items():
        (folder / name.replace("_", ".")).write_text(content)
    return root


def test_without_a_cgroup_it_is_what_the_system_says(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path)) == 48000 << 10


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("max\n", 48000 << 10),
        ("10000000\n", 10_000_000 - 4_000_000 + 3000),
        ("99999999999\n", 48000 << 10),
        ("1000\n", 0),
    ],
)
def test_a_cgroup_leaves_what_it_does_not_use_and_its_files(
    tmp_path: Path, limit: str, expected: int
) -> None:
    root = machine(tmp_path, memory_max=limit, memory_current="4000000\n", memory_stat=STAT)
    assert available_memory(root) == expected


def test_where_nothing_is_said_it_is_unknown(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None
    machine(tmp_path)
    (tmp_path / "proc/meminfo").write_text("something else\n")
    assert available_memory(tmp_path) is None


def test_of_this_machine_it_is_known_or_unknown_without_an_error() -> None:
    known = available_memory()
    assert known is None or known >= 0
