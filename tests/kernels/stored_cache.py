"""The layout of a KV block and of a store block in the C++ kernels, in numpy: from and to [..., positions, kv heads,
features]."""

from __future__ import annotations

import numpy as np

from cache_codes import ENCODERS, NEVER_WRITTEN, Units, decode, even


def room(block_size: int, head_size: int) -> int:
    """16-bit elements per position of one KV head."""
    keys, values = (Units(head_size, of_values).number for of_values in (False, True))
    return 2 + keys + -(-even(block_size) * values // block_size)


class CodedCache:
    """Some KV blocks: elements of keys and of values [blocks, layers, block size, kv heads, number], and scales
    [blocks, layers, 2, block size, kv heads]."""

    def __init__(self, blocks: int, layers: int, block_size: int, kv_heads: int, head_size: int) -> None:
        self.units = [Units(head_size, of_values) for of_values in (False, True)]
        places = (blocks, layers, block_size, kv_heads)
        self.elements = [np.full((*places, units.number), NEVER_WRITTEN, np.uint16) for units in self.units]
        self.scales = np.full((blocks, layers, 2, block_size, kv_heads), NEVER_WRITTEN, np.uint16)

    def write(self, blocks: np.ndarray, layer: int, positions: np.ndarray, content: np.ndarray) -> None:
        """Writes vectors [tokens, 2, kv heads, head size], each token to a position of a block."""
        for which, units in enumerate(self.units):
            codes, scales = ENCODERS[which](content[:, which])
            self.elements[which][blocks, layer, positions] = units.elements(codes)
            self.scales[blocks, layer, which, positions] = scales

    def forget(self, blocks: np.ndarray) -> None:
        for which in range(2):
            self.elements[which][blocks] = NEVER_WRITTEN
        self.scales[blocks] = NEVER_WRITTEN

    @property
    def codes(self) -> np.ndarray:
        """int16 [blocks, layers, 2, block size, kv heads, head size]."""
        each = zip(self.units, self.elements, strict=True)
        return np.stack([units.codes(elements) for units, elements in each], axis=2)

    @property
    def values(self) -> np.ndarray:
        return decode(self.codes, self.scales)

    def laid_out(self) -> np.ndarray:
        """As the kernels read it, uint16 [blocks, layers, kv heads, block size, room]. For each head: the scales,
        element pairs of the keys of 16 positions at a time (or the rest), and the values of pairs of positions."""
        keys, values = (np.moveaxis(elements, 3, 2) for elements in self.elements)
        scales = np.moveaxis(self.scales, 4, 2)
        *heads, block_size, of_value = values.shape
        tiles = [keys[..., start : start + 16, :] for start in range(0, block_size, 16)]
        pairs = [tile.reshape(*tile.shape[:-1], -1, 2).swapaxes(-3, -2) for tile in tiles]
        if block_size % 2:
            beside = np.full_like(values[..., :1, :], NEVER_WRITTEN)
            values = np.concatenate([values, beside], axis=-2)
        values = values.reshape(*heads, -1, 2, of_value).swapaxes(-1, -2)
        parts = [part.reshape(*heads, -1) for part in (scales, *pairs, values)]
        there = sum(part.shape[-1] for part in parts)
        head_size = self.units[0].head_size
        unused = np.full((*heads, block_size * room(block_size, head_size) - there), NEVER_WRITTEN, np.uint16)
        return np.concatenate([*parts, unused], axis=-1).reshape(*heads, block_size, -1)


def new_store(
    blocks: int, layers: int, kv_heads: int, block_size: int, head_size: int, bits: int
) -> np.ndarray:
    return np.zeros((blocks, layers, kv_heads, block_size * (head_size * bits // 4 + 4)), np.uint8)


def read_store(store: np.ndarray, block_size: int, head_size: int, bits: int) -> np.ndarray:
    """The store in the layout of `weft.ops.store_format`: [blocks, layers, 2, block size, kv heads, vector]."""
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
    else:  # a byte of a value holds features half a head apart; here they are neighbours
        unpacked = np.concatenate([values & 15, values >> 4], axis=-1)
        values = unpacked[..., 0::2] | unpacked[..., 1::2] << 4
    vectors = np.stack([keys, values], axis=-3)
    ends = np.stack([small[..., 0, :], small[..., 1, :] ^ 0x80], axis=-1)
    return np.moveaxis(np.concatenate([vectors, ends], axis=-1), 2, 4)
