"""The safetensors reader: correct values from valid files, and a `ModelFileError` from malformed ones."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model_files import GOOD_SAFETENSORS, HEADER, TENSOR_BYTES, entry, safetensors, write_folder
from weft.errors import ModelFileError
from weft.loading.safetensors import INDEX_NAME, read_safetensors, read_sharded_safetensors
from weft.loading.tensor import StoredTensor


def read(directory: Path, content: bytes) -> dict[str, StoredTensor]:
    path = directory / "model.safetensors"
    path.write_bytes(content)
    return read_safetensors(path)


def test_tensors_come_back_as_written(tmp_path: Path) -> None:
    tensors = read(tmp_path, GOOD_SAFETENSORS)
    assert list(tensors) == ["matrix", "half", "brain"]
    assert [tensor.format_name for tensor in tensors.values()] == ["F32", "F16", "BF16"]
    assert tensors["matrix"].to_float32().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensors["half"].to_float32().tolist() == [0, 1, 2, 3]
    assert tensors["brain"].to_float32().tolist() == [[0, 1], [2, 3]]
    assert tensors["brain"].rows(np.array([1, 1])).tolist() == [[2, 3], [2, 3]]
    with pytest.raises(ValueError, match="read-only"):
        tensors["matrix"].raw[0] = 1


def test_files_written_by_the_reference_package_give_its_values(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    written = {
        f"{kind}-{shape}": torch.randn(shape).to(kind)
        for kind in (torch.float32, torch.float16, torch.bfloat16, torch.float64)
        for shape in ((), (3,), (5, 7), (2, 3, 4), (0, 4))
    }
    path = tmp_path / "model.safetensors"
    save_file(written, path, metadata={"format": "pt"})
    ours, theirs = read_safetensors(path), load_file(path)
    assert set(ours) == set(theirs) == set(written)
    for name, expected in theirs.items():
        assert ours[name].shape == tuple(expected.shape)
        np.testing.assert_array_equal(ours[name].to_float32(), expected.float().numpy())
        wide = np.empty(ours[name].shape, np.float64)
        ours[name].read_into(wide)
        np.testing.assert_array_equal(wide, expected.double().numpy())


def test_a_header_may_be_padded_and_hold_no_tensor(tmp_path: Path) -> None:
    padded = json.dumps(HEADER).encode() + b" " * 13
    assert set(read(tmp_path, safetensors(padded, TENSOR_BYTES))) == {"matrix", "half", "brain"}
    assert read(tmp_path, safetensors({}, b"")) == {}


def one(*arguments: Any, data: bytes = bytes(16), **more: Any) -> bytes:
    """A file with one tensor, `w`."""
    return safetensors({"w": {**entry(*arguments), **more}}, data)


TWICE = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'

BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "has 0 bytes, a safetensors header alone needs 8"),
    "header past the end": (safetensors({}, b"", 3), "header length: 3 bytes .* but the file ends at 10"),
    "header absurd": (safetensors({}, b"", 2**63), "header length: 9223372036854775808 bytes, the limit is 16777216"),
    "no json": (safetensors(b"{", b""), "header: cannot be read"),
    "empty header": (safetensors(b"", b""), "header: cannot be read"),
    "not utf-8": (safetensors(b'{"\xff": 1}', b""), "header: cannot be read"),
    "a list": (safetensors([], b""), "header: is a list, expected an object"),
    "nothing": (safetensors(None, b""), "header: is null, expected an object"),
    "too deep": (safetensors(b'{"a":' * 90 + b"1" + b"}" * 90, b""), "header: is nested deeper than 64"),
    "far too deep": (safetensors(b"[" * 200_000, b""), "header: is nested deeper than 64"),
    "a name twice": (safetensors(TWICE, bytes(16)), "the name 'w' appears twice"),
    "huge number": (safetensors(b'{"w": ' + b"9" * 5000 + b"}", b""), "header: cannot be read"),
    "no object": (safetensors({"w": 5}, b""), "w: is not an object with dtype"),
    "no dtype": (safetensors({"w": {"shape": [], "data_offsets": [0, 4]}}, bytes(4)), "w: dtype is None"),
    "other dtype": (one("F8_E4M3", [16], 0, 16), "w: dtype is 'F8_E4M3'; weft reads F32, F16, BF16, F64"),
    "integers": (one("I64", [2], 0, 16), "w: dtype is 'I64'"),
    "dtype no string": (one(["F32"], [4], 0, 16), "w: dtype is"),
    "no shape": (one("F32", None, 0, 16), "w: shape is None"),
    "negative shape": (one("F32", [-2, -2], 0, 16), "w: shape is"),
    "fractional shape": (one("F32", [4.0], 0, 16), "w: shape is"),
    "bool in shape": (one("F32", [True, 4], 0, 16), "w: shape is"),
    "shape beyond 64 bits": (one("F32", [2**63, 0], 0, 0, data=b""), "w: shape is"),
    "too many dimensions": (one("F32", [1] * 9, 0, 4, data=bytes(4)), "w: shape is"),
    "offsets reversed": (one("F32", [4], 16, 0), "w: data_offsets is"),
    "three offsets": (one("F32", [4], 0, 16, data_offsets=[0, 8, 16]), "w: data_offsets is"),
    "no offsets": (one("F32", [4], 0, 16, data_offsets=None), "w: data_offsets is"),
    "negative offset": (one("F32", [4], -16, 0), "w: data_offsets is"),
    "wrong size": (one("F32", [5], 0, 16), r"w: F32 of shape \[5\] takes 20 bytes, data_offsets give it 16"),
    "product beyond 64 bits": (one("F32", [2**40, 2**40], 0, 16), "takes 4835703278458516698824704 bytes"),
    "data past the end": (one("F32", [4], 0, 16, data=bytes(15)), "w: its data ends at byte .* cut short"),
    "overlap": (safetensors({"a": entry("F32", [4], 0, 16), "b": entry("F32", [4], 8, 24)}, bytes(24)), "b: starts at 8, but the data before it ends at 16"),
    "the same bytes twice": (safetensors({"a": entry("F32", [4], 0, 16), "b": entry("F32", [4], 0, 16)}, bytes(16)), "b: starts at 0"),
    "a gap": (safetensors({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)}, bytes(12)), "b: starts at 8, but the data before it ends at 4"),
    "a gap at the start": (one("F32", [2], 8, 16), "w: starts at 8, but the data before it ends at 0"),
    "a gap at the end": (one("F32", [4], 0, 16, data=bytes(20)), "data: the tensors end at byte"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_malformed_file_is_refused_naming_the_file_and_the_field(tmp_path: Path, case: str) -> None:
    content, message = BAD_FILES[case]
    with pytest.raises(ModelFileError, match=message) as caught:
        read(tmp_path, content)
    assert "model.safetensors" in str(caught.value)


def test_a_hostile_tensor_name_is_escaped_and_shortened_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError) as caught:
        read(tmp_path, safetensors({"\x1b[2J\ud800" + "x" * 10_000: 5}, b""))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < len(str(tmp_path)) + 400
    str(caught.value).encode()


# --- sharded files ----------------------------------------------------------------------------------------------------


def single(name: str, *values: float) -> bytes:
    header = {name: entry("F32", [len(values)], 0, 4 * len(values))}
    return safetensors(header, struct.pack(f"<{len(values)}f", *values))


SHARDS = {
    "model-00001-of-00002.safetensors": single("a", 1, 2),
    "model-00002-of-00002.safetensors": single("b", 3),
}
WEIGHT_MAP = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}


def read_index(folder: Path, index: Any) -> dict[str, StoredTensor]:
    write_folder(folder, {INDEX_NAME: index, **SHARDS})
    return read_sharded_safetensors(folder / INDEX_NAME)


def test_a_sharded_model_has_the_tensors_of_all_its_files(tmp_path: Path) -> None:
    tensors = read_index(tmp_path, {"metadata": {"total_size": 12}, "weight_map": WEIGHT_MAP})
    assert {name: tensor.to_float32().tolist() for name, tensor in tensors.items()} == {"a": [1, 2], "b": [3]}


BAD_INDICES: dict[str, tuple[Any, str]] = {
    "no json": (b"{", "JSON: cannot be read"),
    "no map": ({}, "weight_map: missing or empty"),
    "map is a list": ({"weight_map": ["a"]}, "weight_map: missing or empty"),
    "a missing shard": ({"weight_map": {**WEIGHT_MAP, "c": "model-3.safetensors"}}, "model-3.safetensors: .* it does not exist"),
    "a missing tensor": ({"weight_map": {**WEIGHT_MAP, "c": WEIGHT_MAP["a"]}}, "c: the index names model-00001.*, but the tensor is not in it"),
    "a tensor missing in the index": ({"weight_map": {"a": WEIGHT_MAP["a"], "c": WEIGHT_MAP["b"]}}, "b: the tensor is in model-00002.*, the index names no file"),
    "a tensor in another shard": ({"weight_map": {"a": WEIGHT_MAP["b"], "b": WEIGHT_MAP["a"]}}, "b: the tensor is in .* the index names 'model-00001"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_INDICES)
def test_a_malformed_index_is_refused_naming_the_file_and_the_field(tmp_path: Path, case: str) -> None:
    index, message = BAD_INDICES[case]
    with pytest.raises(ModelFileError, match=message) as caught:
        read_index(tmp_path, index)
    assert INDEX_NAME in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/secret.safetensors",
        "sub/model.safetensors",
        "..\\secret.safetensors",
        "..",
        "",
        "model.bin",
        "a\0.safetensors",
        "\ud800.safetensors",
        "x" * 300 + ".safetensors",
        5,
        None,
        ["model.safetensors"],
    ],
)
def test_an_index_can_only_name_safetensors_files_in_its_folder(tmp_path: Path, name: Any) -> None:
    (tmp_path / "secret.safetensors").write_bytes(single("c", 4))
    with pytest.raises(
        ModelFileError, match=r"c: the index names .*, expected the name of a .safetensors file"
    ):
        read_index(tmp_path / "model", {"weight_map": {**WEIGHT_MAP, "c": name}})
