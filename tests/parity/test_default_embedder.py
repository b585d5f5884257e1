"""The default embedder, all-MiniLM-L6-v2, against sentence-transformers: 500 texts of 1 token to the longest input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from weft.backends.cpu.embedder import EmbedderBackend, open_embedder
from weft.engine.serving import ServingEngine
from weft.loading.checkpoint import open_checkpoint
from weft.loading.embedding_files import embedding_spec
from weft.request import InferenceRequest, SamplingParams
from weft.text.embedding_text import EmbeddingText

CORPUS = Path(__file__).parent / "corpus" / "texts.jsonl"
COUNT = 500
PACKED = pytest.mark.parametrize(("quantize", "least"), [(None, 0.9999), ("int8", 0.999)])


def texts() -> list[str]:
    """Pieces of the texts of the tokenizer tests: many languages, code, white space. The lengths grow geometrically."""
    words = " ".join(json.loads(line) for line in CORPUS.read_text("utf-8").splitlines()).split()
    numbers = np.random.default_rng(2)
    found = []
    for _ in range(COUNT):
        count = int(2 ** numbers.uniform(0, 7.6))
        start = int(numbers.integers(0, len(words)))
        found.append(" ".join((words * 2)[start : start + count]))
    return found


@pytest.fixture(scope="module")
def text_side(default_embedder_path: Path) -> EmbeddingText:
    checkpoint = open_checkpoint(default_embedder_path)
    spec = embedding_spec(checkpoint)
    assert spec is not None and (spec.kind, spec.pooling, spec.dimensions) == ("embed", "mean", 384)
    assert spec.max_tokens == 256 and spec.normalise
    return EmbeddingText(checkpoint, spec)


@pytest.fixture(scope="module")
def tokens(text_side: EmbeddingText) -> list[list[int]]:
    return text_side.tokens_of(texts(), truncate=True)


@pytest.fixture(scope="module")
def correct(default_embedder_path: Path) -> np.ndarray:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(1)
    model = SentenceTransformer(str(default_embedder_path), device="cpu")
    return np.asarray(model.encode(texts(), batch_size=16))


def vectors(backend: EmbedderBackend, asked: list[list[int]]) -> np.ndarray:
    with ServingEngine(backend, backend.spec.engine_config()) as engine:
        one = SamplingParams(max_tokens=1)
        ids = [engine.submit(InferenceRequest(tuple(text), one)) for text in asked]
        engine.run_until_idle()
        found = [engine.get_result(request_id) for request_id in ids]
    return np.array([np.frombuffer(result.vector, "<f4") for result in found if result and result.vector])


def test_the_tokens_are_those_of_sentence_transformers(
    default_embedder_path: Path, tokens: list[list[int]]
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(default_embedder_path)
    assert {len(text) for text in tokens} >= {3, 4, 256}
    for text, ids in zip(texts(), tokens, strict=True):
        assert tokenizer(text, truncation=True, max_length=256)["input_ids"] == ids, text


@PACKED
def test_the_vectors_are_those_of_sentence_transformers(
    quantize: str | None,
    least: float,
    default_embedder_path: Path,
    tokens: list[list[int]],
    correct: np.ndarray,
) -> None:
    pytest.importorskip("weft._kernels")
    found = vectors(open_embedder(default_embedder_path, threads=2, quantize=quantize), tokens)  # type: ignore[arg-type]
    assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-6
    cosines = (found * correct).sum(axis=1)
    assert len(cosines) == COUNT and cosines.min() >= least, np.sort(cosines)[:5]


def test_numpy_gives_the_same_vectors(
    default_embedder_path: Path, tokens: list[list[int]], correct: np.ndarray
) -> None:
    found = vectors(open_embedder(default_embedder_path, dtype=np.float32), tokens[:60])
    assert (found * correct[:60]).sum(axis=1).min() > 0.99999


@PACKED
def test_a_vector_has_the_same_bits_alone_and_in_any_batch(
    quantize: str | None, least: float, default_embedder_path: Path, tokens: list[list[int]]
) -> None:
    pytest.importorskip("weft._kernels")
    backend = open_embedder(default_embedder_path, threads=2, quantize=quantize)  # type: ignore[arg-type]
    together = vectors(backend, tokens)
    alone = open_embedder(default_embedder_path, threads=1, quantize=quantize)  # type: ignore[arg-type]
    with ServingEngine(alone, alone.spec.engine_config()) as engine:
        for index in range(0, COUNT, 5):
            request_id = engine.submit(InferenceRequest(tuple(tokens[index]), SamplingParams(max_tokens=1)))
            engine.run_until_idle()
            result = engine.get_result(request_id)
            assert result is not None and result.vector == together[index].tobytes(), len(tokens[index])
    some = np.random.default_rng(4).permutation(COUNT)[:70]
    again = vectors(
        open_embedder(default_embedder_path, threads=2, quantize=quantize), [tokens[i] for i in some]
    )  # type: ignore[arg-type]
    assert again.tobytes() == together[some].tobytes()
