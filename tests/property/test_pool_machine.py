"""The block pool against a model of plain dicts and lists."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.scheduling.cache.block_pool import BlockPool, extend_keys, root_key

KEYS = [bytes([number]) * 4 for number in range(8)]


class PoolMachine(RuleBasedStateMachine):
    """Model: references by block, keys by block, and the evictable blocks in the order they were last given back."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.references = dict.fromkeys(range(num_blocks), 0)
        self.keys: dict[int, bytes] = {}
        self.evictable: list[int] = []
        self.heat: Counter[bytes] = Counter()
        self.dead: set[int] = set()

    @property
    def free(self) -> set[int]:
        return {b for b, count in self.references.items() if count == 0 and b not in self.keys}

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
        assert set(taken[: len(free)]) <= free, "free blocks go before cached ones"
        order = sorted(self.evictable, key=self.is_hot)  # stable: cold ones first, each by their last use
        assert evicted == order[: len(evicted)], (
            "the least recently used cold block goes first, hot ones last"
        )
        for block in evicted:
            del self.keys[block]
            self.evictable.remove(block)
        self.references.update(dict.fromkeys(taken, 1))
        self.dead -= set(taken)

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
            self.give_back(block)

    @rule(block=st.integers(0, 7))
    def release_what_nobody_holds(self, block: int) -> None:
        block %= self.pool.num_blocks
        if self.references[block] == 0:
            with pytest.raises(ValueError, match=f"block {block} was given back more often"):
                self.pool.release([block])

    @rule(block=st.integers(0, 7), key=st.sampled_from(KEYS))
    def register(self, block: int, key: bytes) -> None:
        block %= self.pool.num_blocks
        if key in self.keys.values():
            assert self.pool.register(block, key) is False
        elif self.references[block] == 0 or block in self.keys:
            with pytest.raises(ValueError, match=f"block {block} cannot be cached"):
                self.pool.register(block, key)
        else:
            assert self.pool.register(block, key) is True
            self.keys[block] = key

    @rule(block=st.integers(0, 7), key=st.sampled_from(KEYS))
    def forget(self, block: int, key: bytes) -> None:
        block %= self.pool.num_blocks
        self.pool.forget(block, key)
        if self.keys.get(block) == key:
            del self.keys[block]
            if block in self.evictable:
                self.evictable.remove(block)
                self.dead.add(block)

    def is_hot(self, block: int) -> bool:
        return self.heat[self.keys[block]] > 0

    @rule(key=st.sampled_from(KEYS))
    def warm(self, key: bytes) -> None:
        self.pool.heat(key)
        self.heat[key] += 1
        if self.heat[key] == 1:
            self.move(key, last=True)

    @rule(key=st.sampled_from(KEYS))
    def cool(self, key: bytes) -> None:
        if self.heat[key]:
            self.pool.cool(key)
            self.heat[key] -= 1
            if not self.heat[key]:
                self.move(key, last=False)

    def move(self, key: bytes, *, last: bool) -> None:
        for block in [b for b in self.evictable if self.keys[b] == key]:
            self.evictable.remove(block)
            self.evictable.insert(len(self.evictable) if last else 0, block)

    @rule(key=st.sampled_from(KEYS))
    def lookup(self, key: bytes) -> None:
        holders = [block for block, held in self.keys.items() if held == key]
        assert self.pool.lookup(key) == (holders[0] if holders else None)

    @rule()
    def take_dead(self) -> None:
        assert set(self.pool.take_dead()) == self.dead
        self.dead.clear()

    def give_back(self, block: int) -> None:
        self.references[block] -= 1
        if self.references[block] == 0:
            if block in self.keys:
                self.evictable.append(block)
            else:
                self.dead.add(block)

    @invariant()
    def equals_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        assert {b: self.pool.references(b) for b in self.references} == self.references
        assert self.pool.available == len(self.free) + len(self.evictable)
        assert self.pool.num_cached == len(self.keys)
        assert self.pool.num_referenced == len(self.held)


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPoolEqualsItsModelAfterEveryStep = PoolMachine.TestCase


def test_a_refused_release_gives_nothing_back() -> None:
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
    for block, key in zip(blocks, KEYS, strict=False):
        pool.register(block, key)
    pool.release(blocks)
    assert pool.allocate(3) == blocks[::-1]


def test_a_hit_makes_a_block_the_most_recently_used_one() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    assert blocks is not None
    for block, key in zip(blocks, KEYS, strict=False):
        pool.register(block, key)
    pool.release([blocks[0]])
    pool.release([blocks[1]])
    pool.share(blocks[0])
    pool.release([blocks[0]])
    assert pool.allocate(1) == [blocks[1]]


def test_keys_of_blocks_depend_on_content_past_and_root() -> None:
    def keys(root: bytes, tokens: list[int]) -> list[bytes]:
        made: list[bytes] = []
        extend_keys(made, root, tokens, 2)
        return made

    root = root_key("", "")
    assert len(keys(root, [1, 2, 3])) == 1
    assert keys(root, [1, 2, 3, 4])[:1] == keys(root, [1, 2, 9, 9])[:1]
    assert keys(root, [1, 2, 3, 4])[1] != keys(root, [9, 2, 3, 4])[1]
    roots = {
        root_key(*pair) for pair in [("", ""), ("a", ""), ("", "a"), ("ab", "c"), ("a", "bc"), ("1:", "")]
    }
    assert len(roots) == 6


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 17])
def test_keys_made_bit_by_bit_equal_keys_made_at_once(length: int) -> None:
    tokens = [token * 7 % 5 for token in range(length)]
    at_once: list[bytes] = []
    extend_keys(at_once, root_key("s", "a"), tokens, 3)
    bit_by_bit: list[bytes] = []
    for end in range(length + 1):
        extend_keys(bit_by_bit, root_key("s", "a"), tokens[:end], 3)
    assert bit_by_bit == at_once and len(at_once) == length // 3


# --- memory that is there only once it is used ------------------------------------------------------------------


def use_and_cache(pool: BlockPool, count: int, name: bytes) -> None:
    """What a request does: takes blocks, fills them with content of its own, gives them back."""
    blocks = pool.allocate(count)
    assert blocks is not None
    for index, block in enumerate(blocks):
        pool.register(block, b"%b %d" % (name, index))
    pool.release(blocks)
    pool.check_integrity()


@pytest.mark.parametrize(("eager", "most"), [(0, 10), (4, 10), (20, 20), (None, 100)])
def test_memory_follows_the_load_however_much_there_is_to_cache(eager: int | None, most: int) -> None:
    pool = BlockPool(100, eager)
    for number in range(40):
        use_and_cache(pool, 5, b"%d" % number)
    assert pool.num_touched == most


def test_a_larger_load_gets_memory_that_was_never_used() -> None:
    pool = BlockPool(100, 0)
    use_and_cache(pool, 5, b"small")
    assert pool.allocate(80) is not None and pool.num_touched >= 80
    assert pool.allocate(20) is not None and pool.num_touched == 100


def test_hot_content_is_worth_more_memory() -> None:
    pool = BlockPool(100, 0)
    for index in range(5):
        pool.heat(b"talk %d" % index)
    use_and_cache(pool, 5, b"talk")
    for number in range(10):
        use_and_cache(pool, 5, b"%d" % number)
    assert all(pool.lookup(b"talk %d" % index) is not None for index in range(5))
    assert pool.num_touched <= 15
