"""The benchmarks of embeddings, real passages and the index of vector stores, with small sizes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import embeddings, memory_index, passages
from benchmarks.embeddings import REFERENCE, WEFT, Times
from weft.errors import InvalidRequestError
from weft.memory.vector_index import MAX_EXACT, max_delta

GUIDE = Path(__file__).parents[2] / "docs" / "guide"


# --- the index ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "delta"), [(9_000, 8192), (100_000, 8192), (1_000_000, 15_384)])
def test_the_delta_is_as_large_as_the_server_lets_it_grow(count: int, delta: int) -> None:
    in_base = memory_index.num_in_base(count)
    assert count - in_base == delta == max_delta(in_base)
    assert delta + 1 > max_delta(in_base - 1), "a passage of the base fits into the delta"


def test_generated_vectors_have_the_stated_mean_and_spectrum() -> None:
    vectors = memory_index.generated(12_000, 64)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3)
    assert (vectors == vectors.astype(np.float16)).all(), "they are stored as f16"
    mean = vectors.mean(axis=0)
    assert np.linalg.norm(mean) == pytest.approx(0.326, abs=0.03)
    values = np.sort(np.linalg.eigvalsh(np.cov((vectors - mean).T)))[::-1]
    assert values[0] > 3 * values[15] > 6 * values[60]
    assert (vectors[:100] == memory_index.generated(12_000, 64)[:100]).all()


def test_the_index_is_measured_against_an_exact_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("usearch")
    vectors = memory_index.generated(MAX_EXACT + 1540, 32)
    np.save(tmp_path / "some.npy", vectors)
    memory_index.main(
        size=MAX_EXACT + 1500,
        dimensions=32,
        queries=40,
        passages=tmp_path / "some.npy",
        threads=1,
        as_json=True,
        keep=tmp_path / "kept",
        plot=None,
    )
    printed = json.loads(capsys.readouterr().out)
    [kept] = (tmp_path / "kept").iterdir()
    assert json.loads(kept.read_text())["recall"] == printed["recall"] >= 0.95
    assert (printed["source"], printed["vectors"], printed["dimensions"]) == ("some", MAX_EXACT + 1500, 32)
    assert len(printed["search_ms"]) == 40 and printed["search_ms"] == sorted(printed["search_ms"])
    assert 0 < printed["p50_ms"] <= printed["p99_ms"] and printed["file_mb"] > 1500 * 32 * 2 / 1e6
    with pytest.raises(InvalidRequestError, match=f"{len(vectors)} vectors; asked for: 99999"):
        memory_index.stored(tmp_path / "some.npy", 99_999)


# --- real passages ------------------------------------------------------------------------------------------------


def test_passages_are_embedded_and_an_interrupted_run_continues(
    default_embedder_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(passages, "_AT_ONCE", 8)
    out = tmp_path / "passages.npy"

    def run() -> np.ndarray:
        passages.main([GUIDE], out=out, count=20, tokens=64, quantize=None)
        return np.asarray(np.load(out))

    whole = run()
    texts = [json.loads(line) for line in out.with_suffix(".jsonl").open()]
    assert whole.shape == (20, 384) and whole.dtype == np.float16 and len(set(texts)) == 20
    assert np.allclose(np.linalg.norm(whole.astype(np.float32), axis=1), 1, atol=2e-3)
    cut = whole.copy()
    cut[8:] = 0
    np.save(out, cut)
    capsys.readouterr()
    assert np.array_equal(run(), whole), "the rest of an interrupted run is embedded"
    assert capsys.readouterr().out.startswith("20 of 20 passages")
    with pytest.raises(InvalidRequestError, match="asked for: 1000000"):
        passages.main([GUIDE], out=tmp_path / "b.npy", count=10**6, tokens=64, quantize=None)


# --- beside other engines -----------------------------------------------------------------------------------------


def test_embeddings_are_measured_beside_a_peer_in_its_process(
    default_embedder_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer is the sentence-transformers of this environment. The result of a missing peer is false."""
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("weft._kernels")
    monkeypatch.setattr(embeddings, "PEERS", {REFERENCE: "sentence-transformers", "missing": "no such kind"})
    monkeypatch.setattr(embeddings, "python_of", lambda *_: Path(sys.executable))
    monkeypatch.setattr(embeddings, "_PASSAGES", 6)
    monkeypatch.setattr(embeddings, "_QUERIES", 2)
    path = tmp_path / "result.json"
    assert not embeddings.main(rounds=2, home=tmp_path / "peers", threads=1, json_path=path)
    result = json.loads(path.read_text())
    assert result["times"].keys() == {*WEFT, REFERENCE} and result["threads"] == 1
    for name, times in result["times"].items():
        assert len(times["batch"]) == len(times["query"]) == 2 and min(times["batch"] + times["query"]) > 0
        least = 0.999 if name == "weft int8" else 0.9999
        assert least <= times["least_cosine"] <= 1.00001, name
    assert [check["criterion"] for check in result["checks"]] == [
        f"weft f32 over {REFERENCE}, batch",
        f"weft f32 over {REFERENCE}, query",
    ]


def test_a_bar_counts_from_the_worse_end_of_the_interval() -> None:
    """Peers take 2.1 times as long in each round, or between 1 and 4 times."""
    steady, unsteady = [2.1, 2.1, 2.1], [1.0, 2.1, 4.0]
    times = {
        "weft f32": Times([1.0] * 3, [1.0] * 3),
        "weft int8": Times([1.0] * 3, [1.0] * 3),
        REFERENCE: Times(steady, unsteady),
        "llama.cpp Q8_0": Times(steady, [1.2] * 3),
    }
    checks = {check.criterion: check.is_met for check in embeddings._checks(times)}
    assert checks == {
        f"weft f32 over {REFERENCE}, batch": True,
        f"weft f32 over {REFERENCE}, query": False,
        "weft int8 over llama.cpp Q8_0, batch": True,
        "weft int8 over llama.cpp Q8_0, query": False,
    }
