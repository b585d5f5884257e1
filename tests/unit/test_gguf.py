"""The GGUF reader: right numbers from good files, and one kind of error from bad ones."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.errors import ModelFileError
from weft.loading.gguf import GgufFile, read_gguf

U32, FLOAT, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9
F32, F16, Q4_0, Q4_1, Q8_0 = 0, 1, 2, 3, 8


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


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
    head = (
        b"GGUF" + struct.pack("<IQQ", version, tensor_count, pair_count) + b"".join(pairs) + b"".join(tensors)
    )
    return head + b"\0" * (-len(head) % 32) + data


PAIRS = [
    pair("general.architecture", STRING, string("llama")),
    pair("answer", U32, struct.pack("<I", 42)),
    pair("ratio", FLOAT, struct.pack("<f", 0.5)),
    pair("yes", BOOL, b"\x01"),
    pair("words", ARRAY, struct.pack("<IQ", STRING, 3) + string("a") + string("") + string("é")),
    pair("numbers", ARRAY, struct.pack("<IQ3I", U32, 3, 7, 8, 9)),
]
TENSORS = [tensor("first", [4, 2], F32, 0), tensor("second", [32], Q8_0, 32)]
DATA = np.arange(8, dtype="<f4").tobytes() + struct.pack("<e", 0.5) + bytes(range(32)) + b"\0" * 30
GOOD = gguf(PAIRS, TENSORS, DATA)


def read(directory: Path, content: bytes) -> GgufFile:
    path = directory / "model.gguf"
    path.write_bytes(content)
    return read_gguf(path)


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors_come_back_as_written(tmp_path: Path, version: int) -> None:
    file = read(tmp_path, gguf(PAIRS, TENSORS, DATA, version))
    assert file.version == version
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


@pytest.mark.parametrize("kind", [F32, F16, Q4_0, Q4_1, Q8_0])
def test_every_format_dequantises_as_the_reference_package_does(tmp_path: Path, kind: int) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    values = np.random.default_rng(kind).normal(size=(5, 96)).astype(np.float32)
    raw = quantize(values, GGMLQuantizationType(kind))
    file = read(tmp_path, gguf([], [tensor("weight", [96, 5], kind, 0)], raw.tobytes()))
    expected = dequantize(raw, GGMLQuantizationType(kind))
    np.testing.assert_array_equal(file.tensors["weight"].to_float32(), expected)


def test_the_default_model_dequantises_as_the_reference_package_does(default_model_file: GgufFile) -> None:
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


def test_a_tensor_cannot_be_written_through(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="read-only"):
        read(tmp_path, GOOD).tensors["first"].raw[0] = 1


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
    "other format": (gguf([], [tensor("w", [256], 12, 0)], DATA), r"type 12 \(Q4_K\); weft reads F32, F16, Q4_0, Q4_1, Q8_0"),
    "ragged blocks": (gguf([], [tensor("w", [33], Q8_0, 0)], DATA), "rows of 33 values"),
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


def read_everything(directory: Path, content: bytes) -> None:
    """Reads all there is, and fails on any error but ours or on memory out of proportion to the file."""
    tracemalloc.start()
    try:
        file = read(directory, content)
        for entry in file.tensors.values():
            entry.to_float32()
    except ModelFileError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 400_000 + 40 * len(content)


@pytest.fixture(scope="module")
def fuzz_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


FUZZ: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


def test_a_file_cut_anywhere_never_raises_another_error(fuzz_directory: Path) -> None:
    for length in range(len(GOOD)):
        read_everything(fuzz_directory, GOOD[:length])


@settings(max_examples=400, **FUZZ)
@given(
    changes=st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=8)
)
def test_changed_bytes_never_raise_another_error(
    fuzz_directory: Path, changes: list[tuple[int, int]]
) -> None:
    content = bytearray(GOOD)
    for position, value in changes:
        content[position] = value
    read_everything(fuzz_directory, bytes(content))


@settings(max_examples=400, **FUZZ)
@given(
    position=st.integers(0, len(GOOD) - 8),
    number=st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
    | st.integers(0, 2**64 - 1),
)
def test_absurd_numbers_anywhere_never_raise_another_error(
    fuzz_directory: Path, position: int, number: int
) -> None:
    content = GOOD[:position] + struct.pack("<Q", number) + GOOD[position + 8 :]
    read_everything(fuzz_directory, content)


@settings(max_examples=200, **FUZZ)
@given(rest=st.binary(max_size=300))
def test_noise_after_a_good_header_never_raises_another_error(fuzz_directory: Path, rest: bytes) -> None:
    read_everything(fuzz_directory, b"GGUF" + struct.pack("<I", 3) + rest)
