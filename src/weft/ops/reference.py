"""The operations in numpy. The other implementations are tested against this one.

`dtype` applies to everything: weights, activations, cache. In float64 the results of a request depend on the rest of
the batch only in the last few bits; tests that compare tokens exactly use it. In float32 logits can differ by about
1e-5 when the batch differs, because BLAS chooses its summation order by the shape of the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.ops.base import (
    AttentionPattern,
    AttentionShape,
    LinearRole,
    QkNorm,
    Rope,
    StepIndices,
    TwoTierCache,
    WeightSource,
)
from weft.ops.reference_tiers import ReadBlocks, gather, move_blocks, read_blocks
from weft.tiers import store_vector_bytes

# The most attention scores that are in memory at a time: 32 MiB in float32.
_MAX_SCORES = 8 << 20

# Up to this many rows, a product is faster with the weight on the left (measured: twice as fast at 8 rows).
_WEIGHT_FIRST_ROWS = 64


@dataclass(frozen=True)
class Linear:
    """A linear layer in the dtype of the ops. The output layer is also the embedding, if the model ties both."""

    weight: np.ndarray  # [outputs, inputs]
    bias: np.ndarray | None = None

    def rows(self, indices: np.ndarray) -> np.ndarray:
        return self.weight[indices]


@dataclass(frozen=True)
class Experts:
    """The feed-forward layers of a mixture of experts."""

    gate: np.ndarray  # [experts, intermediate size, features]
    up: np.ndarray
    down: np.ndarray  # [experts, features, intermediate size]


@dataclass(frozen=True)
class _SingleQueries:
    """Requests with one token in the step and similar numbers of blocks, computed as one padded batch."""

    tokens: np.ndarray  # [N]: indices into the tokens of the step
    blocks: ReadBlocks
    hidden: np.ndarray  # bool [N, cells]: past the end of the context, or before the window


@dataclass(frozen=True)
class _QueryRun:
    """Consecutive tokens of one request that has several tokens in the step."""

    tokens: slice
    blocks: ReadBlocks
    hidden: np.ndarray  # bool [queries, cells]: after the position of the query, or before its window
    unseen: np.ndarray  # bool [cells]: hidden from every query


@dataclass(frozen=True)
class Rotation:
    """RoPE angles at the positions of the step."""

    interleaved: bool
    cosine: np.ndarray  # [T, 1, pairs]
    sine: np.ndarray


@dataclass(frozen=True)
class _Reads:
    """What the tokens of the step read from the cache, for one window."""

    singles: tuple[_SingleQueries, ...]
    runs: tuple[_QueryRun, ...]


@dataclass(frozen=True)
class _Prepared:
    step: StepIndices
    shape: AttentionShape
    blocks: np.ndarray  # [T]: the block for K and V of each token
    offsets: np.ndarray  # [T]: the offset in that block
    rotations: tuple[Rotation, ...]  # by pattern
    reads: tuple[_Reads, ...]  # by pattern


class ReferenceOps:
    """`Ops` in numpy, in one floating-point type."""

    def __init__(self, dtype: np.dtype | type = np.float32) -> None:
        self.dtype = np.dtype(dtype)

    # --- once, at load ------------------------------------------------------------------------------------------

    def load_vector(self, source: WeightSource, offset: float = 0.0) -> np.ndarray:
        vector = np.empty(source.shape, self.dtype)
        source.read_into(vector)
        vector += offset
        return vector

    def load_linear(
        self,
        sources: Sequence[WeightSource],
        biases: Sequence[WeightSource] = (),
        role: LinearRole = "layer",
    ) -> Linear:
        return Linear(self._stack(sources), self._stack(biases) if biases else None)

    def load_experts(
        self, gate: Sequence[WeightSource], up: Sequence[WeightSource], down: Sequence[WeightSource]
    ) -> Experts:
        return Experts(self._experts(gate), self._experts(up), self._experts(down))

    def load_embedding(self, source: WeightSource) -> WeightSource:
        return source

    def nbytes(self, weight: np.ndarray | Linear | Experts | WeightSource) -> int:
        if isinstance(weight, np.ndarray):
            return weight.nbytes
        if isinstance(weight, Experts):
            return weight.gate.nbytes + weight.up.nbytes + weight.down.nbytes
        if isinstance(weight, Linear):
            return weight.weight.nbytes + (0 if weight.bias is None else weight.bias.nbytes)
        return weight.raw.nbytes

    def new_cache(self, blocks: int, layers: int, block_size: int, shape: AttentionShape) -> np.ndarray:
        return np.zeros((blocks, layers, 2, block_size, shape.kv_heads, shape.head_size), self.dtype)

    def new_store(
        self, blocks: int, layers: int, block_size: int, shape: AttentionShape, bits: int
    ) -> np.ndarray:
        vector = store_vector_bytes(shape.head_size, bits)
        return np.zeros((blocks, layers, 2, block_size, shape.kv_heads, vector), np.uint8)

    def _stack(self, sources: Sequence[WeightSource]) -> np.ndarray:
        """Stacks tensors. Each is read directly into its rows, without a second copy in memory."""
        stacked = np.empty((sum(source.shape[0] for source in sources), *sources[0].shape[1:]), self.dtype)
        start = 0
        for source in sources:
            source.read_into(stacked[start : start + source.shape[0]])
            start += source.shape[0]
        return stacked

    def _experts(self, sources: Sequence[WeightSource]) -> np.ndarray:
        stacked = self._stack(sources)
        return stacked if stacked.ndim == 3 else stacked.reshape(len(sources), *sources[0].shape)

    # --- once per step ------------------------------------------------------------------------------------------

    def prepare(
        self,
        step: StepIndices,
        cache: np.ndarray | TwoTierCache,
        shape: AttentionShape,
        patterns: Sequence[AttentionPattern],
    ) -> _Prepared:
        full, tail_blocks = (cache.full, cache.tail_blocks) if isinstance(cache, TwoTierCache) else (cache, 0)
        block_size = full.shape[3]
        rotations = {
            rope: self.rotation(step.positions, rope) for rope in {pattern.rope for pattern in patterns}
        }
        reads = {
            window: _reads(step, window, block_size, tail_blocks, shape.heads)
            for window in {pattern.window for pattern in patterns}
        }
        return _Prepared(
            step=step,
            shape=shape,
            blocks=step.cells // block_size,
            offsets=step.cells % block_size,
            rotations=tuple(rotations[pattern.rope] for pattern in patterns),
            reads=tuple(reads[pattern.window] for pattern in patterns),
        )

    def rotation(self, positions: np.ndarray, rope: Rope) -> Rotation:
        # Angles are always float64: in float32 an angle loses four digits at positions of some thousands.
        angles = positions[:, None, None] * np.array(rope.frequencies, np.float64)
        return Rotation(
            rope.interleaved,
            (np.cos(angles) * rope.scale).astype(self.dtype),
            (np.sin(angles) * rope.scale).astype(self.dtype),
        )

    def embedding(self, prepared: _Prepared, table: Linear | WeightSource, scale: float = 1.0) -> np.ndarray:
        rows = table.rows(prepared.step.token_ids).astype(self.dtype, copy=False)
        return rows if scale == 1.0 else rows * self.dtype.type(scale)

    def select_logit_rows(self, prepared: _Prepared, hidden: np.ndarray) -> np.ndarray:
        return hidden[prepared.step.logit_indices]

    def scale_and_cap(self, logits: np.ndarray, scale: float, cap: float | None) -> np.ndarray:
        logits *= scale
        return logits if cap is None else cap_scores(logits, cap)

    # --- in every layer -----------------------------------------------------------------------------------------

    def linear(self, inputs: np.ndarray, weight: Linear) -> np.ndarray:
        if len(inputs) > _WEIGHT_FIRST_ROWS:
            product = inputs @ weight.weight.T
        else:
            product = np.ascontiguousarray((weight.weight @ inputs.T).T)
        if weight.bias is not None:
            product += weight.bias
        return product

    def rms_norm(self, inputs: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
        return _normalise(inputs, weight, epsilon)

    def rope_and_write(
        self,
        prepared: _Prepared,
        qkv: np.ndarray,
        cache: np.ndarray | TwoTierCache,
        layer: int,
        pattern: int,
        norm: QkNorm | None = None,
    ) -> np.ndarray:
        shape = prepared.shape
        rows = qkv.reshape(len(qkv), shape.heads + 2 * shape.kv_heads, shape.head_size)
        first_value = shape.heads + shape.kv_heads
        queries, keys = rows[:, : shape.heads], rows[:, shape.heads : first_value]
        if norm is not None:
            queries = normalise_heads(queries, norm.query, norm.epsilon)
            keys = normalise_heads(keys, norm.key, norm.epsilon)
        rotation = prepared.rotations[pattern]
        full = cache.full if isinstance(cache, TwoTierCache) else cache
        full[prepared.blocks, layer, 0, prepared.offsets] = rotate(keys, rotation)
        full[prepared.blocks, layer, 1, prepared.offsets] = rows[:, first_value:]
        if isinstance(cache, TwoTierCache):
            move_blocks(cache, layer, prepared.step)
        return rotate(queries, rotation)

    def paged_attention(
        self,
        prepared: _Prepared,
        queries: np.ndarray,
        cache: np.ndarray | TwoTierCache,
        layer: int,
        pattern: int,
    ) -> np.ndarray:
        shape, reads = prepared.shape, prepared.reads[pattern]
        scaled = queries * self.dtype.type(shape.scale)
        output = np.empty((len(queries), shape.heads, shape.head_size), self.dtype)
        for batch in reads.singles:
            output[batch.tokens] = _attend_singles(
                scaled[batch.tokens], *gather(cache, layer, batch.blocks), batch, shape
            )
        for run in reads.runs:
            output[run.tokens] = _attend_run(
                scaled[run.tokens], *gather(cache, layer, run.blocks), run, shape
            )
        return output.reshape(len(queries), -1)

    def silu_mul(self, gate_up: np.ndarray) -> np.ndarray:
        size = gate_up.shape[1] // 2
        return _silu(gate_up[:, :size]) * gate_up[:, size:]

    def gelu_tanh_mul(self, gate_up: np.ndarray) -> np.ndarray:
        size = gate_up.shape[1] // 2
        return gelu_tanh(gate_up[:, :size]) * gate_up[:, size:]

    def mixture(
        self, inputs: np.ndarray, router: Linear, experts: Experts, per_token: int, normalise: bool
    ) -> np.ndarray:
        all_weights = softmax(self.linear(inputs, router))
        chosen = np.argsort(-all_weights, axis=1, kind="stable")[:, :per_token]
        weights = np.take_along_axis(all_weights, chosen, axis=1)
        if normalise:
            weights /= weights.sum(axis=1, keepdims=True)
        output = np.zeros_like(inputs)
        for expert in np.unique(chosen):
            tokens, ranks = np.nonzero(chosen == expert)
            rows = inputs[tokens]
            inner = _silu(rows @ experts.gate[expert].T) * (rows @ experts.up[expert].T)
            output[tokens] += (inner @ experts.down[expert].T) * weights[tokens, ranks, None]
        return output

    def add(self, left: np.ndarray, right: np.ndarray, scale: float = 1.0) -> np.ndarray:
        if scale != 1.0:
            right *= scale
        left += right
        return left


def _reads(step: StepIndices, window: int | None, block_size: int, tail_blocks: int, heads: int) -> _Reads:
    single = np.diff(step.query_starts) == 1
    return _Reads(
        singles=_single_queries(step, np.flatnonzero(single), window, block_size, tail_blocks),
        runs=_query_runs(step, np.flatnonzero(~single), window, block_size, tail_blocks, heads),
    )


def _single_queries(
    step: StepIndices, requests: np.ndarray, window: int | None, block_size: int, tail_blocks: int
) -> tuple[_SingleQueries, ...]:
    """Makes batches of requests with one token. In a batch, all block counts round up to the same power of two, so
    padding at most doubles the work."""
    if not len(requests):
        return ()
    lengths = step.context_lengths[requests]
    first_seen = np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0)
    first_blocks = first_seen // block_size
    block_counts = -(-lengths // block_size) - first_blocks
    sizes = np.ceil(np.log2(block_counts)).astype(np.int64)
    batches = []
    for size in np.unique(sizes):
        chosen = np.flatnonzero(sizes == size)
        columns = first_blocks[chosen, None] + np.arange(block_counts[chosen].max())
        positions = first_blocks[chosen, None] * block_size + np.arange(columns.shape[1] * block_size)
        batches.append(
            _SingleQueries(
                tokens=step.query_starts[requests[chosen]],
                # A padding column may be beyond the table. It reads the last column, and its cells are hidden.
                blocks=read_blocks(
                    step,
                    requests[chosen, None],
                    np.minimum(columns, step.block_tables.shape[1] - 1),
                    lengths[chosen, None] - 1,
                    block_size,
                    tail_blocks,
                ),
                hidden=(positions >= lengths[chosen, None]) | (positions < first_seen[chosen, None]),
            )
        )
    return tuple(batches)


def _query_runs(
    step: StepIndices,
    requests: np.ndarray,
    window: int | None,
    block_size: int,
    tail_blocks: int,
    heads: int,
) -> tuple[_QueryRun, ...]:
    """Splits requests with several tokens into runs of tokens with at most `_MAX_SCORES` scores. A run reads only
    blocks in its window. With a store, all queries of a run read the same blocks from the store."""
    runs = []
    for request in requests:
        first, end = int(step.query_starts[request]), int(step.query_starts[request + 1])
        longest = max(1, _MAX_SCORES // (heads * int(step.context_lengths[request])))
        start = first
        while start < end:
            position = int(step.positions[start])
            count = longest if step.store is None else min(longest, block_size - (position + 1) % block_size)
            tokens = slice(start, min(start + count, end))
            start = tokens.stop
            positions = step.positions[tokens]
            first_block = 0 if window is None else max(0, int(positions[0]) - window + 1) // block_size
            end_block = int(positions[-1]) // block_size + 1
            seen = np.arange(first_block * block_size, end_block * block_size)
            hidden = seen > positions[:, None]
            if window is not None:
                hidden |= seen <= positions[:, None] - window
            columns = np.arange(first_block, end_block)
            blocks = read_blocks(step, request, columns, positions[0], block_size, tail_blocks)
            runs.append(_QueryRun(tokens, blocks, hidden, np.logical_and.reduce(hidden)))
    return tuple(runs)


def _normalise(rows: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    """RMS norm over the last axis."""
    mean_square = np.einsum("...f,...f->...", rows, rows)[..., None] / rows.shape[-1]
    return rows * (1.0 / np.sqrt(mean_square + epsilon)).astype(rows.dtype, copy=False) * weight


def normalise_heads(rows: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    """RMS norm of [T, heads, head size]: of each head if the weight has the size of one head, else of the whole row."""
    if len(weight) == rows.shape[2]:
        return _normalise(rows, weight, epsilon)
    return _normalise(rows.reshape(len(rows), -1), weight, epsilon).reshape(rows.shape)


def rotate(rows: np.ndarray, rotation: Rotation) -> np.ndarray:
    """Rotates each pair of features by the angle of its token: [T, heads, head size]."""
    pairs = rotation.cosine.shape[2]
    if rotation.interleaved:
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    else:
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    left, right = rows[..., first], rows[..., second]
    rotated = rows.copy()
    rotated[..., first] = left * rotation.cosine - right * rotation.sine
    rotated[..., second] = right * rotation.cosine + left * rotation.sine
    return rotated


def _silu(gate: np.ndarray) -> np.ndarray:
    # exp(-gate) of a very negative gate overflows to infinity, and gate / infinity is 0, which is correct.
    with np.errstate(over="ignore"):
        return gate / (1.0 + np.exp(-gate))


def gelu_tanh(gate: np.ndarray) -> np.ndarray:
    # The cube of a very large gate overflows to infinity, and its tanh is 1, which is correct.
    with np.errstate(over="ignore"):
        inner = np.sqrt(2.0 / np.pi).astype(gate.dtype) * (gate + 0.044715 * gate * gate * gate)
        return 0.5 * gate * (1.0 + np.tanh(inner))


def cap_scores(scores: np.ndarray, cap: float) -> np.ndarray:
    """cap * tanh(scores / cap), in place."""
    scores /= cap
    np.tanh(scores, out=scores)
    scores *= cap
    return scores


def softmax(scores: np.ndarray) -> np.ndarray:
    """Softmax over the last axis, in place."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def _attend_singles(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, batch: _SingleQueries, shape: AttentionShape
) -> np.ndarray:
    """Attention of requests with one token each: one product over all of them."""
    count = len(queries)
    cells = (count, -1, shape.kv_heads, shape.head_size)
    keys, values = keys.reshape(cells), values.reshape(cells)
    # Cells past the context hold old values of other requests. Their weight is 0, but 0 times NaN is NaN.
    values[batch.hidden] = 0.0
    grouped = queries.reshape(count, shape.kv_heads, -1, shape.head_size)
    scores = grouped @ keys.transpose(0, 2, 3, 1)
    if shape.score_cap is not None:
        cap_scores(scores, shape.score_cap)
    np.copyto(scores, -np.inf, where=batch.hidden[:, None, None, :])
    attended = softmax(scores) @ values.transpose(0, 2, 1, 3)
    return attended.reshape(count, shape.heads, shape.head_size)


def _attend_run(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, run: _QueryRun, shape: AttentionShape
) -> np.ndarray:
    """Attention of consecutive tokens of one request."""
    count = len(queries)
    keys, values = (part.reshape(-1, shape.kv_heads, shape.head_size) for part in (keys, values))
    values[run.unseen] = 0.0  # see _attend_singles
    # [kv heads, queries of all heads of the group, head size]: one product per kv head
    grouped = queries.reshape(count, shape.kv_heads, -1, shape.head_size).transpose(1, 2, 0, 3)
    scores = grouped.reshape(shape.kv_heads, -1, shape.head_size) @ keys.transpose(1, 2, 0)
    scores = scores.reshape(shape.kv_heads, -1, count, scores.shape[-1])
    if shape.score_cap is not None:
        cap_scores(scores, shape.score_cap)
    np.copyto(scores, -np.inf, where=run.hidden)
    weights = softmax(scores).reshape(shape.kv_heads, -1, scores.shape[-1])
    attended = (weights @ values.transpose(1, 0, 2)).reshape(shape.kv_heads, -1, count, shape.head_size)
    return attended.transpose(2, 0, 1, 3).reshape(count, shape.heads, shape.head_size)
