"""The requests under way: who sent each, what it may use, where it is, and what it gives back when it ends."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from weft.clock import Clock
from weft.engine.ipc.client import EngineClient, EngineState
from weft.request import GenerationResult, InferenceRequest
from weft.server.admission.fairness import AnswerJob, FairGate, GateTicket
from weft.server.admission.keys import ApiKey
from weft.server.admission.limits import KeyLimits
from weft.server.admission.pace import CompletionRate
from weft.server.errors import ApiError
from weft.server.metrics import ServerMetrics
from weft.server.settings import ServerSettings
from weft.server.stream.choices import Choices
from weft.text.answer_reader import AnswerForm

Outcome = list[GenerationResult] | ApiError | None
"""How a request ended; None: nobody was there any more."""

_DEFAULT_ANSWER_TOKENS = 512
"""Tokens that an answer without max_tokens reserves of its key's minute, until it is known how many it had."""
_MAX_OPEN_PER_FREE = 4
"""With several keys none may have more than so many times as many requests open as there are places free: a flood of one
leaves the others a fifth of the places."""
_GRACE_SECONDS = 1.0
"""The engine keeps deadlines; so much later the server does, whether the engine answers or not."""
_WAKE_EVERY = 64
_WAKE_EVERY_FOR_STOPS = 8
"""Tokens after which an answer that nobody streams is looked at. A stop string, or the last call of a tool, is found in
the text, so that an answer runs on for up to so many tokens behind it."""


