"""Vector stores of a server that is killed while it reads and removes files, changes attributes and merges indexes.
`WEFT_MEMORY_KILLS=200` runs the long form, `WEFT_MEMORY_SEED` changes the moments of the kills.

Documents are found by their words, and by the vectors of their passages: the noop engine makes the same vector of the same
text, and others of all other texts.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import threading
import time
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from memory_client import MemoryClient, document, noop_memory
from server_process import Server, running_server, wait_for
from vector_models import engines

NUM_KILLS = int(os.environ.get("WEFT_MEMORY_KILLS", "10"))
SEED = int(os.environ.get("WEFT_MEMORY_SEED", "26"))
HAS_INDEX = find_spec("usearch") is not None
_PARAGRAPHS = (1, 6, 250)
_DOCUMENTS = 8 if NUM_KILLS <= 20 else 4
"""Attached in the life of a server."""

_AIMS = ("", "part", "", "merge")
"""Half of the kills come after a random time, a quarter when a document is in part in the database, a quarter when a new
index file is there."""
_SMALL = {"type": "static", "static": {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 50}}
"""So that the longest documents are added in several transactions."""


_SLOW_MERGES = """
import sys, time
if "launch.py" in " ".join(sys.orig_argv):
    import weft.memory.index_file as file, weft.memory.vector_index as index
    index.MAX_EXACT = 50
    file._EXPANSION_SEARCH = 1024
    hash_of = file._hash
    file._hash = lambda path: (time.sleep(0.05), hash_of(path))[1]
"""


@dataclass
class Acknowledged:
    """What the server has confirmed. Each change has at most one request without an answer: the last one."""

    num_made: int = 0
    known: dict[str, int] = field(default_factory=dict)
    """The id of each document in the store -> its seed."""
    removed: dict[str, int] = field(default_factory=dict)
    removing: str | None = None
    """A document whose removal was sent."""
    versions: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The id of a document -> the values that its attribute may have: the last confirmed one, and one that was sent."""

    def change(self, client: MemoryClient, store: str, file_id: str, version: int) -> None:
        """Sets an attribute of a document. The document may still be read."""
        self.versions[file_id] = (*self.versions.get(file_id, (0,))[-1:], version)
        path = f"/v1/vector_stores/{store}/files/{file_id}"
        assert client.send("POST", path, {"attributes": {"version": version}}).status_code == 200
        self.versions[file_id] = (version,)

    def remove(self, client: MemoryClient, store: str, file_id: str) -> None:
        self.removing = file_id
        assert client.send("DELETE", f"/v1/vector_stores/{store}/files/{file_id}").status_code == 200
        self._gone(file_id)

    def _gone(self, file_id: str) -> None:
        self.removed[file_id] = self.known.pop(file_id)
        self.removing = None

    def check(self, rows: dict[str, int]) -> None:
        """Compares with the rows of the database after a kill: the id of each document, and its attribute."""
        if self.removing is not None and self.removing not in rows:
            self._gone(self.removing)
        self.removing = None
        assert self.known.keys() <= rows.keys(), "an acknowledged document was lost"
        assert not self.removed.keys() & rows.keys(), "a removed document is there again"
        for file_id in self.known:
            allowed = self.versions.get(file_id, (0,))
            assert rows[file_id] in allowed, (rows[file_id], allowed)
            self.versions[file_id] = (rows[file_id],)


def check_whole(client: MemoryClient, store: str, known: dict[str, int]) -> int:
    """Each document is found with all its paragraphs, or not at all: then it is not completed. Returns how many are."""
    num_found = 0
    for file_id, seed in known.items():
        name, text = document(seed, _PARAGRAPHS[seed % 3])
        before = client.file(store, file_id)["status"]
        found = [part["content"][0]["text"] for part in client.named(store, name)]
        after = client.file(store, file_id)["status"]
        assert before in ("in_progress", "completed"), client.file(store, file_id)
        if before == "completed":
            assert found, f"{file_id} is completed and has no passage"
        if after == "in_progress":
            assert not found, f"{file_id} is not completed, and a part of it is found"
        assert all(one in text for one in found)
        num_found += bool(found)
    return num_found


def passages(client: MemoryClient, store: str, file_id: str) -> list[str]:
    return [part["text"] for part in client.get(f"/v1/vector_stores/{store}/files/{file_id}/content")["data"]]


