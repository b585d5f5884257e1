"""Servers shared by the tests: started once per session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import Server, running_server


@pytest.fixture(scope="session")
def shared_server(default_model_path: Path) -> Iterator[Server]:
    """A server on the noop backend. Tests must leave it unchanged."""
    with running_server(default_model_path) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """The shared server. After each test it must be healthy and hold nothing."""
    yield shared_server
    assert shared_server.client.get("/health").status_code == 200
    shared_server.wait_until_free()


@pytest.fixture(scope="session")
def real_server(default_model_path: Path) -> Iterator[Server]:
    options = {"checkpoint": str(default_model_path), "max_context": 2048}
    with running_server(default_model_path, backend="cpu", backend_options=options) as server:
        yield server
