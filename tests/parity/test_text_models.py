"""Embedding models and rerankers of every architecture against transformers, on small random checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from small_text_models import CASES, build, expected, texts, write_folder

from weft.backends.cpu.embedder import EmbedderBackend, open_embedder
from weft.engine.serving import ServingEngine
from weft.request import InferenceRequest, SamplingParams


def vectors(backend: EmbedderBackend, asked: list[list[int]]) -> np.ndarray:
    """The vectors of texts, from the real engine."""
    with ServingEngine(backend, backend.spec.engine_config()) as engine:
        one = SamplingParams(max_tokens=1)
        ids = [engine.submit(InferenceRequest(tuple(text), one)) for text in asked]
        engine.run_until_idle()
        results = [engine.get_result(request_id) for request_id in ids]
    found = []
    for result in results:
        assert result is not None and result.vector is not None, result
        found.append(np.frombuffer(result.vector, "<f4"))
    return np.array(found)


@pytest.mark.parametrize("name", CASES)
def test_a_text_model_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = build(case)
    folder = write_folder(case, model, tmp_path / "model")
    asked = texts()
    correct = np.array([expected(case, model, text) for text in asked])
    found = vectors(open_embedder(folder, dtype=np.float64), asked)
    assert np.abs(found - correct).max() < 2e-6 * np.abs(correct).max()
