"""Vectors of the cache as the C++ kernels keep them, in numpy: 16-bit whole numbers and a scale, which is the upper half of a float32;
value = code * scale. A vector is what one token has of one kv head, its key or its value."""

from __future__ import annotations

import math

import numpy as np

LARGEST_VALUE = 8191
LARGEST_KEY = 32767
LONGEST_KEY = 46000.0
LOWEST_SCALE = np.float32(2.0**-60)
NOT_A_NUMBER = 0x7FC0
# As codes and as a scale it shows where it is read: it is not a number.
NEVER_WRITTEN = 0xFFFF


def even(count: int) -> int:
    return count + count % 2


def largest_key(head_size: int) -> float:
    """The code of a key, or a query, of features all alike."""
    return min(LARGEST_KEY, LONGEST_KEY / math.sqrt(head_size))


def encode_keys(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """And queries. int16 [..., features] and the bits of the scales, uint16 [...]. An infinite value, or one that is not a
    number, makes its whole vector one that is not a number. The sum of the products of two is at most that of their lengths,
    which is a number of 32 bits."""
    vectors, is_finite = _finite(vectors)
    most = np.abs(vectors).max(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        parts = (vectors * (np.float32(1) / most)[..., None]).astype(np.float64)
        lengths = np.sqrt((parts**2).sum(axis=-1)).astype(np.float32)
    lengths = np.where(most > LOWEST_SCALE, lengths, np.float32(0))
    by = np.maximum(
        lengths * (np.float32(1) / np.float32(LONGEST_KEY)), np.float32(1) / np.float32(LARGEST_KEY)
    )
    return _encode(vectors, is_finite, most * by)


def encode_values(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    vectors, is_finite = _finite(vectors)
    return _encode(
        vectors, is_finite, np.abs(vectors).max(axis=-1) * (np.float32(1) / np.float32(LARGEST_VALUE))
    )


ENCODERS = (encode_keys, encode_values)


def _finite(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    is_finite = np.isfinite(vectors).all(axis=-1)
    return np.where(is_finite[..., None], vectors, 0).astype(np.float32), is_finite


def _encode(vectors: np.ndarray, is_finite: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    wanted = np.maximum(wanted.astype(np.float32), LOWEST_SCALE)
    # Rounded up, so that no code is larger than it may be.
    scales = ((wanted.view(np.uint32) + 0xFFFF) >> 16).astype(np.uint16)
    codes = np.rint(vectors * (np.float32(1) / scale_of(scales))[..., None]).astype(np.int16)
    return codes, np.where(is_finite, scales, np.uint16(NOT_A_NUMBER))


def scale_of(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return codes.astype(np.float32) * scale_of(scales)[..., None]
