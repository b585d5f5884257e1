"""Compares the products of each kernel with numpy."""

from __future__ import annotations

from dataclasses import replace
from itertools import product as every

import numpy as np
import pytest
import torch

from weft.ops.reference import Linear as ReferenceLinear
from weft.ops.reference import ReferenceOps
from weft.ops.triton.device import Device
from weft.ops.triton.linear import Product
from weft.ops.triton.linear_tiles import MOST_SKINNY, Tile, gemv_tile, skinny_tile
from weft.ops.triton.weights import Linear, interleave_halves

REFERENCE = ReferenceOps()
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 3e-2}
EPSILON = 1e-3

# 1, 2 and 3: without tensor cores, the last one padded; 5 and 16: a tile, the second one full; 33 and 70: tiles, or
# cuBLAS
TOKENS = [1, 2, 3, 5, 16, 33, 70]

# Sizes that are not multiples of the tiles, and sizes that are.
SIZES = [(40, 72), (64, 128)]


class Case:
    """A product of random numbers, on the device and in numpy."""

    def __init__(
        self,
        tokens: int,
        outputs: int,
        inputs: int,
        device: Device,
        dtype: torch.dtype = torch.float32,
        *,
        norm: bool = False,
        bias: bool = False,
        gate: str | None = None,
        added: bool = False,
        invariant: bool = False,
    ) -> None:
        draw = np.random.default_rng(tokens + outputs)
        self.dtype = dtype
        self.values = draw.standard_normal((tokens, inputs)).astype(np.float32)
        self.weight = (draw.standard_normal((outputs, inputs)) * inputs**-0.5).astype(np.float32)
        self.bias = draw.standard_normal(outputs).astype(np.float32) if bias else None
        self.factors = draw.standard_normal(inputs).astype(np.float32) if norm else None
        self.before = draw.standard_normal((tokens, outputs)).astype(np.float32) if added else None
        self.gate = gate
        self.scale = 0.4 if added else 1.0

        def put(array: np.ndarray | None, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.from_numpy(np.zeros(0) if array is None else array.copy()).to(
                device.torch_device, dtype
            )

        layer = Linear(put(self.weight), put(self.bias) if bias else None)
        if gate is not None:
            layer.interleave_gate()
        normal = (put(self.factors, torch.float32), EPSILON) if norm else None
        self.product = Product(layer, device, normal, gate, added, self.scale, invariant)  # type: ignore[arg-type]
        self.input = put(self.values)
        columns = outputs if gate is None else outputs // 2
        self.output = put(self.before) if added else device.empty(tokens, columns, dtype=dtype)
        self.normed = device.empty(tokens, inputs, dtype=dtype)
        self.ungated = device.empty(tokens, outputs, dtype=dtype)

    def run(self) -> None:
        self.product.run(self.input, self.output, self.normed, self.ungated)

    def check(self) -> None:
        values = self.values
        if self.factors is not None:
            values = REFERENCE.rms_norm(values, self.factors, EPSILON)
        theirs = REFERENCE.linear(values, ReferenceLinear(self.weight, self.bias))
        if self.gate is not None:
            theirs = getattr(REFERENCE, self.gate)(theirs)
        if self.before is not None:
            theirs = self.before + theirs * self.scale
        error = np.abs(self.output.float().cpu().numpy() - theirs).max() / np.abs(theirs).max()
        assert error < TOLERANCE[self.dtype]


@pytest.mark.parametrize(("tokens", "sizes"), list(every(TOKENS, SIZES)))
def test_a_product_alone(tokens: int, sizes: tuple[int, int], device: Device) -> None:
    case = Case(tokens, *sizes, device)
    case.run()
    case.check()


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("tokens", "sizes"), list(every(TOKENS, SIZES)))
def test_a_product_between_a_norm_and_a_gate(
    tokens: int, sizes: tuple[int, int], invariant: bool, device: Device
) -> None:
    case = Case(tokens, *sizes, device, norm=True, gate="silu_mul", bias=True, invariant=invariant)
    case.run()
    case.check()


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("tokens", "sizes"), list(every(TOKENS, SIZES)))
def test_a_product_that_is_added_to_its_output(
    tokens: int, sizes: tuple[int, int], invariant: bool, device: Device
) -> None:
    case = Case(tokens, *sizes, device, bias=True, added=True, invariant=invariant)
    case.run()
    case.check()


