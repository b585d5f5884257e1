"""The operations in numpy: the definition the other implementations are tested against.

In float64 (a parameter for everything: weights, activations, cache) results are the same in any company up to the
last few bits, which is what tests that compare tokens exactly use. In float32 they are not: BLAS picks its
summation order by the shape of the product, so a request's logits can differ by about 1e-5 with the batch it is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.ops.base import AttentionShape, Rope, StepIndices, WeightSource

# Scores held at once by the attention of one long request: bounds memory, 32 MiB in float32.
_MAX_SCORES = 8 << 20

# Up to this many rows the product is faster with the weight on the left (measured: twice at 8 rows).
_WEIGHT_FIRST_ROWS = 64


@dataclass(frozen=True)
class _SingleQueries:
    """Requests with one token in the step and contexts of similar length: attended to as one padded batch."""

    tokens: np.ndarray  # [N] into the step's tokens
    tables: np.ndarray  # [N, blocks]
    hidden: np.ndarray  # bool [N, places]: past the end of the context


@dataclass(frozen=True)
class _QueryRun:
    """A piece of the tokens of one request that has several in the step."""

    tokens: slice
    table: np.ndarray  # [blocks]
    hidden: np.ndarray  # bool [queries, places]: after the query's own position
    context_length: int


@dataclass(frozen=True)
class _Prepared:
    step: StepIndices
    shape: AttentionShape
    interleaved: bool
    cosine: np.ndarray  # [T, 1, head size / 2]
    sine: np.ndarray
    blocks: np.ndarray  # [T] where this step's K and V go
    offsets: np.ndarray  # [T]
    singles: tuple[_SingleQueries, ...]
    runs: tuple[_QueryRun, ...]


class ReferenceOps:
    """`Ops` in numpy, in one floating point type."""

    def __init__(self, dtype: np.dtype | type = np.float32) -> None:
        self.dtype = np.dtype(dtype)

    # --- once, at load ------------------------------------------------------------------------------------------

    def load_vector(self, source: WeightSource) -> np.ndarray:
        return source.to_float32().astype(self.dtype, copy=False)

    def load_linear(self, sources: Sequence[WeightSource]) -> np.ndarray:
        weight = np.empty((sum(source.shape[0] for source in sources), sources[0].shape[1]), self.dtype)
        start = 0
        for source in sources:
            weight[start : start + source.shape[0]] = source.to_float32()
            start += source.shape[0]
        return weight

    def new_cache(self, blocks: int, layers: int, block_size: int, shape: AttentionShape) -> np.ndarray:
        return np.zeros((blocks, layers, 2, block_size, shape.kv_heads, shape.head_size), self.dtype)

    # --- once a step --------------------------------------------------------------------------------------------

    def prepare(self, step: StepIndices, cache: np.ndarray, shape: AttentionShape, rope: Rope) -> _Prepared:
        block_size = cache.shape[3]
        # Angles in float64 whatever the type: in float32 a position of some thousands costs four digits of the angle.
        frequencies = rope.base ** (-np.arange(0, shape.head_size, 2, dtype=np.float64) / shape.head_size)
        angles = step.positions[:, None, None] * frequencies
        single = np.diff(step.query_starts) == 1
        return _Prepared(
            step=step,
            shape=shape,
            interleaved=rope.interleaved,
            cosine=np.cos(angles).astype(self.dtype),
            sine=np.sin(angles).astype(self.dtype),
            blocks=step.cells // block_size,
            offsets=step.cells % block_size,
            singles=_single_queries(step, np.flatnonzero(single), block_size),
            runs=_query_runs(step, np.flatnonzero(~single), block_size, shape.heads),
        )

    def embedding(self, prepared: _Prepared, table: np.ndarray) -> np.ndarray:
        return table[prepared.step.token_ids]

    def select_logit_rows(self, prepared: _Prepared, hidden: np.ndarray) -> np.ndarray:
        return hidden[prepared.step.logit_indices]

    # --- in every layer -----------------------------------------------------------------------------------------

    def linear(self, inputs: np.ndarray, weight: np.ndarray) -> np.ndarray:
        if len(inputs) > _WEIGHT_FIRST_ROWS:
            return inputs @ weight.T
        return np.ascontiguousarray((weight @ inputs.T).T)

    def rms_norm(self, inputs: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
        mean_square = np.einsum("tf,tf->t", inputs, inputs)[:, None] / inputs.shape[1]
        return inputs * (1.0 / np.sqrt(mean_square + epsilon)).astype(self.dtype, copy=False) * weight

    def rope_and_write(
        self, prepared: _Prepared, qkv: np.ndarray, cache: np.ndarray, layer: int
    ) -> np.ndarray:
        shape = prepared.shape
        rows = qkv.reshape(len(qkv), shape.heads + 2 * shape.kv_heads, shape.head_size)
        first_value = shape.heads + shape.kv_heads
        rotated = _rotate(rows[:, :first_value], prepared)
        cache[prepared.blocks, layer, 0, prepared.offsets] = rotated[:, shape.heads :]
        cache[prepared.blocks, layer, 1, prepared.offsets] = rows[:, first_value:]
        return rotated[:, : shape.heads]

    def paged_attention(
        self, prepared: _Prepared, queries: np.ndarray, cache: np.ndarray, layer: int
    ) -> np.ndarray:
        shape = prepared.shape
        keys, values = cache[:, layer, 0], cache[:, layer, 1]
        scaled = queries * self.dtype.type(shape.head_size**-0.5)
        output = np.empty((len(queries), shape.heads, shape.head_size), self.dtype)
        for batch in prepared.singles:
            output[batch.tokens] = _attend_singles(scaled[batch.tokens], keys, values, batch, shape)
        for run in prepared.runs:
            output[run.tokens] = _attend_run(scaled[run.tokens], keys, values, run, shape)
        return output.reshape(len(queries), -1)

    def silu_mul(self, gate_up: np.ndarray) -> np.ndarray:
        size = gate_up.shape[1] // 2
        gate, up = gate_up[:, :size], gate_up[:, size:]
        with np.errstate(
            over="ignore"
        ):  # exp of a very negative gate is infinite, and gate / infinity the right 0
            return gate / (1.0 + np.exp(-gate)) * up

    def add(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        left += right
        return left


def _single_queries(step: StepIndices, requests: np.ndarray, block_size: int) -> tuple[_SingleQueries, ...]:
    """Requests with one token, by the power of two that holds their blocks: padding at most doubles the work."""
    if not len(requests):
        return ()
    block_counts = -(-step.context_lengths[requests] // block_size)
    sizes = np.ceil(np.log2(block_counts)).astype(np.int64)
    batches = []
    for size in np.unique(sizes):
        members = requests[sizes == size]
        lengths = step.context_lengths[members]
        blocks = int(-(-lengths.max() // block_size))
        batches.append(
            _SingleQueries(
                tokens=step.query_starts[members],
                tables=step.block_tables[members, :blocks],
                hidden=np.arange(blocks * block_size) >= lengths[:, None],
            )
        )
    return tuple(batches)


def _query_runs(
    step: StepIndices, requests: np.ndarray, block_size: int, heads: int
) -> tuple[_QueryRun, ...]:
    """Requests with several tokens, in pieces whose scores fit `_MAX_SCORES`; a piece reads no further than it sees."""
    runs = []
    for request in requests:
        first, end = int(step.query_starts[request]), int(step.query_starts[request + 1])
        piece = max(1, _MAX_SCORES // (heads * int(step.context_lengths[request])))
        for start in range(first, end, piece):
            tokens = slice(start, min(start + piece, end))
            positions = step.positions[tokens]
            context_length = int(positions[-1]) + 1
            blocks = -(-context_length // block_size)
            hidden = np.arange(blocks * block_size) > positions[:, None]
            runs.append(_QueryRun(tokens, step.block_tables[request, :blocks], hidden, context_length))
    return tuple(runs)


def _rotate(rows: np.ndarray, prepared: _Prepared) -> np.ndarray:
    """Each pair of features turned by its token's angle: [T, heads, head size]."""
    half = rows.shape[2] // 2
    if prepared.interleaved:
        first, second = slice(0, None, 2), slice(1, None, 2)
    else:
        first, second = slice(0, half), slice(half, None)
    left, right = rows[..., first], rows[..., second]
    rotated = np.empty_like(rows)
    rotated[..., first] = left * prepared.cosine - right * prepared.sine
    rotated[..., second] = right * prepared.cosine + left * prepared.sine
    return rotated


