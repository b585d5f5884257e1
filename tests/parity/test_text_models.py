"""Embedding models and rerankers of every architecture against transformers, on small random checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from small_text_models import CASES, SEPARATOR, build, expected, texts, write_folder

from weft.backends.cpu.embedder import EmbedderBackend, open_embedder
from weft.engine.serving import ServingEngine
from weft.loading.checkpoint import open_checkpoint
from weft.loading.embedding_files import embedding_spec
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


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_agree_with_transformers_and_batches_change_no_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = pytest.importorskip("weft._kernels")
    case = CASES[name]
    model = build(case)
    folder = write_folder(case, model, tmp_path / "model")
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    asked = texts(40)
    correct = np.array([expected(case, model, text) for text in asked[:9]])
    used = kernels.in_use()
    try:
        for instruction_set in ("portable", "avx2", used):
            if instruction_set not in kernels.available():
                continue
            monkeypatch.setenv("WEFT_KERNELS", instruction_set)
            backend = open_embedder(folder, threads=2)
            found = vectors(backend, asked)
            assert np.abs(found[:9] - correct).max() < 5e-5 * np.abs(correct).max(), instruction_set
            for index in (0, 1, 7, 30):
                alone = vectors(open_embedder(folder, threads=1 + index % 2), [asked[index]])[0]
                assert alone.tobytes() == found[index].tobytes(), (instruction_set, len(asked[index]))
    finally:
        kernels.use(used)


def test_a_vector_that_is_not_a_number_fails_its_own_text_only(tmp_path: Path) -> None:
    import torch

    case = CASES["bert, mean"]
    model = build(case)
    broken = 50
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[broken] = float("nan")
    folder = write_folder(case, model, tmp_path / "model")
    asked = [
        [7, 8, 9, 10, SEPARATOR],
        [7, broken, SEPARATOR],
        [11, SEPARATOR],
    ]  # not in the order of their lengths
    backend = open_embedder(folder, dtype=np.float64)
    with ServingEngine(backend, backend.spec.engine_config()) as engine:
        one = SamplingParams(max_tokens=1)
        ids = [engine.submit(InferenceRequest(tuple(text), one)) for text in asked]
        results = [engine.get_result(request_id, wait=60.0) for request_id in ids]
    errors = [result and result.error for result in results]
    assert errors == [None, "the vector has a value that is not a number", None]
    for index in (0, 2):
        result = results[index]
        assert result is not None and result.vector is not None
        correct = expected(case, model, asked[index])
        assert np.abs(np.frombuffer(result.vector, "<f4") - correct).max() < 2e-6 * np.abs(correct).max()


GGUF_CASES = [
    "bert, mean",
    "bert, first token",
    "bert, reranker",
    "roberta",
    "xlm-roberta",
    "xlm-roberta, reranker",
    "modernbert",
    "modernbert, reranker",
    "qwen2",
    "qwen3",
    "qwen3, reranker with yes and no",
    "gemma3",
]


@pytest.mark.parametrize("name", GGUF_CASES)
def test_a_gguf_file_gives_the_vectors_of_the_folder(name: str, tmp_path: Path) -> None:
    from gguf_text_files import write_text_gguf

    case = replace(CASES[name], normalise=True)  # GGUF files do not say, and llama.cpp always normalises
    model = build(case)
    folder = write_folder(case, model, tmp_path / "model")
    path = write_text_gguf(case, folder, tmp_path / "model.gguf")
    asked = [[token for token in text if token != SEPARATOR] for text in texts(longest=60)]
    assert embedding_spec(open_checkpoint(path)) is not None
    found = vectors(open_embedder(path, dtype=np.float64), asked)
    correct = vectors(open_embedder(folder, dtype=np.float64), asked)
    assert np.abs(found - correct).max() < 1e-6 * np.abs(correct).max()


def test_the_matrices_of_a_gguf_file_may_be_quantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gguf_text_files import write_text_gguf

    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    case = CASES["bert, mean"]
    model = build(case)
    folder = write_folder(case, model, tmp_path / "model")
    path = write_text_gguf(case, folder, tmp_path / "model.gguf", quantised=True)
    asked = texts()
    correct = np.array([expected(case, model, text) for text in asked])
    found = vectors(open_embedder(path), asked)
    assert (found * correct).sum(axis=1).min() > 0.995
