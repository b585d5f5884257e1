"""Requests whose grammar is not compiled yet: which goes next, and which are dropped before that."""

from __future__ import annotations

from collections import Counter

from weft.engine.ipc import wire
from weft.request import InferenceRequest

Waiting = tuple[wire.Submit, InferenceRequest]
"""A message, and the whole request in it."""


class CompileQueue:
    """Not for several threads at once: its owner has a lock.

    Cache salts take turns, and each API key has a salt of its own: many grammars of one do not delay those of another.
    Within a salt short grammars go first.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, Waiting] = {}
        """By the first name of each, in order of arrival."""
        self._wanted: dict[int, tuple[wire.Submit, set[int]]] = {}
        """The same by every name, each with the names that are not cancelled."""
        self._turns: Counter[str] = Counter()
        """How often each salt was served, while something waits."""

    def add(self, message: wire.Submit, request: InferenceRequest) -> None:
        if not self._waiting:
            self._turns.clear()
        self._waiting[message.ids[0]] = message, request
        self._wanted.update(dict.fromkeys(message.ids, (message, set(message.ids))))

    def take(self) -> Waiting | None:
        """The next to be compiled; None where nothing waits."""
        waiting = min(self._waiting.values(), key=self._order, default=None)
        if waiting is not None:
            message, request = waiting
            self._remove(message)
            self._turns[request.cache_salt] += 1
        return waiting

    def cancel(self, name: int) -> wire.Submit | None:
        """Cancels one answer. Returns the request where that was its last answer, which drops it."""
        if name not in self._wanted:
            return None
        message, wanted = self._wanted[name]
        wanted.discard(name)
        if wanted:
            return None
        self._remove(message)
        return message

    def _remove(self, message: wire.Submit) -> None:
        del self._waiting[message.ids[0]]
        for name in message.ids:
            del self._wanted[name]

    def _order(self, waiting: Waiting) -> tuple[int, int]:
        _, request = waiting
        grammar = request.params.grammar
        assert grammar is not None, "all others are taken in at once"
        return self._turns[request.cache_salt], len(grammar.definition)
