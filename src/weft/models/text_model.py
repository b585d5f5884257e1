"""A text model: an encoder, or a decoder used as one, with pooling and a head. It makes a vector or a score of a text.

EncoderConfig, Encoder      BERT, RoBERTa, XLM-RoBERTa, ModernBERT
ModelConfig, Decoder        Qwen, EmbeddingGemma: whole texts, without a cache
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from weft.embedding import EmbeddingSpec
from weft.errors import ModelFileError
from weft.models.architectures import EMBEDDING_DECODERS, Architecture
from weft.models.config import ModelConfig
from weft.models.decoder import Decoder
from weft.models.defaults import DEFAULTS, ENCODER_DEFAULTS
from weft.models.encoder import Encoder, EncoderConfig
from weft.models.encoder_architectures import ENCODERS, EncoderArchitecture, by_encoder_name
from weft.models.fields import Fields, Layout
from weft.models.names import by_decoder_name, file_name
from weft.models.rope_fields import GGUF_ROPE_TENSORS
from weft.ops.base import QkNorm, WeightSource
from weft.ops.texts import Activation, TextIndices, TextOps

HeadActivation = Literal["none", "gelu", "gelu_tanh", "tanh"]


@dataclass(frozen=True)
class HeadLayer:
    """A linear layer after pooling, in a file of its own (`2_Dense` of sentence-transformers) or in the model's."""

    weight: WeightSource
    bias: WeightSource | None = None
    activation: HeadActivation = "none"
    norm: WeightSource | None = None
    """A layer norm after the activation, as in ModernBERT."""


@dataclass(frozen=True)
class _LoadedLayer:
    """A `HeadLayer` whose weights are loaded into the ops."""

    linear: Any
    activation: Activation | None
    norm: Any | None


class TextModel:
    """The weights of one text model, and its forward pass. `forward` returns one row for each text: the vector before
    it is normalised, or the logits of a score."""

    def __init__(
        self, body: Encoder | Decoder, spec: EmbeddingSpec, head: Sequence[HeadLayer], ops: TextOps
    ) -> None:
        config = body.config
        self.spec = spec
        self.vocabulary_size = config.vocabulary_size
        self.types = config.types if isinstance(config, EncoderConfig) else 0
        """Token types that the model distinguishes. 0 or 1: none."""
        self._body = body
        self._ops = ops
        self._norm_epsilon = config.norm_epsilon
        self.weight_bytes = body.weight_bytes
        self._head = [self._load(layer) for layer in head]

    def _load(self, layer: HeadLayer) -> _LoadedLayer:
        ops = self._ops
        biases = () if layer.bias is None else (layer.bias,)
        # A head is small, and a score depends on small differences: it keeps the precision of the file.
        linear = ops.load_linear([layer.weight], biases, "router")
        norm = None if layer.norm is None else ops.load_vector(layer.norm)
        self.weight_bytes += ops.nbytes(linear) + (0 if norm is None else ops.nbytes(norm))
        return _LoadedLayer(linear, None if layer.activation == "none" else layer.activation, norm)

    def forward(self, step: TextIndices) -> Any:
        ops, config, pooling = self._ops, self._body.config, self.spec.pooling
        prepared = ops.prepare_texts(step, config.attention, config.patterns)
        # `cls` and `last` pick one token per text. The model picks it in its last layer, and skips the other tokens from
        # there on. A mean needs all tokens.
        select = None if pooling == "mean" else (lambda rows: ops.pool(prepared, rows, pooling))
        if isinstance(self._body, Decoder):

            def attend(qkv: Any, index: int, pattern: int, norm: QkNorm | None) -> Any:
                return ops.self_attention(prepared, qkv, pattern, norm)

            rows = self._body.hidden_rows(prepared, attend, select)
        else:
            rows = self._body.hidden_rows(prepared, select)
        if pooling == "mean":
            rows = ops.pool(prepared, rows, pooling)
        for layer in self._head:
            rows = ops.linear(rows, layer.linear)
            if layer.activation is not None:
                rows = ops.activation(rows, layer.activation)
            if layer.norm is not None:
                rows = ops.layer_norm(rows, layer.norm, None, self._norm_epsilon)
        return rows


