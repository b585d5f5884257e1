"""Fair sharing of the engine between API keys: decides which answer is released to the engine next.

Each key has a virtual time: the tokens that its answers used, divided by its weight. The next answer is one of the key
with the lowest virtual time (start-time fair queueing; for language models see Sheng et al., "Fairness in Serving Large
Language Models"). An idle key gains no credit: when it returns, its virtual time is raised to the current one. The
cost of an answer is its expected length, and is corrected when the answer ends.

The unit is one answer, not one request: a request for a thousand answers is released in a thousand pieces.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from weft.request import Priority
from weft.server.admission.keys import ApiKey

_PLACES_PER_RESERVED_PLACE = 16
"""Of this many places in the engine, one belongs to the reserve (`FairGate._max_unreserved`)."""
_MAX_NOT_STARTED = 8
"""When the released answers may not fit the KV cache, at most this many answers without a token may be in the engine.
The engine admits them as soon as memory is free. They are few, so they hardly delay answers of another key."""


@dataclass(frozen=True)
class AnswerJob:
    """The size and the priority of a request. They give its expected cost."""

    priority: Priority
    prompt_tokens: int
    """Tokens of all prompts of the request."""
    num_answers: int
    expected_tokens: int
    """The expected length of each answer."""


class GateTicket:
    """The state of one request at the gate. The gate releases its answers one by one. The owner of the request calls
    `FairGate.leave` when the request ends."""

    def __init__(self, account: _Account, job: AnswerJob, number: int) -> None:
        self.account = account
        self.job = job
        self.order = (-job.priority, number)
        """Sort key among the requests of the same API key."""
        self.num_waiting = job.num_answers
        """Answers that the gate has not released yet."""
        self.num_to_submit = 0
        """Answers that are released but not yet submitted to the engine."""
        self.num_open = 0
        """Answers that are released and not ended."""
        self.cost = 0
        """Expected tokens of the open answers, as charged at their release."""
        self.charged = 0
        """Tokens charged to the account so far, for all answers."""
        self.is_over = False
        self.can_submit = asyncio.Event()
        """Set while there are answers to submit, and when the request is over."""

    @property
    def expected_cost(self) -> int:
        """Expected tokens of one answer, and its part of the prompt tokens."""
        return self._prompt_tokens_each + self.job.expected_tokens

    @property
    def _prompt_tokens_each(self) -> int:
        return self.job.prompt_tokens // self.job.num_answers

    @property
    def rank(self) -> int:
        """Priority between keys. HIGH and CRITICAL requests overtake the requests of all keys. LOW and NORMAL differ
        only between requests of the same key."""
        return max(self.job.priority, Priority.NORMAL)

    def release_one(self) -> int:
        """Releases one answer and returns its expected cost."""
        cost = self.expected_cost
        self.num_waiting -= 1
        self.num_to_submit += 1
        self.num_open += 1
        self.cost += cost
        self._charge(cost)
        self.can_submit.set()
        return cost

    def end_one(self, num_tokens: int) -> int:
        """Records the end of an answer with `num_tokens` tokens. Returns the cost that was charged at its release."""
        cost = self.cost // self.num_open
        self.num_open -= 1
        self.cost -= cost
        self._charge(self._prompt_tokens_each + num_tokens - cost)
        return cost

    def settle(self, answer_tokens: int | None) -> None:
        """Corrects the charge to the tokens that were used; see `FairGate.leave`."""
        self._charge((0 if answer_tokens is None else self.job.prompt_tokens + answer_tokens) - self.charged)
        self.is_over = True
        self.can_submit.set()

    def _charge(self, num_tokens: int) -> None:
        self.charged += num_tokens
        self.account.virtual_time += num_tokens / self.account.weight


class _Account:
    """The virtual time of one API key, and its waiting requests."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.virtual_time = 0.0
        self.waiting: list[GateTicket] = []
        self.num_open = 0
        """Answers that are released and not ended."""


