"""Owns which conversations are kept hot: whose cached blocks are evicted last, and until when."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from weft.scheduling.blocks import BlockKey, BlockPool

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

    def __init__(self, pool: BlockPool, lifetime: float) -> None:
        self._pool = pool
        self._lifetime = lifetime
        self._sessions: OrderedDict[SessionKey, _Session] = OrderedDict()
        """In the order they expire: all live equally long."""
        self._num_keys = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def keep(self, session: SessionKey, keys: Sequence[BlockKey], now: float) -> None:
        """A turn is over whose blocks have these keys: they are hot from now on, those of the turn before it only if they
        are among them."""
        kept = _Session(tuple(keys), now + self._lifetime)
        for key in kept.keys:
            self._pool.heat(key)
        self._drop(session)
        if not kept.keys:
            return
        self._sessions[session] = kept
        self._num_keys += len(kept.keys)
        # More keys than there are blocks can never all be cached: a flood of sessions must not fill the memory.
        while self._num_keys > self._pool.num_blocks:
            self._drop(next(iter(self._sessions)))

    def expire(self, now: float) -> None:
        """Lets go of sessions whose last turn is too long ago."""
        while self._sessions:
            session, oldest = next(iter(self._sessions.items()))
            if oldest.expires_at > now:
                return
            self._drop(session)

    def check_integrity(self) -> None:
        heat: dict[BlockKey, int] = {}
        for session in self._sessions.values():
            for key in session.keys:
                heat[key] = heat.get(key, 0) + 1
        assert heat == self._pool.heat_of_keys, "sessions and the heat of keys disagree"
        assert self._num_keys == sum(heat.values()) <= self._pool.num_blocks, (
            "keys of sessions are miscounted"
        )

    def _drop(self, session: SessionKey) -> None:
        dropped = self._sessions.pop(session, None)
        if dropped is not None:
            self._num_keys -= len(dropped.keys)
            for key in dropped.keys:
                self._pool.cool(key)
