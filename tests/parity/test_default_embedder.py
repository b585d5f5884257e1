"""The default embedder, all-MiniLM-L6-v2, against sentence-transformers: the vectors of 500 texts, and a ranking.

The model has 512 positions, and its files allow 256. Here both sides get files that allow 512.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Literal

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
COLLECTION = Path(__file__).parents[1] / "data" / "ranking.json"
COUNT = 500
LONGEST = 512
WAIT = 600.0
"""Seconds for one text."""
PACKED = pytest.mark.parametrize(("quantize", "least"), [(None, 0.9999), ("int8", 0.999)])


def texts() -> list[str]:
    """Pieces of the texts of the tokenizer tests: many languages, code, white space. From 1 word to more than fit."""
    words = " ".join(json.loads(line) for line in CORPUS.read_text("utf-8").splitlines()).split()
    numbers = np.random.default_rng(2)
    found = []
    for _ in range(COUNT):
        count = int(2 ** numbers.uniform(0, 8.4))
        start = int(numbers.integers(0, len(words)))
        found.append(" ".join((words * 2)[start : start + count]))
    return found


@pytest.fixture(scope="module")
def folder(default_embedder_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default embedder, for inputs of up to 512 tokens."""
    spec = embedding_spec(open_checkpoint(default_embedder_path))
    assert spec is not None and (spec.kind, spec.pooling, spec.dimensions) == ("embed", "mean", 384)
    assert spec.max_tokens == 256 and spec.normalise
    path = tmp_path_factory.mktemp("models") / "embedder"
    shutil.copytree(default_embedder_path, path, copy_function=os.symlink)
    for name, key in (
        ("sentence_bert_config.json", "max_seq_length"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        config = json.loads((path / name).read_text())
        (path / name).unlink()
        (path / name).write_text(json.dumps({**config, key: LONGEST}))
    return path


@pytest.fixture(scope="module")
def text_side(folder: Path) -> EmbeddingText:
    checkpoint = open_checkpoint(folder)
    spec = embedding_spec(checkpoint)
    assert spec is not None and spec.max_tokens == LONGEST
    return EmbeddingText(checkpoint, spec)


@pytest.fixture(scope="module")
def tokens(text_side: EmbeddingText) -> list[list[int]]:
    return text_side.tokens_of(texts(), truncate=True)


def of_sentence_transformers(folder: Path, asked: list[str]) -> np.ndarray:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(1)
    model = SentenceTransformer(str(folder), device="cpu")
    assert model.max_seq_length == LONGEST
    return np.asarray(model.encode(asked, batch_size=16))


@pytest.fixture(scope="module")
def correct(folder: Path) -> np.ndarray:
    return of_sentence_transformers(folder, texts())


def vectors(backend: EmbedderBackend, asked: list[list[int]]) -> np.ndarray:
    with ServingEngine(backend, backend.spec.engine_config()) as engine:
        one = SamplingParams(max_tokens=1)
        ids = [engine.submit(InferenceRequest(tuple(text), one)) for text in asked]
        found = [engine.get_result(request_id, wait=WAIT) for request_id in ids]
    return np.array([np.frombuffer(result.vector, "<f4") for result in found if result and result.vector])


@pytest.fixture(scope="module")
def together(folder: Path, tokens: list[list[int]]) -> dict[str | None, np.ndarray]:
    """The vectors of all texts in one list, by the type of the weights."""
    pytest.importorskip("weft._kernels")
    return {
        quantize: vectors(open_embedder(folder, threads=2, quantize=quantize), tokens)  # type: ignore[arg-type]
        for quantize in (None, "int8")
    }


def test_the_tokens_are_those_of_sentence_transformers(folder: Path, tokens: list[list[int]]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert {len(text) for text in tokens} >= {3, 4, LONGEST}
    for text, ids in zip(texts(), tokens, strict=True):
        assert tokenizer(text, truncation=True, max_length=LONGEST)["input_ids"] == ids, text


@PACKED
def test_the_vectors_are_those_of_sentence_transformers(
    quantize: str | None, least: float, together: dict[str | None, np.ndarray], correct: np.ndarray
) -> None:
    found = together[quantize]
    assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-6
    cosines = (found * correct).sum(axis=1)
    assert len(cosines) == COUNT and cosines.min() >= least, np.sort(cosines)[:5]


def test_numpy_gives_the_same_vectors(folder: Path, tokens: list[list[int]], correct: np.ndarray) -> None:
    found = vectors(open_embedder(folder, dtype=np.float32), tokens[:60])
    assert (found * correct[:60]).sum(axis=1).min() > 0.99999


@PACKED
def test_a_vector_has_the_same_bits_alone_and_in_any_batch(
    quantize: str | None,
    least: float,
    folder: Path,
    tokens: list[list[int]],
    together: dict[str | None, np.ndarray],
) -> None:
    alone = open_embedder(folder, threads=1, quantize=quantize)  # type: ignore[arg-type]
    with ServingEngine(alone, alone.spec.engine_config()) as engine:
        for index in range(COUNT):
            request_id = engine.submit(InferenceRequest(tuple(tokens[index]), SamplingParams(max_tokens=1)))
            result = engine.get_result(request_id, wait=WAIT)
            assert result is not None and result.vector == together[quantize][index].tobytes(), len(
                tokens[index]
            )
    some = np.random.default_rng(4).permutation(COUNT)[:70]
    again = vectors(open_embedder(folder, threads=2, quantize=quantize), [tokens[i] for i in some])  # type: ignore[arg-type]
    assert again.tobytes() == together[quantize][some].tobytes()


def collection() -> tuple[list[str], list[str]]:
    """1,181 passages of Python's language reference, and 253 queries from its built-in functions (tests/data/ranking.json).
    Part of both in a usual run; all with WEFT_TEST_WHOLE_RANKING."""
    found = json.loads(COLLECTION.read_text("utf-8"))
    passages, queries = found["passages"], found["queries"]
    if os.environ.get("WEFT_TEST_WHOLE_RANKING"):
        return passages, queries
    return passages[::5], queries[::2]


@pytest.fixture(scope="module")
def correct_collection(folder: Path) -> np.ndarray:
    passages, queries = collection()
    return of_sentence_transformers(folder, [*passages, *queries])


@pytest.fixture(scope="module")
def scores(correct_collection: np.ndarray) -> np.ndarray:
    """The score of each passage for each query, of sentence-transformers."""
    count = len(collection()[0])
    return np.asarray(correct_collection[count:] @ correct_collection[:count].T)


def ten_nearest(folder: Path, text_side: EmbeddingText, quantize: Literal["int8"] | None) -> np.ndarray:
    """The indices of the ten passages with the best scores for each query, best first."""
    passages, queries = collection()
    tokens = text_side.tokens_of([*passages, *queries], truncate=True)
    found = vectors(open_embedder(folder, threads=2, quantize=quantize), tokens)
    return best(found[len(passages) :] @ found[: len(passages)].T)


def best(scores: np.ndarray) -> np.ndarray:
    return np.argsort(-scores, axis=1, kind="stable")[:, :10]


def test_the_ten_nearest_passages_are_those_of_sentence_transformers(
    folder: Path, text_side: EmbeddingText, scores: np.ndarray
) -> None:
    """In f32: the same ten passages for 99% of the queries."""
    pytest.importorskip("weft._kernels")
    assert len(scores) > 100
    same = (np.sort(ten_nearest(folder, text_side, None)) == np.sort(best(scores))).all(axis=1)
    assert same.mean() >= 0.99, np.flatnonzero(~same)


def test_with_int8_the_ten_nearest_passages_are_as_good_within_a_score_of_0_01(
    folder: Path, text_side: EmbeddingText, scores: np.ndarray
) -> None:
    """At each of the ten places, for 99% of the queries, the score of sentence-transformers for weft's passage differs by
    less than 0.01 from that for its own. The ten passages themselves are equal for about a third of the queries."""
    pytest.importorskip("weft._kernels")
    of_weft = np.take_along_axis(scores, ten_nearest(folder, text_side, "int8"), axis=1)
    of_reference = np.take_along_axis(scores, best(scores), axis=1)
    good = np.abs(of_weft - of_reference).max(axis=1) < 0.01
    assert good.mean() >= 0.99, np.flatnonzero(~good)
