"""The operations that a decoder calls, and the index arrays of a step.

A decoder uses only these operations, so it runs on any array library. It does not look into the arrays, so their type
is `Any`.

    cell  = block id * block size + offset in the block    the position of a token's K and V, in every layer
    cache = [blocks, layers, ...]                          K and V; a block is contiguous, its inner layout depends
                                                           on the ops
    store = [blocks, layers, ...]                          the same for quantised blocks

With a store, attention reads the newest tokens of a sequence (its tail) from the cache in full precision. It reads
all older tokens from the store. `weft.tiers.stored_blocks` says where the tail begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np


@dataclass(frozen=True)
class StoreIndices:
    """The store tables of a step, and the M blocks that the step moves to the store. Each layer of a moved block is
    quantised after the step has written K and V of that layer: the step may still fill the block."""

    tables: np.ndarray  # int64 [R, longest], padded with 0
    moved_from: np.ndarray  # int64 [M], blocks of the full tier
    moved_to: np.ndarray  # int64 [M], blocks of the store


@dataclass(frozen=True)
class StepIndices:
    """What one step computes: T tokens of R requests, in order, with logits for S of the tokens.

    Request r has the tokens query_starts[r] to query_starts[r + 1] - 1. They are the last of its context_lengths[r]
    tokens. Prefill and decode are the same here: a request has one token or several.
    """

    token_ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T]
    cells: np.ndarray  # int64 [T]
    query_starts: np.ndarray  # int64 [R + 1]
    context_lengths: np.ndarray  # int64 [R], including the tokens of this step
    block_tables: np.ndarray  # int64 [R, longest], padded with 0
    logit_indices: np.ndarray  # int64 [S], into the T tokens
    store: StoreIndices | None = None  # only with a two-tier cache


@dataclass(frozen=True)
class TwoTierCache:
    """A cache with quantised older blocks. Operations get it in place of the array of a plain cache."""

    full: Any  # from `Ops.new_cache`
    store: Any  # from `Ops.new_store`
    bits: int
    tail_blocks: int


@dataclass(frozen=True)
class AttentionShape:
    """The parameters that all attention operations of a model share.

    The score of a query and a key is their product times `scale`. With a `score_cap` c it becomes c * tanh(score / c).
    """

    heads: int
    kv_heads: int
    head_size: int
    scale: float
    score_cap: float | None = None


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: at position p, pair i is rotated by p * frequencies[i] and scaled by `scale`.

    With n frequencies the first 2n features of a head are rotated, the others unchanged. `interleaved` pairs are
    (0, 1), (2, 3), ...; the others are (0, n), (1, n + 1), ...
    """

    frequencies: tuple[float, ...]
    interleaved: bool
    scale: float = 1.0


@dataclass(frozen=True)
class AttentionPattern:
    """The attention of one kind of layer. Position p attends to 0 .. p, or with a window w to p - w + 1 .. p.

    Without `causal`, p also attends to the positions after it: to all, or with a window to those up to p + w - 1. Only
    operations on whole texts (`weft.ops.texts`) can do that. A rope without frequencies rotates nothing.
    """

    rope: Rope
    window: int | None = None
    causal: bool = True


@dataclass(frozen=True)
class QkNorm:
    """The norm of queries and keys before RoPE. A weight of the size of one head applies to each head; a weight of the
    size of all heads applies to the whole row."""

    query: Any
    key: Any
    epsilon: float


LinearRole = Literal["layer", "vocabulary", "router"]
"""The role of a linear layer: "vocabulary" is the output layer or the embedding, "router" is the router of a mixture,
and "layer" is any other. With `quantize`, the output layer, the embedding and routers keep more precision."""


