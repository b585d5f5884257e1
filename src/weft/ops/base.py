"""The interface between a decoder and the arrays it runs on, and the index arrays one step needs.

A decoder calls these operations and nothing else, so it runs on any array library. The arrays it passes around are
opaque to it, hence `Any`.

    cell  = block id * block size + offset in the block    where one token's K and V live, in every layer
    cache = [blocks, layers, 2 (K, V), ...]                one block is one run of memory; inside, ops have their own order
    store = [blocks, layers, ...]                          the same for blocks that are quantised

A query reads the blocks that lie behind its tail from the store, if there is one (`weft.tiers.stored_blocks`), and the
others from the cache in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np


@dataclass(frozen=True)
class StoreIndices:
    """What one step reads from the store, and what it puts there: M blocks, quantised layer by layer as soon as the step
    has written its own K and V of a layer, which may belong to them."""

    tables: np.ndarray  # int64 [R, longest], padded with 0
    moved_from: np.ndarray  # int64 [M], blocks of the full tier
    moved_to: np.ndarray  # int64 [M], blocks of the store


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
    store: StoreIndices | None = None  # of a two-tier cache


@dataclass(frozen=True)
class TwoTierCache:
    """A cache whose older blocks are quantised: what the operations get where a plain cache is an array alone."""

    full: Any  # of `Ops.new_cache`
    store: Any  # of `Ops.new_store`
    bits: int
    tail_blocks: int


@dataclass(frozen=True)
class AttentionShape:
    """What every attention operation of a model shares.

    A query's product with a key is multiplied by `scale`; with a `score_cap` c it then becomes c * tanh(score / c).
    """

    heads: int
    kv_heads: int
    head_size: int
    scale: float
    score_cap: float | None = None


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: at position p, pair i of a head turns by p * frequencies[i] and grows by `scale`.

    With n frequencies the first 2n features of a head turn and the rest stay as they are. `interleaved` turns the
    pairs (0, 1), (2, 3), ...; otherwise they are (0, n), (1, n + 1), ...
    """

    frequencies: tuple[float, ...]
    interleaved: bool
    scale: float = 1.0


@dataclass(frozen=True)
class AttentionPattern:
    """How the layers of one kind attend. With a window w, position p sees p - w + 1 to p; without one, 0 to p."""

    rope: Rope
    window: int | None = None


@dataclass(frozen=True)
class QkNorm:
    """The norm of queries and keys before they turn. A vector of one head's size is applied to each head, one of all
    heads' size to the whole row."""

    query: Any
    key: Any
    epsilon: float


LinearRole = Literal["layer", "words", "router"]
"""What a linear layer does: one of many alike; from features to the words of the vocabulary; choose experts. Where
weights are quantised on request, the latter two are more delicate."""


class WeightSource(Protocol):
    """A tensor of a model file, in whatever format it is stored."""

    @property
    def name(self) -> str:
        """As the file calls it."""

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

    def load_vector(self, source: WeightSource, offset: float = 0.0) -> Any:
        """A norm's weight, with `offset` added to every value."""

    def load_linear(
        self,
        sources: Sequence[WeightSource],
        biases: Sequence[WeightSource] = (),
        role: LinearRole = "layer",
    ) -> Any:
        """A linear layer from one or more [outputs, inputs] tensors, stacked by outputs into one product; with
        biases, one [outputs] tensor for each."""

    def load_experts(
        self, gate: Sequence[WeightSource], up: Sequence[WeightSource], down: Sequence[WeightSource]
    ) -> Any:
        """The feed-forwards of a mixture. Each of the three is one [experts, outputs, inputs] tensor, or a tensor
        [outputs, inputs] for each expert."""

    def load_embedding(self, source: WeightSource) -> Any:
        """A [vocabulary, features] table that is only ever looked up: it may stay as the file stores it."""

    def nbytes(self, weight: Any) -> int:
        """The memory that one of the above holds."""

    def new_cache(self, blocks: int, layers: int, block_size: int, shape: AttentionShape) -> Any:
        """An empty paged KV cache."""

    def new_store(self, blocks: int, layers: int, block_size: int, shape: AttentionShape, bits: int) -> Any:
        """An empty store, of codes of 4 or 8 bits (`weft.ops.store_format`)."""

    # --- once a step --------------------------------------------------------------------------------------------

    def prepare(
        self, step: StepIndices, cache: Any, shape: AttentionShape, patterns: Sequence[AttentionPattern]
    ) -> Any:
        """Everything the layers of one step share, in this implementation's own arrays. Layers name their pattern
        by its index in `patterns`."""

    def embedding(self, prepared: Any, table: Any, scale: float = 1.0) -> Any:
        """The rows of `table` for the step's token ids, times `scale`: [T, features]. The table is what
        `load_embedding` made, or a linear layer whose weight serves for both."""

    def select_logit_rows(self, prepared: Any, hidden: Any) -> Any:
        """The rows of the tokens after which logits are wanted: [S, features]."""

    def scale_and_cap(self, logits: Any, scale: float, cap: float | None) -> Any:
        """logits * scale, and with a cap c then c * tanh(logits / c); may be written into `logits`."""

    # --- in every layer -----------------------------------------------------------------------------------------

    def linear(self, inputs: Any, weight: Any) -> Any:
        """inputs times the transposed weight, plus the bias where there is one: [T, outputs]."""

    def rms_norm(self, inputs: Any, weight: Any, epsilon: float) -> Any:
        """Each row divided by its root mean square, times the weight."""

    def rope_and_write(
        self, prepared: Any, qkv: Any, cache: Any, layer: int, pattern: int, norm: QkNorm | None = None
    ) -> Any:
        """Of packed [Q | K | V] rows: normalise Q and K where there is a norm, rotate them, write K and V to the
        cache, move the blocks that the step moves to the store, return Q.

        Every row is written before this returns: a row of the same step may read a block that another row fills.
        """

    def paged_attention(self, prepared: Any, queries: Any, cache: Any, layer: int, pattern: int) -> Any:
        """Causal attention of each token over what the pattern lets it see of its request's context, read through
        the block table, the tokens of this step too: [T, heads * head size]."""

    def silu_mul(self, gate_up: Any) -> Any:
        """silu(gate) * up of packed [gate | up] rows."""

    def gelu_tanh_mul(self, gate_up: Any) -> Any:
        """gelu(gate) * up of packed [gate | up] rows, with the tanh form of gelu."""

    def mixture(self, inputs: Any, router: Any, experts: Any, per_token: int, normalise: bool) -> Any:
        """A feed-forward by experts. The softmax of the router's output, a linear layer, gives each expert a share
        of a token; the `per_token` highest count (of equal ones the first), with `normalise` divided by their sum.
        The outputs of these experts, silu(gate) * up and then down, times their shares, are summed in the order of
        their numbers."""

    def add(self, left: Any, right: Any, scale: float = 1.0) -> Any:
        """left + right * scale; an implementation may write it into either, the caller uses neither again."""
