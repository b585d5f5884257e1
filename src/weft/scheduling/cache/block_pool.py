"""Owns the KV blocks of one tier: reference counts, the cache by content, and the free list."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weft.metrics import BlockStates, Evictions

BlockHash = bytes
"""SHA-256 over the previous block's hash and this block's tokens. Equal hashes mean equal tokens from position 0 on."""


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """A number of blocks in each tier. A cache with one tier has full blocks only."""

    full: int
    store: int = 0

    def __add__(self, other: BlockCounts) -> BlockCounts:
        return BlockCounts(self.full + other.full, self.store + other.store)

    def __sub__(self, other: BlockCounts) -> BlockCounts:
        return BlockCounts(self.full - other.full, self.store - other.store)

    def __bool__(self) -> bool:
        return self.full > 0 or self.store > 0

    def covers(self, other: BlockCounts) -> bool:
        return self.full >= other.full and self.store >= other.store


def root_hash(cache_salt: str, adapter_id: str) -> BlockHash:
    """The hash that precedes a sequence's first block. The salt's length is hashed too, so that ("ab", "c") and
    ("a", "bc") differ."""
    salt = cache_salt.encode()
    return hashlib.sha256(b"%d:%b%b" % (len(salt), salt, adapter_id.encode())).digest()


def extend_block_hashes(
    hashes: list[BlockHash], root: BlockHash, tokens: Sequence[int], block_size: int
) -> None:
    """Appends the hashes of all complete blocks of `tokens` that `hashes` does not hold yet."""
    previous = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_size, len(tokens) - block_size + 1, block_size):
        content = array("q", tokens[start : start + block_size]).tobytes()
        previous = hashlib.sha256(previous + content).digest()
        hashes.append(previous)


class BlockPool:
    """Reference-counted blocks, with a prefix cache by content.

    A block is in exactly one of three states:

        referenced   count above 0
        evictable    count 0, content cached. Blocks of idle work are evicted first, blocks of live sessions (hot
                     blocks) last; within each group, the least recently used block first
        free         count 0, no content

    `available` counts the free and the evictable blocks.

    A block that was never used ("untouched") may have no physical memory yet. Above `eager_blocks`, an untouched block
    is used only while the touched blocks are fewer than twice the referenced ones. Otherwise cached blocks are evicted
    instead, so that memory follows the load.

    Ids start at `first_block`: those of the store follow those of the full blocks.
    """

    def __init__(self, num_blocks: int, eager_blocks: int | None = None, first_block: int = 0) -> None:
        self.num_blocks = num_blocks
        self._first_block = first_block
        self._end = end = first_block + num_blocks
        self._eager_end = end if eager_blocks is None else first_block + eager_blocks
        self.first_untouched = first_block
        """Blocks from this id on were never used. Of these, the lowest is used first."""
        self._references = [0] * end
        self._hashes: list[BlockHash | None] = [None] * end
        self._cached: dict[BlockHash, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._evictable_hot: OrderedDict[int, None] = OrderedDict()
        self._evictable_idle: OrderedDict[int, None] = OrderedDict()
        self._idle_content: set[int] = set()
        """Cached blocks that only idle work has used."""
        self._hot_counts: dict[BlockHash, int] = {}
        """Hash -> how many sessions keep it hot, whether its block is cached or not."""
        self._reused: set[int] = set()
        """Blocks whose content was a prefix hit at least once."""
        self._missed: OrderedDict[BlockHash, None] = OrderedDict()
        """Hashes of recent prefix lookups that missed, at most one per block."""
        # The free list is a stack: the block freed last is reused first, so that untouched memory stays untouched.
        self._free = list(range(end - 1, first_block - 1, -1))
        self._newly_free: list[int] = []
        self.evictions = Evictions()
        self.changed: set[BlockHash] | None = None
        """Hashes that came into the cache or left it, for a reader that takes them out. None: they are not collected."""

    @property
    def available(self) -> int:
        return len(self._free) + len(self._evictable_idle) + len(self._evictable) + len(self._evictable_hot)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self.available

    @property
    def reference_counts(self) -> list[int]:
        return self._references

    @property
    def hot_counts(self) -> dict[BlockHash, int]:
        return self._hot_counts

    def references(self, block: int) -> int:
        return self._references[block]

    def is_cached(self, block: int) -> bool:
        return self._hashes[block] is not None

    def states(self, first: int, end: int) -> str:
        """A letter of `weft.live.BLOCK_STATES` for each of the blocks from `first` to `end`."""
        hot, idle = self._hot_counts, self._idle_content
        states = []
        for block in range(first, end):
            block_hash = self._hashes[block]
            if count := self._references[block]:
                states.append("u" if count == 1 else "s")
            elif block_hash is None:
                states.append("f")
            elif block_hash in hot:
                states.append("h")
            else:
                states.append("i" if block in idle else "c")
        return "".join(states)

    def num_by_state(self) -> BlockStates:
        cached, hot, idle = map(len, (self._evictable, self._evictable_hot, self._evictable_idle))
        return BlockStates(len(self._free), self.num_referenced, cached, hot, idle)

    def allocate(self, count: int) -> list[int] | None:
        """Allocates `count` blocks; None if there are not enough. It takes free blocks first, then cached blocks of idle
        work, then other cached blocks, then hot blocks. Exception: untouched blocks above the limit that the class
        describes are taken just before the hot blocks."""
        if count > len(self._free) and count > self.available:
            return None
        max_touched = max(self._eager_end, self._first_block + 2 * (self.num_referenced + count))
        taken = []
        for _ in range(count):
            free = self._free
            if free and (
                free[-1] < self.first_untouched
                or self.first_untouched < max_touched
                or not (self._evictable_idle or self._evictable)
            ):
                block = free.pop()
                self.first_untouched = max(self.first_untouched, block + 1)
            else:
                evictable = self._evictable_idle or self._evictable or self._evictable_hot
                block, _ = evictable.popitem(last=False)
                self._count_eviction(evictable)
                self._drop_hash(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def lookup(self, block_hash: BlockHash) -> int | None:
        return self._cached.get(block_hash)

    def share(self, block: int) -> None:
        """Adds a reference to a block with content: a prefix hit."""
        if self._references[block] == 0:
            if self._is_free(block):
                raise ValueError(f"block {block} is free and holds nothing to share")
            del self._eviction_order(block)[block]
        self._references[block] += 1
        self._reused.add(block)

    def share_all(self, blocks: Sequence[int]) -> None:
        """Adds a reference to each of these blocks. If one of them is free, raises ValueError and adds none."""
        for shared, block in enumerate(blocks):
            try:
                self.share(block)
            except ValueError:
                self.release(blocks[:shared])
                raise

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference of each block of a sequence. Its later blocks will be evicted before its earlier ones."""
        for block in blocks:
            if self._references[block] <= 0:
                raise ValueError(f"block {block} was released more often than it was allocated")
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._hashes[block] is None:
                    self._put_free(block)
                else:
                    self._eviction_order(block)[block] = None

    def retire(self, block: int) -> None:
        """Drops one reference of a block that was copied to the store. Its content stays cached, but is evicted before
        that of other blocks. Exception: content that was a prefix hit, or that a recent lookup missed, is probably needed
        again and keeps its place in the order."""
        self.release((block,))
        if block in self._reused or self._hashes[block] in self._missed:
            return
        for evictable in (self._evictable_idle, self._evictable):
            if block in evictable:
                evictable.move_to_end(block, last=False)

    def note_missed(self, hashes: Sequence[BlockHash]) -> None:
        """Records content that a prefix lookup could have used."""
        for block_hash in hashes:
            self._missed[block_hash] = None
            self._missed.move_to_end(block_hash)
        while len(self._missed) > self.num_blocks:
            self._missed.popitem(last=False)

    def mark_hot(self, block_hash: BlockHash) -> None:
        """Adds one session that keeps this content hot. While its block is cached, it is evicted after all blocks that
        are not hot."""
        self._hot_counts[block_hash] = self._hot_counts.get(block_hash, 0) + 1
        if self._hot_counts[block_hash] == 1:
            self._change_eviction_list(block_hash, self._evictable_idle, self._evictable_hot)
            self._change_eviction_list(block_hash, self._evictable, self._evictable_hot)

    def unmark_hot(self, block_hash: BlockHash) -> None:
        """Removes one session that keeps this content hot. If it was the last one, the content is evicted first: it
        was probably not used for a long time."""
        self._hot_counts[block_hash] -= 1
        if self._hot_counts[block_hash] == 0:
            del self._hot_counts[block_hash]
            block = self._cached.get(block_hash)
            target = self._evictable_idle if block in self._idle_content else self._evictable
            if block is not None and self._change_eviction_list(block_hash, self._evictable_hot, target):
                target.move_to_end(block, last=False)

    def note_idle_content(self, blocks: Iterable[int]) -> None:
        """Records that idle work filled these cached blocks."""
        self._idle_content.update(blocks)

    def note_interactive(self, blocks: Iterable[int]) -> None:
        """Records that an interactive request uses these blocks. They are referenced."""
        if self._idle_content:
            self._idle_content.difference_update(blocks)

    def register(self, block: int, block_hash: BlockHash) -> bool:
        """Adds a block to the cache. Returns False if the cache has another block with the same content."""
        if block_hash in self._cached:
            return False
        if self._references[block] == 0 or self._hashes[block] is not None:
            raise ValueError(f"block {block} cannot be cached: it is free, or cached under another hash")
        self._cached[block_hash] = block
        self._hashes[block] = block_hash
        if self.changed is not None:
            self.changed.add(block_hash)
        return True

    def unregister(self, block: int, block_hash: BlockHash) -> None:
        """Removes a block from the cache, if it is there under `block_hash`. Called if the step that was to fill it
        failed."""
        if self._hashes[block] != block_hash:
            return
        if self._references[block] == 0:
            del self._eviction_order(block)[block]
            self._drop_hash(block)
            self._put_free(block)
        else:
            self._drop_hash(block)

    def take_freed(self) -> list[int]:
        """Returns the blocks that became free since the last call and are still free."""
        freed, self._newly_free = self._newly_free, []
        return [block for block in dict.fromkeys(freed) if self._is_free(block)] if freed else freed

    def check_integrity(self) -> None:
        """Raises AssertionError if the three states are inconsistent."""
        free = set(self._free)
        referenced = [block for block, count in enumerate(self._references) if count]
        hashed = {block: value for block, value in enumerate(self._hashes) if value is not None}
        assert len(free) == len(self._free), "a block is free twice"
        assert free.issuperset(range(self.first_untouched, self._end)), "an untouched block is in use"
        assert min(self._references, default=0) >= 0, "a reference count is negative"
        lists = (self._evictable_idle, self._evictable, self._evictable_hot)
        evictable = set().union(*lists)
        assert len(evictable) == sum(map(len, lists)), "a block is in two eviction lists"
        assert self._idle_content <= hashed.keys(), "a block without content counts as content of idle work"
        assert self._evictable_idle.keys() <= self._idle_content, "interactive content is evicted as idle"
        assert all((self._hashes[b] in self._hot_counts) == (b in self._evictable_hot) for b in evictable), (
            "a block is in the wrong eviction list"
        )
        assert min(self._hot_counts.values(), default=1) > 0, "a hash is hot without a session"
        assert free.isdisjoint(referenced) and free.isdisjoint(evictable), "a free block is in use"
        assert evictable.isdisjoint(referenced), "an evictable block is in use"
        assert len(free) + len(evictable) + len(referenced) == self.num_blocks, (
            "blocks were lost or duplicated"
        )
        assert {block: value for value, block in self._cached.items()} == hashed, (
            "the cache disagrees with the hashes of its blocks"
        )
        assert len(self._cached) == len(hashed), "one block is cached under two hashes"
        assert len(self._missed) <= self.num_blocks, "too many missed hashes are kept"
        assert self._reused <= set(referenced) | hashed.keys(), "a block without content counts as reused"
        assert free.isdisjoint(hashed), "a free block is cached"
        assert evictable <= hashed.keys(), "an evictable block is not cached"

    def _count_eviction(self, origin: OrderedDict[int, None]) -> None:
        if origin is self._evictable:
            self.evictions.cached += 1
        elif origin is self._evictable_hot:
            self.evictions.hot += 1
        else:
            self.evictions.idle += 1

    def _eviction_order(self, block: int) -> OrderedDict[int, None]:
        """The list that a cached block is in while it has no reference."""
        if self._hashes[block] in self._hot_counts:
            return self._evictable_hot
        return self._evictable_idle if block in self._idle_content else self._evictable

    def _change_eviction_list(
        self, block_hash: BlockHash, origin: OrderedDict[int, None], target: OrderedDict[int, None]
    ) -> bool:
        """Moves a cached block from one eviction list to another. Returns False if it is not in the first."""
        block = self._cached.get(block_hash)
        if block is None or block not in origin:
            return False
        del origin[block]
        target[block] = None
        return True

    def _is_free(self, block: int) -> bool:
        return self._references[block] == 0 and self._hashes[block] is None

    def _put_free(self, block: int) -> None:
        self._reused.discard(block)
        self._free.append(block)
        self._newly_free.append(block)

    def _drop_hash(self, block: int) -> None:
        block_hash = self._hashes[block]
        assert block_hash is not None
        del self._cached[block_hash]
        if self.changed is not None:
            self.changed.add(block_hash)
        self._hashes[block] = None
        self._idle_content.discard(block)
        self._reused.discard(block)
