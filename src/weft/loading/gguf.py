"""Reads GGUF files (version 2 and 3) through a memory map; a security boundary.

Model files are untrusted. Every count, length and offset is checked against the file size before use. A malformed file
therefore raises `ModelFileError` with the file and the field. It never causes a read past the end, or an allocation
larger than the file justifies.

    header | key-value pairs | tensor table | padding | tensor data

    header: 4 bytes magic, u32 version, u64 number of tensors, u64 number of pairs
"""

from __future__ import annotations

import math
import re
import struct
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

from weft.errors import ModelFileError
from weft.loading.files import MappedFile, field_error, map_file
from weft.loading.formats import GGUF_FORMATS, OTHER_GGUF_FORMATS, TensorFormat
from weft.loading.tensor import StoredTensor

_read_strings: Callable[[mmap, int, int, int], tuple[list[str], int] | None] | None
try:
    from weft._kernels import read_strings as _read_strings
except ImportError:  # an install without the kernels
    _read_strings = None

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_HEADER_BYTES = 24
_MAX_NAME_BYTES = 65_535
_MAX_ENTRIES = 65_536  # for pairs and for tensors; the largest published models have some thousands
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20
_DEFAULT_ALIGNMENT = 32

# The key-value pairs and the tensor table must end before this offset. The largest vocabularies, with an embedded
# tokenizer.json of 30 MB, need half of it. Without a limit, a sparse file that takes no disk space could claim billions
# of empty strings.
_MAX_TABLE_BYTES = 128 << 20

# The smallest possible pair and tensor entry. With the file size, they bound the counts in the header.
_MIN_PAIR_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8

