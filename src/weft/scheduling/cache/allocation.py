"""What one request holds of the cache: its row, its block table over both tiers, and its swap slots."""

from __future__ import annotations

from typing import NamedTuple

from weft.request import RequestId
from weft.scheduling.cache.block_pool import Blocks

GONE = -1
"""Stands for the full block of a moving entry whose request was swapped out: the block is given up, but the step that moves
the entry is not over."""


class Move(NamedTuple):
    """One entry on its way to the store, in a step that is planned or in flight."""

    entry: int
    """Of the block table."""
    origin: int
    """The full block, or -1 where the store had the content already."""
    block: int


class KvCacheAllocation:
    """A row and blocks while the request runs, swap slots while it is swapped out. Written by the `KvCacheManager` alone.

        blocks   [ store ..... | full ............... ]
                               ^ stored

    `arriving` are store blocks for the entries from `stored` on, taken for the step being planned; when its plan is final
    they become entries, and the full blocks in their places are `leaving`, by entry, until the step is over.
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
    def size(self) -> Blocks:
        """Of its table or, where it is swapped out, of the copy."""
        return Blocks(len(self.blocks or self.swap_slots) - self.stored, self.stored)
