"""Whose request goes to the engine next, where several keys ask for more than it takes at once.

Each key has a virtual time: the tokens it was given, over its weight. Among those that wait the one that is furthest
behind goes next (start-time fair queueing; for tokens of language models, Sheng et al., "Fairness in Serving Large
Language Models"). A key that asks for nothing saves nothing up: when it comes back it begins where the others are. What
an answer will cost is guessed from the key's last ones, and corrected when it is over.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from weft.request import Priority
from weft.server.keys import ApiKey

_FIRST_GUESS = 128
"""Tokens of an answer, before a key has had one."""
_LEARNING = 0.1
_PLACES_PER_RESERVE = 16
_MAX_NOT_STARTED = 8
"""Answers that may wait in the engine where it is not certain that it has memory for them: enough to fill its next
steps, and few enough not to be in the way of another key's."""


@dataclass(frozen=True)
class Job:
    """What one request asks of the engine."""

    priority: Priority
    prompt_tokens: int
    num_answers: int
    max_tokens: int
    """Of one answer."""


class Turn:
    """One request from its arrival at the gate until it is over. Whoever got it calls `FairGate.leave` in the end."""

    def __init__(self, account: _Account, job: Job, number: int) -> None:
        self.account = account
        self.job = job
        self.order = (-job.priority, number)
        """Within its key."""
        self.cost = 0
        """What it was let through for."""
        self.stage: Literal["waiting", "going", "in the engine", "over"] = "waiting"
        self.may_go: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def expected_cost(self) -> int:
        """In tokens, as far as the answers that the key had until now tell."""
        job = self.job
        return job.prompt_tokens + job.num_answers * self.account.guess(job.max_tokens)

    @property
    def rank(self) -> int:
        """HIGH and CRITICAL pass everyone, as far as keys may ask for them; others only pass those of their own key."""
        return max(self.job.priority, Priority.NORMAL)


class _Account:
    """What one key was given, and what of it waits."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.virtual_time = 0.0
        self.waiting: list[Turn] = []
        self._answer_tokens = float(_FIRST_GUESS)

    def guess(self, max_tokens: int) -> int:
        return min(max_tokens, round(self._answer_tokens) or 1)

    def learn(self, answer_tokens: float) -> None:
        self._answer_tokens += _LEARNING * (answer_tokens - self._answer_tokens)


class FairGate:
    """Lets requests through at once while the engine has room, and in turn where it has not. Belongs to one event loop.

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
        # A few in reserve: a place that becomes free is not left empty until word of it has come here and back.
        self._max_running = max_running + max_running // _PLACES_PER_RESERVE
        self._max_tokens = max_tokens
        self._count_answers = count_answers
        self._now = 0.0
        """Virtual time: where the request began that went last."""
        self._num_tokens = 0
        """Those that requests in the engine are expected to need."""
        self._num_coming = 0
        """Answers that were let through and that the engine does not have yet."""
        self._numbers = itertools.count()

    @property
    def num_waiting(self) -> int:
        return sum(len(account.waiting) for account in self._accounts.values())

    def ask(self, key: ApiKey | None, job: Job) -> Turn | None:
        """A turn, whose `may_go` is to be waited for; None where nobody takes turns."""
        account = self._accounts.get(key.name) if key is not None else None
        if account is None:
            return None
        if not account.waiting:
            account.virtual_time = max(account.virtual_time, self._now)
        turn = Turn(account, job, next(self._numbers))
        bisect.insort(account.waiting, turn, key=lambda other: other.order)
        self.let_through()
        return turn

    def submitted(self, turn: Turn) -> None:
        """The engine counts its answers from now on."""
        if turn.stage == "going":
            turn.stage = "in the engine"
            self._num_coming -= turn.job.num_answers

    def leave(self, turn: Turn, answer_tokens: int | None) -> None:
        """It is over, wherever it was. All its answers together had so many tokens; None: it came to nothing, and costs
        nothing."""
        account = turn.account
        if turn.stage == "waiting":
            account.waiting.remove(turn)
        elif turn.stage != "over":
            self._num_tokens -= turn.cost
            if turn.stage == "going":
                self._num_coming -= turn.job.num_answers
            used = 0
            if answer_tokens is not None:
                used = turn.job.prompt_tokens + answer_tokens
                account.learn(answer_tokens / turn.job.num_answers)
            account.virtual_time += (used - turn.cost) / account.weight
        turn.stage = "over"
        self.let_through()

    def let_through(self) -> None:
        """As many as there is room for; to be called whenever the engine may have more."""
        while (turn := self._next()) is not None and self._has_room(turn):
            account = turn.account
            account.waiting.remove(turn)
            turn.cost = turn.expected_cost
            self._num_coming += turn.job.num_answers
            self._num_tokens += turn.cost
            self._now = max(self._now, account.virtual_time)
            account.virtual_time += turn.cost / account.weight
            turn.stage = "going"
            if not turn.may_go.done():  # or whoever waited was cancelled, and is about to leave
                turn.may_go.set_result(None)

    def _next(self) -> Turn | None:
        heads = [account.waiting[0] for account in self._accounts.values() if account.waiting]
        return min(
            heads, key=lambda turn: (-turn.rank, turn.account.virtual_time, turn.order[1]), default=None
        )

    def _has_room(self, turn: Turn) -> bool:
        counts = self._count_answers()
        if counts is None:
            return False
        num_answers, num_not_started = (count + self._num_coming for count in counts)
        if num_answers == 0:
            return True
        if num_answers >= self._max_running:
            return False
        # Memory is only guessed at. Where it may be short, the engine gets a few to choose from, and no heap.
        return self._num_tokens + turn.expected_cost <= self._max_tokens or num_not_started < _MAX_NOT_STARTED
