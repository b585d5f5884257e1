"""The GGUF reader: correct values from valid files, and a `ModelFileError` from malformed ones."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from model_files import (
    ARRAY,
    BOOL,
    DATA,
    F32,
    GOOD_GGUF,
    I32,
    PAIRS,
    Q8_0,
    STRING,
    TENSORS,
    U16,
    U32,
    gguf,
    pair,
    string,
    tensor,
)
from weft.errors import ModelFileError
from weft.loading.gguf import GgufFile, read_gguf


def read(directory: Path, content: bytes) -> GgufFile:
    path = directory / "model.gguf"
    path.write_bytes(content)
    return read_gguf(path)


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors_come_back_as_written(tmp_path: Path, version: int) -> None:
    file = read(tmp_path, gguf(PAIRS, TENSORS, DATA, version))
    numbers = file.metadata["numbers"]
    assert numbers.tolist() == [7, 8, 9]
    assert {key: value for key, value in file.metadata.items() if key != "numbers"} == {
        "general.architecture": "llama", "answer": 42, "ratio": 0.5, "yes": True, "words": ["a", "", "é"],
    }  # fmt: skip
    assert file.tensors["first"].shape == (2, 4)
    np.testing.assert_array_equal(
        file.tensors["first"].to_float32(), np.arange(8, dtype=np.float32).reshape(2, 4)
    )
    np.testing.assert_array_equal(file.tensors["second"].to_float32(), np.arange(32, dtype=np.float32) / 2)
    assert file.tensors["second"].format_name == "Q8_0"


def test_the_default_model_dequantises_like_the_reference_package(default_model_file: GgufFile) -> None:
    from gguf import GGUFReader
    from gguf.quants import dequantize

    seen = set()
    for reference in GGUFReader(default_model_file.path).tensors:
        if (reference.tensor_type, "norm" in reference.name) in seen:
            continue
        seen.add((reference.tensor_type, "norm" in reference.name))
        ours = default_model_file.tensors[reference.name].to_float32()
        np.testing.assert_array_equal(ours, dequantize(reference.data, reference.tensor_type))
    assert len(seen) == 3


def test_a_tensor_is_read_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="read-only"):
        read(tmp_path, GOOD_GGUF).tensors["first"].raw[0] = 1


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "has 0 bytes"),
    "not gguf": (b"PK" + b"\0" * 60, "magic"),
    "version 1": (gguf([], [], b"", version=1), "found 1; weft reads 2, 3"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + b"\0" * 24, "big-endian"),
    "too many pairs": (gguf([], [], b"", counts=(0, 2**64 - 1)), "key-value count: 18446744073709551615 entries"),
    "too many tensors": (gguf([], [], b"", counts=(2**40, 0)), "tensor count: 1099511627776 entries"),
    "string past the end": (gguf([pair("k", STRING, struct.pack("<Q", 2**63))], [], b""), "k: needs 9223372036854775808"),
    "array past the end": (gguf([pair("k", ARRAY, struct.pack("<IQ", U32, 2**61))], [], b""), "k: 2305843009213693952"),
    "strings past the end": (gguf([pair("k", ARRAY, struct.pack("<IQQ", STRING, 2, 99))], [], b"\0" * 32), "entry 0 of 2 ends"),
    "array of arrays": (gguf([pair("k", ARRAY, struct.pack("<IQ", ARRAY, 1))], [], b"\0" * 99), "arrays inside arrays"),
    "not utf-8": (gguf([pair("k", STRING, string(b"\xff"))], [], b""), "not UTF-8"),
    "key twice": (gguf([PAIRS[1], PAIRS[1]], [], b""), "answer: the key appears twice"),
    "unknown value type": (gguf([pair("k", 77, b"\0" * 8)], [], b""), "value type 77 is unknown"),
    "alignment": (gguf([pair("general.alignment", U32, struct.pack("<I", 3))], [], b""), "found 3"),
    "a bool of 2": (gguf([pair("k", BOOL, b"\x02")], [], b""), "found 2"),
    "dimensions": (gguf([], [tensor("w", [1] * 9, F32, 0)], DATA), "has 9 dimensions"),
    "empty dimension": (gguf([], [tensor("w", [4, 0], F32, 0)], DATA), "empty dimension"),
    "other format": (gguf([], [tensor("w", [256], 16, 0)], DATA), r"type 16 \(IQ2_XXS\); weft reads F32, F16, Q4_0, Q4_1, Q5_0"),
    "ragged blocks": (gguf([], [tensor("w", [33], Q8_0, 0)], DATA), "33 values, not a multiple of the block size 32"),
    "data past the end": (gguf([], [tensor("w", [2**40], F32, 0)], DATA), "the file ends at"),
    "a product beyond 64 bits": (gguf([], [tensor("w", [2**40, 2**40], F32, 0)], DATA), "the file ends at"),
    "offset past the end": (gguf([], [tensor("w", [4], F32, 2**63)], DATA), "the file ends at"),
    "unaligned": (gguf([], [tensor("w", [4], F32, 4)], DATA), "offset 4 is not a multiple"),
    "overlap": (gguf([], [tensor("a", [16], F32, 0), tensor("b", [4], F32, 32)], DATA), "inside tensor 'a'"),
    "tensor twice": (gguf([], [tensor("a", [4], F32, 0), tensor("a", [4], F32, 32)], DATA), "appears twice"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_malformed_file_is_refused_naming_the_file_and_the_field(tmp_path: Path, case: str) -> None:
    content, message = BAD_FILES[case]
    with pytest.raises(ModelFileError, match=message) as caught:
        read(tmp_path, content)
    assert "model.gguf" in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing.gguf"):
        with pytest.raises(ModelFileError, match="cannot be opened"):
            read_gguf(path)


def test_a_pipe_and_a_broken_link_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match="not a regular file"):
        read_gguf(tmp_path / "pipe.gguf")
    (tmp_path / "link.gguf").symlink_to("gone.gguf")
    with pytest.raises(ModelFileError, match=r"a link to gone.gguf, which does not exist"):
        read_gguf(tmp_path / "link.gguf")


@pytest.mark.parametrize(
    "value",
    [
        struct.pack("<IQ", STRING, 1 << 30),  # empty strings: eight zero bytes each
        struct.pack("<IQ", U32, 1 << 31),
        struct.pack("<IQQ", STRING, 1, 1 << 32),
    ],
)
def test_a_sparse_file_cannot_claim_more_metadata_than_the_limit(tmp_path: Path, value: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf([pair("k", ARRAY, value)], [], b""))
    os.truncate(path, 1 << 40)
    with pytest.raises(ModelFileError, match=r"k: .*metadata and tensor table must end at 134217728"):
        read_gguf(path)


# --- split models -----------------------------------------------------------------------------------------------------


def part(number: int, count: int, tensors: list[bytes], data: bytes, total: int = 3) -> bytes:
    pairs = [
        pair("split.no", U16, struct.pack("<H", number)),
        pair("split.count", U16, struct.pack("<H", count)),
        pair("split.tensors.count", I32, struct.pack("<i", total)),
    ]
    return gguf([*pairs, *(PAIRS if number == 0 else [])], tensors, data)


def write_parts(directory: Path) -> list[Path]:
    """A model split into three files. The first has no tensors, like some published models."""
    contents = [
        part(0, 3, [], b""),
        part(1, 3, TENSORS, DATA),
        part(2, 3, [tensor("third", [2], F32, 0)], struct.pack("<2f", 1, 2)),
    ]
    paths = [directory / f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths


def test_a_split_model_is_read_from_the_path_of_its_first_file(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    file = read_gguf(paths[0])
    assert file.path == paths[0]
    assert file.metadata["answer"] == 42
    assert set(file.tensors) == {"first", "second", "third"}
    assert file.tensors["third"].to_float32().tolist() == [1, 2]
    assert file.tensors["first"].to_float32().sum() == 28


def test_files_of_different_split_models_are_refused(tmp_path: Path) -> None:
    first, _second, third = write_parts(tmp_path)
    with pytest.raises(ModelFileError, match=r"split.no: .*pass the path of model-00001-of-00003.gguf"):
        read_gguf(third)
    with pytest.raises(ModelFileError, match=r"other.gguf: split.count: .*3 files"):
        read_gguf(first.rename(tmp_path / "other.gguf"))
    (tmp_path / "other.gguf").rename(first)

    good = third.read_bytes()
    for content, message in (
        (part(1, 3, TENSORS, DATA), "split.no: found 1, expected 2"),
        (part(2, 4, TENSORS, DATA), "split.count: found 4, expected 3"),
        (gguf([], TENSORS, DATA), "split.no: found None, expected 2"),
        (part(2, 3, TENSORS, DATA), "first: the tensor is also in model-00002-of-00003.gguf"),
        (part(2, 3, [], b""), "split.tensors.count: the first file names 3 tensors, the 3 files hold 2"),
        (good[:-1], "third: its data ends at"),
    ):
        third.write_bytes(content)
        with pytest.raises(ModelFileError, match=message):
            read_gguf(first)
    third.unlink()
    with pytest.raises(
        ModelFileError, match=r"model-00003-of-00003.gguf: cannot be opened: it does not exist"
    ):
        read_gguf(first)


@pytest.mark.parametrize("key", ["split.no", "split.count", "split.tensors.count"])
def test_split_metadata_that_is_not_a_number_is_refused(tmp_path: Path, key: str) -> None:
    first = write_parts(tmp_path)[0]
    bad = pair(key, ARRAY, struct.pack("<IQ2I", U32, 2, 1, 1))
    others = {"split.no": 0, "split.count": 3, "split.tensors.count": 3}
    pairs = [pair(name, U32, struct.pack("<I", value)) for name, value in others.items() if name != key]
    first.write_bytes(gguf([*pairs, bad], [], b""))
    with pytest.raises(ModelFileError, match=f"{key}: .* is not a whole number"):
        read_gguf(first)
