"""`weft serve` with --embedder and --reranker: real commands, real models."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from server_process import SOURCE, Server
from vector_models import engines

from reranker_files import write_reranker
from weft import LLM
from weft.loading.default_model import DEFAULT_EMBEDDER_NAME

COMMAND = (sys.executable, "-m", "weft.cli.main", "serve", "--port", "0")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE)}


@contextmanager
def serving(*arguments: str, folder: Path) -> Iterator[tuple[Server, dict[str, Any]]]:
    """A server, and the event of its start."""
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, "WEFT_SERVE_STATE_PATH": str(folder)},
    )
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("{") and json.loads(line)["event"] == "ready":
                break
        else:
            raise AssertionError("".join(lines))
        event = json.loads(lines[-1])
        with httpx.Client(base_url=event["url"].removesuffix("/v1"), timeout=120) as client:
            yield Server(process, httpx.URL(event["url"]).port or 0, client), event
    finally:
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        assert process.wait(60) == 0


def lease_file(pid: int) -> str:
    """The inode of the file of the core lease that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    [inode] = {line.split()[4] for line in lines if "memfd:weft-cores" in line}
    return inode


def test_three_models_are_served_by_three_engines(tmp_path: Path) -> None:
    reranker = write_reranker(tmp_path / "small-reranker")
    arguments = ("--embedder", "default", "--reranker", str(reranker), "--memory", "64MiB", "--name", "chat")
    with serving(*arguments, folder=tmp_path) as (server, event):
        client = server.client
        assert event["vector_models"] == [DEFAULT_EMBEDDER_NAME, "small-reranker"]
        vectors = client.post("/v1/embeddings", json={"input": ["a", "b"], "model": DEFAULT_EMBEDDER_NAME})
        assert len(vectors.json()["data"][1]["embedding"]) == 384
        scores = client.post(
            "/v1/rerank", json={"query": "a", "documents": ["b", "c"], "model": "rerank-v3.5"}
        )
        assert len(scores.json()["results"]) == 2
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "model": "gpt-5"}
        assert client.post("/v1/chat/completions", json=chat).status_code == 200
        assert list(client.get("/health").json()["models"]) == [
            "chat",
            DEFAULT_EMBEDDER_NAME,
            "small-reranker",
        ]
        files = [lease_file(engine) for engine in engines(server)]
        assert len(files) == 3 and len(set(files)) == 1, "the engines share one core lease"


def test_quantize_applies_to_every_model_with_float_weights(tmp_path: Path) -> None:
    """The default MODEL is quantised already. It stays as it is."""
    path = write_reranker(tmp_path / "small-reranker")
    texts = ["A cat sits on the mat.", "The engine computes vectors.", "mat"]
    arguments = ("--embedder", "default", "--reranker", str(path), "--memory", "64MiB", "--quantize", "int8")
    with serving(*arguments, folder=tmp_path) as (server, _):
        client = server.client
        found = client.post("/v1/embeddings", json={"input": texts, "model": DEFAULT_EMBEDDER_NAME}).json()
        vectors = np.array([one["embedding"] for one in found["data"]], np.float32)
        ranking = {"query": "a cat", "documents": texts, "model": "small-reranker"}
        results = client.post("/v1/rerank", json=ranking).json()["results"]
    scores = [one["relevance_score"] for one in sorted(results, key=lambda one: one["index"])]
    with LLM(DEFAULT_EMBEDDER_NAME, quantize="int8") as int8, LLM(DEFAULT_EMBEDDER_NAME) as floats:
        assert np.array_equal(vectors, int8.embed(texts))
        cosines = (vectors * floats.embed(texts)).sum(axis=1)
    assert 0.999 <= cosines.min() < 0.9999999
    with LLM(str(path), quantize="int8") as int8, LLM(str(path)) as floats:
        assert scores == pytest.approx(int8.rerank("a cat", texts), abs=1e-7)
        assert scores != pytest.approx(floats.rerank("a cat", texts), abs=1e-7)


def test_an_embedding_model_is_served_alone(tmp_path: Path) -> None:
    with serving(DEFAULT_EMBEDDER_NAME, folder=tmp_path) as (server, event):
        client = server.client
        assert event["model"] == DEFAULT_EMBEDDER_NAME and event["weight_bytes"] > 0
        vector = client.post("/v1/embeddings", json={"input": "a"}).json()["data"][0]["embedding"]
        assert len(vector) == 384
        [engine] = engines(server)
        assert "weft-cores" not in Path(f"/proc/{engine}/maps").read_text(), "one engine needs no lease"
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 400


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--reranker", DEFAULT_EMBEDDER_NAME), ("--reranker", "makes embeddings", "scores documents")),
        (("--embedder", "MODEL"), ("--embedder", "generates text", "makes embeddings")),
        ((DEFAULT_EMBEDDER_NAME, "--embedder", "default"), ("makes embeddings", "leave --embedder out")),
        (("--embedder", "default", "--name", DEFAULT_EMBEDDER_NAME), ("two models", "--name")),
        (("--embedder", "no-such-file"), ("no-such-file", "does not exist")),
    ],
)
def test_a_wrong_model_ends_the_start_with_a_reason(
    default_model_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    given = [str(default_model_path) if one == "MODEL" else one for one in arguments]
    ended = subprocess.run(
        [*COMMAND, *given], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, timeout=120
    )
    assert ended.returncode == 2
    assert all(word in ended.stderr for word in words), ended.stderr
    assert "Traceback" not in ended.stderr
