"""The servers that tests share: started once, ended with the session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import Server, running_server


@pytest.fixture(scope="session")
def shared_server(default_model_path: Path) -> Iterator[Server]:
    """The noop backend; whoever uses it leaves it as it was."""
    with running_server(default_model_path) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """After each test: healthy, and nothing left behind."""
    yield shared_server
    assert shared_server.client.get("/health").status_code == 200
    shared_server.wait_until_free()


@pytest.fixture(scope="session")
def real_server(default_model_path: Path) -> Iterator[Server]:
    options = {"checkpoint": str(default_model_path), "max_context": 2048}
    with running_server(default_model_path, backend="cpu", backend_options=options) as server:
        yield server
