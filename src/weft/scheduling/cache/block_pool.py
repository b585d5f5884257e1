"""Owns the blocks of the paged cache: who refers to each, which are cached by content, which are free."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

BlockKey = bytes
"""SHA-256 over the block's tokens and the key before it: equal keys mean equal content and equal past."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A number of blocks in each tier of the cache. A plain cache has full ones alone."""

    full: int
    store: int = 0

    def __add__(self, other: Blocks) -> Blocks:
        return Blocks(self.full + other.full, self.store + other.store)

    def __sub__(self, other: Blocks) -> Blocks:
        return Blocks(self.full - other.full, self.store - other.store)

    def __bool__(self) -> bool:
        return self.full > 0 or self.store > 0

    def covers(self, other: Blocks) -> bool:
        return self.full >= other.full and self.store >= other.store


def root_key(cache_salt: str, adapter_id: str) -> BlockKey:
    """The key that stands before a sequence's first block. The length keeps ("ab", "c") apart from ("a", "bc")."""
    salt = cache_salt.encode()
    return hashlib.sha256(b"%d:%b%b" % (len(salt), salt, adapter_id.encode())).digest()


def extend_keys(keys: list[BlockKey], root: BlockKey, tokens: Sequence[int], block_size: int) -> None:
    """Appends the keys of all full blocks of `tokens` that `keys` does not hold yet."""
    previous = keys[-1] if keys else root
    for start in range(len(keys) * block_size, len(tokens) - block_size + 1, block_size):
        content = array("q", tokens[start : start + block_size]).tobytes()
        previous = hashlib.sha256(previous + content).digest()
        keys.append(previous)


