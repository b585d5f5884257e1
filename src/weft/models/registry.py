"""From a model file's architecture and metadata to the configuration of the decoder."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from weft.errors import ModelFileError
from weft.models.config import ModelConfig
from weft.models.decoder import Decoder
from weft.models.names import by_decoder_name
from weft.ops.base import Ops, Rope, WeightSource

# Far beyond any model there is; keeps a hostile file from asking for loops or tables of absurd length.
_LARGEST = 1 << 31


def build_decoder(
    layout: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, WeightSource],
    ops: Ops,
    max_context: int | None = None,
) -> Decoder:
    """The decoder of a checkpoint (see `weft.loading.checkpoint`), its weights loaded into `ops`.

    `max_context` shortens the model's own context.
    """
    config = build_config(metadata)
    if max_context is not None:
        config = dataclasses.replace(config, max_context=min(max_context, config.max_context))
    return Decoder(config, by_decoder_name(tensors), ops)


def build_config(metadata: Mapping[str, Any]) -> ModelConfig:
    """The configuration that GGUF metadata describes; refuses architectures no decoder of ours computes."""
    architecture = metadata.get("general.architecture")
    builder = _BUILDERS.get(architecture) if isinstance(architecture, str) else None
    if builder is None:
        raise ModelFileError(
            f"general.architecture: {architecture!r:.80} is not supported; weft runs {', '.join(sorted(_BUILDERS))}"
        )
    return builder(metadata)


def _llama(metadata: Mapping[str, Any]) -> ModelConfig:
    for key in ("llama.rope.scaling.type", "llama.expert_count"):
        # Ignoring these would give fluent nonsense instead of an error.
        if metadata.get(key) not in (None, "none", 0):
            raise ModelFileError(f"{key}: {metadata[key]!r:.80} is not supported yet")
    hidden_size = _size(metadata, "llama.embedding_length")
    heads = _size(metadata, "llama.attention.head_count")
    head_size = _size(metadata, "llama.attention.key_length", hidden_size // heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if _size(metadata, key, head_size) != head_size:
            raise ModelFileError(
                f"{key}: {metadata[key]} differs from the head size {head_size}; not supported yet"
            )
    tokens = metadata.get("tokenizer.ggml.tokens")
    return ModelConfig(
        architecture="llama",
        layers=_size(metadata, "llama.block_count"),
        hidden_size=hidden_size,
        feed_forward_size=_size(metadata, "llama.feed_forward_length"),
        heads=heads,
        kv_heads=_size(metadata, "llama.attention.head_count_kv", heads),
        head_size=head_size,
        vocabulary_size=_size(
            metadata, "llama.vocab_size", len(tokens) if isinstance(tokens, list) else None
        ),
        max_context=_size(metadata, "llama.context_length"),
        norm_epsilon=_positive(metadata, "llama.attention.layer_norm_rms_epsilon"),
        # GGUF files of this architecture hold the rows of Q and K in the order that turns neighbouring pairs.
        rope=Rope(base=_positive(metadata, "llama.rope.freq_base", 10_000.0), interleaved=True),
    )


_BUILDERS: dict[str, Callable[[Mapping[str, Any]], ModelConfig]] = {"llama": _llama}


def _size(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = metadata.get(key, default)
    if value is None:
        raise ModelFileError(f"{key}: missing from the file")
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < _LARGEST:
        raise ModelFileError(f"{key}: {value!r:.80} is not a whole number from 1 to {_LARGEST - 1}")
    return value


def _positive(metadata: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = metadata.get(key, default)
    if value is None:
        raise ModelFileError(f"{key}: missing from the file")
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ModelFileError(f"{key}: {value!r:.80} is not a positive number")
    return float(value)
