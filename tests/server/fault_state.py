"""Damages the files of a server's state between two starts: the index of a vector store, and the database.

Each time the server was killed. Then it starts, is healthy, and sets damaged files aside. Searches find the same passages
after damage of an index. What a damaged database had is found whole or not at all, and new things can be stored.
"""

from __future__ import annotations

import random
import signal
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from memory_client import MemoryClient, document, noop_memory
from server_process import Server, running_server, wait_for

from weft.loading.pull import pull

DAMAGES = tuple((kind, how) for kind in ("index", "state") for how in ("flip", "cut"))
_DOCUMENTS = 4
_SMALL_LIMIT = "import weft.memory.vector_index as index; index.MAX_EXACT = 50"
"""Lowers the limit for exact search, so that a small store has an index file."""


@dataclass
class Content:
    """What one server stored: a vector store, passages of it, and a response."""

    store: str
    passages: list[str]
    response: str
    text: str


@dataclass
class StateFaults:
    seed: int
    work: Path
    violations: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._source = random.Random(f"state {self.seed}")
        self._state = self.work / "state"
        (self.work / "patch").mkdir()
        (self.work / "patch" / "sitecustomize.py").write_text(_SMALL_LIMIT)

    def run(self) -> None:
        damages = [*DAMAGES]
        self._source.shuffle(damages)
        with self._server() as server:
            content = self._fill(server)
        for kind, how in damages:
            before = self._set_aside(kind)
            self._damage(kind, how)
            with self._server() as server:
                name = f"{kind}, {how}"
                for path in ("/health", "/ready"):
                    self._check(server.client.get(path).status_code == 200, f"{name}: {path} is not 200")
                if kind == "index":
                    self._check(self._is_found(server, content), f"{name}: a passage is not found")
                else:
                    self._check_stored(server, content, name)
                    content = self._fill(server)
                self._check(server.client.get("/health").status_code == 200, f"{name}: not healthy")
            self._check(bool(self._set_aside(kind) - before), f"{name}: nothing was set aside")

    @contextmanager
    def _server(self) -> Iterator[Server]:
        """A server that is killed at the end."""
        settings: dict[str, Any] = {
            "state_path": str(self._state),
            "vector_models": noop_memory(),
            "python_path": [str(self.work / "patch")],
        }
        with running_server(pull("default"), **settings) as server:
            yield server
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()

    def _fill(self, server: Server) -> Content:
        client = MemoryClient(server)
        store = client.create()
        files = [client.attach(store, document(seed, 60)[1], f"{seed}.md") for seed in range(_DOCUMENTS)]
        client.wait(store)
        wait_for(partial(self._has_index, client, store))
        path = f"/v1/vector_stores/{store}/files/{{}}/content"
        passages = [one["text"] for file in files for one in client.get(path.format(file))["data"][::10]]
        response = client.send("POST", "/v1/responses", {"input": "x", "max_output_tokens": 8}).json()
        content = Content(store, passages, response["id"], str(response["output"]))
        self._check(self._is_found(server, content), "a passage is not found before any damage")
        return content

    def _is_found(self, server: Server, content: Content) -> bool:
        client = MemoryClient(server)
        return [client.nearest(content.store, one) for one in content.passages] == content.passages

    def _check_stored(self, server: Server, content: Content, name: str) -> None:
        """What the damaged database had is found whole, or is not there."""
        paths: dict[str, Callable[[Any], bool]] = {
            f"/v1/responses/{content.response}": lambda found: str(found["output"]) == content.text,
            f"/v1/vector_stores/{content.store}": lambda found: found["id"] == content.store,
        }
        for path, is_whole in paths.items():
            response = server.client.get(path)
            is_right = response.status_code == 404 or (
                response.status_code == 200 and is_whole(response.json())
            )
            self._check(is_right, f"{name}: {path} answered {response.status_code}: {response.text:.200}")

    def _has_index(self, client: MemoryClient, store: str) -> bool:
        client.search(store, "river")
        return any(path.exists() for path in self._index_files())

    def _index_files(self) -> list[Path]:
        with closing(sqlite3.connect(self._state / "state.db", timeout=30)) as connection:
            names = connection.execute("SELECT index_file FROM vector_stores WHERE index_file IS NOT NULL")
            return [self._state / "indexes" / name for (name,) in names]

    def _set_aside(self, kind: str) -> set[tuple[str, int]]:
        """The files that were set aside. A later one may have the name of an earlier one, but not its inode."""
        pattern = "indexes/*.damaged" if kind == "index" else "state.db.damaged-*"
        return {(path.name, path.stat().st_ino) for path in self._state.glob(pattern)}

    def _damage(self, kind: str, how: str) -> None:
        """A database is damaged in its first bytes, so that the damage is found whatever is read. Its log of writes is
        merged before: the killed server left it, and it has the first page too."""
        with closing(sqlite3.connect(self._state / "state.db", timeout=30)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        paths = self._index_files() if kind == "index" else [self._state / "state.db"]
        for path in paths:
            content = bytearray(path.read_bytes())
            if how == "cut":
                del content[self._source.randrange(100, max(101, len(content) // 2)) :]
            elif kind == "index":
                for _ in range(64):
                    content[self._source.randrange(len(content))] ^= 1 << self._source.randrange(8)
            else:
                content[self._source.randrange(16)] ^= 1 << self._source.randrange(8)
            path.write_bytes(content)

    def _check(self, is_right: bool, violation: str) -> None:
        if not is_right:
            self.violations.append(f"state: {violation}")


def run_state_faults(seed: int) -> list[str]:
    """The violations of one run."""
    with tempfile.TemporaryDirectory(prefix="weft-state-faults-") as work:
        faults = StateFaults(seed, Path(work))
        try:
            faults.run()
        except AssertionError as error:
            faults.violations.append(f"state: {error}")
        return faults.violations
