"""Blocks that are quantised on the device are what numpy makes of them, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from store_twin import kept, put_away, quantised, restored, scale_value

from weft.errors import InvalidRequestError
from weft.ops.base import AttentionShape
from weft.ops.triton.device import Device
from weft.ops.triton.store import Store, StoreFormat

LAYERS, BLOCKS = 2, 5


def store_of(device: Device, bits: int, head_size: int, block_size: int, kv_heads: int = 2) -> Store:
    shape = AttentionShape(kv_heads, kv_heads, head_size, 1.0)
    return Store(4, LAYERS, block_size, shape, StoreFormat(bits, 2), device)


def cache_of(vectors: np.ndarray, device: Device, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(vectors).to(dtype).to(device.torch_device)


def random_vectors(head_size: int, block_size: int, kv_heads: int = 2) -> np.ndarray:
    """Of every size, with and without a bias: float32, as full blocks lie."""
    chance = np.random.default_rng(7)
    shape = (BLOCKS, LAYERS, 2, kv_heads, block_size)
    sizes = 10.0 ** chance.uniform(-6, 4, (*shape, 1))
    bias = chance.choice([0.0, 0.0, 3.0, -20.0], (*shape, 1))
    return (sizes * (chance.standard_normal((*shape, head_size)) + bias)).astype(np.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("head_size", "block_size"), [(64, 16), (128, 32), (80, 8), (16, 16), (6, 4)])
def test_a_moved_block_holds_the_codes_of_its_vectors(
    device: Device, dtype: torch.dtype, bits: int, head_size: int, block_size: int
) -> None:
    store = store_of(device, bits, head_size, block_size)
    cache = cache_of(random_vectors(head_size, block_size), device, dtype)
    put_away(store, cache, [(3, 0), (1, 2)])
    vectors = cache.float().cpu().numpy().transpose(0, 1, 3, 2, 4, 5)
    expected = quantised(vectors[[3, 1]], bits)
    for ours, theirs in zip(kept(store, block_size, head_size), expected, strict=True):
        np.testing.assert_array_equal(ours[[0, 2]], theirs)
        assert not ours[[1, 3]].any() or (ours[[1, 3]] == 128).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_a_vector_that_is_no_number_is_none_as_a_whole_and_no_other(device: Device, bits: int) -> None:
    vectors = random_vectors(16, 4)
    vectors[0, 0, 0, 1, 2, 3] = np.nan
    vectors[0, 1, 1, 0, 3, 15] = -np.inf
    vectors[0, 0, 1, 1, 0, 0] = np.inf
    store = store_of(device, bits, 16, 4)
    put_away(store, cache_of(vectors, device, torch.float32), [(0, 1)])
    _, scales, _ = kept(store, 4, 16)
    is_none = np.isnan(scale_value(scales[1]))
    np.testing.assert_array_equal(is_none, ~np.isfinite(vectors[0].swapaxes(1, 2)).all(-1))
    assert is_none.sum() == 3


@pytest.mark.parametrize("bits", [8, 4])
def test_what_no_scale_is_small_or_large_enough_for_is_cut_off_as_in_numpy(device: Device, bits: int) -> None:
    vectors = np.zeros((BLOCKS, LAYERS, 2, 2, 4, 16), np.float32)
    vectors[0, 0, 0, 0, 0, :2] = [1e30, -1e30]
    vectors[0, 0, 0, 0, 1, :2] = [1e30, 5e6]
    vectors[0, 0, 0, 0, 2, :2] = [1e-30, -1e-30]
    store = store_of(device, bits, 16, 4)
    put_away(store, cache_of(vectors, device, torch.float32), [(0, 0)])
    for ours, theirs in zip(
        kept(store, 4, 16), quantised(vectors[0].transpose(0, 2, 1, 3, 4), bits), strict=True
    ):
        np.testing.assert_array_equal(ours[0], theirs)
    assert not restored(vectors[0, 0, 0, 0, 2:], bits).any()


def test_one_layer_is_moved_alone(device: Device) -> None:
    store = store_of(device, 8, 16, 4)
    put_away(store, cache_of(random_vectors(16, 4), device, torch.float32), [(2, 1)], layer=1)
    moved = store.codes.cpu().numpy().any(-1).any(-1)
    np.testing.assert_array_equal(np.argwhere(moved), [[1, 1]])


def test_a_block_takes_the_bytes_that_are_counted_for_it(device: Device) -> None:
    for bits in (8, 4):
        store = store_of(device, bits, 64, 16)
        assert store.bytes_per_block == LAYERS * 2 * 2 * 16 * (64 * bits // 8 + 2)


def test_odd_heads_and_odd_blocks_are_refused_with_what_would_do(device: Device) -> None:
    with pytest.raises(InvalidRequestError, match="even"):
        store_of(device, 4, 15, 16)
    with pytest.raises(InvalidRequestError, match="blocks of an even number"):
        store_of(device, 4, 6, 3)
