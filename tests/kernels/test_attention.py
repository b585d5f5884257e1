"""Attention of the C++ kernels against numpy in float64, on every instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from stored_cache import laid_out

_kernels = pytest.importorskip("weft._kernels")

LAYERS, LAYER = 2, 1


# All but the portable code fuse multiplication and addition, and then make their sums in the same order.
FUSED = [name for name in _kernels.available() if name != "portable"]


@pytest.fixture(params=_kernels.available(), autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _kernels.in_use()
    _kernels.use(request.param)
    yield request.param
    _kernels.use(before)


@dataclass(frozen=True)
class Case:
    """A request with `first` tokens in the cache and `count` new ones."""

    first: int
    count: int
    kv_heads: int = 1
    group: int = 3
    head_size: int = 64
    block_size: int = 16
    window: int = 0
    cap: float = 0.0

    @property
    def context(self) -> int:
        return self.first + self.count

    def queries(self) -> np.ndarray:
        shape = (self.count, self.kv_heads * self.group, self.head_size)
        return 2.0 * np.random.default_rng(1).standard_normal(shape).astype(np.float32)

    def cache(self) -> tuple[np.ndarray, np.ndarray]:
        """Blocks in any order; what does not belong to the request is not a number."""
        rng = np.random.default_rng(2)
        blocks = -(-self.context // self.block_size)
        cache = np.full(
            (blocks + 2, LAYERS, 2, self.block_size, self.kv_heads, self.head_size), np.nan, np.float16
        )
        table = rng.permutation(blocks + 2)[:blocks].astype(np.int64)
        positions = np.arange(self.context)
        content = rng.standard_normal((self.context, 2, self.kv_heads, self.head_size))
        cache[table[positions // self.block_size], LAYER, :, positions % self.block_size] = content
        return cache, table


def attend(
    case: Case,
    queries: np.ndarray,
    cache: np.ndarray,
    table: np.ndarray,
    first: int | None = None,
    split: bool = False,
) -> np.ndarray:
    out = np.full_like(queries, 7.0)
    scale = case.head_size**-0.5
    position = case.first if first is None else first
    halves = laid_out(cache).view(np.uint16)
    _kernels.attend(queries, halves, LAYER, table, position, case.window, scale, case.cap, out, split)
    return out


def expected(case: Case, queries: np.ndarray, cache: np.ndarray, table: np.ndarray) -> np.ndarray:
    gathered = cache[table, LAYER].astype(np.float64)
    keys, values = (gathered[:, i].reshape(-1, case.kv_heads, case.head_size) for i in range(2))
    out = np.empty(queries.shape)
    for query in range(case.count):
        end = case.first + query + 1
        seen = slice(max(0, end - case.window) if case.window else 0, end)
        for head in range(queries.shape[1]):
            scores = keys[seen, head // case.group] @ (queries[query, head] * case.head_size**-0.5)
            if case.cap:
                scores = case.cap * np.tanh(scores / case.cap)
            weights = np.exp(scores - scores.max())
            out[query, head] = weights @ values[seen, head // case.group] / weights.sum()
    return out


CASES = {
    "the first token": Case(0, 1),
    "a decode": Case(99, 1),
    "a decode at the end of a segment": Case(255, 1, kv_heads=3),
    "a decode at the start of a segment": Case(256, 1, kv_heads=2),
    "a long decode": Case(1300, 1, group=4, head_size=128),
    "a prefill": Case(0, 70, kv_heads=2),
    "a prefill across segments": Case(240, 40, group=4),
    "a chunk": Case(500, 33, group=1),
    "a window": Case(300, 60, group=2, window=40),
    "a window over segments": Case(700, 20, group=5, window=300),
    "a window of one": Case(100, 5, window=1),
    "a window that begins in the middle of the queries": Case(0, 90, group=1, window=50),
    "a cap": Case(200, 10, cap=2.0),
    "a cap and a window": Case(530, 9, group=8, head_size=128, cap=30.0, window=280),
    "blocks of one": Case(130, 3, block_size=1),
    "blocks of seven": Case(270, 9, block_size=7, kv_heads=2),
    "blocks larger than a segment": Case(700, 3, block_size=300),
    "heads of 8": Case(70, 5, head_size=8),
    "heads of 80": Case(260, 20, head_size=80, group=7),
    "heads of 72": Case(60, 20, head_size=72, group=2),
    "heads of 256": Case(40, 20, head_size=256, group=4),
    "heads of an odd size": Case(300, 20, head_size=13, group=5),
    "sixteen heads to one": Case(300, 4, group=16, head_size=128),
    "sixty heads to one": Case(260, 2, group=60, head_size=16),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention_is_the_weighted_mean_of_the_values_in_sight(case: Case) -> None:
    queries, (cache, table) = case.queries(), case.cache()
    np.testing.assert_allclose(
        attend(case, queries, cache, table), expected(case, queries, cache, table), rtol=0, atol=4e-6
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_query_is_the_same_bits_in_any_company_and_over_any_number_of_threads(case: Case) -> None:
    queries, (cache, table) = case.queries(), case.cache()
    together = attend(case, queries, cache, table)
    for query in range(case.count):
        alone = attend(case, queries[query : query + 1], cache, table, case.first + query)
        split = attend(case, queries[query : query + 1], cache, table, case.first + query, split=True)
        np.testing.assert_array_equal(alone[0].view(np.int32), together[query].view(np.int32))
        np.testing.assert_array_equal(split[0].view(np.int32), together[query].view(np.int32))
    for cut in {case.count // 3, case.count // 2, case.count - 1} - {0}:
        front = attend(case, queries[:cut], cache, table)
        back = attend(case, queries[cut:], cache, table, case.first + cut)
        np.testing.assert_array_equal(np.concatenate([front, back]).view(np.int32), together.view(np.int32))


# Heads whose features fill vectors of 8 and of 16, of 8 alone, and neither; as many rows as there are in a tile, fewer and more.
SHAPES = {
    f"heads of {size}, {group} to one": Case(280, 5, group=group, head_size=size)
    for size in (8, 13, 24, 40, 64, 72, 80, 100, 128)
    for group in range(1, 8)
}


@pytest.mark.parametrize("instruction_set", FUSED[1:], indirect=True)
@pytest.mark.parametrize("case", (CASES | SHAPES).values(), ids=(CASES | SHAPES).keys())
def test_a_query_is_the_same_bits_on_every_instruction_set_with_fused_multiplication(case: Case) -> None:
    queries, (cache, table) = case.queries(), case.cache()
    ours = attend(case, queries, cache, table)
    _kernels.use(FUSED[0])
    np.testing.assert_array_equal(ours.view(np.int32), attend(case, queries, cache, table).view(np.int32))


def test_what_is_infinite_or_not_a_number_reaches_only_those_who_see_it() -> None:
    case = Case(290, 40, group=2)
    queries, (cache, table) = case.queries(), case.cache()
    clean = attend(case, queries, cache, table)
    # The value of the token at 310, and the key of the one at 320: later queries see them, earlier ones do not.
    cache[table[310 // 16], LAYER, 1, 310 % 16, 0, 5] = np.inf
    cache[table[320 // 16], LAYER, 0, 320 % 16] = np.nan
    out = attend(case, queries, cache, table)
    np.testing.assert_array_equal(out[:20].view(np.int32), clean[:20].view(np.int32))
    assert np.isinf(out[20:30, :, 5]).all()
    np.testing.assert_array_equal(np.delete(out[20:30], 5, axis=2), np.delete(clean[20:30], 5, axis=2))
    assert np.isnan(out[30:]).all()


def test_a_query_that_is_not_a_number_spoils_no_other() -> None:
    case = Case(270, 20, group=4)
    queries, (cache, table) = case.queries(), case.cache()
    clean = attend(case, queries, cache, table)
    queries[7, 2, 3] = np.nan
    out = attend(case, queries, cache, table)
    spoilt = np.isnan(out).any(axis=2)
    assert np.argwhere(spoilt).tolist() == [[7, 2]] and np.isnan(out[7, 2]).all()
    np.testing.assert_array_equal(out[~spoilt], clean[~spoilt])


def test_a_segment_whose_scores_are_all_minus_infinity_weighs_nothing() -> None:
    case = Case(520, 1, group=1)
    queries, (cache, table) = np.abs(case.queries()), case.cache()
    cache[table[:16], LAYER, 0] = -np.inf  # positions 0 to 255
    with np.errstate(invalid="ignore"):
        wanted = expected(case, queries, cache, table)
    for split in (False, True):
        np.testing.assert_allclose(attend(case, queries, cache, table, split=split), wanted, atol=4e-6)


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    case = Case(600, 3)
    queries, (cache, table) = 200.0 * case.queries(), case.cache()
    wanted = expected(case, queries, cache, table)
    np.testing.assert_allclose(attend(case, queries, cache, table), wanted, atol=2e-3)


def test_a_call_that_would_read_outside_the_cache_is_refused() -> None:
    case = Case(30, 2, kv_heads=2)
    queries, (cache, table) = case.queries(), case.cache()
    with pytest.raises(ValueError, match="3 blocks are needed, the table names 2"):
        attend(case, queries, cache, table, first=31)
    with pytest.raises(ValueError, match="the table names block 9, the cache has 4"):
        attend(case, queries, cache, np.array([0, 9]))
    with pytest.raises(ValueError, match="3 query heads cannot share 2 kv heads evenly"):
        attend(case, queries[:, :3].copy(), cache, table)
    with pytest.raises(ValueError, match="only one query at a time"):
        attend(case, queries, cache, table, split=True)
