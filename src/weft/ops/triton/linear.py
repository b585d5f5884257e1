"""Products of rows with weights, fused with the operations around them: norm, bias, gate, add.

    one row      `_gemv`: each program reads a few rows of the weight and sums in float32. Also used for up to four
                 rows if the weight is small
    a few rows   `_tile`: a tile of the weight times all rows, on tensor cores. Weights are read once
    more rows    cuBLAS, with norm and gate as separate kernels. Also used for some shapes with few rows: see
                 `linear_tiles`

In the batch-invariant mode `_tile` computes any number of rows, and the norm is a separate kernel. So no summation
order depends on the number of rows.

Both kernels are limited by the speed of reading weights. So they request the first weights before the previous kernel
has ended. A fused norm does not wait for its sum of squares either: the kernel computes (input * norm weights) @ weight
first, and scales the result at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.triton import rows
from weft.ops.triton.device import (
    Device,
    ceil_divide,
    dot,
    let_next_begin,
    let_next_begin_if,
    prefetch_rows,
    wait_for_previous,
)
from weft.ops.triton.linear_tiles import MOST_SKINNY, Tile, gemv_tile, invariant_tile, skinny_tile
from weft.ops.triton.rows import GATE_CODES, GateKind, gated
from weft.ops.triton.weights import Linear


@triton.jit
def _load(places, mask, EVEN: tl.constexpr):
    """Loads weights. They are read once in a step, so they should be the first data that the L2 cache evicts."""
    if EVEN:
        return tl.load(places, eviction_policy="evict_first")
    else:
        return tl.load(places, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _prefetch_weights(
    weight,
    row,
    outputs,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    FROM: tl.constexpr,
    COUNT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Prefetches the next COUNT weights of each row of a program into the L2 cache, while the program waits."""
    WHOLE: tl.constexpr = INPUTS * weight.dtype.element_ty.primitive_bitwidth % 128 == 0
    if DEPENDENT and COUNT > 0 and FROM < INPUTS and WHOLE:
        first = weight + row.to(tl.int64) * INPUTS + FROM
        prefetch_rows(first, INPUTS, tl.minimum(ROWS, outputs - row), min(COUNT, INPUTS - FROM))


@triton.jit
def _empty():
    """An empty tuple. The values of a few tokens are kept in a tuple that grows by one value per token."""
    return ()


@triton.jit
def _products(
    weights,
    input,
    input_stride,
    last_token,
    norm_weight,
    place,
    INPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    NORM: tl.constexpr,
):
    """Multiplies weights [outputs, inputs] element by element with the inputs of each token at the indices `place`. The
    caller sums the products. With a norm, also returns the squares of these inputs."""
    products, squares = _empty(), _empty()
    if NORM:
        factors = tl.load(norm_weight + place, mask=place < INPUTS, other=0.0).to(tl.float32)
    elif TOKENS > 1:
        # Each thread loads the inputs that it multiplies: exchanging the inputs of several tokens between threads takes
        # longer.
        place = tl.broadcast_to(place[None, :], weights.shape)
    for token in tl.static_range(TOKENS):
        source = input if token == 0 else input + tl.minimum(token, last_token) * input_stride
        values = tl.load(source + place, mask=place < INPUTS, other=0.0).to(tl.float32)
        if NORM:
            squares += (values * values,)
            values *= factors
        products += (weights * values,)
    return products, squares


@triton.jit
def _add_each(left, right):
    """Adds two tuples element by element."""
    sums = _empty()
    for index in tl.static_range(len(left)):
        sums += (left[index] + right[index],)
    return sums


