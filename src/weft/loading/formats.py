"""The tensor formats of GGUF files: their sizes, and how each becomes float32.

A quantised row is a run of blocks of 32 values. Elements 0..15 of a 4-bit block are the low nibbles of its 16
bytes and elements 16..31 the high ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_VALUES_PER_BLOCK = 32

# Rows are dequantised in pieces of about this many values, so that temporaries stay small beside the result.
_VALUES_PER_PIECE = 1 << 20


@dataclass(frozen=True)
class TensorFormat:
    """One way to store numbers: `block_bytes` bytes hold `block_values` values."""

    name: str
    block_values: int
    block_bytes: int
    decode: Callable[
        [np.ndarray], np.ndarray
    ]  # uint8 [blocks, block_bytes] -> float32 [blocks, block_values]


def _half(columns: np.ndarray) -> np.ndarray:
    """Two bytes per block, as one float32 column."""
    return np.ascontiguousarray(columns).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    codes = np.empty((len(packed), _VALUES_PER_BLOCK), np.float32)
    codes[:, : _VALUES_PER_BLOCK // 2] = packed & 0x0F
    codes[:, _VALUES_PER_BLOCK // 2 :] = packed >> 4
    return codes


def _decode_f32(blocks: np.ndarray) -> np.ndarray:
    return blocks.view("<f4").astype(np.float32, copy=False)


def _decode_f16(blocks: np.ndarray) -> np.ndarray:
    return blocks.view("<f2").astype(np.float32)


def _decode_q4_0(blocks: np.ndarray) -> np.ndarray:
    codes = _nibbles(blocks[:, 2:])
    codes -= 8.0
    codes *= _half(blocks[:, 0:2])
    return codes


def _decode_q4_1(blocks: np.ndarray) -> np.ndarray:
    codes = _nibbles(blocks[:, 4:])
    codes *= _half(blocks[:, 0:2])
    codes += _half(blocks[:, 2:4])
    return codes


def _decode_q8_0(blocks: np.ndarray) -> np.ndarray:
    codes = blocks[:, 2:].view(np.int8).astype(np.float32)
    codes *= _half(blocks[:, 0:2])
    return codes


FORMATS: dict[int, TensorFormat] = {
    0: TensorFormat("F32", 1, 4, _decode_f32),
    1: TensorFormat("F16", 1, 2, _decode_f16),
    2: TensorFormat("Q4_0", _VALUES_PER_BLOCK, 18, _decode_q4_0),
    3: TensorFormat("Q4_1", _VALUES_PER_BLOCK, 20, _decode_q4_1),
    8: TensorFormat("Q8_0", _VALUES_PER_BLOCK, 34, _decode_q8_0),
}

# Formats that exist but that weft does not read yet: only their names, for the error message.
OTHER_FORMAT_NAMES: dict[int, str] = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0",
    39: "MXFP4",
}  # fmt: skip


def dequantise(raw: np.ndarray, tensor_format: TensorFormat, shape: tuple[int, ...]) -> np.ndarray:
    """A new float32 array of `shape` from the bytes of one tensor."""
    blocks = raw.reshape(-1, tensor_format.block_bytes)
    result = np.empty((len(blocks), tensor_format.block_values), np.float32)
    step = max(1, _VALUES_PER_PIECE // tensor_format.block_values)
    for start in range(0, len(blocks), step):
        result[start : start + step] = tensor_format.decode(blocks[start : start + step])
    return result.reshape(shape)
