"""The decoder: the forward pass of all architectures, controlled by `ModelConfig` and written in terms of `Ops`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.models.config import ModelConfig
from weft.models.loader import TensorLoader
from weft.ops.base import Ops, QkNorm, StepIndices, WeightSource

Attend = Callable[[Any, int, int, QkNorm | None], Any]
"""Attention of one layer: takes packed [Q | K | V] rows, the layer, its pattern and its norm of Q and K."""


@dataclass(frozen=True)
class _FeedForward:
    gate_up: Any
    down: Any


@dataclass(frozen=True)
class _Mixture:
    router: Any
    experts: Any


@dataclass(frozen=True)
class _Layer:
    """The weights of one layer. A norm that the model lacks is None."""

    pattern: int
    attention_norm: Any | None
    wqkv: Any
    qk_norm: QkNorm | None
    wo: Any
    attention_post_norm: Any | None
    feed_forward_norm: Any | None
    feed_forward: _FeedForward | _Mixture
    feed_forward_post_norm: Any | None


class Decoder:
    """The weights of one model, packed once at load, and the forward pass."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, WeightSource],
        ops: Ops,
        file_name: Callable[[str], str] = str,
    ) -> None:
        """`weights` has the decoder's tensor names. `file_name` maps such a name to the name in the file, for
        error messages."""
        self.config = config
        self.ops = ops
        loader = _Loader(config, weights, ops, file_name)
        self._embedding, self._lm_head = loader.embedding_and_lm_head()
        self._layers = [loader.layer(index) for index in range(config.layers)]
        self._final_norm = loader.vector("final_norm", config.hidden_size)
        loader.reject_unused_tensors()
        self.weight_bytes = loader.weight_bytes
        """The memory of the weights."""
        self._activate = {"silu": ops.silu_mul, "gelu_tanh": ops.gelu_tanh_mul}[config.activation]

    def new_cache(self, blocks: int, block_size: int) -> Any:
        """An empty KV cache with the shape of this model."""
        return self.ops.new_cache(blocks, self.config.layers, block_size, self.config.attention)

    def new_store(self, blocks: int, block_size: int, bits: int) -> Any:
        """An empty store: the tier of quantised KV blocks."""
        return self.ops.new_store(blocks, self.config.layers, block_size, self.config.attention, bits)

    def forward(self, step: StepIndices, cache: Any) -> Any:
        """Computes the step's tokens and writes their K and V to the cache.

        Returns the final hidden states, one row for each of `step.logit_indices`, for `logits`.
        """
        ops, config = self.ops, self.config
        prepared = ops.prepare(step, cache, config.attention, config.patterns)

        def attend(qkv: Any, index: int, pattern: int, norm: QkNorm | None) -> Any:
            queries = ops.rope_and_write(prepared, qkv, cache, index, pattern, norm)
            return ops.paged_attention(prepared, queries, cache, index, pattern)

        return self.hidden_rows(prepared, attend, lambda rows: ops.select_logit_rows(prepared, rows))

    def hidden_rows(self, prepared: Any, attend: Attend, select: Callable[[Any], Any] | None) -> Any:
        """The final hidden states. `select` chooses the tokens that are needed. None: all tokens are needed."""
        ops, config = self.ops, self.config
        hidden = ops.embedding(prepared, self._embedding, config.embedding_scale)
        for index, layer in enumerate(self._layers):
            qkv = ops.linear(self._norm(hidden, layer.attention_norm), layer.wqkv)
            attended = attend(qkv, index, layer.pattern, layer.qk_norm)
            if layer is self._layers[-1] and select is not None:
                # From here on, only the selected tokens are computed. Of the other tokens, only K and V are needed,
                # which are computed already.
                attended = select(attended)
                hidden = select(hidden)
            output = self._norm(ops.linear(attended, layer.wo), layer.attention_post_norm)
            hidden = ops.add(hidden, output, config.residual_scale)
            output = self._feed_forward(self._norm(hidden, layer.feed_forward_norm), layer.feed_forward)
            output = self._norm(output, layer.feed_forward_post_norm)
            hidden = ops.add(hidden, output, config.residual_scale)
        return self._norm(hidden, self._final_norm)

    def step(self, step: StepIndices, cache: Any, sampled: int) -> tuple[Any, Any]:
        """Runs `forward`. Returns the logits of its first `sampled` rows, and the remaining rows as hidden states."""
        rows = self.forward(step, cache)
        return self.logits(rows[:sampled]), rows[sampled:]

    def logits(self, rows: Any) -> Any:
        """The logits for rows of hidden states that `forward` returned."""
        logits = self.ops.linear(rows, self._lm_head)
        if self.config.logit_scale == 1.0 and self.config.logit_cap is None:
            return logits
        return self.ops.scale_and_cap(logits, self.config.logit_scale, self.config.logit_cap)

    def _feed_forward(self, rows: Any, weights: _FeedForward | _Mixture) -> Any:
        if isinstance(weights, _FeedForward):
            return self.ops.linear(self._activate(self.ops.linear(rows, weights.gate_up)), weights.down)
        experts = self.config.experts
        assert experts is not None, "a layer has experts only if the configuration has"
        return self.ops.mixture(rows, weights.router, weights.experts, experts.per_token, experts.normalised)

    def _norm(self, rows: Any, weight: Any | None) -> Any:
        return rows if weight is None else self.ops.rms_norm(rows, weight, self.config.norm_epsilon)