# Scalar value types: number in the file -> type code of the module `array`. A boolean is one byte.
_SCALARS: dict[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9

# The name of one file of a split model: model-00002-of-00003.gguf.
_PART_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class GgufFile:
    """A checked GGUF model, from one file or from all files of a split model."""

    path: Path
    metadata: Mapping[str, Any]
    """Values are numbers, strings, lists of strings, arrays of numbers, or tuples of booleans."""
    tensors: Mapping[str, StoredTensor]


def read_gguf(path: Path | str) -> GgufFile:
    """Opens, checks and maps a GGUF file. For the first file of a split model, also opens the others."""
    first = _read_one(Path(path))
    count = _whole_number(first, "split.count", 1)
    return first if count <= 1 else _with_other_parts(first, count)


def later_part_names(name: str) -> list[str]:
    """The names of the further files if `name` is the first file of a split model, else []."""
    match = _PART_NAME.fullmatch(name)
    if match is None or int(match["number"]) != 1:
        return []
    numbers = range(2, int(match["count"]) + 1)
    return [f"{match['prefix']}-{number:05}-of-{match['count']}.gguf" for number in numbers]


def _read_one(path: Path) -> GgufFile:
    return _Reader(map_file(path, "GGUF", _HEADER_BYTES)).read()


def _with_other_parts(first: GgufFile, count: int) -> GgufFile:
    """Adds the tensors of the other files. The first file has all metadata."""
    match = _PART_NAME.fullmatch(first.path.name)
    if match is None or int(match["count"]) != count:
        raise field_error(
            first.path,
            "split.count",
            f"the model is split into {count} files, and their names must end in -00001-of-{count:05}.gguf and so on; "
            "restore the names they were published under",
        )
    if _whole_number(first, "split.no", 0) != 0 or int(match["number"]) != 1:
        first_name = f"{match['prefix']}-00001-of-{match['count']}.gguf"
        raise field_error(
            first.path,
            "split.no",
            f"this is not the first of the {count} files; pass the path of {first_name}",
        )
    tensors = dict(first.tensors)
    for number, name in enumerate(later_part_names(first.path.name), start=1):
        part = _read_one(first.path.with_name(name))
        for key, expected in (("split.no", number), ("split.count", count)):
            found = _whole_number(part, key, None)
            if found != expected:
                problem = (
                    f"found {found}, expected {expected}; the files are not of one model, download them again"
                )
                raise field_error(part.path, key, problem)
        for tensor_name, tensor in part.tensors.items():
            if tensor_name in tensors:
                other = tensors[tensor_name].file.path.name
                problem = f"the tensor is also in {other}; download the files again"
                raise field_error(part.path, tensor_name, problem)
            tensors[tensor_name] = tensor
    expected = _whole_number(first, "split.tensors.count", len(tensors))
    if expected != len(tensors):
        problem = f"the first file names {expected} tensors, the {count} files hold {len(tensors)}; download them again"
        raise field_error(first.path, "split.tensors.count", problem)
    return GgufFile(first.path, first.metadata, tensors)


def _whole_number(file: GgufFile, key: str, default: Any) -> Any:
    value = file.metadata.get(key, default)
    if value is not default and (not isinstance(value, int) or isinstance(value, bool)):
        raise field_error(file.path, key, f"{value!r:.80} is not a whole number")
    return value


class _Reader:
    """A cursor over the bytes of one file. Every advance is checked against the end of the table."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.path = file.path
        self.data = file.data
        self.size = file.size
        self.position = 0
        self.table_end = min(file.size, _MAX_TABLE_BYTES)
        if self.table_end == file.size:
            self.end_text = f"the file ends at {file.size}"
        else:
            self.end_text = f"metadata and tensor table must end at {_MAX_TABLE_BYTES}"

    def read(self) -> GgufFile:
        if self.data[:4] != _MAGIC:
            problem = f"the file starts with {self.data[:4]!r}, a GGUF file with {_MAGIC!r}; pass a GGUF file"
            raise self.error("magic", problem)
        self.position = 4
        version = self.number("<I", "version")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            is_big_endian = swapped in _VERSIONS
            reason = (
                "it is big-endian, weft reads little-endian files" if is_big_endian else "weft reads 2, 3"
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
                raise self.error(field, f"is {count}, the limit is {_MAX_ENTRIES}")

        metadata: dict[str, Any] = {}
        for index in range(pair_count):
            key = self.string(f"key {index}", _MAX_NAME_BYTES)
            if key in metadata:
                raise self.error(key, "the key appears twice")
            metadata[key] = self.value(self.number("<I", f"{key} type"), key)
        tensors = self.tensor_table(tensor_count, self.alignment(metadata))
        return GgufFile(self.path, metadata, tensors)

    # --- values -------------------------------------------------------------------------------------------------

    def error(self, field: str, problem: str) -> ModelFileError:
        return field_error(self.path, field, problem)

    def take(self, count: int, field: str) -> int:
        """Advances by `count` bytes and returns their start."""
        start = self.position
        if count > self.table_end - start:
            raise self.error(field, f"needs {count} bytes at offset {start}, but {self.end_text}")
        self.position = start + count
        return start

    def check_count(self, count: int, smallest: int, field: str) -> None:
        """Raises an error if so many entries cannot fit into the file. Call it before memory is allocated for them."""
        left = self.table_end - self.position
        if count > left // smallest:
            raise self.error(
                field,
                f"{count} entries of at least {smallest} bytes do not fit into the remaining {left} bytes; "
                f"{self.end_text}",
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
        return self.scalars(kind, 1, field)[0]

    def scalars(self, kind: int, count: int, field: str) -> Sequence[Any]:
        """Reads `count` numbers or booleans of the value type `kind`."""
        code = _SCALARS.get(kind)
        if code is None:
            raise self.error(field, f"value type {kind} is unknown; weft reads the types 0 to 12")
        values = array(code)
        self.check_count(count, values.itemsize, field)
        start = self.take(count * values.itemsize, field)
        values.frombytes(self.data[start : self.position])
        if sys.byteorder == "big":
            values.byteswap()
        if kind != _BOOL:
            return values
        if count and (largest := max(values)) > 1:
            raise self.error(field, f"a boolean must be 0 or 1, found {largest}")
        return tuple(map(bool, values))

    def array(self, field: str) -> Any:
        kind = self.number("<I", f"{field} element type")
        count = self.number("<Q", f"{field} length")
        if kind == _ARRAY:
            raise self.error(field, "weft does not read arrays inside arrays")
        if kind == _STRING:
            self.check_count(count, 8, field)
            return self.strings(count, field)
        return self.scalars(kind, count, field)

    def strings(self, count: int, field: str) -> list[str]:
        """Reads `count` strings. A vocabulary has 100,000 strings, and start-up waits for them.

        So a C++ function reads the strings. The Python loop runs in installs without this function, and after the
        function returned None for malformed data: then the loop raises the error.
        """
        if _read_strings is not None:
            found = _read_strings(self.data, self.position, count, self.table_end)
            if found is not None:
                result, self.position = found
                return result
        data, end, position = self.data, self.table_end, self.position
        unpack = struct.Struct("<Q").unpack_from
        result = []
        for index in range(count):
            if position + 8 > end:
                raise self.error(field, f"entry {index} of {count} starts at {position}, but {self.end_text}")
            start = position + 8
            position = start + unpack(data, position)[0]
            if position > end:
                raise self.error(field, f"entry {index} of {count} ends at {position}, but {self.end_text}")
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

    def tensor_table(self, count: int, alignment: int) -> dict[str, StoredTensor]:
        """Reads the tensor table. Checks that the data of all tensors is inside the file, without overlaps."""
        entries = [self.tensor_entry(index, alignment) for index in range(count)]
        data_start = -(-self.position // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        previous_end, previous_name = 0, ""
        # Sorted by offset: then only neighbours can overlap. With overlapping tensors, a small file could need any
        # amount of memory when it is decoded.
        for name, shape, tensor_format, offset, byte_count in sorted(entries, key=lambda entry: entry[3]):
            if name in tensors:
                raise self.error(name, "the tensor appears twice")
            if offset < previous_end:
                raise self.error(name, f"starts at {offset}, inside tensor {previous_name!r:.120}")
            if data_start + offset + byte_count > self.size:
                raise self.error(
                    name,
                    f"its data ends at byte {data_start + offset + byte_count}, but the file ends at {self.size}; "
                    "the file is cut short, download it again",
                )
            start = data_start + offset
            tensors[name] = StoredTensor(name, shape, tensor_format, self.file, start, byte_count)
            previous_end, previous_name = offset + byte_count, name
        return tensors

    def tensor_entry(self, index: int, alignment: int) -> tuple[str, tuple[int, ...], TensorFormat, int, int]:
        """Reads one entry of the table: name, shape, format, offset in the data, and number of bytes."""
        name = self.string(f"tensor {index} name", _MAX_NAME_BYTES)
        dimension_count = self.number("<I", f"{name} dimensions")
        if not 1 <= dimension_count <= _MAX_DIMENSIONS:
            raise self.error(name, f"has {dimension_count} dimensions, allowed are 1 to {_MAX_DIMENSIONS}")
        dimensions = [self.number("<Q", f"{name} dimension {axis}") for axis in range(dimension_count)]
        if 0 in dimensions:
            raise self.error(name, f"has an empty dimension: {dimensions}")
        kind = self.number("<I", f"{name} type")
        tensor_format = GGUF_FORMATS.get(kind)
        if tensor_format is None:
            known = ", ".join(entry.name for entry in GGUF_FORMATS.values())
            found = OTHER_GGUF_FORMATS.get(kind, "unknown")
            raise self.error(
                name,
                f"has the type {kind} ({found}); weft reads {known}. Convert the model to one of these",
            )
        if dimensions[0] % tensor_format.block_values:
            raise self.error(
                name,
                f"a row has {dimensions[0]} values, not a multiple of the block size {tensor_format.block_values}",
            )
        values = math.prod(dimensions)  # Python integers: the product of four 64-bit numbers does not wrap
        offset = self.number("<Q", f"{name} offset")
        if offset % alignment:
            raise self.error(name, f"offset {offset} is not a multiple of the alignment {alignment}")
        # GGUF lists the fastest-moving dimension first, numpy last.
        return name, tuple(reversed(dimensions)), tensor_format, offset, tensor_format.bytes_of(values)
