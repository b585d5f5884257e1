"""Vectors of the cache as the C++ kernels keep them, in numpy: 16-bit whole numbers and a scale, which is the upper half of a float32;
value = code * scale. A vector is what one token has of one kv head, its key or its value."""

from __future__ import annotations

import math

import numpy as np

LARGEST_VALUE = 8191
LOWEST_SCALE = np.float32(2.0**-60)
NOT_A_NUMBER = 0x7FC0
# As codes and as a scale it shows where it is read: it is not a number.
NEVER_WRITTEN = 0xFFFF


def even(count: int) -> int:
    return count + count % 2


def largest_key(head_size: int) -> int:
    """Of queries too: the sum of so many of their products is still a number of 32 bits."""
    return min(32767, math.isqrt((2**31 - 1) // even(head_size)))


def encode(vectors: np.ndarray, largest: int) -> tuple[np.ndarray, np.ndarray]:
    """int16 [..., features] and the bits of the scales, uint16 [...]. An infinite value, or one that is not a number, makes its
    whole vector one that is not a number."""
    is_finite = np.isfinite(vectors).all(axis=-1)
    vectors = np.where(is_finite[..., None], vectors, 0).astype(np.float32)
    most = np.abs(vectors).max(axis=-1)
    wanted = np.maximum(most * (np.float32(1) / np.float32(largest)), LOWEST_SCALE)
    # Rounded up, so that no code is larger than the largest.
    scales = ((wanted.view(np.uint32) + 0xFFFF) >> 16).astype(np.uint16)
    codes = np.rint(vectors * (np.float32(1) / scale_of(scales))[..., None]).astype(np.int16)
    return codes, np.where(is_finite, scales, np.uint16(NOT_A_NUMBER))


def scale_of(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return codes.astype(np.float32) * scale_of(scales)[..., None]
