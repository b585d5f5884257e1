"""Owns rows and block tables: which request holds what, in which tier, and what moves from one tier to the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from weft.metrics import TwoTierKvCache
from weft.plan import SwapTask
from weft.request import RequestId
from weft.scheduling.cache.allocation import GONE, KvCacheAllocation, Move
from weft.scheduling.cache.block_pool import BlockKey, BlockPool, Blocks
from weft.scheduling.cache.swap import SwapSlots
from weft.tiers import stored_blocks

NO_TAIL = 1 << 62
"""Blocks of the tail where there is no store: it never ends."""


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
    store_blocks: int = 0
    store_blocks_used: int = 0
    store_swap_blocks_used: int = 0
    bytes_per_store_block: int = 0

    @property
    def utilisation(self) -> float:
        """The share of the memory for blocks that is in use."""
        if not self.store_blocks:
            return self.blocks_used / self.blocks
        used = self.blocks_used * self.bytes_per_block + self.store_blocks_used * self.bytes_per_store_block
        return used / (self.blocks * self.bytes_per_block + self.store_blocks * self.bytes_per_store_block)


class KvCacheManager:
    """Allocations by request. Running out of memory is a return value; misuse is an error and changes nothing.

    Moves: the full block of an entry that moves to the store is held until the step that moves it is over, since that step
    may fail, and then it is the entry again. A request that gives its memory up before that gives it up whole: where
    the step fails, a copy of it in swap space is worthless and dropped.
    """

    def __init__(
        self,
        num_blocks: int,
        num_rows: int,
        swap_blocks: int = 0,
        bytes_per_block: int = 0,
        eager_blocks: int | None = None,
        *,
        block_size: int = 1,
        tail_blocks: int = 0,
        store_blocks: int = 0,
        store_swap_blocks: int = 0,
        bytes_per_store_block: int = 0,
    ) -> None:
        self.pool = BlockPool(num_blocks, eager_blocks)
        eager_store = None if eager_blocks is None else eager_blocks * store_blocks // num_blocks
        self.store = BlockPool(store_blocks, eager_store, first_block=num_blocks)
        self.num_rows = num_rows
        self.bytes_per_block = bytes_per_block
        self.bytes_per_store_block = bytes_per_store_block
        self._block_size = block_size
        self._tail_blocks = tail_blocks if store_blocks else NO_TAIL
        self._swaps = SwapSlots(Blocks(swap_blocks, store_swap_blocks))
        self._allocations: dict[RequestId, KvCacheAllocation] = {}
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._rows_given_up: set[int] = set()
        """Nobody's any more, but not free before `free_row`."""
        self._moving: deque[tuple[int, KvCacheAllocation, Move]] = deque()
        """Moves of the steps in flight, with the step."""
        self._num_moved = self._num_moves_shared = 0

    # -- how much it takes

    @property
    def available(self) -> Blocks:
        return Blocks(self.pool.available, self.store.available)

    @property
    def fewest_available(self) -> int:
        """Of either tier."""
        full = self.pool.available
        return min(full, self.store.available) if self.store.num_blocks else full

    def needed(self, num_blocks: int, stored: int, end: int) -> Blocks:
        """What a table of `num_blocks`, of which `stored` are in the store, must get so that all positions before `end`
        can be computed in one step: the blocks in which they lie, and what they read from the store."""
        full = -(-end // self._block_size) - num_blocks
        moving = stored_blocks(end - 1, self._block_size, self._tail_blocks) - stored
        return Blocks(full if full > 0 else 0, moving if moving > 0 else 0)

    def needed_after(self, num_blocks: int, stored: int, end: int) -> Blocks:
        """The same for a table that gets there step by step: what moves on the way goes back, so that it never needs more in
        full than its tail and the block it writes."""
        border = stored_blocks(end - 1, self._block_size, self._tail_blocks)
        full = min(-(-end // self._block_size), self._tail_blocks + 1) - (num_blocks - stored)
        return Blocks(max(0, full), max(0, border - stored))

    def affordable(self, num_blocks: int, stored: int, start: int, room: Blocks) -> int:
        """How many positions from `start` on `room` is enough for, in one step."""
        by_full = (num_blocks + room.full) * self._block_size
        by_store = (stored + room.store + self._tail_blocks + 1) * self._block_size - 1
        return max(0, min(by_full, by_store) - start)

    # -- rows and blocks

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    def can_allocate(self, needed: Blocks) -> bool:
        return bool(self._free_rows) and self.available.covers(needed)

    def allocate(
        self,
        request_id: RequestId,
        needed: Blocks,
        shared: Sequence[int] = (),
        keys: Sequence[BlockKey] = (),
    ) -> KvCacheAllocation | None:
        """A row, the shared blocks of a prefix hit, and what is needed beside them. None: no row or not enough blocks.

        `keys` are those of the whole table, as far as they are known."""
        if request_id in self._allocations:
            raise ValueError(f"request {request_id} already holds memory")
        if not self._free_rows:
            return None
        self.share(shared)
        allocation = KvCacheAllocation(request_id)
        allocation.blocks = list(shared)
        allocation.stored = self.num_stored(shared)
        if not self._take(allocation, needed, keys):
            self.release(shared)
            return None
        allocation.row = self._free_rows.pop()
        self._allocations[request_id] = allocation
        return allocation

    def extend(self, allocation: KvCacheAllocation, needed: Blocks, keys: Sequence[BlockKey] = ()) -> bool:
        """Grows the block table, and takes what is to move in this step. False: not enough blocks, nothing changed."""
        self._check_resident(allocation, "extended")
        return self._take(allocation, needed, keys)

    def adopt(self, allocation: KvCacheAllocation, block: int) -> None:
        """Appends a full block that another request fills or has filled: a prefix hit in mid-flight."""
        self._check_resident(allocation, "extended")
        self.pool.share(block)
        allocation.blocks.append(block)

    def share(self, blocks: Sequence[int]) -> None:
        """Holds the blocks of a prefix hit: all of them or, where one is free, none."""
        stored = self.num_stored(blocks)
        self.store.share_all(blocks[:stored])
        try:
            self.pool.share_all(blocks[stored:])
        except ValueError:
            self.store.release(blocks[:stored])
            raise

    def release(self, blocks: Sequence[int]) -> None:
        """Gives back blocks of a table that were shared."""
        stored = self.num_stored(blocks)
        self.pool.release(blocks[stored:])
        if stored:
            self.store.release(blocks[:stored])

    def num_stored(self, blocks: Sequence[int]) -> int:
        """How many of a table's blocks are in the store: it begins with them."""
        first = self.pool.num_blocks
        stored = 0
        while stored < len(blocks) and blocks[stored] >= first:
            stored += 1
        return stored

    def pool_of(self, block: int) -> BlockPool:
        return self.pool if block < self.pool.num_blocks else self.store

    def truncate(self, allocation: KvCacheAllocation, num_blocks: int) -> None:
        """Gives back what lies behind the first `num_blocks` blocks, or swap slots where it is swapped out."""
        if allocation.is_swapped:
            self._swaps.give_back(allocation.swap_slots[num_blocks:])
            del allocation.swap_slots[num_blocks:]
            if not allocation.swap_slots:
                del self._allocations[allocation.request_id]
        else:
            self.release(allocation.blocks[num_blocks:])
            del allocation.blocks[num_blocks:]
            self._drop_moves(allocation, num_blocks)
        allocation.stored = min(allocation.stored, num_blocks)

    def free(self, allocation: KvCacheAllocation) -> int | None:
        """Gives everything back but the row, which is returned: it may be in a step in flight (`free_row`)."""
        if self._allocations.get(allocation.request_id) is not allocation:
            raise ValueError(f"the memory of request {allocation.request_id} was given back already")
        del self._allocations[allocation.request_id]
        self.release(allocation.blocks)
        self._swaps.give_back(allocation.swap_slots)
        self._drop_moves(allocation)
        row = allocation.row
        if row is not None:
            self._rows_given_up.add(row)
        allocation.blocks, allocation.swap_slots, allocation.row, allocation.stored = [], [], None, 0
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

    # -- moves to the store

    @property
    def blocks_are_leaving(self) -> bool:
        return bool(self._moving)

    def move(
        self, allocation: KvCacheAllocation, keys: Sequence[BlockKey], step: int
    ) -> tuple[list[Move], list[tuple[int, BlockKey]]]:
        """The plan of `step` is final: what was taken for its moves becomes part of the table.

        Returns the moves, and the store's blocks that can be found by their content from now on."""
        moves, registered = [], []
        for block in allocation.arriving:
            index = allocation.stored
            origin = full = allocation.blocks[index]
            if self.store.is_cached(block):
                origin = -1
            elif index < len(keys):
                found = self.store.lookup(keys[index])
                if found is None:
                    self.store.register(block, keys[index])
                    registered.append((block, keys[index]))
                else:  # another moves the same in this step
                    self.store.share(found)
                    self.store.release([block])
                    origin, block = -1, found
            move = Move(index, origin, block)
            allocation.blocks[index] = block
            allocation.leaving[index] = full
            allocation.stored = index + 1
            self._moving.append((step, allocation, move))
            moves.append(move)
        allocation.arriving = []
        return moves, registered

    def settle_moves(self, step: int) -> None:
        """All steps up to this one are over: the full blocks that moved in them are free."""
        while self._moving and self._moving[0][0] <= step:
            _, allocation, move = self._moving.popleft()
            self._num_moved += 1
            self._num_moves_shared += move.origin == -1
            full = allocation.leaving.pop(move.entry, GONE)
            if full != GONE:
                self.pool.retire(full)

    def undo_moves(self) -> None:
        """No step in flight will be: what moved in them is full again. What they registered must be forgotten before."""
        while self._moving:
            _, allocation, move = self._moving.pop()
            full = allocation.leaving.pop(move.entry, None)
            if full == GONE and allocation.is_swapped:
                self.truncate(allocation, 0)  # the copy holds what never came to be
            elif full is not None and full != GONE:
                allocation.blocks[move.entry] = full
                allocation.stored = move.entry
                self.store.release([move.block])

    # -- swapping

    def can_swap_out(self, allocation: KvCacheAllocation) -> bool:
        return bool(allocation.blocks) and self._swaps.free.covers(allocation.size)

    def swap_out(self, allocation: KvCacheAllocation, after_step: int) -> tuple[SwapTask, int] | None:
        """Moves a request to swap space. Its blocks are free at once, guarded by the copy. None: no space.

        Returns the copy to make and the row, which goes back through `free_row` when no step uses it any more.
        """
        self._check_resident(allocation, "swapped out")
        if not self.can_swap_out(allocation):
            return None
        slots = self._swaps.take(allocation.size)
        task = self._swaps.copy(allocation.request_id, allocation.blocks, slots, after_step)
        self.release(allocation.blocks)
        unsettled = dict.fromkeys(allocation.leaving, GONE)
        self._drop_moves(allocation)
        allocation.leaving = unsettled
        row = allocation.row
        assert row is not None
        self._rows_given_up.add(row)
        allocation.blocks, allocation.swap_slots, allocation.row = [], slots, None
        return task, row

    def swap_in(self, allocation: KvCacheAllocation, after_step: int) -> SwapTask | None:
        """Brings a request back into a row and fresh blocks. None: no room, and the copy stays where it is."""
        if not allocation.is_swapped or self._allocations.get(allocation.request_id) is not allocation:
            raise ValueError(f"request {allocation.request_id} is not swapped out")
        needed = allocation.size
        if not self.can_allocate(needed):
            return None
        stored, full = self.store.allocate(needed.store), self.pool.allocate(needed.full)
        assert stored is not None and full is not None
        blocks = stored + full
        task = self._swaps.copy(allocation.request_id, blocks, allocation.swap_slots, after_step)
        self._swaps.give_back(allocation.swap_slots)
        allocation.row = self._free_rows.pop()
        allocation.blocks, allocation.swap_slots = blocks, []
        return task

    def finish_swap(self, swap_id: int) -> bool:
        """The copy is over, well or not. False: it was over already."""
        return self._swaps.finish(swap_id)

    @property
    def swaps_under_way(self) -> list[int]:
        return self._swaps.under_way

    @property
    def num_swap_slots(self) -> int:
        return self._swaps.slots.full

    def take_dependencies(self) -> tuple[int, ...]:
        """The swaps that the step being planned must wait for, because it writes to blocks they touch."""
        return self._swaps.take_dependencies()

    def take_dead(self) -> tuple[int, ...]:
        """Blocks that became free and that no copy touches: their content is of no use to anyone."""
        dead = self.pool.take_dead()
        if self.store.num_blocks:
            dead = dead + self.store.take_dead()
        return tuple([block for block in dead if not self._swaps.is_guarded(block)])

    # -- for people and tests

    def stats(self) -> KvCacheManagerStats:
        slots_used = self._swaps.slots - self._swaps.free
        return KvCacheManagerStats(
            rows=self.num_rows,
            rows_used=self.num_rows - len(self._free_rows),
            blocks=self.pool.num_blocks,
            blocks_used=self.pool.num_referenced,
            blocks_cached=self.pool.num_cached,
            swap_blocks=self.num_swap_slots,
            swap_blocks_used=slots_used.full,
            requests_swapped=sum(a.is_swapped for a in self._allocations.values()),
            bytes_per_block=self.bytes_per_block,
            store_blocks=self.store.num_blocks,
            store_blocks_used=self.store.num_referenced,
            store_swap_blocks_used=slots_used.store,
            bytes_per_store_block=self.bytes_per_store_block,
        )

    def two_tier(self) -> TwoTierKvCache | None:
        """What is in which tier. None: there is no store."""
        if not self.store.num_blocks:
            return None
        tail, stored = self.pool.num_referenced, self.store.num_referenced
        tail_bytes, store_bytes = tail * self.bytes_per_block, stored * self.bytes_per_store_block
        # A block that is leaving is in both tiers: a plain cache would hold it once.
        leaving = {full for a in self._allocations.values() for full in a.leaving.values() if full != GONE}
        plain_bytes = (tail - len(leaving) + stored) * self.bytes_per_block
        return TwoTierKvCache(
            tail_tokens=tail * self._block_size,
            store_tokens=stored * self._block_size,
            tail_bytes=tail_bytes,
            store_bytes=store_bytes,
            compression_ratio=plain_bytes / (tail_bytes + store_bytes) if tail_bytes + store_bytes else 1.0,
            migrations=self._num_moved,
            migrations_shared=self._num_moves_shared,
        )

    def check_integrity(self, rows_held: Sequence[int] = ()) -> None:
        """Raises AssertionError unless blocks, rows (`rows_held` by steps in flight) and swap slots add up."""
        self.pool.check_integrity()
        if self.store.num_blocks:
            self.store.check_integrity()
        first_stored, first_slot = self.pool.num_blocks, self._swaps.slots.full
        references = [0] * (first_stored + self.store.num_blocks)
        rows, slots = [*self._free_rows, *rows_held], self._swaps.free_slots
        num_leaving = 0
        for allocation in self._allocations.values():
            leaving = [block for block in allocation.leaving.values() if block != GONE]
            for block in (*allocation.blocks, *leaving):
                references[block] += 1
            slots += allocation.swap_slots
            num_leaving += len(allocation.leaving)
            if allocation.row is not None:
                rows.append(allocation.row)
            assert not allocation.arriving, "blocks were taken for moves that are in no plan"
            for index, (block, first) in enumerate(
                [(b, first_stored) for b in allocation.blocks]
                + [(slot, first_slot) for slot in allocation.swap_slots]
            ):
                assert (block >= first) is (index < allocation.stored), "an entry is in the wrong tier"
        assert num_leaving <= len(self._moving), "a block is leaving in no step"
        assert sorted(rows_held) == sorted(self._rows_given_up), "rows are held for nothing, or were lost"
        in_pools = [*self.pool.reference_counts, *self.store.reference_counts[first_stored:]]
        assert references == in_pools, "reference counts and block tables disagree"
        assert sorted(rows) == list(range(self.num_rows)), "rows were lost or doubled"
        num_slots = first_slot + self._swaps.slots.store
        assert sorted(slots) == list(range(num_slots)), "swap slots were lost or doubled"

    def _take(self, allocation: KvCacheAllocation, needed: Blocks, keys: Sequence[BlockKey]) -> bool:
        """Full blocks for the end of the table and store blocks for its next moves; those that the store has by their
        content are shared."""
        fresh = self.pool.allocate(needed.full)
        if fresh is None:
            return False
        if needed.store:
            arriving: list[int] = []
            for key in keys[allocation.stored : allocation.stored + needed.store]:
                found = self.store.lookup(key)
                if found is None:
                    break
                arriving.append(found)
            self.store.share_all(arriving)
            taken = self.store.allocate(needed.store - len(arriving))
            if taken is None:
                self.store.release(arriving)
                self.pool.release(fresh)
                return False
            self._swaps.note_taken(taken)
            allocation.arriving = arriving + taken
        if fresh:
            self._swaps.note_taken(fresh)
        allocation.blocks += fresh
        return True

    def _drop_moves(self, allocation: KvCacheAllocation, first: int = 0) -> None:
        """Gives back what is held for moves, of entries from `first` on."""
        if allocation.arriving:
            self.store.release(allocation.arriving)
            allocation.arriving = []
        if allocation.leaving:
            for index in [i for i in allocation.leaving if i >= first]:
                full = allocation.leaving.pop(index)
                if full != GONE:
                    self.pool.retire(full)

    def _check_resident(self, allocation: KvCacheAllocation, verb: str) -> None:
        if self._allocations.get(allocation.request_id) is not allocation or allocation.row is None:
            raise ValueError(f"request {allocation.request_id} holds no row and cannot be {verb}")
