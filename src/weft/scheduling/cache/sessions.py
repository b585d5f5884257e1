"""Owns the sessions: conversations whose cached KV blocks are evicted last, until they expire."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from weft.scheduling.cache.block_pool import BlockHash, BlockPool

MAX_SESSIONS = 4096
"""The maximum number of sessions: more conversations than a cache is likely to hold. With ids of at most
`MAX_NAME_LENGTH` characters they take a few megabytes."""

ScopedSession = tuple[str, str]
"""(cache salt, session id): equal ids under different salts are different sessions."""


@dataclass(frozen=True, slots=True)
class _Session:
    hashes: tuple[BlockHash, ...]
    expires_at: float


class Sessions:
    """Keeps the blocks of a conversation in the cache between two requests, when no sequence references them. Until the
    session expires, they are evicted only if no other cached block is left. They are not reserved: running requests can
    still evict them.
    """

    def __init__(
        self, pool: BlockPool, lifetime: float, store: BlockPool | None = None, tail_blocks: int = 0
    ) -> None:
        self._pool = pool
        self._store = store
        self._lifetime = lifetime
        self._tail_blocks = tail_blocks
        self._sessions: OrderedDict[ScopedSession, _Session] = OrderedDict()
        """The sessions, in order of expiry: all have the same lifetime."""
        self._num_hashes = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def keep(self, session: ScopedSession, hashes: Sequence[BlockHash], now: float) -> None:
        """Marks the blocks of a session's latest request as hot, and unmarks those of its previous request."""
        kept = _Session(tuple(hashes), now + self._lifetime)
        for pool, hot in self._by_pool(kept.hashes):
            for block_hash in hot:
                pool.mark_hot(block_hash)
        self._drop(session)
        if not kept.hashes:
            return
        self._sessions[session] = kept
        self._num_hashes += len(kept.hashes)
        # Keeps no more hashes than there are blocks, since no more can be cached. Many sessions must not fill the
        # host's memory.
        while self._num_hashes > self._max_hashes or len(self._sessions) > MAX_SESSIONS:
            self._drop(next(iter(self._sessions)))

    def expire(self, now: float) -> None:
        """Drops the sessions whose last request is older than the lifetime."""
        while self._sessions:
            session, oldest = next(iter(self._sessions.items()))
            if oldest.expires_at > now:
                return
            self._drop(session)

    def check_integrity(self) -> None:
        for pool in (self._pool, self._store):
            hot_counts: Counter[BlockHash] = Counter()
            for session in self._sessions.values():
                for other, hot in self._by_pool(session.hashes):
                    hot_counts.update(hot if other is pool else ())
            assert pool is None or hot_counts == pool.hot_counts, "sessions and hot blocks disagree"
        num_hashes = sum(len(session.hashes) for session in self._sessions.values())
        assert self._num_hashes == num_hashes <= self._max_hashes, (
            "the hashes of sessions are counted wrongly"
        )
        assert len(self._sessions) <= MAX_SESSIONS, "more sessions are kept than allowed"

    @property
    def _max_hashes(self) -> int:
        return (self._store or self._pool).num_blocks

    def _by_pool(self, hashes: Sequence[BlockHash]) -> list[tuple[BlockPool, Sequence[BlockHash]]]:
        """The hashes that are hot in each pool. With a store these are all hashes, and only the tail is also hot among the
        full blocks: the next request reads its tail from there."""
        if self._store is None:
            return [(self._pool, hashes)]
        return [(self._store, hashes), (self._pool, hashes[-self._tail_blocks - 1 :])]

    def _drop(self, session: ScopedSession) -> None:
        dropped = self._sessions.pop(session, None)
        if dropped is not None:
            self._num_hashes -= len(dropped.hashes)
            for pool, hot in self._by_pool(dropped.hashes):
                for block_hash in hot:
                    pool.unmark_hot(block_hash)
