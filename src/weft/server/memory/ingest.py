"""Ingests one attached file: reads it, embeds its passages, and adds them to the database in pieces."""

from __future__ import annotations

from typing import Any

from weft.errors import InvalidRequestError
from weft.memory.documents import ChunkSize, DocumentError, Passage
from weft.server.errors import ApiError
from weft.server.memory.reader import DocumentReader
from weft.server.state import passages as passage_rows
from weft.server.state import vector_stores as rows
from weft.server.state.files import FileStore
from weft.server.state.store import Store, StoreFullError
from weft.server.state.vector_stores import AttachedFile, FileError, VectorStore
from weft.server.vectors.interface import Embedder
from weft.vectors import Vectors, np

_PIECE = 128
"""Passages that one transaction writes, and that one call of the model gets."""
_ROW_BYTES = 200
"""Estimated size of a passage in the database, without its text and vector."""


class Ingest:
    def __init__(self, store: Store, files: FileStore, reader: DocumentReader, embedder: Embedder) -> None:
        self._store = store
        self._files = files
        self._reader = reader
        self._embedder = embedder

    async def run(self, owner: str, file: AttachedFile) -> int:
        """Afterwards the file is completed or failed, unless it was removed before. Returns the number of passages that
        were added. Every exception that this raises means that the file should be tried again."""
        try:
            return await self._add(owner, file)
        except DocumentError as error:
            await self._fail(file, FileError(error.code, str(error)))
        except StoreFullError as error:
            await self._fail(file, FileError("server_error", str(error)))
        except InvalidRequestError as error:  # the model cannot take one of the texts
            await self._fail(file, FileError("invalid_file", str(error)))
        except ApiError as error:
            if error.status != 400:
                raise
            await self._fail(file, FileError("invalid_file", error.message))
        return 0

    async def _add(self, owner: str, file: AttachedFile) -> int:
        """Embeds the passages of a file, and adds them. Returns how many; 0 if the file or its store was removed."""
        now = self._store.wall_clock()
        store = await self._store.run(lambda connection: rows.by_number(connection, file.store, now))
        if store is None:
            return 0
        if (store.model, store.dimensions) != (self._embedder.name, self._embedder.spec.dimensions):
            raise DocumentError(other_model(store, self._embedder), "server_error")
        self._embedder.check_ready()  # raises before the document is read: reading costs much processor time
        while await self._store.run(
            lambda connection: passage_rows.remove_unfinished(connection, file.store, file.number)
        ):
            pass
        size = file.details.chunk_size or store.details.chunk_size or ChunkSize()
        path = self._files.path(file.id)
        passages = await self._reader.passages(path, file.name, size, self._embedder)
        num_bytes = 0
        for start in range(0, len(passages), _PIECE):
            piece = passages[start : start + _PIECE]
            vectors = unit(
                await self._embedder.embed(
                    [one.searched_text for one in piece],
                    "document",
                    request_id=self._embedder.new_id(),
                    client_id=owner,
                    is_idle_work=True,
                )
            )
            size_of_piece = sum(len(one.text.encode()) for one in piece) + vectors.size * 2
            if not await self._add_piece(file, piece, vectors, size_of_piece):
                return 0
            num_bytes += size_of_piece
        await self._store.run(
            lambda connection: rows.finish(
                connection, file.number, "completed", num_bytes=num_bytes, num_passages=len(passages)
            )
        )
        return len(passages)

    async def _add_piece(self, file: AttachedFile, piece: list[Passage], vectors: Vectors, size: int) -> bool:
        """Returns False if the file was removed or cancelled."""

        def add(connection: Any) -> bool:
            found = rows.file_by_number(connection, file.number)
            if found is None or found.status != "in_progress":
                return False
            self._files.check_space(connection, size + _ROW_BYTES * len(piece))
            passage_rows.add(connection, file.store, file.number, piece, vectors)
            return True

        return await self._store.run(add)

    async def _fail(self, file: AttachedFile, error: FileError) -> None:
        await self._store.run(lambda connection: rows.finish(connection, file.number, "failed", error=error))


def unit(vectors: Vectors) -> Vectors:
    """Scales vectors to length 1, so that the nearest ones have the largest dot products."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-12), np.float32)


def other_model(store: VectorStore, embedder: Embedder) -> str:
    return (
        f"the vectors of {store.id} were made by {store.model!r:.80} ({store.dimensions} numbers each), and this server "
        f"has {embedder.name!r:.80} ({embedder.spec.dimensions}); use the same embedding model, or make a new store"
    )
