"""Host memory: cgroup limits are found, and the default cache fits into them."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.backends.cpu.memory_budget import MemoryBudget
from weft.backends.host_memory import HostMemory, host_memory
from weft.errors import OutOfMemoryError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MEMINFO = "MemTotal:    8388608 kB\nMemFree: 1 kB\nMemAvailable:  4194304 kB\nHugePages_Total: 0\n"


def machine(root: Path, cgroup: str, files: dict[str, int | str], meminfo: str = MEMINFO) -> HostMemory:
    """`host_memory` of a root with these files; `files` are relative to /sys/fs/cgroup."""
    contents = {"proc/meminfo": meminfo, "proc/self/cgroup": cgroup}
    contents |= {f"sys/fs/cgroup/{name}": f"{content}\n" for name, content in files.items()}
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return host_memory(root)


def test_without_cgroup_limits_meminfo_says_what_is_available(tmp_path: Path) -> None:
    assert machine(tmp_path, "", {}) == HostMemory(4 * GIB, 8 * GIB)
    assert machine(tmp_path, "0::/user.slice\n", {}) == HostMemory(4 * GIB, 8 * GIB)
    assert host_memory(tmp_path / "nothing") == HostMemory(None, None)


def test_what_is_left_is_the_limit_of_the_cgroup_minus_what_it_uses(tmp_path: Path) -> None:
    files = {"app/memory.max": GIB, "app/memory.current": 300 * MIB}
    found = machine(tmp_path, "0::/app\n", files)
    assert found == HostMemory(724 * MIB, 8 * GIB, GIB, 724 * MIB)


def test_files_in_the_page_cache_of_a_cgroup_count_as_free(tmp_path: Path) -> None:
    stat = f"anon {100 * MIB}\nfile {600 * MIB}\ninactive_file {400 * MIB}\nactive_file {200 * MIB}\n"
    files = {"app/memory.max": GIB, "app/memory.current": 700 * MIB, "app/memory.stat": stat}
    assert machine(tmp_path, "0::/app\n", files).left_in_limit == 924 * MIB


def test_the_parent_cgroup_with_the_least_memory_left_counts(tmp_path: Path) -> None:
    files = {
        "memory.max": 100 * GIB,
        "memory.current": 0,
        "outer/memory.max": 4 * GIB,
        "outer/memory.current": 4 * GIB - 50 * MIB,
        "outer/middle/memory.max": "max",
        "outer/middle/memory.current": GIB,
        "outer/middle/inner/memory.max": GIB,
        "outer/middle/inner/memory.current": 0,
        "other/memory.max": MIB,
        "other/memory.current": 0,
    }
    found = machine(tmp_path, "0::/outer/middle/inner\n", files)
    assert (found.limit, found.left_in_limit, found.available) == (4 * GIB, 50 * MIB, 50 * MIB)


def test_a_cgroup_that_uses_more_than_its_limit_has_nothing_left(tmp_path: Path) -> None:
    found = machine(tmp_path, "0::/\n", {"memory.max": GIB, "memory.current": 2 * GIB})
    assert (found.left_in_limit, found.available) == (0, 0)


def test_a_limit_above_the_memory_of_the_machine_changes_nothing(tmp_path: Path) -> None:
    found = machine(tmp_path, "0::/\n", {"memory.max": 64 * GIB, "memory.current": 0})
    assert (found.available, found.left_in_limit, found.limit) == (4 * GIB, 64 * GIB, 64 * GIB)


def test_limits_of_cgroups_version_1_count_too(tmp_path: Path) -> None:
    cgroup = "11:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n"
    files = {
        "memory/docker/abc/memory.limit_in_bytes": GIB,
        "memory/docker/abc/memory.usage_in_bytes": 500 * MIB,
        "memory/docker/abc/memory.stat": f"inactive_file 1\ntotal_inactive_file {100 * MIB}\ntotal_active_file 0\n",
        "memory/memory.limit_in_bytes": 2**63 - 4096,
        "memory/memory.usage_in_bytes": 0,
    }
    found = machine(tmp_path, cgroup, files)
    assert (found.limit, found.left_in_limit) == (GIB, 624 * MIB)


@pytest.mark.parametrize("own", ["0::/\n", "0::/docker/not-visible-here\n", "0::/../elsewhere\n"])
def test_a_container_whose_cgroup_is_mounted_as_the_root_finds_its_limit(tmp_path: Path, own: str) -> None:
    assert machine(tmp_path, own, {"memory.max": GIB, "memory.current": 0}).limit == GIB


@pytest.mark.parametrize("content", ["", "nonsense", "-5", "1 2", "\0"])
def test_files_with_unreadable_content_are_ignored(tmp_path: Path, content: str) -> None:
    files = {"memory.max": content, "memory.current": content, "memory.stat": content}
    assert machine(tmp_path, "0::/\n", files, meminfo=content).limit is None


BLOCK = 256 * KIB


def budget_of(memory: HostMemory, weights: int = 100 * MIB) -> MemoryBudget:
    return MemoryBudget(memory, weights)


def limited(left: int, available: int = 64 * GIB) -> HostMemory:
    return HostMemory(min(left, available), 64 * GIB, left + 50 * MIB, left)


def test_the_default_cache_and_swap_fit_into_a_limit_with_weights_and_reserve() -> None:
    for left in (400, 500, 800, 1500, 3000, 6000, 20_000):
        budget = budget_of(limited(left * MIB))
        cache = budget.default_cache_bytes(BLOCK, 16, 8192)
        swap = budget.default_swap_blocks(cache // BLOCK, cache) * BLOCK
        assert 512 // 16 * BLOCK <= cache <= 2 * GIB
        assert cache + swap + (100 + 256) * MIB <= left * MIB
        budget.check(cache, swap)
    assert cache == 2 * GIB and swap == GIB


def test_the_default_cache_is_the_whole_context_if_twice_that_is_free() -> None:
    unlimited = budget_of(HostMemory(20 * GIB, 24 * GIB))
    assert unlimited.default_cache_bytes(BLOCK, 16, 8192) == 2 * GIB
    assert unlimited.default_cache_bytes(BLOCK, 16, 262_144) == 4 * GIB
    assert unlimited.default_cache_bytes(BLOCK, 16, 1_048_576) == 2 * GIB
    assert budget_of(HostMemory(1256 * MIB, GIB)).default_cache_bytes(BLOCK, 16, 8192) == 450 * MIB


def test_without_a_limit_requested_sizes_are_not_checked() -> None:
    crowded = budget_of(HostMemory(10 * MIB, 64 * GIB))
    assert crowded.default_cache_bytes(BLOCK, 16, 8192) == 512 // 16 * BLOCK
    crowded.check(32 * GIB, 16 * GIB)
    with crowded.for_weights():
        pass
    assert crowded.default_swap_blocks(100, 100 * BLOCK) == 50


def test_weights_beyond_a_limit_are_rejected_with_needed_and_free_memory_and_advice() -> None:
    with pytest.raises(OutOfMemoryError) as caught, budget_of(limited(500 * MIB), GIB).for_weights():
        raise AssertionError("nothing is loaded")
    message = str(caught.value)
    assert "1280 MiB of memory are needed (1024 for the weights" in message
    assert "500 MiB are free inside the cgroup's limit of 550 MiB" in message
    assert "raise the limit" in message and caught.value.exit_code == 2


def test_a_limit_too_small_for_a_short_context_is_rejected() -> None:
    with pytest.raises(OutOfMemoryError, match="8 for KV cache and swap space"):
        budget_of(limited(360 * MIB)).default_cache_bytes(BLOCK, 16, 8192)


def test_requested_memory_beyond_a_limit_is_rejected_with_what_fits() -> None:
    budget = budget_of(limited(GIB))
    budget.check(668 * MIB, 0)
    assert budget.default_swap_blocks(600 * MIB // BLOCK, 600 * MIB) == 68 * MIB // BLOCK
    with pytest.raises(OutOfMemoryError, match=r"set memory \(and swap_blocks.* to 668 MiB at most"):
        budget.check(600 * MIB, 69 * MIB)


def test_running_out_of_memory_while_weights_load_gives_one_sentence() -> None:
    with pytest.raises(OutOfMemoryError) as caught, budget_of(HostMemory(GIB, GIB)).for_weights():
        raise MemoryError
    assert "356 MiB of memory are needed" in str(caught.value) and "1024 MiB are free;" in str(caught.value)
