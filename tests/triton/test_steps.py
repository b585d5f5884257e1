"""Which operations of a forward pass are fused, and which buffers share a slot."""

from __future__ import annotations

import pytest
import torch
from small_decoders import CONFIGS, PLAIN, decoder_of

from weft.models.config import ModelConfig
from weft.ops.recording import NO_STEP, Add, Buffer, Embed, Norm, Operation, Product, SelectRows
from weft.ops.triton.device import Device
from weft.ops.triton.ops import TritonOps
from weft.ops.triton.steps import (
    AttentionStep,
    NormStep,
    ProductStep,
    Step,
    assigned_slots,
    buffers_made,
    buffers_read,
    steps_of,
)


def recorded(config: ModelConfig, device: Device) -> tuple[list[Operation], Buffer]:
    ops = TritonOps(device, torch.float32)
    rows = decoder_of(config, ops).forward(NO_STEP, None)
    assert ops.recording is not None
    return ops.recording.operations, rows


def test_a_plain_layer_is_four_products_around_attention(device: Device) -> None:
    operations, rows = recorded(PLAIN, device)
    steps = steps_of(operations, {rows})
    until_attention: list[type[Step]] = [ProductStep, AttentionStep]
    after_it: list[type[Step]] = [ProductStep, ProductStep, ProductStep]
    layer, last_layer = until_attention + after_it, [*until_attention, SelectRows, SelectRows, *after_it]
    assert [type(step) for step in steps] == [Embed, *layer, *last_layer, NormStep]
    taken_in = [
        (bool(step.norm), bool(step.gate), step.added) for step in steps if isinstance(step, ProductStep)
    ]
    qkv, out, gate_up, down = (
        (True, False, False),
        (False, False, True),
        (True, True, False),
        (False, False, True),
    )
    assert taken_in == [qkv, out, gate_up, down] * 2
    last = steps[-1]
    assert isinstance(last, NormStep) and last.output is rows


def test_the_add_is_fused_into_a_norm_after_a_product(device: Device) -> None:
    operations, rows = recorded(CONFIGS["post-norms of whole rows"], device)
    steps = steps_of(operations, {rows})
    assert [step.added for step in steps if isinstance(step, NormStep)] == [True, True, True, True, False]
    assert not any(isinstance(step, Add) for step in steps)


def test_a_norm_with_two_readers_is_computed_once() -> None:
    hidden, normed, left, right = (Buffer(8) for _ in range(4))
    norm = Norm(hidden, None, 1e-5, normed)
    operations: list[Operation] = [norm, Product(normed, None, left), Product(normed, None, right)]
    steps = steps_of(operations, {left, right})
    assert [type(step) for step in steps] == [NormStep, ProductStep, ProductStep]
    assert all(step.input is normed for step in steps[1:] if isinstance(step, ProductStep))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_slot_is_not_reused_while_its_content_is_needed(name: str, device: Device) -> None:
    operations, rows = recorded(CONFIGS[name], device)
    steps = steps_of(operations, {rows})
    slots = assigned_slots(steps, {rows})
    holds: dict[int, Buffer] = {}
    uncopied = {step.output: step.input for step in steps if isinstance(step, SelectRows)}
    assert len(uncopied) == 2
    for step in steps:
        made, read = set(buffers_made(step)), set(buffers_read(step))
        for buffer in read | {uncopied[buffer] for buffer in read if buffer in uncopied}:
            assert holds[slots.places[buffer]] is buffer
        assert len({slots.places[buffer] for buffer in made | read}) == len(made | read)
        for buffer in made:
            assert slots.columns[slots.places[buffer]] == buffer.columns
            holds[slots.places[buffer]] = buffer
    assert holds[slots.places[rows]] is rows


def test_layers_reuse_the_same_slots(device: Device) -> None:
    operations, rows = recorded(PLAIN, device)
    steps = steps_of(operations, {rows})
    selected = [step for step in steps if isinstance(step, SelectRows)]
    one_layer = steps[: 1 + (len(steps) - 2 - len(selected)) // 2]
    layers = steps[: steps.index(selected[0])]
    assert len(assigned_slots(layers, set()).columns) == len(assigned_slots(one_layer, set()).columns)