class _Loader(TensorLoader):
    """Loads the tensors of a decoder."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, WeightSource],
        ops: Ops,
        file_name: Callable[[str], str],
    ) -> None:
        super().__init__(weights, ops, config.architecture, file_name)
        self.config = config

    def embedding_and_lm_head(self) -> tuple[Any, Any]:
        vocabulary, hidden = self.config.vocabulary_size, self.config.hidden_size
        if not self.config.has_logits:
            return self.count_bytes(
                self.ops.load_embedding(self.take("embedding", (vocabulary, hidden)))
            ), None
        if self.config.tied_embedding:
            shared = self.linear(("embedding", vocabulary, hidden), role="vocabulary")
            return shared, shared
        embedding = self.count_bytes(self.ops.load_embedding(self.take("embedding", (vocabulary, hidden))))
        return embedding, self.linear(("lm_head", vocabulary, hidden), role="vocabulary")

    def layer(self, index: int) -> _Layer:
        config, prefix = self.config, f"layers.{index}."
        hidden = config.hidden_size
        return _Layer(
            pattern=config.layer_patterns[index],
            attention_norm=self.norm(prefix + "attention_norm", config.pre_norms),
            wqkv=self.fused(
                prefix + "wqkv",
                (prefix + "wq", config.query_size, hidden),
                (prefix + "wk", config.kv_size, hidden),
                (prefix + "wv", config.kv_size, hidden),
                bias=config.qkv_bias,
            ),
            qk_norm=self.qk_norm(prefix),
            wo=self.linear((prefix + "wo", hidden, config.query_size), bias=config.output_bias),
            attention_post_norm=self.norm(prefix + "attention_post_norm", config.post_norms),
            feed_forward_norm=self.norm(prefix + "feed_forward_norm", config.pre_norms),
            feed_forward=self.feed_forward(prefix) if config.experts is None else self.mixture(prefix),
            feed_forward_post_norm=self.norm(prefix + "feed_forward_post_norm", config.post_norms),
        )

    def feed_forward(self, prefix: str) -> _FeedForward:
        hidden, inner = self.config.hidden_size, self.config.feed_forward_size
        bias = self.config.feed_forward_bias
        return _FeedForward(
            gate_up=self.fused(
                prefix + "w_gate_up",
                (prefix + "w_gate", inner, hidden),
                (prefix + "w_up", inner, hidden),
                bias=bias,
            ),
            down=self.linear((prefix + "w_down", hidden, inner), bias=bias),
        )

    def mixture(self, prefix: str) -> _Mixture:
        experts, hidden = self.config.experts, self.config.hidden_size
        assert experts is not None
        count, inner = experts.count, experts.feed_forward_size

        def take_all(part: str, outputs: int, inputs: int) -> list[WeightSource]:
            """The weights of one part of all experts: one tensor for all, or one tensor for each expert."""
            whole = f"{prefix}experts.{part}"
            if whole in self.unused:
                return [self.take(whole, (count, outputs, inputs))]
            return [
                self.take(f"{prefix}experts.{expert}.{part}", (outputs, inputs)) for expert in range(count)
            ]

        return _Mixture(
            router=self.linear((prefix + "router", count, hidden), role="router"),
            experts=self.count_bytes(
                self.ops.load_experts(
                    take_all("w_gate", inner, hidden),
                    take_all("w_up", inner, hidden),
                    take_all("w_down", hidden, inner),
                )
            ),
        )

    def norm(self, name: str, exists: bool) -> Any | None:
        return self.vector(name, self.config.hidden_size) if exists else None

    def qk_norm(self, prefix: str) -> QkNorm | None:
        config = self.config
        if config.qk_norm is None:
            return None
        row = config.qk_norm == "row"
        return QkNorm(
            query=self.vector(
                prefix + "query_norm", config.query_size if row else config.attention.head_size
            ),
            key=self.vector(prefix + "key_norm", config.kv_size if row else config.attention.head_size),
            epsilon=config.norm_epsilon,
        )

    def vector(self, name: str, size: int) -> Any:
        return self.count_bytes(self.ops.load_vector(self.take(name, (size,)), self.config.norm_offset))
