"""Writes small model files for the tests, good ones and bad ones, byte by byte."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

U16, I32, U32, FLOAT, BOOL, STRING, ARRAY = 2, 5, 4, 6, 7, 8, 9
F32, F16, Q4_0, Q4_1, Q8_0, Q4_K, Q6_K, BF16 = 0, 1, 2, 3, 8, 12, 14, 30

# --- GGUF -------------------------------------------------------------------------------------------------------------


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def strings(key: str, values: list[str]) -> bytes:
    return pair(key, ARRAY, struct.pack("<IQ", STRING, len(values)) + b"".join(map(string, values)))


def tensor(name: str, dimensions: list[int], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)


def gguf(
    pairs: list[bytes],
    tensors: list[bytes],
    data: bytes,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    tensor_count, pair_count = counts or (len(tensors), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, tensor_count, pair_count)
    head += b"".join(pairs) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


PAIRS = [
    pair("general.architecture", STRING, string("llama")),
    pair("answer", U32, struct.pack("<I", 42)),
    pair("ratio", FLOAT, struct.pack("<f", 0.5)),
    pair("yes", BOOL, b"\x01"),
    strings("words", ["a", "", "é"]),
    pair("numbers", ARRAY, struct.pack("<IQ3I", U32, 3, 7, 8, 9)),
]
TENSORS = [tensor("first", [4, 2], F32, 0), tensor("second", [32], Q8_0, 32)]
DATA = np.arange(8, dtype="<f4").tobytes() + struct.pack("<e", 0.5) + bytes(range(32)) + b"\0" * 30
GOOD_GGUF = gguf(PAIRS, TENSORS, DATA)

VOCABULARY = [
    pair("tokenizer.ggml.model", STRING, string("gpt2")),
    pair("tokenizer.ggml.pre", STRING, string("smollm")),
    strings("tokenizer.ggml.tokens", ["a", "b", "<end>"]),
    pair("tokenizer.ggml.eos_token_id", U32, struct.pack("<I", 2)),
]

# --- safetensors ------------------------------------------------------------------------------------------------------


def safetensors(header: Any, data: bytes, length: int | None = None) -> bytes:
    """`header` as JSON, or as it is if it is bytes; `length` is what the file claims it to be."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HEADER = {
    "__metadata__": {"format": "pt"},
    "matrix": entry("F32", [2, 3], 0, 24),
    "half": entry("F16", [4], 24, 32),
    "brain": entry("BF16", [2, 2], 32, 40),
}
TENSOR_BYTES = (
    np.arange(6, dtype="<f4").tobytes()
    + np.arange(4, dtype="<f2").tobytes()
    + (np.arange(4, dtype="<f4").view("<u4") >> 16).astype("<u2").tobytes()
)
GOOD_SAFETENSORS = safetensors(HEADER, TENSOR_BYTES)


def write_folder(folder: Path, files: dict[str, Any]) -> Path:
    """A checkpoint: bytes are written as they are, everything else as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / name).write_bytes(raw)
    return folder
