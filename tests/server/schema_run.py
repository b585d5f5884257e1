"""Runs schemathesis in negative mode over a real server's OpenAPI document: `python schema_run.py --max-examples
1000`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memory_client import MemoryClient
from server_process import Server, running_server
from vector_models import embedder_path, noop_embedder, noop_reranker

from reranker_files import write_reranker

CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_schema_conformance", "response_headers_conformance"),
)
# A short context keeps answers short: the tests are about requests.
_OPTIONS = {"vocabulary_size": 49152, "max_context": 64}


@contextmanager
def schema_server(model_path: Path, folder: Path) -> Iterator[Server]:
    """A server with all kinds of models, and a vector store. `folder` gets the files of a reranker."""
    vector_models = [noop_embedder(embedder_path()), noop_reranker(write_reranker(folder))]
    settings = {"backend_options": _OPTIONS, "vector_models": vector_models, "feedback_days": 1}
    with running_server(model_path, **settings) as server:
        MemoryClient(server).create(name="s")
        yield server


def run_schemathesis(
    server: Server, *arguments: str, capture: bool = True
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
    command += ["--mode", "negative", "--checks", ",".join(CHECKS), "--no-color", *arguments]
    with tempfile.TemporaryDirectory() as folder:  # it writes a cache to its working directory
        return subprocess.run(command, capture_output=capture, text=True, timeout=3600, cwd=folder)


def main() -> int:
    from weft.loading.pull import pull

    with (
        tempfile.TemporaryDirectory() as folder,
        schema_server(Path(pull("default")), Path(folder)) as server,
    ):
        done = run_schemathesis(server, *sys.argv[1:], capture=False)
        server.wait_until_free()
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
