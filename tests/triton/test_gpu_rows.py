"""Compares the kernels of `weft.ops.triton.rows` with numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weft.ops.reference import ReferenceOps
from weft.ops.triton import rows
from weft.ops.triton.device import Device

REFERENCE = ReferenceOps()
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def put(array: np.ndarray, device: Device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(array.copy()).to(device.torch_device, dtype)


def agree(ours: torch.Tensor, theirs: np.ndarray, dtype: torch.dtype = torch.float32) -> None:
    error = np.abs(ours.float().cpu().numpy() - theirs).max() / np.abs(theirs).max()
    assert error < TOLERANCE[dtype]


def spread(array: torch.Tensor) -> torch.Tensor:
    """The same rows with gaps between them in memory."""
    wide = torch.full((len(array), array.shape[1] + 8), float("nan"), dtype=array.dtype, device=array.device)
    wide[:, : array.shape[1]] = array
    return wide[:, : array.shape[1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [64, 80, 1100])
def test_an_embedding_is_its_row_of_the_table_scaled(
    columns: int, dtype: torch.dtype, device: Device
) -> None:
    table, ids = draw(7, columns), np.array([6, 0, 3, 3])
    output = spread(device.empty(4, columns, dtype=dtype))
    rows.look_up(
        put(table, device, dtype), torch.from_numpy(ids).int().to(device.torch_device), output, device, 1.5
    )
    agree(output, table[ids] * 1.5, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [64, 80, 1100])
def test_a_norm_equals_that_of_the_reference(columns: int, dtype: torch.dtype, device: Device) -> None:
    values, weight = draw(3, columns), draw(columns)
    output = spread(device.empty(3, columns, dtype=dtype))
    rows.rms_norm(spread(put(values, device, dtype)), put(weight, device), 1e-2, output, device)
    agree(output, REFERENCE.rms_norm(values, weight, 1e-2), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [64, 1100])
def test_selected_rows_are_those_that_were_named(columns: int, dtype: torch.dtype, device: Device) -> None:
    values, indices = put(draw(5, columns), device, dtype), [4, 1, 1]
    output = spread(device.empty(3, columns, dtype=dtype))
    chosen = torch.tensor(indices, dtype=torch.int32, device=device.torch_device)
    rows.look_up(spread(values), chosen, output, device)
    assert torch.equal(output, values[indices])


def test_a_norm_can_be_added_to_its_output(device: Device) -> None:
    values, weight, before = draw(2, 48), draw(48), draw(2, 48) + 1
    output = put(before, device)
    rows.rms_norm(put(values, device), put(weight, device), 1e-5, output, device, added=True, scale=0.3)
    agree(output, before + 0.3 * REFERENCE.rms_norm(values, weight, 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["silu_mul", "gelu_tanh_mul"])
@pytest.mark.parametrize("columns", [40, 1100])
def test_a_gate_multiplies_its_neighbour(
    columns: int, kind: rows.GateKind, dtype: torch.dtype, device: Device
) -> None:
    values = draw(3, 2 * columns) * 3
    output = device.empty(3, columns, dtype=dtype)
    rows.gate_rows(spread(put(values, device, dtype)), kind, output, device)
    halves = np.concatenate([values[:, 0::2], values[:, 1::2]], axis=1)
    agree(output, getattr(REFERENCE, kind)(halves), dtype)


@pytest.mark.parametrize("kind", ["silu_mul", "gelu_tanh_mul"])
def test_a_gate_of_very_large_numbers_is_all_or_nothing(kind: rows.GateKind, device: Device) -> None:
    values = np.array([[200.0, 2.0, -200.0, 2.0, 3e4, 1.0, -3e4, 1.0]], np.float32)
    output = device.empty(1, 4, dtype=torch.float32)
    rows.gate_rows(put(values, device), kind, output, device)
    assert output.cpu().tolist() == [[400.0, 0.0, 3e4, 0.0]]


def test_an_addition_is_scaled_and_may_use_one_vector_for_all_rows(device: Device) -> None:
    left, right, same = draw(3, 1100), draw(3, 1100) + 1, draw(1100)
    target = spread(put(left, device))
    rows.add(target, spread(put(right, device)), 0.5, device)
    agree(target, left + 0.5 * right)
    rows.add(target, put(same, device), 2.0, device)
    agree(target, left + 0.5 * right + 2.0 * same)


@pytest.mark.parametrize("cap", [None, 3.0])
def test_logits_are_scaled_and_then_capped(cap: float | None, device: Device) -> None:
    values = draw(2, 1100) * 20
    ours = put(values, device)
    rows.scale_and_cap(ours, 0.5, cap, device)
    agree(ours, REFERENCE.scale_and_cap(values, 0.5, cap))