def build_text_model(
    layout: Layout,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, WeightSource],
    ops: TextOps,
    spec: EmbeddingSpec,
    dense: Sequence[HeadLayer] = (),
) -> TextModel:
    """Builds the text model of a checkpoint and loads its weights into `ops`. `dense` has the layers after pooling that
    are in files of their own."""
    architecture = find_text_architecture(layout, metadata)
    body: Encoder | Decoder
    if isinstance(architecture, EncoderArchitecture):
        body, head = _encoder(architecture, layout, metadata, tensors, ops, spec)
    else:
        body, head = _decoder(architecture, layout, metadata, tensors, ops, spec)
    layers = [*head, *dense]
    _check_sizes(layers, body.config.hidden_size, 2 if spec.yes_no else spec.dimensions)
    if spec.max_tokens > (longest := _longest(body.config)):
        raise ModelFileError(
            f"the longest input is {spec.max_tokens} tokens, but the model has {longest} positions"
        )
    return TextModel(body, spec, layers, ops)


def check_text_model(
    layout: Layout, metadata: Mapping[str, Any], tensors: Mapping[str, WeightSource]
) -> None:
    """Raises ModelFileError if the files describe a text model that weft cannot run. Reads no weights."""
    architecture = find_text_architecture(layout, metadata)
    if isinstance(architecture, EncoderArchitecture):
        _encoder_config(architecture, layout, metadata, by_encoder_name(layout, tensors, architecture)[0])
    else:
        _decoder_config(
            architecture, layout, metadata, by_decoder_name(layout, tensors, architecture.renamed)
        )


def find_text_architecture(layout: Layout, metadata: Mapping[str, Any]) -> EncoderArchitecture | Architecture:
    """The registry entry of a text model. The error for an unknown architecture lists the supported ones."""
    entries: tuple[EncoderArchitecture | Architecture, ...] = (*ENCODERS, *EMBEDDING_DECODERS)
    key = "general.architecture" if layout == "gguf" else "model_type"
    known = {entry.gguf_name if layout == "gguf" else entry.model_type: entry for entry in reversed(entries)}
    name = metadata.get(key)
    if not isinstance(name, str) or name not in known:
        raise ModelFileError(
            f"{key}: {name!r:.80} is not supported as an embedding model or reranker; weft supports "
            f"{', '.join(sorted(known))}"
        )
    return known[name]


def _encoder(
    architecture: EncoderArchitecture,
    layout: Layout,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, WeightSource],
    ops: TextOps,
    spec: EmbeddingSpec,
) -> tuple[Encoder, list[HeadLayer]]:
    """Builds the encoder of a text model. Also returns the layers of its head."""
    named, name_of = by_encoder_name(layout, tensors, architecture)
    config = _encoder_config(architecture, layout, metadata, named)
    head = {name: named.pop(name) for name in [*named] if name.startswith("head.")}
    # An embedding model may have the pooler of BERT, but does not use it.
    layers = _score_head(head, architecture, name_of) if spec.kind == "rerank" else []
    return Encoder(config, named, ops, name_of), layers


