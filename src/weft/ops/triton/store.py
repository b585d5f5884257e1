"""The store of a two-tier cache on the device: the memory layout of quantised blocks, and the kernel that fills them.

A vector (one token, one KV head, K or V) is stored as integer codes, a scale and an offset: value = scale * (code -
offset). `weft.ops.store_format` defines them and calls the offset `zero`. With 4 bits, keys are rotated first. In a
block, each layer and KV head has one contiguous part:

    K codes   [block size, code bytes]      token by token, as queries read them
    V codes   [code bytes, block size]      feature by feature: a product with V sums over tokens, and tensor cores need
                                            the summed dimension contiguous
    words     int32 [block size]            scale K | offset K | scale V | offset V, one byte each

With 8 bits a code byte is code - 128 of one feature. With 4 bits it holds the codes of two neighbouring features, the
even one in the low bits. An offset byte is offset - 128 with 8 bits, and 16 * offset - 128 with 4 bits. A scale byte
has 5 bits of exponent and 3 of mantissa; 255 means that the vector is not finite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.errors import InvalidRequestError
from weft.ops.base import AttentionShape, TwoTierCache
from weft.ops.triton.device import Device, let_next_begin, power_of_two, wait_for_previous
from weft.tiers import store_vector_bytes

# The smallest scale is 2^-18.
_FIRST_SCALE: tl.constexpr = tl.constexpr((127 - 18) << 23)
_NO_NUMBER: tl.constexpr = tl.constexpr(255)
_LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)
# Adding this number to a float32 rounds it to an integer, ties to even.
_ROUNDING: tl.constexpr = tl.constexpr(12582912.0)


@dataclass(frozen=True)
class Moves:
    """Blocks to quantise in a step. `parcel` holds the ids of the full-precision blocks, then the ids of their blocks
    in the store."""

    parcel: Tensor  # int32 [2 * count], on the device
    count: int


def new_store(
    blocks: int, layers: int, block_size: int, shape: AttentionShape, bits: int, device: Device
) -> Tensor:
    """Returns an empty store: int8 [blocks, layers, kv heads, bytes]."""
    vector_bytes = store_vector_bytes(shape.head_size, bits)
    if block_size * vector_bytes % 2:
        raise InvalidRequestError(
            f"heads of {shape.head_size} in blocks of {block_size} tokens cannot be stored in {bits} bits: set "
            "block_size to an even number",
            field="block_size",
        )
    return device.zeros(blocks, layers, shape.kv_heads, 2 * block_size * vector_bytes, dtype=torch.int8)


def move_to_store(cache: TwoTierCache, moves: Moves, device: Device, layer: int | None = None) -> None:
    """Launches the kernel that quantises blocks, for one layer or for all."""
    _, layers, _, kv_heads, block_size, head_size = cache.full.shape
    device.launch(
        move_blocks,
        (moves.count, layers if layer is None else 1, kv_heads),
        (cache.full, cache.store, cache.store.view(torch.int32), moves.parcel, moves.count, layer or 0),
        (cache.full.dtype, layers, kv_heads, block_size, head_size, cache.bits),
        lambda: {
            "LAYERS": layers,
            "KV_HEADS": kv_heads,
            "HEAD_SIZE": head_size,
            "BITS": cache.bits,
            "BLOCK_SIZE": block_size,
            "BLOCK_ROWS": power_of_two(block_size),
            "COLUMNS": power_of_two(head_size * cache.bits // 8),
            "num_warps": 4,
        },
    )


@triton.jit(do_not_specialize=["count", "first_layer"])
def move_blocks(
    cache,
    codes,
    words,
    parcel,
    count,
    first_layer,
    LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # power of two >= BLOCK_SIZE
    COLUMNS: tl.constexpr,  # power of two >= code bytes of a vector
    DEPENDENT: tl.constexpr,
):
    """Quantises blocks into the store. A program handles one block, layer and KV head."""
    CODE_BYTES: tl.constexpr = HEAD_SIZE * BITS // 8
    PART: tl.constexpr = 2 * BLOCK_SIZE * (CODE_BYTES + 2)
    move = tl.program_id(0)
    layer = first_layer + tl.program_id(1)
    kv_head = tl.program_id(2)
    source = tl.load(parcel + move).to(tl.int64)
    target = tl.load(parcel + count + move).to(tl.int64)
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)

    row = tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, COLUMNS)
    is_row = row < BLOCK_SIZE
    there = is_row[:, None] & (column < CODE_BYTES)[None, :]
    keys = cache + ((source * LAYERS + layer) * 2 * KV_HEADS + kv_head) * (BLOCK_SIZE * HEAD_SIZE)
    values = keys + KV_HEADS * BLOCK_SIZE * HEAD_SIZE
    part = ((target * LAYERS + layer) * KV_HEADS + kv_head) * PART
    key_codes, key_scale, key_offset = _quantised(keys, row, column, there, HEAD_SIZE, BITS, BITS == 4)
    value_codes, value_scale, value_offset = _quantised(values, row, column, there, HEAD_SIZE, BITS, False)
    tl.store(codes + part + row[:, None] * CODE_BYTES + column[None, :], key_codes, mask=there)
    by_feature = codes + part + BLOCK_SIZE * CODE_BYTES + column[None, :] * BLOCK_SIZE + row[:, None]
    tl.store(by_feature, value_codes, mask=there)
    word = key_scale | (key_offset << 8) | (value_scale << 16) | (value_offset << 24)
    tl.store(words + part // 4 + BLOCK_SIZE * CODE_BYTES // 2 + row, word, mask=is_row)


@triton.jit
def _quantised(
    vectors, row, column, there, HEAD_SIZE: tl.constexpr, BITS: tl.constexpr, ROTATED: tl.constexpr
):
    """Quantises the vectors of a block: returns code bytes, and scale and offset of each vector as bytes."""
    place = vectors + row[:, None] * HEAD_SIZE + column[None, :] * (8 // BITS)
    left = tl.load(place, mask=there, other=0.0).to(tl.float32)
    if BITS == 4:
        right = tl.load(place + 1, mask=there, other=0.0).to(tl.float32)
        if ROTATED:
            left, right = rotated(tl.trans(left), tl.trans(right), HEAD_SIZE)
            left, right = tl.trans(left), tl.trans(right)
    lowest, highest, not_finite = tl.min(left, 1), tl.max(left, 1), tl.max(_is_not_finite(left), 1)
    if BITS == 4:
        lowest = tl.minimum(lowest, tl.min(right, 1))
        highest = tl.maximum(highest, tl.max(right, 1))
        not_finite = tl.maximum(not_finite, tl.max(_is_not_finite(right), 1))
    is_number = not_finite == 0
    lowest = tl.where(is_number, tl.minimum(lowest, 0.0), 0.0)
    highest = tl.where(is_number, tl.maximum(highest, 0.0), 0.0)
    LEVELS: tl.constexpr = 255.0 if BITS == 8 else 15.0
    exact = tl.div_rn(highest - lowest, tl.full(lowest.shape, LEVELS, tl.float32)).to(tl.int32, bitcast=True)
    code = ((exact + ((1 << 20) - 1)) >> 20) - (_FIRST_SCALE >> 20)
    code = tl.minimum(tl.maximum(code, 0), 254)
    scale = scale_of(code)
    steps = tl.div_rn(-lowest, scale) * (1.0 if BITS == 8 else 16.0)
    offset = tl.minimum(tl.maximum(_rounded(steps), 0.0), 255.0)
    coded = _coded(left, scale, offset, is_number, BITS)
    if BITS == 4:
        coded = coded | (_coded(right, scale, offset, is_number, BITS) << 4)
    else:
        coded = coded - 128
    return coded.to(tl.int8), tl.where(is_number, code, _NO_NUMBER), (offset.to(tl.int32) - 128) & 255


@triton.jit
def _is_not_finite(x):
    """1 if a value is infinite or NaN, else 0. The maximum of these is well defined; the maximum of values with NaN is
    not."""
    return tl.where(tl.abs(x) <= _LARGEST, 0, 1)


@triton.jit
def _coded(x, scale, offset, is_number, BITS: tl.constexpr):
    """The codes of values with this scale and offset, one int32 for each value; vectors that are not finite get the
    codes of 0."""
    x = tl.where(is_number[:, None], x, 0.0)
    # Clips early, so that _rounded gets only values in its range. Values outside would be clipped later anyway.
    steps = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    steps = tl.minimum(tl.maximum(steps, -1024.0), 1024.0)
    if BITS == 8:
        code = _rounded(steps) + offset[:, None]
        return tl.minimum(tl.maximum(code, 0.0), 255.0).to(tl.int32)
    code = _rounded(steps + offset[:, None] * 0.0625)
    return tl.minimum(tl.maximum(code, 0.0), 15.0).to(tl.int32)


@triton.jit
def _rounded(x):
    """Rounds to the nearest integer, ties to even. Only for magnitudes below 2^22."""
    return (x + _ROUNDING) - _ROUNDING


@triton.jit
def rotated(left, right, HEAD_SIZE: tl.constexpr):
    """Rotates vectors by a Hadamard matrix: `weft.ops.store_format.rotate`. Takes and returns the even and the odd
    features: float32 [features / 2, vectors]."""
    GROUP: tl.constexpr = HEAD_SIZE & -HEAD_SIZE
    if GROUP > 1:
        left, right = left + right, left - right
    return _butterflies(left, GROUP // 2) * GROUP**-0.5, _butterflies(right, GROUP // 2) * GROUP**-0.5


@triton.jit
def _butterflies(x, GROUP: tl.constexpr):
    """Sums and differences of features at distances 1, 2, 4, ..., within groups of GROUP."""
    FEATURES: tl.constexpr = x.shape[0]
    VECTORS: tl.constexpr = x.shape[1]
    for stage in tl.static_range(0, 10):
        if (1 << stage) < GROUP:
            pairs = tl.reshape(x, (FEATURES // (2 << stage), 2, 1 << stage, VECTORS))
            first, second = tl.split(tl.permute(pairs, (0, 2, 3, 1)))
            mixed = tl.permute(tl.join(first + second, first - second), (0, 3, 1, 2))
            x = tl.reshape(mixed, (FEATURES, VECTORS))
    return x


@triton.jit
def scale_of(code):
    """The scale of a scale byte, as float32."""
    scale = ((code << 20) + _FIRST_SCALE).to(tl.float32, bitcast=True)
    return tl.where(code == _NO_NUMBER, float("nan"), scale)
