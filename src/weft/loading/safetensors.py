"""Reads safetensors files, single or sharded with an index, through a memory map; a security boundary.

Model files are untrusted. As for GGUF, every length, shape and offset is checked against the file size before use.
Errors are `ModelFileError`s with the file and the field.

    u64 header length | JSON header, maybe padded with spaces | tensor data
                        {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ...}

The format demands that tensors follow each other without gaps or overlaps. Both are rejected.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from weft.errors import ModelFileError
from weft.loading.files import MappedFile, field_error, map_file, parse_json, read_json
from weft.loading.formats import I64, SAFETENSORS_FORMATS, TensorFormat
from weft.loading.tensor import StoredTensor

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_LENGTH_BYTES = 8
# This limit is enough for 100,000 tensors. The reference implementation allows six times as much; real files need far
# less.
_MAX_HEADER_BYTES = 16 << 20
_MAX_DIMENSIONS = 8
_MAX_FILE_NAME = 255

# Encoders store the numbers 0, 1, 2 ... in a tensor of this name. No model reads it.
_COUNTED = "embeddings.position_ids"

_Entry = tuple[int, int, str, tuple[int, ...], TensorFormat]  # start, end (the sort key), name, shape, format


def read_safetensors(path: Path | str) -> dict[str, StoredTensor]:
    """The tensors of one file, by name."""
    file = map_file(Path(path), "safetensors", _LENGTH_BYTES)
    length = int.from_bytes(file.data[:_LENGTH_BYTES], "little")
    data_start = _LENGTH_BYTES + length
    if length > _MAX_HEADER_BYTES:
        raise field_error(file.path, "header length", f"{length} bytes, the limit is {_MAX_HEADER_BYTES}")
    if data_start > file.size:
        raise field_error(
            file.path,
            "header length",
            f"{length} bytes after the first {_LENGTH_BYTES}, but the file ends at {file.size}; "
            "it is cut short, or not a safetensors file; download it again",
        )
    header = parse_json(file.path, file.data[_LENGTH_BYTES:data_start], "header")
    header.pop("__metadata__", None)  # free-form notes of the author, unused
    return _tensors(file, data_start, header)


def _tensors(file: MappedFile, data_start: int, header: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The tensors of a header. Checks that their data fills the rest of the file, without overlaps or gaps."""
    tensors: dict[str, StoredTensor] = {}
    previous_end = 0
    for start, end, name, shape, tensor_format in sorted(
        (_entry(file.path, name, entry) for name, entry in header.items()), key=lambda entry: entry[:2]
    ):
        if start != previous_end:
            raise field_error(
                file.path,
                name,
                f"starts at {start}, but the data before it ends at {previous_end}; "
                "the format allows neither overlaps nor gaps",
            )
        if data_start + end > file.size:
            raise field_error(
                file.path,
                name,
                f"its data ends at byte {data_start + end}, but the file ends at {file.size}; "
                "the file is cut short, download it again",
            )
        tensors[name] = StoredTensor(name, shape, tensor_format, file, data_start + start, end - start)
        previous_end = end
    if data_start + previous_end != file.size:
        problem = (
            f"the tensors end at byte {data_start + previous_end}, the file at {file.size}; download it again"
        )
        raise field_error(file.path, "data", problem)
    return tensors


def _entry(path: Path, name: str, entry: Any) -> _Entry:
    """Checks one entry of the header."""
    if not isinstance(entry, dict):
        raise field_error(path, name, "is not an object with dtype, shape and data_offsets")
    dtype, shape, offsets = (entry.get(field) for field in ("dtype", "shape", "data_offsets"))
    tensor_format = SAFETENSORS_FORMATS.get(dtype) if isinstance(dtype, str) else None
    if dtype == I64.name and name.endswith(_COUNTED):
        tensor_format = I64
    if tensor_format is None:
        known = ", ".join(SAFETENSORS_FORMATS)
        raise field_error(
            path, name, f"dtype is {dtype!r:.80}; weft reads {known}. Convert the model to one of these"
        )
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        expected = f"at most {_MAX_DIMENSIONS} whole numbers from 0"
        raise field_error(path, name, f"shape is {shape!r:.80}, expected a list of {expected}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise field_error(
            path, name, f"data_offsets is {offsets!r:.80}, expected [start, end] of the tensor's data"
        )
    start, end = offsets
    needed = tensor_format.bytes_of(math.prod(shape))
    if end - start != needed:
        raise field_error(
            path,
            name,
            f"{dtype} of shape {shape!r:.80} takes {needed} bytes, data_offsets give it {end - start}",
        )
    return start, end, name, tuple(shape), tensor_format


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    """Whether `values` is a list of unsigned 63-bit integers. The product of huge Python integers would take hours."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


# --- sharded files ----------------------------------------------------------------------------------------------------


def read_sharded_safetensors(index_path: Path | str) -> dict[str, StoredTensor]:
    """The tensors of all shards that an index names, by tensor name."""
    index_path = Path(index_path)
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise field_error(index_path, "weight_map", "missing or empty; expected a file name for every tensor")
    tensors: dict[str, StoredTensor] = {}
    for shard in dict.fromkeys(_shard_name(index_path, *item) for item in weight_map.items()):
        for name, tensor in _shard_tensors(index_path, shard).items():
            if weight_map.get(name) != shard:
                found = repr(weight_map[name]) if name in weight_map else "no file"
                raise field_error(index_path, name, f"the tensor is in {shard}, the index names {found}")
            tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors:
            raise field_error(index_path, name, f"the index names {shard}, but the tensor is not in it")
    return tensors


def _shard_name(index_path: Path, tensor: str, shard: Any) -> str:
    """Checks that `shard` is a file name in the folder of the index: "../x" or "/x" could name any file of the user."""
    if (
        not isinstance(shard, str)
        or not shard.endswith(".safetensors")
        or not shard.isprintable()
        or "/" in shard
        or "\\" in shard
        or len(shard.encode()) > _MAX_FILE_NAME
    ):
        raise field_error(
            index_path,
            tensor,
            f"the index names {shard!r:.120}, expected the name of a .safetensors file in the same folder",
        )
    return shard


def _shard_tensors(index_path: Path, shard: str) -> dict[str, StoredTensor]:
    path = index_path.with_name(shard)
    if not os.path.lexists(path):
        raise ModelFileError(
            f"{index_path}: {shard}: the index names this file, but it does not exist; download it"
        )
    return read_safetensors(path)
