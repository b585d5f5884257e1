"""Which key's answer goes to the engine next, where several keys ask for more than it takes at once.

Each key has a virtual time: the tokens it was given, over its weight. Among those that wait the one that is furthest
behind goes next (start-time fair queueing; for tokens of language models, Sheng et al., "Fairness in Serving Large
Language Models"). A key that asks for nothing saves nothing up: when it comes back it begins where the others are. What
an answer will cost is guessed from the key's last ones, and corrected when it is over.

Answers go one by one, whatever request they belong to: a request for a thousand answers takes a thousand turns.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from weft.request import Priority
from weft.server.admission.keys import ApiKey

_DEFAULT_ANSWER_TOKENS = 128
"""Tokens of an answer, before a key has had one."""
_SMOOTHING = 0.1
_SLOTS_PER_RESERVED_SLOT = 16
_MAX_NOT_STARTED = 8
"""Answers that may wait in the engine where it is not certain that it has memory for them: enough to fill its next
steps, and few enough not to be in the way of another key's."""


@dataclass(frozen=True)
class AnswerJob:
    """What one request asks of the engine."""

    priority: Priority
    prompt_tokens: int
    """Of all its prompts."""
    num_answers: int
    max_tokens: int
    """Of one answer."""


class GateTicket:
    """One request from its arrival at the gate until it is over. Its answers pass one by one. Every
    turn ends with a call of `FairGate.leave`."""

    def __init__(self, account: _Account, job: AnswerJob, number: int) -> None:
        self.account = account
        self.job = job
        self.order = (-job.priority, number)
        """Within its key."""
        self.num_waiting = job.num_answers
        """Answers that were not let through yet."""
        self.num_released = 0
        """Those that were let through and that the engine does not have yet."""
        self.num_open = 0
        """Those that were let through and are not over."""
        self.cost = 0
        """What the open answers were let through for."""
        self.charged = 0
        """What the account was charged for all of them so far."""
        self.num_tokens = 0
        """Of the answers that are over."""
        self.is_over = False
        self.can_submit = asyncio.Event()
        """Set while there are answers to submit, and when the turn is over."""

    @property
    def expected_cost(self) -> int:
        """Of one answer, in tokens, estimated from the key's answers so far. Each answer bears its share of the
        prompts."""
        return self._prompt_tokens_each + self.account.expected_tokens(self.job.max_tokens)

    @property
    def _prompt_tokens_each(self) -> int:
        return self.job.prompt_tokens // self.job.num_answers

    @property
    def rank(self) -> int:
        """HIGH and CRITICAL pass everyone, as far as keys may ask for them; others only pass those of their own key."""
        return max(self.job.priority, Priority.NORMAL)

    def release_one(self) -> int:
        """One more answer is let through; what it is expected to cost."""
        cost = self.expected_cost
        self.num_waiting -= 1
        self.num_released += 1
        self.num_open += 1
        self.cost += cost
        self._charge(cost)
        self.can_submit.set()
        return cost

    def end_one(self, num_tokens: int) -> int:
        """An open answer is over, with so many tokens; what it was let through for."""
        cost = self.cost // self.num_open
        self.num_open -= 1
        self.cost -= cost
        self.num_tokens += num_tokens
        self.account.record_length(num_tokens)
        self._charge(self._prompt_tokens_each + num_tokens - cost)
        return cost

    def settle(self, answer_tokens: int | None) -> None:
        """All of it is over: see `FairGate.leave`."""
        if answer_tokens is not None and self.num_open:
            self.account.record_length((answer_tokens - self.num_tokens) / self.num_open)
        self._charge((0 if answer_tokens is None else self.job.prompt_tokens + answer_tokens) - self.charged)
        self.is_over = True
        self.can_submit.set()

    def _charge(self, num_tokens: int) -> None:
        self.charged += num_tokens
        self.account.virtual_time += num_tokens / self.account.weight


