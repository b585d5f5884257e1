"""Vector stores of a server that is killed while it reads files. `WEFT_MEMORY_KILLS=200` runs the long form."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import threading
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import httpx
import pytest
from memory_client import MemoryClient, document, noop_memory
from server_process import LAUNCH, Server, running_server, wait_for
from vector_models import engines

NUM_KILLS = int(os.environ.get("WEFT_MEMORY_KILLS", "10"))
_PARAGRAPHS = (1, 6, 250)
_DOCUMENTS = 8 if NUM_KILLS <= 20 else 4
"""Attached in the life of a server."""

_SMALL = {"type": "static", "static": {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 50}}
"""So that the longest documents are added in several transactions."""


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


def attach_until_dead(client: MemoryClient, store: str, seeds: list[int], known: dict[str, int]) -> None:
    """Attaches documents until there are enough, or the server dies. `known` gets those that were acknowledged."""
    try:
        for _ in range(_DOCUMENTS):
            seed = len(seeds)
            seeds.append(seed)
            _, text = document(seed, _PARAGRAPHS[seed % 3])
            known[client.attach(store, text, f"{seed}.md", chunking_strategy=_SMALL)] = seed
    except (httpx.TransportError, AssertionError):
        return


def kill_later(server: Server, state: Path, chance: random.Random) -> threading.Thread:
    """Kills the server after a random time, or as soon as a document is in part in the database."""
    waits_for_part, seconds = chance.random() < 0.5, chance.random()

    def kill() -> None:
        give_up_at = time.monotonic() + 30
        while waits_for_part and not num_partial(state) and time.monotonic() < give_up_at:
            time.sleep(0.005)
        if not waits_for_part:
            time.sleep(2 * seconds)
        server.process.send_signal(signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def num_partial(state: Path) -> int:
    """Documents that have passages and are not completed."""
    query = (
        "SELECT COUNT(DISTINCT file) FROM passages WHERE file NOT IN"
        " (SELECT number FROM vector_store_files WHERE status = 'completed')"
    )
    with closing(sqlite3.connect(state / "state.db", timeout=30)) as connection:
        return int(connection.execute(query).fetchone()[0])


def test_after_kill_9_every_acknowledged_document_is_found_and_none_in_half(
    default_model_path: Path, tmp_path: Path
) -> None:
    chance = random.Random(26)
    settings = {"state_path": str(tmp_path), "vector_models": noop_memory(seconds_per_step=0.01)}
    known: dict[str, int] = {}
    seeds: list[int] = []
    store = ""
    num_cut = 0
    for number in range(NUM_KILLS):
        with running_server(default_model_path, **settings) as server:
            client = MemoryClient(server)
            store = store or client.create(name="crash")
            killing = kill_later(server, tmp_path, chance)
            attach_until_dead(client, store, seeds, known)
            killing.join()
            server.process.wait()
        with closing(sqlite3.connect(tmp_path / "state.db")) as connection:
            query = "SELECT id, status FROM vector_store_files"
            rows = dict(connection.execute(query).fetchall())
        num_cut += num_partial(tmp_path)
        assert known.keys() <= rows.keys(), "an acknowledged document was lost"
        print(f"kill {number + 1}: {len(known)} documents, {num_cut} cut", flush=True)
    with running_server(default_model_path, **settings) as server:
        client = MemoryClient(server)
        check_whole(client, store, dict(random.Random(1).sample(sorted(known.items()), min(20, len(known)))))
        counts = client.wait(store)
        assert counts["failed"] == counts["in_progress"] == 0
        assert check_whole(client, store, known) == len(known)
        for file_id, seed in known.items():
            _, text = document(seed, _PARAGRAPHS[seed % 3])
            parts = [
                part["text"]
                for part in client.get(f"/v1/vector_stores/{store}/files/{file_id}/content")["data"]
            ]
            last = 0
            for part in parts:  # the passages cover the whole document, once
                start = text.index(part)
                assert start <= last + 2, f"a part of {file_id} is missing"
                last = start + len(part)
            assert last == len(text)
    assert len(known) >= NUM_KILLS, "the servers died before they did anything"
    assert num_cut, "no server died between two parts of a document"
    print(f"{NUM_KILLS} kills, {len(known)} documents, {num_cut} of them cut in the middle of their passages")


def test_files_wait_for_an_engine_that_starts_slowly(default_model_path: Path, tmp_path: Path) -> None:
    """The engine of the embedder waits in its start while a file exists. The server tries again at once."""
    patched, gate = tmp_path / "patch", tmp_path / "gate"
    patched.mkdir()
    (patched / "sitecustomize.py").write_text(
        f"""
import os, sys, time
command = " ".join(sys.orig_argv)
if "weft.engine.ipc.process" in command:
    while os.path.exists({str(gate)!r}):
        time.sleep(0.01)
elif {LAUNCH.name!r} in command:
    import weft.server.memory.runner as runner
    runner._RETRY_SECONDS = 0.001
""",
        encoding="utf-8",
    )
    with running_server(
        default_model_path, vector_models=noop_memory(), python_path=[str(patched)]
    ) as server:
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
    patched = tmp_path / "patch"
    patched.mkdir()
    (patched / "sitecustomize.py").write_text(
        "import weft.memory.vector_index as index\nindex.MAX_EXACT = 50\n", encoding="utf-8"
    )
    state = tmp_path / "state"
    settings = {"state_path": str(state), "vector_models": noop_memory(), "python_path": [str(patched)]}

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
        for seed in range(8):
            client.attach(store, document(seed, 60)[1], f"{seed}.md")
        client.wait(store)
        wait_for(partial(has_index, client))
        expected = [client.search(store, document(seed)[0])[0]["filename"] for seed in range(8)]
        assert expected == [f"{seed}.md" for seed in range(8)]
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
            found = [client.search(store, document(seed)[0])[0]["filename"] for seed in range(8)]
            assert found == expected
            wait_for(partial(has_index, client))
            assert [client.search(store, document(seed)[0])[0]["filename"] for seed in range(8)] == expected
            extra = client.attach(store, "word", "late.md")
            client.wait(store)
            wait_for(lambda: not (state / "indexes" / ".new-left").exists())
            client.send("DELETE", f"/v1/vector_stores/{store}/files/{extra}")
    assert list((state / "indexes").glob("*.damaged")), "the damaged file is not set aside"
