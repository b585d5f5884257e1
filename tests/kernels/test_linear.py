"""Compares linear layers with numpy on every instruction set of this machine, and checks that their bits do not
depend on the batch."""

from collections.abc import Iterator

import numpy as np
import pytest

_kernels = pytest.importorskip("weft._kernels")

W4, W8, F32, F16, BF16 = LAYOUTS = range(5)
SETS = _kernels.available()
BLOCK = 64
"""Inputs of a scale block: they share a scale."""
# Instruction sets with fused multiply-add; the portable kernels round twice.
FUSED_SETS = [name for name in SETS if name != "portable"]


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    before = _kernels.in_use()
    yield
    _kernels.use(before)


def layer(layout: int, outputs: int, inputs: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A packed layer, and its weights as the kernels unpack them."""
    weights = np.random.default_rng(seed).standard_normal((outputs, inputs)).astype(np.float32)
    packed = np.zeros(_kernels.packed_bytes(layout, outputs, inputs), np.uint8)
    _kernels.pack("F32", weights.view(np.uint8).reshape(-1), inputs, layout, 0, outputs, packed)
    return packed, _kernels.unpack_rows(layout, outputs, inputs, packed, np.arange(outputs))


def activations(count: int, inputs: int, seed: int = 1) -> np.ndarray:
    random = np.random.default_rng(seed)
    return (random.standard_normal((count, inputs)) * random.uniform(0.1, 9, (count, 1))).astype(np.float32)


def with_outliers(rows: np.ndarray, share: float = 0.2, size: float = 300, seed: int = 9) -> np.ndarray:
    """The rows with one outlier in some of their groups, which would leave the other values no codes."""
    random = np.random.default_rng(seed)
    rows = rows.copy()
    for first in range(0, rows.shape[1], 32):
        chosen = np.flatnonzero(random.random(len(rows)) < share)
        rows[chosen, random.integers(first, min(first + 32, rows.shape[1]), len(chosen))] *= size
    return rows


def cut(rows: np.ndarray, size: int) -> np.ndarray:
    """[rows, groups or scale blocks, size], padded with zeros."""
    parts = -(-rows.shape[1] // size)
    padded = np.zeros((len(rows), parts * size), rows.dtype)
    padded[:, : rows.shape[1]] = rows
    return padded.reshape(len(rows), parts, size)


def outliers(rows: np.ndarray) -> np.ndarray:
    """True for values above 12 times the mean magnitude of their row."""
    magnitudes = np.abs(rows.astype(np.float64))
    return magnitudes > 12 * magnitudes.mean(axis=1, keepdims=True)


def quantised(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes [rows, inputs padded to groups] and scales [rows, scale blocks], as defined."""
    blocks = cut(rows, BLOCK)
    largest = np.abs(blocks).max(axis=2)
    inverse = np.divide(np.float32(120), largest, out=np.zeros_like(largest), where=largest > 0)
    magnitudes = (
        np.abs(np.rint(blocks * inverse[:, :, None])).reshape(*largest.shape, BLOCK // 32, 32).sum(axis=3)
    )
    times = np.where((magnitudes > 2047).any(axis=2), np.float32(2), np.float32(1))
    codes = np.rint(blocks * (inverse / times)[:, :, None]).astype(np.int8)
    codes = codes.reshape(len(rows), blocks.shape[1] * BLOCK)
    return codes[:, : -(-rows.shape[1] // 32) * 32], largest / np.float32(120) * times


def product(layout: int, weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The product in float64, from codes and outliers if the layer is quantised."""
    values = rows.astype(np.float64)
    if layout in (W4, W8):
        alone = outliers(rows)
        codes, scales = quantised(np.where(alone, 0, rows))
        values = codes * np.repeat(scales.astype(np.float64), BLOCK, axis=1)[:, : codes.shape[1]]
        values = np.where(alone, rows, values[:, : rows.shape[1]])
    return values @ weights.astype(np.float64).T


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("separates_outliers", [False, True])
@pytest.mark.parametrize("inputs", [1, 31, 32, 33, 64, 65, 96, 250, 512, 545, 576, 1100])
def test_activations_become_bytes_as_numpy_rounds_them(
    name: str, inputs: int, separates_outliers: bool
) -> None:
    rows = with_outliers(activations(40, inputs))
    rows[3] = 0
    rows[4:20] = (
        np.where(rows[4:20] < 0, -1, 1) * np.linspace(0.4, 1.6, 16, dtype=np.float32)[:, None]
    )  # nearly equal
    rows[4:20] += activations(16, inputs, seed=3) * np.float32(0.05)
    _kernels.use(name)
    codes, scales, starts, corrections, places, values = _kernels.quantise(rows, separates_outliers)
    alone = outliers(rows) if separates_outliers else np.zeros(rows.shape, bool)
    assert alone.any() == (separates_outliers and inputs > 1)  # a single value is the mean of its row
    np.testing.assert_array_equal(places, np.argwhere(alone))
    np.testing.assert_array_equal(values, rows[alone])
    expected_codes, expected_scales = quantised(np.where(alone, 0, rows))
    sums = cut(expected_codes, 32).sum(axis=2, dtype=np.int32)
    np.testing.assert_array_equal(codes, expected_codes)
    np.testing.assert_array_equal(scales, expected_scales)
    np.testing.assert_array_equal(starts >> 16, sums)
    np.testing.assert_array_equal(starts & 0xFFFF, 2**14 - 8 * sums)
    np.testing.assert_array_equal(corrections, -128 * sums)
    assert np.abs(cut(codes.astype(np.int32), 32)).sum(axis=2).max() in range(
        1800 if inputs > 31 else 0, 2048
    )


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(("others", "is_outlier"), [(8, True), (9, False)])
def test_an_outlier_is_a_value_above_12_times_the_mean_of_its_row(
    name: str, others: int, is_outlier: bool
) -> None:
    # 127 and 63 eights have a mean of 9.9; 127 and 63 nines have a mean of 10.8; 127 / 12 is 10.6.
    rows = np.full((1, 64), others, np.float32)
    rows[0, ::2] *= -1
    rows[0, 47] = 127
    _kernels.use(name)
    assert _kernels.quantise(rows)[4].tolist() == ([[0, 47]] if is_outlier else [])


@pytest.mark.parametrize("name", SETS)
def test_the_most_outliers_that_a_row_can_have_are_all_separated(name: str) -> None:
    rows = np.full((3, 2400), 1e-6, np.float32)
    rows[:, 7 : 7 + 199 * 12 : 12] = 1  # 200 of them would be exactly 12 times the mean
    assert outliers(rows).sum() == 3 * 199
    _kernels.use(name)
    np.testing.assert_array_equal(_kernels.quantise(rows)[4], np.argwhere(outliers(rows)))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("value", [1e-45, 2e-44, 1e-38])
def test_the_smallest_floats_have_no_outliers(name: str, value: float) -> None:
    """The rounded mean is so small that half of the values would exceed the bound, but there is room for a twelfth
    only."""
    rows = np.zeros((3, 4096), np.float32)
    rows[:, :1843] = value
    _kernels.use(name)
    assert _kernels.quantise(rows)[4].tolist() == []


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_with_a_nan_or_infinite_value_has_no_outliers(name: str, value: float) -> None:
    rows = np.full((2, 64), 0.01, np.float32)
    rows[:, 40] = 1
    rows[0, 5] = value
    _kernels.use(name)
    assert _kernels.quantise(rows)[4].tolist() == [[1, 40]]


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("layout", [W4, W8])
def test_rows_with_outliers_are_almost_as_precise_as_in_floats(name: str, layout: int) -> None:
    packed, weights = layer(layout, 100, 576)
    rows = with_outliers(activations(20, 576), share=0.1)
    exact = rows.astype(np.float64) @ weights.astype(np.float64).T
    _kernels.use(name)

    def error(is_separated: bool) -> float:
        result = _kernels.linear(layout, 100, 576, packed, None, rows, with_outliers=is_separated)
        return float(np.sqrt(((result - exact) ** 2).mean()))

    assert error(True) < error(False) / 20


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("layout", [W4, W8])
def test_rows_without_outliers_do_not_depend_on_outlier_separation(name: str, layout: int) -> None:
    packed, _ = layer(layout, 40, 96)
    rows = with_outliers(activations(20, 96), share=0.5)
    plain = ~outliers(rows).any(axis=1)
    assert plain.any() and not plain.all()
    _kernels.use(name)
    separated = _kernels.linear(layout, 40, 96, packed, None, rows)
    unseparated = _kernels.linear(layout, 40, 96, packed, None, rows, with_outliers=False)
    np.testing.assert_array_equal(separated[plain], unseparated[plain])
    assert (separated[~plain] != unseparated[~plain]).any(axis=1).all()


@pytest.mark.parametrize("name", SETS)
def test_ties_round_to_even(name: str) -> None:
    rows = np.zeros((1, 32), np.float32)
    rows[0, :6] = [120, 0.5, 1.5, 2.5, -0.5, -1.5]
    _kernels.use(name)
    assert _kernels.quantise(rows, with_outliers=False)[0][0, :6].tolist() == [120, 0, 2, 2, 0, -2]


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_nan_or_infinite_value_shows_in_its_own_row_only(name: str, value: float, layout: int) -> None:
    packed, _ = layer(layout, 17, 96)
    rows = activations(3, 96)
    _kernels.use(name)
    clean = _kernels.linear(layout, 17, 96, packed, None, rows)
    rows[1, 40] = value
    result = _kernels.linear(layout, 17, 96, packed, None, rows)
    assert not np.isfinite(result[1]).any()
    np.testing.assert_array_equal(result[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-30, 1e30, 3e38])
def test_rows_of_any_finite_size_are_multiplied(name: str, size: float) -> None:
    packed, weights = layer(W4, 16, 32)
    rows = np.full((1, 32), size, np.float32)
    _kernels.use(name)
    result = _kernels.linear(W4, 16, 32, packed, None, rows)[0] / np.float32(size)
    expected = weights.astype(np.float64).sum(axis=1) if size > 1e-30 else 0.0
    if size != 3e38:  # there the sums overflow in the last step
        np.testing.assert_allclose(result, expected, atol=2e-2 if size > 1e-30 else 40)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (16, 32), (17, 33), (40, 100), (96, 576), (5, 1536)])
def test_products_equal_those_of_numpy(name: str, layout: int, outputs: int, inputs: int) -> None:
    packed, weights = layer(layout, outputs, inputs)
    _kernels.use(name)
    for count in (0, 1, 2, 3, 7, 13, 40):
        rows = with_outliers(activations(count, inputs, seed=count))
        result = _kernels.linear(layout, outputs, inputs, packed, None, rows)
        expected = product(layout, weights, rows)
        # Relative to the sum of magnitudes: the rounding error depends on the terms, not on their sum.
        size = np.abs(rows).astype(np.float64) @ np.abs(weights).astype(np.float64).T
        assert result.shape == (count, outputs)
        assert (np.abs(result - expected) <= 4e-6 * size + 1e-6).all()


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("layout", [W4, W8])
def test_the_largest_codes_do_not_overflow(name: str, layout: int) -> None:
    # Blocks in file format with extreme codes, with which 16-bit sums would overflow.
    stored = "Q8_0" if layout == W8 else "Q4_1"
    codes = {W8: [128, 127], W4: [0xFF, 0x0F]}[layout]
    block = np.zeros((32, 3, 34 if layout == W8 else 20), np.uint8)
    block[:, :, :2] = np.array([1.0], np.float16).view(np.uint8)
    block[:16, :, 2 if layout == W8 else 4 :] = codes[0]
    block[16:, :, 2 if layout == W8 else 4 :] = codes[1]
    packed = np.zeros(_kernels.packed_bytes(layout, 32, 96), np.uint8)
    _kernels.pack(stored, block.reshape(-1), 96, layout, 0, 32, packed)
    weights = _kernels.unpack_rows(layout, 32, 96, packed, np.arange(32))
    _kernels.use(name)
    for rows in (np.full((21, 96), value, np.float32) for value in (120, -120)):
        result = _kernels.linear(layout, 32, 96, packed, None, rows)
        np.testing.assert_allclose(result, rows.astype(np.float64) @ weights.T.astype(np.float64), rtol=1e-6)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("others", [1, -1])
def test_sums_of_products_at_their_bound_do_not_overflow(name: str, sign: int, others: int) -> None:
    """17 codes of 120 and one of 7 reach the limit of 2047 for magnitudes; one more and the scale is doubled."""
    rows = np.zeros((21, 64), np.float32)
    rows[:, :17] = rows[:, 40:57] = 120 * sign
    rows[:, 17] = rows[:, 57] = 7 * sign
    rows[10:, 1:17:2] *= others
    rows[3, 18] = 1  # above 2047
    _kernels.use(name)
    codes = _kernels.quantise(rows, with_outliers=False)[0]
    np.testing.assert_array_equal(codes[np.arange(21) != 3], rows[np.arange(21) != 3])
    assert np.abs(codes[3]).max() == 60
    for stored in (0x00, 0xFF, 0x0F, 0xF0):
        block = np.zeros((16, 2, 20), np.uint8)
        block[:, :, :2] = np.array([1.0], np.float16).view(np.uint8)
        block[:, :, 4:] = stored
        packed = np.zeros(_kernels.packed_bytes(W4, 16, 64), np.uint8)
        _kernels.pack("Q4_1", block.reshape(-1), 64, W4, 0, 16, packed)
        weights = _kernels.unpack_rows(W4, 16, 64, packed, np.arange(16)).astype(np.float64)
        for count in (1, 5, 8, 21):
            result = _kernels.linear(W4, 16, 64, packed, None, rows[:count], with_outliers=False)
            expected = rows[:count].astype(np.float64) @ weights.T
            size = np.abs(rows[:count]).astype(np.float64) @ np.abs(weights).T
            assert (
                np.abs(result - expected) <= np.where(np.arange(count) == 3, 0.02, 1e-6)[:, None] * (size + 1)
            ).all()


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_has_the_same_bits_alone_and_in_any_batch_on_any_number_of_threads(
    name: str, layout: int
) -> None:
    outputs, inputs = 200, 160
    packed, _ = layer(layout, outputs, inputs)
    bias = activations(1, outputs, seed=5)[0]
    rows = with_outliers(activations(47, inputs))
    residual = activations(47, outputs, seed=6)
    _kernels.use(name)

    def run(first: int, end: int, threads: int) -> np.ndarray:
        part = (bias, rows[first:end], threads, residual[first:end], 0.3)
        return _kernels.linear(layout, outputs, inputs, packed, *part)

    together = run(0, 47, 1)
    for threads in (1, 2, 3):
        for size in (1, 2, 3, 4, 5, 6, 7, 9, 12, 13, 30):
            for first in range(0, 47 - size, 11):
                np.testing.assert_array_equal(
                    run(first, first + size, threads), together[first : first + size]
                )
    for rows_each in (1, 2, 5, 16, 46):
        pieces = _kernels.linear(
            layout, outputs, inputs, packed, bias, rows, 2, residual, 0.3, rows_each=rows_each
        )
        np.testing.assert_array_equal(pieces, together)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_instruction_sets_agree_bit_by_bit(layout: int) -> None:
    packed, _ = layer(layout, 37, 200)
    rows = with_outliers(activations(15, 200))
    results = []
    for name in FUSED_SETS:
        _kernels.use(name)
        results.append(_kernels.linear(layout, 37, 200, packed, None, rows))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bias_and_residual_are_added_after_the_product(name: str, layout: int) -> None:
    packed, _ = layer(layout, 37, 64)
    rows, bias, residual = activations(5, 64), activations(1, 37, seed=3)[0], activations(5, 37, seed=4)
    _kernels.use(name)
    plain = _kernels.linear(layout, 37, 64, packed, None, rows)
    np.testing.assert_array_equal(_kernels.linear(layout, 37, 64, packed, bias, rows), plain + bias)
    added = _kernels.linear(layout, 37, 64, packed, bias, rows, 1, residual, 0.5)
    np.testing.assert_allclose(added, residual + 0.5 * (plain + bias), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("layout", [W4, W8])
def test_outliers_are_scaled_like_the_rest_of_the_product_and_do_not_change_the_bias(
    name: str, layout: int
) -> None:
    packed, _ = layer(layout, 37, 64)
    rows, bias = with_outliers(activations(5, 64), share=1), activations(1, 37, seed=3)[0]
    residual = activations(5, 37, seed=4)
    assert outliers(rows).any()
    _kernels.use(name)
    plain = _kernels.linear(layout, 37, 64, packed, None, rows)
    size = np.abs(plain).max()
    biased = _kernels.linear(layout, 37, 64, packed, bias, rows)
    np.testing.assert_allclose(biased, plain + bias, rtol=0, atol=1e-6 * size)
    added = _kernels.linear(layout, 37, 64, packed, bias, rows, 1, residual, 0.5)
    np.testing.assert_allclose(added, residual + 0.5 * (plain + bias), rtol=0, atol=1e-6 * size)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_single_rows_of_weights_are_the_same_on_every_instruction_set(name: str, layout: int) -> None:
    packed, weights = layer(layout, 19, 70)
    _kernels.use(name)
    indices = np.array([18, 0, 7, 7])
    np.testing.assert_array_equal(_kernels.unpack_rows(layout, 19, 70, packed, indices), weights[indices])


def test_shapes_that_do_not_fit_are_rejected() -> None:
    packed, _ = layer(W8, 16, 64)
    with pytest.raises(ValueError, match="has 64 inputs, and the rows 32"):
        _kernels.linear(W8, 16, 64, packed, None, activations(1, 32))
    with pytest.raises(ValueError, match="has 1088 bytes, not 1087"):
        _kernels.linear(W8, 16, 64, packed[:-1], None, activations(1, 64))
    with pytest.raises(ValueError, match="one number for each output"):
        _kernels.linear(W8, 16, 64, packed, np.zeros(15, np.float32), activations(1, 64))
    with pytest.raises(ValueError, match="no row 16 among 16"):
        _kernels.unpack_rows(W8, 16, 64, packed, np.array([16]))
