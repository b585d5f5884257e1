"""The interface between a decoder and the arrays it runs on, and the index arrays one step needs.

A decoder calls these operations and nothing else, so it runs on any array library. The arrays it passes around are
opaque to it, hence `Any`.

    cell  = block id * block size + offset in the block    where one token's K and V live, in every layer
    cache = [blocks, layers, 2 (K, V), block size, kv heads, head size]    one block is one run of memory
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class StepIndices:
    """What one step computes: T tokens of R requests, in order, with logits wanted after S of the tokens.

    Request r owns the tokens query_starts[r] to query_starts[r + 1]; they are the last ones of its
    context_lengths[r] tokens. There is no prefill and no decode here: a request has one token or several.
    """

    token_ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T]
    cells: np.ndarray  # int64 [T]
    query_starts: np.ndarray  # int64 [R + 1]
    context_lengths: np.ndarray  # int64 [R], this step's tokens included
    block_tables: np.ndarray  # int64 [R, longest], padded with 0
    logit_indices: np.ndarray  # int64 [S], into the T tokens


@dataclass(frozen=True)
class AttentionShape:
    """The sizes every attention operation of a model shares."""

    heads: int
    kv_heads: int
    head_size: int


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding. `interleaved` turns pairs (0,1), (2,3), ...; otherwise (0, half), (1, half+1), ..."""

    base: float
    interleaved: bool


class WeightSource(Protocol):
    """A tensor of a model file, in whatever format it is stored."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def format_name(self) -> str: ...

    @property
    def raw(self) -> np.ndarray:
        """The stored bytes, a read-only view of the file."""

    def read_into(self, out: np.ndarray) -> None:
        """Write the values into `out`, float32 or float64, of the same shape."""

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """float32 copies of these rows of a matrix; nothing else of it is read."""

    def to_float32(self) -> np.ndarray:
        """A fresh float32 array of everything."""


class Ops(Protocol):
    """One implementation of everything a decoder does to arrays.

    Rows of activations are tokens: [T, features]. `prepared` is what `prepare` made of a step, `cache` what
    `new_cache` returned.
    """

    # --- once, at load ------------------------------------------------------------------------------------------

    def load_vector(self, source: WeightSource) -> Any:
        """A norm's weight."""

    def load_linear(self, sources: Sequence[WeightSource]) -> Any:
        """A linear layer from one or more [outputs, inputs] tensors, stacked by outputs into one product."""

    def new_cache(self, blocks: int, layers: int, block_size: int, shape: AttentionShape) -> Any:
        """An empty paged KV cache."""

    # --- once a step --------------------------------------------------------------------------------------------

    def prepare(self, step: StepIndices, cache: Any, shape: AttentionShape, rope: Rope) -> Any:
        """Everything the layers of one step share, in this implementation's own arrays."""

    def embedding(self, prepared: Any, table: Any) -> Any:
        """The rows of `table`, a linear layer's weight, for the step's token ids: [T, features]."""

    def select_logit_rows(self, prepared: Any, hidden: Any) -> Any:
        """The rows of the tokens after which logits are wanted: [S, features]."""

    # --- in every layer -----------------------------------------------------------------------------------------

    def linear(self, inputs: Any, weight: Any) -> Any:
        """inputs times the transposed weight: [T, outputs]."""

    def rms_norm(self, inputs: Any, weight: Any, epsilon: float) -> Any:
        """Each row divided by its root mean square, times the weight."""

    def rope_and_write(self, prepared: Any, qkv: Any, cache: Any, layer: int) -> Any:
        """Rotate Q and K of packed [Q | K | V] rows, write K and V to the cache, return Q.

        Every row is written before this returns: a row of the same step may read a block that another row fills.
        """

    def paged_attention(self, prepared: Any, queries: Any, cache: Any, layer: int) -> Any:
        """Causal attention of each token over its request's context, read through the block table, the tokens of
        this step too: [T, heads * head size]."""

    def silu_mul(self, gate_up: Any) -> Any:
        """silu(gate) * up of packed [gate | up] rows."""

    def add(self, left: Any, right: Any) -> Any:
        """The sum; an implementation may write it into `left`, which the caller does not use again."""
