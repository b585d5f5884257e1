"""The active requests: the key, limits, deadline and progress of each, and the accounting when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from weft.clock import Clock
from weft.config import PriorityPolicy
from weft.engine.ipc.client import EngineClient, EngineState
from weft.lengths import LengthDistribution, LengthFeatures, LengthPredictor
from weft.request import FinishReason, GenerationResult, InferenceRequest, RequestId
from weft.server.admission.fairness import AnswerJob, FairGate, GateTicket
from weft.server.admission.keys import ApiKey
from weft.server.admission.limits import KeyLimits, places_needed
from weft.server.admission.waiting import Place, WaitEstimate
from weft.server.errors import ApiError
from weft.server.metrics import ServerMetrics
from weft.server.settings import ServerSettings
from weft.server.stream.choices import Choices
from weft.text.answer_reader import AnswerSyntax

Outcome = list[GenerationResult] | ApiError | None
"""How a request ended. None: the client disconnected, or the stream was cancelled."""

_DEFAULT_ANSWER_TOKENS = 512
"""Tokens that an answer without max_tokens reserves from the rate limit of its key. When the request ends, the tokens
that it used replace the reservation."""
_GRACE_SECONDS = 1.0
"""The engine enforces deadlines. The server ends a request this much later if the engine did not."""
_WAKE_EVERY = 64
_WAKE_EVERY_FOR_STOPS = 8
"""Tokens between two reads of an answer that is not streamed. The smaller number is for answers that a stop string or a
limit of tool calls may end. The server finds their end only when it reads. So the engine may generate up to this many
tokens too many."""


@dataclass
class IdleAnswers:
    """Counts the answers of idle work that are in the engine."""

    num_answers: int = 0


class ActiveRequest:
    """One request, from the end of its body to the end of its response. The caller of `ActiveRequests.begin` must also
    call `end`."""

    def __init__(
        self,
        key: ApiKey | None,
        limits: KeyLimits | None,
        choices: Choices,
        began: float,
        request_id: RequestId,
        given_id: str | None = None,
        is_idle_work: bool = False,
    ) -> None:
        self.id = request_id
        self.given_id = given_id
        """The id in the client's X-Request-Id header."""
        self.key = key
        self.limits = limits
        self.choices = choices
        self.began = began
        self.is_idle_work = is_idle_work
        """Idle work does not count for `max_requests` or the limits of its key, and does not wait in `FairGate`."""
        self.idle_answers = IdleAnswers()
        self.requests: Sequence[InferenceRequest] = ()
        """Set by `ActiveRequests.submit`. Empty before, and for requests that generate nothing."""
        self.queued_at: float | None = None
        """The time when the request was prepared, and its answers began to wait for the engine."""
        self.text_tokens = 0
        """Tokens of a request that generates nothing, such as /tokenize."""
        self.reserved = 0
        """Tokens reserved from the rate limit of the key."""
        self.ticket: GateTicket | None = None
        self.length: tuple[LengthFeatures, LengthDistribution] | None = None
        """The features of the request, and the length of its answers predicted from them. None: it is not submitted yet."""
        self.deadline: float | None = None
        self.expiry: asyncio.TimerHandle | None = None
        """Timer that ends the request after its deadline."""

    @asynccontextmanager
    async def until_deadline(self) -> AsyncIterator[None]:
        """Raises a 504 if the code inside runs past the deadline."""
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
        """Tokens that the client sent: prompts and predictions."""
        return self.text_tokens + sum(
            len(request.prompt) + len(request.prediction) for request in self.requests
        )

    @property
    def num_answers(self) -> int:
        return sum(request.params.n for request in self.requests)

    @property
    def headers(self) -> dict[str, str]:
        return self.limits.headers() if self.limits else {}

    def described(self, now: float) -> dict[str, Any]:
        """The entry of the request in /admin/requests."""
        num_tokens = self.choices.num_tokens
        state = "running" if num_tokens else "waiting" if self.requests else "preparing"
        return {
            "id": self.id,
            "request_id": self.given_id or self.id,
            "key": self.key.name if self.key else None,
            "state": state,
            "age": round(now - self.began, 3),
            "answers": self.num_answers,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": num_tokens,
        }


