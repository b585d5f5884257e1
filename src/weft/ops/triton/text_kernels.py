"""Kernels of text encoders: norms with a mean, activations, attention inside a text, means.

Every kernel sums in float32. K and V of a text are rows of the same step: there is no cache.
"""

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from weft.ops.base import AttentionPattern, AttentionShape
from weft.ops.triton.attention_tiles import empty_softmax, exponents, mean
from weft.ops.triton.device import (
    Device,
    ceil_divide,
    dot,
    let_next_begin,
    power_of_two,
    wait_for_previous,
)
from weft.ops.triton.rows import tanh

_ELEMENTS = 1024

Kind = Literal["silu", "gelu_tanh", "gelu", "tanh"]
KINDS: dict[Kind, int] = {"silu": 1, "gelu_tanh": 2, "gelu": 3, "tanh": 4}
"""Codes of the activations."""


@triton.jit
def _layer_norm(
    input,
    weight,
    bias,
    output,
    columns,
    epsilon,
    input_stride,
    output_stride,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Each row minus its mean, divided by its standard deviation, times the weight, plus the bias. One program per row."""
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    values = tl.load(input + row * input_stride + column, mask=mask, other=0.0).to(tl.float32)
    centred = tl.where(mask, values - tl.sum(values, 0) / columns, 0.0)
    variance = tl.sum(centred * centred, 0) / columns
    factors = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    values = centred * tl.rsqrt(variance + epsilon) * factors
    if HAS_BIAS:
        values += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + row * output_stride + column, values.to(output.dtype.element_ty), mask=mask)


def layer_norm(
    input: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, output: Tensor, device: Device
) -> None:
    columns, strides = input.shape[1], (input.stride(0), output.stride(0))
    block = power_of_two(columns)
    device.launch(
        _layer_norm,
        (len(input), 1, 1),
        (input, weight, weight if bias is None else bias, output, columns, epsilon, *strides),
        (columns, strides, input.dtype, weight.dtype, bias is None),
        lambda: {"BLOCK": block, "HAS_BIAS": bias is not None, "num_warps": max(1, min(16, block // 512))},
    )


@triton.jit
def _activate(
    input,
    output,
    columns,
    input_stride,
    output_stride,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The activation of `columns` values of each row; with GATED, times the `columns` values after them. Grid (rows,
    tiles of BLOCK columns)."""
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    source = input + row * input_stride + column
    values = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if KIND == 1:
        active = values / (1.0 + tl.exp(-values))
    elif KIND == 2:
        active = (
            0.5 * values * (1.0 + tanh(0.7978845608028654 * (values + 0.044715 * values * values * values)))
        )
    elif KIND == 3:
        active = 0.5 * values * (1.0 + tl.erf(values * 0.7071067811865476))
    else:
        active = tanh(values)
    if GATED:
        active *= tl.load(source + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + row * output_stride + column, active.to(output.dtype.element_ty), mask=mask)


def activate(input: Tensor, kind: Kind, is_gated: bool, output: Tensor, device: Device) -> None:
    """activation(input), or activation(first half of the columns) * second half."""
    columns, strides = output.shape[1], (input.stride(0), output.stride(0))
    device.launch(
        _activate,
        (len(output), ceil_divide(columns, _ELEMENTS), 1),
        (input, output, columns, *strides),
        (columns, strides, kind, is_gated, input.dtype),
        lambda: {"BLOCK": _ELEMENTS, "KIND": KINDS[kind], "GATED": is_gated, "num_warps": 4},
    )


QUERIES = 64
"""Tokens of one text that one program computes."""
_KEYS = 64


@triton.jit
def _attend_to_texts(
    qkv,
    output,
    tiles,
    stride,
    output_stride,
    scale,
    score_cap,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    CAPPED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Attention of ROWS tokens of one text and one head over the tokens of the text. Grid (tiles, heads). A tile has
    three numbers: the first token of its text, the end of the text, and its own first token."""
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    head = tl.program_id(1)
    tile = tiles + tl.program_id(0) * 3
    text, text_end, first = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    column = tl.arange(0, WIDTH)
    is_feature = (column < HEAD_SIZE)[None, :]
    token = first + tl.arange(0, ROWS)
    there = (token < text_end)[:, None] & is_feature
    features = head * HEAD_SIZE + column
    query = tl.load(qkv + token.to(tl.int64)[:, None] * stride + features[None, :], mask=there, other=0.0)
    kv_head = head // (HEADS // KV_HEADS)
    keys = qkv + (HEADS + kv_head) * HEAD_SIZE + column[None, :]
    values = keys + KV_HEADS * HEAD_SIZE

    begin, end = text, text_end
    if CAUSAL:
        end = tl.minimum(first + ROWS, text_end)
    if WINDOW > 0:
        begin = tl.maximum(text, first - WINDOW + 1)
        end = tl.minimum(end, first + ROWS + WINDOW - 1)

    peak, total, mixed = empty_softmax(ROWS, WIDTH)
    for start in range(begin, end, TILE):
        place = start + tl.arange(0, TILE)
        row = place.to(tl.int64)[:, None] * stride
        is_key = (place < end)[:, None] & is_feature
        key = tl.load(keys + row, mask=is_key, other=0.0)
        value = tl.load(values + row, mask=is_key, other=0.0)
        scores = dot(query, tl.trans(key), tl.zeros((ROWS, TILE), tl.float32))
        scores, factor = exponents(scores, scale, score_cap, CAPPED)
        seen = (place < end)[None, :]
        if CAUSAL:
            seen = seen & (place[None, :] <= token[:, None])
        if WINDOW > 0:
            seen = (
                seen & (place[None, :] > token[:, None] - WINDOW) & (place[None, :] < token[:, None] + WINDOW)
            )
        scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - highest[:, None])
        shrink = tl.exp2(peak - highest)
        total = total * shrink + tl.sum(weights, 1)
        mixed = dot(weights.to(value.dtype), value, mixed * shrink[:, None])
        peak = highest
    place = output + token.to(tl.int64)[:, None] * output_stride + features[None, :]
    tl.store(place, mean(total, mixed).to(output.dtype.element_ty), mask=there)


def attend_to_texts(
    qkv: Tensor,
    tiles: Tensor,
    shape: AttentionShape,
    pattern: AttentionPattern,
    output: Tensor,
    device: Device,
) -> None:
    """Attention of packed [Q | K | V] rows inside each text, after RoPE. `tiles`: int32 [tiles, 3]."""
    strides = (qkv.stride(0), output.stride(0))
    device.launch(
        _attend_to_texts,
        (len(tiles), shape.heads, 1),
        (qkv, output, tiles, *strides, shape.scale, shape.score_cap or 1.0),
        (qkv.dtype, strides, shape, pattern.window, pattern.causal),
        lambda: {
            "HEADS": shape.heads,
            "KV_HEADS": shape.kv_heads,
            "HEAD_SIZE": shape.head_size,
            "WIDTH": power_of_two(max(16, shape.head_size)),
            "ROWS": QUERIES,
            "TILE": _KEYS,
            "WINDOW": pattern.window or 0,
            "CAUSAL": pattern.causal,
            "CAPPED": shape.score_cap is not None,
            "num_warps": 4,
        },
    )


@triton.jit
def _mean_rows(
    input,
    starts,
    output,
    columns,
    input_stride,
    output_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The mean of the rows of each text. Grid (texts, tiles of BLOCK columns)."""
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    text = tl.program_id(0)
    begin, end = tl.load(starts + text), tl.load(starts + text + 1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < columns
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        there = (row < end)[:, None] & is_column[None, :]
        place = input + row.to(tl.int64)[:, None] * input_stride + column[None, :]
        sums += tl.sum(tl.load(place, mask=there, other=0.0).to(tl.float32), 0)
    means = sums / (end - begin).to(tl.float32)
    place = output + text.to(tl.int64) * output_stride + column
    tl.store(place, means.to(output.dtype.element_ty), mask=is_column)


def mean_rows(input: Tensor, starts: Tensor, output: Tensor, device: Device) -> None:
    """output[i] = the mean of the rows starts[i] to starts[i + 1] - 1."""
    columns, strides = input.shape[1], (input.stride(0), output.stride(0))
    device.launch(
        _mean_rows,
        (len(output), ceil_divide(columns, 64), 1),
        (input, starts, output, columns, *strides),
        (columns, strides, input.dtype, output.dtype),
        lambda: {"ROWS": 32, "BLOCK": 64, "num_warps": 4},
    )
