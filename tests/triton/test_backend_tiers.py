"""A two-tier cache on the CUDA backend: the same plans give the tokens of the reference, step by step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from small_backends import TINY, cpu_backend, cuda_backend, prompt
from tiered_plans import Planner, Text

from weft.backends.base import Backend
from weft.config import KvCacheKind, KvCachePoolConfig
from weft.models.config import ModelConfig
from weft.ops.base import AttentionPattern
from weft.ops.triton.device import Device
from weft.plan import IterationPlan, StepResult

BLOCK_SIZE, TAIL = 16, 16
TWO_LAYERS = replace(TINY, layers=2, layer_patterns=(0, 0))
WINDOWS = replace(
    TWO_LAYERS,
    patterns=(TINY.patterns[0], AttentionPattern(TINY.patterns[0].rope, window=40)),
    layer_patterns=(1, 0),
)


def pool(bits: int, full: int = 12, store: int = 24, tail: int = TAIL) -> KvCachePoolConfig:
    return KvCachePoolConfig(
        num_blocks=full,
        store_blocks=store,
        block_size=BLOCK_SIZE,
        swap_blocks=0,
        kv_cache=KvCacheKind.TWO_TIER,
        tail_length=tail,
        store_bits=bits,
    )


class Both:
    """The backend under test and the reference, with the same plans."""

    def __init__(self, device: Device, config: ModelConfig, pool: KvCachePoolConfig) -> None:
        self.backends: list[Backend] = [cuda_backend(device, config), cpu_backend(config)]
        infos = [backend.allocate(pool, num_rows=4, max_tokens=128) for backend in self.backends]
        assert [(info.num_blocks, info.store_blocks) for info in infos] == [
            (pool.num_blocks, pool.store_blocks)
        ] * 2
        self.planner = Planner(infos[0])

    def step(self, *entries: tuple[Text, int]) -> IterationPlan:
        """Runs one step on both, and appends the tokens to the texts."""
        plan = self.planner.plan(list(entries))
        ours, theirs = (backend.submit(plan).result() for backend in self.backends)
        assert ours.error is None and theirs.error is None, (ours.error, theirs.error)
        assert list(ours.tokens) == list(theirs.tokens)
        np.testing.assert_allclose(logprobs(ours), logprobs(theirs), atol=2e-2)
        sampled = iter(ours.tokens)
        for (text, _), samples in zip(entries, plan.samples, strict=True):
            if samples:
                text.tokens.append(next(sampled))
        return plan

    def close(self) -> None:
        for backend in self.backends:
            backend.close()


def logprobs(result: StepResult) -> list[float]:
    return [entry.logprob for entry in result.logprobs or () if entry is not None]


def text(row: int, length: int) -> Text:
    return Text(row, list(prompt(length, row)), length)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("config", [TWO_LAYERS, WINDOWS], ids=["no window", "windows"])
def test_prompts_chunks_and_decodes_over_both_tiers_equal_the_reference(
    device: Device, config: ModelConfig, bits: int
) -> None:
    both = Both(device, config, pool(bits))
    long, short = text(2, 93), text(0, 20)
    both.step((long, 70))  # longer than the tail: moved in the same step
    assert len(long.stored) == 3
    both.step((long, 7), (short, 20))
    both.step((short, 1), (long, 16))
    moved = sum(len(both.step((short, 1), (long, 1)).moved_rows) for _ in range(4))
    assert moved == 1  # in a decode-only step
    both.close()


def test_a_row_that_starts_again_finds_its_stored_blocks(device: Device) -> None:
    both = Both(device, TWO_LAYERS, pool(8))
    first = text(1, 60)
    both.step((first, 60))
    for _ in range(4):
        both.step((first, 1))
    first.row, first.begins = 3, True
    plan = both.step((first, 1))
    assert sum(block >= 12 for block in plan.row_starts[0].blocks) == 3
    for _ in range(3):
        both.step((first, 1))
    both.close()


def test_a_block_that_another_row_moved_is_shared_without_a_copy(device: Device) -> None:
    """moved_from is -1: only the table entry is new."""
    both = Both(device, TWO_LAYERS, pool(8))
    one = text(0, 47)
    other = Text(1, list(one.tokens), 47)
    both.step((one, 47))
    both.step((other, 47))
    plan = both.planner.plan([(one, 1), (other, 1)])
    assert len(plan.moved_rows) == 2
    shared = replace(plan, moved_from=(plan.moved_from[0], -1), moved_to=(plan.moved_to[0],) * 2)
    results = [backend.submit(shared).result() for backend in both.backends]
    assert list(results[0].tokens) == list(results[1].tokens)
    assert results[0].tokens[0] == results[0].tokens[1]
    both.close()


@pytest.mark.parametrize("bits", [8, 4])
def test_in_bfloat16_a_long_context_over_both_tiers_stays_finite(device: Device, bits: int) -> None:
    backend = cuda_backend(device, TWO_LAYERS, dtype=torch.bfloat16)
    planner = Planner(backend.allocate(pool(bits), num_rows=2, max_tokens=128))
    one = text(0, 60)
    for count in (60, *[1] * 8):
        result = backend.submit(planner.plan([(one, count)])).result()
        assert not result.failed
        one.tokens += result.tokens
    backend.close()
