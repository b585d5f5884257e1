"""Compares mixtures of experts with numpy, and checks that a token does not depend on the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from array_source import ArraySource
from weft.ops.reference import ReferenceOps
from weft.ops.triton.device import Device
from weft.ops.triton.mixture import MixtureProduct, MixtureSpace
from weft.ops.triton.ops import TritonOps

FEATURES, INNER = 48, 40


class Case:
    """Random experts, on the device and in numpy."""

    def __init__(self, tokens: int, count: int, per_token: int, normalise: bool, device: Device) -> None:
        draw = np.random.default_rng(tokens + count)

        def random(*shape: int) -> ArraySource:
            return ArraySource((draw.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32))

        self.router = random(count, FEATURES)
        self.router.array[...] *= 4
        gate, up = random(count, INNER, FEATURES), random(count, INNER, FEATURES)
        down = [random(FEATURES, INNER) for _ in range(count)]
        self.tensors = ([gate], [up], down)
        self.per_token, self.normalise, self.device = per_token, normalise, device
        self.inputs = draw.standard_normal((tokens, FEATURES)).astype(np.float32)

    def ours(self, dtype: torch.dtype = torch.float32, rows: slice = slice(None)) -> torch.Tensor:
        ops = TritonOps(self.device, dtype)
        experts = ops.load_experts(*self.tensors)
        router = ops.load_linear([self.router], role="router")
        space = MixtureSpace(experts, self.per_token, len(self.inputs), self.device)
        inputs = torch.from_numpy(self.inputs[rows]).to(self.device.torch_device, dtype)
        output = torch.full_like(inputs, float("nan"))
        MixtureProduct(router, experts, self.normalise, space, self.device).run(inputs, output)
        return output

    def theirs(self) -> np.ndarray:
        ops = ReferenceOps()
        return ops.mixture(
            self.inputs,
            ops.load_linear([self.router]),
            ops.load_experts(*self.tensors),
            self.per_token,
            self.normalise,
        )


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(
    ("tokens", "count", "per_token"), [(1, 5, 2), (1, 4, 4), (3, 8, 1), (20, 6, 3), (37, 3, 2)]
)
def test_a_mixture_equals_that_of_the_reference(
    tokens: int, count: int, per_token: int, normalise: bool, device: Device
) -> None:
    case = Case(tokens, count, per_token, normalise, device)
    theirs = case.theirs()
    assert np.abs(case.ours().cpu().numpy() - theirs).max() / np.abs(theirs).max() < 3e-6


def test_at_a_tie_the_first_experts_are_chosen(device: Device) -> None:
    case = Case(2, 6, 2, True, device)
    case.router.array[...] = 0.0
    theirs = case.theirs()
    assert np.abs(case.ours().cpu().numpy() - theirs).max() / np.abs(theirs).max() < 3e-6


def test_every_token_may_choose_the_same_experts(device: Device) -> None:
    case = Case(40, 5, 2, True, device)
    case.inputs[...] = case.inputs[0]
    theirs = case.theirs()
    assert np.abs(case.ours().cpu().numpy() - theirs).max() / np.abs(theirs).max() < 3e-6


def test_a_token_has_the_same_bits_in_any_batch(device: Device) -> None:
    case = Case(70, 4, 2, True, device)
    together = case.ours(torch.bfloat16)
    for rows in (slice(0, 1), slice(33, 34), slice(5, 30)):
        assert torch.equal(case.ours(torch.bfloat16, rows), together[rows])
