"""The format of the quantised store, in numpy. The kernels are tested against it, code by code.

A vector is the key or the value of one token for one KV head. Its stored bytes depend only on its values.

    value = scale * (code - zero)         8 bits: zero is a code, 0 to 255
                                          4 bits: zero counts sixteenths of a code, 0 to 255
    bytes = codes, scale, zero            a scale is a float of 5 exponent and 3 mantissa bits; 255: not a number

Keys have a few features that are far larger than the others. With 4 bits, all other features would get the same few
codes. So 4-bit keys are rotated before they are quantised, which spreads a large feature over all. The query is rotated
too, which leaves the product of query and key unchanged.
"""

from __future__ import annotations

import numpy as np

NOT_A_NUMBER = 255

# Scale byte 0 is 2^-18. Byte b is the float32 whose bit pattern is b * 2^20 larger: there are eight scales per power of
# two.
_SHIFT = 20
_LOWEST = (127 - 18) << 3


def rotates_keys(bits: int) -> bool:
    return bits == 4


def rotate(vectors: np.ndarray) -> np.ndarray:
    """Multiplies each n values of vectors [..., size] by the normalised Hadamard matrix of size n. n is the largest
    power of two that divides `size`. The function is its own inverse."""
    *outer, size = vectors.shape
    n = size & -size
    rotated = vectors.reshape(*outer, size // n, n)
    half = 1
    while half < n:
        pairs = rotated.reshape(*outer, size // n, n // (2 * half), 2, half)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        rotated = np.stack([first + second, first - second], axis=-2)
        half *= 2
    return (rotated * np.float32(1 / np.sqrt(n)).astype(vectors.dtype)).reshape(vectors.shape)


def quantise(vectors: np.ndarray, bits: int) -> np.ndarray:
    """Quantises vectors [..., size] to uint8 [..., size * bits / 8 + 2]. Computes in float32.

    A vector with an infinite or NaN value is stored as NaN as a whole.
    """
    values = vectors.astype(np.float32)
    is_finite = np.isfinite(values).all(axis=-1, keepdims=True)
    values = np.where(is_finite, values, np.float32(0))
    low = np.minimum(values.min(axis=-1, keepdims=True), 0)
    high = np.maximum(values.max(axis=-1, keepdims=True), 0)
    # The scale is rounded up, so that no value is beyond the last code.
    exact = ((high - low) / np.float32(2**bits - 1)).view(np.int32)
    scale_byte = np.clip(((exact + ((1 << _SHIFT) - 1)) >> _SHIFT) - _LOWEST, 0, NOT_A_NUMBER - 1)
    scale = _scale_of(scale_byte)
    if bits == 8:
        zero = np.clip(np.rint(-low / scale), 0, 255)
        codes = np.clip(np.rint(values / scale) + zero, 0, 255).astype(np.uint8)
    else:
        zero = np.clip(np.rint(-low / scale * np.float32(16)), 0, 255)
        codes = np.clip(np.rint(values / scale + zero / np.float32(16)), 0, 15).astype(np.uint8)
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    scale_byte = np.where(is_finite, scale_byte, NOT_A_NUMBER)
    return np.concatenate([codes, scale_byte.astype(np.uint8), zero.astype(np.uint8)], axis=-1)


def quantise_keys(keys: np.ndarray, bits: int) -> np.ndarray:
    """`quantise` for keys: rotates them first if `rotates_keys`."""
    if not rotates_keys(bits):
        return quantise(keys, bits)
    with np.errstate(invalid="ignore", over="ignore"):
        return quantise(rotate(keys.astype(np.float32)), bits)


def dequantise_keys(stored: np.ndarray, bits: int, dtype: np.dtype | type) -> np.ndarray:
    """The inverse of `quantise_keys`. Rotates the keys back if they were rotated."""
    keys = dequantise(stored, bits, dtype)
    return rotate(keys) if rotates_keys(bits) else keys


def dequantise(stored: np.ndarray, bits: int, dtype: np.dtype | type) -> np.ndarray:
    """The inverse of `quantise`: values [..., size]."""
    packed, scale_byte, zero = stored[..., :-2], stored[..., -2:-1], stored[..., -1:].astype(dtype)
    if bits == 8:
        codes = packed
    else:
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(
            *packed.shape[:-1], 2 * packed.shape[-1]
        )
        zero /= 16  # with 4 bits, the stored zero counts sixteenths of a code
    scale = np.where(scale_byte == NOT_A_NUMBER, np.float32(np.nan), _scale_of(scale_byte.astype(np.int32)))
    return scale.astype(dtype) * (codes.astype(dtype) - zero)


def _scale_of(scale_byte: np.ndarray) -> np.ndarray:
    return ((scale_byte + _LOWEST) << _SHIFT).astype(np.int32).view(np.float32)