class _Account:
    """What one key was given, and what of it waits."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.virtual_time = 0.0
        self.waiting: list[GateTicket] = []
        self.num_open = 0
        """Answers that were let through and are not over."""
        self._answer_tokens = float(_DEFAULT_ANSWER_TOKENS)

    def expected_tokens(self, max_tokens: int) -> int:
        return min(max_tokens, round(self._answer_tokens) or 1)

    def record_length(self, answer_tokens: float) -> None:
        self._answer_tokens += _SMOOTHING * (answer_tokens - self._answer_tokens)


class FairGate:
    """Lets answers through at once while the engine has room, and in turn where it has not. Belongs to one event loop.

    Without keys, and with one, there is nobody to be fair to: all pass, and the engine's own policy orders them.
    """

    def __init__(
        self,
        keys: Iterable[ApiKey],
        *,
        max_running: int,
        max_tokens: int,
        count_answers: Callable[[], tuple[int, int] | None],
    ) -> None:
        """`count_answers` says how many the engine has, and how many of those have no token yet; None while it takes
        none. `max_tokens` fit its cache."""
        accounts = {key.name: _Account(key.weight) for key in keys}
        self._accounts = accounts if len(accounts) > 1 else {}
        # Answers that began together end together: without places in reserve another key would wait for all of them.
        self._max_running = max_running
        self._max_unreserved = (
            max_running - (max_running + _SLOTS_PER_RESERVED_SLOT // 2) // _SLOTS_PER_RESERVED_SLOT
        )
        """For keys that have answers in the engine. The last places are for those that have none, and for HIGH."""
        self._max_tokens = max_tokens
        self._count_answers = count_answers
        self._now = 0.0
        """Virtual time: where the answer began that went last."""
        self._num_tokens = 0
        """Those that answers in the engine are expected to need."""
        self._num_released = 0
        """Answers that were let through and that the engine does not have yet."""
        self._numbers = itertools.count()

    @property
    def num_waiting(self) -> int:
        """Answers."""
        return sum(ticket.num_waiting for account in self._accounts.values() for ticket in account.waiting)

    def enter(self, key: ApiKey | None, job: AnswerJob) -> GateTicket | None:
        """A turn, whose `may_go` is to be waited for; None where nobody takes turns."""
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
        """The engine counts so many more of its answers from now on."""
        if not ticket.is_over:
            ticket.num_released -= num_answers
            self._num_released -= num_answers
            if not ticket.num_released:
                ticket.can_submit.clear()

    def ended(self, ticket: GateTicket, num_tokens: int) -> None:
        """One of its answers is over, with so many tokens; others may not be."""
        if not ticket.is_over:
            self._num_tokens -= ticket.end_one(num_tokens)
            ticket.account.num_open -= 1
            self.release_answers()

    def leave(self, ticket: GateTicket, answer_tokens: int | None) -> None:
        """It is over, wherever it was. All its answers together had so many tokens; None: it came to nothing, and costs
        nothing."""
        if ticket.is_over:
            return
        account = ticket.account
        if ticket.num_waiting:
            account.waiting.remove(ticket)
        self._num_tokens -= ticket.cost
        self._num_released -= ticket.num_released
        account.num_open -= ticket.num_open
        # One that was never let through cost nothing.
        ticket.settle(answer_tokens if ticket.charged else None)
        self.release_answers()

    def release_answers(self) -> None:
        """As many answers as there is room for; to be called whenever the engine may have more."""
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
            self._num_released += 1
            account.num_open += 1
            if ticket.num_waiting:
                # Behind the other requests of its key: a large one does not keep them waiting.
                ticket.order = (ticket.order[0], next(self._numbers))
                self._enqueue(ticket)

    def _enqueue(self, ticket: GateTicket) -> None:
        bisect.insort(ticket.account.waiting, ticket, key=lambda other: other.order)

    def _next(self, heads: list[GateTicket], num_answers: int, num_not_started: int) -> GateTicket | None:
        """The first of those that there is a place for; None where it has no room."""
        num_answers += self._num_released
        num_not_started += self._num_released
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
        if ticket is None or not num_answers or not ticket.account.num_open:
            return ticket
        # Memory is only guessed at. Where it may be short, the engine gets a few to choose from, and no heap.
        has_memory = self._num_tokens + ticket.expected_cost <= self._max_tokens
        return ticket if has_memory or num_not_started < _MAX_NOT_STARTED else None


def _may_use_reserve(ticket: GateTicket) -> bool:
    return not ticket.account.num_open or ticket.rank > Priority.NORMAL
