"""Default values of fields that config.json omits. They are the defaults of transformers' configuration classes.

The classes differ in rope base, window and head size. A wrong value gives fluent but wrong text. A null in the file
stays null: it does not select the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LLAMA: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_MISTRAL: dict[str, Any] = {
    **_LLAMA,
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
_QWEN2: dict[str, Any] = {
    **_LLAMA,
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA2: dict[str, Any] = {
    **_LLAMA,
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}

# By `model_type`. A field may have two keys in config.json (see `fields`). Defaults are listed under the second key, and
# either key in a file replaces them. Gemma is an exception: its classes ignore `hidden_act`, so the default of
# `hidden_activation` is listed under that key.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "mixtral": {
        **_MISTRAL,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen2": _QWEN2,
    "qwen3": {**_QWEN2, "head_dim": 128},
    "qwen3_moe": {
        **_QWEN2,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "phi3": {
        **_LLAMA,
        "vocab_size": 32_064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    "granite": {**_LLAMA, "attention_multiplier": 1.0},
    "olmo2": {**_LLAMA, "vocab_size": 50_304, "rms_norm_eps": 1e-5},
    "gemma2": _GEMMA2,
    "gemma3_text": {
        **_GEMMA2,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
}

_BERT: dict[str, Any] = {
    "vocab_size": 30_522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "pad_token_id": 0,
}

ENCODER_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "bert": _BERT,
    "roberta": {**_BERT, "vocab_size": 50_265, "pad_token_id": 1},
    "xlm-roberta": {**_BERT, "pad_token_id": 1},
    "modernbert": {
        "vocab_size": 50_368,
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "max_position_embeddings": 8192,
        "norm_eps": 1e-5,
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_activation": "gelu",
        "local_attention": 128,
        "global_rope_theta": 160_000.0,
        "local_rope_theta": 10_000.0,
        "global_attn_every_n_layers": 3,
        "classifier_pooling": "cls",
        "classifier_bias": False,
        "classifier_activation": "gelu",
    },
}
"""The default values of the encoders in `encoder_architectures`, by `model_type`."""