class FairGate:
    """Releases answers at once while the engine has capacity, else in fair order. Belongs to one event loop.

    With fewer than two keys the gate is off: the scheduling policy of the engine orders all answers.
    """

    def __init__(
        self,
        keys: Iterable[ApiKey],
        *,
        max_running: int,
        max_tokens: int,
        count_answers: Callable[[], tuple[int, int] | None],
    ) -> None:
        """`count_answers` returns the number of answers in the engine, and how many of them have no token; None while the
        engine starts. `max_tokens` is the capacity of the KV cache."""
        accounts = {key.name: _Account(key.weight) for key in keys}
        self._accounts = accounts if len(accounts) > 1 else {}
        self._max_running = max_running
        # Without a reserve, one key can take all places. Answers that began together end at about the same time, so
        # other keys would wait until then.
        self._max_unreserved = (
            max_running - (max_running + _PLACES_PER_RESERVED_PLACE // 2) // _PLACES_PER_RESERVED_PLACE
        )
        """While fewer answers than this are in the engine, any key may add one. The remaining places are a reserve, for
        keys that have no answer in the engine and for requests above NORMAL priority."""
        self._max_tokens = max_tokens
        self._count_answers = count_answers
        self._now = 0.0
        """The current virtual time: the largest virtual time that a key had when one of its answers was released."""
        self._num_tokens = 0
        """Expected tokens of all open answers."""
        self._num_to_submit = 0
        """The number of answers, over all requests, that are released but not yet submitted."""
        self._numbers = itertools.count()

    @property
    def num_waiting(self) -> int:
        """The number of answers, over all requests, that are not released yet."""
        return sum(ticket.num_waiting for account in self._accounts.values() for ticket in account.waiting)

    def enter(self, key: ApiKey | None, job: AnswerJob) -> GateTicket | None:
        """Queues a request. The caller waits for `can_submit` of the ticket. Returns None if the gate is off."""
        account = self._accounts.get(key.name) if key is not None else None
        if account is None:
            return None
        if not account.waiting:
            account.virtual_time = max(account.virtual_time, self._now)
        ticket = GateTicket(account, job, next(self._numbers))
        self._enqueue(ticket)
        self.release_answers()
        return ticket

    def submitted(self, ticket: GateTicket, num_answers: int) -> None:
        """Records that `num_answers` released answers are in the engine now."""
        if not ticket.is_over:
            ticket.num_to_submit -= num_answers
            self._num_to_submit -= num_answers
            if not ticket.num_to_submit:
                ticket.can_submit.clear()

    def ended(self, ticket: GateTicket, num_tokens: int) -> None:
        """Records the end of one answer with `num_tokens` tokens."""
        if not ticket.is_over:
            self._num_tokens -= ticket.end_one(num_tokens)
            ticket.account.num_open -= 1
            self.release_answers()

    def leave(self, ticket: GateTicket, answer_tokens: int | None) -> None:
        """Removes a request in any state. `answer_tokens` is the number of tokens of all its answers. None: the request
        failed and is charged nothing."""
        if ticket.is_over:
            return
        account = ticket.account
        if ticket.num_waiting:
            account.waiting.remove(ticket)
        self._num_tokens -= ticket.cost
        self._num_to_submit -= ticket.num_to_submit
        account.num_open -= ticket.num_open
        # A request without a released answer used nothing.
        ticket.settle(answer_tokens if ticket.charged else None)
        self.release_answers()

    def release_answers(self) -> None:
        """Releases as many answers as fit. Called whenever the capacity of the engine may have grown."""
        counts: tuple[int, int] | None = None
        while heads := [account.waiting[0] for account in self._accounts.values() if account.waiting]:
            counts = counts or self._count_answers()
            ticket = None if counts is None else self._next(heads, *counts)
            if ticket is None:
                return
            account = ticket.account
            account.waiting.remove(ticket)
            self._now = max(self._now, account.virtual_time)
            self._num_tokens += ticket.release_one()
            self._num_to_submit += 1
            account.num_open += 1
            if ticket.num_waiting:
                # Requeued after the other requests of its key, so that a large request does not delay them.
                ticket.order = (ticket.order[0], next(self._numbers))
                self._enqueue(ticket)

    def _enqueue(self, ticket: GateTicket) -> None:
        bisect.insort(ticket.account.waiting, ticket, key=lambda other: other.order)

    def _next(self, heads: list[GateTicket], num_answers: int, num_not_started: int) -> GateTicket | None:
        """The request whose answer is released next; None if the engine has no capacity for it."""
        num_answers += self._num_to_submit
        num_not_started += self._num_to_submit
        if num_answers:
            only_reserve_left = num_answers >= self._max_unreserved
            heads = [
                head
                for head in heads
                if num_answers < self._max_running and (not only_reserve_left or _may_use_reserve(head))
            ]
        ticket = min(
            heads, key=lambda head: (-head.rank, head.account.virtual_time, head.order[1]), default=None
        )
        # Memory limits neither the first answer in the engine nor the first one of a key: otherwise it might never start.
        if ticket is None or not num_answers or not ticket.account.num_open:
            return ticket
        # The memory need is an estimate. If it exceeds the cache, a few answers are released anyway: the engine admits those
        # that fit.
        has_memory = self._num_tokens + ticket.expected_cost <= self._max_tokens
        return ticket if has_memory or num_not_started < _MAX_NOT_STARTED else None


def _may_use_reserve(ticket: GateTicket) -> bool:
    return not ticket.account.num_open or ticket.rank > Priority.NORMAL
