"""The encoder: the forward pass of BERT and its relatives, controlled by `EncoderConfig` and written in terms of
`TextOps`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from weft.models.loader import TensorLoader
from weft.ops.base import AttentionPattern, AttentionShape, WeightSource
from weft.ops.texts import TextOps


@dataclass(frozen=True)
class EncoderConfig:
    """A transformer encoder. The defaults are BERT's."""

    architecture: str
    layers: int
    hidden_size: int
    feed_forward_size: int
    vocabulary_size: int
    max_tokens: int
    attention: AttentionShape
    patterns: tuple[AttentionPattern, ...]
    """The distinct combinations of rope and window in the model."""
    layer_patterns: tuple[int, ...]
    """For each layer, its index in `patterns`."""
    norm_epsilon: float
    positions: int = 0
    """Rows of the table of positions. 0: the model has no such table."""
    first_position: int = 0
    """The row of the first token. RoBERTa counts positions from the id of its padding token plus one."""
    types: int = 0
    """Rows of the table of token types. 0: the model has no such table."""
    pre_norms: bool = False
    """Norms of the inputs of attention and feed-forward, and a final norm, as in ModernBERT. The first layer has no norm
    before its attention: the norm of the embedding is enough. False: norms after the residual add, as in BERT."""
    norm_bias: bool = True
    attention_bias: bool = True
    feed_forward_bias: bool = True
    gated: bool = False
    """The feed-forward multiplies the activation by a second product."""
    activation: Literal["gelu", "gelu_tanh"] = "gelu"


@dataclass(frozen=True)
class _Norm:
    weight: Any
    bias: Any | None


@dataclass(frozen=True)
class _Layer:
    pattern: int
    attention_norm: _Norm | None
    wqkv: Any
    wo: Any
    attention_post_norm: _Norm | None
    feed_forward_norm: _Norm | None
    up: Any
    """With a gated feed-forward, gate and up as one matrix."""
    down: Any
    feed_forward_post_norm: _Norm | None


class Encoder:
    """The weights of one encoder, packed once at load, and the forward pass."""

    def __init__(
        self,
        config: EncoderConfig,
        weights: Mapping[str, WeightSource],
        ops: TextOps,
        file_name: Callable[[str], str] = str,
    ) -> None:
        """`weights` has the encoder's tensor names. `file_name` maps such a name to the name in the file, for
        error messages."""
        self.config = config
        self.ops = ops
        loader = _Loader(config, weights, ops, file_name)
        hidden = config.hidden_size
        self._embedding = loader.table("embedding", config.vocabulary_size)
        self._positions = loader.table("positions", config.positions) if config.positions else None
        self._types = loader.table("types", config.types) if config.types else None
        self._embedding_norm = loader.norm("embedding_norm")
        self._layers = [loader.layer(index) for index in range(config.layers)]
        self._final_norm = loader.norm("final_norm") if config.pre_norms else None
        loader.reject_unused_tensors()
        self.weight_bytes = loader.weight_bytes
        self.hidden_size = hidden
        gated = {"gelu": ops.gelu_mul, "gelu_tanh": ops.gelu_tanh_mul}
        self._activate: Callable[[Any], Any] = (
            gated[config.activation]
            if config.gated
            else lambda rows: ops.activation(rows, self.config.activation)
        )

    def hidden_rows(self, prepared: Any, select: Callable[[Any], Any] | None) -> Any:
        """The final hidden states. `select` chooses the tokens that are needed. None: all tokens are needed."""
        ops = self.ops
        hidden = ops.embedding(prepared, self._embedding)
        if self._positions is not None:
            rows = ops.embedding_of(prepared, self._positions, "positions", self.config.first_position)
            hidden = ops.add(hidden, rows)
        if self._types is not None:
            hidden = ops.add(hidden, ops.embedding_of(prepared, self._types, "types", 0))
        hidden = self._norm(hidden, self._embedding_norm)
        for layer in self._layers:
            qkv = ops.linear(self._norm(hidden, layer.attention_norm), layer.wqkv)
            attended = ops.self_attention(prepared, qkv, layer.pattern)
            if layer is self._layers[-1] and select is not None:
                # From here on, only the selected tokens are computed.
                attended, hidden = select(attended), select(hidden)
            hidden = self._norm(ops.add(hidden, ops.linear(attended, layer.wo)), layer.attention_post_norm)
            inner = self._activate(ops.linear(self._norm(hidden, layer.feed_forward_norm), layer.up))
            hidden = self._norm(ops.add(hidden, ops.linear(inner, layer.down)), layer.feed_forward_post_norm)
        return self._norm(hidden, self._final_norm)

    def _norm(self, rows: Any, norm: _Norm | None) -> Any:
        return (
            rows
            if norm is None
            else self.ops.layer_norm(rows, norm.weight, norm.bias, self.config.norm_epsilon)
        )


class _Loader(TensorLoader):
    """Loads the tensors of an encoder."""

    def __init__(
        self,
        config: EncoderConfig,
        weights: Mapping[str, WeightSource],
        ops: TextOps,
        file_name: Callable[[str], str],
    ) -> None:
        super().__init__(weights, ops, config.architecture, file_name)
        self.config = config

    def table(self, name: str, rows: int) -> Any:
        return self.count_bytes(self.ops.load_embedding(self.take(name, (rows, self.config.hidden_size))))

    def layer(self, index: int) -> _Layer:
        config, prefix = self.config, f"layers.{index}."
        hidden, inner, shape = config.hidden_size, config.feed_forward_size, config.attention
        query_size, kv_size = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        before, after = config.pre_norms, not config.pre_norms
        return _Layer(
            pattern=config.layer_patterns[index],
            attention_norm=self.norm(prefix + "attention_norm") if before and index > 0 else None,
            wqkv=self.fused(
                prefix + "wqkv",
                (prefix + "wq", query_size, hidden),
                (prefix + "wk", kv_size, hidden),
                (prefix + "wv", kv_size, hidden),
                bias=config.attention_bias,
            ),
            wo=self.linear((prefix + "wo", hidden, query_size), bias=config.attention_bias),
            attention_post_norm=self.norm(prefix + "attention_post_norm") if after else None,
            feed_forward_norm=self.norm(prefix + "feed_forward_norm") if before else None,
            up=self.fused(
                prefix + "w_gate_up",
                (prefix + "w_gate", inner, hidden),
                (prefix + "w_up", inner, hidden),
                bias=config.feed_forward_bias,
            )
            if config.gated
            else self.linear((prefix + "w_up", inner, hidden), bias=config.feed_forward_bias),
            down=self.linear((prefix + "w_down", hidden, inner), bias=config.feed_forward_bias),
            feed_forward_post_norm=self.norm(prefix + "feed_forward_post_norm") if after else None,
        )

    def norm(self, name: str) -> _Norm:
        return _Norm(self.vector(name), self.vector(f"{name}.bias") if self.config.norm_bias else None)

    def vector(self, name: str) -> Any:
        return self.count_bytes(self.ops.load_vector(self.take(name, (self.config.hidden_size,))))
