"""The real server with the real model, for tests of third-party clients."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from client_questions import QUESTION
from server_process import MODEL, Server, api_key, running_server
from vector_models import embedder, reranker


@pytest.fixture(scope="session")
def served(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The default model on the CPU, the default embedder, and a small random reranker. The key "once" allows one request per minute."""
    options = {"checkpoint": str(default_model_path), "max_context": 2048}
    keys = [api_key("secret"), api_key("once", requests_per_minute=1)]
    settings = {"backend": "cpu", "backend_options": options, "api_keys": keys}
    models = [embedder(), reranker(tmp_path_factory.mktemp("models") / "reranker")]
    headers = {"Authorization": "Bearer secret"}
    with running_server(default_model_path, headers=headers, vector_models=models, **settings) as server:
        yield server


@pytest.fixture(scope="session")
def base_url(served: Server) -> str:
    return f"{served.url}/v1"


@pytest.fixture(scope="session")
def model() -> str:
    return MODEL


@pytest.fixture(scope="session")
def expected(served: Server) -> str:
    """The answer to QUESTION, requested without a client library."""
    answer = served.chat(messages=QUESTION, temperature=0, max_tokens=12)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    assert "Paris" in text
    return text
