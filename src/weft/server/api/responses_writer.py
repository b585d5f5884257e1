"""Owns one response while it is generated: its items (`OutputItems`), its object, and its row in the store.

A response that is stored is written before its last bytes are sent: a response that a client has seen as complete
survives a crash. A response that fails, or whose client leaves, is not stored, except for a background response, whose
row exists from the beginning.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from weft.request import FinishReason, GenerationResult
from weft.server.api.answer_format import AnswerContext, AnswerWriter
from weft.server.api.logprob_entries import logprob_entry
from weft.server.api.responses_background import begin_background, failure, take_over
from weft.server.api.responses_items import check_items, listed_items
from weft.server.api.responses_output import OutputItems, logprob_entries
from weft.server.api.responses_tools import known_choice, known_tools, shown_tools
from weft.server.errors import ApiError
from weft.server.state import responses as table
from weft.server.stream.choices import Choices, Piece
from weft.text.answer_parts import AnswerParts, Content, Delta

if TYPE_CHECKING:
    from weft.server.api.responses import ResponsesRequest
    from weft.server.api.services import Caller

_encode = msgspec.json.Encoder().encode
_DELTA_BYTES = 128
"""Memory of one part of an answer, without its text."""
_SEARCH_RESULTS = "file_search_call.results"
_SEALED_THOUGHTS = "reasoning.encrypted_content"


class ResponsesWriter(AnswerWriter):
    smallest_entry = 50

    def __init__(self, api_request: ResponsesRequest, context: AnswerContext) -> None:
        # `OutputItems` keeps the logprobs, so the caller need not.
        super().__init__(dataclasses.replace(context, wants_logprobs=False))
        self._token_bytes = context.tokenizer.token_bytes
        self._wants_logprobs = context.wants_logprobs
        self._items = OutputItems(
            context.request_id,
            shown_tools(api_request.tools or ()),
            is_streamed=api_request.stream,
            wants_summary=api_request.reasoning.summary is not None,
            wants_sealed=_SEALED_THOUGHTS in api_request.include,
            wants_logprobs=context.wants_logprobs,
            search=getattr(api_request, "search", None),
            wants_results=_SEARCH_RESULTS in api_request.include,
        )
        self._id = f"resp_{context.request_id}"
        self._created = time.time()
        self._previous_id = api_request.previous_response_id
        self._is_background = api_request.background
        self._is_stored = api_request.store is not False
        self._parameters = _encode(_parameters(api_request, context.model))[1:]
        """The part of the response object that never changes, without its opening bracket."""
        self._input = b""
        self._num_inputs = 0
        if self._is_stored:
            items = listed_items(check_items(api_request.input), context.request_id)
            self._input, self._num_inputs = _encode(items), len(items)
        self._request = _body(api_request) if api_request.background else b""
        self._logprobs: list[dict[str, Any]] = []
        """The logprobs of tokens whose text has not arrived yet."""
        self._last = b""
        """The response object at the end of the response."""
        self._status = "in_progress"

    @property
    def kept_bytes(self) -> int:
        return len(self._parameters) + len(self._input) + len(self._request)

    # ------------------------------------------------------------------ beginning and end

    def prompt_is_ready(self, api_request: ResponsesRequest, context: AnswerContext) -> None:
        super().prompt_is_ready(api_request, dataclasses.replace(context, wants_logprobs=False))
        self._items.search = getattr(api_request, "search", None)

    async def start(self, caller: Caller) -> bytes | None:
        if caller.services.settings.response_days <= 0:
            self._is_stored = False
        if not self._is_background:
            return None
        if caller.is_internal:
            self._input = self._request = b""  # the row in the store has them already
            self._created = await take_over(caller, self._id)
            return None
        queued = self._object("queued")
        await begin_background(caller, self._row(queued, "queued"))
        return queued

    async def finish(self, caller: Caller, choices: Choices) -> None:
        [result] = choices.results
        is_complete = result.finish_reason is not FinishReason.LENGTH
        self._items.close(is_complete=is_complete)
        self._status = "completed" if is_complete else "incomplete"
        self._last = self._object(
            self._status,
            completed_at=int(time.time()) if is_complete else None,
            incomplete_details=None if is_complete else {"reason": "max_output_tokens"},
            usage=_usage(result, choices.num_reasoning_tokens, self.context.cacheable_tokens),
        )
        if self._is_stored:
            await self._store(caller)

    async def _store(self, caller: Caller) -> None:
        """Writes the complete response to the store: as a new row, or into the row of a background response."""
        services = caller.services
        row = self._row(self._last, self._status)
        now, keeping = services.store.wall_clock(), table.keeping(services.settings)
        if self._is_background:
            await services.store.run(
                lambda connection: table.change_unfinished(
                    connection, row.id, caller.owner, row.status, row.response, row.num_items
                )
            )
        else:
            await services.store.run(
                lambda connection: table.insert(connection, row, caller.owner, now, keeping)
            )

    def _row(self, response: bytes, status: str) -> table.StoredResponse:
        return table.StoredResponse(
            self._id,
            self._created,
            self._previous_id,
            self._input,
            response,
            status,
            self._num_inputs + self._items.num_items,
            request=self._request or None,
        )

    def _object(self, status: str, **more: Any) -> bytes:
        """The response object as it is now. `more` replaces fields that are null."""
        changing = {
            "id": self._id,
            "object": "response",
            "created_at": int(self._created),
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "store": self._is_stored,
            "usage": None,
            **more,
            "output": msgspec.Raw(self._items.as_json()),
        }
        return _encode(changing)[:-1] + b"," + self._parameters

    # ------------------------------------------------------------------ a stream

    def begin(self) -> bytes:
        self._lifecycle("response.created", self._object("in_progress"))
        self._lifecycle("response.in_progress", self._object("in_progress"))
        self._items.begin_search()
        return self._items.take_events()

    def keep_alive(self) -> bytes:
        self._items.end_search()
        self._lifecycle("response.in_progress", self._object("in_progress"))
        return self._items.take_events()

    def events(self, pieces: Sequence[Piece]) -> bytes:
        for piece in pieces:
            self._items.add(piece, self._take_logprobs(piece) if self._wants_logprobs else b"")
        return self._items.take_events()

    def end(self, choices: Choices) -> bytes:
        self._lifecycle(f"response.{self._status}", self._last)
        return self._items.take_events()

    def error(self, error: ApiError) -> bytes:
        found = failure(error.status, error.code, error.message)
        self._lifecycle("response.failed", self._object("failed", error=found))
        return self._items.take_events()

    def _lifecycle(self, kind: str, response: bytes) -> None:
        """Adds an event that has the whole response object."""
        self._items.event(kind, response=msgspec.Raw(response))

    # ------------------------------------------------------------------ one body

    def collect(self, pieces: Sequence[Piece]) -> int:
        num_bytes = 0
        for piece in pieces:
            logprobs = self._take_logprobs(piece) if self._wants_logprobs else b""
            self._items.add(piece, logprobs)
            num_bytes += len(piece.text) + len(logprobs) + _DELTA_BYTES * len(piece.deltas or ())
        return num_bytes

    def answer(self, index: int, result: GenerationResult, answer: str | AnswerParts) -> tuple[bytes, bytes]:
        return self._last, b""

    # ------------------------------------------------------------------ logprobs

    def _take_logprobs(self, piece: Piece) -> bytes:
        """The logprobs of the message's text in this piece, as JSON without brackets. Entries of tokens whose text is held
        back are returned later, with their text. Entries of thoughts and calls are dropped."""
        pairs = zip(piece.tokens, piece.logprobs, strict=True)
        self._logprobs += [logprob_entry(*pair, self._token_bytes) for pair in pairs]
        kind = _first_kind(piece.deltas)
        if piece.deltas is None or kind is Content:
            entries, self._logprobs = self._logprobs, []
            return logprob_entries(entries)
        if kind is not None:
            self._logprobs.clear()
        return b""


def _first_kind(deltas: Sequence[Delta] | None) -> type[Delta] | None:
    """`Content` if one of the deltas is content, else the type of the first delta."""
    kinds = [type(delta) for delta in deltas or ()]
    return Content if Content in kinds else kinds[0] if kinds else None


def _parameters(api_request: ResponsesRequest, model: str) -> dict[str, Any]:
    """The fields of the response object that repeat the request."""
    text, reasoning = api_request.text, api_request.reasoning
    sampling = {name: getattr(api_request, name) for name in ("temperature", "top_p")}
    return {
        "background": api_request.background,
        "instructions": api_request.instructions,
        "max_output_tokens": api_request.max_output_tokens,
        "max_tool_calls": api_request.max_tool_calls,
        "metadata": api_request.metadata or {},
        "model": model,
        "parallel_tool_calls": api_request.parallel_tool_calls,
        "previous_response_id": api_request.previous_response_id,
        "prompt_cache_key": api_request.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "safety_identifier": api_request.safety_identifier,
        "service_tier": "default",
        **sampling,
        "text": {"format": text.format or {"type": "text"}, "verbosity": text.verbosity},
        "tool_choice": known_choice(api_request.tool_choice, api_request.tools or ()),
        "tools": known_tools(api_request.tools or ()),
        "top_logprobs": api_request.top_logprobs or 0,
        "truncation": api_request.truncation,
        "user": api_request.user,
    }


def _usage(result: GenerationResult, num_reasoning_tokens: int, cacheable_tokens: int) -> dict[str, Any]:
    num_input, num_output = result.prompt_token_count, result.completion_token_count
    cached = result.cached_token_count
    written = max(0, cacheable_tokens - cached)
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": num_input + num_output,
    }


def _body(api_request: ResponsesRequest) -> bytes:
    """The body of the request, for running it later. References in it are resolved."""
    names = _request_fields(type(api_request))
    return _encode({name: getattr(api_request, name) for name in names})


def _request_fields(kind: type[msgspec.Struct]) -> Sequence[str]:
    """The fields that a client may send: all of the type except those that `load` adds."""
    return [name for name in kind.__struct_fields__ if name not in ("earlier", "stored_bytes", "search")]
