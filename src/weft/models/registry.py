"""Finds the architecture of a checkpoint, and builds its configuration and decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.errors import ModelFileError
from weft.models.architectures import ARCHITECTURES, Architecture
from weft.models.config import ModelConfig
from weft.models.decoder import Decoder
from weft.models.defaults import DEFAULTS
from weft.models.fields import Fields, Layout
from weft.models.names import by_decoder_name, file_name
from weft.models.rope_fields import GGUF_ROPE_TENSORS
from weft.ops.base import Ops, WeightSource

# Architectures of `text_model`, by the beginnings of their names.
_TEXT_MODELS = (
    "Bert",
    "Roberta",
    "XLMRoberta",
    "ModernBert",
    "Gemma3TextModel",
    "bert",
    "modern-bert",
    "gemma-embedding",
)


def build_decoder(
    layout: Layout,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, WeightSource],
    ops: Ops,
    max_context: int | None = None,
) -> Decoder:
    """Builds the decoder of a checkpoint (see `weft.loading.checkpoint`) and loads its weights into `ops`.

    `max_context` limits the model's own context.
    """
    config = build_config(layout, metadata, tensors, max_context)
    renamed = find_architecture(layout, metadata).renamed
    weights = decoder_weights(layout, metadata, tensors)
    return Decoder(config, weights, ops, lambda name: file_name(layout, name, renamed))


def decoder_weights(
    layout: Layout, metadata: Mapping[str, Any], tensors: Mapping[str, WeightSource]
) -> dict[str, WeightSource]:
    """The tensors by the decoder's names, without the rope factors, which `build_config` reads."""
    rope_tensors = GGUF_ROPE_TENSORS if layout == "gguf" else frozenset()
    named = by_decoder_name(layout, tensors, find_architecture(layout, metadata).renamed)
    return {name: source for name, source in named.items() if name not in rope_tensors}


def build_config(
    layout: Layout,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, WeightSource],
    max_context: int | None = None,
) -> ModelConfig:
    """The configuration that `build_decoder` uses. Reads no weights."""
    architecture = find_architecture(layout, metadata)
    if layout == "huggingface":
        metadata = {**DEFAULTS[architecture.model_type], **metadata}
    named = by_decoder_name(layout, tensors, architecture.renamed)
    return architecture.configure(Fields(layout, architecture.gguf_name, metadata, named), max_context)


def find_architecture(layout: Layout, metadata: Mapping[str, Any]) -> Architecture:
    """The registry entry of a model. The error for an unknown architecture lists the supported ones."""
    if layout == "gguf":
        key, name = "general.architecture", metadata.get("general.architecture")
        known = {entry.gguf_name: entry for entry in reversed(ARCHITECTURES)}
    elif isinstance(metadata.get("architectures"), list) and metadata["architectures"]:
        key, name = "architectures", metadata["architectures"][0]
        known = {entry.class_name: entry for entry in ARCHITECTURES}
    else:
        key, name = "model_type", metadata.get("model_type")
        known = {entry.model_type: entry for entry in ARCHITECTURES}
    if not isinstance(name, str) or name not in known:
        # Checkpoints of known architectures may also contain code. The code matters only for an unknown architecture.
        code = (
            "the model needs its own Python code, and weft never runs code of a checkpoint; "
            if metadata.get("auto_map")
            else ""
        )
        if str(name).startswith(_TEXT_MODELS):
            code = "it is an embedding model or a reranker, which generates no text; "
        raise ModelFileError(
            f"{key}: {name!r:.80} is not supported; {code}weft supports {', '.join(sorted(known))}"
        )
    return known[name]
