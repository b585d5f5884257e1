"""The tensor formats: decoding gives the bits of the reference package, for arrays of any stride and width."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from model_files import gguf, tensor
from weft.loading import decoding, formats
from weft.loading.decoding import decode_into
from weft.loading.formats import GGUF_FORMATS, TensorFormat
from weft.loading.gguf import read_gguf
from weft.loading.tensor import StoredTensor

NAMES = {entry.name: kind for kind, entry in GGUF_FORMATS.items()}

# Offsets of the float16 scales in a block. All other bytes of a block may have any value.
SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


def random_blocks(tensor_format: TensorFormat, count: int, seed: int) -> np.ndarray:
    """Blocks of random bytes, with finite scales of many magnitudes and both signs."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (count, tensor_format.block_bytes), np.uint8)
    for column in SCALES.get(tensor_format.name, ()):
        scales = random.normal(size=(count, 1)) * 10.0 ** random.integers(-6, 4, (count, 1))
        blocks[:, column : column + 2] = scales.astype("<f2").view(np.uint8)
    return blocks


def decoded(raw: np.ndarray, tensor_format: TensorFormat, shape: tuple[int, ...]) -> np.ndarray:
    out = np.full(shape, np.nan, np.float32)
    decode_into(raw.reshape(-1), tensor_format, out)
    return out


