"""The supported architectures: how each differs from Llama, for both layouts (GGUF and Hugging Face).

To add one, write a function that passes its differences to `describe`, and add a line to `ARCHITECTURES`. A difference
that `ModelConfig` cannot express also needs a field there and code in the decoder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from weft.models.config import ExpertsConfig, ModelConfig
from weft.models.fields import LARGEST_EXPERTS, LARGEST_HEAD, LARGEST_LAYERS, Fields
from weft.models.rope import RopeParameters, resolve
from weft.models.rope_fields import read_rope
from weft.ops.base import AttentionPattern, AttentionShape

Activation = Literal["silu", "gelu_tanh"]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True)
class Architecture:
    """One entry of the registry."""

    gguf_name: str
    """`general.architecture` of GGUF files. The first entry of `ARCHITECTURES` with this name wins."""
    class_name: str
    """The first of `architectures` in config.json."""
    model_type: str
    """`model_type` in config.json, used if it has no `architectures`."""
    configure: Callable[[Fields, int | None], ModelConfig]
    """Makes the configuration from a file's fields and the maximum context (None: the model's own)."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Tensor names in a layer that mean a different part than in other architectures (see `names`)."""


def describe(
    fields: Fields,
    max_context: int | None,
    *,
    gguf_interleaved: bool = False,
    ropes: Sequence[RopeParameters] = (),
    windows: Sequence[int | None] = (),
    scale: float | None = None,
    score_cap: float | None = None,
    activation: Activation = "silu",
    **differences: Any,
) -> ModelConfig:
    """Makes the configuration from the fields that all architectures share and the differences of this one.

    `ropes` and `windows` have an entry for each layer. By default all layers have the same rope and no window.
    `gguf_interleaved`: GGUF files of the architecture order the rows of Q and K for a rope of neighbouring pairs.
    """
    if differences.get("experts") is None and fields.size("experts", 0, smallest=0) > 0:
        raise fields.error("experts", f"weft does not support {fields.architecture} with experts")
    layers, attention = _layers(fields), _attention(fields, scale, score_cap)
    context = fields.size("max_context")
    if max_context is not None:
        context = min(max_context, context)
    ropes = ropes or [read_rope(fields, attention.head_size)] * layers
    # A window as large as the context has no effect.
    effective = [window if window is not None and window < context else None for window in windows]
    kinds = list(zip(ropes, effective or [None] * layers, strict=True))
    distinct = list(dict.fromkeys(kinds))
    interleaved = gguf_interleaved and fields.layout == "gguf"
    qkv_bias, output_bias, feed_forward_bias = _biases(fields)
    config = ModelConfig(
        architecture=fields.architecture,
        layers=layers,
        hidden_size=fields.size("hidden_size"),
        feed_forward_size=fields.size("feed_forward_size"),
        vocabulary_size=_vocabulary_size(fields),
        max_context=context,
        attention=attention,
        patterns=tuple(
            AttentionPattern(resolve(rope, interleaved, context), window) for rope, window in distinct
        ),
        layer_patterns=tuple(distinct.index(kind) for kind in kinds),
        norm_epsilon=fields.number("norm_epsilon"),
        activation=_activation(fields, activation),
        # As in transformers and llama.cpp, an existing lm_head tensor wins over the flag. GGUF has no such flag: there
        # the embedding is tied if the tensor is missing.
        tied_embedding=fields.flag("tied_embedding", fields.layout == "gguf")
        and not fields.has_tensor("lm_head"),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        feed_forward_bias=feed_forward_bias,
    )
    return dataclasses.replace(config, **differences)


# --- the architectures ------------------------------------------------------------------------------------------


def _llama(fields: Fields, max_context: int | None) -> ModelConfig:
    if fields.layout == "gguf":
        # GGUF files of Mistral and Mixtral also have the architecture "llama".
        return _mixtral(fields, max_context)
    return describe(fields, max_context)


def _mistral(fields: Fields, max_context: int | None) -> ModelConfig:
    return describe(fields, max_context, windows=_windows(fields))


def _mixtral(fields: Fields, max_context: int | None) -> ModelConfig:
    experts = _experts(fields, normalised=True)
    return describe(fields, max_context, gguf_interleaved=True, windows=_windows(fields), experts=experts)


