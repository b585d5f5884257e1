"""Which errors end the reading of an attached file, and which are waited for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from weft.errors import WeftError
from weft.server.errors import ApiError
from weft.server.memory import ingest_runner as runner_module
from weft.server.memory.indexes import StoreIndexes
from weft.server.memory.ingest_runner import IngestRunner
from weft.server.state import vector_stores
from weft.server.state.store import Store
from weft.server.state.vector_stores import AttachedFile, FileDetails, StoreDetails

NOT_READY = ApiError(503, "the engine is starting", code="engine_not_ready")
DIED = WeftError("the engine's process died")


class Ingest:
    """Raises one error after the other, then completes the file."""

    def __init__(self, store: Store, errors: list[Exception]) -> None:
        self._store = store
        self._errors = errors

    async def run(self, owner: str, file: AttachedFile) -> int:
        if self._errors:
            raise self._errors.pop(0)
        await self._store.run(lambda connection: vector_stores.finish(connection, file.number, "completed"))
        return 1


def read_with(folder: Path, errors: list[Exception]) -> AttachedFile:
    """The row of a file at its end."""

    async def read() -> AttachedFile:
        store = Store(folder, lambda *_: None)

        def attach(connection: Any) -> vector_stores.VectorStore:
            made = vector_stores.add(connection, "vs_1", "", store.wall_clock(), "", "m", 4, StoreDetails())
            vector_stores.attach(connection, made, [("file-1", "a.txt", FileDetails())], store.wall_clock())
            return made

        made = await store.run(attach)
        indexes = StoreIndexes(store, lambda *_, **__: None, 1)
        ingest: Any = Ingest(store, errors)
        runner = IngestRunner(store, indexes, lambda: ingest, lambda *_, **__: None, lambda: False)
        running = asyncio.create_task(runner.run())
        try:
            async with asyncio.timeout(60):
                while True:
                    file = await store.run(
                        lambda connection: vector_stores.find_file(connection, made.number, "file-1")
                    )
                    assert file is not None
                    if file.status != "in_progress":
                        return file
        finally:
            running.cancel()
            await asyncio.wait([running])
            await store.close()

    return asyncio.run(read())


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "_RETRY_SECONDS", 0.0)


def test_the_time_until_the_engine_is_ready_does_not_count(tmp_path: Path) -> None:
    assert read_with(tmp_path, [DIED, *[NOT_READY] * 50, DIED, DIED, DIED]).status == "completed"


def test_a_file_that_ends_the_engine_each_time_fails(tmp_path: Path) -> None:
    file = read_with(tmp_path, [DIED, NOT_READY] * 50)
    assert file.status == "failed" and file.details.error is not None
    assert "5 tries" in file.details.error.message


def test_a_file_with_which_a_mistake_comes_each_time_fails_without_the_words_of_the_exception(
    tmp_path: Path,
) -> None:
    assert read_with(tmp_path / "a", [KeyError("words of the file")] * 4).status == "completed"
    file = read_with(tmp_path / "b", [KeyError("words of the file")] * 50)
    assert file.status == "failed" and file.details.error is not None
    assert file.details.error.message == "5 tries failed: a mistake (KeyError)"
