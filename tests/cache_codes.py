"""Vectors of the cache as the C++ kernels keep them, in numpy: whole numbers of 16 bits and a scale, which is the upper half of a float32;
value = code * scale. A vector is what one token has of one kv head, its key or its value.

Four codes share three elements of 16 bits: of three codes the lowest four bits are those of the fourth's upper twelve, highest first, and
the fourth's own lowest four are 0. Each code is the nearest to what it stands for whose lowest bits are so."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

STEP = 16
LARGEST_CODE = 32767 // STEP * STEP  # before the lowest bits are chosen
LARGEST_QUERY = 32767
LONGEST_KEY = 12000.0  # by the root of the head's size: so large is the code of a key of features all alike
LONGEST_QUERY = 175000.0  # times the root of the head's size
LOWEST_SCALE = np.float32(2.0**-60)
NOT_A_NUMBER = 0x7FC0
# As elements and as a scale it shows where it is read: it is not a number.
NEVER_WRITTEN = 0xFFFF


def even(count: int) -> int:
    return count + count % 2


def largest_query(head_size: int) -> float:
    """The code of a query of features all alike."""
    return min(LARGEST_QUERY, LONGEST_QUERY / head_size)


class Units:
    """Which features of a vector share elements: codes [..., head size] from and to elements [..., number]."""

    def __init__(self, head_size: int, of_values: bool) -> None:
        self.head_size = head_size
        # Of values those a quarter of a head apart, of keys pairs of neighbours: [groups, 4, features beside each other].
        beside = -(-head_size // 4) if of_values else 2
        self._shape = (-(-head_size // (4 * beside)), 4, beside)
        self.number = math.prod(self._shape) // 4 * 3

    def elements(self, codes: np.ndarray) -> np.ndarray:
        missing = math.prod(self._shape) - self.head_size
        filled = np.pad(codes.astype(np.int64), [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
        units = filled.reshape(*codes.shape[:-1], *self._shape)
        fourth = units[..., 3:, :] + STEP // 2 & -STEP
        lowest = fourth >> np.array([12, 8, 4])[:, None] & STEP - 1
        elements = (units[..., :3, :] - lowest + STEP // 2 & -STEP) | lowest
        return elements.reshape(*codes.shape[:-1], -1).astype(np.int16).view(np.uint16)

    def codes(self, elements: np.ndarray) -> np.ndarray:
        groups, _, beside = self._shape
        three = elements.view(np.int16).reshape(*elements.shape[:-1], groups, 3, beside)
        lowest = (three.astype(np.int64) & STEP - 1) << np.array([12, 8, 4])[:, None]
        fourth = lowest.sum(axis=-2, keepdims=True).astype(np.uint16).view(np.int16)
        codes = np.concatenate([three, fourth], axis=-2)
        return codes.reshape(*elements.shape[:-1], -1)[..., : self.head_size]


def encode_keys(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes before they share elements, int64 [..., features], and the bits of the scales, uint16 [...]. An infinite value, or one that is
    not a number, makes its whole vector one that is not a number. The sum of the products of a query and a key is at most that of their
    lengths, which is a number of 32 bits."""
    root = np.sqrt(np.float32(vectors.shape[-1]))
    return _encode(vectors, LARGEST_CODE, lambda lengths: lengths / (root * np.float32(LONGEST_KEY)))


def encode_values(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _encode(vectors, LARGEST_CODE)


def encode_queries(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    root = np.sqrt(np.float32(vectors.shape[-1]))
    return _encode(vectors, LARGEST_QUERY, lambda lengths: lengths * (root / np.float32(LONGEST_QUERY)))


ENCODERS = (encode_keys, encode_values)


def kept(vectors: np.ndarray, of_values: bool) -> np.ndarray:
    """What is read of vectors that were written."""
    units = Units(vectors.shape[-1], of_values)
    codes, scales = ENCODERS[of_values](vectors)
    return decode(units.codes(units.elements(codes)), scales)


def _encode(
    vectors: np.ndarray, largest_code: int, by_length: Callable[[np.ndarray], np.ndarray] = np.zeros_like
) -> tuple[np.ndarray, np.ndarray]:
    """The largest feature has at most that code; the scale is at least it times what `by_length` makes of how much longer the vector is."""
    is_finite = np.isfinite(vectors).all(axis=-1)
    vectors = np.where(is_finite[..., None], vectors, 0).astype(np.float32)
    most = np.abs(vectors).max(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        parts = (vectors * (np.float32(1) / most)[..., None]).astype(np.float64)
        lengths = np.sqrt((parts**2).sum(axis=-1)).astype(np.float32)
    lengths = np.where(most > LOWEST_SCALE, lengths, np.float32(0))
    wanted = most * np.maximum(np.float32(1) / np.float32(largest_code), by_length(lengths))
    wanted = np.maximum(wanted.astype(np.float32), LOWEST_SCALE)
    # Rounded up, so that no code is larger than it may be.
    scales = ((wanted.view(np.uint32) + 0xFFFF) >> 16).astype(np.uint16)
    codes = np.rint(vectors * (np.float32(1) / scale_of(scales))[..., None]).astype(np.int64)
    return codes, np.where(is_finite, scales, np.uint16(NOT_A_NUMBER))


def scale_of(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return codes.astype(np.float32) * scale_of(scales)[..., None]
