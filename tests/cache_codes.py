"""The format of KV cache vectors in the C++ kernels, in numpy. A vector is the key or value of a token in a KV head.

    value = code * scale          codes are 16-bit integers; a scale is the upper half of a float32

Four codes a, b, c, d share three 16-bit elements. The lowest four bits of a, b and c hold the upper twelve of d.

    element 0   a[15:4] d[15:12]
    element 1   b[15:4] d[11:8]
    element 2   c[15:4] d[7:4]          the lowest four bits of d are 0

The lowest bits also count as part of a, b and c: each code is rounded to the nearest value with these low bits."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

STEP = 16
LARGEST_CODE = 32767 // STEP * STEP  # before the lowest bits are set
LARGEST_QUERY = 32767
LONGEST_KEY = 12000.0  # the largest length of a key in codes, divided by the root of the head size
LONGEST_QUERY = 175000.0  # the largest length of a query in codes, times the root of the head size
LOWEST_SCALE = np.float32(2.0**-60)
NOT_A_NUMBER = 0x7FC0
# Fills unwritten memory. As a scale it is NaN, so a read of unwritten memory gives NaN.
NEVER_WRITTEN = 0xFFFF


def even(count: int) -> int:
    return count + count % 2


def largest_query(head_size: int) -> float:
    """The largest code of a query whose features are all equal."""
    return min(LARGEST_QUERY, LONGEST_QUERY / head_size)


class Units:
    """Converts codes [..., head size] to elements [..., number] and back: which features share elements."""

    def __init__(self, head_size: int, of_values: bool) -> None:
        self.head_size = head_size
        # [groups, 4, adjacent]: the features that share elements are `adjacent` apart.
        adjacent = -(-head_size // 4) if of_values else 2
        self._shape = (-(-head_size // (4 * adjacent)), 4, adjacent)
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
        groups, _, adjacent = self._shape
        three = elements.view(np.int16).reshape(*elements.shape[:-1], groups, 3, adjacent)
        lowest = (three.astype(np.int64) & STEP - 1) << np.array([12, 8, 4])[:, None]
        fourth = lowest.sum(axis=-2, keepdims=True).astype(np.uint16).view(np.int16)
        codes = np.concatenate([three, fourth], axis=-2)
        return codes.reshape(*elements.shape[:-1], -1)[..., : self.head_size]


def encode_keys(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes before they share elements, int64 [..., features], and the bits of the scales, uint16 [...]. A vector
    with an infinite or NaN value becomes NaN as a whole. The lengths of keys and queries are limited, so that the
    product of two code vectors fits into 32 bits."""
    root = np.sqrt(np.float32(vectors.shape[-1]))
    return _encode(vectors, LARGEST_CODE, lambda lengths: lengths / (root * np.float32(LONGEST_KEY)))


def encode_values(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _encode(vectors, LARGEST_CODE)


def encode_queries(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    root = np.sqrt(np.float32(vectors.shape[-1]))
    return _encode(vectors, LARGEST_QUERY, lambda lengths: lengths * (root / np.float32(LONGEST_QUERY)))


ENCODERS = (encode_keys, encode_values)


def kept(vectors: np.ndarray, of_values: bool) -> np.ndarray:
    """The values that are read after these vectors were written."""
    units = Units(vectors.shape[-1], of_values)
    codes, scales = ENCODERS[of_values](vectors)
    return decode(units.codes(units.elements(codes)), scales)


def _encode(
    vectors: np.ndarray, largest_code: int, by_length: Callable[[np.ndarray], np.ndarray] = np.zeros_like
) -> tuple[np.ndarray, np.ndarray]:
    """Chooses the smallest scale with two limits: no code exceeds `largest_code`, and the scale is at least the largest
    feature times `by_length(length of the vector / largest feature)`."""
    is_finite = np.isfinite(vectors).all(axis=-1)
    vectors = np.where(is_finite[..., None], vectors, 0).astype(np.float32)
    most = np.abs(vectors).max(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        parts = (vectors * (np.float32(1) / most)[..., None]).astype(np.float64)
        lengths = np.sqrt((parts**2).sum(axis=-1)).astype(np.float32)
    lengths = np.where(most > LOWEST_SCALE, lengths, np.float32(0))
    exact = most * np.maximum(np.float32(1) / np.float32(largest_code), by_length(lengths))
    exact = np.maximum(exact.astype(np.float32), LOWEST_SCALE)
    # The scale is rounded up, so that no code exceeds its limit.
    scales = ((exact.view(np.uint32) + 0xFFFF) >> 16).astype(np.uint16)
    codes = np.rint(vectors * (np.float32(1) / scale_of(scales))[..., None]).astype(np.int64)
    return codes, np.where(is_finite, scales, np.uint16(NOT_A_NUMBER))


def scale_of(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return codes.astype(np.float32) * scale_of(scales)[..., None]
