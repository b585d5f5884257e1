"""Owns the waiting requests: new ones and victims of preemption, in the order of the policy."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from weft.config import SchedulerConfig
from weft.errors import InvalidRequestError, QueueFullError
from weft.request import RequestState
from weft.scheduling.policy import AdmissionPolicy, PolicyKey
from weft.scheduling.sequence import Sequence


class _Entry(NamedTuple):
    key: PolicyKey
    order: int
    sequence: Sequence
    num_tokens: int
    """As counted on entry: a victim's last token may still arrive while it waits."""
    is_preempted: bool


class RequestQueue:
    """A heap with lazy removal: an entry counts only while its sequence points back to it.

    Push and pop are O(log n), removal is O(1); the heap is rebuilt when half of it is dead.
    """

    def __init__(self, config: SchedulerConfig, policy: AdmissionPolicy) -> None:
        self._config = config
        self._policy = policy
        self._heap: list[_Entry] = []
        self._length = 0
        self.num_preempted = 0
        self.waiting_tokens = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        return (entry.sequence for entry in self._heap if entry.sequence.queue_entry is entry)

    def check_room(self, num_tokens: int, num_requests: int = 1) -> None:
        """Raises QueueFullError where requests of that many tokens together would overfill the queue."""
        config = self._config
        if num_requests > config.max_waiting_requests:
            raise InvalidRequestError(
                f"{num_requests} answers are asked for at once; allowed: {config.max_waiting_requests}, the room of the queue",
                field="n",
            )
        if self._length + num_requests > config.max_waiting_requests:
            raise QueueFullError(
                f"the queue is full: {self._length} requests are waiting, "
                f"at most {config.max_waiting_requests} may; try again later"
            )
        if self._length and self.waiting_tokens + num_tokens > config.max_waiting_tokens:
            raise QueueFullError(
                f"the queue is full: {self.waiting_tokens} tokens are waiting and this request has {num_tokens}, "
                f"at most {config.max_waiting_tokens} may wait; try again later"
            )

    def push(self, sequence: Sequence) -> None:
        """Takes a sequence in, new or preempted. Room is checked by `check_room`, for new ones only."""
        self._insert(sequence, self._policy.key(sequence))

    def promote(self, sequence: Sequence) -> None:
        """Puts a waiting sequence before all others but CRITICAL ones: someone was preempted for it."""
        self.remove(sequence)
        self._insert(sequence, self._policy.key_of_promoted(sequence))

    def peek(self) -> Sequence | None:
        heap = self._heap
        while heap and heap[0].sequence.queue_entry is not heap[0]:
            heapq.heappop(heap)
        return heap[0].sequence if heap else None

    def near_front(self, count: int) -> list[Sequence]:
        """About the first `count`, in no particular order; the very first is among them."""
        return [entry.sequence for entry in self._heap[:count] if entry.sequence.queue_entry is entry]

    def remove(self, sequence: Sequence) -> None:
        if sequence.queue_entry is None:
            raise ValueError(f"request {sequence.request_id} is not waiting")
        self._forget(sequence)
        if len(self._heap) > 64 and len(self._heap) > 2 * self._length:
            self._heap = [entry for entry in self._heap if entry.sequence.queue_entry is entry]
            heapq.heapify(self._heap)

    def set_aside(self) -> object:
        """Takes the first entry out for a moment; `put_back` returns it to its place."""
        if self.peek() is None:
            raise ValueError("the queue is empty")
        entry = heapq.heappop(self._heap)
        self._forget(entry.sequence)
        return entry

    def put_back(self, entry: object) -> None:
        assert isinstance(entry, _Entry)
        self._insert(entry.sequence, entry.key)

    def check_integrity(self) -> None:
        alive = list(self)
        assert len(alive) == self._length, "the queue miscounts its requests"
        counted = sum(e.num_tokens for e in self._heap if e.sequence.queue_entry is e)
        assert sum(s.state is RequestState.PREEMPTED for s in alive) == self.num_preempted, (
            "victims are miscounted"
        )
        assert counted == self.waiting_tokens, "the queue miscounts its tokens"

    def _insert(self, sequence: Sequence, key: PolicyKey) -> None:
        if sequence.queue_entry is not None:
            raise ValueError(f"request {sequence.request_id} is waiting already")
        is_preempted = sequence.state is RequestState.PREEMPTED
        entry = _Entry(key, sequence.order, sequence, len(sequence.tokens), is_preempted)
        sequence.queue_entry = entry
        heapq.heappush(self._heap, entry)
        self._length += 1
        self.num_preempted += is_preempted
        self.waiting_tokens += entry.num_tokens

    def _forget(self, sequence: Sequence) -> None:
        entry = sequence.queue_entry
        assert isinstance(entry, _Entry)
        sequence.queue_entry = None
        self._length -= 1
        self.num_preempted -= entry.is_preempted
        self.waiting_tokens -= entry.num_tokens
