"""Swaps between the cache on the device and pinned memory, in the order that their tasks require."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from weft.backends.cuda import swap
from weft.backends.cuda.swap import GpuSwap
from weft.ops.triton.device import Device
from weft.plan import IterationPlan, SwapTask
from weft.request import RequestId


def task(
    swap_id: int, blocks: tuple[int, ...], slots: tuple[int, ...], after: tuple[int, ...] = ()
) -> SwapTask:
    return SwapTask(swap_id, RequestId("1"), blocks, slots, -1, after)


def plan_of(out: tuple[SwapTask, ...] = (), back: tuple[SwapTask, ...] = ()) -> IterationPlan:
    return IterationPlan(0, 0, (), (), (), (), (), swap_out=out, swap_in=back)


@pytest.fixture
def cache(device: Device) -> torch.Tensor:
    return torch.arange(12 * 6, dtype=torch.float32, device=device.torch_device).reshape(12, 2, 3)


def reports(space: GpuSwap, count: int) -> tuple[set[int], dict[int, str]]:
    """Collects the reports of `count` swaps, from as many results as needed."""
    finished: set[int] = set()
    failed: dict[int, str] = {}
    while len(finished) + len(failed) < count:
        done, lost = space.take_reports(must_wait=True)
        finished |= set(done)
        failed |= lost
    return finished, failed


@pytest.mark.parametrize("slots_at_once", [1, 2, 3, 5, 100])
def test_swapped_blocks_come_back_unchanged_at_any_position(
    device: Device, cache: torch.Tensor, monkeypatch: pytest.MonkeyPatch, slots_at_once: int
) -> None:
    monkeypatch.setattr(swap, "_REGION_BYTES", slots_at_once * 24)
    space = GpuSwap(device, cache, 10)
    before = cache.clone()
    blocks, slots = (3, 4, 5, 9, 8, 0), (1, 2, 3, 4, 5, 9)
    space.launch(plan_of(out=(task(1, blocks, slots),)), None)
    assert reports(space, 1) == ({1}, {})
    cache.fill_(-1)
    device.synchronize()  # the swap stream waits for steps, not for this
    space.launch(plan_of(back=(task(2, (7, 6, 5, 4, 3, 2), slots, (1,)),)), None)
    assert reports(space, 1) == ({2}, {})
    assert (cache[[7, 6, 5, 4, 3, 2]] == before[list(blocks)]).all()
    assert (cache[[0, 1, 8, 9, 10, 11]] == -1).all()


def test_blocks_that_are_contiguous_in_both_places_are_one_copy(device: Device, cache: torch.Tensor) -> None:
    space = GpuSwap(device, cache, 10)
    assert list(space.full.runs(zip((3, 4, 5, 9, 10, 1), (1, 2, 3, 4, 6, 7), strict=True))) == [
        (3, 1, 3),
        (9, 4, 1),
        (10, 6, 1),
        (1, 7, 1),
    ]


def test_a_swap_that_depends_on_a_failed_one_fails_and_changes_nothing(
    device: Device,
    cache: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    space = GpuSwap(device, cache, 10)
    before = cache.clone()

    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise MemoryError("no memory can be pinned")

    with monkeypatch.context() as patch:
        patch.setattr(Device, "pinned", refuse)
        space.launch(plan_of(out=(task(1, (1,), (1,)),)), None)
        space.launch(plan_of(out=(task(4, (4,), (4,)),)), None)
    assert [record.message for record in caplog.records] == [
        "a swap failed, and its request is recomputed (no memory can be pinned); swap_blocks may be too large"
    ]
    space.launch(plan_of(back=(task(2, (2,), (1,), (1,)), task(3, (3,), (2,), (99,)))), None)
    finished, failed = reports(space, 4)
    assert finished == set() and set(failed) == {1, 2, 3, 4}
    assert "no memory can be pinned" in failed[1]
    assert "swap 1, which it depends on" in failed[2]
    assert (cache == before).all()


def test_each_swap_is_reported_once(device: Device, cache: torch.Tensor) -> None:
    space = GpuSwap(device, cache, 10)
    space.launch(plan_of(out=(task(1, (1,), (1,)), task(2, (2,), (2,)))), None)
    assert reports(space, 2) == ({1, 2}, {})
    assert space.take_reports(must_wait=True) == ((), {})


def test_pinned_memory_is_allocated_at_first_use(
    device: Device, cache: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap, "_REGION_BYTES", 2 * 24)
    space = GpuSwap(device, cache, 10)
    assert space.full.regions == [None] * 5
    space.launch(plan_of(out=(task(1, (1, 2), (4, 5)),)), None)
    assert [region is not None for region in space.full.regions] == [False, False, True, False, False]


def test_blocks_of_both_tiers_are_swapped_together_and_come_back_unchanged(
    device: Device, cache: torch.Tensor
) -> None:
    """Blocks from 12 and slots from 10 on belong to the store: the last full one and the first stored one are
    adjacent."""
    store = torch.arange(5 * 7, dtype=torch.int8, device=device.torch_device).reshape(5, 7)
    space = GpuSwap(device, cache, 10, store, 4)
    before, stored_before = cache.clone(), store.clone()
    space.launch(plan_of(out=(task(1, (11, 12, 13, 3), (9, 10, 11, 2)),)), None)
    assert reports(space, 1) == ({1}, {})
    cache.fill_(-1)
    store.fill_(-1)
    space.launch(plan_of(back=(task(2, (0, 15, 16, 5), (9, 10, 11, 2), (1,)),)), None)
    assert reports(space, 1) == ({2}, {})
    assert (cache[[0, 5]] == before[[11, 3]]).all() and (store[[3, 4]] == stored_before[[0, 1]]).all()
    assert (cache[[3, 11]] == -1).all() and (store[:3] == -1).all()


def test_a_block_is_not_swapped_to_a_slot_of_the_other_tier(device: Device, cache: torch.Tensor) -> None:
    store = torch.zeros(5, 7, dtype=torch.int8, device=device.torch_device)
    space = GpuSwap(device, cache, 10, store, 4)
    space.launch(plan_of(out=(task(1, (11, 12), (10, 9)),)), None)
    assert reports(space, 1) == (set(), {1: "a block and its slot are of different tiers"})
