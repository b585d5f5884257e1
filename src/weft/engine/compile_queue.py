"""A queue of requests whose grammar is not compiled yet."""

from __future__ import annotations

from collections import Counter

from weft.engine.ipc import wire
from weft.request import InferenceRequest

Waiting = tuple[wire.Submit, InferenceRequest]
"""A message, and the request that it contains."""


class CompileQueue:
    """Chooses the next grammar to compile. Not thread-safe: the owner holds a lock.

    The salt with the fewest compiled requests is next. Each API key has its own cache salt, so the grammars of one
    client do not delay those of another. Within a salt, the shortest grammar is next.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, Waiting] = {}
        """The requests in the queue, in order of arrival. The key is the first answer handle of a request."""
        self._by_answer: dict[int, tuple[Waiting, set[int]]] = {}
        """Answer handle -> its request, and the set of handles of that request that are not cancelled. The answers of a
        request share this set. When it is empty, the request leaves the queue."""
        self._num_served: Counter[str] = Counter()
        """Requests that `take` returned for each salt since the queue was last empty."""

    def add(self, message: wire.Submit, request: InferenceRequest) -> None:
        if not self._waiting:
            self._num_served.clear()
        waiting = self._waiting[message.handles[0]] = message, request
        self._by_answer.update(dict.fromkeys(message.handles, (waiting, set(message.handles))))

    def take(self) -> Waiting | None:
        """Removes and returns the next request to compile; None if the queue is empty."""
        waiting = min(self._waiting.values(), key=self._order, default=None)
        if waiting is not None:
            message, request = waiting
            self._remove(message)
            self._num_served[request.cache_salt] += 1
        return waiting

    def cancel(self, handle: int) -> Waiting | None:
        """Cancels one answer. If it was the last one of its request, removes the request and returns it."""
        if handle not in self._by_answer:
            return None
        waiting, not_cancelled = self._by_answer[handle]
        not_cancelled.discard(handle)
        if not_cancelled:
            return None
        self._remove(waiting[0])
        return waiting

    def _remove(self, message: wire.Submit) -> None:
        del self._waiting[message.handles[0]]
        for handle in message.handles:
            del self._by_answer[handle]

    def _order(self, waiting: Waiting) -> tuple[int, int]:
        _, request = waiting
        grammar = request.params.grammar
        assert grammar is not None, "a request without a grammar does not wait for compilation"
        return self._num_served[request.cache_salt], len(grammar.definition)
