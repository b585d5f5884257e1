"""Compares the block pool with a model of plain dicts and lists."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.scheduling.cache.block_pool import BlockPool, extend_block_hashes, root_hash

HASHES = [bytes([number]) * 4 for number in range(8)]


class PoolMachine(RuleBasedStateMachine):
    """Model: references and hashes by block, and the evictable blocks in LRU order."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.references = dict.fromkeys(range(num_blocks), 0)
        self.hashes: dict[int, bytes] = {}
        self.evictable: list[int] = []
        self.hot_counts: Counter[bytes] = Counter()
        self.idle_content: set[int] = set()
        self.newly_free: set[int] = set()

    @property
    def free(self) -> set[int]:
        return {b for b, count in self.references.items() if count == 0 and b not in self.hashes}

    @property
    def held(self) -> list[int]:
        return [block for block, count in self.references.items() if count]

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        free = self.free
        taken = self.pool.allocate(count)
        if count > len(free) + len(self.evictable):
            assert taken is None
            return
        assert taken is not None and len(taken) == len(set(taken)) == count
        evicted = taken[len(free) :]
        assert set(taken[: len(free)]) <= free, "free blocks are used before cached ones"
        order = sorted(self.evictable, key=self.eviction_class)  # stable: each class in LRU order
        assert evicted == order[: len(evicted)], (
            "content of idle work is evicted first, hot content last, and the least recently used one of each"
        )
        for block in evicted:
            self.idle_content.discard(block)
            del self.hashes[block]
            self.evictable.remove(block)
        self.references.update(dict.fromkeys(taken, 1))
        self.newly_free -= set(taken)

    @rule(block=st.integers(0, 7))
    def share(self, block: int) -> None:
        block %= self.pool.num_blocks
        if block in self.free:
            with pytest.raises(ValueError, match=f"block {block} is free"):
                self.pool.share(block)
            return
        self.pool.share(block)
        self.references[block] += 1
        if block in self.evictable:
            self.evictable.remove(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self.held), unique=True))
        self.pool.release(blocks)
        for block in reversed(blocks):
            self.drop_reference(block)

    @rule(block=st.integers(0, 7))
    def release_an_unreferenced_block(self, block: int) -> None:
        block %= self.pool.num_blocks
        if self.references[block] == 0:
            with pytest.raises(ValueError, match=f"block {block} was released more often"):
                self.pool.release([block])

    @rule(block=st.integers(0, 7), block_hash=st.sampled_from(HASHES))
    def register(self, block: int, block_hash: bytes) -> None:
        block %= self.pool.num_blocks
        if block_hash in self.hashes.values():
            assert self.pool.register(block, block_hash) is False
        elif self.references[block] == 0 or block in self.hashes:
            with pytest.raises(ValueError, match=f"block {block} cannot be cached"):
                self.pool.register(block, block_hash)
        else:
            assert self.pool.register(block, block_hash) is True
            self.hashes[block] = block_hash

    @rule(block=st.integers(0, 7), block_hash=st.sampled_from(HASHES))
    def unregister(self, block: int, block_hash: bytes) -> None:
        block %= self.pool.num_blocks
        self.pool.unregister(block, block_hash)
        if self.hashes.get(block) == block_hash:
            del self.hashes[block]
            self.idle_content.discard(block)
            if block in self.evictable:
                self.evictable.remove(block)
                self.newly_free.add(block)

    def eviction_class(self, block: int) -> int:
        if self.hot_counts[self.hashes[block]] > 0:
            return 2
        return 0 if block in self.idle_content else 1

    @rule(block=st.integers(0, 7), is_idle_work=st.booleans())
    def use(self, block: int, is_idle_work: bool) -> None:
        block %= self.pool.num_blocks
        if self.references[block] == 0 or block not in self.hashes:
            return
        if is_idle_work:
            self.pool.note_idle_content((block,))
            self.idle_content.add(block)
        else:
            self.pool.note_interactive((block,))
            self.idle_content.discard(block)

    @rule(block_hash=st.sampled_from(HASHES))
    def mark_hot(self, block_hash: bytes) -> None:
        self.pool.mark_hot(block_hash)
        self.hot_counts[block_hash] += 1
        if self.hot_counts[block_hash] == 1:
            self.move(block_hash, last=True)

    @rule(block_hash=st.sampled_from(HASHES))
    def unmark_hot(self, block_hash: bytes) -> None:
        if self.hot_counts[block_hash]:
            self.pool.unmark_hot(block_hash)
            self.hot_counts[block_hash] -= 1
            if not self.hot_counts[block_hash]:
                self.move(block_hash, last=False)

    def move(self, block_hash: bytes, *, last: bool) -> None:
        for block in [b for b in self.evictable if self.hashes[b] == block_hash]:
            self.evictable.remove(block)
            self.evictable.insert(len(self.evictable) if last else 0, block)

    @rule(block_hash=st.sampled_from(HASHES))
    def lookup(self, block_hash: bytes) -> None:
        holders = [block for block, held in self.hashes.items() if held == block_hash]
        assert self.pool.lookup(block_hash) == (holders[0] if holders else None)

    @rule()
    def take_freed(self) -> None:
        assert set(self.pool.take_freed()) == self.newly_free
        self.newly_free.clear()

    def drop_reference(self, block: int) -> None:
        self.references[block] -= 1
        if self.references[block] == 0:
            if block in self.hashes:
                self.evictable.append(block)
            else:
                self.newly_free.add(block)

    @invariant()
    def equals_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        assert {b: self.pool.references(b) for b in self.references} == self.references
        assert self.pool.available == len(self.free) + len(self.evictable)
        assert self.pool.num_cached == len(self.hashes)
        assert self.pool.num_referenced == len(self.held)


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPoolEqualsItsModelAfterEveryStep = PoolMachine.TestCase


