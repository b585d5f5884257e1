"""Compares the cache manager with a model of the content. Swaps run in any order that their dependencies allow."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.plan import SwapTask
from weft.request import RequestId
from weft.scheduling.cache.allocation import KvCacheAllocation
from weft.scheduling.cache.block_pool import BlockCounts
from weft.scheduling.cache.manager import KvCacheManager


@dataclass
class Holder:
    """A request: its allocation, and the expected content of each block or swap slot."""

    allocation: KvCacheAllocation
    content: list[int]
    swap_in: int | None = None
    """The swap-in that it waits for."""


@dataclass
class Step:
    """The writes of one step."""

    number: int
    writes: dict[int, int]
    after_swaps: tuple[int, ...]
    freed: tuple[int, ...] = field(default=())


class CacheMachine(RuleBasedStateMachine):
    """The manager plans. A simulated device executes later: steps in order, swaps in any allowed order."""

    @initialize(blocks=st.integers(1, 8), rows=st.integers(1, 4), slots=st.integers(0, 8))
    def start(self, blocks: int, rows: int, slots: int) -> None:
        self.manager = KvCacheManager(blocks, rows, slots, bytes_per_block=64)
        self.holders: dict[RequestId, Holder] = {}
        self.device: dict[int, int] = {}
        self.host: dict[int, int] = {}
        self.steps: deque[Step] = deque()
        self.swaps: dict[int, tuple[SwapTask, bool]] = {}
        self.executed: list[int] = []
        self.reported: set[int] = set()
        self.next_step = 0
        self.last_step_over = -1
        self.next_value = 0
        self.next_id = 0
        self.writes: dict[int, int] = {}

    # ------------------------------------------------------------------ helpers

    def resident(self) -> list[Holder]:
        """Requests that may be in a step: not swapped out, and not being swapped in."""
        return [h for h in self.holders.values() if h.allocation.row is not None and h.swap_in is None]

    def swapped(self) -> list[Holder]:
        return [h for h in self.holders.values() if h.allocation.is_swapped]

    def fill(self, holder: Holder, first: int) -> None:
        """Writes new content to the blocks from index `first` on, in the step being planned."""
        for block in holder.allocation.blocks[first:]:
            holder.content.append(self.next_value)
            self.writes[block] = self.next_value
            self.next_value += 1

    def snapshot(self) -> tuple[object, ...]:
        manager = self.manager
        tables = {rid: tuple(h.allocation.blocks) for rid, h in self.holders.items()}
        slots = {rid: tuple(h.allocation.swap_slots) for rid, h in self.holders.items()}
        return manager.stats(), tables, slots, manager.swaps_in_flight

    # ------------------------------------------------------------------ planning

    @rule(count=st.integers(0, 4), data=st.data())
    def allocate(self, count: int, data: st.DataObject) -> None:
        # A prefix hit on blocks that are written, or that this step writes.
        donor = data.draw(st.none() | st.sampled_from(self.resident())) if self.resident() else None
        shared = [] if donor is None else donor.allocation.blocks[:2]
        before = self.snapshot()
        fits = self.manager.free_rows > 0 and count <= self.manager.pool.available
        assert self.manager.can_allocate(BlockCounts(count)) is fits
        request_id = RequestId(str(self.next_id))
        allocation = self.manager.allocate(request_id, BlockCounts(count), shared)
        assert (allocation is not None) is fits
        if allocation is None:
            assert self.snapshot() == before
            return
        self.next_id += 1
        holder = Holder(allocation, [] if donor is None else donor.content[: len(shared)])
        self.holders[request_id] = holder
        self.fill(holder, len(shared))

    @precondition(lambda self: self.resident())
    @rule(which=st.integers(0, 9), count=st.integers(0, 3))
    def extend(self, which: int, count: int) -> None:
        holder = self.resident()[which % len(self.resident())]
        before, first = self.snapshot(), len(holder.allocation.blocks)
        fits = count <= self.manager.pool.available
        assert self.manager.extend(holder.allocation, BlockCounts(count)) is fits
        if fits:
            self.fill(holder, first)
        else:
            assert self.snapshot() == before

    @precondition(lambda self: self.resident())
    @rule(which=st.integers(0, 9), other=st.integers(0, 9))
    def adopt(self, which: int, other: int) -> None:
        holder = self.resident()[which % len(self.resident())]
        donor = self.resident()[other % len(self.resident())]
        if donor.allocation.blocks:
            self.manager.adopt(holder.allocation, donor.allocation.blocks[0])
            holder.content.append(donor.content[0])

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 9), keep=st.integers(0, 4))
    def truncate(self, which: int, keep: int) -> None:
        holder = list(self.holders.values())[which % len(self.holders)]
        was_swapped = holder.allocation.is_swapped
        self.manager.truncate(holder.allocation, keep)
        del holder.content[keep:]
        if was_swapped and not holder.content:
            del self.holders[holder.allocation.request_id]

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 9))
    def free(self, which: int) -> None:
        request_id, holder = list(self.holders.items())[which % len(self.holders)]
        row = self.manager.free(holder.allocation)
        del self.holders[request_id]
        if row is not None:
            self.manager.free_row(row)
        before = self.snapshot()
        with pytest.raises(ValueError, match="released already"):
            self.manager.free(holder.allocation)
        if row is not None:
            with pytest.raises(ValueError, match=f"row {row} is free already"):
                self.manager.free_row(row)
        assert self.snapshot() == before

    @precondition(lambda self: self.resident())
    @rule(which=st.integers(0, 9))
    def swap_out(self, which: int) -> None:
        self.plan_step()  # the copy runs after the step that fills the blocks
        holder = self.resident()[which % len(self.resident())]
        before = self.snapshot()
        free_slots = self.manager.num_swap_slots - self.manager.stats().swap_blocks_used
        fits = 0 < len(holder.allocation.blocks) <= free_slots
        assert self.manager.can_swap_out(holder.allocation) is fits
        swap = self.manager.swap_out(holder.allocation, after_step=self.next_step - 1)
        assert (swap is not None) is fits
        if swap is None:
            assert self.snapshot() == before
            return
        task, row = swap
        self.manager.free_row(row)
        self.swaps[task.swap_id] = (task, True)
        assert self.manager.is_swapped(holder.allocation.request_id)
        self.misuse_swapped(holder)

    def misuse_swapped(self, holder: Holder) -> None:
        before = self.snapshot()
        for misuse in (
            lambda: self.manager.extend(holder.allocation, BlockCounts(1)),
            lambda: self.manager.swap_out(holder.allocation, 0),
            lambda: self.manager.adopt(holder.allocation, 0),
            lambda: self.manager.allocate(holder.allocation.request_id, BlockCounts(1)),
        ):
            with pytest.raises(ValueError, match=f"request {holder.allocation.request_id} "):
                misuse()
        assert self.snapshot() == before

    @precondition(lambda self: self.swapped())
    @rule(which=st.integers(0, 9))
    def swap_in(self, which: int) -> None:
        self.plan_step()
        holder = self.swapped()[which % len(self.swapped())]
        before = self.snapshot()
        fits = self.manager.can_allocate(BlockCounts(len(holder.allocation.swap_slots)))
        task = self.manager.swap_in(holder.allocation, after_step=self.next_step - 1)
        assert (task is not None) is fits
        if task is None:
            assert self.snapshot() == before
            return
        self.swaps[task.swap_id] = (task, False)
        holder.swap_in = task.swap_id

    @precondition(lambda self: self.resident())
    @rule(which=st.integers(0, 9))
    def misuse_resident(self, which: int) -> None:
        holder = self.resident()[which % len(self.resident())]
        before = self.snapshot()
        with pytest.raises(ValueError, match="is not swapped out"):
            self.manager.swap_in(holder.allocation, 0)
        with pytest.raises(ValueError, match="already holds memory"):
            self.manager.allocate(holder.allocation.request_id, BlockCounts(0))
        assert self.snapshot() == before

    @rule()
    def plan_step(self) -> None:
        writes, self.writes = self.writes, {}
        held = {block for holder in self.holders.values() for block in holder.allocation.blocks}
        after, freed = self.manager.take_dependencies(), self.manager.take_freed()
        assert held.isdisjoint(freed), "a block in use is reported as freed"
        self.steps.append(Step(self.next_step, writes, after, freed))
        self.next_step += 1

    # ------------------------------------------------------------------ the simulated device

    def is_ready(self, swap_id: int) -> bool:
        task, _ = self.swaps[swap_id]
        return task.after_step <= self.last_step_over and self.swaps.keys().isdisjoint(task.after_swaps)

    @precondition(lambda self: self.swaps)
    @rule(which=st.integers(0, 9))
    def run_a_swap(self, which: int) -> None:
        ready = [swap_id for swap_id in self.swaps if self.is_ready(swap_id)]
        if not ready:
            return
        swap_id = ready[which % len(ready)]
        task, is_out = self.swaps.pop(swap_id)
        for block, slot in zip(task.blocks, task.swap_slots, strict=True):
            if is_out:
                self.host[slot] = self.device.get(block, -1)
            else:
                self.device[block] = self.host.get(slot, -1)
        self.executed.append(swap_id)

    @precondition(lambda self: self.steps)
    @rule()
    def run_a_step(self) -> None:
        if self.swaps.keys().isdisjoint(self.steps[0].after_swaps):
            step = self.steps.popleft()
            self.device.update(dict.fromkeys(step.freed, -1))
            self.device.update(step.writes)
            self.last_step_over = step.number

    @precondition(lambda self: self.executed)
    @rule(which=st.integers(0, 9))
    def report_a_swap(self, which: int) -> None:
        swap_id = self.executed.pop(which % len(self.executed))
        self.manager.finish_swap(swap_id)
        for holder in self.holders.values():
            if holder.swap_in == swap_id:
                holder.swap_in = None
                # Nothing else writes to these blocks, so the content must be there.
                found = [self.device.get(block) for block in holder.allocation.blocks]
                assert found == holder.content, "a swap-in restored other content"

    # ------------------------------------------------------------------ invariants

    @invariant()
    def manager_equals_the_model(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        stats = self.manager.stats()
        assert stats.requests_swapped == len(self.swapped())
        assert stats.rows_used == sum(h.allocation.row is not None for h in self.holders.values())
        assert stats.blocks_used == len({b for h in self.holders.values() for b in h.allocation.blocks})
        assert stats.swap_blocks_used == sum(len(h.content) for h in self.swapped())
        assert len(self.manager.swaps_in_flight) == len(self.swaps) + len(self.executed)

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.plan_step()
        while self.steps or self.swaps:
            left = len(self.steps) + len(self.swaps)
            self.run_a_step() if self.steps else None
            if self.swaps:
                self.run_a_swap(1)
            assert len(self.steps) + len(self.swaps) < left, "the dependencies can never be met"
        for holder in self.holders.values():
            memory, indices = (
                (self.host, holder.allocation.swap_slots)
                if holder.allocation.is_swapped
                else (self.device, holder.allocation.blocks)
            )
            assert [memory.get(index) for index in indices] == holder.content, "content was lost"
        for holder in list(self.holders.values()):
            row = self.manager.free(holder.allocation)
            if row is not None:
                self.manager.free_row(row)
        self.manager.check_integrity()
        stats = self.manager.stats()
        assert (stats.rows_used, stats.blocks_used, stats.swap_blocks_used) == (0, 0, 0)
        assert stats.utilisation == 0.0


CacheMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestCacheKeepsContentInAnyOrderOfSwaps = CacheMachine.TestCase


def test_a_stale_allocation_cannot_free_the_memory_of_a_later_request_with_its_id() -> None:
    manager = KvCacheManager(num_blocks=4, num_rows=2)
    old = manager.allocate(RequestId("1"), BlockCounts(2))
    assert old is not None
    row = manager.free(old)
    assert row is not None
    manager.free_row(row)
    new = manager.allocate(RequestId("1"), BlockCounts(2))
    with pytest.raises(ValueError):
        manager.free(old)
    assert new is not None and len(new.blocks) == 2 and manager.holds(RequestId("1"))
    manager.check_integrity()


def test_a_rejected_prefix_hit_leaves_no_references() -> None:
    manager = KvCacheManager(num_blocks=4, num_rows=2)
    donor = manager.allocate(RequestId("1"), BlockCounts(1))
    assert donor is not None
    free_block = next(b for b in range(4) if b not in donor.blocks)
    with pytest.raises(ValueError, match=f"block {free_block} is free"):
        manager.allocate(RequestId("2"), BlockCounts(1), [donor.blocks[0], free_block])
    manager.check_integrity()


def test_a_row_that_a_request_holds_cannot_be_freed() -> None:
    manager = KvCacheManager(num_blocks=4, num_rows=2)
    holder = manager.allocate(RequestId("1"), BlockCounts(1))
    assert holder is not None and holder.row is not None
    with pytest.raises(ValueError):
        manager.free_row(holder.row)
    manager.check_integrity()


def test_a_request_that_cannot_be_swapped_in_keeps_its_swap_slots() -> None:
    manager = KvCacheManager(num_blocks=2, num_rows=2, swap_blocks=2)
    first = manager.allocate(RequestId("1"), BlockCounts(2))
    assert first is not None
    swap = manager.swap_out(first, after_step=0)
    assert swap is not None
    manager.free_row(swap[1])
    slots = list(first.swap_slots)
    assert manager.allocate(RequestId("2"), BlockCounts(2)) is not None
    assert manager.swap_in(first, after_step=1) is None
    assert first.swap_slots == slots and manager.is_swapped(RequestId("1"))
    manager.check_integrity()


def test_a_step_that_reuses_a_block_of_a_swap_depends_on_that_swap() -> None:
    manager = KvCacheManager(num_blocks=2, num_rows=2, swap_blocks=2)
    first = manager.allocate(RequestId("1"), BlockCounts(2))
    assert first is not None and manager.take_dependencies() == ()
    swap = manager.swap_out(first, after_step=0)
    assert swap is not None
    manager.free_row(swap[1])
    assert manager.take_freed() == (), "a block that a swap copies is not dead"
    second = manager.allocate(RequestId("2"), BlockCounts(1))
    assert second is not None
    assert manager.take_dependencies() == (swap[0].swap_id,)
    assert manager.take_dependencies() == ()
    manager.finish_swap(swap[0].swap_id)
    assert manager.extend(second, BlockCounts(1)) and manager.take_dependencies() == ()


def test_a_swap_to_a_slot_of_another_swap_depends_on_it() -> None:
    manager = KvCacheManager(num_blocks=2, num_rows=2, swap_blocks=1)
    first = manager.allocate(RequestId("1"), BlockCounts(1))
    second = manager.allocate(RequestId("2"), BlockCounts(1))
    assert first is not None and second is not None
    out = manager.swap_out(first, after_step=0)
    assert out is not None
    manager.free_row(out[1])
    back = manager.swap_in(first, after_step=0)
    assert back is not None and out[0].swap_id in back.after_swaps
    other = manager.swap_out(second, after_step=0)
    assert other is not None and other[0].swap_slots == back.swap_slots
    assert back.swap_id in other[0].after_swaps


def test_a_swap_into_a_block_of_another_swap_depends_on_it_and_guards_the_block() -> None:
    manager = KvCacheManager(num_blocks=1, num_rows=2, swap_blocks=2)

    def swap_out(request_id: int) -> tuple[KvCacheAllocation, SwapTask]:
        allocation = manager.allocate(RequestId(str(request_id)), BlockCounts(1))
        assert allocation is not None
        swap = manager.swap_out(allocation, after_step=0)
        assert swap is not None
        manager.free_row(swap[1])
        return allocation, swap[0]

    first, first_out = swap_out(1)
    manager.finish_swap(first_out.swap_id)
    _, second_out = swap_out(2)
    back = manager.swap_in(first, after_step=0)
    assert back is not None and back.blocks == second_out.blocks
    assert second_out.swap_id in back.after_swaps, (
        "else the content of the second request is overwritten before it is copied"
    )
    manager.finish_swap(second_out.swap_id)
    row = manager.free(first)  # cancelled during its swap-in
    assert row is not None
    manager.free_row(row)
    manager.take_dependencies()
    assert manager.allocate(RequestId("3"), BlockCounts(1)) is not None
    assert manager.take_dependencies() == (back.swap_id,), (
        "the end of an older swap does not end the guard of a newer one"
    )
