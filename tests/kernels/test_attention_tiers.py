"""Compares attention over both cache tiers with numpy, and checks that its bits do not depend on the batch, on every
instruction set of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache as cached

import attention_twin as twin
import numpy as np
import pytest
from stored_cache import CodedCache, new_store

from weft.ops.store_format import dequantise, dequantise_keys, quantise, quantise_keys
from weft.tiers import stored_blocks

_kernels = pytest.importorskip("weft._kernels")
pytestmark = pytest.mark.usefixtures("instruction_set")

LAYERS, LAYER = 2, 1

# The error of codes for values of about 1.
PLAIN_ATOL = 3e-3

# All instruction sets except portable have fused multiply-add, and compute sums in the same order.
FUSED = [name for name in _kernels.available() if name != "portable"]


@dataclass(frozen=True)
class Case:
    """A request with `first` tokens in the cache and `count` new ones, which keeps `tail` blocks in full precision."""

    first: int
    count: int
    tail: int = 2
    kv_heads: int = 1
    group: int = 3
    head_size: int = 64
    block_size: int = 16
    window: int = 0
    cap: float = 0.0

    @property
    def context(self) -> int:
        return self.first + self.count

    def stored(self, position: int) -> int:
        return stored_blocks(position, self.block_size, self.tail)

    def queries(self) -> np.ndarray:
        shape = (self.count, self.kv_heads * self.group, self.head_size)
        return 2.0 * np.random.default_rng(1).standard_normal(shape).astype(np.float32)


class Cache:
    """Both tiers of one request, with blocks in random order. Positions that no query may read from a tier are NaN
    there."""

    def __init__(self, case: Case, bits: int) -> None:
        rng = np.random.default_rng(2)
        blocks = -(-case.context // case.block_size)
        self.case, self.bits = case, bits
        self.table, self.store_table = (
            rng.permutation(blocks + 2)[:blocks].astype(np.int64) for _ in range(2)
        )
        # Keys and values are not centred at zero, like those of a model.
        content = rng.standard_normal((case.context, 2, case.kv_heads, case.head_size)) + 0.3
        self.content = content.astype(np.float32)
        self.update()

    def update(self) -> None:
        """Fills both tiers from the content."""
        case, blocks = self.case, len(self.table)
        self.cache = CodedCache(blocks + 2, LAYERS, case.block_size, case.kv_heads, case.head_size)
        positions = np.arange(case.context)
        places = self.table[positions // case.block_size], LAYER, positions % case.block_size
        self.cache.write(*places, self.content)
        whole = self.cache.laid_out()
        self.store = new_store(blocks + 2, LAYERS, case.kv_heads, case.block_size, case.head_size, self.bits)
        self.store[:] = 255
        for block in range(case.stored(case.context - 1)):
            moved_from, moved_to = int(self.table[block]), int(self.store_table[block])
            _kernels.move_block(whole, LAYER, moved_from, self.store, moved_to, case.head_size, self.bits)
        # The moved content as the store keeps it.
        kept = np.moveaxis(self.cache.values[self.table, LAYER], 1, 2)
        kept = kept.reshape(-1, *kept.shape[2:])[: case.context]
        self.stored = dequantise(quantise(kept, self.bits), self.bits, np.float64)
        self.stored[:, 0] = dequantise_keys(quantise_keys(kept[:, 0], self.bits), self.bits, np.float64)
        self.cache.forget(self.table[: case.stored(case.first)])
        self.codes = self.cache.laid_out()

    def attend(self, queries: np.ndarray, first: int | None = None, split: bool = False) -> np.ndarray:
        case, out = self.case, np.full_like(queries, 7.0)
        position = case.first if first is None else first
        scale = case.head_size**-0.5
        two_tier = (self.store, self.bits, case.tail, self.store_table)
        _kernels.attend(
            queries,
            self.codes,
            LAYER,
            self.table,
            position,
            case.window,
            scale,
            case.cap,
            out,
            split,
            two_tier,
        )
        return out

    def expected(self, queries: np.ndarray) -> np.ndarray:
        """The expected result with the codes of the kernels."""
        case, scale = self.case, self.case.head_size**-0.5
        heads = twin.contexts(self.cache, LAYER, self.table, self.stored)

        def attend_one(query: np.ndarray, head: int, seen: slice) -> np.ndarray:
            border = case.stored(seen.stop - 1) * case.block_size
            return twin.attend(query, heads[head // case.group], seen, scale, case.cap, border)

        return twin.attend_all(queries, case.first, case.window, attend_one)

    def expected_plainly(self, queries: np.ndarray) -> np.ndarray:
        """The expected result with codes of the store only."""
        case, scale = self.case, self.case.head_size**-0.5

        def attend_one(query: np.ndarray, head: int, seen: slice) -> np.ndarray:
            border = case.stored(seen.stop - 1) * case.block_size
            read = np.concatenate([self.stored[:border], self.content[border:]])
            return twin.attend_plainly(query, read[seen, :, head // case.group], scale, case.cap)

        return twin.attend_all(queries, case.first, case.window, attend_one)


@cached
def expected_of(case: Case, bits: int) -> np.ndarray:
    """numpy computes it once: it does not depend on the instruction set."""
    return Cache(case, bits).expected(case.queries())


@cached
def expected_plainly_of(case: Case, bits: int) -> np.ndarray:
    return Cache(case, bits).expected_plainly(case.queries())


CASES = {
    "shorter than its tail": Case(20, 1),
    "the last one with everything in full": Case(46, 1),
    "the first that reads from the store": Case(47, 1),
    "a decode": Case(99, 1, kv_heads=2),
    "a decode with its border inside a segment": Case(500, 1, kv_heads=3),
    "a decode with its border at a segment border": Case(511 + 32, 1),
    "a long decode": Case(1300, 1, group=4, head_size=128, tail=16),
    "a prefill": Case(0, 70, kv_heads=2, tail=1),
    "a prefill many times as long as the tail": Case(0, 300, group=1, tail=1),
    "a chunk across borders": Case(240, 40, group=4),
    "a chunk longer than the tail": Case(500, 61, group=1, tail=1),
    "a chunk of a group of seven": Case(300, 23, group=7),
    "a chunk of a group of eight": Case(300, 23, group=8),
    "a window inside the tail": Case(300, 60, group=2, window=20),
    "a window that begins in the store": Case(300, 60, group=2, window=90),
    "a window over segments": Case(700, 20, group=5, window=300, tail=4),
    "a window of one": Case(100, 5, window=1),
    "a cap": Case(200, 10, cap=2.0),
    "a cap and a window": Case(530, 9, group=8, head_size=128, cap=30.0, window=280),
    "blocks of one": Case(130, 3, block_size=1, tail=10),
    "blocks of seven": Case(270, 9, block_size=7, kv_heads=2),
    "blocks of eight": Case(270, 25, block_size=8, tail=3, kv_heads=2),
    "blocks of eight, a decode": Case(777, 1, block_size=8, tail=3, kv_heads=2),
    "blocks of 24": Case(270, 50, block_size=24, tail=1),
    "blocks of 32": Case(600, 70, block_size=32, tail=1),
    "blocks larger than a segment": Case(1200, 3, block_size=300, tail=1),
    "heads of 8": Case(70, 5, head_size=8),
    "heads of 80": Case(260, 20, head_size=80, group=7),
    "heads of 72": Case(100, 20, head_size=72, group=2),
    "heads of 96": Case(300, 20, head_size=96, group=3),
    "heads of 256": Case(80, 20, head_size=256, group=4),
    "heads of 14": Case(300, 20, head_size=14, group=5),
    "sixteen heads to one": Case(300, 4, group=16, head_size=128),
    "sixty heads to one": Case(260, 2, group=60, head_size=16),
}
ALL = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
BITS = pytest.mark.parametrize("bits", [8, 4])


@BITS
@ALL
def test_a_query_reads_positions_before_its_tail_from_the_store_and_the_rest_in_full(
    case: Case, bits: int
) -> None:
    queries, cache = case.queries(), Cache(case, bits)
    out = cache.attend(queries)
    twin.assert_alike(out, expected_of(case, bits))
    np.testing.assert_allclose(out, expected_plainly_of(case, bits), rtol=0, atol=PLAIN_ATOL)


@BITS
@ALL
def test_a_query_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(case: Case, bits: int) -> None:
    queries, cache = case.queries(), Cache(case, bits)
    together = cache.attend(queries)
    for query in range(case.count):
        alone, split = (
            cache.attend(queries[query : query + 1], case.first + query, split) for split in (False, True)
        )
        np.testing.assert_array_equal(alone[0].view(np.int32), together[query].view(np.int32))
        np.testing.assert_array_equal(split[0].view(np.int32), together[query].view(np.int32))
    for cut in {case.count // 3, case.count // 2, case.count - 1} - {0}:
        front, back = cache.attend(queries[:cut]), cache.attend(queries[cut:], case.first + cut)
        np.testing.assert_array_equal(np.concatenate([front, back]).view(np.int32), together.view(np.int32))


# Head sizes that fill vectors of 8 and of 16, of 8 alone, and neither; with fewer rows than a tile, as many, and
# more.
SHAPES = {
    f"heads of {size}, {group} to one": Case(280, 5, group=group, head_size=size)
    for size in (8, 14, 24, 40, 64, 72, 80, 96, 128)
    for group in range(1, 8)
}


@pytest.mark.parametrize("instruction_set", FUSED[1:], indirect=True)
@BITS
@pytest.mark.parametrize("case", (CASES | SHAPES).values(), ids=(CASES | SHAPES).keys())
def test_a_query_has_the_same_bits_on_every_instruction_set_with_fused_multiply_add(
    case: Case, bits: int
) -> None:
    queries, cache = case.queries(), Cache(case, bits)
    ours = cache.attend(queries)
    _kernels.use(FUSED[0])
    np.testing.assert_array_equal(ours.view(np.int32), cache.attend(queries).view(np.int32))


@BITS
def test_attention_is_correct_for_any_shape_of_request(bits: int) -> None:
    rng = np.random.default_rng(9)
    for _ in range(25):
        block_size = int(rng.choice([4, 8, 16, 16, 32]))
        case = Case(
            first=int(rng.integers(0, 600)),
            count=int(rng.choice([1, 1, 5, 37])),
            tail=int(rng.integers(1, 6)),
            kv_heads=int(rng.integers(1, 3)),
            group=int(rng.choice([1, 2, 3, 7, 8])),
            head_size=int(rng.choice([16, 64, 80, 128])),
            block_size=block_size,
            window=int(rng.choice([0, 0, rng.integers(1, 400)])),
            cap=float(rng.choice([0.0, 0.0, 5.0])),
        )
        out = Cache(case, bits).attend(case.queries())
        twin.assert_alike(out, expected_of(case, bits), what=case)


@BITS
def test_a_nan_vector_affects_only_the_queries_that_see_it(bits: int) -> None:
    """A window passes NaN tokens in the store: no later query reads them, in whole tiles or not."""
    case = Case(300, 40, group=2, window=150, tail=1)
    queries, cache = case.queries(), Cache(case, bits)
    clean = cache.attend(queries)
    # The last queries that see the value at 160 and the key at 170 are at positions 309 and 319.
    cache.content[160, 1, 0, 5] = np.inf
    cache.content[170, 0] = np.nan
    cache.update()
    out = cache.attend(queries)
    assert np.isnan(out[:20]).all()
    np.testing.assert_array_equal(out[20:].view(np.int32), clean[20:].view(np.int32))


@BITS
def test_weights_that_vanish_leave_no_subnormal_sums(bits: int) -> None:
    """Scores far apart: weights that would be subnormal after scaling count as 0."""
    case = Case(600, 1, group=1, tail=1)
    queries, cache = 60.0 * case.queries(), Cache(case, bits)
    cache.content[:, 1] *= 1e-6
    cache.update()
    twin.assert_alike(cache.attend(queries), cache.expected(queries), 1e-6)


@BITS
def test_a_tail_with_far_less_weight_than_the_store_is_not_lost(bits: int) -> None:
    case = Case(200, 1, group=1)
    queries, cache = np.abs(case.queries()), Cache(case, bits)
    border = case.stored(case.first) * case.block_size
    cache.content[:border, 0] = 0.2
    cache.content[border:, 0] = -0.8  # weights of about 2^-20
    cache.content[border:, 1] *= 1e6
    cache.update()
    wanted = cache.expected(queries)
    cache.content[border:, 1] = 0.0
    out = cache.attend(queries)
    cache.update()
    assert np.abs(cache.attend(queries) - out).max() > 0.01
    np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-5)


def test_a_call_that_would_read_outside_the_store_is_rejected() -> None:
    case = Case(100, 2)
    queries, cache = case.queries(), Cache(case, 8)
    cache.store_table = cache.store_table[:3]
    with pytest.raises(ValueError, match="4 blocks of the store are needed, the table names 3"):
        cache.attend(queries)
    cache.store_table = np.array([0, 1, 2, 99])
    with pytest.raises(ValueError, match="the table names block 99, the store has 9"):
        cache.attend(queries)
