"""Decodes each tensor format to floating point (dequantisation), in numpy.

A quantised row is a series of quantisation blocks. A block holds codes (small integers) and their scales:
- plain formats (Q4_0, Q8_0 ...): 32 values with one scale;
- K formats (Q4_K ...): 256 values in groups of 16 or 32. Each group has a small integer scale, which is multiplied by
  one float scale of the block.

Codes of less than a byte are packed in runs of bytes. The low bits of all bytes of a run hold its first codes, the next
bits the following codes. With codes of four bits and runs of 16 bytes:

    byte i of a run:  | code i + 16 | code i |
                       bits 7..4     bits 3..0

Formats of 3, 5 and 6 bits store the upper bits of the codes separately.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weft.loading.formats import TensorFormat

# Decode this many values at a time: the temporary arrays then fit into the CPU cache. A multiple of every block size.
_VALUES_PER_PIECE = 1 << 17


def decode_into(
    raw: np.ndarray,
    tensor_format: TensorFormat,
    out: np.ndarray,
    after_piece: Callable[[int, int], object] = lambda start, stop: None,
) -> None:
    """Decodes the bytes `raw` of a tensor into `out`, which has the tensor's shape and may have any strides.

    Calls `after_piece(start, stop)` for every byte range of `raw` that has been decoded and is not read again.
    """
    # A malicious file may have infinite scales. The resulting inf or NaN weights need no numpy warning.
    with np.errstate(all="ignore"):
        _decode_rows(raw, tensor_format, out[None] if out.ndim == 0 else out, after_piece, 0)


def _decode_rows(
    raw: np.ndarray,
    tensor_format: TensorFormat,
    out: np.ndarray,
    after_piece: Callable[[int, int], object],
    start: int,
) -> None:
    if not out.size:
        return
    row_values = out[0].size
    if row_values > _VALUES_PER_PIECE:
        for row in out:
            _decode_rows(raw, tensor_format, row, after_piece, start)
            start += tensor_format.bytes_of(row_values)
        return
    step = _VALUES_PER_PIECE // row_values
    for first in range(0, len(out), step):
        piece = out[first : first + step]
        stop = start + tensor_format.bytes_of(piece.size)
        blocks = raw[start:stop].reshape(-1, tensor_format.block_bytes)
        piece[...] = _DECODERS[tensor_format.name](blocks).reshape(piece.shape)
        after_piece(start, stop)
        start = stop


# --- plain numbers ----------------------------------------------------------------------------------------------------


def _decode_f64(blocks: np.ndarray) -> np.ndarray:
    return blocks.view("<f8")


def _decode_f32(blocks: np.ndarray) -> np.ndarray:
    return blocks.view("<f4")


def _decode_f16(blocks: np.ndarray) -> np.ndarray:
    return blocks.view("<f2").astype(np.float32)


def _decode_bf16(blocks: np.ndarray) -> np.ndarray:
    # bfloat16 is the upper half of a float32.
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


# --- parts of a block -------------------------------------------------------------------------------------------------


def _half(columns: np.ndarray) -> np.ndarray:
    """A float16 (two bytes) of every block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(columns).view("<f2").astype(np.float32)


