"""The decoder: one Llama-type forward pass, described by its configuration and written over the ops interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.errors import ModelFileError
from weft.models.config import ModelConfig
from weft.ops.base import Ops, StepIndices, WeightSource


@dataclass(frozen=True)
class _Layer:
    attention_norm: Any
    wqkv: Any
    wo: Any
    feed_forward_norm: Any
    w_gate_up: Any
    w_down: Any


class Decoder:
    """The weights of one model, packed once, and the forward pass over them."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, WeightSource], ops: Ops) -> None:
        self.config = config
        self.ops = ops
        loader = _Loader(config, weights, ops)
        self._embedding = loader.linear(("embedding", config.vocabulary_size, config.hidden_size))
        self._layers = [loader.layer(index) for index in range(config.layers)]
        self._final_norm = loader.vector("final_norm")
        # A model without an output matrix uses its embedding for that too.
        self._lm_head = self._embedding
        if "lm_head" in weights:
            self._lm_head = loader.linear(("lm_head", config.vocabulary_size, config.hidden_size))
        loader.refuse_what_is_left()

    def new_cache(self, blocks: int, block_size: int) -> Any:
        """An empty KV cache with the shape of this model."""
        return self.ops.new_cache(blocks, self.config.layers, block_size, self.config.attention)

    def forward(self, step: StepIndices, cache: Any) -> Any:
        """Compute the step's tokens, write their K and V to the cache, return the rows of `step.logit_indices`, from
        which `logits` makes logits."""
        ops, config = self.ops, self.config
        prepared = ops.prepare(step, cache, config.attention, config.rope)
        hidden = ops.embedding(prepared, self._embedding)
        for index, layer in enumerate(self._layers):
            qkv = ops.linear(ops.rms_norm(hidden, layer.attention_norm, config.norm_epsilon), layer.wqkv)
            queries = ops.rope_and_write(prepared, qkv, cache, index)
            attended = ops.paged_attention(prepared, queries, cache, index)
            hidden = ops.add(hidden, ops.linear(attended, layer.wo))
            gate_up = ops.linear(
                ops.rms_norm(hidden, layer.feed_forward_norm, config.norm_epsilon), layer.w_gate_up
            )
            hidden = ops.add(hidden, ops.linear(ops.silu_mul(gate_up), layer.w_down))
        selected = ops.select_logit_rows(prepared, hidden)
        return ops.rms_norm(selected, self._final_norm, config.norm_epsilon)

    def logits(self, rows: Any) -> Any:
        """[N, vocabulary] for rows that `forward` returned."""
        return self.ops.linear(rows, self._lm_head)


class _Loader:
    """Takes each tensor once, checks its shape against the configuration, and hands it to the ops."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, WeightSource], ops: Ops) -> None:
        self.config = config
        self.left = dict(weights)
        self.ops = ops

    def layer(self, index: int) -> _Layer:
        config, prefix = self.config, f"layers.{index}."
        hidden, feed_forward = config.hidden_size, config.feed_forward_size
        query_size, kv_size = config.heads * config.head_size, config.kv_heads * config.head_size
        return _Layer(
            attention_norm=self.vector(prefix + "attention_norm"),
            wqkv=self.linear(
                (prefix + "wq", query_size, hidden),
                (prefix + "wk", kv_size, hidden),
                (prefix + "wv", kv_size, hidden),
            ),
            wo=self.linear((prefix + "wo", hidden, query_size)),
            feed_forward_norm=self.vector(prefix + "feed_forward_norm"),
            w_gate_up=self.linear(
                (prefix + "w_gate", feed_forward, hidden), (prefix + "w_up", feed_forward, hidden)
            ),
            w_down=self.linear((prefix + "w_down", hidden, feed_forward)),
        )

    def vector(self, name: str) -> Any:
        return self.ops.load_vector(self.take(name, (self.config.hidden_size,)))

    def linear(self, *parts: tuple[str, int, int]) -> Any:
        return self.ops.load_linear([self.take(name, (outputs, inputs)) for name, outputs, inputs in parts])

    def take(self, name: str, shape: tuple[int, ...]) -> WeightSource:
        source = self.left.pop(name, None)
        if source is None:
            raise ModelFileError(f"{name}: the tensor is missing from the file")
        if source.shape != shape:
            raise ModelFileError(f"{name}: has shape {source.shape}, the model's metadata asks for {shape}")
        return source

    def refuse_what_is_left(self) -> None:
        """A tensor nobody asked for (a bias, an expert) means a model this decoder would compute wrongly."""
        if self.left:
            raise ModelFileError(
                f"{sorted(self.left)[0]}: this decoder has no use for the tensor (and {len(self.left) - 1} more); "
                f"the model is not a plain {self.config.architecture}"
            )
