"""`LLM.embed`, `LLM.rerank` and `weft embed`, with the real MiniLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from reranker_files import write_reranker
from weft import LLM, InvalidRequestError
from weft.backends import registry
from weft.cli.main import app
from weft.embedding import EmbeddingSpec
from weft.engine.serving import ServingEngine
from weft.loading.checkpoint import open_checkpoint
from weft.local_vectors import LocalVectors
from weft.text.embedding_text import EmbeddingText

TEXTS = ["How do I cook rice?", "Boil rice in water.", "The stock market fell."]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("all-MiniLM-L6-v2", threads=2) as llm:
        yield llm


def test_texts_get_vectors_of_length_one_in_their_order(llm: LLM) -> None:
    vectors = llm.embed(TEXTS)
    assert vectors.shape == (3, 384) and vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert vectors[0] @ vectors[1] > 0.4 > vectors[0] @ vectors[2]
    assert np.array_equal(llm.embed(TEXTS[::-1])[::-1], vectors)
    assert np.array_equal(llm.embed(TEXTS[0]), vectors[0])
    assert llm.embed([]).shape == (0, 384)


def test_more_texts_than_the_queue_holds_get_their_vectors(default_model_path: Path) -> None:
    spec = EmbeddingSpec("embed", "mean", dimensions=4, max_tokens=32)
    options = {"vocabulary_size": 49152, "max_context": 33, "vector_size": 4}
    text = EmbeddingText(open_checkpoint(default_model_path), spec)
    with ServingEngine(registry.build("noop", **options), spec.engine_config()) as engine:
        vectors = LocalVectors(engine, spec, text)
        many = vectors.embed([f"text {index % 100}" for index in range(9000)], None, None, False)
        few = vectors.embed([f"text {index}" for index in range(100)], None, None, False)
    assert np.array_equal(many, np.tile(few, (90, 1)))


def test_dimensions_are_checked_and_cut(llm: LLM) -> None:
    cut = llm.embed(TEXTS, dimensions=10)
    assert cut.shape == (3, 10) and np.allclose(np.linalg.norm(cut, axis=1), 1, atol=1e-6)
    for dimensions in (0, 385, True, "3"):
        with pytest.raises(InvalidRequestError, match="1 to 384"):
            llm.embed(TEXTS, dimensions=dimensions)  # type: ignore[arg-type]


def test_a_wrong_text_is_named_by_its_index(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"text 1.*1002.*256"):
        llm.embed(["a", "word " * 1000])
    assert np.array_equal(llm.embed("word " * 1000, truncate=True), llm.embed("word " * 254))
    with pytest.raises(InvalidRequestError, match="text 0 is int"):
        llm.embed([3])  # type: ignore[list-item]
    with pytest.raises(InvalidRequestError, match="query, document"):
        llm.embed("a", kind="poem")  # type: ignore[arg-type]


def test_each_kind_of_model_refuses_the_work_of_the_others(llm: LLM) -> None:
    for call in (
        lambda: llm.generate("a"),
        lambda: llm.chat([{"role": "user", "content": "a"}]),
        lambda: list(llm.stream("a")),
    ):
        with pytest.raises(InvalidRequestError, match=r"LLM\.embed"):
            call()
    with pytest.raises(InvalidRequestError, match="open a reranker"):
        llm.rerank("a", ["b"])
    with pytest.raises(InvalidRequestError, match="leave it out"):
        LLM("all-MiniLM-L6-v2", memory=1 << 30)
    with (
        LLM(max_context=64, memory=64 << 20) as other,
        pytest.raises(InvalidRequestError, match="makes no vectors"),
    ):
        other.embed("a")


def test_a_reranker_scores_each_document(tmp_path: Path) -> None:
    with LLM(str(write_reranker(tmp_path / "model"))) as llm:
        scores = llm.rerank("Who wrote Faust?", ["Goethe", "Bees", "word " * 5000])
        assert len(scores) == 3 and all(0 < score < 1 for score in scores)
        assert llm.rerank("Who wrote Faust?", ["Bees"]) == scores[1:2]
        queries: list[str] = []
        text = llm.vectors._text
        query_part = text.query_part
        text.query_part = lambda query: (queries.append(query), query_part(query))[1]  # type: ignore
        assert llm.rerank("Who wrote Faust?", ["Bees"] * 3) == scores[1:2] * 3
        assert len(queries) == 1, "the query is tokenised once"
        with pytest.raises(InvalidRequestError, match=r"LLM\.rerank"):
            llm.embed("a")


# ---------------------------------------------------------------------- weft embed


def run(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["embed", *arguments], input=stdin)
    return result.exit_code, result.stdout, f"{result.exception or ''}"


def test_the_command_writes_one_json_line_for_each_text(llm: LLM) -> None:
    code, output, _ = run(*TEXTS)
    lines = [json.loads(line) for line in output.splitlines()]
    assert code == 0 and [line["index"] for line in lines] == [0, 1, 2]
    assert np.array_equal(np.array([line["embedding"] for line in lines], np.float32), llm.embed(TEXTS))


def test_plain_lines_in_and_out_stay_beside_each_other(llm: LLM) -> None:
    code, output, error = run("--plain", "--dimensions", "3", stdin=b"a\n\nb\n")
    lines = output.split("\n")
    assert code == 1 and "1 of 3 texts failed" in error
    assert lines[1] == "" and len(lines) == 4
    found = np.array([list(map(float, lines[index].split())) for index in (0, 2)], np.float32)
    assert np.array_equal(found, llm.embed(["a", "b"], dimensions=3))


def test_json_lines_keep_their_ids_and_wrong_lines_do_not_stop_the_others(tmp_path: Path, llm: LLM) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        '{"id": "x", "text": "a"}\n"b"\n\n{"text": 5}\nno json\n' + json.dumps("word " * 900) + "\n"
    )
    code, _, error = run("--input", str(source), "--output", str(target))
    assert code == 1 and "3 of 5 texts failed" in error
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert lines[0]["id"] == "x" and lines[1]["index"] == 1
    found = np.array([line["embedding"] for line in lines[:2]], np.float32)
    assert np.array_equal(found, llm.embed(["a", "b"]))
    assert all("message" in line["error"] for line in lines[2:]) and "902" in lines[4]["error"]["message"]
    code, _, error = run("--input", str(source), "--output", str(target))
    assert code == 1 and "--overwrite" in error
    assert run("a", "--output", str(target), "--overwrite")[0] == 0
    assert len(target.read_text().splitlines()) == 1


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    for arguments, words in (
        (("a", "--lines", "x"), "one of them"),
        (("a", "--dimensions", "999"), "1 to 384"),
        (("a", "--kind", "poem"), "query, document"),
        (("--lines", str(tmp_path / "missing")), "cannot be read"),
        (("a", "--model", str(tmp_path)), str(tmp_path)),
        (("a", "--model", "no-such-model"), "does not exist"),
    ):
        code, _, error = run(*arguments)
        assert code == 1 and words in error, (arguments, error)
