"""Writes the GGUF file of a small embedding model or reranker as llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_text_models import NO, SEPARATOR, VOCABULARY, YES, TextCase, dense_weights

gguf = pytest.importorskip("gguf")

NAMES = {
    "Bert": "bert",
    "Roberta": "bert",
    "XLMRoberta": "bert",
    "ModernBert": "modern-bert",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Gemma3Text": "gemma-embedding",
}
DECODERS = ("qwen2", "qwen3", "gemma-embedding")
POOLING = {"mean": 1, "cls": 2, "last": 3}

_ENCODER_NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.tok_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "embeddings.norm": "token_embd_norm",
    "final_norm": "output_norm",
    "classifier.dense": "cls",
    "pooler.dense": "cls",
    "head.dense": "cls",
    "head.norm": "cls.norm",
    "classifier.out_proj": "cls.output",
    "classifier": "cls.output",
}
_PARTS = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.Wo": "attn_output",
    "attn_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "mlp.Wi": "ffn_up",
    "mlp.Wo": "ffn_down",
}


def write_text_gguf(case: TextCase, folder: Path, path: Path, quantised: bool = False) -> Path:
    """`folder` has the model in transformers' format. `quantised`: the matrices are Q8_0.

    The converter of llama.cpp drops the pooler of a reranker, which its score needs. Here it stays.
    """
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    name = NAMES[case.family]
    writer = gguf.GGUFWriter(path, name)
    first = config["pad_token_id"] + 1 if case.family in ("Roberta", "XLMRoberta") else 0
    writer.add_context_length(config["max_position_embeddings"] - first)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_pooling_type(gguf.PoolingType(POOLING[case.pooling] if case.kind == "embed" else 4))
    if name in DECODERS:
        _write_decoder_sizes(writer, config, name)
    else:
        writer.add_layer_norm_eps(config.get("layer_norm_eps", config.get("norm_eps")))
        writer.add_causal_attention(False)
    if name == "bert":
        writer.add_token_type_count(config["type_vocab_size"])
    if name == "modern-bert":
        writer.add_sliding_window(config["local_attention"])
        writer.add_rope_freq_base(160_000.0)
        writer.add_rope_freq_base_swa(10_000.0)
    tokens = [f"t{index}" for index in range(VOCABULARY)]
    tokens[YES], tokens[NO] = "yes", "no"
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_sep_token_id(SEPARATOR)
    for tensor_name, array in load_file(folder / "model.safetensors").items():
        if "pooler" in tensor_name and case.kind == "embed":
            continue  # the converter leaves it out
        _add(writer, _name(tensor_name, config, name), _values(tensor_name, array, first, name), quantised)
    for index, weight in enumerate(dense_weights(case)):
        _add(writer, f"dense_{index + 2}.weight", weight, False)
    if case.kind == "yes_no":
        head = load_file(folder / "model.safetensors")
        rows = head.get("lm_head.weight", head["model.embed_tokens.weight"])
        _add(writer, "cls.output.weight", rows[[YES, NO]], False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_decoder_sizes(writer: Any, config: dict[str, Any], name: str) -> None:
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    parameters = config["rope_parameters"]
    if name == "gemma-embedding":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_rope_freq_base(parameters["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(parameters["sliding_attention"]["rope_theta"])
    else:
        writer.add_rope_freq_base(parameters["rope_theta"])


def _name(tensor: str, config: dict[str, Any], name: str) -> str:
    base, _, kind = tensor.rpartition(".")
    if name in DECODERS:
        architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
        base = base if base.startswith(("model.", "lm_head")) else f"model.{base}"
        found: str | None = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"]).get_name(base)
        assert found is not None, tensor
        return f"{found}.{kind}"
    for prefix in ("roberta.", "bert.", "model."):
        base = base.removeprefix(prefix)
    if base in _ENCODER_NAMES:
        return f"{_ENCODER_NAMES[base]}.{kind}"
    _, _, layer = base.partition("layer.") if "encoder" in base else base.partition("layers.")
    number, _, part = layer.partition(".")
    return f"blk.{number}.{_PARTS[part]}.{kind}"


def _values(tensor: str, array: np.ndarray, first: int, name: str) -> np.ndarray:
    if "position_embeddings" in tensor:
        return array[first:]
    if name == "gemma-embedding" and tensor.endswith("norm.weight"):
        return array + 1
    return array


def _add(writer: Any, name: str, array: np.ndarray, quantised: bool) -> None:
    if quantised and array.ndim == 2 and array.shape[1] % 32 == 0 and name.startswith("blk"):
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(array.astype(np.float32), kind), raw_dtype=kind)
        return
    writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
