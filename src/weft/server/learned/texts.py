"""Keeps finished answers on disk, for draft tokens after a restart: who they belong to, and their rows in the store."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from weft.engine.ipc.client import EngineClient
from weft.learned_costs import LearnedText
from weft.plan import BackendInfo
from weft.server.settings import ServerSettings
from weft.server.state import learned as table
from weft.server.state.store import Store

_MAX_OWNERS = 4096
_INDEX_BYTES_PER_BYTE = 32
"""An answer on disk takes at most this fraction of its memory in the index of the engine."""
_Content = tuple[str, LearnedText]


class AnswerTexts:
    """Belongs to one event loop. A row has one answer, with the name of its model and its cache salt. The engine finds it
    for requests with this salt only."""

    def __init__(
        self,
        settings: ServerSettings,
        store: Store,
        engine: EngineClient,
        set_aside: Callable[[Any, list[str]], None],
    ) -> None:
        self._settings = settings
        self._store = store
        self._engine = engine
        self._set_aside = set_aside
        self._max_bytes = settings.engine.scheduler.max_learned_bytes // _INDEX_BYTES_PER_BYTE
        self._owners: OrderedDict[str, str] = OrderedDict()
        """Cache salt -> the key that its answers belong to."""

    def note_owner(self, cache_salt: str, owner: str) -> None:
        self._owners[cache_salt] = owner
        self._owners.move_to_end(cache_salt)
        if len(self._owners) > _MAX_OWNERS:
            self._owners.popitem(last=False)

    def writer(self, texts: Sequence[LearnedText], info: BackendInfo) -> Callable[[Any], None]:
        """A function that writes these answers in a transaction. Deletes the oldest ones if they take too many bytes."""
        model, now = self._name_of(info), self._store.wall_clock()
        rows = []
        for text in texts:
            content = msgspec.msgpack.encode((model, text))
            name = hashlib.sha256(content).hexdigest()[:32]  # an equal answer replaces the older row
            rows.append((name, content, self._owners.get(text.cache_salt, "")))

        def write(connection: Any) -> None:
            if not self._store.is_primary:
                return
            days = self._settings.learned_text_days
            for name, content, owner in rows:
                table.put(connection, table.DRAFTS, name, content, now, owner, days)
            table.drop_bytes(connection, table.DRAFTS, self._max_bytes)

        return write

    async def read(self) -> list[_Content]:
        """The kept answers, the newest first. Damaged rows are set aside."""
        now = self._store.wall_clock()

        def read(connection: Any) -> list[_Content]:
            rows, damaged = table.read(connection, table.DRAFTS, now)
            found = []
            for row in rows:
                try:
                    found.append(msgspec.msgpack.decode(row.content, type=_Content))
                except (msgspec.MsgspecError, ValueError):
                    damaged.append(row.id)
            self._set_aside(connection, damaged)
            return found

        return await self._store.run(read)

    def restore(self, found: Sequence[_Content], info: BackendInfo) -> None:
        """Sends the answers of this model to the engine, the newest last."""
        model = self._name_of(info)
        self._engine.restore_answers([text for name, text in reversed(found) if name == model])

    def _name_of(self, info: BackendInfo) -> str:
        """Names the model whose tokens an answer has."""
        fields = (self._settings.model, self._settings.backend, info.weight_bytes, info.vocabulary_size)
        return hashlib.sha256(repr(fields).encode("utf-8", "surrogatepass")).hexdigest()[:16]