@pytest.mark.parametrize("tokens", TOKENS)
def test_a_product_in_bfloat16(tokens: int, device: Device) -> None:
    gated = Case(tokens, 64, 128, device, torch.bfloat16, norm=True, gate="gelu_tanh_mul")
    gated.run()
    gated.check()
    added = Case(tokens, 64, 128, device, torch.bfloat16, added=True)
    added.run()
    added.check()


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("norm_inside", [False, True])
@pytest.mark.parametrize(
    "tile",
    [
        Tile(16, 16, 128, 4, 3),
        Tile(32, 64, 32, 4, 2),
        Tile(16, 32, 64, 8, 1),
        Tile(8, 32, 64, 4, 2, ahead=32),
        Tile(16, 16, 64, 4, 2, together=2),
        Tile(16, 16, 32, 4, 2, release=2),
    ],
)
def test_a_tile_may_have_any_size(tile: Tile, norm_inside: bool, early: bool, device: Device) -> None:
    case = Case(20, 80, 128, device, norm=True, gate="silu_mul")
    tile = replace(tile, early=early, norm_inside=norm_inside)
    case.product.run_tile(case.input, case.output, tile, case.normed)
    case.check()


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 16, 17, 32, 33, 64, 65, 256])
def test_tiles_of_every_shape_fit_a_multiprocessor(tokens: int, has_norm: bool) -> None:
    shapes = [
        (151936, 1024),
        (1024, 3072),
        (1024, 2048),
        (6144, 1024),
        (28672, 4096),
        (4096, 14336),
        (24, 40),
    ]
    for outputs, inputs in shapes:
        if (tile := gemv_tile(tokens, outputs, inputs, has_norm)) is not None:
            assert tokens <= tile.tokens <= 4
            assert tile.inputs < 2 * inputs
        if tokens <= MOST_SKINNY and (tile := skinny_tile(tokens, outputs, inputs, has_norm)) is not None:
            assert tile.tokens >= tokens
            assert 16 <= tile.inputs < 2 * max(inputs, 16)
            assert (tile.outputs + tile.tokens) * tile.inputs * 2 * tile.stages < 200 << 10


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize(
    "tile", [Tile(1, 2, 128, 4), Tile(1, 8, 32, 4, ahead=64), Tile(1, 4, 64, 8, release=0)]
)
def test_one_or_a_few_rows_may_be_computed_in_pieces_of_any_size(
    tile: Tile, tokens: int, norm: bool, device: Device
) -> None:
    case = Case(tokens, 36, 128, device, norm=norm, gate="silu_mul")
    case.product.run_gemv(case.input, case.output, replace(tile, tokens=tokens))
    case.check()


def test_memory_after_the_last_of_a_few_rows_is_not_written(device: Device) -> None:
    case = Case(4, 36, 128, device, bias=True, added=True)
    before = case.output[3].clone()
    case.product.run_gemv(case.input[:3], case.output[:3], Tile(4, 4, 64, 4))
    assert torch.equal(case.output[3], before)
    assert not torch.equal(case.output[2], before)


def test_a_row_of_an_invariant_product_has_the_same_bits_in_any_batch(device: Device) -> None:
    many = Case(70, 64, 200, device, torch.bfloat16, norm=True, gate="silu_mul", invariant=True)
    many.run()
    for first, count in ((0, 1), (17, 1), (3, 5), (40, 30)):
        rows = slice(first, first + count)
        output = torch.empty_like(many.output[rows])
        many.product.run(many.input[rows], output, many.normed[rows], many.ungated[rows])
        assert torch.equal(output, many.output[rows])


@pytest.mark.parametrize("inputs", [576, 896, 1536, 2560, 3072, 4096, 11008, 14336])
def test_a_row_of_a_real_model_needs_no_masks(inputs: int) -> None:
    tiles = [
        gemv_tile(1, 4096, inputs, True),
        *(skinny_tile(tokens, 4096, inputs, False) for tokens in (8, 24)),
    ]
    assert all(inputs % tile.inputs == 0 for tile in tiles[1:] if tile is not None)
    assert tiles[0] is not None and (inputs % tiles[0].inputs == 0 or inputs in (576, 896))


def test_interleaved_halves_alternate() -> None:
    rows = torch.tensor([[0], [1], [2], [10], [11], [12]])
    interleave_halves(rows)
    assert rows.flatten().tolist() == [0, 10, 1, 11, 2, 12]


def test_a_layer_is_interleaved_once(device: Device) -> None:
    layer = Linear(torch.arange(6.0)[:, None], torch.arange(6.0))
    for _ in range(2):
        layer.interleave_gate()
    assert layer.weight.flatten().tolist() == [0, 3, 1, 4, 2, 5]
    assert layer.bias is not None and layer.bias.tolist() == [0, 3, 1, 4, 2, 5]
