"""The operations of a text encoder in numpy. The other implementations are tested against this one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from weft.ops.base import AttentionPattern, AttentionShape, QkNorm, WeightSource
from weft.ops.reference import (
    ReferenceOps,
    Rotation,
    cap_scores,
    gelu_tanh,
    normalise_heads,
    rotate,
    softmax,
)
from weft.ops.texts import Activation, Pooling, TextIndices

# The most attention scores that are in memory at a time: 32 MiB in float32.
_MAX_SCORES = 8 << 20


@dataclass(frozen=True)
class SourceOfRows:
    """A `WeightSource` of a few rows of a matrix, in float32."""

    matrix: WeightSource
    indices: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.matrix.name

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.indices), *self.matrix.shape[1:])

    @property
    def format_name(self) -> str:
        return "F32"

    @property
    def raw(self) -> np.ndarray:
        return self.to_float32().reshape(-1).view(np.uint8)

    def read_into(self, out: np.ndarray) -> None:
        out[...] = self.to_float32()

    def rows(self, indices: np.ndarray) -> np.ndarray:
        return self.to_float32()[indices]

    def to_float32(self) -> np.ndarray:
        return self.matrix.rows(np.array(self.indices, np.int64))


@dataclass(frozen=True)
class _PreparedTexts:
    step: TextIndices
    shape: AttentionShape
    patterns: tuple[AttentionPattern, ...]
    rotations: tuple[Rotation, ...]  # by pattern


class ReferenceTextOps(ReferenceOps):
    """`TextOps` in numpy, in one floating-point type."""

    def rows_of(self, source: WeightSource, rows: Sequence[int]) -> WeightSource:
        return SourceOfRows(source, tuple(rows))

    def prepare_texts(
        self, step: TextIndices, shape: AttentionShape, patterns: Sequence[AttentionPattern]
    ) -> _PreparedTexts:
        rotations = {rope: self.rotation(step.positions, rope) for rope in {p.rope for p in patterns}}
        return _PreparedTexts(
            step, shape, tuple(patterns), tuple(rotations[pattern.rope] for pattern in patterns)
        )

    def embedding_of(
        self,
        prepared: _PreparedTexts,
        table: WeightSource,
        index: Literal["positions", "types"],
        first: int,
    ) -> np.ndarray:
        rows = prepared.step.positions if index == "positions" else prepared.step.types
        return table.rows(rows + first).astype(self.dtype, copy=False)

    def layer_norm(
        self, inputs: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, epsilon: float
    ) -> np.ndarray:
        centred = inputs - inputs.mean(axis=1, keepdims=True)
        variance = np.einsum("tf,tf->t", centred, centred)[:, None] / inputs.shape[1]
        rows = centred / np.sqrt(variance + epsilon).astype(self.dtype, copy=False) * weight
        return rows if bias is None else rows + bias

    def self_attention(
        self, prepared: _PreparedTexts, qkv: np.ndarray, pattern: int, norm: QkNorm | None = None
    ) -> np.ndarray:
        shape = prepared.shape
        rows = qkv.reshape(len(qkv), shape.heads + 2 * shape.kv_heads, shape.head_size)
        first_value = shape.heads + shape.kv_heads
        queries, keys, values = (
            rows[:, : shape.heads],
            rows[:, shape.heads : first_value],
            rows[:, first_value:],
        )
        if norm is not None:
            queries = normalise_heads(queries, norm.query, norm.epsilon)
            keys = normalise_heads(keys, norm.key, norm.epsilon)
        rotation = prepared.rotations[pattern]
        queries, keys = rotate(queries, rotation) * self.dtype.type(shape.scale), rotate(keys, rotation)
        output = np.empty((len(qkv), shape.heads, shape.head_size), self.dtype)
        starts = prepared.step.starts
        for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            count = max(1, _MAX_SCORES // (shape.heads * (end - start)))
            for first in range(start, end, count):
                some = slice(first, min(end, first + count))
                hidden = _hidden(
                    prepared.patterns[pattern], some.start - start, some.stop - start, end - start
                )
                output[some] = _attend(queries[some], keys[start:end], values[start:end], hidden, shape)
        return output.reshape(len(qkv), -1)

    def activation(self, inputs: np.ndarray, kind: Activation) -> np.ndarray:
        if kind == "tanh":
            return np.tanh(inputs)
        return gelu(inputs) if kind == "gelu" else gelu_tanh(inputs)

    def gelu_mul(self, gate_up: np.ndarray) -> np.ndarray:
        size = gate_up.shape[1] // 2
        return gelu(gate_up[:, :size]) * gate_up[:, size:]

    def pool(self, prepared: _PreparedTexts, rows: np.ndarray, pooling: Pooling) -> np.ndarray:
        starts = prepared.step.starts
        if pooling == "cls":
            return rows[starts[:-1]]
        if pooling == "last":
            return rows[starts[1:] - 1]
        counts = np.diff(starts)[:, None].astype(self.dtype)
        return np.add.reduceat(rows, starts[:-1], axis=0) / counts


def gelu(rows: np.ndarray) -> np.ndarray:
    """x * Phi(x), with the error function."""
    return 0.5 * rows * (1.0 + _erf(rows * rows.dtype.type(0.5**0.5)))


def _erf(x: np.ndarray) -> np.ndarray:
    """The error function. It is exact in float64. In float32 its error is about 2e-7 (Abramowitz and Stegun, 7.1.26):
    calling the exact function for each number would take most of the time of a forward pass."""
    if x.dtype != np.float32:
        return np.vectorize(math.erf, otypes=[x.dtype])(x)
    size = np.abs(x)
    t = 1.0 / (1.0 + np.float32(0.3275911) * size)
    p = np.float32(1.061405429)
    for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        p = p * t + np.float32(factor)
    return np.copysign(1.0 - p * t * np.exp(-size * size), x)


def _hidden(pattern: AttentionPattern, first: int, end: int, count: int) -> np.ndarray | None:
    """A mask, bool [queries, count]: the tokens that the queries first .. end - 1 do not see. None if they see all."""
    distance = np.arange(count) - np.arange(first, end)[:, None]
    hidden = distance > 0 if pattern.causal else np.zeros(distance.shape, bool)
    if pattern.window is not None:
        hidden |= np.abs(distance) >= pattern.window
    return hidden if hidden.any() else None


def _attend(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    hidden: np.ndarray | None,
    shape: AttentionShape,
) -> np.ndarray:
    count = len(queries)
    # [kv heads, queries of all heads of the group, head size]: one product per kv head
    grouped = queries.reshape(count, shape.kv_heads, -1, shape.head_size).transpose(1, 2, 0, 3)
    scores = grouped.reshape(shape.kv_heads, -1, shape.head_size) @ keys.transpose(1, 2, 0)
    scores = scores.reshape(shape.kv_heads, -1, count, scores.shape[-1])
    if shape.score_cap is not None:
        cap_scores(scores, shape.score_cap)
    if hidden is not None:
        np.copyto(scores, -np.inf, where=hidden)
    weights = softmax(scores).reshape(shape.kv_heads, -1, scores.shape[-1])
    attended = (weights @ values.transpose(1, 0, 2)).reshape(shape.kv_heads, -1, count, shape.head_size)
    return attended.transpose(2, 0, 1, 3).reshape(count, shape.heads, shape.head_size)
