"""Maps the tensor names of model files, in both layouts, to the decoder's names.

GGUF                       safetensors                                 decoder
token_embd.weight          model.embed_tokens.weight                   embedding
blk.7.attn_q.weight        model.layers.7.self_attn.q_proj.weight      layers.7.wq
blk.7.attn_q.bias          model.layers.7.self_attn.q_proj.bias        layers.7.wq.bias
output_norm.weight         model.norm.weight                           final_norm
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from weft.models.fields import Layout

T = TypeVar("T")

# The parts of a layer: name in the file (followed by .weight or .bias) -> decoder's name.
_GGUF_PARTS = {
    "attn_norm": "attention_norm",
    "attn_q": "wq",
    "attn_k": "wk",
    "attn_v": "wv",
    "attn_qkv": "wqkv",
    "attn_q_norm": "query_norm",
    "attn_k_norm": "key_norm",
    "attn_output": "wo",
    "post_attention_norm": "attention_post_norm",
    "ffn_norm": "feed_forward_norm",
    "ffn_gate": "w_gate",
    "ffn_up": "w_up",
    "ffn_down": "w_down",
    "post_ffw_norm": "feed_forward_post_norm",
    "ffn_gate_inp": "router",
    "ffn_gate_exps": "experts.w_gate",
    "ffn_up_exps": "experts.w_up",
    "ffn_down_exps": "experts.w_down",
}
_HUGGINGFACE_PARTS = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "wq",
    "self_attn.k_proj": "wk",
    "self_attn.v_proj": "wv",
    "self_attn.qkv_proj": "wqkv",
    "self_attn.q_norm": "query_norm",
    "self_attn.k_norm": "key_norm",
    "self_attn.o_proj": "wo",
    # In Llama, the norm before the feed-forward. Architectures with post-norms rename it: there it normalises the
    # output of attention.
    "post_attention_layernorm": "feed_forward_norm",
    "pre_feedforward_layernorm": "feed_forward_norm",
    "mlp.gate_proj": "w_gate",
    "mlp.up_proj": "w_up",
    "mlp.gate_up_proj": "w_gate_up",
    "mlp.down_proj": "w_down",
    "post_feedforward_layernorm": "feed_forward_post_norm",
    "mlp.gate": "router",
    "block_sparse_moe.gate": "router",
}
# Safetensors files have a tensor for each expert: mlp.experts.3.up_proj is experts.3.w_up.
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(0|[1-9][0-9]{0,5})\.([a-z0-9_]+)")
_EXPERT_PARTS = {
    "gate_proj": "w_gate",
    "up_proj": "w_up",
    "down_proj": "w_down",
    "w1": "w_gate",
    "w3": "w_up",
    "w2": "w_down",
}


@dataclass(frozen=True)
class _Names:
    whole_model: Mapping[str, str]
    parts: Mapping[str, str]
    layer: re.Pattern[str]  # groups: layer number, part, "weight" or "bias"
    ignored: re.Pattern[str]  # redundant tensors: their content follows from the metadata


_LAYER_NUMBER = r"(0|[1-9][0-9]{0,5})"

_NAMES: dict[Layout, _Names] = {
    "gguf": _Names(
        {
            "token_embd.weight": "embedding",
            "output_norm.weight": "final_norm",
            "output.weight": "lm_head",
        },
        _GGUF_PARTS,
        re.compile(rf"blk\.{_LAYER_NUMBER}\.([a-z_]+)\.(weight|bias)"),
        ignored=re.compile(r"(?!)"),  # matches nothing
    ),
    "huggingface": _Names(
        {
            "model.embed_tokens.weight": "embedding",
            "model.norm.weight": "final_norm",
            "lm_head.weight": "lm_head",
        },
        _HUGGINGFACE_PARTS,
        re.compile(rf"model\.layers\.{_LAYER_NUMBER}\.([a-z0-9_.]+)\.(weight|bias)"),
        # Old checkpoints store the rope frequencies.
        ignored=re.compile(rf"model\.(layers\.{_LAYER_NUMBER}\.self_attn\.)?rotary_emb\.inv_freq"),
    ),
}


def decoder_name(layout: Layout, name: str, renamed: Mapping[str, str] | None = None) -> str | None:
    """The decoder's name for a tensor of a file; None if the decoder does not use it.

    `renamed` has precedence over the names that all architectures share.
    """
    names = _NAMES[layout]
    match = names.layer.fullmatch(name)
    if match is None:
        return names.whole_model.get(name)
    number, part, kind = match.groups()
    ours = (renamed or {}).get(part) or names.parts.get(part)
    expert = _EXPERT.fullmatch(part)
    if expert is not None and expert[2] in _EXPERT_PARTS:
        ours = f"experts.{expert[1]}.{_EXPERT_PARTS[expert[2]]}"
    return None if ours is None else f"layers.{number}.{ours}{'.bias' if kind == 'bias' else ''}"


def file_name(layout: Layout, name: str, renamed: Mapping[str, str]) -> str:
    """The file's name for a decoder's tensor name: the inverse of `decoder_name`. For error messages."""
    names = _NAMES[layout]
    for theirs, ours in names.whole_model.items():
        if ours == name:
            return theirs
    prefix = "blk" if layout == "gguf" else "model.layers"
    _, _, rest = name.partition("layers.")
    number, _, part = rest.partition(".")
    kind = "bias" if part.endswith(".bias") else "weight"
    for theirs in [*names.parts, *renamed]:
        candidate = f"{prefix}.{number}.{theirs}.{kind}"
        if decoder_name(layout, candidate, renamed) == name:
            return candidate
    return name


def by_decoder_name(layout: Layout, tensors: Mapping[str, T], renamed: Mapping[str, str]) -> dict[str, T]:
    """The tensors by the decoder's names, without redundant ones.

    An unknown tensor keeps its name: the decoder then rejects the model and names the tensor.
    """
    return {
        decoder_name(layout, name, renamed) or name: tensor
        for name, tensor in tensors.items()
        if not _NAMES[layout].ignored.fullmatch(name)
    }
