"""The configuration of a decoder: everything except the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.ops.base import AttentionPattern, AttentionShape


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts."""

    count: int
    per_token: int
    feed_forward_size: int
    normalised: bool
    """The routing weights of a token's selected experts are divided by their sum."""


@dataclass(frozen=True)
class ModelConfig:
    """A transformer decoder with rope, grouped-query attention and a gated feed-forward. The defaults are Llama's."""

    architecture: str
    layers: int
    hidden_size: int
    feed_forward_size: int
    vocabulary_size: int
    max_context: int
    attention: AttentionShape
    patterns: tuple[AttentionPattern, ...]
    """The distinct combinations of rope and window in the model."""
    layer_patterns: tuple[int, ...]
    """For each layer, its index in `patterns`."""
    norm_epsilon: float
    norm_offset: float = 0.0
    """Added to every norm weight. Gemma multiplies by 1 + weight and stores the weight."""
    pre_norms: bool = True
    """Norms of the inputs of attention and feed-forward."""
    post_norms: bool = False
    """Norms of the outputs of attention and feed-forward, before the residual add."""
    qk_norm: Literal["head", "row"] | None = None
    """Queries and keys are normalised: each head separately, or all heads of a token together."""
    qkv_bias: bool = False
    output_bias: bool = False
    feed_forward_bias: bool = False
    experts: ExpertsConfig | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    tied_embedding: bool = False
    """The embedding matrix is also the lm_head."""
    has_logits: bool = True
    """False: the model makes vectors, and its lm_head is not loaded."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None

    @property
    def query_size(self) -> int:
        return self.attention.heads * self.attention.head_size

    @property
    def kv_size(self) -> int:
        return self.attention.kv_heads * self.attention.head_size

    @property
    def multiplications_per_token(self) -> int:
        """Multiplications in the layers for one token: a measure of what recomputing it costs."""
        attention = self.hidden_size * (2 * self.query_size + 2 * self.kv_size)
        inner = self.feed_forward_size
        if self.experts is not None:
            inner = self.experts.per_token * self.experts.feed_forward_size
        return self.layers * (attention + 3 * self.hidden_size * inner)
