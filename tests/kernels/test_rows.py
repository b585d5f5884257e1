"""Compares norms, gates and RoPE of the C++ kernels with numpy, on every instruction set of this machine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

_kernels = pytest.importorskip("weft._kernels")
pytestmark = pytest.mark.usefixtures("instruction_set")

# One lane, partial and whole vectors of 4, 8 and 16 lanes, and more than the four parallel sums of a norm.
COLUMNS = [1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 130, 576, 1000]
SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e38, -1e38, 1e-40, -1e-40, 88.7, -88.7, 1000, -1000], np.float32
)


# All instruction sets except portable have fused multiply-add, and compute sums in the same order.
FUSED = [name for name in _kernels.available() if name != "portable"]


def rows_of(count: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, count, columns]).standard_normal((count, columns)).astype(np.float32)


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.int32)


def silu(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return x / (1.0 + np.exp(-x))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        # 0.5 x (1 + tanh(t)) without cancellation near tanh = -1
        return x / (1.0 + np.exp(-2.0 * np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


GATES: dict[str, tuple[Callable[..., None], Callable[[np.ndarray], np.ndarray]]] = {
    "silu": (_kernels.silu_mul, silu),
    "gelu": (_kernels.gelu_tanh_mul, gelu_tanh),
}


@pytest.mark.parametrize("columns", COLUMNS)
def test_a_norm_divides_by_the_root_of_the_mean_square(columns: int) -> None:
    rows, weight = 3.0 * rows_of(3, columns), rows_of(1, columns, seed=1)[0]
    out = np.empty_like(rows)
    _kernels.rms_norm(rows, weight, 1e-5, out)
    exact = rows.astype(np.float64)
    expected = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_the_epsilon_of_a_norm_keeps_a_row_of_zeros_at_zero() -> None:
    rows = np.zeros((1, 20), np.float32)
    _kernels.rms_norm(rows, np.ones(20, np.float32), 1e-5, rows)
    assert (rows == 0).all()


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_a_gate_multiplies_its_second_operand(gate: str, columns: int) -> None:
    kernel, twin = GATES[gate]
    left, right = 4.0 * rows_of(2, columns), rows_of(2, columns, seed=1)
    out = np.empty_like(left)
    kernel(left, right, out)
    np.testing.assert_allclose(out, twin(left) * right, rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize("gate", GATES)
def test_a_gate_is_correct_for_extreme_inputs(gate: str) -> None:
    kernel, twin = GATES[gate]
    left = np.concatenate([SPECIAL, np.linspace(-110, 110, 4001, dtype=np.float32)])[None]
    out = np.empty_like(left)
    kernel(left, np.ones_like(left), out)
    np.testing.assert_allclose(out, twin(left).astype(np.float32), rtol=1e-5, atol=1e-36)
    assert out[0, -4001] == 0.0 and np.signbit(out[0, 12])  # gates of -110 and -1000 are 0


def test_the_exponential_is_correct_to_two_ulp() -> None:
    # Far below 0, silu is x / e^-x: its error is that of the exponential plus one rounding.
    left = -np.linspace(20, 80, 20001, dtype=np.float32)[None]
    out = np.empty_like(left)
    _kernels.silu_mul(left, np.ones_like(left), out)
    assert np.abs(out / silu(left) - 1.0).max() < 3 * 2.0**-23


def test_add_scaled_adds_the_scaled_rows() -> None:
    for columns in COLUMNS:
        left, right = rows_of(2, columns), rows_of(2, columns, seed=1)
        out = np.empty_like(left)
        _kernels.add_scaled(left, right, 0.22, out)
        np.testing.assert_allclose(out, left + 0.22 * right.astype(np.float64), rtol=1e-6, atol=1e-7)
        _kernels.add_scaled(left, right, 1.0, left)
        np.testing.assert_allclose(left, out + 0.78 * right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cap", [0.0, 30.0, 0.5])
def test_logits_are_scaled_and_then_capped(cap: float) -> None:
    for columns in COLUMNS:
        rows = np.concatenate([1e-3 * rows_of(1, columns), 50.0 * rows_of(1, columns, seed=1)])
        expected = rows.astype(np.float64) * 0.7
        if cap:
            expected = cap * np.tanh(expected / cap)
        _kernels.scale_and_cap(rows, 0.7, cap)
        np.testing.assert_allclose(rows, expected, rtol=1e-6)


def test_a_cap_bounds_infinite_values_and_keeps_nan() -> None:
    rows = SPECIAL[None].copy()
    _kernels.scale_and_cap(rows, 1.0, 30.0)
    np.testing.assert_allclose(rows[0], 30.0 * np.tanh(SPECIAL / np.float32(30.0)), rtol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "head_size, pairs", [(64, 32), (128, 64), (80, 16), (64, 5), (7, 3), (2, 1), (13, 0), (96, 33)]
)
def test_rope_rotates_each_pair_by_its_angle(interleaved: bool, head_size: int, pairs: int) -> None:
    heads = rows_of(3, head_size)
    angles = np.linspace(0.1, 3.0, pairs, dtype=np.float32)
    cosine, sine = np.cos(angles), np.sin(angles)
    expected = heads.astype(np.float64)
    first, second = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
        if interleaved
        else (slice(0, pairs), slice(pairs, 2 * pairs))
    )
    expected[:, first] = heads[:, first] * cosine - heads[:, second] * sine
    expected[:, second] = heads[:, second] * cosine + heads[:, first] * sine
    out = np.empty_like(heads)
    _kernels.rotate(heads, cosine, sine, interleaved, out)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    _kernels.rotate(heads, cosine, sine, interleaved, heads)
    np.testing.assert_array_equal(bits(heads), bits(out))


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("experts, per_token", [(1, 1), (4, 2), (8, 8), (60, 4), (128, 8)])
def test_a_token_goes_to_the_experts_with_the_largest_shares(
    experts: int, per_token: int, normalise: bool
) -> None:
    logits = 3.0 * rows_of(20, experts)
    exact = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    exact /= exact.sum(axis=1, keepdims=True)
    expected = np.argsort(-logits, axis=1, kind="stable")[:, :per_token]
    weights = np.take_along_axis(exact, expected, axis=1)
    if normalise:
        weights /= weights.sum(axis=1, keepdims=True)
    chosen, shares = np.empty((20, per_token), np.int32), np.empty((20, per_token), np.float32)
    _kernels.route(logits, normalise, chosen, shares)
    np.testing.assert_array_equal(chosen, expected)
    np.testing.assert_allclose(shares, weights, rtol=2e-6)


def test_at_a_tie_the_first_expert_is_chosen_and_nan_logits_still_choose_experts() -> None:
    logits = np.array([[1, 3, 3, 0], [np.nan, np.nan, np.nan, np.nan]], np.float32)
    chosen, shares = np.empty((2, 3), np.int32), np.empty((2, 3), np.float32)
    _kernels.route(logits, True, chosen, shares)
    assert chosen[0].tolist() == [1, 2, 0] and sorted(set(chosen[1].tolist())) == sorted(chosen[1].tolist())
    assert np.isnan(shares[1]).all() and not np.isnan(shares[0]).any()


def test_a_row_has_the_same_bits_at_any_position_and_in_any_batch() -> None:
    # Three extra columns in front move the elements to other lanes and tails.
    for columns in COLUMNS:
        gate, up = rows_of(5, columns), rows_of(5, columns, seed=1)
        for kernel in (_kernels.silu_mul, _kernels.gelu_tanh_mul):
            out, alone, moved = (
                np.empty_like(gate),
                np.empty_like(gate),
                np.empty((5, columns + 3), np.float32),
            )
            kernel(gate, up, out)
            for row in range(5):
                kernel(gate[row : row + 1], up[row : row + 1], alone[row : row + 1])
            kernel(np.pad(gate, ((0, 0), (3, 0))), np.pad(up, ((0, 0), (3, 0))), moved)
            np.testing.assert_array_equal(bits(out), bits(alone))
            np.testing.assert_array_equal(bits(out), bits(moved[:, 3:].copy()))
        weight, normed = up[0].copy(), np.empty_like(gate)
        _kernels.rms_norm(gate, weight, 1e-6, normed)
        for row in range(5):
            _kernels.rms_norm(gate[row : row + 1], weight, 1e-6, alone[row : row + 1])
        np.testing.assert_array_equal(bits(normed), bits(alone))


@pytest.mark.parametrize("instruction_set", FUSED[1:], indirect=True)
def test_a_row_has_the_same_bits_on_every_instruction_set_with_fused_multiply_add() -> None:
    def results() -> list[np.ndarray]:
        made = []
        for columns in (*COLUMNS, 40, 56, 72, 88, 960, 1009):
            left, right = 5.0 * rows_of(8, columns), rows_of(8, columns, seed=1)
            for kernel in (_kernels.silu_mul, _kernels.gelu_tanh_mul):
                kernel(left, right, out := np.empty_like(left))
                made.append(out)
            _kernels.rms_norm(left, right[0].copy(), 1e-5, out := np.empty_like(left))
            made.append(out)
            _kernels.add_scaled(left, right, 0.3, out := np.empty_like(left))
            made.append(out)
            for cap in (0.0, 3.0):
                _kernels.scale_and_cap(out := left.copy(), 0.7, cap)
                made.append(out)
            angles = np.linspace(0.1, 3.0, columns // 2, dtype=np.float32)
            for interleaved in (False, True):
                rotated = np.empty_like(left)
                _kernels.rotate(left, np.cos(angles), np.sin(angles), interleaved, rotated)
                made.append(rotated)
            per_token = min(columns, 4)
            chosen, shares = np.empty((8, per_token), np.int32), np.empty((8, per_token), np.float32)
            _kernels.route(left, True, chosen, shares)
            made += [chosen, shares]
        # The whole range of exp and tanh, including subnormal results.
        wide = np.concatenate([SPECIAL[~np.isnan(SPECIAL)], np.linspace(-110, 110, 20001, dtype=np.float32)])
        for kernel in (_kernels.silu_mul, _kernels.gelu_tanh_mul):
            kernel(wide[None], np.ones_like(wide[None]), out := np.empty_like(wide[None]))
            made.append(out)
        _kernels.scale_and_cap(out := wide[None].copy(), 0.05, 1.0)
        return [*made, out]

    ours = results()
    _kernels.use(FUSED[0])
    for left, right in zip(ours, results(), strict=True):
        np.testing.assert_array_equal(bits(left), bits(right))


def test_a_nan_stays_in_its_own_element_or_row() -> None:
    gate, up = rows_of(2, 21), rows_of(2, 21, seed=1)
    gate[0, 20] = np.nan
    out = np.empty_like(gate)
    _kernels.silu_mul(gate, up, out)
    assert np.isnan(out).nonzero()[0].tolist() == [0] and np.isnan(out[0, 20])
    _kernels.rms_norm(gate, up[0].copy(), 1e-6, out)
    assert np.isnan(out[0]).all() and not np.isnan(out[1]).any()


def test_arrays_of_different_sizes_are_rejected() -> None:
    rows = np.zeros((2, 8), np.float32)
    with pytest.raises(ValueError, match="the weight must have 8 elements; it has 7"):
        _kernels.rms_norm(rows, np.zeros(7, np.float32), 1e-5, rows)
    with pytest.raises(ValueError, match=r"\[2, 8\]; it has \[1, 8\]"):
        _kernels.silu_mul(rows, rows[:1], rows)
    with pytest.raises(ValueError, match="5 pairs do not fit into a head of 8"):
        _kernels.rotate(rows, np.zeros(5, np.float32), np.zeros(5, np.float32), True, rows)
