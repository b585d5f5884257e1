"""Whole forward passes on a device, or in the interpreter, against the numpy reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_decoders import (
    BLOCK_SIZE,
    CONFIGS,
    PLAIN,
    Texts,
    decoder_of,
    device_batch,
    reference_logits,
)

from weft.models.config import ModelConfig
from weft.ops.triton.device import Device
from weft.ops.triton.ops import TritonOps
from weft.ops.triton.program import CudaProgram, record

# One step for cuBLAS, one for tiles with chunks and single tokens, one of single tokens, one for a single token.
TEXTS = Texts.of_lengths(28, 9, 8)
PLAN = [[25, 7, 5], [1, 1, 3], [1, 1, 0], [1, 0, 0]]


def build(
    config: ModelConfig, device: Device, dtype: torch.dtype = torch.float32, invariant: bool = False
) -> tuple[CudaProgram, torch.Tensor]:
    ops = TritonOps(device, dtype)
    decoder = decoder_of(config, ops)
    program = record(decoder, ops, max_tokens=64, max_sampled=64, invariant=invariant)
    cache = decoder.new_cache(TEXTS.blocks, BLOCK_SIZE)
    cache.fill_(float("nan"))  # whatever is read without having been written shows
    return program, cache


def logits_of(
    config: ModelConfig, device: Device, dtype: torch.dtype = torch.float32, invariant: bool = False
) -> list[np.ndarray]:
    program, cache = build(config, device, dtype, invariant)
    # The buffer of logits is the same in every step.
    return [
        program.run(device_batch(step, device), cache)[0].float().cpu().numpy().copy()
        for step in TEXTS.steps(PLAN)
    ]


def relative_error(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(float(np.abs(mine - other).max() / np.abs(other).max()) for mine, other in pairs)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_computes_what_the_reference_does_in_chunks_and_token_by_token(
    name: str, device: Device
) -> None:
    config = CONFIGS[name]
    assert relative_error(logits_of(config, device), reference_logits(config, TEXTS, PLAN)) < 2e-5


def test_in_bfloat16_a_model_is_near_the_reference(device: Device) -> None:
    ours = logits_of(PLAIN, device, torch.bfloat16)
    assert relative_error(ours, reference_logits(PLAIN, TEXTS, PLAN)) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["all norms, with an offset; windows, caps, gelu", "experts"])
def test_a_batch_invariant_model_gives_a_token_the_same_bits_in_any_company(
    name: str, dtype: torch.dtype, device: Device
) -> None:
    program, cache = build(CONFIGS[name], device, dtype, invariant=True)
    together = [
        program.run(device_batch(step, device), cache)[0].clone() for step in TEXTS.steps([[5, 9, 8]])
    ]
    cache.fill_(float("nan"))
    alone = [
        program.run(device_batch(step, device), cache)[0].clone()
        for step in TEXTS.steps([[0, 4, 0], [0, 1, 0], [3, 0, 0], [1, 4, 0]])
    ]
    assert torch.equal(alone[0], together[0][5:9])
    assert torch.equal(alone[1], together[0][9:10])
    assert torch.equal(alone[3], torch.cat([together[0][3:4], together[0][10:14]]))


def test_an_invariant_model_computes_what_the_reference_does(device: Device) -> None:
    ours = logits_of(PLAIN, device, invariant=True)
    assert relative_error(ours, reference_logits(PLAIN, TEXTS, PLAN)) < 2e-5


def test_rows_that_are_not_sampled_are_handed_out_for_later(device: Device) -> None:
    program, cache = build(PLAIN, device)
    [step] = TEXTS.steps([[5, 4, 0]])
    whole, others = program.run(device_batch(step, device), cache)
    assert others is None
    whole = whole.clone()
    part, others = program.run(device_batch(step, device, sampled=2), cache)
    assert torch.allclose(part, whole[:2], atol=1e-5)
    assert others is not None and len(others) == 7
    assert torch.allclose(program.logits(others), whole[2:], atol=1e-5)
    nothing, others = program.run(device_batch(step, device, sampled=0), cache)
    assert len(nothing) == 0
    assert others is not None and torch.allclose(program.logits(others), whole, atol=1e-5)


def test_a_step_may_sample_nothing_and_keep_nothing(device: Device) -> None:
    program, cache = build(PLAIN, device)
    first, second = TEXTS.steps([[4, 0, 0], [1, 0, 0]])
    [whole] = TEXTS.steps([[5, 0, 0]])
    expected = program.run(device_batch(whole, device), cache)[0][4:].clone()
    cache.fill_(float("nan"))
    logits, others = program.run(device_batch(replace(first, logit_indices=np.arange(0)), device), cache)
    assert len(logits) == 0 and others is None
    assert torch.allclose(program.run(device_batch(second, device), cache)[0], expected, atol=1e-5)


def test_padding_changes_nothing_and_is_not_written(device: Device) -> None:
    """As a graph of three requests runs a step of two."""
    program, cache = build(PLAIN, device)
    first, second = TEXTS.steps([[3, 2, 0], [1, 1, 0]])
    program.run(device_batch(first, device), cache)
    before = cache.clone()
    expected = program.run(device_batch(second, device), cache)[0].clone()
    written = cache.clone()
    cache.copy_(before)
    batch = device_batch(second, device)

    def padded(tensor: torch.Tensor, value: int) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_full((1,), value)])

    batch = replace(
        batch,
        tokens=3,
        requests=3,
        sampled=3,
        decodes=3,
        token_ids=padded(batch.token_ids, 0),
        positions=padded(batch.positions, 0),
        cells=padded(batch.cells, -1),
        rows=padded(batch.rows, 0),
        query_starts=padded(batch.query_starts, 3),
        context_lengths=padded(batch.context_lengths, 0),
        logit_indices=padded(batch.logit_indices, 2),
    )
    graph = device.capture(lambda: program.run(batch, cache))
    graph.replay()
    assert torch.allclose(program.run(batch, cache)[0][:2], expected, atol=1e-5)
    assert torch.allclose(cache, written, atol=1e-5, equal_nan=True)
