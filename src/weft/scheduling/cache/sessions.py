"""Owns which conversations are kept hot: whose cached blocks are evicted last, and until when."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from weft.scheduling.cache.block_pool import BlockKey, BlockPool

MAX_SESSIONS = 4096
"""More conversations than a cache is likely to hold. With names of at most `MAX_NAME_LENGTH` characters they take a few
megabytes."""

SessionKey = tuple[str, str]
"""Cache salt and session id: a session never reaches over salts."""


@dataclass(frozen=True, slots=True)
class _Session:
    keys: tuple[BlockKey, ...]
    expires_at: float


class Sessions:
    """Between two turns of a conversation nobody refers to its blocks. While its session lives, they are evicted only
    when nothing else is left: a session costs no running request its memory, and other caches no longer than its life.
    """

    def __init__(
        self, pool: BlockPool, lifetime: float, store: BlockPool | None = None, tail_blocks: int = 0
    ) -> None:
        self._pool = pool
        self._store = store
        self._lifetime = lifetime
        self._tail_blocks = tail_blocks
        self._sessions: OrderedDict[SessionKey, _Session] = OrderedDict()
        """In the order they expire: all live equally long."""
        self._num_keys = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def keep(self, session: SessionKey, keys: Sequence[BlockKey], now: float) -> None:
        """A turn is over whose blocks have these keys: they are hot from now on, those of the turn before it only if they
        are among them."""
        kept = _Session(tuple(keys), now + self._lifetime)
        for pool, hot in self._by_pool(kept.keys):
            for key in hot:
                pool.heat(key)
        self._drop(session)
        if not kept.keys:
            return
        self._sessions[session] = kept
        self._num_keys += len(kept.keys)
        # More keys than there are blocks can never all be cached: a flood of sessions must not fill the memory.
        while self._num_keys > self._most_keys or len(self._sessions) > MAX_SESSIONS:
            self._drop(next(iter(self._sessions)))

    def expire(self, now: float) -> None:
        """Lets go of sessions whose last turn is too long ago."""
        while self._sessions:
            session, oldest = next(iter(self._sessions.items()))
            if oldest.expires_at > now:
                return
            self._drop(session)

    def check_integrity(self) -> None:
        for pool in (self._pool, self._store):
            heat: Counter[BlockKey] = Counter()
            for session in self._sessions.values():
                for other, hot in self._by_pool(session.keys):
                    heat.update(hot if other is pool else ())
            assert pool is None or heat == pool.heat_of_keys, "sessions and the heat of keys disagree"
        num_keys = sum(len(session.keys) for session in self._sessions.values())
        assert self._num_keys == num_keys <= self._most_keys, "keys of sessions are miscounted"
        assert len(self._sessions) <= MAX_SESSIONS, "more sessions are kept than allowed"

    @property
    def _most_keys(self) -> int:
        return (self._store or self._pool).num_blocks

    def _by_pool(self, keys: Sequence[BlockKey]) -> list[tuple[BlockPool, Sequence[BlockKey]]]:
        """Which keys are kept hot where. The next turn reads all from the store, and the last of them in full."""
        if self._store is None:
            return [(self._pool, keys)]
        return [(self._store, keys), (self._pool, keys[-self._tail_blocks - 1 :])]

    def _drop(self, session: SessionKey) -> None:
        dropped = self._sessions.pop(session, None)
        if dropped is not None:
            self._num_keys -= len(dropped.keys)
            for pool, hot in self._by_pool(dropped.keys):
                for key in hot:
                    pool.cool(key)