class ActiveRequest:
    """One request from the moment its body is read until its answer is out. Whoever entered it calls `leave`."""

    def __init__(
        self,
        key: ApiKey | None,
        limits: KeyLimits | None,
        choices: Choices,
        began: float,
        given_id: str | None = None,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.given_id = given_id
        """What its client calls it."""
        self.key = key
        self.limits = limits
        self.choices = choices
        self.began = began
        self.requests: Sequence[InferenceRequest] = ()
        """Once they are known."""
        self.text_tokens = 0
        """Of a request that asks for tokens or text alone."""
        self.reserved = 0
        self.ticket: GateTicket | None = None
        self.deadline: float | None = None
        self.expiry: asyncio.TimerHandle | None = None
        """Ends the answer once the deadline has passed."""

    @asynccontextmanager
    async def until_deadline(self) -> AsyncIterator[None]:
        """Raises a 504 where what is done inside lasts beyond the deadline."""
        expires_at = None if self.expiry is None else self.expiry.when()
        try:
            async with asyncio.timeout_at(expires_at) as limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise self.deadline_error() from None

    def deadline_error(self) -> ApiError:
        return ApiError(504, f"deadline of {self.deadline:g} s passed", code="deadline_exceeded")

    @property
    def prompt_tokens(self) -> int:
        return self.text_tokens + sum(len(request.prompt) for request in self.requests)

    @property
    def headers(self) -> dict[str, str]:
        return self.limits.headers() if self.limits else {}

    def described(self, now: float) -> dict[str, Any]:
        """For operators."""
        num_tokens = self.choices.num_tokens
        state = "running" if num_tokens else "waiting" if self.requests else "preparing"
        return {
            "id": self.id,
            "request_id": self.given_id or self.id,
            "key": self.key.name if self.key else None,
            "state": state,
            "age": round(now - self.began, 3),
            "answers": sum(request.params.n for request in self.requests),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": num_tokens,
        }


class ActiveRequests:
    """Owns what is open. Belongs to one event loop."""

    def __init__(
        self, settings: ServerSettings, engine: EngineClient, metrics: ServerMetrics, clock: Clock
    ) -> None:
        assert engine.info is not None, "it has started"
        self.completion_rate = CompletionRate(clock)
        self._settings = settings
        self._engine = engine
        self._metrics = metrics
        self._clock = clock
        self._limits = {key.name: KeyLimits(key, clock) for key in settings.api_keys}
        self._gate = FairGate(
            settings.api_keys,
            max_running=settings.engine.scheduler.max_running,
            max_tokens=engine.info.num_blocks * engine.info.block_size,
            count_answers=self._count_answers,
        )
        engine.on_progress = self._gate.release_answers
        self._open: dict[str, ActiveRequest] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        metrics.open_requests.set_function(lambda: len(self._open))
        metrics.count_held = lambda: self._gate.num_waiting

    def __len__(self) -> int:
        return len(self._open)

    async def wait_until_idle(self, seconds: float) -> bool:
        """Whether all ended in time."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def check_capacity(self, key: ApiKey | None) -> None:
        """Refuses what there is no place for; asked before a body is read."""
        max_requests = self._settings.max_requests
        free = max_requests - len(self._open)
        num_own = self._limits[key.name].num_open if key else 0
        if free > 0 and (len(self._limits) < 2 or num_own < _MAX_OPEN_PER_FREE * free):
            return
        of_key = f", {num_own} of them of the key {key.name!r}" if key else ""
        raise ApiError(
            429,
            f"{len(self._open)} requests are under way{of_key}; allowed: {max_requests}; try again later",
            code="queue_full",
        )

    def begin(self, key: ApiKey | None, choices: Choices, given_id: str | None = None) -> ActiveRequest:
        """One more request. Raises a 429 where there is no place, or its key has no more to ask."""
        self.check_capacity(key)  # others may have come in while the body did
        limits = self._limits[key.name] if key else None
        if limits is not None:
            limits.take_request()
            limits.num_open += 1
        active = ActiveRequest(key, limits, choices, self._clock(), given_id)
        self._open[active.id] = active
        self._idle.clear()
        return active

    def set_deadline(self, active: ActiveRequest, seconds: float | None) -> None:
        """The request ends so long after it came in, and the grace, whatever the engine does."""
        active.deadline = self._settings.engine.request_timeout if seconds is None else seconds
        if active.deadline is not None:
            left = active.began + max(0.0, active.deadline) + _GRACE_SECONDS - self._clock()
            active.expiry = asyncio.get_running_loop().call_later(
                left, active.choices.fail, active.deadline_error()
            )

    async def submit(
        self,
        active: ActiveRequest,
        requests: Sequence[InferenceRequest],
        form: AnswerForm | None = None,
        *,
        is_streamed: bool,
    ) -> None:
        """Hands the request to the engine: at once, or, when others are before it, in its turn, which is not waited
        for. `form` is that of its answers."""
        active.choices.check()
        active.requests = requests
        if active.limits is not None:
            answer_tokens = sum(
                request.params.n * self._max_tokens(request, _DEFAULT_ANSWER_TOKENS) for request in requests
            )
            active.reserved = active.limits.reserve(active.prompt_tokens + answer_tokens)
        first = requests[0]
        job = AnswerJob(
            first.priority,
            active.prompt_tokens,
            sum(request.params.n for request in requests),
            max(self._max_tokens(request, self._engine.max_sequence_length) for request in requests),
        )
        active.ticket = ticket = self._gate.enter(active.key, job)
        if ticket is not None:
            active.choices.on_answer_end = partial(self._gate.ended, ticket)
        is_cut = bool(first.params.stop) or (form is not None and form.max_calls is not None)
        wake_every = _WAKE_EVERY_FOR_STOPS if is_cut else _WAKE_EVERY
        work = partial(
            self._submit_when_released, active, form, is_streamed, 1 if is_streamed else wake_every
        )
        if ticket is None or not ticket.num_waiting:
            await work()
        else:
            active.choices.submit_later(work)

    def reserve(self, active: ActiveRequest, num_tokens: int) -> None:
        """Takes so many tokens of the key's minute for text work, or raises a 429. In the end the request costs its
        `text_tokens`."""
        active.text_tokens = num_tokens
        if active.limits is not None:
            active.reserved = active.limits.reserve(num_tokens)

    def end(self, active: ActiveRequest, outcome: Outcome) -> None:
        """It is over. Who got an error of the server's pays nothing, and who was refused; everyone else what was computed
        until then, however it ended: a deadline would otherwise make everything free."""
        if self._open.pop(active.id, None) is None:
            return
        if active.expiry is not None:
            active.expiry.cancel()
        num_generated = active.choices.num_tokens
        self._metrics.generated(num_generated)
        used = None
        if not isinstance(outcome, ApiError) or (num_generated and outcome.is_client_fault):
            used = num_generated
            self.completion_rate.record_end()
        if active.ticket is not None:
            self._gate.leave(active.ticket, used)
        if active.limits is not None and active.key is not None:
            num_tokens = 0 if used is None else active.prompt_tokens + used
            active.limits.num_open -= 1
            active.limits.correct(active.reserved, num_tokens)
            self._metrics.used(active.key.name, num_tokens)
        if not self._open:
            self._idle.set()

    def described(self) -> list[dict[str, Any]]:
        now = self._clock()
        return [active.described(now) for active in self._open.values()]

    def cancel(self, request_id: str) -> bool:
        """Ends a request on behalf of an operator; False where there is none with this id."""
        active = self._open.get(request_id)
        if active is None:
            return False
        active.choices.fail(
            ApiError(403, "an operator of this server cancelled the request", code="cancelled")
        )
        return True

    async def _submit_when_released(
        self, active: ActiveRequest, form: AnswerForm | None, is_streamed: bool, wake_every: int
    ) -> None:
        """All answers, in their order, each as soon as its turn comes. What may go at the same time and has the same
        prompt goes in one message."""
        requests, ticket = active.requests, active.ticket
        num_each = requests[0].params.n
        num_answers, num_sent = num_each * len(requests), 0
        asked_at, waited = self._clock(), 0.0
        while num_sent < num_answers:
            if num_sent:
                await asyncio.sleep(0)  # a thousand answers at once would hold up the event loop
            num_released = num_answers - num_sent
            if ticket is not None:
                if not ticket.can_submit.is_set():
                    await self._wait_for_release(ticket, asked_at, requests[0].deadline)
                    waited = self._clock() - asked_at
                if ticket.is_over:
                    return  # its turn came at the moment of its cancellation
                num_released = ticket.num_released
            prompt, first = divmod(num_sent, num_each)
            count = min(num_released, num_each - first)
            num_sent += count
            await active.choices.submit(
                [requests[prompt]],
                form,
                indices=range(first, first + count),
                is_last=num_sent == num_answers,
                is_streamed=is_streamed,
                wake_every=wake_every,
                waited=waited,
            )
            if ticket is not None:
                self._gate.submitted(ticket, count)

    async def _wait_for_release(self, ticket: GateTicket, asked_at: float, deadline: float | None) -> None:
        left = None if deadline is None else max(0.0, asked_at + deadline - self._clock())
        try:
            await asyncio.wait_for(ticket.can_submit.wait(), left)
        except TimeoutError:
            raise ApiError(
                504, f"deadline of {deadline} s passed while waiting for a turn", code="deadline_exceeded"
            ) from None

    def _count_answers(self) -> tuple[int, int] | None:
        if self._engine.state is EngineState.STARTING:
            return None  # whoever waits may wait a little longer
        return self._engine.num_under_way, self._engine.num_not_begun

    def _max_tokens(self, request: InferenceRequest, default: int) -> int:
        room = max(1, self._engine.max_sequence_length - len(request.prompt))
        wish = request.params.max_tokens
        return min(room, default if wish is None else wish)
