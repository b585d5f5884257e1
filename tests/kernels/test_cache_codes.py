"""Compares what the C++ kernels write into the cache with its definition in numpy: the same codes and scales in the
same places on every instruction set of this machine."""

from __future__ import annotations

import numpy as np
import pytest
from stored_cache import CodedCache, room

from cache_codes import (
    LARGEST_CODE,
    LONGEST_KEY,
    LOWEST_SCALE,
    NEVER_WRITTEN,
    NOT_A_NUMBER,
    STEP,
    Units,
    scale_of,
)
from weft.ops.base import AttentionShape
from weft.ops.cpu.recording_ops import CpuOps
from weft.ops.cpu.weights import Packing

_kernels = pytest.importorskip("weft._kernels")
pytestmark = pytest.mark.usefixtures("instruction_set")

BLOCKS, LAYERS, LAYER, KV_HEADS = 3, 2, 1, 2

BLOCK_SIZES = pytest.mark.parametrize("block_size", [1, 2, 7, 8, 16, 24, 32, 300])
HEAD_SIZES = pytest.mark.parametrize("head_size", [1, 2, 8, 13, 64, 72, 80, 128, 256])


def delicate_vectors(count: int, head_size: int) -> np.ndarray:
    """Ordinary vectors and difficult ones, [count, head size], in random order."""
    rng = np.random.default_rng([count, head_size])
    sizes = np.exp(5.0 * rng.standard_normal((count, 1)))
    vectors = (rng.standard_normal((count, head_size)) * sizes).astype(np.float32)
    largest = LARGEST_CODE
    some = rng.integers(-largest, largest + 1, head_size)
    feature = rng.integers(head_size)
    with np.errstate(over="ignore"):
        troubles = np.array(
            [
                np.zeros(head_size),
                np.full(head_size, -0.0),
                np.full(head_size, np.finfo(np.float32).max),
                -np.full(head_size, np.finfo(np.float32).max),
                3e38 * rng.standard_normal(head_size).clip(-1, 1),
                1e-45 * some,
                1e-38 * some,
                LOWEST_SCALE * some,
                LOWEST_SCALE * some / 2,
                LOWEST_SCALE * 2.0**12 * rng.standard_normal(head_size),
                some,
                some / 2,
                some * STEP,
                STEP * rng.integers(-2047, 2048, head_size),
                STEP * rng.integers(-2047, 2048, head_size) + STEP // 2,
                # scales that are exact in their upper half, or nearly so
                2.0**3 * largest * np.ones(head_size),
                np.nextafter(np.float32(largest), np.float32(0)) * np.ones(head_size),
                np.nextafter(np.float32(largest), np.float32(1e9)) * np.ones(head_size),
                np.where(np.arange(head_size) == feature, 1e5, 1e-3 * rng.standard_normal(head_size)),
                *(
                    np.where(np.arange(head_size) == feature, value, rng.standard_normal(head_size))
                    for value in (np.nan, -np.nan, np.inf, -np.inf)
                ),
                np.full(head_size, np.nan),
                np.full(head_size, -np.inf),
            ],
            np.float32,
        )
    chosen = troubles[rng.permutation(len(troubles))][: count - count // 4]
    vectors[: len(chosen)] = chosen
    return rng.permutation(vectors)


@BLOCK_SIZES
@HEAD_SIZES
def test_a_token_is_written_as_defined_and_its_neighbours_stay_unchanged(
    block_size: int, head_size: int
) -> None:
    rng = np.random.default_rng(block_size)
    cells = BLOCKS * block_size
    # More tokens than cells: some cells are written twice, some not at all.
    tokens = max(24, min(cells, 60))
    content = delicate_vectors(tokens * 2 * KV_HEADS, head_size).reshape(tokens, 2, KV_HEADS, head_size)
    cache = np.full(
        (BLOCKS, LAYERS, KV_HEADS, block_size, room(block_size, head_size)), NEVER_WRITTEN, np.uint16
    )
    expected = CodedCache(BLOCKS, LAYERS, block_size, KV_HEADS, head_size)
    for token, cell in zip(content, rng.integers(0, cells, tokens), strict=True):
        for head in range(KV_HEADS):
            _kernels.write_cache(token[0, head].copy(), token[1, head].copy(), cache, LAYER, head, int(cell))
        expected.write(np.array([cell // block_size]), LAYER, np.array([cell % block_size]), token[None])
    np.testing.assert_array_equal(cache, expected.laid_out())


@BLOCK_SIZES
@HEAD_SIZES
def test_a_cache_has_room_for_the_codes_and_the_scales(block_size: int, head_size: int) -> None:
    assert _kernels.cache_room(block_size, head_size) == room(block_size, head_size)
    shape = AttentionShape(heads=4, kv_heads=2, head_size=head_size, scale=1.0)
    cache = CpuOps(Packing(None)).new_cache(5, 3, block_size, shape)
    assert cache.dtype == np.uint16 and cache.shape == (5, 3, 2, block_size, room(block_size, head_size))


def written(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes [2, tokens, head size] and scales [2, tokens] of vectors [tokens, head size], written as keys and as
    values to blocks of one token. There, only the unused places of the missing neighbour lie between the codes of
    a value."""
    tokens, head_size = vectors.shape
    cache = np.zeros((tokens, 1, 1, 1, room(1, head_size)), np.uint16)
    for cell, vector in enumerate(vectors):
        _kernels.write_cache(vector, vector, cache, 0, 0, cell)
    flat = cache.reshape(tokens, -1)
    keys, values = (Units(head_size, of_values) for of_values in (False, True))
    codes = [
        keys.codes(flat[:, 2 : 2 + keys.number].copy()),
        values.codes(flat[:, -2 * values.number :: 2].copy()),
    ]
    return np.stack(codes), scale_of(flat[:, :2].T)


@HEAD_SIZES
def test_written_values_are_within_half_a_step_of_the_originals(head_size: int) -> None:
    vectors = delicate_vectors(200, head_size)
    finite = vectors[np.isfinite(vectors).all(axis=-1)]
    codes, scales = written(finite)
    error = np.abs(codes * scales[..., None].astype(np.float64) - finite)
    # Half a step, half a code and a margin: a value is multiplied by 1 / scale, and so rounded twice.
    assert (error.max(-1) <= (STEP / 2 + 0.505) * scales).all()
    by_largest = np.abs(finite.astype(np.float64)).max(-1) / LARGEST_CODE
    by_length = (finite.astype(np.float64) ** 2).mean(-1) ** 0.5 / LONGEST_KEY
    for which, wanted in enumerate((np.maximum(by_largest, by_length), by_largest)):
        # A scale is rounded up by 1/128 at most.
        most = np.maximum(wanted * (1 + 2.0**-7), float(LOWEST_SCALE)) * (1 + 1e-6)
        assert (scales[which] <= most).all()
    longest = LONGEST_KEY + STEP / 2 + 1
    assert (codes[0].astype(np.float64) ** 2).mean(-1).max() <= longest**2


@pytest.mark.parametrize("of_values", [False, True])
@HEAD_SIZES
def test_codes_that_share_elements_are_the_nearest_possible(head_size: int, of_values: bool) -> None:
    """Tests the definition itself: every element can be written, and no other code with these low bits is nearer."""
    units = Units(head_size, of_values)
    codes = np.random.default_rng(head_size).integers(-LARGEST_CODE, LARGEST_CODE + 1, (50, head_size))
    codes[:4] = np.array([LARGEST_CODE, -LARGEST_CODE, 0, -1])[:, None]
    shared = units.codes(units.elements(codes))
    assert np.abs(shared - codes).max() <= STEP // 2
    np.testing.assert_array_equal(units.elements(shared), units.elements(codes))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_vector_that_is_not_finite_becomes_nan_and_zeros_stay_zeros(value: float) -> None:
    key, zeros = np.ones(8, np.float32), np.zeros(8, np.float32)
    key[3] = value
    cache = np.full((1, 1, 1, 1, room(1, 8)), NEVER_WRITTEN, np.uint16)
    _kernels.write_cache(key, zeros, cache, 0, 0, 0)
    flat = cache.reshape(-1)
    assert flat[0] == NOT_A_NUMBER and np.isfinite(scale_of(flat[1:2])).all()
    assert (flat[2:8] == 0).all() and (flat[8:20:2] == 0).all() and (flat[9:20:2] == NEVER_WRITTEN).all()


def test_a_write_past_the_cache_is_rejected() -> None:
    vector, short = np.zeros(8, np.float32), np.zeros(7, np.float32)
    cache = np.zeros((2, 2, 3, 4, room(4, 8)), np.uint16)
    with pytest.raises(ValueError, match="the cache has 2 layers, none with the number 2"):
        _kernels.write_cache(vector, vector, cache, 2, 0, 0)
    for head, cell in ((3, 0), (0, 8)):
        with pytest.raises(ValueError, match="past the cache"):
            _kernels.write_cache(vector, vector, cache, 0, head, cell)
    with pytest.raises(ValueError, match="must have the same size"):
        _kernels.write_cache(vector, short, cache, 0, 0, 0)
    with pytest.raises(ValueError, match=rf"for heads of 4 .* block size, {room(4, 4)}\]"):
        _kernels.write_cache(vector[:4].copy(), vector[:4].copy(), cache, 0, 0, 0)
    assert not cache.any()
