"""The supported encoders: how each differs from BERT, for both layouts (GGUF and Hugging Face), and its tensor names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Tensor names in a layer that mean a different part than in other architectures."""


def _bert(fields: Fields) -> EncoderConfig:
    if fields.section.text("position_embedding_type", "absolute") != "absolute":
        raise fields.section.error("position_embedding_type", "weft supports only absolute positions")
    is_gguf = fields.layout == "gguf"
    positions = fields.size("max_context")
    # GGUF files of RoBERTa leave out the rows before the first position.
    pad = (
        0 if is_gguf or fields.section.text("model_type", "bert") == "bert" else _padding(fields.section) + 1
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


ENCODERS = (
    EncoderArchitecture("bert", "bert", _bert),
    EncoderArchitecture("bert", "roberta", _bert),
    EncoderArchitecture("bert", "xlm-roberta", _bert),
    # In GGUF files of ModernBERT, ffn_up holds gate and up as one matrix.
    EncoderArchitecture("modern-bert", "modernbert", _modern_bert, renamed={"ffn_up": "w_gate_up"}),
)


def _padding(section: Section) -> int:
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

_WHOLE = {
    "embeddings.word_embeddings": "embedding",
    "embeddings.tok_embeddings": "embedding",
    "token_embd": "embedding",
    "embeddings.position_embeddings": "positions",
    "position_embd": "positions",
    "embeddings.token_type_embeddings": "types",
    "token_types": "types",
    "embeddings.LayerNorm": "embedding_norm",
    "embeddings.norm": "embedding_norm",
    "token_embd_norm": "embedding_norm",
    "final_norm": "final_norm",
    "output_norm": "final_norm",
    # heads of rerankers
    "pooler.dense": "head.dense",
    "classifier.dense": "head.dense",
    "head.dense": "head.dense",
    "cls": "head.dense",
    "head.norm": "head.norm",
    "cls.norm": "head.norm",
    "classifier": "head.out",
    "classifier.out_proj": "head.out",
    "cls.output": "head.out",
}
_PARTS = {
    "attention.self.query": "wq",
    "attn_q": "wq",
    "attention.self.key": "wk",
    "attn_k": "wk",
    "attention.self.value": "wv",
    "attn_v": "wv",
    "attn.Wqkv": "wqkv",
    "attn_qkv": "wqkv",
    "attention.output.dense": "wo",
    "attn.Wo": "wo",
    "attn_output": "wo",
    "attention.output.LayerNorm": "attention_post_norm",
    "attn_output_norm": "attention_post_norm",
    "intermediate.dense": "w_up",
    "ffn_up": "w_up",
    "mlp.Wi": "w_gate_up",
    "output.dense": "w_down",
    "mlp.Wo": "w_down",
    "ffn_down": "w_down",
    "output.LayerNorm": "feed_forward_post_norm",
    "layer_output_norm": "feed_forward_post_norm",
    "attn_norm": "attention_norm",
    "mlp_norm": "feed_forward_norm",
    "ffn_norm": "feed_forward_norm",
}
_LAYER = re.compile(r"(?:encoder\.layer|layers|blk)\.(0|[1-9][0-9]{0,5})\.(.+)")
# A checkpoint with a head has the name of the model before the names of the encoder.
_PREFIX = re.compile(r"(?:bert|roberta|model)\.")
_KIND = re.compile(r"(.+)\.(weight|bias|gamma|beta)")
# Redundant tensors, and the heads of the pretraining task: no vector depends on them.
_IGNORED = re.compile(
    r"embeddings\.position_ids|cls\.(predictions|seq_relationship)\..*|lm_head\..*|decoder\..*"
)


def by_encoder_name(
    layout: Layout, tensors: Mapping[str, T], renamed: Mapping[str, str]
) -> tuple[dict[str, T], dict[str, str]]:
    """The tensors by the encoder's names, and the file's name of each. An unknown tensor keeps its name."""
    named: dict[str, T] = {}
    file_names: dict[str, str] = {}
    for file_name, tensor in tensors.items():
        is_ours = layout == "gguf" or not _PREFIX.match(file_name)
        name = file_name if is_ours else _PREFIX.sub("", file_name, count=1)
        if layout == "huggingface" and _IGNORED.fullmatch(name):
            continue
        ours = _encoder_name(name, renamed) or file_name
        if ours in named and name.startswith("pooler."):
            continue  # RoBERTa has a head of its own, and may have the pooler that it does not use
        named[ours] = tensor
        file_names[ours] = file_name
    return named, file_names


def _encoder_name(name: str, renamed: Mapping[str, str]) -> str | None:
    match = _KIND.fullmatch(name)
    if match is None:
        return None
    base, kind = match.groups()
    suffix = ".bias" if kind in ("bias", "beta") else ""  # early BERT files have gamma and beta
    layer = _LAYER.fullmatch(base)
    if layer is not None:
        part = renamed.get(layer[2]) or _PARTS.get(layer[2])
        return None if part is None else f"layers.{layer[1]}.{part}{suffix}"
    whole = _WHOLE.get(base)
    return None if whole is None else whole + suffix
