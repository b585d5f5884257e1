"""The real server and the real model that clients of other people talk to, and what of it is there to be tried."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from client_questions import QUESTION, SCHEMA, TOOL
from server_process import MODEL, Server, running_server


@pytest.fixture(scope="session")
def served(default_model_path: Path) -> Iterator[Server]:
    """The default model on the CPU, for who asks with the key "secret"."""
    options = {"checkpoint": str(default_model_path), "max_context": 2048}
    settings = {"backend": "cpu", "backend_options": options, "api_keys": ["secret"]}
    headers = {"Authorization": "Bearer secret"}
    with running_server(default_model_path, headers=headers, **settings) as server:
        yield server


@pytest.fixture(scope="session")
def base_url(served: Server) -> str:
    return f"{served.url}/v1"


@pytest.fixture(scope="session")
def model() -> str:
    return MODEL


@pytest.fixture(scope="session")
def expected(served: Server) -> str:
    """What the model says to QUESTION, asked with no client at all."""
    answer = served.chat(messages=QUESTION, temperature=0, max_tokens=12)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    assert "Paris" in text
    return text


@pytest.fixture(scope="session")
def structured(served: Server) -> None:
    """Skips where the server does not take schemas yet."""
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    _skip_where_refused(served.chat(response_format=wanted), "structured output")


@pytest.fixture(scope="session")
def tools(served: Server) -> None:
    """Skips where the server does not take tools yet."""
    _skip_where_refused(served.chat(tools=[TOOL], tool_choice="required", max_tokens=60), "tool calls")


def _skip_where_refused(answer: httpx.Response, what: str) -> None:
    if answer.status_code == 400:
        pytest.skip(f"no {what} in this server: {answer.json()['error']['message']}")