class BlockPool:
    """Blocks with reference counts and a cache of those whose content is known.

    A block is in exactly one of three places: referred to (count above 0), evictable (count 0, content cached,
    in the order it was last used; those with a hot key in a list of their own that is touched last), or free.
    `available` is what an allocation may take: free and evictable.

    A block that was never used may not be memory yet. Beyond `eager_blocks` such blocks are used for what runs, and
    for as much again of what is cached; then cold content makes room first, so that memory follows the load.

    Ids begin at `first_block`: the store's blocks come after the full ones. What would lie before it is never used.
    """

    def __init__(self, num_blocks: int, eager_blocks: int | None = None, first_block: int = 0) -> None:
        self.num_blocks = num_blocks
        self._first_block = first_block
        self._end = end = first_block + num_blocks
        self._eager_end = end if eager_blocks is None else first_block + eager_blocks
        self.num_touched = first_block
        """Blocks from this one on were never used: the free list gives out the lowest of them first."""
        self._references = [0] * end
        self._keys: list[BlockKey | None] = [None] * end
        self._cached: dict[BlockKey, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._evictable_hot: OrderedDict[int, None] = OrderedDict()
        self._heat: dict[BlockKey, int] = {}
        """How many sessions keep a key hot, cached or not."""
        self._reused: set[int] = set()
        """Blocks with content that was shared since it came to be."""
        self._wanted: OrderedDict[BlockKey, None] = OrderedDict()
        """Keys that somebody looked for in vain; no more of them than there are blocks, the latest."""
        # A stack: the block used last is used again first, so that memory never touched stays untouched.
        self._free = list(range(end - 1, first_block - 1, -1))
        self._dead: list[int] = []

    @property
    def available(self) -> int:
        return len(self._free) + len(self._evictable) + len(self._evictable_hot)

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
    def heat_of_keys(self) -> dict[BlockKey, int]:
        return self._heat

    def references(self, block: int) -> int:
        return self._references[block]

    def is_cached(self, block: int) -> bool:
        return self._keys[block] is not None

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` blocks: free ones, then the least recently used cached ones, then hot ones. None: not enough."""
        if count > self.available:
            return None
        most_touched = max(self._eager_end, self._first_block + 2 * (self.num_referenced + count))
        taken = []
        for _ in range(count):
            free = self._free
            if free and (
                free[-1] < self.num_touched or self.num_touched < most_touched or not self._evictable
            ):
                block = free.pop()
                self.num_touched = max(self.num_touched, block + 1)
            else:
                block, _ = (self._evictable or self._evictable_hot).popitem(last=False)
                self._drop_key(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def lookup(self, key: BlockKey) -> int | None:
        return self._cached.get(key)

    def share(self, block: int) -> None:
        """Refers once more to a block that holds content: a prefix hit."""
        if self._references[block] == 0:
            if self._is_free(block):
                raise ValueError(f"block {block} is free and holds nothing to share")
            del self._eviction_order(block)[block]
        self._references[block] += 1
        self._reused.add(block)

    def share_all(self, blocks: Sequence[int]) -> None:
        """Shares every one of them or, where one is free, none."""
        for shared, block in enumerate(blocks):
            try:
                self.share(block)
            except ValueError:
                self.release(blocks[:shared])
                raise

    def release(self, blocks: Sequence[int]) -> None:
        """Gives one reference back for each block. Later blocks of a sequence are evicted before earlier ones."""
        for block in blocks:
            if self._references[block] <= 0:
                raise ValueError(f"block {block} was given back more often than it was taken")
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._keys[block] is None:
                    self._put_free(block)
                else:
                    self._eviction_order(block)[block] = None

    def retire(self, block: int) -> None:
        """Gives one reference back to a block whose sequence has a copy elsewhere: its content stays findable, but unless
        it ever was of use to another, or would have been, it is the first to be evicted."""
        self.release((block,))
        if block in self._evictable and block not in self._reused and self._keys[block] not in self._wanted:
            self._evictable.move_to_end(block, last=False)

    def want(self, keys: Sequence[BlockKey]) -> None:
        """Somebody could have used this content, and it was not there."""
        for key in keys:
            self._wanted[key] = None
            self._wanted.move_to_end(key)
        while len(self._wanted) > self.num_blocks:
            self._wanted.popitem(last=False)

    def heat(self, key: BlockKey) -> None:
        """One session more wants this content kept: its block, once there is one, is evicted after all that are not."""
        self._heat[key] = self._heat.get(key, 0) + 1
        if self._heat[key] == 1:
            self._move(key, self._evictable, self._evictable_hot)

    def cool(self, key: BlockKey) -> None:
        """One session less. Content that nobody keeps any more has not been used for long: it is evicted first."""
        self._heat[key] -= 1
        if self._heat[key] == 0:
            del self._heat[key]
            if self._move(key, self._evictable_hot, self._evictable):
                self._evictable.move_to_end(self._cached[key], last=False)

    def register(self, block: int, key: BlockKey) -> bool:
        """Makes a block findable by its content. False where another block already holds the same."""
        if key in self._cached:
            return False
        if self._references[block] == 0 or self._keys[block] is not None:
            raise ValueError(f"block {block} cannot be cached: it is free, or cached under another key")
        self._cached[key] = block
        self._keys[block] = key
        return True

    def forget(self, block: int, key: BlockKey) -> None:
        """Takes a block out of the cache whose content never came to be, if it is still there under `key`."""
        if self._keys[block] != key:
            return
        if self._references[block] == 0:
            del self._eviction_order(block)[block]
            self._drop_key(block)
            self._put_free(block)
        else:
            self._drop_key(block)

    def take_dead(self) -> list[int]:
        """The blocks that became free since the last call and are still free."""
        dead, self._dead = self._dead, []
        return [block for block in dict.fromkeys(dead) if self._is_free(block)] if dead else dead

    def check_integrity(self) -> None:
        """Raises AssertionError where the three places do not add up."""
        free = set(self._free)
        referenced = [block for block, count in enumerate(self._references) if count]
        keyed = {block: key for block, key in enumerate(self._keys) if key is not None}
        assert len(free) == len(self._free), "a block is free twice"
        assert free.issuperset(range(self.num_touched, self._end)), "a block is in use that was never used"
        assert min(self._references, default=0) >= 0, "a reference count is negative"
        evictable = self._evictable.keys() | self._evictable_hot.keys()
        assert len(evictable) == len(self._evictable) + len(self._evictable_hot), "a block is hot and is not"
        assert all((self._keys[b] in self._heat) == (b in self._evictable_hot) for b in evictable), (
            "a block's place in the order of eviction and its heat disagree"
        )
        assert min(self._heat.values(), default=1) > 0, "a key is hot for nobody"
        assert free.isdisjoint(referenced) and free.isdisjoint(evictable), "a free block is in use"
        assert evictable.isdisjoint(referenced), "an evictable block is in use"
        assert len(free) + len(evictable) + len(referenced) == self.num_blocks, "blocks were lost or doubled"
        assert {block: key for key, block in self._cached.items()} == keyed, (
            "the cache disagrees with the keys"
        )
        assert len(self._cached) == len(keyed), "one block is cached under two keys"
        assert len(self._wanted) <= self.num_blocks, "more is wanted than there is room for"
        assert self._reused <= set(referenced) | keyed.keys(), "a block without content counts as reused"
        assert free.isdisjoint(keyed) and evictable <= keyed.keys(), "free is cached, or evictable not"

    def _eviction_order(self, block: int) -> OrderedDict[int, None]:
        return self._evictable_hot if self._keys[block] in self._heat else self._evictable

    def _move(self, key: BlockKey, origin: OrderedDict[int, None], target: OrderedDict[int, None]) -> bool:
        block = self._cached.get(key)
        if block is None or block not in origin:
            return False
        del origin[block]
        target[block] = None
        return True

    def _is_free(self, block: int) -> bool:
        return self._references[block] == 0 and self._keys[block] is None

    def _put_free(self, block: int) -> None:
        self._reused.discard(block)
        self._free.append(block)
        self._dead.append(block)

    def _drop_key(self, block: int) -> None:
        key = self._keys[block]
        assert key is not None
        del self._cached[key]
        self._keys[block] = None
        self._reused.discard(block)
