"""Products of rows with weights, with what stands before and behind them done on the way: norm, bias, gate, add.

one row        `_gemv`: every program reads a few rows of the weight and sums in float32
a few rows     `_tile`: a tile of the weight times all the rows, on tensor cores; weights are read once
more           cuBLAS, with norm and gate as kernels of their own
batch-invariant mode: `_tile` for any number of rows, norm and gate by rows, so that no order of summation depends on
how many rows there are

The two kernels are bound by how fast weights are read. So a first piece of them is asked for before the kernel in
front has ended, and the norm does not wait for its sum: (input * factors) @ weight is scaled by it at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.triton import rows
from weft.ops.triton.device import Device, dot, let_next_begin, wait_for_previous
from weft.ops.triton.rows import GATE_CODES, GateKind, gated
from weft.ops.triton.weights import Linear

SKINNY_TOKENS = 32
"""Up to here one kernel does everything around a product; above, cuBLAS is as fast and norms are done once."""


@dataclass(frozen=True)
class Tile:
    """What one program takes at a time."""

    tokens: int
    outputs: int
    inputs: int
    warps: int
    stages: int = 1


def gemv_tile(inputs: int) -> Tile:
    """Measured on an H200: 8 KiB of weights in flight for every program, rows in few pieces."""
    return Tile(1, 4, min(1024, triton.next_power_of_2(inputs)), 8)


def skinny_tile(tokens: int, outputs: int, inputs: int) -> Tile:
    """Measured on an H200: enough programs for every multiprocessor, and as long a piece of a row as then fits."""
    token_tile = 16 if tokens <= 16 else 32
    if outputs <= 2048:
        output_tile, input_tile = 16, 512
    elif outputs <= 8192:
        output_tile, input_tile = 32, 256
    else:
        output_tile, input_tile = 64, 128
    return Tile(token_tile, output_tile, _step(inputs, input_tile), 4, 4)


def invariant_tile(tokens: int, inputs: int) -> Tile:
    """Outputs and inputs are the same for any number of tokens. So is the sum for one token: tokens are the columns of
    an instruction, which do not meet."""
    token_tile = max(16, min(128, triton.next_power_of_2(tokens)))
    return Tile(token_tile, 64, _step(inputs, 64), 4, 4)


def _step(inputs: int, most: int) -> int:
    return max(16, min(most, triton.next_power_of_2(inputs)))


@triton.jit
def _load(places, mask, EVEN: tl.constexpr):
    """Weights are read once in a step: they leave the cache first."""
    if EVEN:
        return tl.load(places, eviction_policy="evict_first")
    else:
        return tl.load(places, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _gemv(
    input,
    norm_weight,
    weight,
    bias,
    output,
    outputs,
    epsilon,
    scale,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    BIAS: tl.constexpr,
    ADDED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    program = tl.program_id(0)
    row = program * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, STEP)
    places = weight + row[:, None].to(tl.int64) * INPUTS + column[None, :]
    is_row = row[:, None] < outputs
    weights = _load(places, is_row & (column[None, :] < INPUTS), EVEN).to(tl.float32)
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    values = tl.load(input + column, mask=column < INPUTS, other=0.0).to(tl.float32)
    squares = values * values
    if NORM:
        values *= tl.load(norm_weight + column, mask=column < INPUTS, other=0.0).to(tl.float32)
    products = weights * values[None, :]
    for start in range(STEP, INPUTS, STEP):
        place = start + column
        weights = _load(places + start, is_row & (place[None, :] < INPUTS), EVEN).to(tl.float32)
        values = tl.load(input + place, mask=place < INPUTS, other=0.0).to(tl.float32)
        if NORM:
            squares += values * values
            values *= tl.load(norm_weight + place, mask=place < INPUTS, other=0.0).to(tl.float32)
        products += weights * values[None, :]
    sums = tl.sum(products, 1)
    if NORM:
        sums *= tl.rsqrt(tl.sum(squares, 0) / INPUTS + epsilon)
    if BIAS:
        sums += tl.load(bias + row, mask=row < outputs, other=0.0).to(tl.float32)
    if GATE:
        gate, up = tl.split(tl.reshape(sums, (ROWS // 2, 2)))
        pair = program * (ROWS // 2) + tl.arange(0, ROWS // 2)
        tl.store(output + pair, gated(gate, up, GATE).to(output.dtype.element_ty), mask=pair < outputs // 2)
    else:
        if ADDED:
            before = tl.load(output + row, mask=row < outputs, other=0.0).to(tl.float32)
            sums = before + sums * scale
        tl.store(output + row, sums.to(output.dtype.element_ty), mask=row < outputs)


@triton.jit
def _factored(values, squares, norm_weight, place, NORM: tl.constexpr, INPUTS: tl.constexpr):
    """A tile [inputs, tokens] times the norm's factors, and the sums of squares with the tile's own."""
    if NORM:
        wide = values.to(tl.float32)
        factors = tl.load(norm_weight + place, mask=place < INPUTS, other=0.0).to(tl.float32)
        return (wide * factors[:, None]).to(values.dtype), squares + tl.sum(wide * wide, 0)
    else:
        return values, squares


@triton.jit(do_not_specialize=["tokens"])
def _tile(
    input,
    norm_weight,
    weight,
    bias,
    output,
    tokens,
    outputs,
    epsilon,
    scale,
    input_stride,
    output_stride,
    INPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    BIAS: tl.constexpr,
    ADDED: tl.constexpr,
    EARLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    program = tl.program_id(0)
    row = program * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, STEP)
    places = weight + row[:, None].to(tl.int64) * INPUTS + column[None, :]
    is_row = row[:, None] < outputs
    is_token = token[None, :] < tokens
    inputs = input + token[None, :].to(tl.int64) * input_stride + column[:, None]
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    FIRST: tl.constexpr = STEP if EARLY else 0
    if EARLY:
        # Asked for before the wait and used after the loop, so that the loop's own pipeline fills at once.
        early = _load(places, is_row & (column[None, :] < INPUTS), EVEN)
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    for start in tl.range(FIRST, INPUTS, STEP, num_stages=STAGES):
        place = start + column
        weights = _load(places + start, is_row & (place[None, :] < INPUTS), EVEN)
        if EVEN:
            values = tl.load(inputs + start, mask=is_token, other=0.0)
        else:
            values = tl.load(inputs + start, mask=is_token & (place[:, None] < INPUTS), other=0.0)
        values, squares = _factored(values, squares, norm_weight, place, NORM, INPUTS)
        sums = dot(weights, values, sums)
    if EARLY:
        values = tl.load(inputs, mask=is_token & (column[:, None] < INPUTS), other=0.0)
        values, squares = _factored(values, squares, norm_weight, column, NORM, INPUTS)
        sums = dot(early, values, sums)
    if NORM:
        sums *= tl.rsqrt(squares / INPUTS + epsilon)[None, :]
    if BIAS:
        sums += tl.load(bias + row, mask=row < outputs, other=0.0).to(tl.float32)[:, None]
    rows_out = output + token[None, :].to(tl.int64) * output_stride
    if GATE:
        pairs = tl.permute(tl.reshape(sums, (ROWS // 2, 2, TOKENS)), (0, 2, 1))
        gate, up = tl.split(pairs)
        pair = program * (ROWS // 2) + tl.arange(0, ROWS // 2)[:, None]
        gates = gated(gate, up, GATE).to(output.dtype.element_ty)
        tl.store(rows_out + pair, gates, mask=(pair < outputs // 2) & is_token)
    else:
        if ADDED:
            before = tl.load(rows_out + row[:, None], mask=is_row & is_token, other=0.0)
            sums = before.to(tl.float32) + sums * scale
        tl.store(rows_out + row[:, None], sums.to(output.dtype.element_ty), mask=is_row & is_token)


@dataclass(frozen=True, eq=False)
class Product:
    """gate(norm(input) @ weight + bias), stored, or added to the output times `scale`."""

    layer: Linear
    device: Device
    norm: tuple[Tensor, float] | None = None
    gate: GateKind | None = None
    added: bool = False
    scale: float = 1.0
    invariant: bool = False

    def run(
        self, input: Tensor, output: Tensor, normed: Tensor | None = None, ungated: Tensor | None = None
    ) -> None:
        """`normed` and `ungated` take what a norm and a gate need in between where they are kernels of their own."""
        tokens = len(input)
        if not self.invariant and tokens == 1:
            self.run_gemv(input, output, gemv_tile(self.layer.inputs))
        elif not self.invariant and tokens <= SKINNY_TOKENS:
            self.run_tile(input, output, skinny_tile(tokens, self.layer.outputs, self.layer.inputs))
        else:
            self.run_apart(input, output, normed, ungated)

    def run_gemv(self, input: Tensor, output: Tensor, tile: Tile) -> None:
        layer = self.layer
        weight, epsilon = (layer.weight, 0.0) if self.norm is None else self.norm
        _gemv[(triton.cdiv(layer.outputs, tile.outputs),)](
            input,
            weight,
            layer.weight,
            layer.weight if layer.bias is None else layer.bias,
            output,
            layer.outputs,
            epsilon,
            self.scale,
            layer.inputs,
            tile.outputs,
            tile.inputs,
            layer.outputs % tile.outputs == 0 and layer.inputs % tile.inputs == 0,
            self.norm is not None,
            GATE_CODES[self.gate],
            layer.bias is not None,
            self.added,
            **self.device.launch_options(),
            num_warps=tile.warps,
        )

    def run_tile(self, input: Tensor, output: Tensor, tile: Tile, early: bool = True) -> None:
        norm, gate = self.norm, self.gate
        self._launch_tile(input, output, tile, norm, gate, self.added, early)

    def run_apart(self, input: Tensor, output: Tensor, normed: Tensor | None, ungated: Tensor | None) -> None:
        """The norm and the gate as kernels of their own."""
        if self.norm is not None:
            assert normed is not None, "the norm needs a place for its rows"
            weight, epsilon = self.norm
            rows.rms_norm(input, weight, epsilon, normed, self.device)
            input = normed
        if self.gate is None:
            self._multiply(input, output)
        else:
            assert ungated is not None, "the gate needs a place for what it reads"
            self._multiply(input, ungated)
            rows.gate_rows(ungated, self.gate, output, self.device)

    def _multiply(self, input: Tensor, output: Tensor) -> None:
        weight, bias = self.layer.weight, self.layer.bias
        if self.invariant:
            tile = invariant_tile(len(input), self.layer.inputs)
            self._launch_tile(input, output, tile, None, None, self.added, False)
        elif self.added:
            output.addmm_(input, weight.T, alpha=self.scale)
            if bias is not None:
                rows.add(output, bias, self.scale, self.device)
        elif bias is not None:
            torch.addmm(bias, input, weight.T, out=output)
        else:
            torch.mm(input, weight.T, out=output)

    def _launch_tile(
        self,
        input: Tensor,
        output: Tensor,
        tile: Tile,
        norm: tuple[Tensor, float] | None,
        gate: GateKind | None,
        added: bool,
        early: bool,
    ) -> None:
        layer, tokens = self.layer, len(input)
        weight, epsilon = (layer.weight, 0.0) if norm is None else norm
        _tile[(triton.cdiv(layer.outputs, tile.outputs), triton.cdiv(tokens, tile.tokens))](
            input,
            weight,
            layer.weight,
            layer.weight if layer.bias is None else layer.bias,
            output,
            tokens,
            layer.outputs,
            epsilon,
            self.scale,
            input.stride(0),
            output.stride(0),
            layer.inputs,
            tile.tokens,
            tile.outputs,
            tile.inputs,
            tile.stages,
            layer.outputs % tile.outputs == 0 and layer.inputs % tile.inputs == 0,
            norm is not None,
            GATE_CODES[gate],
            layer.bias is not None,
            added,
            early,
            **self.device.launch_options(),
            num_warps=tile.warps,
        )
