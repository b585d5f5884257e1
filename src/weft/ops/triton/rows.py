"""Kernels on single activation rows: look up, normalise, gate, add, scale.

Each kernel sums in float32, in an order that depends only on the width of a row. So a row has the same bits in any batch.
There may be gaps between rows (strided views); the values of a row are contiguous.
"""

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from weft.ops.triton.device import Device, ceil_divide, let_next_begin, power_of_two, wait_for_previous

GateKind = Literal["silu_mul", "gelu_tanh_mul"]
GATE_CODES: dict[GateKind | None, int] = {None: 0, "silu_mul": 1, "gelu_tanh_mul": 2}
"""Gate codes of the kernels."""

_ELEMENTS = 1024


@triton.jit
def tanh(values):
    """tanh(values). It is correct for very large values too: exp overflows to infinity, and the quotient is 0."""
    return 1.0 - 2.0 / (tl.exp(2.0 * values) + 1.0)


@triton.jit
def gated(gate, up, GATE: tl.constexpr):
    """silu(gate) * up, or gelu_tanh(gate) * up."""
    if GATE == 1:
        return gate / (1.0 + tl.exp(-gate)) * up
    return 0.5 * gate * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))) * up


@triton.jit
def _look_up(
    table,
    indices,
    output,
    columns,
    scale,
    table_stride,
    output_stride,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """output[i] = table[indices[i]] * scale. Grid (rows, tiles of BLOCK columns)."""
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    row = tl.program_id(0)
    source = tl.load(indices + row).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    values = tl.load(table + source * table_stride + column, mask=mask).to(tl.float32) * scale
    place = output + row.to(tl.int64) * output_stride + column
    tl.store(place, values.to(output.dtype.element_ty), mask=mask)


def look_up(table: Tensor, indices: Tensor, output: Tensor, device: Device, scale: float = 1.0) -> None:
    """output[i] = table[indices[i]] * scale"""
    columns, strides = table.shape[1], (table.stride(0), output.stride(0))
    device.launch(
        _look_up,
        (output.shape[0], ceil_divide(columns, _ELEMENTS), 1),
        (table, indices, output, columns, scale, *strides),
        (columns, strides, table.dtype, indices.data_ptr() % 16),
        lambda: {"BLOCK": _ELEMENTS, "num_warps": 4},
    )


@triton.jit
def _rms_norm(
    input,
    weight,
    output,
    columns,
    epsilon,
    scale,
    input_stride,
    output_stride,
    BLOCK: tl.constexpr,
    ADDED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The RMS norm of each row of `input`, stored in `output`, or multiplied by `scale` and added to it. One program
    per row."""
    column = tl.arange(0, BLOCK)
    mask = column < columns
    factors = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    # The next kernel, a product, may begin at once: it needs as long to start and to request its first weights as this
    # norm needs to run. It reads only weights before it waits for this kernel. See `let_next_begin`.
    let_next_begin(DEPENDENT)
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    values = tl.load(input + row * input_stride + column, mask=mask, other=0.0).to(tl.float32)
    mean_square = tl.sum(values * values, 0) / columns
    values = values * tl.rsqrt(mean_square + epsilon) * factors
    place = output + row * output_stride + column
    if ADDED:
        values = values * scale + tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, values.to(output.dtype.element_ty), mask=mask)


def rms_norm(
    input: Tensor,
    weight: Tensor,
    epsilon: float,
    output: Tensor,
    device: Device,
    added: bool = False,
    scale: float = 1.0,
) -> None:
    """Stores the norm of every row in `output`; with `added`, output += norm * scale."""
    columns, strides = input.shape[1], (input.stride(0), output.stride(0))
    block = power_of_two(columns)
    device.launch(
        _rms_norm,
        (output.shape[0], 1, 1),
        (input, weight, output, columns, epsilon, scale, *strides),
        (columns, strides, weight.dtype, input.dtype, added),
        lambda: {"BLOCK": block, "ADDED": added, "num_warps": _warps(block)},
    )


@triton.jit
def _gate_rows(
    input,
    output,
    columns,
    input_stride,
    output_stride,
    BLOCK: tl.constexpr,
    GATE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The gate of input [rows, 2 * columns], with interleaved gate and up columns. Grid (rows, tiles of BLOCK
    columns)."""
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    pair = 2 * first + tl.arange(0, 2 * BLOCK)
    both = tl.load(input + row * input_stride + pair, mask=pair < 2 * columns, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(both, (BLOCK, 2)))
    column = first + tl.arange(0, BLOCK)
    values = gated(gate, up, GATE).to(output.dtype.element_ty)
    tl.store(output + row * output_stride + column, values, mask=column < columns)


def gate_rows(input: Tensor, kind: GateKind, output: Tensor, device: Device) -> None:
    """Applies the gate to rows with interleaved gate and up columns."""
    columns, strides = output.shape[1], (input.stride(0), output.stride(0))
    device.launch(
        _gate_rows,
        (output.shape[0], ceil_divide(columns, _ELEMENTS), 1),
        (input, output, columns, *strides),
        (columns, strides, kind, input.dtype),
        lambda: {"BLOCK": _ELEMENTS, "GATE": GATE_CODES[kind], "num_warps": 4},
    )


@triton.jit
def _add(
    left,
    right,
    columns,
    scale,
    left_stride,
    right_stride,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """left += right * scale. Grid (rows, tiles of BLOCK columns)."""
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    place = left + row * left_stride + column
    values = tl.load(right + row * right_stride + column, mask=mask).to(tl.float32) * scale
    values += tl.load(place, mask=mask).to(tl.float32)
    tl.store(place, values.to(left.dtype.element_ty), mask=mask)


def add(left: Tensor, right: Tensor, scale: float, device: Device) -> None:
    """left += right * scale; a vector `right` is added to every row."""
    columns = left.shape[1]
    strides = (left.stride(0), right.stride(0) if right.ndim == 2 else 0)
    device.launch(
        _add,
        (left.shape[0], ceil_divide(columns, _ELEMENTS), 1),
        (left, right, columns, scale, *strides),
        (columns, strides, left.dtype, right.dtype),
        lambda: {"BLOCK": _ELEMENTS, "num_warps": 4},
    )


@triton.jit
def _scale_and_cap(
    values,
    columns,
    scale,
    cap,
    stride,
    BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """values = cap * tanh(values * scale / cap), in place. Grid (rows, tiles of BLOCK columns)."""
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    place = values + row * stride + column
    scaled = tl.load(place, mask=mask).to(tl.float32) * scale
    if CAPPED:
        scaled = tanh(scaled / cap) * cap
    tl.store(place, scaled.to(values.dtype.element_ty), mask=mask)


def scale_and_cap(values: Tensor, scale: float, cap: float | None, device: Device) -> None:
    """values = cap * tanh(values * scale / cap), or values * scale without a cap; in place."""
    columns, stride = values.shape[1], values.stride(0)
    device.launch(
        _scale_and_cap,
        (values.shape[0], ceil_divide(columns, _ELEMENTS), 1),
        (values, columns, scale, 1.0 if cap is None else cap, stride),
        (columns, stride, values.dtype, cap is not None),
        lambda: {"BLOCK": _ELEMENTS, "CAPPED": cap is not None, "num_warps": 4},
    )


def _warps(block: int) -> int:
    """The number of warps for a program that holds a row of `block` values. Each thread then has two 16-byte loads in
    flight."""
    return max(1, min(16, block // 512))
