"""schemathesis in negative mode over the OpenAPI document, against the real server process. `make test-schema` runs
longer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from schema_run import run_schemathesis, schema_server
from server_process import Server

pytest.importorskip("schemathesis", reason="pip install -c constraints.txt -e '.[dev]' brings it")


@pytest.fixture
def small_server(default_model_path: Path, tmp_path: Path) -> Iterator[Server]:
    with schema_server(default_model_path, tmp_path) as server:
        yield server


def test_every_response_to_a_generated_request_is_documented(small_server: Server) -> None:
    done = run_schemathesis(small_server, "--max-examples", "30", "--seed", "1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "Tested: " in done.stdout
    assert small_server.client.get("/health").status_code == 200
    small_server.wait_until_free()
    assert small_server.complete().status_code == 200