def assert_same_bits(ours: np.ndarray, expected: np.ndarray) -> None:
    assert ours.dtype == expected.dtype == np.float32
    np.testing.assert_array_equal(ours.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", SCALES)
def test_any_block_decodes_as_in_the_reference_package(name: str) -> None:
    tensor_format = GGUF_FORMATS[NAMES[name]]
    blocks = random_blocks(tensor_format, 600, NAMES[name])
    expected = dequantize(blocks, GGMLQuantizationType[name])
    assert_same_bits(decoded(blocks, tensor_format, expected.shape), expected)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_values_quantised_by_the_reference_package_decode_as_they_do_there(name: str) -> None:
    values = np.random.default_rng(1).normal(size=(7, 96)).astype(np.float32)
    raw = quantize(values, GGMLQuantizationType[name])
    expected = dequantize(raw, GGMLQuantizationType[name])
    # For F32, the package returns its argument; for the other formats, a new array.
    raw = np.ascontiguousarray(raw).view(np.uint8)
    assert_same_bits(decoded(raw, GGUF_FORMATS[NAMES[name]], values.shape), expected)
    assert np.abs(expected - values).max() < 0.3


def test_every_bfloat16_becomes_the_float32_with_the_same_upper_bits() -> None:
    torch = pytest.importorskip("torch")
    every = np.arange(1 << 16, dtype="<u2")
    expected = torch.from_numpy(every.view(np.int16)).view(torch.bfloat16).float().numpy()
    ours = decoded(every.view(np.uint8), GGUF_FORMATS[NAMES["BF16"]], every.shape)
    is_nan = np.isnan(expected)
    assert_same_bits(ours[~is_nan], expected[~is_nan])
    assert np.isnan(ours[is_nan]).all()


def test_q8_k_is_a_float_times_signed_bytes() -> None:
    # The reference package has no decoder for Q8_K, so the test computes each value from the definition.
    random = np.random.default_rng(15)
    scales = random.normal(size=5).astype("<f4")
    codes = random.integers(-128, 128, (5, 256)).astype(np.int8)
    sums = random.integers(0, 256, (5, 32), np.uint8)
    blocks = np.concatenate([scales[:, None].view(np.uint8), codes.view(np.uint8), sums], axis=1)
    expected = [[scale * np.float32(code) for code in row] for scale, row in zip(scales, codes, strict=True)]
    assert_same_bits(decoded(blocks, GGUF_FORMATS[NAMES["Q8_K"]], (5, 256)), np.array(expected, np.float32))


def test_float64_keeps_its_precision_in_a_float64_array() -> None:
    values = np.random.default_rng(28).normal(size=(3, 5))
    wide, narrow = np.empty((3, 5)), np.empty((3, 5), np.float32)
    for out in (wide, narrow):
        decode_into(values.astype("<f8").view(np.uint8).reshape(-1), GGUF_FORMATS[NAMES["F64"]], out)
    np.testing.assert_array_equal(wide, values)
    np.testing.assert_array_equal(narrow, values.astype(np.float32))


def test_block_sizes_are_those_of_the_reference_package() -> None:
    from gguf.constants import GGML_QUANT_SIZES

    ours = {kind: (entry.block_values, entry.block_bytes) for kind, entry in GGUF_FORMATS.items()}
    assert ours == {kind: GGML_QUANT_SIZES[GGMLQuantizationType(kind)] for kind in GGUF_FORMATS}
    assert {GGMLQuantizationType(kind).name for kind in GGUF_FORMATS} == set(NAMES)
    for kind, name in formats.OTHER_GGUF_FORMATS.items():
        assert GGMLQuantizationType(kind).name == name


SHAPES = [(512,), (6, 256), (3, 2, 256), (2, 2, 2, 512), (1, 4096)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["F32", "BF16", "Q8_0", "Q4_K"])
def test_decoding_in_pieces_gives_the_values_of_decoding_at_once(
    monkeypatch: pytest.MonkeyPatch, name: str, shape: tuple[int, ...]
) -> None:
    tensor_format = GGUF_FORMATS[NAMES[name]]
    count = int(np.prod(shape))
    raw = random_blocks(tensor_format, count // tensor_format.block_values, 3).reshape(-1)
    whole = decoded(raw, tensor_format, shape)
    monkeypatch.setattr(decoding, "_VALUES_PER_PIECE", 512)
    assert_same_bits(decoded(raw, tensor_format, shape), whole)

    done: list[tuple[int, int]] = []
    decode_into(raw, tensor_format, np.empty(shape, np.float32), lambda *piece: done.append(piece))
    assert done[0][0] == 0 and done[-1][1] == len(raw)
    assert all(left[1] == right[0] for left, right in itertools.pairwise(done))
    assert len(done) >= count // 512


def test_values_are_decoded_into_arrays_of_any_stride_and_width(tmp_path: Path) -> None:
    tensor_format = GGUF_FORMATS[NAMES["Q8_0"]]
    raw = random_blocks(tensor_format, 12, 5)
    weight = stored(tmp_path, raw, [64, 6], "Q8_0")
    expected = weight.to_float32()
    stacked = np.zeros((10, 64), np.float32)
    weight.read_into(stacked[2:8])
    np.testing.assert_array_equal(stacked[2:8], expected)
    assert not stacked[:2].any() and not stacked[8:].any()
    transposed, wide = np.zeros((64, 6), np.float32), np.zeros((6, 64), np.float64)
    weight.read_into(transposed.T)
    weight.read_into(wide)
    np.testing.assert_array_equal(transposed.T, expected)
    np.testing.assert_array_equal(wide, expected.astype(np.float64))
    with pytest.raises(ValueError, match="has the shape"):
        weight.read_into(np.zeros((64, 6), np.float32))


@pytest.mark.parametrize("name", ["F32", "F16", "Q4_1", "Q6_K"])
def test_decoded_rows_equal_the_rows_of_the_decoded_matrix(tmp_path: Path, name: str) -> None:
    tensor_format = GGUF_FORMATS[NAMES[name]]
    raw = random_blocks(tensor_format, 9 * 512 // tensor_format.block_values, 6)
    weight = stored(tmp_path, raw, [512, 9], name)
    indices = np.array([3, 0, 8, 3])
    assert_same_bits(weight.rows(indices), weight.to_float32()[indices])
    assert weight.rows(np.array([], np.int64)).shape == (0, 512)


def test_an_infinite_scale_causes_no_numpy_warning() -> None:
    tensor_format = GGUF_FORMATS[NAMES["Q4_K"]]
    blocks = np.zeros((1, tensor_format.block_bytes), np.uint8)
    blocks[0, 0:2] = np.array([np.inf], "<f2").view(np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isnan(decoded(blocks, tensor_format, (1, 256))).all()


def stored(directory: Path, raw: np.ndarray, dimensions: list[int], name: str) -> StoredTensor:
    path = directory / "model.gguf"
    path.write_bytes(gguf([], [tensor("weight", dimensions, NAMES[name], 0)], raw.tobytes()))
    return read_gguf(path).tensors["weight"]