class WeightSource(Protocol):
    """A tensor of a model file, in the format in which it is stored."""

    @property
    def name(self) -> str:
        """The name of the tensor in the model file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def format_name(self) -> str: ...

    @property
    def raw(self) -> np.ndarray:
        """The stored bytes, a read-only view of the file."""

    def read_into(self, out: np.ndarray) -> None:
        """Writes the values into `out`, a float32 or float64 array of the same shape."""

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """These rows of a matrix as float32. Reads no other rows."""

    def to_float32(self) -> np.ndarray:
        """All values as a new float32 array."""


class Ops(Protocol):
    """All operations of a decoder, in one implementation.

    Activations are [T, features], one row per token. `prepared` is from `prepare`, `cache` from `new_cache`.
    """

    # --- once, at load ------------------------------------------------------------------------------------------

    def load_vector(self, source: WeightSource, offset: float = 0.0) -> Any:
        """The weight of a norm, with `offset` added to every value."""

    def load_linear(
        self,
        sources: Sequence[WeightSource],
        biases: Sequence[WeightSource] = (),
        role: LinearRole = "layer",
    ) -> Any:
        """A linear layer from one or more [outputs, inputs] tensors, stacked by outputs. `biases` has one [outputs]
        tensor for each of them, or none."""

    def load_experts(
        self, gate: Sequence[WeightSource], up: Sequence[WeightSource], down: Sequence[WeightSource]
    ) -> Any:
        """The feed-forward layers of a mixture of experts. Each of the three is one [experts, outputs, inputs]
        tensor, or one [outputs, inputs] tensor per expert."""

    def load_embedding(self, source: WeightSource) -> Any:
        """A [vocabulary, features] table that is only used for lookups. It may keep the format of the file."""

    def nbytes(self, weight: Any) -> int:
        """The memory that a loaded weight takes."""

    def new_cache(self, blocks: int, layers: int, block_size: int, shape: AttentionShape) -> Any:
        """An empty paged KV cache."""

    def new_store(self, blocks: int, layers: int, block_size: int, shape: AttentionShape, bits: int) -> Any:
        """An empty store, with codes of 4 or 8 bits (`weft.ops.store_format`)."""

    # --- once per step ------------------------------------------------------------------------------------------

    def prepare(
        self, step: StepIndices, cache: Any, shape: AttentionShape, patterns: Sequence[AttentionPattern]
    ) -> Any:
        """Computes what all layers of one step share, in the arrays of this implementation. Layers refer to a pattern
        by its index in `patterns`."""

    def embedding(self, prepared: Any, table: Any, scale: float = 1.0) -> Any:
        """The rows of `table` for the token ids of the step, times `scale`: [T, features]. `table` is from
        `load_embedding`, or is the output layer if the model ties both."""

    def select_logit_rows(self, prepared: Any, hidden: Any) -> Any:
        """The rows of the tokens in `logit_indices`: [S, features]."""

    def scale_and_cap(self, logits: Any, scale: float, cap: float | None) -> Any:
        """logits * scale, then c * tanh(logits / c) with a cap c. The result may overwrite `logits`."""

    # --- in every layer -----------------------------------------------------------------------------------------

    def linear(self, inputs: Any, weight: Any) -> Any:
        """inputs times the transposed weight, plus the bias if the layer has one: [T, outputs]."""

    def rms_norm(self, inputs: Any, weight: Any, epsilon: float) -> Any:
        """Each row divided by its root mean square, times the weight."""

    def rope_and_write(
        self, prepared: Any, qkv: Any, cache: Any, layer: int, pattern: int, norm: QkNorm | None = None
    ) -> Any:
        """Takes packed [Q | K | V] rows. Normalises Q and K if there is a norm, rotates them, writes K and V to the
        cache, moves the blocks of this step to the store, and returns Q.

        All rows are written before the call returns: a row may read a block that another row of the same step fills.
        """

    def paged_attention(self, prepared: Any, queries: Any, cache: Any, layer: int, pattern: int) -> Any:
        """Causal attention of each token over the context of its request, within the window of the pattern: [T, heads *
        head size]. All K and V are read through the block table, also those of this step."""

    def silu_mul(self, gate_up: Any) -> Any:
        """silu(gate) * up, from packed [gate | up] rows."""

    def gelu_tanh_mul(self, gate_up: Any) -> Any:
        """gelu(gate) * up, from packed [gate | up] rows, with the tanh form of gelu."""

    def mixture(self, inputs: Any, router: Any, experts: Any, per_token: int, normalise: bool) -> Any:
        """A mixture of experts. The linear layer `router` and a softmax give each expert a weight for each token.

        A token uses the `per_token` experts with the highest weights; at a tie, the expert with the lower index. With
        `normalise`, these weights are divided by their sum. An expert computes down(silu(gate) * up). The result is the
        weighted sum of the experts' outputs, added in the order of the experts.
        """

    def add(self, left: Any, right: Any, scale: float = 1.0) -> Any:
        """left + right * scale. The result may overwrite either input; the caller uses neither again."""
