"""Owns the waiting sequences, new or preempted, in policy order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from weft.config import SchedulerConfig
from weft.errors import InvalidRequestError, QueueFullError
from weft.request import RequestState
from weft.scheduling.policy import AdmissionPolicy, SortKey
from weft.scheduling.sequence import Sequence


class _QueueItem(NamedTuple):
    sort_key: SortKey
    order: int
    sequence: Sequence
    num_tokens: int
    """Tokens of the sequence when the item was made: a step in flight may still add a token to a preempted sequence."""
    is_preempted: bool


class RequestQueue:
    """A heap with lazy removal: an item is valid only while its sequence refers to it (`queue_item`).

    Push and pop are O(log n), removal is O(1). The heap is rebuilt when over half of its items are invalid.
    """

    def __init__(self, config: SchedulerConfig, policy: AdmissionPolicy) -> None:
        self._config = config
        self._policy = policy
        self._heap: list[_QueueItem] = []
        self._length = 0
        self.num_preempted = 0
        self.waiting_tokens = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """All waiting sequences, in no particular order."""
        return (item.sequence for item in self._heap if item.sequence.queue_item is item)

    def check_room(self, num_tokens: int, num_requests: int = 1) -> None:
        """Raises QueueFullError if the queue has no room for `num_requests` with `num_tokens` in all."""
        config = self._config
        if num_requests > config.max_waiting_requests:
            raise InvalidRequestError(
                f"{num_requests} answers were requested at once; allowed: at most "
                f"{config.max_waiting_requests}, the limit of the queue",
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
        """Adds a new or preempted sequence. Callers use `check_room` for new ones only: preempted ones always fit."""
        self._insert(sequence, self._policy.sort_key(sequence))

    def promote(self, sequence: Sequence) -> None:
        """Moves a waiting sequence before all but CRITICAL ones: a running sequence was preempted for it."""
        self.remove(sequence)
        self._insert(sequence, self._policy.promoted_sort_key(sequence))

    def peek(self) -> Sequence | None:
        heap = self._heap
        while heap and heap[0].sequence.queue_item is not heap[0]:
            heapq.heappop(heap)
        return heap[0].sequence if heap else None

    def near_front(self, count: int) -> list[Sequence]:
        """About the first `count` sequences, in no particular order. The very first is among them."""
        return [item.sequence for item in self._heap[:count] if item.sequence.queue_item is item]

    def head(self, count: int) -> list[Sequence]:
        """The first `count` sequences in order. In a longer queue some of them may be missing or rank later: the cost does
        not depend on the length of the queue."""
        items = [item for item in self._heap[: 2 * count] if item.sequence.queue_item is item]
        return [item.sequence for item in sorted(items, key=_rank)[:count]]

    def remove(self, sequence: Sequence) -> None:
        if sequence.queue_item is None:
            raise ValueError(f"request {sequence.request_id} is not waiting")
        self._detach(sequence)
        if len(self._heap) > 64 and len(self._heap) > 2 * self._length:
            self._heap = [item for item in self._heap if item.sequence.queue_item is item]
            heapq.heapify(self._heap)

    def set_aside(self) -> object:
        """Removes the first item while a plan is made. `put_back` returns it to the same rank."""
        if self.peek() is None:
            raise ValueError("the queue is empty")
        item = heapq.heappop(self._heap)
        self._detach(item.sequence)
        return item

    def put_back(self, item: object) -> None:
        assert isinstance(item, _QueueItem)
        self._insert(item.sequence, item.sort_key)

    def check_integrity(self) -> None:
        alive = list(self)
        assert len(alive) == self._length, "the queue counts its requests wrongly"
        counted = sum(e.num_tokens for e in self._heap if e.sequence.queue_item is e)
        assert sum(s.state is RequestState.PREEMPTED for s in alive) == self.num_preempted, (
            "the queue counts preempted sequences wrongly"
        )
        assert counted == self.waiting_tokens, "the queue counts its tokens wrongly"

    def _insert(self, sequence: Sequence, sort_key: SortKey) -> None:
        if sequence.queue_item is not None:
            raise ValueError(f"request {sequence.request_id} is waiting already")
        is_preempted = sequence.state is RequestState.PREEMPTED
        item = _QueueItem(sort_key, sequence.order, sequence, len(sequence.tokens), is_preempted)
        sequence.queue_item = item
        heapq.heappush(self._heap, item)
        self._length += 1
        self.num_preempted += is_preempted
        self.waiting_tokens += item.num_tokens

    def _detach(self, sequence: Sequence) -> None:
        item = sequence.queue_item
        assert isinstance(item, _QueueItem)
        sequence.queue_item = None
        self._length -= 1
        self.num_preempted -= item.is_preempted
        self.waiting_tokens -= item.num_tokens


def _rank(item: _QueueItem) -> tuple[SortKey, int]:
    return item.sort_key, item.order
