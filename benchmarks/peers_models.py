"""Converts the default model for the peers: to a GGUF file in Q4_0, and to a folder with float32 safetensors.

Both are made once, from the weights of the file that weft serves. Peers with another format convert one of these with
their own tool.
"""

from __future__ import annotations

import json
import mmap
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from weft.errors import ModelFileError
from weft.loading.cache import partial_path
from weft.loading.checkpoint import Checkpoint, open_checkpoint
from weft.models.names import by_decoder_name, file_name
from weft.models.registry import build_config

_Q4_0 = 2
"""The number of this type in GGUF files."""
_GROUP_SIZE = 32
_ALIGNMENT = 32
_TYPE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


def make_once(target: Path, make: Callable[[Path], None]) -> Path:
    """Returns `target`. If it is missing, `make` writes to a temporary path, which is then renamed: `target` is never
    incomplete."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = partial_path(target)
        shutil.rmtree(partial, ignore_errors=True)
        partial.unlink(missing_ok=True)
        make(partial)
        partial.rename(target)
    return target


def quantise_q4_0(values: np.ndarray) -> np.ndarray:
    """Quantises float32 rows in groups of 32 values: a float16 scale, then 16 bytes with two codes each.

    The value with the largest magnitude gets the code 0, which means -8, as in llama.cpp.
    """
    groups = values.reshape(-1, _GROUP_SIZE)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=1, keepdims=True), axis=1)
    scales = largest / np.float32(-8.0)
    inverse = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales != 0)
    codes = np.clip(groups * inverse + np.float32(8.5), 0, 15).astype(np.uint8)
    halves = scales.astype("<f2").view(np.uint8)
    return np.concatenate([halves, codes[:, :16] | codes[:, 16:] << 4], axis=1)


def write_q4_0(source: Path, target: Path) -> None:
    """Writes the model with every matrix in Q4_0, including the embedding; vectors are not changed."""
    tensors = open_checkpoint(source).tensors
    table, data, offset = b"", [], 0
    for name, tensor in tensors.items():
        is_matrix = len(tensor.shape) == 2 and tensor.shape[-1] % _GROUP_SIZE == 0
        if not is_matrix and tensor.format_name != "F32":
            raise ModelFileError(
                f"{source}: {name} is {tensor.format_name} and not a matrix of whole groups of {_GROUP_SIZE}"
            )
        stored = quantise_q4_0(tensor.to_float32()) if is_matrix else tensor.raw
        text = name.encode()
        dimensions = tuple(reversed(tensor.shape))
        table += struct.pack("<Q", len(text)) + text
        table += struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        table += struct.pack("<IQ", _Q4_0 if is_matrix else 0, offset)
        content = stored.tobytes()
        data.append(content + bytes(-len(content) % _ALIGNMENT))
        offset += len(data[-1])
    pairs = _header_with_pairs(source)
    head = pairs + table
    with target.open("wb") as file:
        file.write(head + bytes(-len(head) % _ALIGNMENT))
        file.writelines(data)


def _header_with_pairs(path: Path) -> bytes:
    """The bytes of a GGUF file before its table of tensors: the header and the key-value pairs."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        (count,) = struct.unpack_from("<Q", data, 16)
        at = 24
        for _ in range(count):
            at = _after_string(data, at)
            at = _after_value(data, at + 4, *struct.unpack_from("<I", data, at))
        return bytes(data[:at])


def _after_string(data: mmap.mmap, at: int) -> int:
    return at + 8 + int(struct.unpack_from("<Q", data, at)[0])


def _after_value(data: mmap.mmap, at: int, kind: int) -> int:
    if kind == _STRING:
        return _after_string(data, at)
    if kind != _ARRAY:
        return at + _TYPE_BYTES[kind]
    inner, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if inner != _STRING:
        return at + int(count) * _TYPE_BYTES[inner]
    for _ in range(count):
        at = _after_string(data, at)
    return at


def write_folder(source: Path, folder: Path) -> None:
    """Writes config.json, a tokenizer and float32 weights in the layout of a Transformers Llama model."""
    checkpoint = open_checkpoint(source)
    if checkpoint.architecture != "llama" or checkpoint.vocabulary is None:
        raise ModelFileError(f"{source}: only a Llama model in a GGUF file can be converted for the peers")
    config = build_config("gguf", checkpoint.metadata, checkpoint.tensors)
    shape = config.attention
    weights = {}
    for name, tensor in by_decoder_name("gguf", checkpoint.tensors, {}).items():
        values = tensor.to_float32()
        if name.endswith((".wq", ".wk")):
            # In a GGUF file the rotated pairs of a head are adjacent rows; in Transformers they are in its two halves.
            pairs = values.reshape(-1, shape.head_size // 2, 2, values.shape[-1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        weights[file_name("huggingface", name, {})] = np.ascontiguousarray(values)
    folder.mkdir(parents=True)
    _write_safetensors(folder / "model.safetensors", weights)
    _write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": config.hidden_size,
            "intermediate_size": config.feed_forward_size,
            "num_hidden_layers": config.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_size,
            "vocab_size": config.vocabulary_size,
            "max_position_embeddings": config.max_context,
            "rms_norm_eps": config.norm_epsilon,
            "rope_theta": checkpoint.metadata["llama.rope.freq_base"],
            "hidden_act": "silu",
            "tie_word_embeddings": config.tied_embedding,
            "bos_token_id": checkpoint.vocabulary.bos_id,
            "eos_token_id": checkpoint.vocabulary.eos_id,
            "torch_dtype": "float32",
        },
    )
    _write_tokenizer(checkpoint, folder)


def _write_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """Writes a tokenizer that can decode. Prompts are token ids, so it need not encode like the original."""
    vocabulary = checkpoint.vocabulary
    assert vocabulary is not None
    tokens = vocabulary.tokens
    tokenizer = Tokenizer(
        models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=vocabulary.merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(tokens[number], special=True) for number in vocabulary.control_ids]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": vocabulary.bos_id, "eos_token": vocabulary.eos_id, "pad_token": vocabulary.eos_id}
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{name: tokens[number] for name, number in named.items() if number is not None},
        },
    )


def _write_safetensors(path: Path, weights: Mapping[str, np.ndarray]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, values in weights.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(values.shape),
            "data_offsets": [offset, offset + values.nbytes],
        }
        offset += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for values in weights.values():
            file.write(values.data)


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", "utf-8")
