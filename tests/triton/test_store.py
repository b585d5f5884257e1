"""Blocks quantised on the device have the same bits as in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from store_twin import laid_out, put_away, quantised, stored_vectors

from weft.errors import InvalidRequestError
from weft.ops.base import AttentionShape, TwoTierCache
from weft.ops.triton.device import Device
from weft.ops.triton.store import new_store

LAYERS, BLOCKS, STORE_BLOCKS = 2, 5, 4


def random_vectors(head_size: int, block_size: int) -> np.ndarray:
    """Vectors of many magnitudes, with and without a bias, in the layout of full blocks."""
    chance = np.random.default_rng(7)
    shape = (BLOCKS, LAYERS, 2, 2, block_size)
    sizes = 10.0 ** chance.uniform(-6, 4, (*shape, 1))
    bias = chance.choice([0.0, 0.0, 3.0, -20.0], (*shape, 1))
    return (sizes * (chance.standard_normal((*shape, head_size)) + bias)).astype(np.float32)


def cache_of(
    vectors: np.ndarray, bits: int, device: Device, dtype: torch.dtype = torch.float32
) -> TwoTierCache:
    _, layers, _, kv_heads, block_size, head_size = vectors.shape
    full = torch.from_numpy(vectors).to(dtype).to(device.torch_device)
    shape = AttentionShape(kv_heads, kv_heads, head_size, 1.0)
    return TwoTierCache(full, new_store(STORE_BLOCKS, layers, block_size, shape, bits, device), bits, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("head_size", "block_size"), [(64, 16), (128, 32), (80, 8), (16, 16), (6, 4)])
def test_a_moved_block_holds_the_codes_of_its_vectors_and_no_other_block_changes(
    device: Device, dtype: torch.dtype, bits: int, head_size: int, block_size: int
) -> None:
    cache = cache_of(random_vectors(head_size, block_size), bits, device, dtype)
    put_away(cache, [(3, 0), (1, 2)], device)
    expected = quantised(cache.full.float().cpu().numpy()[[3, 1]], bits)
    np.testing.assert_array_equal(stored_vectors(cache)[[0, 2]], expected)
    np.testing.assert_array_equal(cache.store[[0, 2]].cpu().numpy(), laid_out(expected, bits))
    assert not cache.store[[1, 3]].any()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_vector_with_nan_becomes_all_nan_and_no_other_changes(device: Device, bits: int) -> None:
    vectors = random_vectors(16, 4)
    vectors[0, 0, 0, 1, 2, 3] = np.nan
    vectors[0, 1, 1, 0, 3, 15] = -np.inf
    vectors[0, 0, 1, 1, 0, 0] = np.inf
    cache = cache_of(vectors, bits, device)
    put_away(cache, [(0, 1)], device)
    np.testing.assert_array_equal(stored_vectors(cache)[1], quantised(vectors[0], bits))
    assert (stored_vectors(cache)[1, ..., -2] == 255).sum() == 3


@pytest.mark.parametrize("bits", [8, 4])
def test_values_outside_the_range_of_scales_are_clipped_as_in_numpy(device: Device, bits: int) -> None:
    vectors = np.zeros((1, 1, 2, 1, 4, 16), np.float32)
    vectors[0, 0, 0, 0, 0, :2] = [1e30, -1e30]
    vectors[0, 0, 0, 0, 1, :2] = [1e30, 5e6]
    vectors[0, 0, 0, 0, 2, :2] = [1e-30, -1e-30]
    cache = cache_of(vectors, bits, device)
    put_away(cache, [(0, 0)], device)
    np.testing.assert_array_equal(stored_vectors(cache)[0], quantised(vectors[0], bits))


def test_one_layer_is_moved_alone(device: Device) -> None:
    cache = cache_of(random_vectors(16, 4), 8, device)
    put_away(cache, [(2, 1)], device, layer=1)
    moved = cache.store.cpu().numpy().any(-1).any(-1)
    np.testing.assert_array_equal(np.argwhere(moved), [[1, 1]])


def test_head_and_block_sizes_that_do_not_pack_are_rejected_with_a_remedy(device: Device) -> None:
    with pytest.raises(InvalidRequestError, match="use 8 bits"):
        new_store(1, 1, 16, AttentionShape(1, 1, 15, 1.0), 4, device)
    with pytest.raises(InvalidRequestError, match="set block_size to an even number"):
        new_store(1, 1, 3, AttentionShape(1, 1, 6, 1.0), 4, device)
