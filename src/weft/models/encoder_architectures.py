"""The supported encoders: how each differs from BERT, for both layouts (GGUF and Hugging Face), and its tensor names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from weft.models.encoder import EncoderConfig
from weft.models.fields import LARGEST_HEAD, LARGEST_LAYERS, Fields, Layout, Section
from weft.models.rope import resolve
from weft.models.rope_fields import read_rope
from weft.ops.base import AttentionPattern, AttentionShape, Rope

T = TypeVar("T")

NO_ROPE = Rope((), False)

_ACTIVATIONS: dict[str, Literal["gelu", "gelu_tanh"]] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True)
class EncoderArchitecture:
    """One entry of the registry of encoders."""

    gguf_name: str
    model_type: str
    """`model_type` in config.json."""
    configure: Callable[[Fields], EncoderConfig]
    names: _Names
    """The names of tensors in safetensors files."""
    gguf_names: _Names


def _bert(fields: Fields) -> EncoderConfig:
    if fields.section.text("position_embedding_type", "absolute") != "absolute":
        raise fields.section.error("position_embedding_type", "weft supports only absolute positions")
    is_gguf = fields.layout == "gguf"
    positions = fields.size("max_context")
    # GGUF files of RoBERTa leave out the rows before the first position.
    pad = (
        0
        if is_gguf or fields.section.text("model_type", "bert") == "bert"
        else _padding_id(fields.section) + 1
    )
    if pad >= positions:
        raise fields.error("max_context", f"{positions} positions, but the first position is {pad}")
    types = (
        fields.section.size("tokenizer.ggml.token_type_count", 2)
        if is_gguf
        else fields.section.size("type_vocab_size", 2, smallest=0)
    )
    layers = fields.size("layers", largest=LARGEST_LAYERS)
    return EncoderConfig(
        architecture=fields.architecture,
        layers=layers,
        hidden_size=fields.size("hidden_size"),
        feed_forward_size=fields.size("feed_forward_size"),
        vocabulary_size=_vocabulary_size(fields),
        max_tokens=positions - pad,
        attention=_attention(fields),
        patterns=(AttentionPattern(NO_ROPE, causal=False),),
        layer_patterns=(0,) * layers,
        norm_epsilon=fields.number("layer_norm_epsilon"),
        positions=positions,
        first_position=pad,
        types=types if fields.has_tensor("types") else 0,
        activation=_activation(fields),
    )


def _modern_bert(fields: Fields) -> EncoderConfig:
    layers, attention = fields.size("layers", largest=LARGEST_LAYERS), _attention(fields)
    context = fields.size("max_context")
    is_gguf = fields.layout == "gguf"
    # The window reaches half its size to each side.
    reach = fields.size("window" if is_gguf else "local_window") // 2 + 1
    every = 3 if is_gguf else fields.section.size("global_attn_every_n_layers", 3)
    local = [layer % every != 0 for layer in range(layers)]
    types = fields.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            raise fields.error("layer_types", f"is not a list of {layers} names, one for each layer")
        local = [name == "sliding_attention" for name in types]
    full = read_rope(
        fields, attention.head_size, 160_000.0, base_keys=("rope.freq_base", "global_rope_theta")
    )
    near = read_rope(
        fields,
        attention.head_size,
        10_000.0,
        layer_type="sliding_attention",
        base_keys=("rope.freq_base_swa", "local_rope_theta"),
        scaled=False,
    )
    section = fields.section
    return EncoderConfig(
        architecture=fields.architecture,
        layers=layers,
        hidden_size=fields.size("hidden_size"),
        feed_forward_size=fields.size("feed_forward_size"),
        vocabulary_size=_vocabulary_size(fields),
        max_tokens=context,
        attention=attention,
        patterns=(
            AttentionPattern(resolve(full, False, context), causal=False),
            AttentionPattern(resolve(near, False, context), reach, causal=False),
        ),
        layer_patterns=tuple(map(int, local)),
        norm_epsilon=fields.number("layer_norm_epsilon"),
        pre_norms=True,
        norm_bias=section.flag("norm_bias", False),
        attention_bias=section.flag("attention_bias", False),
        feed_forward_bias=section.flag("mlp_bias", False),
        gated=True,
        activation=_activation(fields),
    )


def _padding_id(section: Section) -> int:
    return section.size("pad_token_id", 1, smallest=0)


def _vocabulary_size(fields: Fields) -> int:
    tokens = fields.section.values.get("tokenizer.ggml.tokens")
    return fields.size("vocabulary_size", len(tokens) if isinstance(tokens, list) else None)


def _attention(fields: Fields) -> AttentionShape:
    hidden, heads = fields.size("hidden_size"), fields.size("heads")
    if hidden % heads or hidden // heads > LARGEST_HEAD:
        raise fields.error("heads", f"the hidden size {hidden} is not a multiple of {heads} heads")
    size = hidden // heads
    return AttentionShape(heads, heads, size, size**-0.5)


def _activation(fields: Fields) -> Literal["gelu", "gelu_tanh"]:
    name = fields.get("activation") or "gelu"
    activation = _ACTIVATIONS.get(name) if isinstance(name, str) else None
    if activation is None:
        known = ", ".join(_ACTIVATIONS)
        raise fields.error("activation", f"{name!r:.80} is not supported; weft supports {known}")
    return activation


# --- tensor names -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Names:
    """The tensor names of one kind of file: name in the file (followed by .weight or .bias) -> encoder's name."""

    layer: str
    """What precedes the number of a layer."""
    whole: Mapping[str, str]
    """The tensors outside the layers."""
    parts: Mapping[str, str]
    """The tensors of a layer."""