def change_until_dead(client: MemoryClient, store: str, state: Acknowledged) -> None:
    """Attaches documents, changes an attribute of some and removes others, and searches, until there are enough or the
    server dies."""
    try:
        for _ in range(_DOCUMENTS):
            seed = state.num_made
            state.num_made += 1
            _, text = document(seed, _PARAGRAPHS[seed % 3])
            state.known[client.attach(store, text, f"{seed}.md", chunking_strategy=_SMALL)] = seed
            client.nearest(store, "river")
            if seed % 2:
                for file_id in sorted(state.known)[:2]:
                    state.change(client, store, file_id, seed)
            if seed % 4 == 3:
                state.remove(client, store, min(state.known))
        while client.http.get("/health").status_code:
            client.nearest(store, "river")
    except (httpx.TransportError, AssertionError):
        return


def kill_later(server: Server, state: Path, aim: str, seconds: float) -> threading.Thread:
    """Kills the server after a time, or as soon as what it aims at is there."""
    before = index_files(state)

    def is_there() -> bool:
        return num_partial(state) > 0 if aim == "part" else bool(index_files(state) - before)

    def kill() -> None:
        give_up_at = time.monotonic() + (30 if aim else seconds)
        while time.monotonic() < give_up_at and not (aim and is_there()):
            time.sleep(0.005)
        server.process.send_signal(signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def index_files(state: Path) -> set[tuple[str, int]]:
    """The name and the inode of each file of an index."""
    try:
        return {(entry.name, entry.inode()) for entry in os.scandir(state / "indexes")}
    except FileNotFoundError:
        return set()


def unnamed_files(state: Path) -> set[str]:
    """Index files that no vector store names: a merge was killed."""
    with closing(sqlite3.connect(state / "state.db", timeout=30)) as connection:
        named = {name for (name,) in connection.execute("SELECT index_file FROM vector_stores")}
    return {name for name, _ in index_files(state)} - named


def num_partial(state: Path) -> int:
    """Documents that have passages and are not completed."""
    query = (
        "SELECT COUNT(DISTINCT file) FROM passages WHERE file IN"
        " (SELECT number FROM vector_store_files WHERE status = 'in_progress')"
    )
    with closing(sqlite3.connect(state / "state.db", timeout=30)) as connection:
        return int(connection.execute(query).fetchone()[0])


def patched(folder: Path, text: str) -> list[str]:
    """The setting `python_path` of a server whose processes execute `text` first."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
    return [str(folder)]


def test_after_kill_9_every_acknowledged_change_holds_and_no_document_is_found_in_half(
    default_model_path: Path, tmp_path: Path
) -> None:
    """The limit for exact search is lowered, so that kills meet merges, which take longer. Search follows more candidates
    than usual: an approximate search may miss a passage."""
    chance = random.Random(SEED)
    state = tmp_path / "state"
    settings = {
        "state_path": str(state),
        "vector_models": noop_memory(seconds_per_step=0.01),
        "python_path": patched(tmp_path / "patch", _SLOW_MERGES),
    }
    acknowledged = Acknowledged()
    known = acknowledged.known
    store = ""
    num_cut = num_merges_cut = 0
    for number in range(NUM_KILLS):
        with running_server(default_model_path, **settings) as server:
            client = MemoryClient(server)
            store = store or client.create(name="crash")
            killing = kill_later(server, state, _AIMS[number % len(_AIMS)], 2 * chance.random())
            change_until_dead(client, store, acknowledged)
            killing.join()
            server.process.wait()
        with closing(sqlite3.connect(state / "state.db")) as connection:
            rows = dict(connection.execute("SELECT id, details FROM vector_store_files").fetchall())
        num_cut += num_partial(state)
        num_merges_cut += bool(unnamed_files(state))
        attributes = {file_id: json.loads(details).get("attributes", {}) for file_id, details in rows.items()}
        acknowledged.check({file_id: found.get("version", 0) for file_id, found in attributes.items()})
        print(
            f"kill {number + 1}: {len(known)} documents, {len(acknowledged.removed)} removed, {num_cut} cut, "
            f"{num_merges_cut} merges",
            flush=True,
        )
    with running_server(default_model_path, **settings) as server:
        client = MemoryClient(server)
        wait_for(lambda: not unnamed_files(state))
        check_whole(client, store, dict(random.Random(1).sample(sorted(known.items()), min(20, len(known)))))
        counts = client.wait(store)
        assert counts["failed"] == counts["in_progress"] == 0
        assert check_whole(client, store, known) == len(known)
        for file_id, seed in known.items():
            _, text = document(seed, _PARAGRAPHS[seed % 3])
            parts = passages(client, store, file_id)
            for part in {parts[0], parts[len(parts) // 2], parts[-1]}:
                assert client.nearest(store, part) == part, "a passage is not found by its vector"
            last = 0
            for part in parts:  # the passages cover the whole document, once
                start = text.index(part)
                assert start <= last + 2, f"a part of {file_id} is missing"
                last = start + len(part)
            assert last == len(text)
            found = client.file(store, file_id)["attributes"].get("version", 0)
            assert (found,) == acknowledged.versions[file_id]
            chosen = {"type": "eq", "key": "version", "value": found}
            if found:
                assert client.search(store, document(seed)[0], filters=chosen)[0]["file_id"] == file_id
        for file_id, seed in acknowledged.removed.items():
            assert not client.named(store, document(seed)[0]), "a removed document is found"
            path = f"/v1/vector_stores/{store}/files/{file_id}"
            assert client.send("GET", path).status_code == 404
    assert not list((state / "indexes").glob("*.damaged")), "a kill left a damaged index"
    assert len(known) >= NUM_KILLS, "the servers died before they did anything"
    assert acknowledged.removed and any(each != (0,) for each in acknowledged.versions.values())
    assert num_cut, "no server died between two parts of a document"
    assert num_merges_cut or not HAS_INDEX, "no server died while it merged an index"
    print(
        f"{NUM_KILLS} kills, {len(known)} documents, {len(acknowledged.removed)} removed, {num_cut} cut in the middle of "
        f"their passages, {num_merges_cut} merges cut"
    )


def test_files_wait_for_an_engine_that_starts_slowly(default_model_path: Path, tmp_path: Path) -> None:
    """The engine of the embedder waits in its start while a file exists. The server tries again at once."""
    gate = tmp_path / "gate"
    path = patched(
        tmp_path / "patch",
        f"""
import os, sys, time
command = " ".join(sys.orig_argv)
if "weft.engine.ipc.process" in command:
    while os.path.exists({str(gate)!r}):
        time.sleep(0.01)
elif "launch.py" in command:
    import weft.server.memory.ingest_runner as runner
    runner._RETRY_SECONDS = 0.001
""",
    )
    with running_server(default_model_path, vector_models=noop_memory(), python_path=path) as server:
        client = MemoryClient(server)
        store = client.create()
        client.attach(store, document(0)[1], "0.md")
        client.wait(store)
        gate.touch()
        os.kill(engines(server)[1], signal.SIGKILL)
        wait_for(
            lambda: (
                client.send("POST", f"/v1/vector_stores/{store}/search", {"query": "a"}).status_code == 503
            )
        )
        file_id = client.attach(store, document(1)[1], "1.md")
        time.sleep(1)  # hundreds of tries
        assert client.file(store, file_id)["status"] == "in_progress"
        gate.unlink()
        assert client.wait(store)["completed"] == 2
        assert client.named(store, document(1)[0])


def test_a_damaged_or_missing_index_is_made_again(default_model_path: Path, tmp_path: Path) -> None:
    """The limit for exact search is lowered, so that a small store has an index file."""
    pytest.importorskip("usearch")
    state = tmp_path / "state"
    limit = "import weft.memory.vector_index as index; index.MAX_EXACT = 50"
    settings = {
        "state_path": str(state),
        "vector_models": noop_memory(),
        "python_path": patched(tmp_path / "patch", limit),
    }

    def index_file() -> Path | None:
        with closing(sqlite3.connect(state / "state.db")) as connection:
            [name] = connection.execute("SELECT index_file FROM vector_stores").fetchone()
        return None if name is None else state / "indexes" / name

    def has_index(client: MemoryClient) -> bool:
        client.search(store, "river")
        path = index_file()
        return path is not None and path.exists()

    with running_server(default_model_path, **settings) as server:
        client = MemoryClient(server)
        store = client.create()
        files = [client.attach(store, document(seed, 60)[1], f"{seed}.md") for seed in range(8)]
        client.wait(store)
        wait_for(lambda: index_file() is not None)  # without a search
        expected = [part for file_id in files for part in passages(client, store, file_id)[::5]]
        assert [client.nearest(store, part) for part in expected] == expected
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    for damage in ("flip", "cut", "remove"):
        path = index_file()
        assert path is not None
        content = bytearray(path.read_bytes())
        content[len(content) // 3] ^= 255
        if damage == "remove":
            path.unlink()
        else:
            path.write_bytes(content if damage == "flip" else content[: len(content) // 2])
        (state / "indexes" / ".new-left").write_bytes(b"left by a crash")
        with running_server(default_model_path, **settings) as server:
            client = MemoryClient(server)
            assert [client.nearest(store, part) for part in expected] == expected
            wait_for(partial(has_index, client))
            assert [client.nearest(store, part) for part in expected] == expected
            extra = client.attach(store, "word", "late.md")
            client.wait(store)
            assert client.nearest(store, "word") == "word"
            wait_for(lambda: not (state / "indexes" / ".new-left").exists())
            client.send("DELETE", f"/v1/vector_stores/{store}/files/{extra}")
    assert (state / "indexes" / "last.damaged").exists(), "the damaged file is not set aside"
