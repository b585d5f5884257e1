"""Reads GGUF files (version 2 and 3) through a memory map; a security boundary.

A model file comes from a stranger. Every count, length and offset is checked against the size of the file before
it is used, so that a malformed file costs an error and never a read past the end or an allocation larger than the
file justifies. Anything wrong raises `ModelFileError` with the file and the field.

    header | key-value pairs | tensor table | padding | tensor data
           4 magic, u32 version, u64 tensors, u64 pairs
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.errors import ModelFileError
from weft.loading.formats import FORMATS, OTHER_FORMAT_NAMES, TensorFormat, dequantise

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_NAME_BYTES = 65_535
_MAX_ENTRIES = 65_536  # of pairs, and of tensors; the largest published models have some thousands
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20
_DEFAULT_ALIGNMENT = 32

# The smallest a key-value pair and a tensor entry can be: what bounds their counts by the size of the file.
_MIN_PAIR_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8

# Scalar value types: number in the file -> little-endian numpy type.
_SCALARS: dict[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file: raw bytes in the map, turned into numbers only when asked.

    `shape` is in numpy order (rows first), so a linear layer is [outputs, inputs].
    """

    name: str
    shape: tuple[int, ...]
    format: TensorFormat
    raw: np.ndarray  # uint8, a view of the map; never writable

    @property
    def format_name(self) -> str:
        return self.format.name

    def read_into(self, out: np.ndarray) -> None:
        """Write the values into `out`, a floating point array of the same shape."""
        out[...] = dequantise(self.raw, self.format, self.shape)

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """float32 copies of these rows of a matrix; nothing else of it is read."""
        rows = self.raw.reshape(self.shape[0], -1)[indices]
        return dequantise(rows, self.format, (len(indices), self.shape[1]))

    def to_float32(self) -> np.ndarray:
        """A fresh float32 array."""
        return dequantise(self.raw, self.format, self.shape)