_BERT_NAMES = _Names(
    "encoder.layer.",
    {
        "embeddings.word_embeddings": "embedding",
        "embeddings.position_embeddings": "positions",
        "embeddings.token_type_embeddings": "types",
        "embeddings.LayerNorm": "embedding_norm",
        "pooler.dense": "head.dense",
        "classifier.dense": "head.dense",
        "classifier": "head.out",
        "classifier.out_proj": "head.out",
    },
    {
        "attention.self.query": "wq",
        "attention.self.key": "wk",
        "attention.self.value": "wv",
        "attention.output.dense": "wo",
        "attention.output.LayerNorm": "attention_post_norm",
        "intermediate.dense": "w_up",
        "output.dense": "w_down",
        "output.LayerNorm": "feed_forward_post_norm",
    },
)
_MODERN_BERT_NAMES = _Names(
    "layers.",
    {
        "embeddings.tok_embeddings": "embedding",
        "embeddings.norm": "embedding_norm",
        "final_norm": "final_norm",
        "head.dense": "head.dense",
        "head.norm": "head.norm",
        "classifier": "head.out",
    },
    {
        "attn_norm": "attention_norm",
        "attn.Wqkv": "wqkv",
        "attn.Wo": "wo",
        "mlp_norm": "feed_forward_norm",
        "mlp.Wi": "w_gate_up",
        "mlp.Wo": "w_down",
    },
)
_GGUF_WHOLE = {
    "token_embd": "embedding",
    "position_embd": "positions",
    "token_types": "types",
    "token_embd_norm": "embedding_norm",
    "output_norm": "final_norm",
    "cls": "head.dense",
    "cls.norm": "head.norm",
    "cls.output": "head.out",
}
_GGUF_PARTS = {
    "attn_q": "wq",
    "attn_k": "wk",
    "attn_v": "wv",
    "attn_qkv": "wqkv",
    "attn_output": "wo",
    "attn_output_norm": "attention_post_norm",
    "ffn_up": "w_up",
    "ffn_down": "w_down",
    "layer_output_norm": "feed_forward_post_norm",
    "attn_norm": "attention_norm",
    "ffn_norm": "feed_forward_norm",
}
_GGUF_NAMES = _Names("blk.", _GGUF_WHOLE, _GGUF_PARTS)
# In GGUF files of ModernBERT, ffn_up holds gate and up as one matrix.
_GGUF_MODERN_NAMES = _Names("blk.", _GGUF_WHOLE, {**_GGUF_PARTS, "ffn_up": "w_gate_up"})

ENCODERS = (
    EncoderArchitecture("bert", "bert", _bert, _BERT_NAMES, _GGUF_NAMES),
    EncoderArchitecture("bert", "roberta", _bert, _BERT_NAMES, _GGUF_NAMES),
    EncoderArchitecture("bert", "xlm-roberta", _bert, _BERT_NAMES, _GGUF_NAMES),
    EncoderArchitecture("modern-bert", "modernbert", _modern_bert, _MODERN_BERT_NAMES, _GGUF_MODERN_NAMES),
)

# A checkpoint with a head has the name of the model before the names of the encoder.
_PREFIX = re.compile(r"(?:bert|roberta|model)\.")
_KIND = re.compile(r"(.+)\.(weight|bias|gamma|beta)")
_LAYER_NUMBER = re.compile(r"(0|[1-9][0-9]{0,5})\.(.+)")
# Redundant tensors, and the heads of the pretraining task: no vector depends on them.
_IGNORED = re.compile(
    r"embeddings\.position_ids|cls\.(predictions|seq_relationship)\..*|lm_head\..*|decoder\..*"
)


def by_encoder_name(
    layout: Layout, tensors: Mapping[str, T], architecture: EncoderArchitecture
) -> tuple[dict[str, T], Callable[[str], str]]:
    """The tensors by the encoder's names, and a function that gives the file's name of each, for errors. An unknown
    tensor keeps its name."""
    names = architecture.gguf_names if layout == "gguf" else architecture.names
    named: dict[str, T] = {}
    file_names: dict[str, str] = {}
    prefix = ""
    for file_name, tensor in tensors.items():
        name = file_name
        if layout == "huggingface":
            found = _PREFIX.match(file_name)
            name = file_name[found.end() :] if found else file_name
            prefix = found[0] if found else prefix
            if _IGNORED.fullmatch(name):
                continue
        ours = _encoder_name(name, names) or file_name
        if ours in named and name.startswith("pooler."):
            continue  # RoBERTa has a head of this name, and does not use the pooler in its file
        named[ours] = tensor
        file_names[ours] = file_name
    return named, lambda ours: file_names.get(ours) or prefix + _file_name(ours, names)


def _encoder_name(name: str, names: _Names) -> str | None:
    match = _KIND.fullmatch(name)
    if match is None:
        return None
    base, kind = match.groups()
    suffix = ".bias" if kind in ("bias", "beta") else ""  # early BERT files have gamma and beta
    if base.startswith(names.layer) and (layer := _LAYER_NUMBER.fullmatch(base[len(names.layer) :])):
        part = names.parts.get(layer[2])
        return None if part is None else f"layers.{layer[1]}.{part}{suffix}"
    whole = names.whole.get(base)
    return None if whole is None else whole + suffix


def _file_name(ours: str, names: _Names) -> str:
    """The name that a missing tensor would have in the file: the inverse of `_encoder_name`."""
    base, suffix = (ours.removesuffix(".bias"), "bias") if ours.endswith(".bias") else (ours, "weight")
    for theirs, whole in names.whole.items():
        if whole == base:
            return f"{theirs}.{suffix}"
    number, _, part = base.removeprefix("layers.").partition(".")
    found = [theirs for theirs, name in names.parts.items() if name == part]
    return f"{names.layer}{number}.{found[0]}.{suffix}" if found else ours
