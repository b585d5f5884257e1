"""The numpy operations against plain formulas: attention above all, through the block table in any arrangement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from weft.ops import reference
from weft.ops.base import AttentionShape, Rope, StepIndices
from weft.ops.reference import ReferenceOps

ROPE = Rope(base=10_000.0, interleaved=True)
SHAPES = [
    AttentionShape(4, 4, 8),
    AttentionShape(6, 2, 16),
    AttentionShape(9, 3, 64),
    AttentionShape(8, 1, 32),
]


@dataclass(frozen=True)
class Request:
    """A request whose first `cached` tokens are in the cache already and whose next `new` tokens are computed."""

    cached: int
    new: int


MIXES = {
    "one decode": [Request(5, 1)],
    "first token of all": [Request(0, 1)],
    "prefill": [Request(0, 13)],
    "chunk": [Request(7, 9)],
    "decodes of many lengths": [Request(length, 1) for length in (0, 1, 2, 3, 15, 16, 17, 40, 63, 64)],
    "mixed": [Request(31, 1), Request(0, 20), Request(12, 1), Request(16, 16), Request(3, 5)],
}


def blocks_of(request: Request, block_size: int) -> int:
    return -(-(request.cached + request.new) // block_size)


def make_step(requests: list[Request], block_size: int, rng: np.random.Generator) -> tuple[StepIndices, int]:
    """The indices of a step whose blocks lie scattered over a pool with holes."""
    needed = [blocks_of(request, block_size) for request in requests]
    pool = sum(needed) + 5
    order = rng.permutation(pool)
    tables = np.zeros((len(requests), max(needed)), np.int64)
    taken = 0
    for row, count in enumerate(needed):
        tables[row, :count] = order[taken : taken + count]
        taken += count
    counts = np.array([request.new for request in requests])
    positions = np.concatenate([np.arange(r.cached, r.cached + r.new) for r in requests])
    rows = np.repeat(np.arange(len(requests)), counts)
    step = StepIndices(
        token_ids=np.zeros(len(positions), np.int64),
        positions=positions,
        cells=tables[rows, positions // block_size] * block_size + positions % block_size,
        query_starts=np.concatenate([[0], np.cumsum(counts)]),
        context_lengths=np.array([r.cached + r.new for r in requests]),
        block_tables=tables,
        logit_indices=np.zeros(0, np.int64),
    )
    return step, pool


def dense_attention(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, first: int) -> np.ndarray:
    """The textbook: one head and one query at a time. `first` is the position of the first query."""
    count, heads, size = queries.shape
    group = heads // keys.shape[1]
    output = np.zeros_like(queries)
    for head in range(heads):
        for index in range(count):
            seen = first + index + 1
            scores = keys[:seen, head // group] @ queries[index, head] / np.sqrt(size)
            weights = np.exp(scores - scores.max())
            output[index, head] = weights @ values[:seen, head // group] / weights.sum()
    return output


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.heads}-{s.kv_heads}x{s.head_size}")
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_paged_attention_equals_dense_attention(
    shape: AttentionShape, block_size: int, mix: str, dtype: Any
) -> None:
    rng = np.random.default_rng(block_size)
    requests = MIXES[mix]
    step, pool = make_step(requests, block_size, rng)
    ops = ReferenceOps(dtype)
    layers, layer = 3, 1
    # NaN everywhere that no request wrote: whatever attention takes from there shows.
    cache = np.full_like(ops.new_cache(pool, layers, block_size, shape), np.nan)
    context = [rng.normal(size=(2, r.cached + r.new, shape.kv_heads, shape.head_size)) for r in requests]
    for row, kv in enumerate(context):
        for position in range(kv.shape[1]):
            block = step.block_tables[row, position // block_size]
            cache[block, layer, :, position % block_size] = kv[:, position]
    queries = rng.normal(size=(len(step.positions), shape.heads, shape.head_size)).astype(dtype)
    prepared = ops.prepare(step, cache, shape, ROPE)
    output = ops.paged_attention(prepared, queries, cache, layer).reshape(queries.shape)
    tolerance = 2e-5 if dtype is np.float32 else 1e-12
    for row, request in enumerate(requests):
        tokens = slice(step.query_starts[row], step.query_starts[row + 1])
        expected = dense_attention(queries[tokens].astype(np.float64), *context[row], request.cached)
        np.testing.assert_allclose(output[tokens], expected, atol=tolerance, rtol=tolerance)


def test_long_prompts_are_attended_in_pieces_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    shape = AttentionShape(4, 2, 8)
    step, pool = make_step([Request(20, 50)], 4, rng)
    ops = ReferenceOps(np.float64)
    cache = ops.new_cache(pool, 1, 4, shape)
    cache[:] = rng.normal(size=cache.shape)
    queries = rng.normal(size=(50, 4, 8))
    whole = ops.paged_attention(ops.prepare(step, cache, shape, ROPE), queries, cache, 0)
    monkeypatch.setattr(reference, "_MAX_SCORES", 4 * 70 * 7)
    prepared = ops.prepare(step, cache, shape, ROPE)
    assert len(prepared.runs) == 8
    np.testing.assert_allclose(ops.paged_attention(prepared, queries, cache, 0), whole, atol=1e-13)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_turns_pairs_by_the_angle_of_their_position(interleaved: bool) -> None:
    rng = np.random.default_rng(1)
    shape = AttentionShape(3, 1, 8)
    step, pool = make_step([Request(4, 6)], 4, rng)
    ops = ReferenceOps(np.float64)
    cache = ops.new_cache(pool, 2, 4, shape)
    qkv = rng.normal(size=(6, 5 * 8))
    prepared = ops.prepare(step, cache, shape, Rope(100.0, interleaved))
    queries = ops.rope_and_write(prepared, qkv, cache, 1)
    for token, position in enumerate(step.positions):
        for head in range(4):
            vector = qkv[token].reshape(5, 8)[head]
            turned = (
                queries[token, head]
                if head < 3
                else cache[step.cells[token] // 4, 1, 0, step.cells[token] % 4, 0]
            )
            for pair in range(4):
                a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 4)
                expected = complex(vector[a], vector[b]) * np.exp(1j * position * 100.0 ** (-2 * pair / 8))
                assert complex(turned[a], turned[b]) == pytest.approx(expected, abs=1e-12)
        value = cache[step.cells[token] // 4, 1, 1, step.cells[token] % 4, 0]
        np.testing.assert_array_equal(value, qkv[token, 32:])
    assert not cache[:, 0].any(), "another layer was written"


def test_a_row_reads_a_block_that_another_row_fills_in_the_same_step() -> None:
    """A prefix hit on a block in the same step: the second request shares the first one's blocks."""
    rng = np.random.default_rng(2)
    shape = AttentionShape(2, 1, 8)
    ops = ReferenceOps(np.float64)
    # Request 0 computes positions 0..3 into block 1; request 1 computes position 4 and reads block 1 for the rest.
    step = StepIndices(
        token_ids=np.zeros(5, np.int64),
        positions=np.array([4, 0, 1, 2, 3]),
        cells=np.array([8, 4, 5, 6, 7]),
        query_starts=np.array([0, 1, 5]),
        context_lengths=np.array([5, 4]),
        block_tables=np.array([[1, 2], [1, 0]]),
        logit_indices=np.zeros(0, np.int64),
    )
    qkv = rng.normal(size=(5, 4 * 8))
    cache = ops.new_cache(3, 1, 4, shape)
    prepared = ops.prepare(step, cache, shape, ROPE)
    together = ops.paged_attention(prepared, ops.rope_and_write(prepared, qkv, cache, 0), cache, 0)

    alone = StepIndices(
        token_ids=np.zeros(5, np.int64),
        positions=np.arange(5),
        cells=np.array([4, 5, 6, 7, 8]),
        query_starts=np.array([0, 5]),
        context_lengths=np.array([5]),
        block_tables=np.array([[1, 2]]),
        logit_indices=np.zeros(0, np.int64),
    )
    cache = ops.new_cache(3, 1, 4, shape)
    prepared = ops.prepare(alone, cache, shape, ROPE)
    expected = ops.paged_attention(
        prepared, ops.rope_and_write(prepared, np.roll(qkv, -1, axis=0), cache, 0), cache, 0
    )
    np.testing.assert_allclose(np.roll(together, -1, axis=0), expected, atol=1e-13)


@pytest.mark.parametrize("count", [0, 1, 3, 64, 65, 130])
def test_linear_is_the_product_with_the_transposed_weight(count: int) -> None:
    rng = np.random.default_rng(3)
    inputs, weight = rng.normal(size=(count, 24)), rng.normal(size=(40, 24))
    output = ReferenceOps(np.float64).linear(inputs, weight)
    assert output.flags.c_contiguous
    np.testing.assert_allclose(output, inputs @ weight.T, atol=1e-13)


def test_the_small_operations_follow_their_formulas() -> None:
    rng = np.random.default_rng(4)
    ops = ReferenceOps(np.float64)
    rows, weight = rng.normal(size=(5, 16)), rng.normal(size=16)
    expected = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(ops.rms_norm(rows, weight, 1e-5), expected, atol=1e-13)
    gate, up = rows[:, :8], rows[:, 8:]
    np.testing.assert_allclose(ops.silu_mul(rows), gate / (1 + np.exp(-gate)) * up, atol=1e-13)
    extreme = np.array([[-1e4, 1e4, 3.0, 3.0]], np.float32)
    np.testing.assert_array_equal(ReferenceOps().silu_mul(extreme), [[0.0, 3e4]])