def _qwen2(fields: Fields, max_context: int | None) -> ModelConfig:
    return describe(fields, max_context, qkv_bias=True, windows=_qwen_windows(fields))


def _qwen3(fields: Fields, max_context: int | None) -> ModelConfig:
    return describe(fields, max_context, qk_norm="head", windows=_qwen_windows(fields))


def _qwen3_moe(fields: Fields, max_context: int | None) -> ModelConfig:
    if fields.size("expert_layer_period", 1) != 1 or fields.get("layers_without_experts"):
        key = "layers_without_experts" if fields.get("layers_without_experts") else "expert_layer_period"
        raise fields.error(key, f"{fields.get(key)!r:.80}: layers without experts are not supported")
    # GGUF has no such flag, and llama.cpp always normalises.
    normalised = fields.flag("normalised_expert_weights", fields.layout == "gguf")
    return describe(
        fields,
        max_context,
        qk_norm="head",
        windows=_qwen_windows(fields, full_layers_first=False),
        experts=_experts(fields, normalised),
    )


def _phi3(fields: Fields, max_context: int | None) -> ModelConfig:
    return describe(fields, max_context, windows=_windows(fields))


def _granite(fields: Fields, max_context: int | None) -> ModelConfig:
    return describe(
        fields,
        max_context,
        gguf_interleaved=True,
        scale=fields.number("attention_scale", _head_size(fields) ** -0.5),
        embedding_scale=fields.number("embedding_scale", 1.0),
        residual_scale=fields.number("residual_scale", 1.0),
        logit_scale=1.0 / fields.number("logit_divisor", 1.0),
    )


def _olmo2(fields: Fields, max_context: int | None) -> ModelConfig:
    if fields.size("window", 0, smallest=0):
        raise fields.error(
            "window", "this is an OLMo 3 under the name olmo2; weft does not support OLMo 3 yet"
        )
    return describe(fields, max_context, pre_norms=False, post_norms=True, qk_norm="row")


def _gemma2(fields: Fields, max_context: int | None) -> ModelConfig:
    _require_causal(fields)
    return describe(
        fields,
        max_context,
        windows=_windows(fields, lambda layer: layer % 2 == 0, default=4096),
        score_cap=_cap(fields, "score_cap", 50.0),
        logit_cap=_cap(fields, "logit_cap", 30.0),
        **_gemma_differences(fields, layers_of_27b=46),
    )


def _gemma3(fields: Fields, max_context: int | None) -> ModelConfig:
    _require_causal(fields)
    return _gemma3_with(fields, max_context, _windows(fields, lambda layer: (layer + 1) % 6 != 0))


