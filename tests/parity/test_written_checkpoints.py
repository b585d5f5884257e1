"""Model files written by transformers and the gguf package: weft reads back every tensor."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from weft.loading.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shard_size", ["1GB", "60KB"])
def test_a_folder_written_by_transformers_holds_the_weights_of_the_model(
    tmp_path: Path, model: LlamaForCausalLM, dtype: torch.dtype, shard_size: str
) -> None:
    written = copy.deepcopy(model).to(dtype)
    written.generation_config = GenerationConfig(
        eos_token_id=[2, 7], temperature=0.6, top_p=0.9, do_sample=True
    )
    written.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size == "60KB")

    checkpoint = open_checkpoint(tmp_path)
    expected = {name: tensor for name, tensor in written.state_dict().items() if name in checkpoint.tensors}
    assert set(expected) == set(checkpoint.tensors) and len(expected) >= 20
    for name, tensor in expected.items():
        np.testing.assert_array_equal(checkpoint.tensors[name].to_float32(), tensor.float().numpy())
    assert checkpoint.metadata["model_type"] == "llama"
    assert checkpoint.end_ids == {2, 7}
    assert checkpoint.generation == {"temperature": 0.6, "top_p": 0.9}


@pytest.mark.parametrize("tensors_per_file", [0, 2])
def test_a_gguf_model_written_by_the_gguf_package_holds_the_written_values(
    tmp_path: Path, tensors_per_file: int
) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=tensors_per_file)
    writer.add_context_length(128)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "<end>"])
    writer.add_eos_token_id(2)
    random = np.random.default_rng(4)
    expected = {}
    for index, kind in enumerate(("F32", "F16", "BF16", "Q8_0", "Q5_1")):
        values = random.normal(size=(3, 64)).astype(np.float32)
        raw = quantize(values, GGMLQuantizationType[kind])
        expected[f"blk.{index}.weight"] = dequantize(raw, GGMLQuantizationType[kind])
        writer.add_tensor(f"blk.{index}.weight", raw, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert len(list(tmp_path.glob("*.gguf"))) == (3 if tensors_per_file else 1)

    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.metadata["llama.context_length"] == 128
    assert checkpoint.end_ids == {2}
    assert set(checkpoint.tensors) == set(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(checkpoint.tensors[name].to_float32(), values)