def _softmax(scores: np.ndarray) -> np.ndarray:
    """Over the last axis, in place."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def _attend_singles(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, batch: _SingleQueries, shape: AttentionShape
) -> np.ndarray:
    count = len(queries)
    places = (count, -1, shape.kv_heads, shape.head_size)
    gathered_keys = keys[batch.tables].reshape(places)
    gathered_values = values[batch.tables].reshape(places)
    # What a block holds past the context is another request's leftover. Its weight is 0, but 0 times NaN is NaN.
    gathered_values[batch.hidden] = 0.0
    grouped = queries.reshape(count, shape.kv_heads, -1, shape.head_size)
    scores = grouped @ gathered_keys.transpose(0, 2, 3, 1)
    np.copyto(scores, -np.inf, where=batch.hidden[:, None, None, :])
    attended = _softmax(scores) @ gathered_values.transpose(0, 2, 1, 3)
    return attended.reshape(count, shape.heads, shape.head_size)


def _attend_run(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, run: _QueryRun, shape: AttentionShape
) -> np.ndarray:
    count = len(queries)
    gathered_keys = keys[run.table].reshape(-1, shape.kv_heads, shape.head_size)
    gathered_values = values[run.table].reshape(-1, shape.kv_heads, shape.head_size)
    gathered_values[run.context_length :] = 0.0
    # [kv heads, queries of all heads of the group, head size]: one product per kv head
    grouped = queries.reshape(count, shape.kv_heads, -1, shape.head_size).transpose(1, 2, 0, 3)
    scores = grouped.reshape(shape.kv_heads, -1, shape.head_size) @ gathered_keys.transpose(1, 2, 0)
    scores = scores.reshape(shape.kv_heads, -1, count, scores.shape[-1])
    np.copyto(scores, -np.inf, where=run.hidden)
    weights = _softmax(scores).reshape(shape.kv_heads, -1, scores.shape[-1])
    attended = (weights @ gathered_values.transpose(1, 0, 2)).reshape(
        shape.kv_heads, -1, count, shape.head_size
    )
    return attended.transpose(2, 0, 1, 3).reshape(count, shape.heads, shape.head_size)