@triton.jit(do_not_specialize=["last_token"])
def _gemv(
    input,
    norm_weight,
    weight,
    bias,
    output,
    last_token,
    outputs,
    epsilon,
    scale,
    input_stride,
    output_stride,
    INPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    BIAS: tl.constexpr,
    ADDED: tl.constexpr,
    AHEAD: tl.constexpr,
    RELEASE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """output [tokens, outputs] = input [tokens, INPUTS] @ weight [outputs, INPUTS]^T for up to TOKENS tokens, without
    tensor cores. A program computes ROWS outputs. Tokens past the last one repeat the last one and are not
    stored. AHEAD and RELEASE: see `linear_tiles.Tile`."""
    program = tl.program_id(0)
    row = program * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, STEP)
    places = weight + row[:, None].to(tl.int64) * INPUTS + column[None, :]
    is_row = row[:, None] < outputs
    weights = _load(places, is_row & (column[None, :] < INPUTS), EVEN).to(tl.float32)
    _prefetch_weights(weight, program * ROWS, outputs, INPUTS, ROWS, STEP, AHEAD, DEPENDENT)
    wait_for_previous(DEPENDENT)
    if RELEASE < 0:
        let_next_begin(DEPENDENT)
    before = _empty()
    if ADDED:
        for token in tl.static_range(TOKENS):
            there = (row < outputs) & (token <= last_token)
            before += (tl.load(output + token * output_stride + row, mask=there, other=0.0),)
    products, squares = _products(
        weights, input, input_stride, last_token, norm_weight, column, INPUTS, TOKENS, NORM
    )
    for start in range(STEP, INPUTS, STEP):
        place = start + column
        weights = _load(places + start, is_row & (place[None, :] < INPUTS), EVEN).to(tl.float32)
        more, more_squares = _products(
            weights, input, input_stride, last_token, norm_weight, place, INPUTS, TOKENS, NORM
        )
        products = _add_each(products, more)
        squares = _add_each(squares, more_squares)
    if RELEASE >= 0:
        let_next_begin(DEPENDENT)
    for token in tl.static_range(TOKENS):
        sums = tl.sum(products[token], 1)
        if NORM:
            sums *= tl.rsqrt(tl.sum(squares[token], 0) / INPUTS + epsilon)
        if BIAS:
            sums += tl.load(bias + row, mask=row < outputs, other=0.0).to(tl.float32)
        row_out = output + token * output_stride
        if GATE:
            gate, up = tl.split(tl.reshape(sums, (ROWS // 2, 2)))
            pair = program * (ROWS // 2) + tl.arange(0, ROWS // 2)
            there = (pair < outputs // 2) & (token <= last_token)
            tl.store(row_out + pair, gated(gate, up, GATE).to(output.dtype.element_ty), mask=there)
        else:
            if ADDED:
                sums = before[token].to(tl.float32) + sums * scale
            there = (row < outputs) & (token <= last_token)
            tl.store(row_out + row, sums.to(output.dtype.element_ty), mask=there)


@triton.jit
def _factored(values, squares, norm_weight, place, NORM: tl.constexpr, INPUTS: tl.constexpr):
    """Multiplies a tile [inputs, tokens] by the norm's weights, and adds the squares of the tile to `squares`."""
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
    AHEAD: tl.constexpr,
    RELEASE: tl.constexpr,
    TOGETHER: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """output [tokens, outputs] = input [tokens, INPUTS] @ weight [outputs, INPUTS]^T, with norm, bias, gate and add, on
    tensor cores. A program computes ROWS outputs of TOKENS tokens. Tokens are the columns of the product, because
    tensor cores allow as few as eight columns."""
    program = tl.program_id(0)
    token_program = tl.program_id(1)
    if TOGETHER > 1:
        token_program, program = tl.swizzle2d(
            token_program, program, tl.num_programs(1), tl.num_programs(0), TOGETHER
        )
    row = program * ROWS + tl.arange(0, ROWS)
    token = token_program * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, STEP)
    places = weight + row[:, None].to(tl.int64) * INPUTS + column[None, :]
    is_row = row[:, None] < outputs
    is_token = token[None, :] < tokens
    inputs = input + token[None, :].to(tl.int64) * input_stride + column[:, None]
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    FIRST: tl.constexpr = STEP if EARLY else 0
    if EARLY:
        # The first weights are loaded before the wait but used after the loop, so that they do not delay the loop's own
        # pipeline.
        early = _load(places, is_row & (column[None, :] < INPUTS), EVEN)
    _prefetch_weights(weight, program * ROWS, outputs, INPUTS, ROWS, FIRST, AHEAD, DEPENDENT)
    wait_for_previous(DEPENDENT)
    if RELEASE < 0:
        let_next_begin(DEPENDENT)
    rows_out = output + token[None, :].to(tl.int64) * output_stride
    if ADDED:
        before = tl.load(rows_out + row[:, None], mask=is_row & is_token, other=0.0)
    for start in tl.range(FIRST, INPUTS, STEP, num_stages=STAGES):
        place = start + column
        if RELEASE > 0:
            let_next_begin_if(start >= INPUTS - RELEASE * STEP, DEPENDENT)
        weights = _load(places + start, is_row & (place[None, :] < INPUTS), EVEN)
        if EVEN:
            values = tl.load(inputs + start, mask=is_token, other=0.0)
        else:
            values = tl.load(inputs + start, mask=is_token & (place[:, None] < INPUTS), other=0.0)
        values, squares = _factored(values, squares, norm_weight, place, NORM, INPUTS)
        sums = dot(weights, values, sums)
    if RELEASE >= 0:
        let_next_begin(DEPENDENT)
    if EARLY:
        values = tl.load(inputs, mask=is_token & (column[:, None] < INPUTS), other=0.0)
        values, squares = _factored(values, squares, norm_weight, column, NORM, INPUTS)
        sums = dot(early, values, sums)
    if NORM:
        sums *= tl.rsqrt(squares / INPUTS + epsilon)[None, :]
    if BIAS:
        sums += tl.load(bias + row, mask=row < outputs, other=0.0).to(tl.float32)[:, None]
    if GATE:
        pairs = tl.permute(tl.reshape(sums, (ROWS // 2, 2, TOKENS)), (0, 2, 1))
        gate, up = tl.split(pairs)
        pair = program * (ROWS // 2) + tl.arange(0, ROWS // 2)[:, None]
        gates = gated(gate, up, GATE).to(output.dtype.element_ty)
        tl.store(rows_out + pair, gates, mask=(pair < outputs // 2) & is_token)
    else:
        if ADDED:
            sums = before.to(tl.float32) + sums * scale
        tl.store(rows_out + row[:, None], sums.to(output.dtype.element_ty), mask=is_row & is_token)


Places = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""The buffers of a product: input, output, normed input, ungated output."""


def padded_rows(rows: int) -> int:
    """The number of rows, padded for cuBLAS. For each new size cuBLAS selects a kernel and may load it while the host
    waits. Without padding, nearly every step with prompts would have a new size. cuBLAS computes in tiles, so
    padding costs almost nothing."""
    step = next(step for most, step in _PADDED_TO if rows <= most)
    return ceil_divide(rows, step) * step


# (limit, multiple): a number of rows up to `limit` is rounded up to a multiple of `multiple`
_PADDED_TO = ((16, 8), (64, 16), (256, 32), (1024, 64), (4096, 128), (1 << 31, 256))


@dataclass(frozen=True, eq=False)
class Product:
    """Computes gate(norm(input) @ weight + bias). The result is stored, or multiplied by `scale` and added to the
    output."""

    layer: Linear
    device: Device
    norm: tuple[Tensor, float] | None = None
    gate: GateKind | None = None
    added: bool = False
    scale: float = 1.0
    invariant: bool = False

    def run(
        self,
        input: Tensor,
        output: Tensor,
        normed: Tensor | None = None,
        ungated: Tensor | None = None,
        padded: Places | None = None,
    ) -> None:
        """Computes the product with the kernel that is fastest for this number of rows.

        `normed` and `ungated` are buffers for norm and gate as separate kernels. `padded` are the same four tensors,
        extended to `padded_rows` rows with any content.
        """
        tokens, layer, has_norm = len(input), self.layer, self.norm is not None
        sizes = (tokens, layer.outputs, layer.inputs)
        if self.invariant:
            self.run_tile(input, output, invariant_tile(*sizes, layer.weight.dtype), normed)
        elif tokens <= MOST_SKINNY and (tile := gemv_tile(*sizes, has_norm)) is not None:
            self.run_gemv(input, output, tile)
        elif tokens <= MOST_SKINNY and (tile := skinny_tile(*sizes, has_norm)) is not None:
            self.run_tile(input, output, tile, normed)
        else:
            self.run_apart(input, output, normed, ungated, padded)

    @cached_property
    def _kind(self) -> tuple[object, ...]:
        """The values that decide how the kernels are compiled: layers of one shape share them."""
        layer = self.layer
        norm_dtype = None if self.norm is None else self.norm[0].dtype
        sizes = (layer.outputs, layer.inputs, layer.weight.dtype, layer.bias is None)
        return (*sizes, norm_dtype, self.gate, self.added)

    @cached_property
    def _transposed(self) -> Tensor:
        return self.layer.weight.T

    def run_gemv(self, input: Tensor, output: Tensor, tile: Tile) -> None:
        layer, last_token = self.layer, len(input) - 1
        weight, epsilon = (layer.weight, 0.0) if self.norm is None else self.norm
        bias = layer.weight if layer.bias is None else layer.bias
        sizes = (last_token, layer.outputs, epsilon, self.scale, input.stride(0), output.stride(0))
        self.device.launch(
            _gemv,
            (ceil_divide(layer.outputs, tile.outputs), 1, 1),
            (input, weight, layer.weight, bias, output, *sizes),
            (self._kind, tile, output.dtype, sizes[-2:], input.data_ptr() % 16),
            lambda: {
                "INPUTS": layer.inputs,
                "TOKENS": tile.tokens,
                "ROWS": tile.outputs,
                "STEP": tile.inputs,
                "EVEN": layer.outputs % tile.outputs == 0 and layer.inputs % tile.inputs == 0,
                "NORM": self.norm is not None,
                "GATE": GATE_CODES[self.gate],
                "BIAS": layer.bias is not None,
                "ADDED": self.added,
                "AHEAD": tile.ahead,
                "RELEASE": tile.release,
                "num_warps": tile.warps,
            },
        )

    def run_tile(self, input: Tensor, output: Tensor, tile: Tile, normed: Tensor | None = None) -> None:
        """Runs `_tile`. If the tile does not have the norm inside, a separate kernel computes the norm before."""
        norm = self.norm
        if not tile.norm_inside:
            input, norm = self._normalised(input, normed), None
        self._launch_tile(input, output, tile, norm, self.gate)

    def run_apart(
        self,
        input: Tensor,
        output: Tensor,
        normed: Tensor | None,
        ungated: Tensor | None,
        padded: Places | None = None,
    ) -> None:
        """Runs cuBLAS, with norm and gate as separate kernels."""
        source, target, padded_normed, inner = padded or (input, output, normed, ungated)
        if self.norm is not None:
            assert padded_normed is not None, "the norm needs a buffer for its rows"
            self._normalised(input, normed)
            source = padded_normed
        if self.gate is None:
            self._multiply(source, target)
        else:
            assert ungated is not None and inner is not None, "the gate needs a buffer for its input"
            self._multiply(source, inner)
            rows.gate_rows(ungated, self.gate, output, self.device)

    def _normalised(self, input: Tensor, normed: Tensor | None) -> Tensor:
        """Runs the norm as a separate kernel that writes to `normed`. Without a norm, returns the input."""
        if self.norm is None:
            return input
        assert normed is not None, "the norm needs a buffer for its rows"
        weight, epsilon = self.norm
        rows.rms_norm(input, weight, epsilon, normed, self.device)
        return normed

    def _multiply(self, input: Tensor, output: Tensor) -> None:
        weight, bias = self._transposed, self.layer.bias
        if self.added:
            output.addmm_(input, weight, alpha=self.scale)
            if bias is not None:
                rows.add(output, bias, self.scale, self.device)
        elif bias is not None:
            torch.addmm(bias, input, weight, out=output)
        else:
            torch.mm(input, weight, out=output)

    def _launch_tile(
        self,
        input: Tensor,
        output: Tensor,
        tile: Tile,
        norm: tuple[Tensor, float] | None,
        gate: GateKind | None,
    ) -> None:
        layer, tokens = self.layer, len(input)
        weight, epsilon = (layer.weight, 0.0) if norm is None else norm
        bias = layer.weight if layer.bias is None else layer.bias
        sizes = (tokens, layer.outputs, epsilon, self.scale, input.stride(0), output.stride(0))
        self.device.launch(
            _tile,
            (ceil_divide(layer.outputs, tile.outputs), ceil_divide(tokens, tile.tokens), 1),
            (input, weight, layer.weight, bias, output, *sizes),
            (self._kind, tile, norm is None, gate, output.dtype, sizes[-2:], input.data_ptr() % 16),
            lambda: {
                "INPUTS": layer.inputs,
                "TOKENS": tile.tokens,
                "ROWS": tile.outputs,
                "STEP": tile.inputs,
                "STAGES": tile.stages,
                "EVEN": layer.outputs % tile.outputs == 0 and layer.inputs % tile.inputs == 0,
                "NORM": norm is not None,
                "GATE": GATE_CODES[gate],
                "BIAS": layer.bias is not None,
                "ADDED": self.added,
                "EARLY": tile.early,
                "AHEAD": tile.ahead,
                "RELEASE": tile.release,
                "TOGETHER": tile.together,
                "num_warps": tile.warps,
            },
        )
