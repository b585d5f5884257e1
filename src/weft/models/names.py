"""From the tensor names of GGUF files to the names the decoder asks for.

token_embd.weight         embedding
blk.7.attn_q.weight       layers.7.wq
output_norm.weight        final_norm
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

_WHOLE_MODEL = {
    "token_embd.weight": "embedding",
    "output_norm.weight": "final_norm",
    "output.weight": "lm_head",
    # Frequency corrections that some models ship; known, so that the decoder can refuse what it cannot use.
    "rope_freqs.weight": "rope_frequency_factors",
}

_PER_LAYER = {
    "attn_norm.weight": "attention_norm",
    "attn_q.weight": "wq",
    "attn_k.weight": "wk",
    "attn_v.weight": "wv",
    "attn_output.weight": "wo",
    "ffn_norm.weight": "feed_forward_norm",
    "ffn_gate.weight": "w_gate",
    "ffn_up.weight": "w_up",
    "ffn_down.weight": "w_down",
}

_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(.+)", re.DOTALL)

T = TypeVar("T")


def decoder_name(gguf_name: str) -> str | None:
    """The decoder's name of a tensor, or None for one that no decoder of ours uses."""
    layer = _LAYER.fullmatch(gguf_name)
    if layer is None:
        return _WHOLE_MODEL.get(gguf_name)
    part = _PER_LAYER.get(layer[2])
    return None if part is None else f"layers.{layer[1]}.{part}"


def by_decoder_name(tensors: Mapping[str, T]) -> dict[str, T]:
    """The same tensors under the decoder's names. One without such a name keeps its own: the decoder refuses
    a model with tensors that it would silently ignore (a bias, an expert), and says which."""
    return {decoder_name(name) or name: tensor for name, tensor in tensors.items()}
