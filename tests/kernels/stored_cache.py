"""How the C++ kernels lay out a block of the cache and one of the store, in numpy: from and to [..., positions, kv heads, features]."""

from __future__ import annotations

import numpy as np


def laid_out(cache: np.ndarray) -> np.ndarray:
    """As the kernels read it: heads apart, and the keys of 16 positions at a time (or what is left) feature by feature."""
    placed = np.moveaxis(cache, 4, 2).copy("C")
    *heads, block_size, _ = placed[:, :, :, 0].shape
    keys = placed[:, :, :, 0].copy()
    tiles = [keys[..., start : start + 16, :].swapaxes(-1, -2) for start in range(0, block_size, 16)]
    placed[:, :, :, 0] = np.concatenate([tile.reshape(*heads, -1) for tile in tiles], -1).reshape(keys.shape)
    return placed


def new_store(
    blocks: int, layers: int, kv_heads: int, block_size: int, head_size: int, bits: int
) -> np.ndarray:
    return np.zeros((blocks, layers, kv_heads, block_size * (head_size * bits // 4 + 4)), np.uint8)


def read_store(store: np.ndarray, block_size: int, head_size: int, bits: int) -> np.ndarray:
    """The same as `weft.ops.store_format` has it: [blocks, layers, 2, block size, kv heads, vector]."""
    *places, _ = store.shape
    small = store[..., : 4 * block_size].reshape(*places, 2, 2, block_size)
    codes = store[..., 4 * block_size :].reshape(*places, 2, -1)
    size = head_size * bits // 8
    tiles, start = [], 0
    for width in (min(16, block_size - first) for first in range(0, block_size, 16)):
        tile = codes[..., 0, start : start + width * size].reshape(*places, size, width)
        tiles.append(tile.swapaxes(-1, -2))
        start += width * size
    keys = np.concatenate(tiles, axis=-2)
    values = codes[..., 1, :].reshape(*places, block_size, size)
    if bits == 8:
        keys, values = keys ^ 0x80, values ^ 0x80
    else:  # a value's features are half a head apart in a byte, here they are neighbours
        unpacked = np.concatenate([values & 15, values >> 4], axis=-1)
        values = unpacked[..., 0::2] | unpacked[..., 1::2] << 4
    vectors = np.stack([keys, values], axis=-3)
    ends = np.stack([small[..., 0, :], small[..., 1, :] ^ 0x80], axis=-1)
    return np.moveaxis(np.concatenate([vectors, ends], axis=-1), 2, 4)
