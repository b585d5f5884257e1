"""Owns rows, block tables and swap slots of all requests, in both tiers, and the moves from one tier to the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weft.metrics import TwoTierKvCache
from weft.plan import SwapTask
from weft.request import RequestId
from weft.scheduling.cache.allocation import RELEASED, KvCacheAllocation, Move
from weft.scheduling.cache.block_pool import BlockCounts, BlockHash, BlockPool
from weft.scheduling.cache.swap import SwapSlots
from weft.tiers import stored_blocks

UNLIMITED_TAIL = 1 << 62
"""Length of the tail, in blocks, of a cache without a store."""


@dataclass(frozen=True, slots=True)
class KvCacheManagerStats:
    """A snapshot, computed on demand."""

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
        """The fraction of the cache memory that is in use."""
        if not self.store_blocks:
            return self.blocks_used / self.blocks
        used = self.blocks_used * self.bytes_per_block + self.store_blocks_used * self.bytes_per_store_block
        return used / (self.blocks * self.bytes_per_block + self.store_blocks * self.bytes_per_store_block)


class KvCacheManager:
    """Allocations by request. Running out of memory is a return value; a wrong call raises and changes nothing.

    Moves: a full block that moves to the store is held until the step that moves it ends. If that step fails, the block
    becomes the table entry again. A sequence that is preempted before the step ends releases both blocks. If it was
    swapped out and the step fails, its swap slots hold invalid data and are dropped.
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
        self._tail_blocks = tail_blocks if store_blocks else UNLIMITED_TAIL
        self._swaps = SwapSlots(BlockCounts(swap_blocks, store_swap_blocks))
        self._allocations: dict[RequestId, KvCacheAllocation] = {}
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._draining_rows: set[int] = set()
        """Rows that their requests have released, but that are not free before `free_row`: a step in flight may use
        them."""
        self._moving: deque[tuple[int, KvCacheAllocation, Move]] = deque()
        """(step, allocation, move) of the steps in flight."""
        self._num_moved = self._num_moves_shared = 0

    # -- how many blocks are needed

    @property
    def available(self) -> BlockCounts:
        return BlockCounts(self.pool.available, self.store.available)

    @property
    def min_available(self) -> int:
        """The number of available blocks in the tier that has fewer."""
        full = self.pool.available
        return min(full, self.store.available) if self.store.num_blocks else full

    def needed(self, num_blocks: int, stored: int, end: int) -> BlockCounts:
        """The number of blocks to add to a table, so that one step can compute all positions before `end`. The table
        has `num_blocks`, of which `stored` are in the store. The step writes to full blocks, and reads older blocks
        from the store."""
        full = -(-end // self._block_size) - num_blocks
        moving = stored_blocks(end - 1, self._block_size, self._tail_blocks) - stored
        return BlockCounts(full if full > 0 else 0, moving if moving > 0 else 0)

    def needed_over_steps(self, num_blocks: int, stored: int, end: int) -> BlockCounts:
        """Like `needed`, but several steps may compute the positions. Each step moves older blocks to the store and so
        frees full blocks. The table needs at most the full blocks of its tail, and the one that is written."""
        border = stored_blocks(end - 1, self._block_size, self._tail_blocks)
        full = min(-(-end // self._block_size), self._tail_blocks + 1) - (num_blocks - stored)
        return BlockCounts(max(0, full), max(0, border - stored))

    def affordable(self, num_blocks: int, stored: int, start: int, room: BlockCounts) -> int:
        """How many positions from `start` on one step can compute if the table gets `room` more blocks."""
        by_full = (num_blocks + room.full) * self._block_size
        by_store = (stored + room.store + self._tail_blocks + 1) * self._block_size - 1
        return max(0, min(by_full, by_store) - start)

    # -- rows and blocks

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def draining_rows(self) -> int:
        """Rows that become free when the steps in flight end."""
        return len(self._draining_rows)

    def can_allocate(self, needed: BlockCounts) -> bool:
        return bool(self._free_rows) and self.available.covers(needed)

    def allocate(
        self,
        request_id: RequestId,
        needed: BlockCounts,
        shared: Sequence[int] = (),
        hashes: Sequence[BlockHash] = (),
    ) -> KvCacheAllocation | None:
        """Allocates a row, the `shared` blocks of a prefix hit, and the `needed` blocks. None: there are not enough.

        `hashes` are the known hashes of the table's blocks, from the first on.
        """
        if request_id in self._allocations:
            raise ValueError(f"request {request_id} already holds memory")
        if not self._free_rows:
            return None
        self.share(shared)
        allocation = KvCacheAllocation(request_id)
        allocation.blocks = list(shared)
        allocation.stored = self.num_stored(shared)
        if not self._take(allocation, needed, hashes):
            self.release(shared)
            return None
        allocation.row = self._free_rows.pop()
        self._allocations[request_id] = allocation
        return allocation

    def extend(
        self, allocation: KvCacheAllocation, needed: BlockCounts, hashes: Sequence[BlockHash] = ()
    ) -> bool:
        """Grows the block table, and allocates store blocks for the moves of this step. False: there are not enough
        blocks."""
        self._check_resident(allocation, "extended")
        return self._take(allocation, needed, hashes)

    def adopt(self, allocation: KvCacheAllocation, block: int) -> None:
        """Appends a full block that another request has filled or fills in this step: a prefix hit during prefill."""
        self._check_resident(allocation, "extended")
        self.pool.share(block)
        allocation.blocks.append(block)

    def share(self, blocks: Sequence[int]) -> None:
        """Adds a reference to each block of a prefix hit. If one of them is free, raises ValueError and adds none."""
        stored = self.num_stored(blocks)
        self.store.share_all(blocks[:stored])
        try:
            self.pool.share_all(blocks[stored:])
        except ValueError:
            self.store.release(blocks[:stored])
            raise

    def release(self, blocks: Sequence[int]) -> None:
        """Undoes `share`."""
        stored = self.num_stored(blocks)
        self.pool.release(blocks[stored:])
        if stored:
            self.store.release(blocks[:stored])

    def num_stored(self, blocks: Sequence[int]) -> int:
        """How many leading blocks of a table are in the store."""
        first = self.pool.num_blocks
        stored = 0
        while stored < len(blocks) and blocks[stored] >= first:
            stored += 1
        return stored

    def pool_of(self, block: int) -> BlockPool:
        return self.pool if block < self.pool.num_blocks else self.store

    def truncate(self, allocation: KvCacheAllocation, num_blocks: int) -> None:
        """Releases all blocks after the first `num_blocks`. If the allocation is swapped out, releases swap slots."""
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
        """Releases everything but the row, and returns the row: a step in flight may use it. `free_row` releases it."""
        if self._allocations.get(allocation.request_id) is not allocation:
            raise ValueError(f"the memory of request {allocation.request_id} was released already")
        del self._allocations[allocation.request_id]
        self.release(allocation.blocks)
        self._swaps.give_back(allocation.swap_slots)
        self._drop_moves(allocation)
        row = allocation.row
        if row is not None:
            self._draining_rows.add(row)
        allocation.blocks, allocation.swap_slots, allocation.row, allocation.stored = [], [], None, 0
        return row

    def free_row(self, row: int) -> None:
        if row not in self._draining_rows:
            raise ValueError(f"row {row} is free already, or a request holds it")
        self._draining_rows.remove(row)
        self._free_rows.append(row)

    @property
    def holders(self) -> list[RequestId]:
        """The requests that hold rows, blocks or swap slots."""
        return list(self._allocations)

    def holds(self, request_id: RequestId) -> bool:
        """Whether a request with this id holds memory, in blocks or in swap space."""
        return request_id in self._allocations

    def is_swapped(self, request_id: RequestId) -> bool:
        allocation = self._allocations.get(request_id)
        return allocation is not None and allocation.is_swapped

    # -- moves to the store

    @property
    def has_moves_in_flight(self) -> bool:
        return bool(self._moving)

    def move(
        self, allocation: KvCacheAllocation, hashes: Sequence[BlockHash], step: int
    ) -> tuple[list[Move], list[tuple[int, BlockHash]]]:
        """Called when the plan of `step` is final. Puts the `arriving` blocks into the table.

        Returns the moves, and the store blocks that are new in the prefix cache, with their hashes."""
        moves, registered = [], []
        for block in allocation.arriving:
            index = allocation.stored
            origin = full = allocation.blocks[index]
            if self.store.is_cached(block):
                origin = -1
            elif index < len(hashes):
                found = self.store.lookup(hashes[index])
                if found is None:
                    self.store.register(block, hashes[index])
                    registered.append((block, hashes[index]))
                else:  # another request moves the same content in this step
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
        """Frees the full blocks that moved in steps up to `step`: these steps have ended."""
        while self._moving and self._moving[0][0] <= step:
            _, allocation, move = self._moving.popleft()
            self._num_moved += 1
            self._num_moves_shared += move.origin == -1
            full = allocation.leaving.pop(move.entry, RELEASED)
            if full != RELEASED:
                self.pool.retire(full)

    def undo_moves(self) -> None:
        """Undoes the moves of all steps in flight, which failed. The caller has unregistered their blocks."""
        while self._moving:
            _, allocation, move = self._moving.pop()
            full = allocation.leaving.pop(move.entry, None)
            if full == RELEASED and allocation.is_swapped:
                self.truncate(allocation, 0)  # its swap slots hold content that was never computed
            elif full is not None and full != RELEASED:
                allocation.blocks[move.entry] = full
                allocation.stored = move.entry
                self.store.release([move.block])

    # -- swapping

    def can_swap_out(self, allocation: KvCacheAllocation) -> bool:
        return bool(allocation.blocks) and self._swaps.free.covers(allocation.size)

    def swap_out(self, allocation: KvCacheAllocation, after_step: int) -> tuple[SwapTask, int] | None:
        """Swaps a request out. Its blocks are free at once; the swap guards them until the copy ends (`SwapSlots`).
        None: there are not enough swap slots.

        Returns the copy to make, and the row: `free_row` releases it when no step uses it any more.
        """
        self._check_resident(allocation, "swapped out")
        if not self.can_swap_out(allocation):
            return None
        slots = self._swaps.take(allocation.size)
        task = self._swaps.copy(allocation.request_id, allocation.blocks, slots, after_step)
        self.release(allocation.blocks)
        # Keeps the table entries whose moves are in flight. If that step fails, `undo_moves` drops the swap slots.
        unsettled = dict.fromkeys(allocation.leaving, RELEASED)
        self._drop_moves(allocation)
        allocation.leaving = unsettled
        row = allocation.row
        assert row is not None
        self._draining_rows.add(row)
        allocation.blocks, allocation.swap_slots, allocation.row = [], slots, None
        return task, row

    def swap_in(self, allocation: KvCacheAllocation, after_step: int) -> SwapTask | None:
        """Swaps a request in: allocates a row and new blocks. None: there are not enough, and it stays swapped out."""
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
        """Ends a swap, successful or not. False: it had ended before."""
        return self._swaps.finish(swap_id)

    @property
    def swaps_in_flight(self) -> list[int]:
        return self._swaps.in_flight

    @property
    def num_swap_slots(self) -> int:
        """The number of swap slots for full blocks."""
        return self._swaps.slots.full

    def swap_bytes(self, tasks: Iterable[SwapTask]) -> int:
        """The bytes that these swaps copy."""
        num_bytes = 0
        for task in tasks:
            stored = self.num_stored(task.blocks)
            num_bytes += stored * self.bytes_per_store_block
            num_bytes += (len(task.blocks) - stored) * self.bytes_per_block
        return num_bytes

    def take_dependencies(self) -> tuple[int, ...]:
        """Returns the swaps that the step being planned must wait for: it writes to blocks that they copy."""
        return self._swaps.take_dependencies()

    def take_freed(self) -> tuple[int, ...]:
        """Returns the blocks that became free and that no swap copies: their content is no longer used."""
        freed = self.pool.take_freed()
        if self.store.num_blocks:
            freed = freed + self.store.take_freed()
        return tuple([block for block in freed if not self._swaps.is_guarded(block)])

    # -- for metrics and tests

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
        """Usage of both tiers. None: the cache has one tier."""
        if not self.store.num_blocks:
            return None
        tail, stored = self.pool.num_referenced, self.store.num_referenced
        tail_bytes, store_bytes = tail * self.bytes_per_block, stored * self.bytes_per_store_block
        # A block whose move is in flight is in both tiers. A cache with one tier would hold it once.
        leaving = {
            full for a in self._allocations.values() for full in a.leaving.values() if full != RELEASED
        }
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
        """Raises AssertionError if blocks, rows (`rows_held` by steps in flight) or swap slots are inconsistent."""
        self.pool.check_integrity()
        if self.store.num_blocks:
            self.store.check_integrity()
        first_stored, first_slot = self.pool.num_blocks, self._swaps.slots.full
        references = [0] * (first_stored + self.store.num_blocks)
        rows, slots = [*self._free_rows, *rows_held], self._swaps.free_slots
        num_leaving = 0
        for allocation in self._allocations.values():
            leaving = [block for block in allocation.leaving.values() if block != RELEASED]
            for block in (*allocation.blocks, *leaving):
                references[block] += 1
            slots += allocation.swap_slots
            num_leaving += len(allocation.leaving)
            if allocation.row is not None:
                rows.append(allocation.row)
            assert not allocation.arriving, "store blocks are held for moves that are in no plan"
            for index, (block, first) in enumerate(
                [(b, first_stored) for b in allocation.blocks]
                + [(slot, first_slot) for slot in allocation.swap_slots]
            ):
                assert (block >= first) is (index < allocation.stored), "an entry is in the wrong tier"
        assert num_leaving <= len(self._moving), "a block is leaving, but no step moves it"
        assert sorted(rows_held) == sorted(self._draining_rows), "rows are held without a step, or were lost"
        in_pools = [*self.pool.reference_counts, *self.store.reference_counts[first_stored:]]
        assert references == in_pools, "reference counts and block tables disagree"
        assert sorted(rows) == list(range(self.num_rows)), "rows were lost or duplicated"
        num_slots = first_slot + self._swaps.slots.store
        assert sorted(slots) == list(range(num_slots)), "swap slots were lost or duplicated"

    def _take(self, allocation: KvCacheAllocation, needed: BlockCounts, hashes: Sequence[BlockHash]) -> bool:
        """Allocates full blocks for the end of the table, and store blocks for its next moves. Content that the store
        holds is shared."""
        fresh = self.pool.allocate(needed.full)
        if fresh is None:
            return False
        if needed.store:
            arriving: list[int] = []
            for block_hash in hashes[allocation.stored : allocation.stored + needed.store]:
                found = self.store.lookup(block_hash)
                if found is None:
                    break
                arriving.append(found)
            self.store.share_all(arriving)
            taken = self.store.allocate(needed.store - len(arriving))
            if taken is None:
                self.store.release(arriving)
                self.pool.release(fresh)
                return False
            self._swaps.note_writes(taken)
            allocation.arriving = arriving + taken
        if fresh:
            self._swaps.note_writes(fresh)
        allocation.blocks += fresh
        return True

    def _drop_moves(self, allocation: KvCacheAllocation, first: int = 0) -> None:
        """Releases blocks that are held for moves: all store blocks in `arriving`, and the full blocks in `leaving` whose
        table entry has the index `first` or a higher one."""
        if allocation.arriving:
            self.store.release(allocation.arriving)
            allocation.arriving = []
        if allocation.leaving:
            for index in [i for i in allocation.leaving if i >= first]:
                full = allocation.leaving.pop(index)
                if full != RELEASED:
                    self.pool.retire(full)

    def _check_resident(self, allocation: KvCacheAllocation, verb: str) -> None:
        if self._allocations.get(allocation.request_id) is not allocation or allocation.row is None:
            raise ValueError(f"request {allocation.request_id} holds no row and cannot be {verb}")