def test_a_rejected_release_releases_nothing() -> None:
    pool = BlockPool(3)
    held = pool.allocate(2)
    assert held is not None
    with pytest.raises(ValueError):
        pool.release([2, *held])  # block 2 is free
    assert [pool.references(block) for block in held] == [1, 1]
    pool.check_integrity()


def test_later_blocks_of_a_sequence_are_evicted_before_earlier_ones() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    assert blocks is not None
    for block, block_hash in zip(blocks, HASHES, strict=False):
        pool.register(block, block_hash)
    pool.release(blocks)
    assert pool.allocate(3) == blocks[::-1]


def test_a_prefix_hit_makes_a_block_the_most_recently_used_one() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    assert blocks is not None
    for block, block_hash in zip(blocks, HASHES, strict=False):
        pool.register(block, block_hash)
    pool.release([blocks[0]])
    pool.release([blocks[1]])
    pool.share(blocks[0])
    pool.release([blocks[0]])
    assert pool.allocate(1) == [blocks[1]]


def test_block_hashes_depend_on_content_previous_blocks_and_root() -> None:
    def hashes(root: bytes, tokens: list[int]) -> list[bytes]:
        made: list[bytes] = []
        extend_block_hashes(made, root, tokens, 2)
        return made

    root = root_hash("", "")
    assert len(hashes(root, [1, 2, 3])) == 1
    assert hashes(root, [1, 2, 3, 4])[:1] == hashes(root, [1, 2, 9, 9])[:1]
    assert hashes(root, [1, 2, 3, 4])[1] != hashes(root, [9, 2, 3, 4])[1]
    roots = {
        root_hash(*pair) for pair in [("", ""), ("a", ""), ("", "a"), ("ab", "c"), ("a", "bc"), ("1:", "")]
    }
    assert len(roots) == 6


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 17])
def test_hashes_extended_token_by_token_equal_hashes_made_at_once(length: int) -> None:
    tokens = [token * 7 % 5 for token in range(length)]
    at_once: list[bytes] = []
    extend_block_hashes(at_once, root_hash("s", "a"), tokens, 3)
    token_by_token: list[bytes] = []
    for end in range(length + 1):
        extend_block_hashes(token_by_token, root_hash("s", "a"), tokens[:end], 3)
    assert token_by_token == at_once and len(at_once) == length // 3


# --- blocks that take memory on first use ------------------------------------------------------------------------


def use_and_cache(pool: BlockPool, count: int, name: bytes) -> None:
    """What a request does: allocates blocks, fills them with its own content, and releases them."""
    blocks = pool.allocate(count)
    assert blocks is not None
    for index, block in enumerate(blocks):
        pool.register(block, b"%b %d" % (name, index))
    pool.release(blocks)
    pool.check_integrity()


@pytest.mark.parametrize(("eager", "max_touched"), [(0, 10), (4, 10), (20, 20), (None, 100)])
def test_memory_follows_the_load_however_much_content_could_be_cached(
    eager: int | None, max_touched: int
) -> None:
    pool = BlockPool(100, eager)
    for number in range(40):
        use_and_cache(pool, 5, b"%d" % number)
    assert pool.first_untouched == max_touched


def test_a_larger_load_gets_untouched_blocks() -> None:
    pool = BlockPool(100, 0)
    use_and_cache(pool, 5, b"small")
    assert pool.allocate(80) is not None and pool.first_untouched >= 80
    assert pool.allocate(20) is not None and pool.first_untouched == 100


def test_untouched_blocks_are_used_before_hot_content_is_evicted() -> None:
    pool = BlockPool(100, 0)
    for index in range(5):
        pool.mark_hot(b"talk %d" % index)
    use_and_cache(pool, 5, b"talk")
    for number in range(10):
        use_and_cache(pool, 5, b"%d" % number)
    assert all(pool.lookup(b"talk %d" % index) is not None for index in range(5))
    assert pool.first_untouched <= 15
