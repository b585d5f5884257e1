"""Compares the move of a KV block to the store in C++ with numpy: the same codes on every instruction set of this
machine."""

from __future__ import annotations

import numpy as np
import pytest
from stored_cache import CodedCache, new_store, read_store

from cache_codes import NEVER_WRITTEN, STEP
from weft.ops.store_format import NOT_A_NUMBER, dequantise, dequantise_keys, quantise, quantise_keys, rotate

_kernels = pytest.importorskip("weft._kernels")
pytestmark = pytest.mark.usefixtures("instruction_set")


def delicate_vectors(count: int, head_size: int) -> np.ndarray:
    """Ordinary vectors and difficult ones, float32 [count, head size]."""
    rng = np.random.default_rng(head_size)
    vectors = rng.standard_normal((count, head_size)) * np.exp(3.0 * rng.standard_normal((count, 1)))
    vectors[0] = 0.0
    vectors[1] = np.abs(vectors[1])
    vectors[2] = -np.abs(vectors[2])
    vectors[3] = 65504.0 * np.sign(vectors[3])
    vectors[4, 5] = np.nan
    vectors[5, 1] = np.inf
    vectors[6, 7] = -np.inf
    vectors[7] = 6e-8  # far below the smallest scale
    vectors[8] = 3.0
    vectors[9, 0] = -0.0
    vectors[10] *= 1e7 / np.abs(vectors[10]).max()  # past the last code of the largest scale
    vectors[11] *= 3.4e38 / np.abs(vectors[11]).max()
    return vectors.astype(np.float32)


def delicate_block(block_size: int, head_size: int) -> CodedCache:
    """A KV block with two KV heads, in a cache of three blocks and two layers."""
    rng = np.random.default_rng([block_size, head_size])
    cache = CodedCache(3, 2, block_size, 2, head_size)
    vectors = delicate_vectors(4 * block_size, head_size)
    content = rng.permutation(vectors).reshape(block_size, 2, 2, head_size)
    cache.write(np.ones(block_size, np.int64), 1, np.arange(block_size), content)
    # A quarter of the vectors are exact codes or half codes of the store, or were never written.
    for which in range(2):
        places = rng.permutation(2 * block_size)[: block_size // 2]
        for place, (low, high, scale) in zip(places, rng.permutation(EXACT), strict=False):
            at = divmod(int(place), 2)
            codes = STEP * rng.integers(low, high + 1, head_size)
            codes[:2] = STEP * low, STEP * high
            # With a fourth code of 0, the other codes of a unit are whole steps.
            codes[
                np.arange(head_size) % 8 >= 6 if which == 0 else np.arange(head_size) // (head_size // 4) == 3
            ] = 0
            elements = cache.units[which].elements(codes)
            assert (cache.units[which].codes(elements) == codes).all()
            cache.elements[which][1, 1][at] = NEVER_WRITTEN if scale == NEVER_WRITTEN else elements
            cache.scales[1, 1, which][at] = scale
    return cache


# First and last code in whole steps, and the bits of the scale: with it a step is 1 or 1/2; or the vector was never
# written.
EXACT = (
    (0, 255, 0x3D80),
    (0, 510, 0x3D00),
    (-255, 0, 0x3D80),
    (-15, 15, 0x3D00),
    (-4, 11, 0x3D80),
    (0, 0, NEVER_WRITTEN),
)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("block_size", [4, 7, 8, 16, 24, 32])
@pytest.mark.parametrize("head_size", [8, 64, 72, 80, 96, 128, 256])
def test_a_moved_block_has_the_codes_of_the_definition(bits: int, block_size: int, head_size: int) -> None:
    cache = delicate_block(block_size, head_size)
    store = new_store(4, 2, 2, block_size, head_size, bits)
    store[:] = 99
    _kernels.move_block(cache.laid_out(), 1, 1, store, 2, head_size, bits)
    with np.errstate(over="ignore"):
        keys, values = cache.values[1, 1]
        expected = np.stack([quantise_keys(keys, bits), quantise(values, bits)])
    np.testing.assert_array_equal(read_store(store, block_size, head_size, bits)[2, 1], expected)
    store[2, 1] = 99
    assert (store == 99).all(), "memory outside the block was written"


@pytest.mark.parametrize("bits", [8, 4])
def test_stored_values_are_within_one_code_of_the_originals(bits: int) -> None:
    vectors = delicate_vectors(64, 64).astype(np.float64)
    finite = vectors[np.abs(vectors).max(axis=-1) <= 65504]
    stored = quantise(finite, bits)
    span = np.maximum(finite.max(-1), 0) - np.minimum(finite.min(-1), 0)
    # A scale is rounded up by 1/8 at most, a value and the zero by half a code each; the smallest scale is 2^-18.
    code = np.maximum(span / (2**bits - 1) * 1.125, 2.0**-18)
    assert (np.abs(dequantise(stored, bits, np.float64) - finite).max(-1) <= code * 1.001).all()


@pytest.mark.parametrize("size", [7, 8, 64, 80, 96])
def test_rotation_preserves_dot_products_and_is_its_own_inverse(size: int) -> None:
    vectors, others = np.random.default_rng(0).standard_normal((2, 5, size))
    np.testing.assert_allclose(
        (rotate(vectors) * rotate(others)).sum(-1), (vectors * others).sum(-1), atol=1e-5
    )
    np.testing.assert_allclose(rotate(rotate(vectors)), vectors, atol=1e-6)


def test_one_large_feature_of_a_4_bit_key_does_not_reduce_the_precision_of_the_others() -> None:
    keys = np.random.default_rng(0).standard_normal((100, 64))
    keys[:, 5] = 100.0
    stored = dequantise_keys(quantise_keys(keys, 4), 4, np.float64)
    plain = dequantise(quantise(keys, 4), 4, np.float64)
    error, plain_error = (np.delete(values - keys, 5, axis=1).std() for values in (stored, plain))
    assert error < plain_error / 1.3


@pytest.mark.parametrize("bits", [8, 4])
def test_a_vector_that_is_not_finite_becomes_nan_and_zeros_stay_zeros(bits: int) -> None:
    vectors = np.ones((4, 8), np.float16)
    vectors[0, 3], vectors[1, 0], vectors[2] = np.nan, -np.inf, 0.0
    stored = quantise(vectors, bits)
    values = dequantise(stored, bits, np.float32)
    assert np.isnan(values[:2]).all() and (stored[:2, -2] == NOT_A_NUMBER).all()
    assert (values[2] == 0).all() and np.isfinite(values[3]).all()


def test_a_move_past_the_cache_or_the_store_is_rejected() -> None:
    cache = CodedCache(2, 1, 8, 1, 9).laid_out()
    store = new_store(2, 1, 1, 8, 9, 8)
    with pytest.raises(ValueError, match="past the cache"):
        _kernels.move_block(cache, 0, 2, store, 0, 9, 8)
    with pytest.raises(ValueError, match="past the store"):
        _kernels.move_block(cache, 0, 1, store, 2, 9, 8)
    with pytest.raises(ValueError, match="heads of an even size"):
        _kernels.move_block(cache, 0, 0, store, 0, 9, 4)
    with pytest.raises(ValueError, match=r"the store must be \[blocks, layers, kv heads, 176\]"):
        _kernels.move_block(cache, 0, 0, np.zeros((2, 1, 1, 175), np.uint8), 0, 9, 8)
    with pytest.raises(ValueError, match="block size, 14\\]"):
        _kernels.move_block(cache, 0, 0, store, 0, 8, 8)
