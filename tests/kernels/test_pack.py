"""Packing: unpacked strips equal the values of the numpy decoders, for every file format."""

import threading

import numpy as np
import pytest

from weft.loading.decoding import decode_into
from weft.loading.formats import GGUF_FORMATS, TensorFormat

_kernels = pytest.importorskip("weft._kernels")

W4, W8, F32, F16, BF16 = range(5)
FORMATS = {entry.name: entry for entry in GGUF_FORMATS.values()}
QUANTISED = [name for name in FORMATS if name.startswith("Q")]
KEPT_EXACTLY = ["Q8_0", "F32", "F16", "BF16", "F64"]
CODES_KEPT = ["Q4_0", "Q4_1", "Q4_K"]
# Byte offsets of the f16 scales of each format; Q8_K has one f32.
SCALE_BYTES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip


def stored(name: str, outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    """The bytes of a tensor with random codes and scales of a sensible size."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(outputs * inputs).astype(np.float32)
    if name == "F32":
        return values.view(np.uint8)
    if name == "F64":
        return values.astype(np.float64).view(np.uint8)
    if name == "F16":
        return values.astype(np.float16).view(np.uint8)
    if name == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    shape = (outputs * inputs // FORMATS[name].block_values, FORMATS[name].block_bytes)
    blocks = random.integers(0, 256, shape, dtype=np.uint8)
    scales = random.uniform(0.001, 0.1, (len(blocks), 2))
    for index, at in enumerate(SCALE_BYTES.get(name, [])):
        blocks[:, at : at + 2] = scales[:, index : index + 1].astype(np.float16).view(np.uint8)
    if name == "Q8_K":
        blocks[:, 0:4] = scales[:, :1].astype(np.float32).view(np.uint8)
    return blocks.reshape(-1)


def decoded(tensor_format: TensorFormat, raw: np.ndarray, inputs: int) -> np.ndarray:
    values = raw.size // tensor_format.block_bytes * tensor_format.block_values
    out = np.empty((values // inputs, inputs), np.float32)
    decode_into(raw, tensor_format, out)
    return out


def packed(name: str, raw: np.ndarray, outputs: int, inputs: int, layout: int | None = None) -> np.ndarray:
    layout = _kernels.layout_of(name) if layout is None else layout
    # Filled with ones, so that unwritten bytes show.
    out = np.full(_kernels.packed_bytes(layout, outputs, inputs), 255, np.uint8)
    _kernels.pack(name, raw, inputs, layout, 0, outputs, out)
    return out


def unpacked(layout: int, strips: np.ndarray, outputs: int, inputs: int) -> np.ndarray:
    return _kernels.unpack_rows(layout, outputs, inputs, strips, np.arange(outputs))


@pytest.mark.parametrize("name", KEPT_EXACTLY)
@pytest.mark.parametrize("outputs", [1, 16, 37])
def test_formats_that_fit_a_layout_keep_their_values_exactly(name: str, outputs: int) -> None:
    inputs = 96
    raw = stored(name, outputs, inputs)
    layout = _kernels.layout_of(name)
    result = unpacked(layout, packed(name, raw, outputs, inputs), outputs, inputs)
    np.testing.assert_array_equal(result, decoded(FORMATS[name], raw, inputs))


@pytest.mark.parametrize("name", CODES_KEPT)
@pytest.mark.parametrize("outputs", [1, 16, 37])
def test_4_bit_formats_keep_their_codes_and_weights_within_a_4096th_of_the_largest(
    name: str, outputs: int
) -> None:
    inputs = 512
    raw = stored(name, outputs, inputs)
    result = unpacked(W4, packed(name, raw, outputs, inputs), outputs, inputs)
    expected = decoded(FORMATS[name], raw, inputs)
    # Relative to the largest weight of the output: all its groups share one unit.
    largest = np.abs(expected).max(axis=1, keepdims=True)
    assert (np.abs(result - expected) <= 2**-12 * largest).all()
    # Equal codes of a group are still equal weights.
    for row, group in np.ndindex(outputs, inputs // 32):
        part = slice(group * 32, group * 32 + 32)
        order = np.argsort(expected[row, part], kind="stable")
        steps, kept = np.diff(expected[row, part][order]), np.diff(result[row, part][order])
        np.testing.assert_array_equal(steps == 0, kept == 0)


@pytest.mark.parametrize("name", sorted(set(QUANTISED) - set(KEPT_EXACTLY) - set(CODES_KEPT)))
def test_other_formats_are_rounded_by_at_most_half_a_code(name: str) -> None:
    outputs, inputs = 21, 512
    raw = stored(name, outputs, inputs)
    layout = _kernels.layout_of(name)
    assert layout == W8
    result = unpacked(layout, packed(name, raw, outputs, inputs), outputs, inputs)
    expected = decoded(FORMATS[name], raw, inputs)
    largest = np.abs(expected.reshape(outputs, -1, 32)).max(axis=2)
    error = np.abs(result - expected).reshape(outputs, -1, 32).max(axis=2)
    # Half a code, plus the error of rounding the scale to f16.
    assert (error <= largest * (0.5 / 127 + 2**-11)).all()


@pytest.mark.parametrize("name", ["Q4_0", "Q5_K", "Q8_0", "F32", "BF16"])
def test_any_format_can_be_packed_into_the_float_layouts(name: str) -> None:
    raw = stored(name, 5, 256)
    expected = decoded(FORMATS[name], raw, 256)
    exact = unpacked(F32, packed(name, raw, 5, 256, F32), 5, 256)
    np.testing.assert_array_equal(exact, expected)
    half = unpacked(F16, packed(name, raw, 5, 256, F16), 5, 256)
    np.testing.assert_array_equal(half, expected.astype(np.float16).astype(np.float32))
    brief = unpacked(BF16, packed(name, raw, 5, 256, BF16), 5, 256)
    np.testing.assert_allclose(brief, expected, rtol=2**-8)


@pytest.mark.parametrize("inputs", [32, 70, 576])
def test_floats_become_bytes_within_half_a_code(inputs: int) -> None:
    values = np.random.default_rng(1).standard_normal((19, inputs)).astype(np.float32)
    result = unpacked(W8, packed("F32", values.view(np.uint8).reshape(-1), 19, inputs, W8), 19, inputs)
    for first in range(0, inputs, 32):
        group, expected = result[:, first : first + 32], values[:, first : first + 32]
        largest = np.abs(expected).max(axis=1, keepdims=True)
        assert (np.abs(group - expected) <= largest * (0.5 / 127 + 2**-11)).all()


def test_4_bit_rounding_is_at_least_as_good_as_sixteen_even_steps_over_the_range() -> None:
    values = np.random.default_rng(2).standard_normal((64, 576)).astype(np.float32)
    result = unpacked(W4, packed("F32", values.view(np.uint8).reshape(-1), 64, 576, W4), 64, 576)
    groups = values.reshape(64, -1, 32)
    low, high = groups.min(axis=2, keepdims=True), groups.max(axis=2, keepdims=True)
    steps = (high - low) / 15
    plain = np.round((groups - low) / steps) * steps + low
    error = np.square(result.reshape(groups.shape) - groups).sum(axis=2)
    plain_error = np.square(plain - groups).sum(axis=2)
    assert (error <= plain_error * 1.02).all()  # never worse by more than the rounding of scale and minimum
    assert error.sum() < 0.9 * plain_error.sum()


@pytest.mark.parametrize("layout", [W4, W8])
def test_constant_tiny_and_zero_groups_are_kept(layout: int) -> None:
    values = np.zeros((4, 96), np.float32)
    values[0, :32] = 0.75
    values[1, 32:64] = -3.5
    values[2, 40] = 1e-30
    values[3] = np.linspace(-1e-5, 1e-5, 96)
    result = unpacked(layout, packed("F32", values.view(np.uint8).reshape(-1), 4, 96, layout), 4, 96)
    np.testing.assert_allclose(result[:3], values[:3], rtol=2**-10, atol=1e-7)
    np.testing.assert_allclose(result[3], values[3], atol=1e-6)


@pytest.mark.parametrize("layout", [W4, W8])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_a_value_that_no_code_can_hold_becomes_nan_and_affects_only_its_own_output(
    layout: int, value: float
) -> None:
    values = np.ones((3, 64), np.float32)
    values[1, 40] = value
    result = unpacked(layout, packed("F32", values.view(np.uint8).reshape(-1), 3, 64, layout), 3, 64)
    assert np.isnan(result[1, 32:]).all()
    np.testing.assert_allclose(result[[0, 2]], values[[0, 2]], rtol=2**-10)
    if layout == W8:  # where each group has its own scale
        np.testing.assert_allclose(result[1, :32], values[1, :32], rtol=2**-10)


@pytest.mark.parametrize("name", QUANTISED)
def test_any_bytes_can_be_packed(name: str) -> None:
    tensor_format = FORMATS[name]
    size = 16 * 512 // tensor_format.block_values * tensor_format.block_bytes
    raw = np.random.default_rng(3).integers(0, 256, size, dtype=np.uint8)
    for layout in (W4, W8, F32, F16, BF16):
        packed(name, raw, 16, 512, layout)


@pytest.mark.parametrize("layout", [W4, W8, F32, F16, BF16])
def test_tensors_stacked_at_any_output_equal_the_layer_packed_at_once(layout: int) -> None:
    inputs, sizes = 64, (9, 3, 20, 1, 8)
    raw = stored("Q8_0", sum(sizes), inputs)
    whole = packed("Q8_0", raw, sum(sizes), inputs, layout)
    stacked = np.full_like(whole, 255)
    row_bytes, threads, first = FORMATS["Q8_0"].bytes_of(inputs), [], 0
    for size in sizes:
        part = raw[first * row_bytes : (first + size) * row_bytes]
        arguments = ("Q8_0", part, inputs, layout, first, sum(sizes), stacked)
        threads.append(threading.Thread(target=_kernels.pack, args=arguments))
        first += size
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(stacked, whole)
    # The lanes after the last output hold zeros.
    beyond = _kernels.unpack_rows(layout, 48, inputs, whole, np.arange(sum(sizes), 48))
    np.testing.assert_array_equal(beyond, np.zeros_like(beyond))


def test_sizes_that_do_not_fit_are_rejected_with_the_numbers() -> None:
    out = np.zeros(_kernels.packed_bytes(W8, 4, 64), np.uint8)
    raw = stored("Q8_0", 4, 64)
    with pytest.raises(ValueError, match="no tensors in the format IQ4_NL"):
        _kernels.pack("IQ4_NL", raw, 64, W8, 0, 4, out)
    with pytest.raises(ValueError, match=r"rows of 40 values .* which hold 32"):
        _kernels.pack("Q8_0", raw, 40, W8, 0, 4, out)
    with pytest.raises(ValueError, match="271 bytes are not a whole number of rows of 68"):
        _kernels.pack("Q8_0", raw[:-1], 64, W8, 0, 4, out)
    with pytest.raises(ValueError, match="4 rows from output 1 on do not fit 4 outputs"):
        _kernels.pack("Q8_0", raw, 64, W8, 1, 4, out)
    with pytest.raises(ValueError, match="takes 1088 bytes, and `out` has 1087"):
        _kernels.pack("Q8_0", raw, 64, W8, 0, 4, out[:-1])
    with pytest.raises(ValueError, match="no layout 5"):
        _kernels.pack("Q8_0", raw, 64, 5, 0, 4, out)
