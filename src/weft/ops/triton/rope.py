"""RoPE on the device: normalises and rotates queries and keys, and writes keys and values to the cache."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.base import AttentionShape, QkNorm, Rope
from weft.ops.triton.device import Device, ceil_divide, let_next_begin, power_of_two, wait_for_previous

# A constant, so that the sum of squares of a head is computed in the same order in any batch.
_HEADS_AT_ONCE = 16
_ROW_PIECE: tl.constexpr = tl.constexpr(1024)

_NO_NORM: tl.constexpr = tl.constexpr(0)
_HEAD_NORM: tl.constexpr = tl.constexpr(1)
_ROW_NORM: tl.constexpr = tl.constexpr(2)


class RopeTables:
    """The cosine and sine of every angle of one RoPE, by position: float32 [max_context, 2, pairs]."""

    def __init__(self, rope: Rope, max_context: int, device: Device) -> None:
        self.interleaved = rope.interleaved
        self.pairs = len(rope.frequencies)
        self.device = device
        # Angles are computed in float64: in float32, the angle at a position of some thousands loses four digits.
        angles = np.arange(max_context)[:, None] * np.array(rope.frequencies, np.float64)
        values = np.stack([np.cos(angles), np.sin(angles)], axis=1) * rope.scale
        self.values = torch.from_numpy(values.astype(np.float32)).to(device.torch_device)


class RopeBatch(Protocol):
    """The part of `DeviceBatch` that is used here."""

    @property
    def tokens(self) -> int: ...

    @property
    def positions(self) -> Tensor: ...

    @property
    def cells(self) -> Tensor: ...


def rope_and_write(
    batch: RopeBatch,
    qkv: Tensor,
    cache: Tensor,
    layer: int,
    tables: RopeTables,
    shape: AttentionShape,
    norm: QkNorm | None = None,
) -> None:
    """Normalises (if there is a norm) and rotates Q and K of packed [Q | K | V] rows in place. Also writes K and V to
    the cache [blocks, layers, 2, kv heads, block size, head size]."""
    _, layers, _, kv_heads, block_size, head_size = cache.shape
    norm_kind = _NO_NORM.value
    if norm is not None:
        norm_kind = _HEAD_NORM.value if len(norm.query) == head_size else _ROW_NORM.value
    # A norm over the whole row needs one program for all heads: a second program would change the row while the first
    # one sums it.
    parts = 1 if norm_kind == _ROW_NORM.value else ceil_divide(shape.heads + 2 * kv_heads, _HEADS_AT_ONCE)
    query_norm, key_norm, epsilon = (qkv, qkv, 0.0) if norm is None else (norm.query, norm.key, norm.epsilon)
    stride = qkv.stride(0)
    sizes = (shape.heads, kv_heads, head_size, block_size, layers, stride, tables.pairs, tables.interleaved)
    rest = head_size - 2 * tables.pairs
    tables.device.launch(
        _rope_and_write,
        (batch.tokens, parts, 1),
        (qkv, batch.positions, batch.cells, cache, tables.values, query_norm, key_norm, layer, epsilon),
        (sizes, norm_kind, qkv.dtype, cache.dtype, query_norm.dtype),
        lambda: {
            "HEADS": shape.heads,
            "KV_HEADS": kv_heads,
            "HEAD_SIZE": head_size,
            "PAIRS": tables.pairs,
            "PAIRS_PADDED": power_of_two(tables.pairs),
            "REST_PADDED": power_of_two(rest) if rest else 0,
            "INTERLEAVED": tables.interleaved,
            "NORM": norm_kind,
            "BLOCK_SIZE": block_size,
            "LAYERS": layers,
            "ROW_STRIDE": stride,
            "HEADS_AT_ONCE": _HEADS_AT_ONCE,
            "num_warps": 4,
        },
    )


@triton.jit(do_not_specialize=["layer"])
def _rope_and_write(
    qkv,
    positions,
    cells,
    cache,
    angles,
    query_norm,
    key_norm,
    layer,
    epsilon,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LAYERS: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Normalises and rotates Q and K of qkv rows in place, and writes K and V to the cache. Grid (tokens, groups of
    HEADS_AT_ONCE heads). A token with cell -1 is padding and is not written to the cache."""
    token = tl.program_id(0)
    row = qkv + token.to(tl.int64) * ROW_STRIDE
    # The step's indices were written before the previous kernel began, so the kernel need not wait for them.
    cell = tl.load(cells + token)
    position = tl.load(positions + token).to(tl.int64)

    # The features of a head are of three kinds: the left feature of each pair, the right one, and those that are not
    # rotated.
    pair = tl.arange(0, PAIRS_PADDED)
    in_pair = pair < PAIRS
    left_column = pair * 2 if INTERLEAVED else pair
    right_column = left_column + (1 if INTERLEAVED else PAIRS)
    cosine = tl.load(angles + position * (2 * PAIRS) + pair, mask=in_pair, other=0.0)
    sine = tl.load(angles + position * (2 * PAIRS) + PAIRS + pair, mask=in_pair, other=0.0)

    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)

    query_divisor, key_divisor = 1.0, 1.0
    if NORM == _ROW_NORM:
        query_divisor = tl.rsqrt(_sum_of_squares(row, HEADS * HEAD_SIZE) / (HEADS * HEAD_SIZE) + epsilon)
        key_squares = _sum_of_squares(row + HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE)
        key_divisor = tl.rsqrt(key_squares / (KV_HEADS * HEAD_SIZE) + epsilon)

    # Address of K at the token's position in its block, for this layer and head 0.
    block = (cell // BLOCK_SIZE) * (LAYERS * 2 * KV_HEADS * BLOCK_SIZE * HEAD_SIZE)
    within = layer * (2 * KV_HEADS * BLOCK_SIZE * HEAD_SIZE) + (cell % BLOCK_SIZE) * HEAD_SIZE
    place = cache + block + within

    first_head = tl.program_id(1) * HEADS_AT_ONCE
    end_head = HEADS + 2 * KV_HEADS if NORM == _ROW_NORM else first_head + HEADS_AT_ONCE
    for start in range(first_head, end_head, HEADS_AT_ONCE):
        head = start + tl.arange(0, HEADS_AT_ONCE)
        is_query = head < HEADS
        is_value = head >= HEADS + KV_HEADS
        to_cache = (head >= HEADS) & (head < HEADS + 2 * KV_HEADS) & (cell >= 0)
        # V of a layer follows K, so the heads of V come right after the heads of K.
        source = row + head * HEAD_SIZE
        target = place + (head - HEADS).to(tl.int64) * (BLOCK_SIZE * HEAD_SIZE)

        there = (head < HEADS + 2 * KV_HEADS)[:, None] & in_pair[None, :]
        left = tl.load(source[:, None] + left_column[None, :], mask=there, other=0.0).to(tl.float32)
        right = tl.load(source[:, None] + right_column[None, :], mask=there, other=0.0).to(tl.float32)
        squares = tl.sum(left * left, 1) + tl.sum(right * right, 1)
        if REST_PADDED > 0:
            rest_column = 2 * PAIRS + tl.arange(0, REST_PADDED)
            in_rest = (head < HEADS + 2 * KV_HEADS)[:, None] & (rest_column < HEAD_SIZE)[None, :]
            rest = tl.load(source[:, None] + rest_column[None, :], mask=in_rest, other=0.0).to(tl.float32)
            squares += tl.sum(rest * rest, 1)

        if NORM != _NO_NORM:
            if NORM == _HEAD_NORM:
                factor = tl.rsqrt(squares / HEAD_SIZE + epsilon)
            else:
                factor = tl.where(is_query, query_divisor, key_divisor)
            factor = tl.where(is_value, 1.0, factor)[:, None]
            left *= factor * _norm_weights(
                query_norm, key_norm, head, left_column, in_pair, HEADS, KV_HEADS, HEAD_SIZE, NORM
            )
            right *= factor * _norm_weights(
                query_norm, key_norm, head, right_column, in_pair, HEADS, KV_HEADS, HEAD_SIZE, NORM
            )
            if REST_PADDED > 0:
                rest *= factor * _norm_weights(
                    query_norm,
                    key_norm,
                    head,
                    rest_column,
                    rest_column < HEAD_SIZE,
                    HEADS,
                    KV_HEADS,
                    HEAD_SIZE,
                    NORM,
                )

        keep = is_value[:, None]
        new_left = tl.where(keep, left, left * cosine[None, :] - right * sine[None, :])
        new_right = tl.where(keep, right, right * cosine[None, :] + left * sine[None, :])
        is_rotated = (head < HEADS + KV_HEADS)[:, None]
        cached = to_cache[:, None] & in_pair[None, :]
        new_left, new_right = new_left.to(qkv.dtype.element_ty), new_right.to(qkv.dtype.element_ty)
        tl.store(source[:, None] + left_column[None, :], new_left, mask=is_rotated & in_pair[None, :])
        tl.store(source[:, None] + right_column[None, :], new_right, mask=is_rotated & in_pair[None, :])
        tl.store(target[:, None] + left_column[None, :], new_left, mask=cached)
        tl.store(target[:, None] + right_column[None, :], new_right, mask=cached)
        if REST_PADDED > 0:
            new_rest = rest.to(qkv.dtype.element_ty)
            tl.store(source[:, None] + rest_column[None, :], new_rest, mask=in_rest & is_rotated)
            tl.store(target[:, None] + rest_column[None, :], new_rest, mask=in_rest & to_cache[:, None])


@triton.jit
def _sum_of_squares(row, SIZE: tl.constexpr):
    """The sum of squares of SIZE values, in float32."""
    sums = tl.zeros((_ROW_PIECE,), tl.float32)
    for start in range(0, SIZE, _ROW_PIECE):
        column = start + tl.arange(0, _ROW_PIECE)
        values = tl.load(row + column, mask=column < SIZE, other=0.0).to(tl.float32)
        sums += values * values
    return tl.sum(sums, 0)


@triton.jit
def _norm_weights(
    query_norm,
    key_norm,
    head,
    column,
    there,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    NORM: tl.constexpr,
):
    """Loads norm weights [heads, features]; they are 1 for the heads of V, which have no norm."""
    is_query = head < HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    if NORM == _ROW_NORM:
        query_place = head[:, None] * HEAD_SIZE + column[None, :]
        key_place = (head - HEADS)[:, None] * HEAD_SIZE + column[None, :]
    else:
        query_place = (head * 0)[:, None] + column[None, :]
        key_place = query_place
    of_query = tl.load(query_norm + query_place, mask=is_query[:, None] & there[None, :], other=0.0)
    of_key = tl.load(key_norm + key_place, mask=is_key[:, None] & there[None, :], other=0.0)
    of_query, of_key = of_query.to(tl.float32), of_key.to(tl.float32)
    return tl.where(is_query[:, None], of_query, tl.where(is_key[:, None], of_key, 1.0))
