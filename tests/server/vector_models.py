"""Models that make vectors and scores, for tests of the server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from server_process import Server, running_server

from reranker_files import write_reranker
from weft.loading.default_model import DEFAULT_EMBEDDER_NAME
from weft.loading.pull import pull

EMBEDDER, RERANKER = DEFAULT_EMBEDDER_NAME, "small-reranker"
DIMENSIONS, MAX_TOKENS = 384, 256


def embedder_path() -> Path:
    return pull(EMBEDDER)


def embedder(**options: Any) -> dict[str, Any]:
    """The default embedder as a setting of `running_server`."""
    spec = {"kind": "embed", "pooling": "mean", "dimensions": DIMENSIONS, "max_tokens": MAX_TOKENS}
    path = str(embedder_path())
    return _setting(spec, path, EMBEDDER, "embedder", {"checkpoint": path, "threads": 2, **options})


@contextmanager
def embedder_server() -> Iterator[Server]:
    """A server of the default embedder alone."""
    one = embedder()
    settings = {"spec": one["spec"], "backend": one["backend"], "backend_options": one["backend_options"]}
    with running_server(embedder_path(), names=[EMBEDDER], **settings) as server:
        yield server


def reranker(folder: Path) -> dict[str, Any]:
    spec = {
        **{"kind": "rerank", "pooling": "cls", "dimensions": 1, "max_tokens": 2 * MAX_TOKENS},
        **{"normalise": False, "activation": "sigmoid"},
    }
    path = str(write_reranker(folder))
    return _setting(spec, path, RERANKER, "embedder", {"checkpoint": path, "threads": 1})


def noop_embedder(path: Path, *, max_tokens: int = 64, dimensions: int = 8, **options: Any) -> dict[str, Any]:
    """An embedder without weights, with the tokenizer of the model at `path`."""
    spec = {"kind": "embed", "pooling": "mean", "dimensions": dimensions, "max_tokens": max_tokens}
    sizes = {"vocabulary_size": 30522, "max_context": max_tokens + 1, "vector_size": dimensions}
    return _setting(spec, str(path), "noop-embedder", "noop", {**sizes, **options})


def noop_reranker(path: Path) -> dict[str, Any]:
    """A reranker without weights. Its scores are from -1 to 1."""
    one = noop_embedder(path, dimensions=1)
    return {**one, "spec": {**one["spec"], "kind": "rerank"}, "names": ["noop-reranker"]}


def engines(server: Server) -> list[int]:
    """The process ids of the engines in the order of their start: that of the model that generates is the first."""
    found = []
    for pid in server.children():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if b"weft.engine.ipc.process" in command:
            found.append(
                (int(fields[19]), pid)
            )  # clock ticks from boot to start; process ids start again at 300
    return [pid for _, pid in sorted(found)]


def _setting(
    spec: dict[str, Any], path: str, name: str, backend: str, options: dict[str, Any]
) -> dict[str, Any]:
    return {"spec": spec, "path": path, "names": [name], "backend": backend, "backend_options": options}
