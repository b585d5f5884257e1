"""Compares whole forward passes on a device, or in the interpreter, with the numpy reference."""

from __future__ import annotations

import pytest
import torch
from small_decoders import (
    CONFIGS,
    PLAIN,
    PLAN,
    TEXTS,
    decoder_of,
    logits_of,
    reference_logits,
    relative_error,
)

from weft.ops.recording import SelectRows
from weft.ops.triton.device import Device
from weft.ops.triton.ops import TritonOps
from weft.ops.triton.program import record


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_computes_what_the_reference_does_in_chunks_and_token_by_token(
    name: str, device: Device
) -> None:
    config = CONFIGS[name]
    assert relative_error(logits_of(config, device), reference_logits(config, TEXTS, PLAN)) < 2e-5


def test_in_bfloat16_a_model_is_near_the_reference(device: Device) -> None:
    ours = logits_of(PLAIN, device, torch.bfloat16)
    assert relative_error(ours, reference_logits(PLAIN, TEXTS, PLAN)) < 0.1


def test_an_invariant_model_computes_what_the_reference_does(device: Device) -> None:
    ours = logits_of(PLAIN, device, invariant=True)
    assert relative_error(ours, reference_logits(PLAIN, TEXTS, PLAN)) < 2e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_the_selected_rows_share_their_slot_with_no_other_buffer(name: str, device: Device) -> None:
    """If all rows are selected, the input replaces this buffer: another buffer in its slot would overwrite the rows."""
    ops = TritonOps(device, torch.float32)
    program = record(decoder_of(CONFIGS[name], ops), ops, max_tokens=64, max_sampled=64)
    assert ops.recording is not None
    selected = [step.output for step in ops.recording.operations if isinstance(step, SelectRows)]
    places = list(program._places.values())
    assert [places.count(program._places[buffer]) for buffer in selected] == [1, 1]
