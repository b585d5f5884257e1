"""RoPE, query and key norms and the write to the cache, compared with numpy in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import LAYER, Case, Part, Step

from weft.ops.base import QkNorm, Rope
from weft.ops.triton.device import Device
from weft.ops.triton.rope import RopeTables, rope_and_write

MAX_CONTEXT = 3000
MIXED = Case([Part(40, 1), Part(0, 5), Part(17, 3)])


def rope_of(pairs: int, interleaved: bool = False, scale: float = 1.0) -> Rope:
    return Rope(tuple(1e4 ** (-i / pairs) for i in range(pairs)), interleaved, scale)


def turned(
    step: Step, rope: Rope, norm: QkNorm | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the rows, and the cache, which was all NaN before."""
    qkv, cache = step.device_qkv(), step.device_cache(step.cache(filled=False))
    if norm is not None:
        norm = QkNorm(step.tensor(norm.query), step.tensor(norm.key), norm.epsilon)
    tables = RopeTables(rope, MAX_CONTEXT, step.device)
    rope_and_write(step.batch(), qkv, cache, LAYER, tables, step.case.shape, norm)
    return qkv, cache


def check(step: Step, rope: Rope, norm: QkNorm | None = None, tolerance: float = 1e-5) -> None:
    qkv, cache = (tensor.to("cpu", torch.float64).numpy() for tensor in turned(step, rope, norm))
    queries, expected_cache = step.expected_rope(rope, norm)
    count, query_columns = queries.shape
    np.testing.assert_allclose(qkv[:count, :query_columns], queries, rtol=tolerance, atol=tolerance)
    cells = step.indices.cells
    block_size = step.case.block_size
    keys = expected_cache[cells // block_size, LAYER, 0, cells % block_size].reshape(count, -1)
    key_columns = slice(query_columns, query_columns + keys.shape[1])
    np.testing.assert_allclose(qkv[:count, key_columns], keys, rtol=tolerance, atol=tolerance)
    # NaN stays wherever nothing may be written.
    np.testing.assert_allclose(
        cache, expected_cache.transpose(0, 1, 2, 4, 3, 5), rtol=tolerance, atol=tolerance
    )


CASES = {
    "one token": (Case([Part(0, 1)]), rope_of(32)),
    "tokens of several requests": (MIXED, rope_of(32)),
    "a late position": (Case([Part(2900, 2)]), rope_of(32)),
    "blocks of 32": (replace(MIXED, block_size=32), rope_of(32)),
    "heads of 80": (replace(MIXED, head_size=80), rope_of(40)),
    "heads of 96": (replace(MIXED, head_size=96), rope_of(48)),
    "heads of 128": (replace(MIXED, head_size=128), rope_of(64)),
    "heads of 256": (replace(MIXED, head_size=256), rope_of(128)),
    "neighbours turn": (MIXED, rope_of(32, interleaved=True)),
    "RoPE on a part of a head": (MIXED, rope_of(16)),
    "RoPE on an odd part of a head": (replace(MIXED, head_size=80), rope_of(10, interleaved=True)),
    "turning scales": (MIXED, rope_of(32, scale=1.2)),
    "more heads than one program takes": (replace(MIXED, heads=21, kv_heads=7), rope_of(32)),
    "padding": (replace(MIXED, padding=3), rope_of(32)),
}


@pytest.mark.parametrize(("case", "rope"), CASES.values(), ids=CASES.keys())
def test_queries_and_keys_are_rotated_in_place_and_keys_and_values_are_cached(
    case: Case, rope: Rope, device: Device
) -> None:
    check(Step(case, device), rope)


@pytest.mark.parametrize("whole_row", [False, True], ids=["each head", "the whole row"])
@pytest.mark.parametrize("rope", [rope_of(32), rope_of(20), rope_of(32, interleaved=True)])
@pytest.mark.parametrize("heads", [4, 22])
def test_queries_and_keys_are_normalised_before_rope(
    rope: Rope, whole_row: bool, heads: int, device: Device
) -> None:
    case = replace(MIXED, heads=heads)
    rng = np.random.default_rng(2)
    sizes = [count * case.head_size if whole_row else case.head_size for count in (heads, case.kv_heads)]
    query, key = (rng.uniform(0.5, 1.5, size).astype(np.float32) for size in sizes)
    check(Step(case, device), rope, QkNorm(query, key, 1e-5))


def test_the_cache_is_rounded_to_its_type(device: Device) -> None:
    case = replace(MIXED, head_size=128)
    norm = QkNorm(np.ones(128, np.float32), np.full(128, 0.5, np.float32), 1e-6)
    check(Step(case, device, torch.bfloat16), rope_of(64), norm, tolerance=1e-2)
    check(Step(case, device, torch.bfloat16), rope_of(64), tolerance=1e-2)


def test_values_are_stored_unchanged(device: Device) -> None:
    case = replace(MIXED, head_size=128)
    step = Step(case, device, torch.bfloat16)
    norm = QkNorm(np.full(128, 3.0, np.float32), np.full(128, 3.0, np.float32), 1e-6)
    _, cache = turned(step, rope_of(64), norm)
    cells = step.batch().cells
    stored = cache[cells // 16, LAYER, 1, :, cells % 16].reshape(case.tokens, -1)
    assert torch.equal(stored, step.device_qkv()[:, -stored.shape[1] :])
