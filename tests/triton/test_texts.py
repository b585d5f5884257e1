"""Embedding models on the device against the same models in numpy, and their kernels one by one.

On a GPU the same tests run in float32 and bfloat16 (`make test-gpu`).
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_text_models import CASES, build, texts, write_folder

from conftest import TEST_DEVICE
from weft.backends.cpu.embedder import EmbedderBackend, open_embedder
from weft.backends.cuda.embedder import open_cuda_embedder
from weft.engine.serving import ServingEngine
from weft.errors import InvalidRequestError
from weft.ops.base import AttentionPattern, AttentionShape, QkNorm, Rope
from weft.ops.reference_texts import ReferenceTextOps
from weft.ops.texts import TextIndices
from weft.ops.triton.device import Device
from weft.ops.triton.text_ops import TritonTextOps
from weft.request import InferenceRequest, SamplingParams

LENGTHS = (1, 64, 65, 3, 130, 17)
ROPE = Rope(tuple(1e4 ** (-pair / 8) for pair in range(8)), interleaved=False)
NO_ROPE = Rope((), interleaved=False)

PATTERNS = {
    "all": AttentionPattern(NO_ROPE, causal=False),
    "rope": AttentionPattern(ROPE, causal=False),
    "interleaved pairs": AttentionPattern(replace(ROPE, interleaved=True), causal=False),
    "window": AttentionPattern(NO_ROPE, window=20, causal=False),
    "window of one": AttentionPattern(NO_ROPE, window=1, causal=False),
    "causal": AttentionPattern(ROPE, causal=True),
    "causal, window": AttentionPattern(ROPE, window=70, causal=True),
}
SHAPES = {
    "heads of 24": AttentionShape(heads=4, kv_heads=4, head_size=24, scale=0.2),
    "groups of 3, a cap": AttentionShape(heads=6, kv_heads=2, head_size=32, scale=0.3, score_cap=2.0),
}


def step_of(lengths: tuple[int, ...]) -> TextIndices:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    positions = np.concatenate([np.arange(length) for length in lengths])
    numbers = np.random.default_rng(3)
    return TextIndices(
        numbers.integers(0, 50, starts[-1]), positions, numbers.integers(0, 2, starts[-1]), starts
    )


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def padded(array: np.ndarray, count: int, device: Device) -> torch.Tensor:
    """The rows on the device, with rows of NaN after them: padding must reach no text."""
    rows = torch.full((count, array.shape[1]), float("nan"), device=device.torch_device)
    rows[: len(array)] = torch.from_numpy(array)
    return rows


def close(ours: torch.Tensor, theirs: np.ndarray, tolerance: float = 3e-6) -> None:
    assert np.abs(ours[: len(theirs)].cpu().numpy() - theirs).max() <= tolerance * np.abs(theirs).max()


@pytest.fixture
def ops(device: Device) -> TritonTextOps:
    return TritonTextOps(device, torch.float32, max_tokens=256)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_attention_inside_texts_equals_that_of_the_reference(
    pattern: AttentionPattern, shape: AttentionShape, ops: TritonTextOps
) -> None:
    step, reference = step_of(LENGTHS), ReferenceTextOps(np.float32)
    columns = (shape.heads + 2 * shape.kv_heads) * shape.head_size
    rows = draw(sum(LENGTHS), columns)
    weights = draw(shape.head_size, seed=1), draw(shape.head_size, seed=2)
    norm = QkNorm(*weights, 1e-5) if pattern.causal else None
    expected = reference.self_attention(reference.prepare_texts(step, shape, [pattern]), rows.copy(), 0, norm)
    prepared = ops.prepare_texts(step, shape, [pattern])
    if norm is not None:
        query, key = (torch.from_numpy(weight).to(ops.device.torch_device) for weight in weights)
        norm = QkNorm(query, key, norm.epsilon)
    close(ops.self_attention(prepared, padded(rows, prepared.tokens, ops.device), 0, norm), expected, 2e-5)


@pytest.mark.parametrize("columns", [24, 384, 1100])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_layer_norm_equals_that_of_the_reference(columns: int, has_bias: bool, ops: TritonTextOps) -> None:
    rows, weight, bias = draw(5, columns) + 3, draw(columns, seed=1), draw(columns, seed=2)
    on_device = [torch.from_numpy(values).to(ops.device.torch_device) for values in (rows, weight, bias)]
    found = ops.layer_norm(*on_device[:2], on_device[2] if has_bias else None, 1e-5)
    close(found, ReferenceTextOps().layer_norm(rows, weight, bias if has_bias else None, 1e-5), 1e-5)


@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul", "gelu_tanh_mul"])
def test_a_gate_multiplies_the_other_half(name: str, ops: TritonTextOps) -> None:
    rows = draw(3, 2200) * 4
    found = getattr(ops, name)(torch.from_numpy(rows).to(ops.device.torch_device))
    close(found, getattr(ReferenceTextOps(), name)(rows))


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "tanh"])
def test_an_activation_equals_that_of_the_reference(kind: str, ops: TritonTextOps) -> None:
    rows = draw(3, 1100) * 6
    found = ops.activation(torch.from_numpy(rows).to(ops.device.torch_device), kind)
    close(found, ReferenceTextOps().activation(rows, kind))


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_a_text_becomes_one_row(pooling: str, ops: TritonTextOps) -> None:
    step, reference, shape = step_of(LENGTHS), ReferenceTextOps(), SHAPES["heads of 24"]
    rows = draw(sum(LENGTHS), 90)
    prepared = ops.prepare_texts(step, shape, [PATTERNS["all"]])
    found = ops.pool(prepared, padded(rows, prepared.tokens, ops.device), pooling)
    expected = reference.pool(reference.prepare_texts(step, shape, [PATTERNS["all"]]), rows, pooling)
    close(found, expected)


def vectors(backend: EmbedderBackend, asked: list[list[int]]) -> np.ndarray:
    """The vectors of texts, from the real engine."""
    with ServingEngine(backend, backend.spec.engine_config()) as engine:
        ids = [engine.submit(InferenceRequest(tuple(text), SamplingParams(max_tokens=1))) for text in asked]
        engine.run_until_idle()
        results = [engine.get_result(request_id) for request_id in ids]
    assert all(result is not None and result.vector is not None for result in results), results
    return np.array([np.frombuffer(result.vector, "<f4") for result in results])


MODELS = (
    *("bert, mean", "bert, reranker", "xlm-roberta", "modernbert, biases"),
    *("qwen3", "qwen3, reranker with yes and no", "gemma3"),
)


@pytest.mark.parametrize("name", MODELS)
def test_a_text_model_on_the_device_agrees_with_numpy(name: str, device: Device, tmp_path: Path) -> None:
    case = CASES[name]
    folder = write_folder(case, build(case), tmp_path / "model")
    asked = texts() if TEST_DEVICE == "cuda" else texts(4, 70)
    expected = vectors(open_embedder(folder, dtype=np.float64), asked)
    dtypes = {"float32": 2e-5, "bfloat16": 0.04} if TEST_DEVICE == "cuda" else {"float32": 2e-5}
    for dtype, tolerance in dtypes.items():
        found = vectors(open_cuda_embedder(folder, device=device, dtype=dtype), asked)
        assert np.abs(found - expected).max() < tolerance * np.abs(expected).max(), dtype


def test_a_closed_backend_holds_no_model(device: Device, tmp_path: Path) -> None:
    case = CASES["bert, mean"]
    backend = open_cuda_embedder(write_folder(case, build(case), tmp_path / "model"), device, "float32")
    forward = weakref.ref(backend._forward)
    vectors(backend, texts(3))  # closes the backend at the end
    gc.collect()
    assert forward() is None


def test_the_engine_reports_room_for_a_full_step(device: Device, tmp_path: Path) -> None:
    case = CASES["bert, mean"]
    backend = open_cuda_embedder(write_folder(case, build(case), tmp_path / "model"), device, "float32")
    config = backend.spec.engine_config(is_on_gpu=True)
    with ServingEngine(backend, config) as engine:
        assert engine.scheduler.info.room_tokens == config.scheduler.max_prefill_tokens == 16_384


def test_an_unknown_type_is_refused_with_the_known_ones(device: Device, tmp_path: Path) -> None:
    case = CASES["bert, mean"]
    folder = write_folder(case, build(case), tmp_path / "model")
    with pytest.raises(InvalidRequestError, match="bfloat16, float32"):
        open_cuda_embedder(folder, device, "int8")
