"""Handles requests for answers, from their body to their response."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from weft.server.admission.active_requests import ActiveRequest, Outcome
from weft.server.admission.keys import ApiKey
from weft.server.api.answer_format import AnswerFormat, AnswerWriter, B, ParsedRequest
from weft.server.api.preparing import Prepared, Preparer
from weft.server.api.services import Caller, Services
from weft.server.errors import ApiError, json_response, renamed_fields, warning_header
from weft.server.http.bodies import BodyReader, read_body
from weft.server.http.byte_budget import RequestBytes
from weft.server.http.scope import ANSWER, BODY, KEY
from weft.server.internal import INTERNAL, InternalRequest
from weft.server.learned.answers import AnswerKeeper
from weft.server.logs import current_record
from weft.server.metrics import ServerMetrics
from weft.server.plain_requests import client_id
from weft.server.stream.choices import Choices
from weft.server.stream.events import Disconnected, EventStream, unless_disconnected
from weft.server.stream.loop_turns import LoopTurns
from weft.server.stream.whole_answer import WholeAnswer, min_response_bytes

_HEADERS_SECONDS = 0.25
"""A stream delays its status line and its first event by up to this long. If the engine refuses the request in this
time, the response has an error status. A later refusal is sent as an event."""


class AnswerRequests:
    """Belongs to one event loop."""

    def __init__(
        self,
        services: Services,
        check_open: Callable[[], None],
        bodies: BodyReader,
        preparer: Preparer,
        metrics: ServerMetrics,
        loop_turns: LoopTurns,
        answers: AnswerKeeper,
    ) -> None:
        """`check_open` raises an ApiError while the server accepts no requests."""
        self._services = services
        self._check_open = check_open
        self._bodies = bodies
        self._preparer = preparer
        self._metrics = metrics
        self._loop_turns = loop_turns
        self._answers = answers
        self._active_requests = services.active_requests
        self._name = services.settings.names[0]

    async def handle(self, answer_format: AnswerFormat[Any], request: Request) -> Response:
        """Handles one request and returns its response. A streamed response is sent after this call has returned."""
        if self._services.models.generator is None:
            self._services.check_model(None)
        key: ApiKey | None = request.scope[KEY]
        internal: InternalRequest | None = request.scope.get(INTERNAL)
        is_idle_work = internal is not None and internal.is_idle_work
        self._check_open()
        if not is_idle_work:
            self._active_requests.check_capacity(key)
        body = await read_body(request)
        size = len(body)
        answer_bytes: RequestBytes = request.scope[ANSWER]
        choices = Choices(self._services.engine, self._services.text.tokenizer, answer_bytes)
        record = current_record()
        active = self._active_requests.begin(
            key, choices, record.id, record.given_id, is_idle_work=is_idle_work
        )
        record.active = active
        outcome: Outcome = ApiError.internal_error()  # for an unexpected exception; else it is replaced below
        is_owned_by_response = False
        try:
            await self._loop_turns.wait()
            client = client_id(request)
            api_request, unknown = await unless_disconnected(
                request.receive, self._bodies.read(answer_format.request_type, body, client)
            )
            record.model = api_request.model
            unknown = [*unknown, *answer_format.ignored(api_request)]
            with renamed_fields(answer_format.field_names(api_request)):
                if (content := answer_format.answer_at_once(api_request, self._name)) is not None:
                    self._services.check_model(api_request.model)
                    outcome = []
                    return json_response(content, headers=warning_header(unknown))
                self._active_requests.set_deadline(active, api_request.deadline)
                caller = Caller(
                    self._services, key, active.id, request.scope[BODY], INTERNAL in request.scope
                )
                beginning = self._begin(
                    answer_format, api_request, size, active, answer_bytes, caller, client
                )
                prepared, at_once = await unless_disconnected(request.receive, beginning)
                headers = warning_header(unknown) | active.headers
                if at_once is not None:
                    outcome = []
                    return Response(at_once, 200, headers, media_type="application/json")
                finish = partial(self._finish, prepared.writer, caller)
                record.is_streamed = prepared.is_streamed
                # Frees the body: only its tokens, and what the writer keeps, are needed from here on.
                del body, api_request
                # A streamed request that searches files is not submitted yet: its search needs the body.
                if active.requests:
                    request.scope[BODY].keep(prepared.writer.kept_bytes)
                if prepared.is_streamed:
                    stream = EventStream(
                        choices,
                        prepared.writer,
                        self._metrics.token_times(prepared.requests[0].priority),
                        loop_turns=self._loop_turns,
                        began=active.began,
                        silence_seconds=self._services.settings.silence_seconds,
                        headers=headers,
                        finish=finish,
                        on_end=lambda outcome: self._end(outcome, prepared, active),
                    )
                    is_owned_by_response = True
                    return stream
                whole_answer = WholeAnswer(prepared.writer, answer_bytes)
                results = await unless_disconnected(
                    request.receive, whole_answer.collect(choices, self._loop_turns, finish)
                )
            self._end(results, prepared, active)
            is_owned_by_response = True
            return whole_answer.response(headers)
        except Disconnected:
            outcome = None
            raise
        except ApiError as error:
            outcome = error
            error.headers |= active.headers
            raise
        finally:
            if not is_owned_by_response:
                choices.cancel()
                self._active_requests.end(active, outcome)
            outcome = None  # an error has a traceback that refers to this frame: a reference cycle

    async def _begin(
        self,
        answer_format: AnswerFormat[B],
        api_request: B,
        size: int,
        active: ActiveRequest,
        answer_bytes: RequestBytes,
        caller: Caller,
        client_id: str,
    ) -> tuple[Prepared, bytes | None]:
        """Prepares the request and submits it. If `FairGate` holds it back, or it searches files and is streamed, it is
        submitted later. Raises if the engine refuses it. Also returns the whole answer, if there is nothing to generate."""
        self._services.check_model(api_request.model)
        async with active.until_deadline():
            api_request = await answer_format.load(api_request, caller)
            parsed = await self._preparer.parse(answer_format, api_request, size, client_id)
            prepare = partial(
                self._prepare, answer_format, api_request, parsed, size, active, caller, client_id
            )
            if parsed.is_search_pending and parsed.is_streamed:
                prepared = self._preparer.before_search(
                    answer_format, api_request, parsed, active.id, active.key
                )
                await prepared.writer.start(caller)
                names = answer_format.field_names(api_request)
                active.choices.submit_later(
                    partial(self._search_and_submit, prepare, prepared, active, caller, names)
                )
                return prepared, None
            prepared = await prepare()
            if not prepared.is_streamed:
                length = self._services.engine.max_sequence_length
                answer_bytes.check(min_response_bytes(prepared.requests, prepared.writer, length))
            at_once = await prepared.writer.start(caller)
            if at_once is not None:
                return prepared, at_once
            await self._active_requests.submit(
                active,
                prepared.requests,
                prepared.answer_form,
                is_streamed=prepared.is_streamed,
                kind=prepared.kind,
            )
        if prepared.is_streamed:
            try:
                await asyncio.wait_for(active.choices.wait(), _HEADERS_SECONDS)
            except TimeoutError:
                pass
            active.choices.check()
        return prepared, None

    async def _prepare(
        self,
        answer_format: AnswerFormat[B],
        api_request: B,
        parsed: ParsedRequest,
        size: int,
        active: ActiveRequest,
        caller: Caller,
        client_id: str,
        writer: AnswerWriter | None = None,
    ) -> Prepared:
        """Runs the file search if there is one, and prepares the request. Begins to keep the answer unless `store` is
        false."""
        if parsed.is_search_pending:
            api_request = await answer_format.search(api_request, caller)
            parsed = await self._preparer.parse(answer_format, api_request, size, client_id)
        prepared = await self._preparer.prepare(
            answer_format,
            api_request,
            parsed,
            size,
            active.id,
            active.key,
            client_id,
            is_idle_work=active.is_idle_work,
            writer=writer,
        )
        self._services.learned.note_owner(prepared.requests[0].cache_salt, caller.owner)
        if getattr(api_request, "store", None) is not False:
            active.choices.transcript = self._answers.begin(
                active.key, caller.owner, active.id, parsed, prepared.requests, self._name, size
            )
        return prepared

    async def _finish(self, writer: AnswerWriter, caller: Caller, choices: Choices) -> None:
        """Runs after the last piece of the answer, before the last bytes of the response are sent."""
        await writer.finish(caller, choices)
        self._answers.put(choices.transcript)

    async def _search_and_submit(
        self,
        prepare: Callable[..., Awaitable[Prepared]],
        begun: Prepared,
        active: ActiveRequest,
        caller: Caller,
        names: Mapping[str, str],
    ) -> None:
        """Runs the file search of a streamed request, then submits it. `prepare` searches; `begun` has the writer, which
        has started the stream."""
        with renamed_fields(names):
            async with active.until_deadline():
                prepared = await prepare(writer=begun.writer)
                caller.body.keep(prepared.writer.kept_bytes)
                await self._active_requests.submit(
                    active,
                    prepared.requests,
                    prepared.answer_form,
                    is_streamed=True,
                    kind=prepared.kind,
                )

    def _end(self, outcome: Outcome, prepared: Prepared, active: ActiveRequest) -> None:
        """Ends an active request. Records its outcome in the metrics and in its log record."""
        self._active_requests.end(active, outcome)
        record = current_record()
        record.is_client_gone = outcome is None
        if isinstance(outcome, ApiError):
            record.error_code = outcome.code
            self._metrics.failed(outcome.status)
        elif outcome:
            record.results, record.num_choices_per_prompt = outcome, prepared.requests[0].params.n
            seconds = None if active.is_idle_work else time.monotonic() - active.began
            self._metrics.answered(outcome, len(prepared.requests), seconds)
            first = outcome[0].time_to_first_token
            if not prepared.is_streamed and not active.is_idle_work and first is not None:
                self._metrics.token_times(prepared.requests[0].priority).first_token(first)