def _planes(packed: np.ndarray, bits: int, width: int) -> np.ndarray:
    """Unpacks codes of `bits` bits from runs of `width` bytes: uint8 [blocks, codes]. See the module's docstring."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = packed.reshape(len(packed), -1, 1, width)
    return ((runs >> shifts) & np.uint8((1 << bits) - 1)).reshape(len(packed), -1)


def _single_bits(packed: np.ndarray) -> np.ndarray:
    """Unpacks one bit per value, in the order of the values."""
    return np.unpackbits(packed, axis=-1, bitorder="little")


def _grouped(codes: np.ndarray, groups: int) -> np.ndarray:
    """The codes as float32 [blocks, groups, values of a group]."""
    return codes.reshape(len(codes), groups, -1).astype(np.float32)


# --- plain formats: 32 values with one scale --------------------------------------------------------------------------


def _decode_q4_0(blocks: np.ndarray) -> np.ndarray:
    codes = _planes(blocks[:, 2:], 4, 16).astype(np.float32)
    codes -= 8.0
    codes *= _half(blocks[:, 0:2])
    return codes


def _decode_q4_1(blocks: np.ndarray) -> np.ndarray:
    codes = _planes(blocks[:, 4:], 4, 16).astype(np.float32)
    codes *= _half(blocks[:, 0:2])
    codes += _half(blocks[:, 2:4])
    return codes


def _decode_q5_0(blocks: np.ndarray) -> np.ndarray:
    codes = (_planes(blocks[:, 6:], 4, 16) | _single_bits(blocks[:, 2:6]) << 4).astype(np.float32)
    codes -= 16.0
    codes *= _half(blocks[:, 0:2])
    return codes


def _decode_q5_1(blocks: np.ndarray) -> np.ndarray:
    codes = (_planes(blocks[:, 8:], 4, 16) | _single_bits(blocks[:, 4:8]) << 4).astype(np.float32)
    codes *= _half(blocks[:, 0:2])
    codes += _half(blocks[:, 2:4])
    return codes


def _decode_q8_0(blocks: np.ndarray) -> np.ndarray:
    codes = blocks[:, 2:].view(np.int8).astype(np.float32)
    codes *= _half(blocks[:, 0:2])
    return codes


# --- K formats: 256 values, one scale for each group ------------------------------------------------------------------


def _scaled(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """codes [blocks, groups, values] times scales [blocks, groups], as [blocks, values]."""
    codes *= scales[:, :, None]
    return codes.reshape(len(codes), -1)


def _scaled_less_minima(codes: np.ndarray, scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    codes *= scales[:, :, None]
    codes -= minima[:, :, None]
    return codes.reshape(len(codes), -1)


def _decode_q2_k(blocks: np.ndarray) -> np.ndarray:
    packed_scales = blocks[:, 0:16]
    return _scaled_less_minima(
        _grouped(_planes(blocks[:, 16:80], 2, 32), 16),
        _half(blocks[:, 80:82]) * (packed_scales & 0x0F),
        _half(blocks[:, 82:84]) * (packed_scales >> 4),
    )


def _decode_q3_k(blocks: np.ndarray) -> np.ndarray:
    codes = _grouped(_planes(blocks[:, 32:96], 2, 32) | _planes(blocks[:, 0:32], 1, 32) << 2, 16)
    codes -= 4.0
    # 16 scales of 6 bits: the lower 4 bits of all in bytes 96..103, the upper 2 bits in bytes 104..107.
    scales = _planes(blocks[:, 96:104], 4, 8) | _planes(blocks[:, 104:108], 2, 4) << 4
    return _scaled(codes, _half(blocks[:, 108:110]) * (scales.astype(np.float32) - 32.0))


def _scales_and_minima(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 8 scales and 8 minima of a Q4_K or Q5_K block, 6 bits each.

                  bits 7..6                bits 5..0
    byte 4 + i    scale 4+i, bits 5..4     scale i
    byte 8 + i    minimum 4+i, bits 5..4   minimum i

                  bits 7..4                bits 3..0
    byte 12 + i   minimum 4+i, bits 3..0   scale 4+i, bits 3..0       (i = 0..3)
    """
    first_scales, first_minima, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first_scales & 0x3F, rest & 0x0F | first_scales >> 6 << 4], axis=1)
    minima = np.concatenate([first_minima & 0x3F, rest >> 4 | first_minima >> 6 << 4], axis=1)
    return _half(blocks[:, 0:2]) * scales, _half(blocks[:, 2:4]) * minima


def _decode_q4_k(blocks: np.ndarray) -> np.ndarray:
    codes = _planes(blocks[:, 16:144], 4, 32)
    return _scaled_less_minima(_grouped(codes, 8), *_scales_and_minima(blocks))


def _decode_q5_k(blocks: np.ndarray) -> np.ndarray:
    # Bytes 0..15: scales and minima. Bytes 16..47: the highest bit of each code. Bytes 48..175: the lower four bits.
    codes = _planes(blocks[:, 48:176], 4, 32) | _planes(blocks[:, 16:48], 1, 32) << 4
    return _scaled_less_minima(_grouped(codes, 8), *_scales_and_minima(blocks))


def _decode_q6_k(blocks: np.ndarray) -> np.ndarray:
    codes = _grouped(_planes(blocks[:, 0:128], 4, 64) | _planes(blocks[:, 128:192], 2, 32) << 4, 16)
    codes -= 32.0
    return _scaled(codes, _half(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8))


def _decode_q8_k(blocks: np.ndarray) -> np.ndarray:
    # The last 32 bytes are sums of the codes. Dot products of quantised vectors use them; decoding does not.
    codes = blocks[:, 4:260].view(np.int8).astype(np.float32)
    codes *= np.ascontiguousarray(blocks[:, 0:4]).view("<f4")
    return codes


_DECODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "F32": _decode_f32,
    "F16": _decode_f16,
    "BF16": _decode_bf16,
    "F64": _decode_f64,
    "Q4_0": _decode_q4_0,
    "Q4_1": _decode_q4_1,
    "Q5_0": _decode_q5_0,
    "Q5_1": _decode_q5_1,
    "Q8_0": _decode_q8_0,
    "Q2_K": _decode_q2_k,
    "Q3_K": _decode_q3_k,
    "Q4_K": _decode_q4_k,
    "Q5_K": _decode_q5_k,
    "Q6_K": _decode_q6_k,
    "Q8_K": _decode_q8_k,
}
"""uint8 [blocks, block_bytes] -> float32 [blocks, block_values] (F64: float64). The result may be a view."""
