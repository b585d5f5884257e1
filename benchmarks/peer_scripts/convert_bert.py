"""Writes all-MiniLM-L6-v2 as a GGUF file with 8-bit matrices, as llama.cpp's converter does. Arguments: FOLDER TARGET."""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}
PARTS = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
SPECIAL = {"padding": "[PAD]", "unknown": "[UNK]", "cls": "[CLS]", "seperator": "[SEP]", "mask": "[MASK]"}


def main(folder, target):
    config = json.loads((folder / "config.json").read_text())
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    writer = gguf.GGUFWriter(target, "bert")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_token_type_count(config["type_vocab_size"])
    words = sorted(vocabulary, key=vocabulary.get)
    is_special = [word.startswith("[") and word.endswith("]") and len(word) > 2 for word in words]
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")
    # The model marks a token that continues a word (##). llama.cpp marks a token that begins one (▁).
    marked = [
        word if special else word[2:] if word.startswith("##") else f"▁{word}"
        for word, special in zip(words, is_special, strict=True)
    ]
    writer.add_token_list(marked)
    writer.add_token_types([3 if special else 1 for special in is_special])
    for name, word in SPECIAL.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", vocabulary[word])
    writer.add_uint32("tokenizer.ggml.bos_token_id", vocabulary["[CLS]"])
    for name, array in load_file(folder / "model.safetensors").items():
        if name.endswith("position_ids") or name.startswith("pooler"):
            continue
        base, _, kind = name.rpartition(".")
        if base in NAMES:
            ours = NAMES[base]
        else:
            number, _, part = base.removeprefix("encoder.layer.").partition(".")
            ours = f"blk.{number}.{PARTS[part]}"
        array = array.astype(np.float32)
        if array.ndim == 2 and ours.startswith("blk"):
            q8 = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{ours}.{kind}", gguf.quants.quantize(array, q8), raw_dtype=q8)
        else:
            writer.add_tensor(f"{ours}.{kind}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
