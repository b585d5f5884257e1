"""The operations that a text encoder calls besides those of a decoder, and the index arrays of its step.

A step holds whole texts, so K and V are used in the step that computes them and are kept nowhere: there is no cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from weft.ops.base import AttentionPattern, AttentionShape, Ops, QkNorm, WeightSource

Pooling = Literal["mean", "cls", "last"]
"""One row of each text: the mean of its rows, its first row, or its last row."""

Activation = Literal["gelu", "gelu_tanh", "tanh"]
"""`gelu` is x * Phi(x), with the error function. `gelu_tanh` is its approximation with tanh."""


@dataclass(frozen=True)
class TextIndices:
    """What one step computes: T tokens of R whole texts. Text r has the tokens starts[r] to starts[r + 1] - 1."""

    token_ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T], from 0 in each text
    types: np.ndarray  # int64 [T], the part of a pair that a token belongs to
    starts: np.ndarray  # int64 [R + 1]


class TextOps(Ops, Protocol):
    """The operations of a text encoder. `prepared` is from `prepare_texts`; `Ops.embedding` takes it too."""

    def rows_of(self, source: WeightSource, rows: Sequence[int]) -> WeightSource:
        """A matrix of these rows of the matrix `source`, in float32."""

    def prepare_texts(
        self, step: TextIndices, shape: AttentionShape, patterns: Sequence[AttentionPattern]
    ) -> Any:
        """Computes what all layers of one step share. Layers refer to a pattern by its index in `patterns`."""

    def embedding_of(
        self, prepared: Any, table: Any, index: Literal["positions", "types"], first: int
    ) -> Any:
        """The rows of `table` for the positions or the types of the step, counted from the row `first`."""

    def layer_norm(self, inputs: Any, weight: Any, bias: Any | None, epsilon: float) -> Any:
        """Each row minus its mean, divided by its standard deviation, times the weight, plus the bias."""

    def self_attention(self, prepared: Any, qkv: Any, pattern: int, norm: QkNorm | None = None) -> Any:
        """Takes packed [Q | K | V] rows. Normalises Q and K if there is a norm, rotates them, and returns the attention
        of each token over the tokens of its text that the pattern lets it see: [T, heads * head size]."""

    def activation(self, inputs: Any, kind: Activation) -> Any: ...

    def gelu_mul(self, gate_up: Any) -> Any:
        """gelu(gate) * up, from packed [gate | up] rows."""

    def pool(self, prepared: Any, rows: Any, pooling: Pooling) -> Any:
        """One row of each text: [R, features]."""
