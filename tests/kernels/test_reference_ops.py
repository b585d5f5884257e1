"""Compares the numpy operations with plain formulas, above all attention through a scattered block table."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from array_source import ArraySource
from weft.ops import reference
from weft.ops.base import AttentionPattern, AttentionShape, QkNorm, Rope, StepIndices
from weft.ops.reference import Linear, ReferenceOps


def shape_of(heads: int, kv_heads: int, head_size: int) -> AttentionShape:
    return AttentionShape(heads, kv_heads, head_size, scale=head_size**-0.5)


PATTERN = AttentionPattern(Rope((1.0,), interleaved=True))
SHAPES = [shape_of(4, 4, 8), shape_of(6, 2, 16), shape_of(9, 3, 64), shape_of(8, 1, 32)]


@dataclass(frozen=True)
class Request:
    """A request with `cached` tokens in the cache and `new` tokens to compute."""

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
    """The indices of a step with blocks scattered over a pool with holes."""
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


def dense_attention(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    first: int,
    shape: AttentionShape,
    window: int | None = None,
) -> np.ndarray:
    """Plain attention: one head and one query at a time. `first` is the position of the first query."""
    output = np.zeros_like(queries)
    for head in range(shape.heads):
        kv_head = head // (shape.heads // shape.kv_heads)
        for index in range(len(queries)):
            position = first + index
            seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
            scores = keys[seen, kv_head] @ queries[index, head] * shape.scale
            if shape.score_cap is not None:
                scores = shape.score_cap * np.tanh(scores / shape.score_cap)
            weights = np.exp(scores - scores.max())
            output[index, head] = weights @ values[seen, kv_head] / weights.sum()
    return output


def check_paged_attention(
    shape: AttentionShape, window: int | None, block_size: int, requests: list[Request], dtype: Any
) -> None:
    rng = np.random.default_rng(block_size)
    step, pool = make_step(requests, block_size, rng)
    ops = ReferenceOps(dtype)
    layers, layer = 3, 1
    # NaN wherever no request wrote: attention that reads it shows NaN.
    cache = np.full_like(ops.new_cache(pool, layers, block_size, shape), np.nan)
    context = [rng.normal(size=(2, r.cached + r.new, shape.kv_heads, shape.head_size)) for r in requests]
    for row, kv in enumerate(context):
        for position in range(kv.shape[1]):
            block = step.block_tables[row, position // block_size]
            cache[block, layer, :, position % block_size] = kv[:, position]
    queries = rng.normal(size=(len(step.positions), shape.heads, shape.head_size)).astype(dtype)
    # The other pattern is not used by the layer.
    patterns = [AttentionPattern(PATTERN.rope, 1), AttentionPattern(PATTERN.rope, window)]
    prepared = ops.prepare(step, cache, shape, patterns)
    output = ops.paged_attention(prepared, queries, cache, layer, 1).reshape(queries.shape)
    tolerance = 2e-5 if dtype is np.float32 else 1e-12
    for row, request in enumerate(requests):
        tokens = slice(step.query_starts[row], step.query_starts[row + 1])
        expected = dense_attention(
            queries[tokens].astype(np.float64), *context[row], request.cached, shape, window
        )
        np.testing.assert_allclose(output[tokens], expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.heads}-{s.kv_heads}x{s.head_size}")
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_paged_attention_equals_dense_attention(
    shape: AttentionShape, block_size: int, mix: str, dtype: Any
) -> None:
    check_paged_attention(shape, None, block_size, MIXES[mix], dtype)


@pytest.mark.parametrize("window", [1, 2, 7, 16, 17, 100])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("mix", MIXES)
def test_a_token_sees_as_many_positions_as_its_window_has(window: int, block_size: int, mix: str) -> None:
    check_paged_attention(SHAPES[1], window, block_size, MIXES[mix], np.float64)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("mix", MIXES)
def test_scores_are_scaled_and_then_capped(window: int | None, mix: str) -> None:
    shape = AttentionShape(6, 2, 16, scale=0.7, score_cap=1.5)
    check_paged_attention(shape, window, 4, MIXES[mix], np.float64)


def test_a_window_reads_only_the_blocks_it_touches() -> None:
    step, _ = make_step([Request(62, 1), Request(40, 10)], 4, np.random.default_rng(5))
    ops = ReferenceOps(np.float64)
    prepared = ops.prepare(
        step, np.zeros((40, 1, 2, 4, 1, 8)), SHAPES[0], [AttentionPattern(PATTERN.rope, 6)]
    )
    (single,), (run,) = prepared.reads[0].singles, prepared.reads[0].runs
    np.testing.assert_array_equal(single.blocks.tables[0], step.block_tables[0, 14:16])  # positions 57 to 62
    np.testing.assert_array_equal(run.blocks.tables, step.block_tables[1, 8:13])  # positions 35 to 49


@pytest.mark.parametrize("window", [None, 9])
def test_long_prompts_are_attended_in_pieces_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    rng = np.random.default_rng(0)
    shape = shape_of(4, 2, 8)
    pattern = AttentionPattern(PATTERN.rope, window)
    step, pool = make_step([Request(20, 50)], 4, rng)
    ops = ReferenceOps(np.float64)
    cache = ops.new_cache(pool, 1, 4, shape)
    cache[:] = rng.normal(size=cache.shape)
    queries = rng.normal(size=(50, 4, 8))
    whole = ops.paged_attention(ops.prepare(step, cache, shape, [pattern]), queries, cache, 0, 0)
    monkeypatch.setattr(reference, "_MAX_SCORES", 4 * 70 * 7)
    prepared = ops.prepare(step, cache, shape, [pattern])
    assert len(prepared.reads[0].runs) == 8
    np.testing.assert_allclose(ops.paged_attention(prepared, queries, cache, 0, 0), whole, atol=1e-13)


@dataclass(frozen=True)
class Turned:
    """The result of `rope_and_write` for random rows: Q and K as [T, heads, size], and V."""

    step: StepIndices
    rows: np.ndarray
    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray


def turn(shape: AttentionShape, rope: Rope, norm: QkNorm | None = None) -> Turned:
    rng = np.random.default_rng(1)
    step, pool = make_step([Request(4, 6), Request(9, 1)], 4, rng)
    ops = ReferenceOps(np.float64)
    cache = ops.new_cache(pool, 2, 4, shape)
    rows = rng.normal(size=(7, shape.heads + 2 * shape.kv_heads, shape.head_size))
    prepared = ops.prepare(step, cache, shape, [PATTERN, AttentionPattern(rope)])
    queries = ops.rope_and_write(prepared, rows.reshape(7, -1), cache, 1, 1, norm)
    assert not cache[:, 0].any(), "another layer was written"
    written = cache[step.cells // 4, 1, :, step.cells % 4]
    return Turned(step, rows, queries, written[:, 0], written[:, 1])


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("pairs", [4, 3, 1], ids=lambda pairs: f"{pairs} pairs of 4")
def test_rope_rotates_pairs_by_the_angle_of_their_position(interleaved: bool, pairs: int) -> None:
    frequencies = tuple(100.0 ** (-pair / 4) for pair in range(pairs))
    result = turn(shape_of(3, 1, 8), Rope(frequencies, interleaved, scale=1.25))
    turned = np.concatenate([result.queries, result.keys], axis=1)
    for token, position in enumerate(result.step.positions):
        for head in range(4):
            before, after = result.rows[token, head], turned[token, head]
            for pair, frequency in enumerate(frequencies):
                a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + pairs)
                expected = 1.25 * complex(before[a], before[b]) * np.exp(1j * position * frequency)
                assert complex(after[a], after[b]) == pytest.approx(expected, abs=1e-12)
            np.testing.assert_array_equal(after[2 * pairs :], before[2 * pairs :])
    np.testing.assert_array_equal(result.values[:, 0], result.rows[:, 4])


@pytest.mark.parametrize("whole_row", [False, True])
def test_queries_and_keys_are_normalised_before_rope(whole_row: bool) -> None:
    rng = np.random.default_rng(6)
    shape = shape_of(6, 2, 8)
    sizes = (48, 16) if whole_row else (8, 8)
    query, key = (rng.normal(size=size) for size in sizes)
    rope = Rope((1.0, 0.5, 0.25, 0.125), interleaved=False)
    result = turn(shape, rope, QkNorm(query, key, 1e-3))

    def normalised(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
        grouped = rows.reshape(len(rows), -1, len(weight))
        mean_square = (grouped**2).mean(axis=2, keepdims=True)
        return (grouped / np.sqrt(mean_square + 1e-3) * weight).reshape(rows.shape)

    queries, keys = normalised(result.rows[:, :6], query), normalised(result.rows[:, 6:8], key)
    angles = result.step.positions[:, None, None] * np.array(rope.frequencies)
    for before, after in ((queries, result.queries), (keys, result.keys)):
        spun = (before[..., :4] + 1j * before[..., 4:]) * np.exp(1j * angles)
        np.testing.assert_allclose(after, np.concatenate([spun.real, spun.imag], axis=2), atol=1e-12)
    np.testing.assert_array_equal(result.values, result.rows[:, 8:])


def test_a_row_reads_a_block_that_another_row_fills_in_the_same_step() -> None:
    """A prefix hit in the same step: the second request shares the blocks of the first."""
    rng = np.random.default_rng(2)
    shape = shape_of(2, 1, 8)
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
    prepared = ops.prepare(step, cache, shape, [PATTERN])
    together = ops.paged_attention(prepared, ops.rope_and_write(prepared, qkv, cache, 0, 0), cache, 0, 0)

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
    prepared = ops.prepare(alone, cache, shape, [PATTERN])
    expected = ops.paged_attention(
        prepared, ops.rope_and_write(prepared, np.roll(qkv, -1, axis=0), cache, 0, 0), cache, 0, 0
    )
    np.testing.assert_allclose(np.roll(together, -1, axis=0), expected, atol=1e-13)


def random_source(*shape: int) -> ArraySource:
    return ArraySource(np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float16))


@pytest.mark.parametrize("count", [0, 1, 3, 64, 65, 130])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_is_the_product_with_the_transposed_weight_plus_the_bias(count: int, has_bias: bool) -> None:
    rng = np.random.default_rng(3)
    inputs = rng.normal(size=(count, 24))
    weight, bias = rng.normal(size=(40, 24)), rng.normal(size=40)
    output = ReferenceOps(np.float64).linear(inputs, Linear(weight, bias if has_bias else None))
    assert output.flags.c_contiguous
    np.testing.assert_allclose(output, inputs @ weight.T + (bias if has_bias else 0.0), atol=1e-13)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights_are_stacked_by_outputs_with_their_biases(dtype: Any) -> None:
    ops = ReferenceOps(dtype)
    sources = [random_source(rows, 8) for rows in (12, 4, 4)]
    biases = [random_source(rows) for rows in (12, 4, 4)]
    linear = ops.load_linear(sources, biases)
    assert linear.weight.dtype == linear.bias.dtype == dtype
    np.testing.assert_array_equal(linear.weight, np.concatenate([source.array for source in sources]))
    np.testing.assert_array_equal(linear.bias, np.concatenate([source.array for source in biases]))
    assert ops.nbytes(linear) == linear.weight.nbytes + linear.bias.nbytes
    assert ops.load_linear(sources).bias is None
    vector = ops.load_vector(biases[0], offset=1.0)
    np.testing.assert_array_equal(vector, biases[0].array.astype(dtype) + 1)
    assert ops.nbytes(vector) == vector.nbytes


def test_loading_a_linear_layer_allocates_nothing_else() -> None:
    sources = [random_source(1024, 512) for _ in range(3)]
    ops = ReferenceOps()
    tracemalloc.start()
    linear = ops.load_linear(sources)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= 1.02 * ops.nbytes(linear)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_an_embedding_is_looked_up_as_it_is_stored_or_in_a_linear_layers_weight(scale: float) -> None:
    ops = ReferenceOps(np.float64)
    source = random_source(20, 8)
    step, pool = make_step([Request(0, 5)], 4, np.random.default_rng(0))
    ids = np.array([3, 19, 0, 3, 7])
    step = replace(step, token_ids=ids)
    prepared = ops.prepare(step, ops.new_cache(pool, 1, 4, SHAPES[0]), SHAPES[0], [PATTERN])
    table = ops.load_embedding(source)
    assert ops.nbytes(table) == 20 * 8 * 2, "the table is held as the file stores it"
    for either in (table, ops.load_linear([source])):
        rows = ops.embedding(prepared, either, scale)
        assert rows.dtype == np.float64
        np.testing.assert_array_equal(rows, source.array[ids].astype(np.float64) * scale)
    rows += 1.0  # the caller may write into them; the table stays unchanged
    np.testing.assert_array_equal(ops.embedding(prepared, table), source.array[ids])


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("is_whole", [False, True], ids=["a tensor each", "one tensor"])
@pytest.mark.parametrize("count", [0, 1, 9])
def test_a_mixture_sums_the_experts_with_the_highest_shares(
    normalise: bool, is_whole: bool, count: int
) -> None:
    rng = np.random.default_rng(8)
    ops = ReferenceOps(np.float64)
    gate, up, down = random_source(5, 12, 8), random_source(5, 12, 8), random_source(5, 8, 12)
    parts = [
        [whole] if is_whole else [ArraySource(expert) for expert in whole.array] for whole in (gate, up, down)
    ]
    experts = ops.load_experts(*parts)
    assert ops.nbytes(experts) == 8 * 3 * 5 * 12 * 8
    router = Linear(rng.normal(size=(5, 8)))
    inputs = rng.normal(size=(count, 8))
    output = ops.mixture(inputs, router, experts, 2, normalise)
    assert output.shape == (count, 8)
    for token, row in enumerate(inputs):
        shares = np.exp(router.weight @ row) / np.exp(router.weight @ row).sum()
        chosen = sorted(range(5), key=lambda expert: -shares[expert])[:2]
        expected = np.zeros(8)
        for expert in chosen:
            inner = gate.array[expert].astype(np.float64) @ row
            inner = inner / (1 + np.exp(-inner)) * (up.array[expert].astype(np.float64) @ row)
            share = shares[expert] / (shares[chosen].sum() if normalise else 1.0)
            expected += share * (down.array[expert].astype(np.float64) @ inner)
        np.testing.assert_allclose(output[token], expected, atol=1e-12)


def test_at_equal_shares_the_first_experts_are_chosen() -> None:
    ops = ReferenceOps(np.float64)
    down = np.arange(4.0).astype(np.float16).reshape(4, 1, 1)  # expert n gives n times silu(1)
    ones = ArraySource(np.ones((4, 1, 1), np.float16))
    experts = ops.load_experts([ones], [ones], [ArraySource(down)])
    output = ops.mixture(np.ones((3, 1)), Linear(np.zeros((4, 1))), experts, 2, True)
    np.testing.assert_allclose(output, np.full((3, 1), 0.5 / (1 + np.exp(-1))), atol=1e-15)


def test_the_small_operations_follow_their_formulas() -> None:
    rng = np.random.default_rng(4)
    ops = ReferenceOps(np.float64)
    rows, weight = rng.normal(size=(5, 16)), rng.normal(size=16)
    expected = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(ops.rms_norm(rows, weight, 1e-5), expected, atol=1e-13)
    gate, up = rows[:, :8], rows[:, 8:]
    np.testing.assert_allclose(ops.silu_mul(rows), gate / (1 + np.exp(-gate)) * up, atol=1e-13)
    gelu = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    np.testing.assert_allclose(ops.gelu_tanh_mul(rows), gelu * up, atol=1e-13)
    np.testing.assert_allclose(ops.scale_and_cap(rows.copy(), 3.0, None), rows * 3, atol=1e-13)
    np.testing.assert_allclose(ops.scale_and_cap(rows.copy(), 3.0, 2.0), 2 * np.tanh(rows * 1.5), atol=1e-13)
    other = rng.normal(size=(5, 16))
    np.testing.assert_allclose(ops.add(rows.copy(), other.copy()), rows + other, atol=1e-13)
    np.testing.assert_allclose(ops.add(rows.copy(), other.copy(), 0.3), rows + 0.3 * other, atol=1e-13)


def test_extreme_activations_do_not_overflow_or_change_type() -> None:
    ops = ReferenceOps()
    extreme = np.array([[-1e4, 1e4, 3.0, 3.0]], np.float32)
    np.testing.assert_array_equal(ops.silu_mul(extreme), [[0.0, 3e4]])
    np.testing.assert_array_equal(ops.gelu_tanh_mul(extreme), [[0.0, 3e4]])
    huge = np.array([[-1e30, 1e30, 2.0, 2.0]], np.float32)
    np.testing.assert_array_equal(ops.gelu_tanh_mul(huge), np.array([[0.0, 2e30]], np.float32))
    for result in (
        ops.silu_mul(extreme),
        ops.gelu_tanh_mul(extreme),
        ops.scale_and_cap(extreme.copy(), 0.5, 3.0),
        ops.rms_norm(extreme, np.ones(4, np.float32), 1e-6),
        ops.add(extreme.copy(), extreme.copy(), 0.5),
    ):
        assert result.dtype == np.float32
