"""Which operations of a forward pass are fused, and which buffers share a slot."""

from __future__ import annotations

import pytest
import torch
from small_decoders import CONFIGS, PLAIN, decoder_of

from weft.models.config import ModelConfig
from weft.ops.recording import NO_STEP, Add, Buffer, Embed, Norm, Operation, Product, SelectRows
from weft.ops.triton.device import Device
from weft.ops.triton.fusion import (
    FusedAttention,
    FusedLinear,
    FusedNorm,
    FusedOperation,
    assigned_slots,
    buffers_made,
    buffers_read,
    fuse,
)
from weft.ops.triton.ops import TritonOps


def recorded(config: ModelConfig, device: Device) -> tuple[list[Operation], Buffer]:
    ops = TritonOps(device, torch.float32)
    rows = decoder_of(config, ops).forward(NO_STEP, None)
    assert ops.recording is not None
    return ops.recording.operations, rows


def test_a_plain_layer_is_four_products_around_attention(device: Device) -> None:
    operations, rows = recorded(PLAIN, device)
    fused = fuse(operations, {rows})
    until_attention: list[type[FusedOperation]] = [FusedLinear, FusedAttention]
    after_it: list[type[FusedOperation]] = [FusedLinear, FusedLinear, FusedLinear]
    layer, last_layer = until_attention + after_it, [*until_attention, SelectRows, SelectRows, *after_it]
    assert [type(operation) for operation in fused] == [Embed, *layer, *last_layer, FusedNorm]
    taken_in = [
        (bool(operation.norm), bool(operation.gate), operation.added)
        for operation in fused
        if isinstance(operation, FusedLinear)
    ]
    qkv, out, gate_up, down = (
        (True, False, False),
        (False, False, True),
        (True, True, False),
        (False, False, True),
    )
    assert taken_in == [qkv, out, gate_up, down] * 2
    last = fused[-1]
    assert isinstance(last, FusedNorm) and last.output is rows


def test_the_add_is_fused_into_a_norm_after_a_product(device: Device) -> None:
    operations, rows = recorded(CONFIGS["post-norms of whole rows"], device)
    fused = fuse(operations, {rows})
    assert [operation.added for operation in fused if isinstance(operation, FusedNorm)] == [
        True,
        True,
        True,
        True,
        False,
    ]
    assert not any(isinstance(operation, Add) for operation in fused)


def test_a_norm_with_two_readers_is_computed_once() -> None:
    hidden, normed, left, right = (Buffer(8) for _ in range(4))
    norm = Norm(hidden, None, 1e-5, normed)
    operations: list[Operation] = [norm, Product(normed, None, left), Product(normed, None, right)]
    fused = fuse(operations, {left, right})
    assert [type(operation) for operation in fused] == [FusedNorm, FusedLinear, FusedLinear]
    assert all(operation.input is normed for operation in fused[1:] if isinstance(operation, FusedLinear))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_slot_is_not_reused_while_its_content_is_needed(name: str, device: Device) -> None:
    operations, rows = recorded(CONFIGS[name], device)
    fused = fuse(operations, {rows})
    slots = assigned_slots(fused, {rows})
    holds: dict[int, Buffer] = {}
    uncopied = {operation.output: operation.input for operation in fused if isinstance(operation, SelectRows)}
    assert len(uncopied) == 2
    for operation in fused:
        made, read = set(buffers_made(operation)), set(buffers_read(operation))
        for buffer in read | {uncopied[buffer] for buffer in read if buffer in uncopied}:
            assert holds[slots.places[buffer]] is buffer
        assert len({slots.places[buffer] for buffer in made | read}) == len(made | read)
        for buffer in made:
            assert slots.columns[slots.places[buffer]] == buffer.columns
            holds[slots.places[buffer]] = buffer
    assert holds[slots.places[rows]] is rows


def test_layers_reuse_the_same_slots(device: Device) -> None:
    operations, rows = recorded(PLAIN, device)
    fused = fuse(operations, {rows})
    selected = [operation for operation in fused if isinstance(operation, SelectRows)]
    one_layer = fused[: 1 + (len(fused) - 2 - len(selected)) // 2]
    layers = fused[: fused.index(selected[0])]
    assert len(assigned_slots(layers, set()).columns) == len(assigned_slots(one_layer, set()).columns)
