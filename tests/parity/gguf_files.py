"""Writes the GGUF file of a small checkpoint as llama.cpp's converter does: names, keys, and the order of rows."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_models import Checkpoint

from weft.loading.gguf import GgufFile, read_gguf

gguf = pytest.importorskip("gguf")

# transformers' model_type -> GGUF's name of the architecture.
NAMES = {"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}
# For these, llama.cpp rotates adjacent pairs (interleaved RoPE), so the converter reorders the rows of Q and K.
PERMUTED = ("llama", "granite")


def write_gguf(checkpoint: Checkpoint, path: Path) -> GgufFile:
    """Writes the file with the gguf package, and reads it with weft."""
    config = checkpoint.config
    name = NAMES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, name)
    _write_sizes(writer, config, name)
    _write_rope(writer, config, name)
    _write_differences(writer, config, name)
    writer.add_token_list([f"token {index}" for index in range(config["vocab_size"])])
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for hf_name, array in _with_experts_stacked(checkpoint.tensors).items():
        writer.add_tensor(
            names.get_name(hf_name, try_suffixes=(".weight", ".bias")), _values(hf_name, array, config, name)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf(path)


def _head_size(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _write_sizes(writer: Any, config: dict[str, Any], name: str) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if name in PERMUTED:
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(_head_size(config))


def _write_rope(writer: Any, config: dict[str, Any], name: str) -> None:
    parameters = config["rope_parameters"]
    if "sliding_attention" in parameters:
        writer.add_rope_freq_base_swa(parameters["sliding_attention"]["rope_theta"])
        parameters = parameters["full_attention"]
    writer.add_rope_freq_base(parameters["rope_theta"])
    size = int(_head_size(config) * parameters.get("partial_rotary_factor", 1.0))
    if name == "phi3":
        writer.add_rope_dimension_count(size)
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    kind = parameters["rope_type"]
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(parameters["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(parameters["original_max_position_embeddings"])
        if "attention_factor" in parameters:
            writer.add_rope_scaling_yarn_attn_factor(parameters["attention_factor"])
    elif kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(parameters, size))
    elif kind == "longrope":
        original = parameters["original_max_position_embeddings"]
        stretch = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))
        writer.add_tensor("rope_factors_long.weight", np.array(parameters["long_factor"], np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(parameters["short_factor"], np.float32))


def _llama3_factors(parameters: dict[str, Any], size: int) -> np.ndarray:
    factors = []
    for index in range(0, size, 2):
        wavelength = 2 * math.pi * parameters["rope_theta"] ** (index / size)
        context = parameters["original_max_position_embeddings"]
        low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(parameters["factor"])
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / parameters["factor"] + smooth))
    return np.array(factors, np.float32)


def _write_differences(writer: Any, config: dict[str, Any], name: str) -> None:
    if name in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config["sliding_window"] or 0)
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config.get("num_local_experts"):
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if name == "qwen3moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if name == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])


def _with_experts_stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """safetensors has one tensor per expert, GGUF one for all experts."""
    stacked: dict[str, list[np.ndarray]] = {}
    for name in sorted(tensors):  # the order of the experts, because there are fewer than ten
        merged = re.sub(r"experts\.\d\.", "experts.", name)
        # The gguf package has another name for the experts of Mixtral.
        merged = re.sub(r"model\.(.*)\.block_sparse_moe\.experts", r"\1.feed_forward.experts", merged)
        stacked.setdefault(merged, []).append(tensors[name])
    return {name: np.stack(parts) if ".experts." in name else parts[0] for name, parts in stacked.items()}


def _values(hf_name: str, array: np.ndarray, config: dict[str, Any], name: str) -> np.ndarray:
    if name in PERMUTED and (".q_proj." in hf_name or ".k_proj." in hf_name):
        heads = config["num_attention_heads" if ".q_proj." in hf_name else "num_key_value_heads"]
        halves = array.reshape(heads, 2, len(array) // heads // 2, *array.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
    if name in ("gemma2", "gemma3") and hf_name.endswith("norm.weight"):
        return array + 1
    return array