class ActiveRequests:
    """Owns the active requests. Belongs to one event loop."""

    def __init__(
        self, settings: ServerSettings, engine: EngineClient, metrics: ServerMetrics, clock: Clock
    ) -> None:
        assert engine.info is not None, "the engine must be started"
        self._lengths = LengthPredictor()
        kind = settings.engine.scheduler.policy
        by_length = kind in (PriorityPolicy.SHORTEST_JOB_FIRST, PriorityPolicy.ADAPTIVE)
        self._waits = WaitEstimate(clock, is_shortest_first=by_length)
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
        self._open: dict[ActiveRequest, None] = {}
        """The ids are not the keys: a background request has the id of the request that created it. Both may be active for
        a moment."""
        self._num_of_clients = 0
        """Active requests that are not idle work."""
        self._idle_answers = IdleAnswers()
        """The answers of idle work of all active requests together."""
        self._idle = asyncio.Event()
        self._idle.set()
        metrics.open_requests.set_function(lambda: len(self._open))
        metrics.count_held = lambda: self._gate.num_waiting

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[ActiveRequest]:
        """The active requests, oldest first."""
        return iter(self._open)

    def seconds_until_free(
        self, key: ApiKey | None = None, needed: int = 1, *, is_promise: bool = False
    ) -> float:
        """Predicted seconds until `needed` more requests of clients have ended. `key`: only requests of this key count.
        `is_promise`: a client gets this number, so it is expected to come back then."""
        scope, num_places = (
            ("", self._num_of_clients) if key is None else (key.name, self._limits[key.name].num_open)
        )
        return self._waits.seconds_until_free(
            scope, num_places, partial(self._places, key), needed, is_promise=is_promise
        )

    def _places(self, key: ApiKey | None) -> tuple[list[Place], LengthDistribution]:
        """The places that requests of clients take, and the expected lengths of answers to new requests."""
        typical = self._lengths.predict(LengthFeatures("", 0, 0, 1, self._engine.max_sequence_length))
        places = []
        for one in self._open:
            if not one.is_idle_work and (key is None or one.key == key):
                num_answers = max(1, one.num_answers)
                length = typical if one.length is None else one.length[1]
                places.append(Place(length, one.choices.num_tokens // num_answers, num_answers))
        return places, typical

    async def wait_until_idle(self, seconds: float) -> bool:
        """Returns whether all requests of clients ended within `seconds`."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def check_capacity(self, key: ApiKey | None, *, is_probe: bool = False) -> None:
        """Raises a 429 if one more request of `key` does not fit. Called before a body is read. `is_probe`: no request
        follows."""
        max_requests = self._settings.max_requests
        num_own = self._limits[key.name].num_open if key else 0
        needed = places_needed(num_own, max_requests - self._num_of_clients, len(self._limits))
        if not needed:
            return
        of_key = f", {num_own} of them with the key {key.name!r}" if key else ""
        raise ApiError(
            429,
            f"the server has {self._num_of_clients} active requests{of_key}; allowed: {max_requests} "
            "for all keys together (max_requests); try again later",
            code="queue_full",
            retry_after=self.seconds_until_free(needed=needed, is_promise=not is_probe),
        )

    def begin(
        self,
        key: ApiKey | None,
        choices: Choices,
        request_id: RequestId,
        given_id: str | None = None,
        *,
        is_idle_work: bool = False,
    ) -> ActiveRequest:
        """Adds a request. Raises a 429 if it does not fit, or if its key has reached a limit."""
        limits = None
        if not is_idle_work:
            self.check_capacity(key)  # again: other requests may have arrived while the body was read
            limits = self._limits[key.name] if key else None
            if limits is not None:
                try:
                    limits.take_request()
                except ApiError as error:
                    if error.retry_after is None:
                        error.retry_after = self.seconds_until_free(key, is_promise=True)
                    raise
                limits.num_open += 1
            self._num_of_clients += 1
            self._idle.clear()
            self._waits.accepted("")
            if key is not None:
                self._waits.accepted(key.name)
        active = ActiveRequest(key, limits, choices, self._clock(), request_id, given_id, is_idle_work)
        self._open[active] = None
        return active

    def set_deadline(self, active: ActiveRequest, seconds: float | None) -> None:
        """Ends the request `seconds` after its arrival, plus the grace, even if the engine does not respond."""
        # Idle work waits until clients leave capacity, so it has no default timeout.
        default = None if active.is_idle_work else self._settings.engine.request_timeout
        active.deadline = default if seconds is None else seconds
        if active.deadline is not None:
            left = active.began + max(0.0, active.deadline) + _GRACE_SECONDS - self._clock()
            active.expiry = asyncio.get_running_loop().call_later(
                left, active.choices.fail, active.deadline_error()
            )

    async def submit(
        self,
        active: ActiveRequest,
        requests: Sequence[InferenceRequest],
        form: AnswerSyntax | None = None,
        *,
        is_streamed: bool,
        kind: tuple[int, int] = (0, 0),
    ) -> None:
        """Submits the request to the engine. If the gate holds it back, a background task submits its answers when they
        are released. `form` is the syntax of its answers; None: plain text. `kind`: as in `Prepared`, for the prediction of
        the lengths of its answers."""
        active.choices.check()
        first = requests[0]
        most = max(self._max_tokens(request, self._engine.max_sequence_length) for request in requests)
        owner = active.key.name if active.key else ""
        features = LengthFeatures(owner, *kind, len(first.prompt), most)
        distribution = self._lengths.predict(features)
        expected = distribution.expected()
        active.length = features, distribution
        active.requests = requests = [request.replaced(expected=expected) for request in requests]
        active.queued_at = self._clock()
        if active.limits is not None:
            answer_tokens = sum(
                request.params.n * self._max_tokens(request, _DEFAULT_ANSWER_TOKENS) for request in requests
            )
            active.reserved = active.limits.reserve(active.prompt_tokens + answer_tokens)
        job = AnswerJob(first.priority, active.prompt_tokens, active.num_answers, round(expected.mean))
        if active.is_idle_work:
            self._add_idle_answers(active, job.num_answers)
            ticket = None
        else:
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
        """Reserves tokens from the rate limit of the key for text work, or raises a 429. At its end the request is
        charged its `text_tokens`."""
        active.text_tokens = num_tokens
        if active.limits is not None:
            active.reserved = active.limits.reserve(num_tokens)

    def end(self, active: ActiveRequest, outcome: Outcome) -> None:
        """Removes a request and charges its key. A request that was refused, or failed by a fault of the server, costs
        nothing. Any other costs the computed tokens, even after its deadline: a short deadline must not be
        free."""
        if active not in self._open:
            return
        del self._open[active]
        if active.expiry is not None:
            active.expiry.cancel()
        num_generated = active.choices.num_tokens
        self._metrics.generated(num_generated)
        used = None
        if not isinstance(outcome, ApiError) or (num_generated and outcome.is_client_fault):
            used = num_generated
        self._learn(active, outcome)
        if active.ticket is not None:
            self._gate.leave(active.ticket, used)
        num_tokens = 0 if used is None else active.prompt_tokens + used
        if active.limits is not None:
            active.limits.num_open -= 1
            active.limits.correct(active.reserved, num_tokens)
        if active.key is not None:
            self._metrics.used(active.key.name, num_tokens)
        if active.is_idle_work:
            self._remove_idle_answers(active.idle_answers, active.idle_answers.num_answers)
            return
        self._num_of_clients -= 1
        if not self._num_of_clients:
            self._idle.set()

    def _learn(self, active: ActiveRequest, outcome: Outcome) -> None:
        """Adds the lengths of the answers to the length predictor, and their times to the estimate of waits."""
        if active.length is None:
            return
        features = active.length[0]
        if not isinstance(outcome, list):
            # An error or a disconnect ended the answers early: this length is only a lower bound.
            length = active.choices.num_tokens // max(1, active.num_answers)
            self._lengths.learn(features, length, was_cut=True)
            return
        for result in outcome:
            was_cut = result.finish_reason is not FinishReason.STOP
            self._lengths.learn(features, result.completion_token_count, was_cut=was_cut)
            if not active.is_idle_work:  # idle work may be paused, so its times would be too long
                self._waits.record(result.prefill_time, result.decode_time, result.decode_steps)

    def described(self) -> list[dict[str, Any]]:
        now = self._clock()
        return [active.described(now) for active in self._open]

    def prompt_of(self, name: str) -> Sequence[int] | None:
        """The tokens of a prompt. `name` is the id of a request, of one of its prompts, or of an answer. None: there is
        no such request, or its prompt is still being tokenised."""
        for active in self._open:
            for request in active.requests:
                if name in (active.id, request.request_id) or name.startswith(f"{request.request_id}-"):
                    return request.prompt
        return None

    def cancel(self, request_id: str) -> bool:
        """Cancels a request for an operator. Returns False if there is none with this id."""
        found = [active for active in self._open if active.id == request_id]
        for active in found:
            active.choices.fail(
                ApiError(403, "an operator of this server cancelled the request", code="cancelled")
            )
        return bool(found)

    async def _submit_when_released(
        self, active: ActiveRequest, form: AnswerSyntax | None, is_streamed: bool, wake_every: int
    ) -> None:
        """Submits all answers in order, each when the gate releases it. Answers to the same prompt that are released
        together are submitted in one message."""
        requests, ticket = active.requests, active.ticket
        num_each = requests[0].params.n
        num_answers, num_submitted = num_each * len(requests), 0
        queued_at, waited = self._clock(), 0.0
        while num_submitted < num_answers:
            if num_submitted:
                await asyncio.sleep(0)  # a thousand answers without a pause would block the event loop
            num_to_submit = num_answers - num_submitted
            if ticket is not None:
                if not ticket.can_submit.is_set():
                    await self._wait_for_release(ticket, queued_at, requests[0].deadline)
                    waited = self._clock() - queued_at
                if ticket.is_over:
                    return  # cancelled while it waited
                num_to_submit = ticket.num_to_submit
            prompt, first = divmod(num_submitted, num_each)
            count = min(num_to_submit, num_each - first)
            num_submitted += count
            await active.choices.submit(
                [requests[prompt]],
                form,
                indices=range(first, first + count),
                is_last=num_submitted == num_answers,
                is_streamed=is_streamed,
                wake_every=wake_every,
                waited=waited,
            )
            if ticket is not None:
                self._gate.submitted(ticket, count)

    async def _wait_for_release(self, ticket: GateTicket, queued_at: float, deadline: float | None) -> None:
        left = None if deadline is None else max(0.0, queued_at + deadline - self._clock())
        try:
            await asyncio.wait_for(ticket.can_submit.wait(), left)
        except TimeoutError:
            raise ApiError(
                504,
                f"deadline of {deadline} s passed while the request waited for the engine",
                code="deadline_exceeded",
            ) from None

    def _add_idle_answers(self, active: ActiveRequest, count: int) -> None:
        """Counts answers of idle work. Raises a 429 if the engine would have more of them than one step can run:
        they would only fill its queue. If the engine has none, any number is accepted."""
        max_answers = self._settings.engine.scheduler.max_running
        num_answers = self._idle_answers.num_answers
        if num_answers and num_answers + count > max_answers:
            message = f"{num_answers} answers of batches are in the engine; allowed: {max_answers}"
            raise ApiError(429, message, code="idle_work_full")
        active.idle_answers.num_answers = count
        self._idle_answers.num_answers += count
        # Passes `idle_answers` and not the request: the request refers to its choices, which would be a reference cycle.
        active.choices.on_answer_end = partial(self._idle_answer_ended, active.idle_answers)

    def _idle_answer_ended(self, own: IdleAnswers, num_tokens: int) -> None:
        self._remove_idle_answers(own, min(1, own.num_answers))

    def _remove_idle_answers(self, own: IdleAnswers, count: int) -> None:
        own.num_answers -= count
        self._idle_answers.num_answers -= count

    def _count_answers(self) -> tuple[int, int] | None:
        """Answers of clients in the engine, and how many of them have no token; None while the engine starts. Idle work does
        not delay them, so it is not counted."""
        engine = self._engine
        if engine.state is EngineState.STARTING:
            return None  # the gate releases no answers until the engine is ready
        num_idle = self._idle_answers.num_answers - engine.shared_answers.num_idle_followers
        return max(0, engine.num_unfinished - num_idle), max(0, engine.num_without_tokens - num_idle)

    def _max_tokens(self, request: InferenceRequest, default: int) -> int:
        """The most tokens that an answer can have. `default` applies if the request has no max_tokens."""
        room = max(1, self._engine.max_sequence_length - len(request.prompt))
        requested = request.params.max_tokens
        return min(room, default if requested is None else requested)
