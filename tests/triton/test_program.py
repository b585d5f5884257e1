"""Whole forward passes on a device, or in the interpreter, against the numpy reference."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

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


@pytest.mark.parametrize("name", ["plain, 3 heads to a kv head", "experts"])
def test_in_bfloat16_a_model_is_near_the_reference(name: str, device: Device) -> None:
    config = CONFIGS[name]
    ours = logits_of(config, device, torch.bfloat16)
    assert relative_error(ours, reference_logits(config, TEXTS, PLAN)) < 0.1
