"""Compares attention over whole texts, layer norms and activations of the C++ kernels with numpy, on every instruction
set of this machine."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from array_source import ArraySource
from weft.ops.base import AttentionPattern, AttentionShape, Rope
from weft.ops.reference_texts import ReferenceTextOps
from weft.ops.texts import TextIndices

_kernels = pytest.importorskip("weft._kernels")

pytestmark = pytest.mark.usefixtures("instruction_set")

NO_ROPE = Rope((), False)


def rows_of(count: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, count, columns]).standard_normal((count, columns)).astype(np.float32)


def twin(rows: np.ndarray, shape: AttentionShape, pattern: AttentionPattern) -> np.ndarray:
    """The attention of one text in float64."""
    ops, count = ReferenceTextOps(np.float64), len(rows)
    step = TextIndices(np.zeros(count, int), np.arange(count), np.zeros(count, int), np.array([0, count]))
    return ops.self_attention(ops.prepare_texts(step, shape, [pattern]), rows.astype(np.float64), 0)


def attend(
    rows: np.ndarray,
    shape: AttentionShape,
    pattern: AttentionPattern,
    parts: tuple[int, ...] = (),
) -> np.ndarray:
    out = np.full((len(rows), shape.heads * shape.head_size), np.nan, np.float32)
    limits = (0, *parts, len(rows))
    for first, end in itertools.pairwise(limits):
        _kernels.attend_text(
            rows, shape.heads, shape.kv_heads, pattern.window or 0, pattern.causal, shape.scale,
            shape.score_cap or 0.0, first, end, out,
        )  # fmt: skip
    return out


SHAPES = {
    "MiniLM": AttentionShape(12, 12, 32, 32**-0.5),
    "grouped, odd size": AttentionShape(6, 2, 24, 0.3),
    "one feature, capped": AttentionShape(2, 1, 1, 1.5, 2.0),
    "wide": AttentionShape(3, 1, 256, 256**-0.5),
}
PATTERNS = {
    "all": AttentionPattern(NO_ROPE, causal=False),
    "causal": AttentionPattern(NO_ROPE),
    "window": AttentionPattern(NO_ROPE, 9, causal=False),
    "causal window": AttentionPattern(NO_ROPE, 21),
}


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 49, 130])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_token_attends_to_the_tokens_of_its_text(shape: str, pattern: str, tokens: int) -> None:
    sizes = SHAPES[shape]
    rows = rows_of(tokens, (sizes.heads + 2 * sizes.kv_heads) * sizes.head_size) * 2
    found = attend(rows, sizes, PATTERNS[pattern])
    assert np.abs(found - twin(rows, sizes, PATTERNS[pattern])).max() < 3e-5


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_text_that_is_divided_among_threads_has_the_same_bits(pattern: str) -> None:
    shape = SHAPES["grouped, odd size"]
    rows = rows_of(200, 240)
    whole = attend(rows, shape, PATTERNS[pattern])
    assert attend(rows, shape, PATTERNS[pattern], (1, 60, 96, 192)).tobytes() == whole.tobytes()


def test_scores_may_be_large_in_both_directions() -> None:
    shape = SHAPES["MiniLM"]
    rows = rows_of(40, 36 * 32) * 300
    assert np.abs(attend(rows, shape, PATTERNS["all"]) - twin(rows, shape, PATTERNS["all"])).max() < 0.2


@pytest.mark.parametrize("columns", [1, 7, 16, 100, 384, 1000])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_layer_norm_subtracts_the_mean_and_divides_by_the_deviation(columns: int, has_bias: bool) -> None:
    rows, weight, bias = rows_of(3, columns) + 5, rows_of(1, columns, 1)[0], rows_of(1, columns, 2)[0]
    out = np.empty_like(rows)
    _kernels.layer_norm(rows, weight, bias if has_bias else None, 1e-5, out)
    ops = ReferenceTextOps(np.float64)
    expected = ops.layer_norm(rows.astype(np.float64), weight, bias if has_bias else None, 1e-5)
    assert np.abs(out - expected).max() < 1e-4


def gelu(x: np.ndarray) -> np.ndarray:
    return np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x.ravel().tolist()]).reshape(x.shape)


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("columns", [1, 5, 64, 1537])
@pytest.mark.parametrize("name, correct", [("gelu", gelu), ("gelu_tanh", gelu_tanh), ("tanh", np.tanh)])
def test_an_activation_is_correct(name: str, correct: object, columns: int) -> None:
    rows = rows_of(2, columns) * 4
    out = np.empty_like(rows)
    getattr(_kernels, name)(rows, out)
    assert np.abs(out - correct(rows.astype(np.float64))).max() < 2e-6  # type: ignore[operator]


def test_the_activation_of_a_gate_multiplies_its_second_operand() -> None:
    gate, up = rows_of(3, 70), rows_of(3, 70, 1)
    out = np.empty_like(gate)
    _kernels.gelu_mul(gate, up, out)
    assert np.abs(out - gelu(gate.astype(np.float64)) * up).max() < 2e-6


def test_gelu_is_correct_for_extreme_inputs() -> None:
    rows = np.array([[0.0, -0.0, 30.0, -30.0, 1e30, -1e30, -8.0]], np.float32)
    out = np.empty_like(rows)
    _kernels.gelu(rows, out)
    assert out[0].tolist()[:6] == [0.0, 0.0, 30.0, 0.0, pytest.approx(1e30), 0.0]
    assert abs(out[0, 6]) < 1e-6


def test_the_mean_of_a_text_and_its_first_and_last_row() -> None:
    ops = ReferenceTextOps()
    step = TextIndices(np.zeros(5, int), np.arange(5), np.zeros(5, int), np.array([0, 2, 5]))
    prepared = ops.prepare_texts(step, AttentionShape(1, 1, 1, 1.0), [AttentionPattern(NO_ROPE)])
    rows = np.arange(10, dtype=np.float32).reshape(5, 2)
    assert ops.pool(prepared, rows, "mean").tolist() == [[1, 2], [6, 7]]
    assert ops.pool(prepared, rows, "cls").tolist() == [[0, 1], [4, 5]]
    assert ops.pool(prepared, rows, "last").tolist() == [[2, 3], [8, 9]]
    source = ArraySource(rows)
    assert ops.rows_of(source, (4, 1)).to_float32().tolist() == [[8, 9], [2, 3]]
