"""How the C++ kernels lay out a block of the cache and one of the store, in numpy: from and to [..., positions, kv heads, features]."""

from __future__ import annotations

import numpy as np

from cache_codes import ENCODERS, NEVER_WRITTEN, decode, even


def room(block_size: int, head_size: int) -> int:
    """What a position takes, of one kv head."""
    return 2 + even(head_size) + -(-even(block_size) * head_size // block_size)


class CodedCache:
    """Some blocks of a cache, as codes [blocks, layers, 2, block size, kv heads, head size] and scales of all but the last."""

    def __init__(self, blocks: int, layers: int, block_size: int, kv_heads: int, head_size: int) -> None:
        self.codes = np.full((blocks, layers, 2, block_size, kv_heads, head_size), -1, np.int16)
        self.scales = np.full(self.codes.shape[:-1], NEVER_WRITTEN, np.uint16)

    def write(self, blocks: np.ndarray, layer: int, positions: np.ndarray, content: np.ndarray) -> None:
        """Vectors [tokens, 2, kv heads, head size] to a place in a block for each token."""
        for which, encode in enumerate(ENCODERS):
            place = (blocks, layer, which, positions)
            self.codes[place], self.scales[place] = encode(content[:, which])

    def forget(self, blocks: np.ndarray) -> None:
        self.codes[blocks], self.scales[blocks] = -1, NEVER_WRITTEN

    @property
    def values(self) -> np.ndarray:
        return decode(self.codes, self.scales)

    def laid_out(self) -> np.ndarray:
        """As the kernels read it, uint16 [blocks, layers, kv heads, block size, room]: heads apart, and of each the scales, pairs
        of features of the keys of 16 positions at a time (or what is left), and the values of pairs of positions."""
        codes = np.moveaxis(self.codes.view(np.uint16), 4, 2)
        scales = np.moveaxis(self.scales, 4, 2)
        *heads, _, block_size, head_size = codes.shape
        keys, values = codes[..., 0, :, :], codes[..., 1, :, :]
        if head_size % 2:
            beside = np.where(scales[..., 0, :, None] == NEVER_WRITTEN, NEVER_WRITTEN, 0).astype(np.uint16)
            keys = np.concatenate([keys, beside], axis=-1)
        tiles = [keys[..., start : start + 16, :] for start in range(0, block_size, 16)]
        pairs = [tile.reshape(*tile.shape[:-1], -1, 2).swapaxes(-3, -2) for tile in tiles]
        if block_size % 2:
            beside = np.full_like(values[..., :1, :], NEVER_WRITTEN)
            values = np.concatenate([values, beside], axis=-2)
        values = values.reshape(*heads, -1, 2, head_size).swapaxes(-1, -2)
        parts = [part.reshape(*heads, -1) for part in (scales, *pairs, values)]
        there = sum(part.shape[-1] for part in parts)
        unused = np.full((*heads, block_size * room(block_size, head_size) - there), NEVER_WRITTEN, np.uint16)
        return np.concatenate([*parts, unused], axis=-1).reshape(*heads, block_size, -1)


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
