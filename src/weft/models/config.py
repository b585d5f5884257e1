"""What a decoder has to know about a model besides its weights."""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import ModelFileError
from weft.ops.base import AttentionShape, Rope


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-type decoder: pre-norm layers of rotary attention with grouped heads and a gated feed-forward."""

    architecture: str
    layers: int
    hidden_size: int
    feed_forward_size: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary_size: int
    max_context: int
    norm_epsilon: float
    rope: Rope

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ModelFileError(
                f"{self.architecture}: {self.heads} attention heads cannot share {self.kv_heads} key-value heads evenly"
            )
        if self.head_size % 2:
            raise ModelFileError(
                f"{self.architecture}: head size {self.head_size} is odd; rotary embedding needs pairs"
            )

    @property
    def attention(self) -> AttentionShape:
        return AttentionShape(self.heads, self.kv_heads, self.head_size)