def _score_head(
    head: dict[str, WeightSource], architecture: EncoderArchitecture, name_of: Callable[[str], str]
) -> list[HeadLayer]:
    """The layers between the pooled row of an encoder and its score."""
    if "head.out" not in head and "head.dense" in head:  # GGUF files of BERT give the last layer this name
        head = {name.replace("dense", "out"): source for name, source in head.items()}
    out, dense = head.pop("head.out", None), head.pop("head.dense", None)
    if out is None:
        raise ModelFileError(f"{name_of('head.out')}: the tensor is missing from the file")
    layers = []
    if dense is not None:
        activation: HeadActivation = "gelu" if architecture.model_type == "modernbert" else "tanh"
        layers.append(
            HeadLayer(dense, head.pop("head.dense.bias", None), activation, head.pop("head.norm", None))
        )
    layers.append(HeadLayer(out, head.pop("head.out.bias", None)))
    if head:
        raise ModelFileError(f"{name_of(min(head))}: weft does not use this tensor")
    return layers


def _decoder(
    architecture: Architecture,
    layout: Layout,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, WeightSource],
    ops: TextOps,
    spec: EmbeddingSpec,
) -> tuple[Decoder, list[HeadLayer]]:
    """Builds the decoder of a text model. Also returns the layers of its head."""
    if "embed_tokens.weight" in tensors:  # saved without a head: the names lack the prefix "model."
        tensors = {name if name == "score.weight" else f"model.{name}": tensors[name] for name in tensors}
    named = by_decoder_name(layout, tensors, architecture.renamed)
    config = dataclasses.replace(_decoder_config(architecture, layout, metadata, named), has_logits=False)
    rope_tensors = GGUF_ROPE_TENSORS if layout == "gguf" else frozenset()
    weights = {name: source for name, source in named.items() if name not in rope_tensors}
    lm_head = weights.pop("lm_head", None) or weights.get("embedding")
    score = weights.pop("score.weight", None) or weights.pop("cls.output.weight", None)
    dense = [weights.pop(name) for name in ("dense_2.weight", "dense_3.weight") if name in weights]
    head = [HeadLayer(source) for source in dense]
    if score is not None:
        head.append(HeadLayer(score))
    elif spec.yes_no is not None:
        # This reranker answers yes or no. Its score needs the logits of these two tokens only.
        if lm_head is None:
            raise ModelFileError("lm_head.weight: the tensor is missing from the file")
        head.append(HeadLayer(ops.rows_of(lm_head, spec.yes_no)))
    name_of: Callable[[str], str] = lambda name: file_name(layout, name, architecture.renamed)  # noqa: E731
    return Decoder(config, weights, ops, name_of), head


def _encoder_config(
    architecture: EncoderArchitecture,
    layout: Layout,
    metadata: Mapping[str, Any],
    named: Mapping[str, WeightSource],
) -> EncoderConfig:
    if layout == "huggingface":
        metadata = {**ENCODER_DEFAULTS[architecture.model_type], **metadata}
    return architecture.configure(Fields(layout, architecture.gguf_name, metadata, named))


def _decoder_config(
    architecture: Architecture, layout: Layout, metadata: Mapping[str, Any], named: Mapping[str, WeightSource]
) -> ModelConfig:
    if layout == "huggingface":
        metadata = {**DEFAULTS[architecture.model_type], **metadata}
    return architecture.configure(Fields(layout, architecture.gguf_name, metadata, named), None)


def _longest(config: Any) -> int:
    """The most tokens that an input of the model may have."""
    return int(config.max_tokens if isinstance(config, EncoderConfig) else config.max_context)


def _check_sizes(head: Sequence[HeadLayer], size: int, outputs: int) -> None:
    """Raises ModelFileError if the layers do not fit one another, or do not make `outputs` numbers."""
    name = "the model"
    for layer in head:
        name, shape = layer.weight.name, layer.weight.shape
        if len(shape) != 2 or shape[1] != size:
            raise ModelFileError(f"{name}: has shape {shape}, expected [outputs, {size}]")
        size = shape[0]
        for vector in (layer.bias, layer.norm):
            if vector is not None and vector.shape != (size,):
                raise ModelFileError(f"{vector.name}: has shape {vector.shape}, expected ({size},)")
    if size != outputs:
        raise ModelFileError(f"{name}: makes {size} numbers, but the files of the model say {outputs}")
