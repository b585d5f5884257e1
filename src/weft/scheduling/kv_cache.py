"""Owns rows, block tables and swap space: which request holds what, and which swaps still touch it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.plan import SwapTask
from weft.request import RequestId
from weft.scheduling.blocks import BlockPool


@dataclass(frozen=True, slots=True)
class KvCacheManagerStats:
    """Derived from the truth at the moment of asking."""

    rows: int
    rows_used: int
    blocks: int
    blocks_used: int
    blocks_cached: int
    swap_blocks: int
    swap_blocks_used: int
    requests_swapped: int
    bytes_per_block: int

    @property
    def utilisation(self) -> float:
        return self.blocks_used / self.blocks


class KvCacheAllocation:
    """What one request holds: a row and blocks while it runs, swap slots while it is swapped out."""

    __slots__ = ("blocks", "request_id", "row", "swap_slots")

    def __init__(self, request_id: RequestId) -> None:
        self.request_id = request_id
        self.row: int | None = None
        self.blocks: list[int] = []
        self.swap_slots: list[int] = []

    @property
    def is_swapped(self) -> bool:
        return bool(self.swap_slots)


class KvCacheManager:
    """Allocations by request. Running out of memory is a return value; misuse is an error and changes nothing.

    Guards: a swap copies beside the steps, so a block or swap slot that it touches may be given to someone else
    while the copy is under way. The guard of a block or slot is the swap that touches it last; whoever takes it
    next states that swap as a dependency.
    """

    def __init__(
        self,
        num_blocks: int,
        num_rows: int,
        swap_blocks: int = 0,
        bytes_per_block: int = 0,
        eager_blocks: int | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks, eager_blocks)
        self.num_rows = num_rows
        self.num_swap_slots = swap_blocks
        self.bytes_per_block = bytes_per_block
        self._allocations: dict[RequestId, KvCacheAllocation] = {}
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._rows_given_up: set[int] = set()
        """Nobody's any more, but not free before `free_row`."""
        self._free_swap_slots = list(range(swap_blocks - 1, -1, -1))
        self._next_swap_id = 0
        self._swaps: dict[int, list[tuple[dict[int, int], dict[int, int | None]]]] = {}
        """Swaps that are not over: which guards each is, and whose guard it replaced there."""
        self._block_guards: dict[int, int] = {}
        self._slot_guards: dict[int, int] = {}
        self._dependencies: set[int] = set()

    # -- rows and blocks

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    def can_allocate(self, num_blocks: int) -> bool:
        return bool(self._free_rows) and num_blocks <= self.pool.available

    def allocate(
        self, request_id: RequestId, num_blocks: int, shared: Sequence[int] = ()
    ) -> KvCacheAllocation | None:
        """A row, the shared blocks of a prefix hit, and `num_blocks` more. None: no row or not enough blocks."""
        if request_id in self._allocations:
            raise ValueError(f"request {request_id} already holds memory")
        if not self._free_rows:
            return None
        self.pool.share_all(shared)
        fresh = self._take_blocks(num_blocks)
        if fresh is None:
            self.pool.release(shared)
            return None
        allocation = KvCacheAllocation(request_id)
        allocation.row = self._free_rows.pop()
        allocation.blocks = [*shared, *fresh]
        self._allocations[request_id] = allocation
        return allocation

    def extend(self, allocation: KvCacheAllocation, num_blocks: int) -> bool:
        """Grows the block table. False: not enough blocks, nothing changed."""
        self._check_resident(allocation, "extended")
        fresh = self._take_blocks(num_blocks)
        if fresh is None:
            return False
        allocation.blocks += fresh
        return True

    def adopt(self, allocation: KvCacheAllocation, block: int) -> None:
        """Appends a block that another request fills or has filled: a prefix hit in mid-flight."""
        self._check_resident(allocation, "extended")
        self.pool.share(block)
        allocation.blocks.append(block)

    def truncate(self, allocation: KvCacheAllocation, num_blocks: int) -> None:
        """Gives back what lies behind the first `num_blocks` blocks, or swap slots where it is swapped out."""
        if allocation.is_swapped:
            self._free_slots(allocation.swap_slots[num_blocks:])
            del allocation.swap_slots[num_blocks:]
            if not allocation.swap_slots:
                del self._allocations[allocation.request_id]
        else:
            self.pool.release(allocation.blocks[num_blocks:])
            del allocation.blocks[num_blocks:]

    def free(self, allocation: KvCacheAllocation) -> int | None:
        """Gives everything back but the row, which is returned: it may be in a step in flight (`free_row`)."""
        if self._allocations.get(allocation.request_id) is not allocation:
            raise ValueError(f"the memory of request {allocation.request_id} was given back already")
        del self._allocations[allocation.request_id]
        self.pool.release(allocation.blocks)
        self._free_slots(allocation.swap_slots)
        row = allocation.row
        if row is not None:
            self._rows_given_up.add(row)
        allocation.blocks, allocation.swap_slots, allocation.row = [], [], None
        return row

    def free_row(self, row: int) -> None:
        if row not in self._rows_given_up:
            raise ValueError(f"row {row} was given back twice, or is held by a request")
        self._rows_given_up.remove(row)
        self._free_rows.append(row)

    @property
    def holders(self) -> list[RequestId]:
        """The requests that hold rows, blocks or swap slots."""
        return list(self._allocations)

    def block_table(self, request_id: RequestId) -> tuple[int, ...]:
        return tuple(self._allocations[request_id].blocks)

    def is_swapped(self, request_id: RequestId) -> bool:
        allocation = self._allocations.get(request_id)
        return allocation is not None and allocation.is_swapped

    # -- swapping

    def can_swap_out(self, allocation: KvCacheAllocation) -> bool:
        return 0 < len(allocation.blocks) <= len(self._free_swap_slots)

    def swap_out(self, allocation: KvCacheAllocation, after_step: int) -> tuple[SwapTask, int] | None:
        """Moves a request to swap space. Its blocks are free at once, guarded by the copy. None: no space.

        Returns the copy to make and the row, which goes back through `free_row` when no step uses it any more.
        """
        self._check_resident(allocation, "swapped out")
        if not self.can_swap_out(allocation):
            return None
        slots = [self._free_swap_slots.pop() for _ in allocation.blocks]
        task = self._new_swap(allocation.request_id, allocation.blocks, slots, after_step)
        self.pool.release(allocation.blocks)
        row = allocation.row
        assert row is not None
        self._rows_given_up.add(row)
        allocation.blocks, allocation.swap_slots, allocation.row = [], slots, None
        return task, row

    def swap_in(self, allocation: KvCacheAllocation, after_step: int) -> SwapTask | None:
        """Brings a request back into a row and fresh blocks. None: no room, and the copy stays where it is."""
        if not allocation.is_swapped or self._allocations.get(allocation.request_id) is not allocation:
            raise ValueError(f"request {allocation.request_id} is not swapped out")
        if not self.can_allocate(len(allocation.swap_slots)):
            return None
        blocks = self.pool.allocate(len(allocation.swap_slots))
        assert blocks is not None
        task = self._new_swap(allocation.request_id, blocks, allocation.swap_slots, after_step)
        self._free_swap_slots.extend(allocation.swap_slots)
        allocation.row = self._free_rows.pop()
        allocation.blocks, allocation.swap_slots = blocks, []
        return task

    def finish_swap(self, swap_id: int) -> bool:
        """The copy is over, well or not: what it touched is no longer guarded by it. False: it was over already."""
        if swap_id not in self._swaps:
            return False
        for guards, replaced in self._swaps.pop(swap_id):
            for index, earlier in replaced.items():
                if guards.get(index) == swap_id:
                    del guards[index]
                    # A swap that never began may be over before those it was to wait for.
                    if earlier in self._swaps:
                        guards[index] = earlier
        self._dependencies.discard(swap_id)
        return True

    @property
    def swaps_under_way(self) -> list[int]:
        return list(self._swaps)

    def take_dependencies(self) -> tuple[int, ...]:
        """The swaps that the step being planned must wait for, because it writes to blocks they touch."""
        if not self._dependencies:
            return ()
        taken = tuple(sorted(self._dependencies))
        self._dependencies.clear()
        return taken

    def take_dead(self) -> tuple[int, ...]:
        """Blocks that became free and that no copy touches: their content is of no use to anyone."""
        return tuple(block for block in self.pool.take_dead() if block not in self._block_guards)

    # -- for people and tests

    def stats(self) -> KvCacheManagerStats:
        return KvCacheManagerStats(
            rows=self.num_rows,
            rows_used=self.num_rows - len(self._free_rows),
            blocks=self.pool.num_blocks,
            blocks_used=self.pool.num_referenced,
            blocks_cached=self.pool.num_cached,
            swap_blocks=self.num_swap_slots,
            swap_blocks_used=self.num_swap_slots - len(self._free_swap_slots),
            requests_swapped=sum(a.is_swapped for a in self._allocations.values()),
            bytes_per_block=self.bytes_per_block,
        )

    def check_integrity(self, rows_held: Sequence[int] = ()) -> None:
        """Raises AssertionError unless blocks, rows (`rows_held` by steps in flight) and swap slots add up."""
        self.pool.check_integrity()
        references = [0] * self.pool.num_blocks
        rows, slots = [*self._free_rows, *rows_held], list(self._free_swap_slots)
        for allocation in self._allocations.values():
            for block in allocation.blocks:
                references[block] += 1
            slots += allocation.swap_slots
            if allocation.row is not None:
                rows.append(allocation.row)
        assert sorted(rows_held) == sorted(self._rows_given_up), "rows are held for nothing, or were lost"
        assert references == self.pool.reference_counts, "reference counts and block tables disagree"
        assert sorted(rows) == list(range(self.num_rows)), "rows were lost or doubled"
        assert sorted(slots) == list(range(self.num_swap_slots)), "swap slots were lost or doubled"

    def _take_blocks(self, count: int) -> list[int] | None:
        blocks = self.pool.allocate(count)
        if blocks and self._block_guards:
            self._dependencies.update(self._block_guards[b] for b in blocks if b in self._block_guards)
        return blocks

    def _free_slots(self, slots: list[int]) -> None:
        self._free_swap_slots.extend(slots)

    def _new_swap(
        self, request_id: RequestId, blocks: list[int], slots: list[int], after_step: int
    ) -> SwapTask:
        guards = {self._block_guards.get(b) for b in blocks} | {self._slot_guards.get(s) for s in slots}
        after = tuple(sorted(guard for guard in guards if guard is not None))
        task = SwapTask(self._next_swap_id, request_id, tuple(blocks), tuple(slots), after_step, after)
        self._next_swap_id += 1
        self._swaps[task.swap_id] = [
            (self._block_guards, {block: self._block_guards.get(block) for block in blocks}),
            (self._slot_guards, {slot: self._slot_guards.get(slot) for slot in slots}),
        ]
        self._block_guards.update(dict.fromkeys(blocks, task.swap_id))
        self._slot_guards.update(dict.fromkeys(slots, task.swap_id))
        return task

    def _check_resident(self, allocation: KvCacheAllocation, verb: str) -> None:
        if self._allocations.get(allocation.request_id) is not allocation or allocation.row is None:
            raise ValueError(f"request {allocation.request_id} holds no row and cannot be {verb}")
