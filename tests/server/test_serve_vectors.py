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
import pytest
from server_process import SOURCE

from reranker_files import write_reranker
from weft.loading.default_model import DEFAULT_EMBEDDER_NAME

COMMAND = (sys.executable, "-m", "weft.cli.main", "serve", "--port", "0")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE)}


@contextmanager
def serving(*arguments: str, folder: Path) -> Iterator[tuple[httpx.Client, dict[str, Any]]]:
    """A client of the server, and the event of its start."""
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
            yield client, event
    finally:
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        assert process.wait(60) == 0


def test_three_models_are_served_by_three_engines(tmp_path: Path) -> None:
    reranker = write_reranker(tmp_path / "small-reranker")
    arguments = ("--embedder", "default", "--reranker", str(reranker), "--memory", "64MiB", "--name", "chat")
    with serving(*arguments, folder=tmp_path) as (client, event):
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


def test_an_embedding_model_is_served_alone(tmp_path: Path) -> None:
    with serving(DEFAULT_EMBEDDER_NAME, folder=tmp_path) as (client, event):
        assert event["model"] == DEFAULT_EMBEDDER_NAME and event["weight_bytes"] > 0
        vector = client.post("/v1/embeddings", json={"input": "a"}).json()["data"][0]["embedding"]
        assert len(vector) == 384
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
