"""What a decoder has to know about a model besides its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.ops.base import AttentionPattern, AttentionShape


@dataclass(frozen=True)
class ExpertsConfig:
    """A feed-forward made of experts, of which each token uses a few."""

    count: int
    per_token: int
    feed_forward_size: int
    normalised: bool
    """The shares of the experts that a token uses are divided by their sum."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of rotary attention with grouped heads and a gated feed-forward, and all that differs between such.

    What has a default is what a plain Llama does.
    """

    architecture: str
    layers: int
    hidden_size: int
    feed_forward_size: int
    vocabulary_size: int
    max_context: int
    attention: AttentionShape
    patterns: tuple[AttentionPattern, ...]
    """The kinds of attention there are in the model."""
    layer_patterns: tuple[int, ...]
    """Which of them each layer uses."""
    norm_epsilon: float
    norm_offset: float = 0.0
    """Added to every norm's weight: a model that was trained on 1 + weight stores the weight alone."""
    pre_norms: bool = True
    """Norms of what goes into attention and feed-forward."""
    post_norms: bool = False
    """Norms of what comes out of them, before it is added."""
    qk_norm: Literal["head", "row"] | None = None
    """Queries and keys are normalised, each head by itself or all heads of a token together."""
    qkv_bias: bool = False
    output_bias: bool = False
    feed_forward_bias: bool = False
    experts: ExpertsConfig | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    tied_embedding: bool = False
    """The embedding is the output matrix too."""
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
        """Weights that one token is multiplied with in the layers: what computing it again would cost."""
        attention = self.hidden_size * (2 * self.query_size + 2 * self.kv_size)
        inner = self.feed_forward_size
        if self.experts is not None:
            inner = self.experts.per_token * self.experts.feed_forward_size
        return self.layers * (attention + 3 * self.hidden_size * inner)
