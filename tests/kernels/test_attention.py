"""Compares attention of the C++ kernels with numpy, with the same codes and in float64 without codes, on every
instruction set of this machine."""

from __future__ import annotations

from dataclasses import dataclass

import attention_twin as twin
import numpy as np
import pytest
from stored_cache import CodedCache, room

from cache_codes import LARGEST_CODE, LONGEST_KEY, NEVER_WRITTEN, STEP, largest_query

_kernels = pytest.importorskip("weft._kernels")
pytestmark = pytest.mark.usefixtures("instruction_set")

LAYERS, LAYER = 2, 1

# The error of codes for values of about 1.
PLAIN_ATOL = 3e-3


# All instruction sets except portable have fused multiply-add, and compute sums in the same order.
FUSED = [name for name in _kernels.available() if name != "portable"]


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


class Request:
    """The cache content of a case, with blocks in random order. Content that no query sees is never written."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(2)
        blocks = -(-case.context // case.block_size)
        self.case = case
        self.table = rng.permutation(blocks + 2)[:blocks].astype(np.int64)
        content = rng.standard_normal((case.context, 2, case.kv_heads, case.head_size))
        self.content = content.astype(np.float32)
        self.update()

    def update(self) -> None:
        """Fills the cache from the content."""
        case = self.case
        self.cache = CodedCache(len(self.table) + 2, LAYERS, case.block_size, case.kv_heads, case.head_size)
        first = max(0, case.first - case.window + 1) if case.window else 0
        positions = np.arange(first, case.context)
        blocks = self.table[positions // case.block_size]
        self.cache.write(blocks, LAYER, positions % case.block_size, self.content[first:])

    def attend(self, queries: np.ndarray, first: int | None = None, split: bool = False) -> np.ndarray:
        case, out = self.case, np.full_like(queries, 7.0)
        scale = case.head_size**-0.5
        position = case.first if first is None else first
        cache = self.cache.laid_out()
        _kernels.attend(queries, cache, LAYER, self.table, position, case.window, scale, case.cap, out, split)
        return out

    def expected(self, queries: np.ndarray) -> np.ndarray:
        """The expected result with the codes of the kernels."""
        case = self.case
        heads = twin.contexts(self.cache, LAYER, self.table)

        def attend_one(query: np.ndarray, head: int, seen: slice) -> np.ndarray:
            return twin.attend(query, heads[head // case.group], seen, case.head_size**-0.5, case.cap)

        return twin.attend_all(queries, case.first, case.window, attend_one)

    def expected_plainly(self, queries: np.ndarray) -> np.ndarray:
        """The expected result without codes."""
        case = self.case

        def attend_one(query: np.ndarray, head: int, seen: slice) -> np.ndarray:
            vectors = self.content[seen, :, head // case.group]
            return twin.attend_plainly(query, vectors, case.head_size**-0.5, case.cap)

        return twin.attend_all(queries, case.first, case.window, attend_one)


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.int32)


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
    "blocks of two": Case(130, 3, block_size=2, kv_heads=2),
    "blocks of seven": Case(270, 9, block_size=7, kv_heads=2),
    "blocks of seven and heads of an odd size": Case(270, 9, block_size=7, head_size=13, kv_heads=2),
    "blocks of eight": Case(300, 9, block_size=8),
    "blocks of 24": Case(270, 40, block_size=24),
    "blocks of 32": Case(270, 40, block_size=32, window=100),
    "blocks larger than a segment": Case(700, 3, block_size=300),
    "heads of one": Case(270, 5, head_size=1, group=2),
    "heads of 8": Case(70, 5, head_size=8),
    "heads of 80": Case(260, 20, head_size=80, group=7),
    "heads of 72": Case(60, 20, head_size=72, group=2),
    "heads of 256": Case(40, 20, head_size=256, group=4),
    "heads of an odd size": Case(300, 20, head_size=13, group=5),
    "sixteen heads to one": Case(300, 4, group=16, head_size=128),
    "sixty heads to one": Case(260, 2, group=60, head_size=16),
}
ALL = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@ALL
def test_attention_is_the_weighted_mean_of_the_visible_values(case: Case) -> None:
    queries, request = case.queries(), Request(case)
    twin.assert_alike(request.attend(queries), request.expected(queries))


@ALL
def test_codes_are_nearly_as_precise_as_f16_and_more_so_than_bf16(case: Case) -> None:
    queries, request = case.queries(), Request(case)
    out, plain = request.attend(queries), request.expected_plainly(queries)
    np.testing.assert_allclose(out, plain, rtol=0, atol=PLAIN_ATOL)

    def error_of(content: np.ndarray) -> float:
        request.content = content
        return float(((request.expected_plainly(queries) - plain) ** 2).mean() ** 0.5)

    exact = request.content
    halves, upper_halves = exact.astype(np.float16), exact.view(np.uint32) + 0x8000 & 0xFFFF0000
    error = ((out - plain) ** 2).mean() ** 0.5
    assert error < error_of(upper_halves.view(np.float32)) / 2
    if case.head_size > 1:  # a single feature is the longest possible key
        assert error < 3.5 * error_of(halves)


@ALL
def test_a_query_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(case: Case) -> None:
    queries, request = case.queries(), Request(case)
    together = request.attend(queries)
    for query in range(case.count):
        alone, split = (
            request.attend(queries[query : query + 1], case.first + query, split) for split in (False, True)
        )
        np.testing.assert_array_equal(bits(alone[0]), bits(together[query]))
        np.testing.assert_array_equal(bits(split[0]), bits(together[query]))
    for cut in {case.count // 3, case.count // 2, case.count - 1} - {0}:
        front, back = request.attend(queries[:cut]), request.attend(queries[cut:], case.first + cut)
        np.testing.assert_array_equal(bits(np.concatenate([front, back])), bits(together))


# Head sizes that fill vectors of 8 and of 16, of 8 alone, and neither; with fewer rows than a tile, as many, and
# more.
SHAPES = {
    f"heads of {size}, {group} to one": Case(280, 5, group=group, head_size=size)
    for size in (1, 8, 13, 24, 40, 64, 72, 80, 100, 128)
    for group in range(1, 8)
}


@pytest.mark.parametrize("instruction_set", FUSED[1:], indirect=True)
@pytest.mark.parametrize("case", (CASES | SHAPES).values(), ids=(CASES | SHAPES).keys())
def test_a_query_has_the_same_bits_on_every_instruction_set_with_fused_multiply_add(case: Case) -> None:
    queries, request = case.queries(), Request(case)
    ours = request.attend(queries)
    _kernels.use(FUSED[0])
    np.testing.assert_array_equal(bits(ours), bits(request.attend(queries)))


@ALL
def test_positions_that_no_query_sees_do_not_matter(case: Case) -> None:
    queries, request = case.queries(), Request(case)
    expected = request.attend(queries)
    rng = np.random.default_rng(3)
    cache = request.cache
    never = cache.scales == NEVER_WRITTEN
    cache.scales[never] = rng.integers(0, 1 << 16, never.sum())
    for which, elements in enumerate(cache.elements):
        unseen = never[:, :, which]
        elements[unseen] = rng.integers(0, 1 << 16, (unseen.sum(), elements.shape[-1]))
    np.testing.assert_array_equal(bits(request.attend(queries)), bits(expected))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", [0, 1], ids=["key", "value"])
def test_an_infinite_or_nan_vector_affects_only_the_queries_that_see_it(which: int, value: float) -> None:
    case = Case(290, 40, kv_heads=2, group=2)
    queries, request = case.queries(), Request(case)
    clean = request.attend(queries)
    request.content[310, which, 1, 5] = value
    request.update()
    out = request.attend(queries)
    # Earlier queries and queries of the other KV head do not see it. The whole vector counts as NaN.
    assert np.isnan(out[20:, 2:]).all()
    np.testing.assert_array_equal(bits(out[:20]), bits(clean[:20]))
    np.testing.assert_array_equal(bits(out[:, :2]), bits(clean[:, :2]))


@pytest.mark.parametrize("which", [0, 1], ids=["key", "value"])
def test_a_nan_vector_has_no_effect_after_the_window_has_passed_it(which: int) -> None:
    case = Case(300, 40, group=2, window=150)
    queries, request = case.queries(), Request(case)
    clean = request.attend(queries)
    request.content[170, which] = np.nan  # the last query that sees it is at position 319
    request.update()
    out = request.attend(queries)
    assert np.isnan(out[:20]).all()
    np.testing.assert_array_equal(bits(out[20:]), bits(clean[20:]))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_nan_query_affects_no_other_query(value: float) -> None:
    case = Case(270, 20, group=4)
    queries, request = case.queries(), Request(case)
    clean = request.attend(queries)
    queries[7, 2, 3] = value
    out = request.attend(queries)
    is_nan = np.isnan(out).any(axis=2)
    assert np.argwhere(is_nan).tolist() == [[7, 2]] and np.isnan(out[7, 2]).all()
    np.testing.assert_array_equal(bits(out[~is_nan]), bits(clean[~is_nan]))


def test_a_segment_with_only_minus_infinity_scores_has_no_weight() -> None:
    case = Case(520, 1, group=1)
    queries, request = np.abs(case.queries()), Request(case)
    request.content[:256, 0] = -3e38
    request.update()
    wanted = request.expected(queries)
    np.testing.assert_allclose(wanted, request.expected_plainly(queries), atol=PLAIN_ATOL)
    for split in (False, True):
        twin.assert_alike(request.attend(queries, split=split), wanted)


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    case = Case(600, 3)
    queries, request = 200.0 * case.queries(), Request(case)
    twin.assert_alike(request.attend(queries), request.expected(queries))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("head_size", [1, 2, 8, 13, 64, 72, 80, 128, 256])
def test_sums_of_the_largest_codes_do_not_overflow(head_size: int, sign: int) -> None:
    case = Case(300, 1, head_size=head_size)
    # Slightly below the largest code: the scale is a power of two, and the last code is used.
    largest = np.float32(LARGEST_CODE * (1 - 1e-6))
    request = Request(case)
    queries = np.full(
        (1, case.group, head_size), largest_query(head_size) * (1 - 1e-6) * 2.0**-10, np.float32
    )
    request.content[:, 0] = -sign * LONGEST_KEY * (1 - 1e-6) * 2.0**-10
    request.content[:, 1] = sign * largest * 2.0**-15
    request.update()
    keys, values = np.abs(np.moveaxis(request.cache.codes[request.table, LAYER].astype(np.int64), 1, 0))
    assert keys.max() >= LONGEST_KEY and values.max() >= LARGEST_CODE
    np.testing.assert_allclose(request.attend(queries), request.expected(queries), rtol=1e-6)
    np.testing.assert_allclose(request.attend(queries), sign * LARGEST_CODE / 2**15, atol=STEP * 2.0**-15)
    # The token that differs from the others only by the sign of its key gets all of the weight, or none.
    request.content[7] *= -1
    request.update()
    np.testing.assert_allclose(request.attend(queries), request.expected(queries), rtol=1e-6)


@pytest.mark.parametrize("head_size", [2, 8, 13, 64, 80, 128, 256])
def test_sums_of_the_longest_keys_do_not_overflow(head_size: int) -> None:
    """The keys point in the direction of the query, or in the opposite direction."""
    case = Case(300, 1, group=1, head_size=head_size)
    request, query = Request(case), case.queries()
    for stands_out in (1.0, 30.0):
        query[0, 0, 0] = stands_out
        request.content[:, 0] = query[0, 0]
        request.content[7, 0] *= -1
        request.update()
        twin.assert_alike(request.attend(query), request.expected(query))


@pytest.mark.parametrize("head_size", [64, 128])
def test_large_features_do_not_reduce_the_precision_of_the_others(head_size: int) -> None:
    """As biases of some models cause them: here 200 in a key and 20 in a query; f16 loses as much in those features
    themselves."""
    case = Case(250, 20, group=2, head_size=head_size)
    queries, request = case.queries(), Request(case)
    queries[..., :3] += 20.0
    request.content[:, 0, :, :3] += 200.0 * np.array([1.0, -1.0, 1.0])
    request.update()
    plain = request.expected_plainly(queries)
    error = request.attend(queries) - plain
    request.content = request.content.astype(np.float16)
    error_of_halves = request.expected_plainly(queries) - plain
    assert (error**2).mean() ** 0.5 < 1.2 * (error_of_halves**2).mean() ** 0.5


@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-35, 1e-10])
def test_a_tiny_query_gives_the_mean_of_the_values(size: float) -> None:
    case = Case(300, 3)
    queries, request = (size * case.queries()).astype(np.float32), Request(case)
    wanted = [request.content[: 301 + query, 1].mean(axis=0) for query in range(3)]
    np.testing.assert_allclose(request.attend(queries), np.broadcast_to(wanted, queries.shape), atol=5e-4)


@pytest.mark.parametrize("context", [1, 3, 17, 100, 200, 243, 250, 256, 300])
def test_equal_weights_are_exact(context: int) -> None:
    case = Case(context - 1, 1)
    request = Request(case)
    request.content[:, 1] = request.content[0, 1]
    request.update()
    wanted = request.cache.values[request.table[0], LAYER, 1, 0, 0]
    out = request.attend(np.zeros_like(case.queries()))
    np.testing.assert_allclose(out[0], np.broadcast_to(wanted, out[0].shape), rtol=1e-6)


@pytest.mark.parametrize("size", [1e-10, 1e6, 1e30])
def test_values_may_have_any_magnitude(size: float) -> None:
    case = Case(300, 5)
    queries, request = case.queries(), Request(case)
    request.content[:, 1] *= size
    request.update()
    out = request.attend(queries)
    twin.assert_alike(out, request.expected(queries), size)
    np.testing.assert_allclose(out, request.expected_plainly(queries), rtol=0, atol=PLAIN_ATOL * size)


def test_small_values_keep_the_precision_of_the_whole_result() -> None:
    case = Case(700, 5)
    queries, request = case.queries(), Request(case)
    sizes = 10.0 ** np.random.default_rng(4).uniform(-4, 0, case.context)
    request.content[:, 1] *= sizes[:, None, None]
    request.update()
    out = request.attend(queries)
    twin.assert_alike(out, request.expected(queries))
    np.testing.assert_allclose(out, request.expected_plainly(queries), atol=PLAIN_ATOL)


def test_a_call_that_would_read_outside_the_cache_is_rejected() -> None:
    case = Case(30, 2, kv_heads=2)
    queries, request = case.queries(), Request(case)
    with pytest.raises(ValueError, match="3 blocks are needed, the table names 2"):
        request.attend(queries, first=31)
    with pytest.raises(ValueError, match="3 query heads cannot share 2 kv heads evenly"):
        request.attend(queries[:, :3].copy())
    with pytest.raises(ValueError, match="only one query at a time"):
        request.attend(queries, split=True)
    with pytest.raises(ValueError, match=rf"block size, {room(16, 56)}\]"):
        request.attend(queries[:, :, :56].copy())
    request.table = np.array([0, 9])
    with pytest.raises(ValueError, match="the table names block 9, the cache has 4"):
        request.attend(queries)
