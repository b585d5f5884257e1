"""Checked access to a model's metadata, with one set of field names for GGUF metadata and config.json.

Code uses weft's field names. Error messages use the keys of the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from weft.errors import ModelFileError
from weft.ops.base import WeightSource

Layout = Literal["gguf", "huggingface"]

# Limits far above every real model. They keep a malicious file from causing huge loops or tables.
LARGEST_SIZE = (1 << 31) - 1
LARGEST_LAYERS = 4096
LARGEST_HEAD = 8192
LARGEST_EXPERTS = 4096

# Every real parameter is in this range. Products of a few such numbers neither overflow nor become zero.
_SMALLEST_NUMBER, _LARGEST_NUMBER = 1e-30, 1e30

# weft's name -> (GGUF key after the architecture's name, config.json keys). The first config.json key that is present
# wins. An empty string or tuple: this layout has no such key.
_KEYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "layers": ("block_count", ("num_hidden_layers",)),
    "hidden_size": ("embedding_length", ("hidden_size",)),
    "feed_forward_size": ("feed_forward_length", ("intermediate_size",)),
    "vocabulary_size": ("vocab_size", ("vocab_size",)),
    "max_context": ("context_length", ("max_position_embeddings",)),
    "norm_epsilon": ("attention.layer_norm_rms_epsilon", ("rms_norm_eps",)),
    "layer_norm_epsilon": ("attention.layer_norm_epsilon", ("layer_norm_eps", "norm_eps")),
    "local_window": ("attention.sliding_window", ("local_attention",)),
    "heads": ("attention.head_count", ("num_attention_heads",)),
    "kv_heads": ("attention.head_count_kv", ("num_key_value_heads",)),
    "head_size": ("attention.key_length", ("head_dim",)),
    "value_size": ("attention.value_length", ()),
    "window": ("attention.sliding_window", ("sliding_window",)),
    "window_period": ("attention.sliding_window_pattern", ("sliding_window_pattern",)),
    "layer_types": ("", ("layer_types",)),
    "uses_window": ("", ("use_sliding_window",)),
    "full_layers_first": ("", ("max_window_layers",)),
    "activation": ("", ("hidden_activation", "hidden_act")),
    "attention_bias": ("", ("attention_bias",)),
    "feed_forward_bias": ("", ("mlp_bias",)),
    "tied_embedding": ("", ("tie_word_embeddings",)),
    "attention_scale": ("attention.scale", ("attention_multiplier",)),
    "query_scale_divisor": ("", ("query_pre_attn_scalar",)),
    "embedding_scale": ("embedding_scale", ("embedding_multiplier",)),
    "residual_scale": ("residual_scale", ("residual_multiplier",)),
    "logit_divisor": ("logit_scale", ("logits_scaling",)),
    "score_cap": ("attn_logit_softcapping", ("attn_logit_softcapping",)),
    "logit_cap": ("final_logit_softcapping", ("final_logit_softcapping",)),
    "bidirectional": ("", ("use_bidirectional_attention",)),
    "experts": ("expert_count", ("num_local_experts", "num_experts")),
    "experts_per_token": ("expert_used_count", ("num_experts_per_tok",)),
    "expert_feed_forward_size": ("expert_feed_forward_length", ("moe_intermediate_size",)),
    "normalised_expert_weights": ("", ("norm_topk_prob",)),
    "expert_layer_period": ("", ("decoder_sparse_step",)),
    "layers_without_experts": ("", ("mlp_only_layers",)),
}


class Section:
    """Checked access to a mapping of a model file. A null counts as missing."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self.values = values
        self.prefix = prefix  # put before the key in error messages

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def error(self, key: str, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.prefix}{key}: {problem}")

    def size(
        self, key: str, default: int | None = None, largest: int = LARGEST_SIZE, smallest: int = 1
    ) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not smallest <= value <= largest:
            raise self.error(key, f"{value!r:.80} is not a whole number from {smallest} to {largest}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return self._number(key, self._value(key, default))

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if self.has(key) else None

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        values = self._value(key, None)
        if not isinstance(values, list) or len(values) != count:
            found = f"{len(values)} values" if isinstance(values, list) else f"{values!r:.80}"
            raise self.error(key, f"{found}, expected a list of {count} numbers")
        return tuple(self._number(key, value) for value in values)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"{value!r:.80} is neither true nor false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"{value!r:.80} is not a string")
        return value

    def section(self, key: str) -> Section:
        """A nested mapping; empty if it is missing."""
        value = self._value(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, f"{value!r:.80} is not an object")
        return Section(value, f"{self.prefix}{key}.")

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(key, "missing from the file")
        return value

    def _number(self, key: str, value: Any) -> float:
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not math.isfinite(value)
            or not _SMALLEST_NUMBER <= value <= _LARGEST_NUMBER
        ):
            raise self.error(
                key, f"{value!r:.80} is not a number from {_SMALLEST_NUMBER} to {_LARGEST_NUMBER}"
            )
        return float(value)


class Fields:
    """The metadata of one model in either layout, by weft's field names."""

    def __init__(
        self,
        layout: Layout,
        architecture: str,
        metadata: Mapping[str, Any],
        tensors: Mapping[str, WeightSource],
    ) -> None:
        self.layout = layout
        self.section = Section(metadata)
        self.architecture = architecture  # the GGUF name
        self._tensors = tensors  # by the decoder's names

    def key(self, name: str) -> str:
        """The field's key in this file; "" if the layout has no key for the field. config.json has several possible
        keys for some fields: the first that is present counts, or the first of all if none is present."""
        gguf_key, json_keys = _KEYS[name]
        if self.layout == "gguf":
            return self.gguf_key(gguf_key) if gguf_key else ""
        present = [key for key in json_keys if self.section.has(key)]
        return (present or [*json_keys, ""])[0]

    def gguf_key(self, rest: str) -> str:
        return f"{self.architecture}.{rest}"

    def has(self, name: str) -> bool:
        return self.section.has(self.key(name))

    def get(self, name: str) -> Any:
        """The unchecked value, or None."""
        return self.section.values.get(self.key(name))

    def error(self, name: str, problem: str) -> ModelFileError:
        return self.section.error(self.key(name), problem)

    def size(
        self, name: str, default: int | None = None, largest: int = LARGEST_SIZE, smallest: int = 1
    ) -> int:
        return self.section.size(self.key(name), default, largest, smallest)

    def number(self, name: str, default: float | None = None) -> float:
        return self.section.number(self.key(name), default)

    def optional_number(self, name: str) -> float | None:
        return self.section.optional_number(self.key(name))

    def flag(self, name: str, default: bool) -> bool:
        return self.section.flag(self.key(name), default)

    # --- tensors ------------------------------------------------------------------------------------------------

    def has_tensor(self, name: str) -> bool:
        return name in self._tensors

    def vector(self, name: str, count: int) -> tuple[float, ...]:
        """The values of a tensor that holds parameters, such as rope factors, instead of weights."""
        source = self._tensors.get(name)
        if source is None:
            raise ModelFileError(f"{name}: the tensor is missing from the file")
        if source.shape != (count,):
            raise ModelFileError(
                f"{name}: has shape {source.shape}, expected ({count},): one value for each rotated pair"
            )
        return Section({name: source.to_float32().tolist()}).numbers(name, count)
