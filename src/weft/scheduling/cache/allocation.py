"""The memory of one sequence: its row, its block table over both tiers, and its swap slots."""

from __future__ import annotations

from typing import NamedTuple

from weft.request import RequestId
from weft.scheduling.cache.block_pool import BlockCounts

RELEASED = -1
"""A value in `leaving`: a swap-out has released the full block, but the step that moves it to the store is still in
flight."""


class Move(NamedTuple):
    """A move of one block-table entry to the store, in a step that is being planned or in flight."""

    entry: int
    """The index of the entry in the block table."""
    origin: int
    """The full block that is moved. -1: the store has its content already."""
    block: int
    """The store block that gets the content."""


class KvCacheAllocation:
    """A row and blocks while the sequence runs, swap slots while it is swapped out. Only `KvCacheManager` writes to it.

        blocks   [ store ..... | full ............... ]
                               ^ stored

    `arriving`: store blocks for `blocks[stored]` and the following ones, allocated for the step being planned. When the
    plan is final, they replace these full blocks in `blocks`. Until the step ends, `leaving` maps the index of each to
    its former full block.
    """

    __slots__ = ("arriving", "blocks", "leaving", "request_id", "row", "stored", "swap_slots")

    def __init__(self, request_id: RequestId) -> None:
        self.request_id = request_id
        self.row: int | None = None
        self.blocks: list[int] = []
        self.swap_slots: list[int] = []
        self.stored = 0
        self.arriving: list[int] = []
        self.leaving: dict[int, int] = {}

    @property
    def is_swapped(self) -> bool:
        return bool(self.swap_slots)

    @property
    def size(self) -> BlockCounts:
        """The number of its blocks. If it is swapped out: the number of its swap slots."""
        return BlockCounts(len(self.blocks or self.swap_slots) - self.stored, self.stored)