@dataclass(frozen=True)
class GgufFile:
    """A checked file: its metadata (numbers, strings, lists of strings, read-only numpy arrays) and tensors."""

    path: Path
    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path | str) -> GgufFile:
    """Open, check and map a GGUF file; the map lives as long as any tensor of it does."""
    path = Path(path)
    return _Reader(path, _map_file(path)).read()


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            # An empty file cannot be mapped, and what cannot hold a header is no model either.
            size = file.seek(0, 2)
            if size < 24:
                raise ModelFileError(
                    f"{path}: header: the file has {size} bytes, a GGUF header alone needs 24"
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be opened: {error.strerror or error}") from error


class _Reader:
    """A cursor over the bytes of one file; every step forward is checked against its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = 0

    def read(self) -> GgufFile:
        if self.data[:4] != _MAGIC:
            raise self.error("magic", f"the file starts with {self.data[:4]!r}, a GGUF file with {_MAGIC!r}")
        self.position = 4
        version = self.number("<I", "version")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            reason = (
                "it is big-endian, weft reads little-endian files"
                if swapped in _VERSIONS
                else "weft reads 2, 3"
            )
            raise self.error("version", f"found {version}; {reason}")
        tensor_count = self.number("<Q", "tensor count")
        pair_count = self.number("<Q", "key-value count")
        for count, smallest, field in (
            (pair_count, _MIN_PAIR_BYTES, "key-value count"),
            (tensor_count, _MIN_TENSOR_BYTES, "tensor count"),
        ):
            self.check_count(count, smallest, field)
            if count > _MAX_ENTRIES:
                raise self.error(field, f"{count} entries, the limit is {_MAX_ENTRIES}")

        metadata: dict[str, Any] = {}
        for index in range(pair_count):
            key = self.string(f"key {index}", _MAX_NAME_BYTES)
            if key in metadata:
                raise self.error(key, "the key appears twice")
            metadata[key] = self.value(self.number("<I", f"{key} type"), key)
        tensors = self.tensor_table(tensor_count, self.alignment(metadata))
        return GgufFile(self.path, version, metadata, tensors)

    # --- pieces -------------------------------------------------------------------------------------------------

    def error(self, field: str, problem: str) -> ModelFileError:
        # repr of a hostile name, cut short: the message goes to a terminal and to a log.
        shown = field if field.isprintable() and len(field) <= 120 else repr(field[:120])
        return ModelFileError(f"{self.path}: {shown}: {problem}")

    def take(self, count: int, field: str) -> int:
        """Claim the next `count` bytes and return where they start."""
        start = self.position
        if count > self.size - start:
            raise self.error(
                field, f"needs {count} bytes at offset {start}, but the file ends at {self.size}"
            )
        self.position = start + count
        return start

    def check_count(self, count: int, smallest: int, field: str) -> None:
        left = self.size - self.position
        if count > left // smallest:
            raise self.error(
                field,
                f"{count} entries of at least {smallest} bytes do not fit into the {left} bytes that are left",
            )

    def number(self, code: str, field: str) -> int:
        return struct.unpack_from(code, self.data, self.take(struct.calcsize(code), field))[0]

    def string(self, field: str, longest: int | None = None) -> str:
        length = self.number("<Q", f"{field} length")
        if longest is not None and length > longest:
            raise self.error(field, f"the name has {length} bytes, the limit is {longest}")
        start = self.take(length, field)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(field, f"not UTF-8 at byte {start + error.start}") from error

    def value(self, kind: int, field: str) -> Any:
        if kind == _STRING:
            return self.string(field)
        if kind == _ARRAY:
            return self.array(field)
        return self.scalars(kind, 1, field)[0].item()

    def scalars(self, kind: int, count: int, field: str) -> np.ndarray:
        code = _SCALARS.get(kind)
        if code is None:
            raise self.error(field, f"value type {kind} is unknown; known are 0 to 12")
        item = np.dtype(code)
        self.check_count(count, item.itemsize, field)
        start = self.take(count * item.itemsize, field)
        if kind == _BOOL:
            raw = np.frombuffer(self.data, np.uint8, count, start)
            if raw.size and raw.max() > 1:
                raise self.error(field, f"a truth value is 0 or 1, found {raw.max()}")
        return np.frombuffer(self.data, item, count, start)

    def array(self, field: str) -> Any:
        kind = self.number("<I", f"{field} element type")
        count = self.number("<Q", f"{field} length")
        if kind == _ARRAY:
            raise self.error(field, "arrays inside arrays are not used by any model weft knows")
        if kind == _STRING:
            self.check_count(count, 8, field)
            return self.strings(count, field)
        return self.scalars(kind, count, field)

    def strings(self, count: int, field: str) -> list[str]:
        """`string`, `count` times, written out: a vocabulary has 100,000 of them and start-up waits for it."""
        data, size, position, unpack = self.data, self.size, self.position, struct.Struct("<Q").unpack_from
        result: list[str] = []
        for index in range(count):
            if position + 8 > size:
                raise self.error(
                    field, f"entry {index} of {count} starts at {position}, but the file ends at {size}"
                )
            start = position + 8
            position = start + unpack(data, position)[0]
            if position > size:
                raise self.error(
                    field, f"entry {index} of {count} ends at {position}, but the file ends at {size}"
                )
            try:
                result.append(data[start:position].decode("utf-8"))
            except UnicodeDecodeError as error:
                raise self.error(field, f"entry {index} of {count} is not UTF-8") from error
        self.position = position
        return result

    def alignment(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if (
            not isinstance(alignment, int)
            or not 1 <= alignment <= _MAX_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            raise self.error(
                "general.alignment",
                f"must be a power of two from 1 to {_MAX_ALIGNMENT}, found {alignment!r:.80}",
            )
        return alignment

    # --- tensors ------------------------------------------------------------------------------------------------

    def tensor_table(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        entries = [self.tensor_entry(index, alignment) for index in range(count)]
        data_start = -(-self.position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        previous_end, previous_name = 0, ""
        # In order of offset, so that an overlap is found between neighbours. Overlapping tensors would let a small
        # file claim any amount of memory once they are turned into numbers.
        for name, shape, tensor_format, offset, byte_count in sorted(entries, key=lambda entry: entry[3]):
            if name in tensors:
                raise self.error(name, "the tensor appears twice")
            if offset < previous_end:
                raise self.error(name, f"starts at {offset}, inside tensor {previous_name!r:.120}")
            if data_start + offset + byte_count > self.size:
                raise self.error(
                    name,
                    f"its data ends at byte {data_start + offset + byte_count}, but the file ends at {self.size}; "
                    "the file is cut short, fetch it again",
                )
            raw = np.frombuffer(self.data, np.uint8, byte_count, data_start + offset)
            tensors[name] = GgufTensor(name, shape, tensor_format, raw)
            previous_end, previous_name = offset + byte_count, name
        return tensors

    def tensor_entry(self, index: int, alignment: int) -> tuple[str, tuple[int, ...], TensorFormat, int, int]:
        name = self.string(f"tensor {index} name", _MAX_NAME_BYTES)
        dimension_count = self.number("<I", f"{name} dimensions")
        if not 1 <= dimension_count <= _MAX_DIMENSIONS:
            raise self.error(name, f"has {dimension_count} dimensions, allowed are 1 to {_MAX_DIMENSIONS}")
        dimensions = [self.number("<Q", f"{name} dimension {axis}") for axis in range(dimension_count)]
        if 0 in dimensions:
            raise self.error(name, f"has an empty dimension: {dimensions}")
        kind = self.number("<I", f"{name} type")
        tensor_format = FORMATS.get(kind)
        if tensor_format is None:
            known = ", ".join(entry.name for entry in FORMATS.values())
            found = OTHER_FORMAT_NAMES.get(kind, "unknown")
            raise self.error(
                name,
                f"is stored as type {kind} ({found}); weft reads {known}. Convert the model to one of these",
            )
        if dimensions[0] % tensor_format.block_values:
            raise self.error(
                name,
                f"rows of {dimensions[0]} values cannot be cut into blocks of {tensor_format.block_values}",
            )
        values = 1
        for dimension in dimensions:
            values *= dimension  # Python integers: the product of four 64-bit numbers does not wrap
        offset = self.number("<Q", f"{name} offset")
        if offset % alignment:
            raise self.error(name, f"offset {offset} is not a multiple of the alignment {alignment}")
        byte_count = values // tensor_format.block_values * tensor_format.block_bytes
        # The file gives the fastest-moving dimension first, numpy the slowest.
        return name, tuple(reversed(dimensions)), tensor_format, offset, byte_count