def _gemma_embedding(fields: Fields, max_context: int | None) -> ModelConfig:
    """The configuration of EmbeddingGemma: Gemma 3 with attention in both directions.

    Its window reaches half its size to each side.
    """
    sizes = _windows(fields, lambda layer: (layer + 1) % 6 != 0, default=512)
    config = _gemma3_with(
        fields, max_context, tuple(None if size is None else size // 2 + 1 for size in sizes)
    )
    patterns = tuple(dataclasses.replace(pattern, causal=False) for pattern in config.patterns)
    return dataclasses.replace(config, patterns=patterns)


def _require_causal(fields: Fields) -> None:
    if fields.flag("bidirectional", False):
        raise fields.error("bidirectional", "this is an embedding model, it generates no text")


def _gemma3_with(fields: Fields, max_context: int | None, windows: tuple[int | None, ...]) -> ModelConfig:
    """Gemma 3 with these windows. Layers with a window have a rope of their own."""
    head_size = _head_size(fields)
    full = read_rope(fields, head_size, base=1_000_000.0)
    local = read_rope(
        fields,
        head_size,
        layer_type="sliding_attention",
        base_keys=("rope.freq_base_swa", "rope_local_base_freq"),
        scaled=False,
    )
    return describe(
        fields,
        max_context,
        windows=windows,
        ropes=[full if window is None else local for window in windows],
        qk_norm="head",
        score_cap=fields.optional_number("score_cap"),
        logit_cap=fields.optional_number("logit_cap"),
        **_gemma_differences(fields, layers_of_27b=62),
    )


def _cap(fields: Fields, name: str, default: float) -> float | None:
    """A softcap of Gemma 2. Early GGUF files omit the key and mean the default. A null in config.json means no cap."""
    return fields.optional_number(name) if fields.key(name) in fields.section.values else default


def _gemma_differences(fields: Fields, layers_of_27b: int) -> dict[str, Any]:
    """How Gemma 2 and 3 differ from Llama."""
    hidden_size = fields.size("hidden_size")
    # GGUF files omit query_pre_attn_scalar. It equals the head size, except in the 27B model.
    divisor = _head_size(fields)
    if fields.layout == "gguf" and _layers(fields) == layers_of_27b:
        divisor = hidden_size // fields.size("heads")
    return {
        "scale": fields.number("query_scale_divisor", divisor) ** -0.5,
        "embedding_scale": hidden_size**0.5,
        # Gemma multiplies by 1 + weight. GGUF files store that sum.
        "norm_offset": 1.0 if fields.layout == "huggingface" else 0.0,
        "post_norms": True,
        "activation": "gelu_tanh",
    }


# In these architectures, post_attention_layernorm normalises the output of attention. In Llama, it is the norm before
# the feed-forward.
_POST_NORM = {"post_attention_layernorm": "attention_post_norm"}

ARCHITECTURES = (
    Architecture("llama", "LlamaForCausalLM", "llama", _llama),
    Architecture("llama", "MistralForCausalLM", "mistral", _mistral),
    Architecture("llama", "MixtralForCausalLM", "mixtral", _mixtral),
    Architecture("qwen2", "Qwen2ForCausalLM", "qwen2", _qwen2),
    Architecture("qwen3", "Qwen3ForCausalLM", "qwen3", _qwen3),
    Architecture("qwen3moe", "Qwen3MoeForCausalLM", "qwen3_moe", _qwen3_moe),
    # In GGUF files of Phi-3, ffn_up holds gate and up as one matrix.
    Architecture("phi3", "Phi3ForCausalLM", "phi3", _phi3, renamed={"ffn_up": "w_gate_up"}),
    Architecture("granite", "GraniteForCausalLM", "granite", _granite),
    Architecture("olmo2", "Olmo2ForCausalLM", "olmo2", _olmo2, renamed=_POST_NORM),
    Architecture("gemma2", "Gemma2ForCausalLM", "gemma2", _gemma2, renamed=_POST_NORM),
    Architecture("gemma3", "Gemma3ForCausalLM", "gemma3_text", _gemma3, renamed=_POST_NORM),
)

EMBEDDING_DECODERS = (
    Architecture("qwen2", "Qwen2ForCausalLM", "qwen2", _qwen2),
    Architecture("qwen3", "Qwen3ForCausalLM", "qwen3", _qwen3),
    Architecture("gemma-embedding", "Gemma3TextModel", "gemma3_text", _gemma_embedding, renamed=_POST_NORM),
)
"""Decoders that are used as embedding models or rerankers."""


# --- fields computed from several keys ---------------------------------------------------------------------------


def _layers(fields: Fields) -> int:
    return fields.size("layers", largest=LARGEST_LAYERS)


def _head_size(fields: Fields) -> int:
    hidden_size, heads = fields.size("hidden_size"), fields.size("heads")
    if hidden_size < heads:
        raise fields.error(
            "heads", f"{heads} heads need a hidden size of at least {heads}, found {hidden_size}"
        )
    head_size = fields.size("head_size", hidden_size // heads, largest=LARGEST_HEAD)
    if fields.size("value_size", head_size) != head_size:
        raise fields.error(
            "value_size",
            f"{fields.get('value_size')} differs from the key size {head_size}, which weft does not support",
        )
    return head_size


def _attention(fields: Fields, scale: float | None, score_cap: float | None) -> AttentionShape:
    head_size, heads = _head_size(fields), fields.size("heads")
    kv_heads = fields.size("kv_heads", heads)
    if heads % kv_heads:
        raise fields.error("kv_heads", f"{heads} heads are not a multiple of {kv_heads} KV heads")
    return AttentionShape(heads, kv_heads, head_size, head_size**-0.5 if scale is None else scale, score_cap)


def _biases(fields: Fields) -> tuple[bool, bool, bool]:
    """Whether there are biases of Q, K and V, of attention's output, and of the feed-forward.

    If the metadata does not say, the tensors of the first layer decide for all layers.
    """
    qkv, output, gate = (
        any(fields.has_tensor(f"layers.0.{part}.bias") for part in parts)
        for parts in (("wq", "wqkv"), ("wo",), ("w_gate",))
    )
    return (
        fields.flag("attention_bias", qkv),
        fields.flag("attention_bias", output),
        fields.flag("feed_forward_bias", gate),
    )


def _vocabulary_size(fields: Fields) -> int:
    tokens = fields.section.values.get("tokenizer.ggml.tokens")
    return fields.size("vocabulary_size", len(tokens) if isinstance(tokens, list) else None)


def _experts(fields: Fields, normalised: bool) -> ExpertsConfig | None:
    """The mixture of experts that the file describes. None: the model has none."""
    count = fields.size("experts", 0, largest=LARGEST_EXPERTS, smallest=0)
    if count == 0:
        return None
    if _activation(fields, "silu") != "silu":
        raise fields.error(
            "activation", f"{fields.get('activation')!r} is not supported in experts; weft supports silu"
        )
    feed_forward_size = None
    if not fields.has("expert_feed_forward_size"):
        feed_forward_size = fields.size("feed_forward_size")
    return ExpertsConfig(
        count=count,
        per_token=fields.size("experts_per_token", largest=count),
        feed_forward_size=fields.size("expert_feed_forward_size", feed_forward_size),
        normalised=normalised,
    )


def _activation(fields: Fields, default: Activation) -> Activation:
    name = fields.get("activation")
    if name is None:
        return default
    activation = _ACTIVATIONS.get(name) if isinstance(name, str) else None
    if activation is None:
        raise fields.error(
            "activation", f"{name!r:.80} is not supported; weft supports {', '.join(_ACTIVATIONS)}"
        )
    return activation


def _windows(
    fields: Fields, is_local: Callable[[int], bool] = lambda layer: True, default: int = 0
) -> tuple[int | None, ...]:
    """The attention window of each layer; None for full attention.

    `is_local` says which layers have a window, if the file does not list them. `default` is the window size if the
    file has none; 0 means no window.
    """
    layers = _layers(fields)
    window = fields.size("window", default, smallest=0)
    local = _local_layers(fields, layers)
    if window == 0:
        if local is not None and any(local) and fields.has("layer_types"):
            raise fields.error(
                "window", "missing from the file, but its layer_types contain sliding_attention"
            )
        return (None,) * layers
    if local is None:
        local = [is_local(layer) for layer in range(layers)]
    return tuple(window if is_window else None for is_window in local)


def _local_layers(fields: Fields, layers: int) -> list[bool] | None:
    """Which layers have a window; None if the file does not say.

    The file has a name for each layer, a flag for each layer, or a period. With a period, every period-th layer has no
    window.
    """
    names = fields.get("layer_types")
    if names is not None:
        if not isinstance(names, list) or len(names) != layers:
            raise fields.error("layer_types", f"is not a list of {layers} names, one for each layer")
        for name in names:
            if name not in ("full_attention", "sliding_attention"):
                raise fields.error(
                    "layer_types", f"{name!r:.80} is neither full_attention nor sliding_attention"
                )
        return [name == "sliding_attention" for name in names]
    period = fields.get("window_period")
    if period is None:
        return None
    if not isinstance(period, int):
        is_list = hasattr(period, "__len__") and not isinstance(period, str)
        flags = [bool(flag) for flag in period] if is_list else []
        if len(flags) != layers:
            raise fields.error("window_period", f"{len(flags)} values for {layers} layers")
        return flags
    period = fields.size("window_period", largest=LARGEST_LAYERS)
    return [(layer + 1) % period != 0 for layer in range(layers)]


def _qwen_windows(fields: Fields, full_layers_first: bool = True) -> tuple[int | None, ...]:
    """The windows of Qwen. In config.json they are unused unless `use_sliding_window` is set.

    With `full_layers_first`, the first `max_window_layers` layers have no window.
    """
    if fields.layout == "huggingface" and not fields.flag("uses_window", False):
        return (None,) * _layers(fields)
    first = fields.size("full_layers_first", 0, smallest=0) if full_layers_first else 0
    return _windows(fields, lambda layer: layer >= first)
