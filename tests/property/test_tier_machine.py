"""Compares the two tiers of the cache manager with a model of the content. Steps succeed later, or fail and are
undone."""

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
from weft.scheduling.cache.block_pool import BlockCounts, BlockHash
from weft.scheduling.cache.manager import KvCacheManager

BLOCK = 2
MAX_IN_FLIGHT = 2


@dataclass
class Holder:
    """A request: its allocation, and the expected content of each block."""

    allocation: KvCacheAllocation
    content: list[str] = field(default_factory=list)
    scheduled: int = 0
    computed: int = 0
    last_step: int = -1
    swap_in: int | None = None
    """The swap-in that it waits for."""


@dataclass
class Step:
    number: int
    holder: Holder
    end: int
    writes: dict[int, str]
    first_written: list[int]
    """The blocks that no earlier step has written to."""
    moves: dict[int, int]
    registered: list[tuple[int, BlockHash]]
    swaps: list[tuple[SwapTask, bool]] = field(default_factory=list)
    """(swap, whether it is out) of the swaps that run after this step."""


def quantised(content: str) -> str:
    return f"q({content})"


def num_stored(length: int, tail_blocks: int) -> int:
    """How many blocks the last of `length` positions reads from the store."""
    return max(0, (length - tail_blocks * BLOCK) // BLOCK)


class TierMachine(RuleBasedStateMachine):
    """Every step computes some positions of one request. The simulated device executes it when it ends."""

    @initialize(
        tail=st.integers(1, 2),
        more=st.integers(0, 4),
        store=st.integers(2, 6),
        slots=st.sampled_from([BlockCounts(0, 0), BlockCounts(4, 3), BlockCounts(9, 9)]),
        shares=st.booleans(),
    )
    def start(self, tail: int, more: int, store: int, slots: BlockCounts, shares: bool) -> None:
        self.tail, self.shares = tail, shares
        self.manager = KvCacheManager(
            tail + 2 + more,
            num_rows=3,
            swap_blocks=slots.full,
            bytes_per_block=8,
            block_size=BLOCK,
            tail_blocks=tail,
            store_blocks=store,
            store_swap_blocks=slots.store,
            bytes_per_store_block=4,
        )
        self.max_length = (store + tail) * BLOCK
        self.holders: dict[RequestId, Holder] = {}
        self.memory: dict[int, str] = {}
        self.host: dict[int, str] = {}
        self.in_flight: deque[Step] = deque()
        self.next_id = self.next_step = self.moved = 0

    # ------------------------------------------------------------------ helpers

    def hashes(self, holder: Holder) -> list[BlockHash]:
        """Content serves as its own hash. Without sharing there are no hashes."""
        complete = holder.content[: self.max_length] if self.shares else []
        return [content.encode() for content in complete]

    def resident(self) -> list[Holder]:
        """Requests that may be in a step: not swapped out, and not being swapped in."""
        return [h for h in self.holders.values() if h.allocation.row is not None and h.swap_in is None]

    def swapped(self) -> list[Holder]:
        return [h for h in self.holders.values() if h.allocation.is_swapped]

    def content_of(self, holder: Holder, num_blocks: int) -> list[str]:
        """With sharing, all requests have the same content: what one moves to the store is a hit for another."""
        owner = "" if self.shares else f"{holder.allocation.request_id}:"
        return [f"{owner}{index}" for index in range(num_blocks)]

    # ------------------------------------------------------------------ requests

    @rule()
    def arrive(self) -> None:
        allocation = self.manager.allocate(RequestId(str(self.next_id)), BlockCounts(0))
        rows_used = sum(h.allocation.row is not None for h in self.holders.values())
        assert (allocation is not None) is (rows_used < 3)
        if allocation is not None:
            self.holders[allocation.request_id] = Holder(allocation)
            self.next_id += 1

    @precondition(lambda self: self.resident() and len(self.in_flight) < MAX_IN_FLIGHT)
    @rule(which=st.integers(0, 9), count=st.integers(1, 9))
    def compute(self, which: int, count: int) -> None:
        holder = self.resident()[which % len(self.resident())]
        allocation, start = holder.allocation, holder.scheduled
        count = min(count, self.max_length - start)
        if not count:
            return
        end, first = start + count, len(allocation.blocks)
        needed = self.manager.needed(first, allocation.stored, end)
        affordable = self.manager.affordable(first, allocation.stored, start, self.manager.available)
        assert self.manager.available.covers(needed) is (affordable >= count)
        content = self.content_of(holder, -(-end // BLOCK))
        hashes = [c.encode() for c in content[: end // BLOCK]] if self.shares else []
        before = self.manager.available, tuple(allocation.blocks)
        if not self.manager.extend(allocation, needed, hashes):
            assert affordable < count
            assert (self.manager.available, tuple(allocation.blocks)) == before
            return
        writes = {allocation.blocks[i]: content[i] for i in range(start // BLOCK, len(content))}
        first_written = allocation.blocks[-(-start // BLOCK) :]
        moves, registered = self.manager.move(allocation, hashes, self.next_step)
        border = num_stored(end, self.tail)
        assert allocation.stored == border, "not all blocks before the tail are in the store"
        held = [allocation.leaving.get(i, block) for i, block in enumerate(allocation.blocks)]
        still_read = held[num_stored(start + 1, self.tail) :]
        assert all(block < self.manager.pool.num_blocks for block in still_read), (
            "a block is read in full precision and not held"
        )
        copied = {move.block: move.origin for move in moves if move.origin != -1}
        dependencies = set(self.manager.take_dependencies())
        # The newest first: a dependency includes the dependencies of that swap.
        for task in reversed([task for step in self.in_flight for task, _ in step.swaps]):
            if task.swap_id in dependencies:
                dependencies.update(task.after_swaps)
            touches = not set(task.blocks).isdisjoint((*first_written, *copied))
            assert not touches or task.swap_id in dependencies, "a step writes to a block of a swap in flight"
        self.in_flight.append(Step(self.next_step, holder, end, writes, first_written, copied, registered))
        holder.content, holder.scheduled, holder.last_step = content, end, self.next_step
        self.next_step += 1
        self.moved += len(moves)

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 9))
    def leave(self, which: int) -> None:
        holder = list(self.holders.values())[which % len(self.holders)]
        row = self.manager.free(holder.allocation)
        if row is not None:
            self.manager.free_row(row)
        del self.holders[holder.allocation.request_id]

    @precondition(lambda self: self.resident())
    @rule(which=st.integers(0, 9))
    def swap_out(self, which: int) -> None:
        holder = self.resident()[which % len(self.resident())]
        swap = self.manager.swap_out(holder.allocation, self.next_step - 1)
        if swap is not None:
            self.manager.free_row(swap[1])
            self.copy_later(swap[0], is_out=True)

    @precondition(lambda self: self.swapped())
    @rule(which=st.integers(0, 9))
    def swap_in(self, which: int) -> None:
        holder = self.swapped()[which % len(self.swapped())]
        if self.in_flight and holder.last_step >= self.in_flight[0].number:
            return  # a request is not swapped in while it is in a step in flight
        task = self.manager.swap_in(holder.allocation, self.next_step - 1)
        if task is not None:
            holder.swap_in = task.swap_id
            self.copy_later(task, is_out=False)

    def copy_later(self, task: SwapTask, is_out: bool) -> None:
        if self.in_flight:
            self.in_flight[-1].swaps.append((task, is_out))
        else:
            self.copy(task, is_out)

    def copy(self, task: SwapTask, is_out: bool) -> None:
        for block, slot in zip(task.blocks, task.swap_slots, strict=True):
            source, target, origin, place = (
                (self.memory, self.host, block, slot) if is_out else (self.host, self.memory, slot, block)
            )
            target[place] = source.get(origin, "nothing")
        self.manager.finish_swap(task.swap_id)
        for holder in self.holders.values():
            if holder.swap_in == task.swap_id:
                holder.swap_in = None

    # ------------------------------------------------------------------ steps end

    @precondition(lambda self: self.in_flight)
    @rule()
    def succeed(self) -> None:
        step = self.in_flight.popleft()
        self.memory.update(step.writes)
        for block, origin in step.moves.items():
            self.memory[block] = quantised(self.memory[origin])
        if step.holder.allocation.request_id in self.holders:
            step.holder.computed = step.end
        for task, is_out in step.swaps:
            self.copy(task, is_out)
        self.manager.settle_moves(step.number)
        self.check_content()

    @precondition(lambda self: self.in_flight)
    @rule()
    def fail(self) -> None:
        """All steps in flight fail. Their swaps still run, each before the steps that depend on it."""
        for step in self.in_flight:
            self.memory.update(dict.fromkeys((*step.first_written, *step.moves), "garbage"))
            for block, block_hash in step.registered:
                self.manager.pool_of(block).unregister(block, block_hash)
            for task, is_out in step.swaps:
                self.copy(task, is_out)
        self.in_flight.clear()
        self.manager.undo_moves()
        for request_id, holder in list(self.holders.items()):
            allocation, num_blocks = holder.allocation, -(-holder.computed // BLOCK)
            if not allocation.is_swapped and allocation.row is None:
                del self.holders[request_id]  # its swap slots held invalid content
                continue
            self.manager.truncate(allocation, num_blocks)
            if allocation.row is None and not allocation.is_swapped:
                del self.holders[request_id]
                continue
            holder.scheduled = holder.computed
            holder.content = holder.content[:num_blocks]
        self.check_content()

    # ------------------------------------------------------------------ invariants

    def check_content(self) -> None:
        """All computed content is in the tier from which the next position reads it."""
        for holder in self.holders.values():
            allocation = holder.allocation
            if allocation.is_swapped or holder.swap_in is not None or holder.scheduled != holder.computed:
                continue
            border = num_stored(holder.computed, self.tail)
            expected = [quantised(c) if i < border else c for i, c in enumerate(holder.content)]
            found = [self.memory.get(block) for block in allocation.blocks]
            assert found == expected, "content was lost"

    @invariant()
    def manager_equals_the_model(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        figures = self.manager.two_tier()
        assert figures is not None
        tables = [h.allocation.blocks for h in self.holders.values()]
        leaving = [list(h.allocation.leaving.values()) for h in self.holders.values()]
        in_use = {block for blocks in (*tables, *leaving) for block in blocks if block >= 0}
        first = self.manager.pool.num_blocks
        assert figures.tail_tokens == BLOCK * sum(block < first for block in in_use)
        assert figures.store_tokens == BLOCK * sum(block >= first for block in in_use)
        assert (
            figures.tail_bytes == 4 * figures.tail_tokens and figures.store_bytes == 2 * figures.store_tokens
        )
        assert 1.0 <= figures.compression_ratio <= 2.0 or leaving
        assert figures.migrations_shared <= figures.migrations <= self.moved

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        while self.in_flight:
            self.succeed()
        for holder in list(self.holders.values()):
            row = self.manager.free(holder.allocation)
            if row is not None:
                self.manager.free_row(row)
        self.manager.check_integrity()
        stats = self.manager.stats()
        assert (stats.blocks_used, stats.store_blocks_used) == (0, 0)
        assert (stats.swap_blocks_used, stats.store_swap_blocks_used) == (0, 0)
        assert stats.utilisation == 0.0


TierMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestTiersKeepContentWhetherStepsSucceedOrFail = TierMachine.TestCase


def two_tiers(full: int = 6, store: int = 6, swap: int = 0) -> KvCacheManager:
    return KvCacheManager(
        full,
        num_rows=2,
        swap_blocks=swap,
        bytes_per_block=128,
        block_size=BLOCK,
        tail_blocks=1,
        store_blocks=store,
        store_swap_blocks=swap,
        bytes_per_store_block=32,
    )


def computing(
    manager: KvCacheManager, request: int, end: int, hashes: tuple[BlockHash, ...] = ()
) -> KvCacheAllocation:
    """A new request that computes its first `end` positions in step 0."""
    allocation = manager.allocate(RequestId(str(request)), manager.needed(0, 0, end), hashes=hashes)
    assert allocation is not None
    manager.move(allocation, hashes, step=0)
    return allocation


def test_the_full_block_of_a_move_is_held_until_its_step_ends() -> None:
    manager = two_tiers()
    allocation = computing(manager, 1, end=6)
    assert manager.available.full == 3 and allocation.stored == 2 and sorted(allocation.leaving) == [0, 1]
    manager.settle_moves(0)
    assert manager.available.full == 5 and not allocation.leaving


def test_content_that_another_request_moved_is_shared_and_not_copied() -> None:
    manager, hashes = two_tiers(), (b"a", b"b", b"c")
    first = computing(manager, 1, 6, hashes)
    second = manager.allocate(RequestId("2"), manager.needed(0, 0, 6), hashes=hashes)
    assert second is not None
    moves, registered = manager.move(second, hashes, step=0)
    assert [move.origin for move in moves] == [-1, -1] and registered == []
    assert second.blocks[:2] == first.blocks[:2]
    manager.settle_moves(0)
    figures = manager.two_tier()
    assert figures is not None and (figures.migrations, figures.migrations_shared) == (4, 2)


def test_a_swap_out_of_blocks_that_a_failed_step_moves_is_dropped() -> None:
    manager = two_tiers(swap=6)
    allocation = computing(manager, 1, end=6)
    swap = manager.swap_out(allocation, after_step=0)
    assert swap is not None and [slot >= 6 for slot in swap[0].swap_slots] == [True, True, False]
    manager.free_row(swap[1])
    manager.undo_moves()
    assert not allocation.is_swapped and manager.holders == []
    manager.check_integrity()


def test_full_blocks_that_moved_are_evicted_first_unless_they_were_prefix_hits() -> None:
    manager = two_tiers(full=6)
    cached = computing(manager, 1, end=2)
    manager.pool.register(cached.blocks[0], b"cached")
    manager.free_row(manager.free(cached) or 0)
    allocation = computing(manager, 2, end=6)
    for index, block_hash in enumerate((b"useful", b"old")):
        manager.pool.register(allocation.leaving[index], block_hash)
    manager.pool.share(allocation.leaving[0])
    manager.pool.release([allocation.leaving[0]])
    manager.settle_moves(0)
    kept = []
    while manager.pool.available:
        manager.pool.allocate(1)
        kept.append(
            [name for name in (b"cached", b"useful", b"old") if manager.pool.lookup(name) is not None]
        )
    assert kept[-3:] == [[b"cached", b"useful"], [b"useful"], []]


def test_a_rejected_prefix_hit_over_both_tiers_leaves_no_references() -> None:
    manager = two_tiers(full=4)
    donor = computing(manager, 1, end=6, hashes=(b"a", b"b", b"c"))
    manager.settle_moves(0)
    free_block = next(b for b in range(4) if b not in donor.blocks)
    with pytest.raises(ValueError, match=f"block {free_block} is free"):
        manager.allocate(RequestId("2"), BlockCounts(1), [*donor.blocks[:2], free_block])
    manager.check_integrity()
