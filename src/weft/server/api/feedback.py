"""`/v1/feedback`: clients score and correct answers. The error for an answer of another key is the same 404 as for an
unknown id."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.server.admission.keys import ApiKey
from weft.server.api.answer_format import Operation
from weft.server.api.listing import (
    Page,
    count_bytes,
    counted_list,
    list_object,
    owner_of,
    page_parameters,
    page_query,
)
from weft.server.api.response_shapes import Shape
from weft.server.api.services import Services, owner_of_key
from weft.server.errors import ApiError, json_response, refusal
from weft.server.http.scope import KEY
from weft.server.plain_requests import PlainRequest
from weft.server.state import feedback as table
from weft.server.state.feedback import Feedback, KeptAnswers, Totals

MAX_LABELS, MAX_LABEL, MAX_CORRECTION = 16, 64, 64 << 10
_PREFIX = re.compile(r"(chatcmpl-|cmpl-|msg_|resp_)?(.{1,256})", re.ASCII)
"""The id of a response: the prefix of its API format, then the id of the request."""
_TAG = "Feedback"
_PATH = "/v1/feedback"
_OF_KEY: Mapping[str, Mapping[str, Any]] = {
    "key": {"type": "string", "description": "For admin keys: the name of another key; '*': all keys."}
}


class FeedbackRequest(msgspec.Struct, frozen=True):
    """A score, a correction and labels for one answer."""

    response_id: Annotated[
        str, Meta(description="The id of the response; for Ollama's API, its x-request-id header.")
    ]
    score: Annotated[
        float,
        Meta(
            description="-1: bad; 0: neutral; 1: good.",
            extra_json_schema={"minimum": -1, "maximum": 1},
        ),
    ]
    index: Annotated[int, Meta(description="Which answer of the response, with `n` or several prompts.")] = 0
    correction: Annotated[
        str | None,
        Meta(description=f"The answer that would have been right; at most {MAX_CORRECTION} bytes."),
    ] = None
    labels: Annotated[
        list[str],
        Meta(description=f"At most {MAX_LABELS} texts, each of 1 to {MAX_LABEL} characters."),
    ] = []


class FeedbackObject(Shape):
    id: Annotated[str, Meta(description="The id of the response.")]
    object: Literal["feedback"]
    created_at: int
    index: int
    score: float


class DeletedFeedback(Shape):
    object: Literal["feedback.deleted"]
    deleted: bool
    responses: Annotated[int, Meta(description="Responses that were deleted with their feedback.")]


class FeedbackStatistics(Shape):
    object: Literal["feedback.statistics"]
    responses: Annotated[int, Meta(description="Responses that are kept, with feedback or without.")]
    bytes: int
    positive: int
    negative: int
    neutral: int
    corrected: int


class ScoredAnswer(Shape):
    index: int
    output: Annotated[dict[str, Any] | str, Meta(description="A message, or the text of a completion.")]
    score: Annotated[float | None, Meta(description="null: this answer has no feedback.")]
    correction: str | None
    labels: list[str]


class FeedbackEntry(Shape):
    """A response with its input, its answers and their feedback."""

    id: Annotated[str, Meta(description="The id of the request.")]
    object: Literal["feedback.entry"]
    created_at: int
    model: str
    key: Annotated[str | None, Meta(description="The owner of the response. null: there are no keys.")]
    messages: Annotated[list[dict[str, Any]] | None, Meta(description="The conversation; null: prompts.")]
    tools: list[dict[str, Any]] | None
    prompts: list[str] | None
    answers: list[ScoredAnswer]


class FeedbackList(Page):
    data: list[FeedbackEntry]


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("post", _PATH): Operation(
        "Send feedback about an answer",
        "Only where the server keeps answers (feedback_days) and the key allows it. Later feedback about the same answer "
        "replaces it.",
        _TAG,
        FeedbackObject,
        FeedbackRequest,
        errors=(400, 403, 404, 408, 413, 429, 500, 503, 507),
    ),
    ("get", _PATH): Operation(
        "List feedback",
        "Responses that have feedback, newest first. The default limit is 20; a page also ends after 4 MiB.",
        _TAG,
        FeedbackList,
        errors=(400, 403, 404, 413, 429, 503),
        query={**page_parameters(100), **_OF_KEY},
    ),
    ("delete", _PATH): Operation(
        "Delete all kept answers and feedback of the key",
        "Deleted bytes may stay in the file of the database until they are overwritten.",
        _TAG,
        DeletedFeedback,
        errors=(403, 503),
        query=_OF_KEY,
    ),
    ("get", f"{_PATH}/statistics"): Operation(
        "Count feedback", "", _TAG, FeedbackStatistics, errors=(403, 503), query=_OF_KEY
    ),
}


def routes(services: Services) -> Sequence[Route]:
    handlers = _Feedback(services)
    return [
        Route(_PATH, handlers.give, methods=["POST"]),
        Route(_PATH, handlers.list, methods=["GET"]),
        Route(_PATH, handlers.delete, methods=["DELETE"]),
        Route(f"{_PATH}/statistics", handlers.count, methods=["GET"]),
    ]


class _Feedback:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._store = services.store
        self._answers = services.answers

    async def give(self, request: Request) -> Response:
        key: ApiKey | None = request.scope[KEY]
        if not self._answers.is_on:
            message = (
                "this server keeps no answers, so it takes no feedback; its operator can set feedback_days"
            )
            raise ApiError(403, message, code="feedback_off")
        if not self._answers.keeps_for(key):
            message = "no answers are kept for this key; the operator can allow it: feedback = true in the file of keys"
            raise ApiError(403, message, code="feedback_not_allowed")
        owner = owner_of_key(key)

        async def work(plain: PlainRequest[FeedbackRequest]) -> dict[str, Any]:
            return await self._give(plain.fields, owner)

        return await self._services.plain_requests.handle(request, FeedbackRequest, work)

    async def _give(self, given: FeedbackRequest, owner: str) -> dict[str, Any]:
        now = self._store.wall_clock()
        if not -1 <= given.score <= 1:
            raise refusal(f"score is {given.score}; allowed: -1 to 1", "score")
        feedback = Feedback(
            given.index, given.score, _correction(given), msgspec.json.encode(_labels(given)), now
        )
        found = _PREFIX.fullmatch(given.response_id)
        if found is None:
            raise _not_found(given.response_id)
        await self._answers.flush()

        def give(connection: Any) -> None:
            count = table.num_answers(connection, found[2], owner, now)
            if not count:
                raise _not_found(given.response_id)
            if not 0 <= given.index < count:
                message = (
                    f"index is {given.index}; the response has {count} answers; allowed: 0 to {count - 1}"
                )
                raise refusal(message, "index")
            table.give(connection, found[2], owner, feedback, self._answers.room)
            self._answers.count(connection)

        await self._store.run(give)
        self._answers.num_given[_sign(given.score)] += 1
        return {
            "id": given.response_id,
            "object": "feedback",
            "created_at": int(now),
            "index": given.index,
            "score": given.score,
        }

    async def list(self, request: Request) -> Response:
        query, owner = page_query(request, default_limit=20, max_limit=100), _asked_owner(request)
        now = self._store.wall_clock()
        await self._answers.flush()
        found = await self._store.run(lambda connection: table.read(connection, owner, query, now))
        if found is None:
            message = f"after is {query.after!r:.80}; there is no such object"
            raise ApiError(404, message, param="after", code="not_found")
        rows, has_more = found
        count_bytes(request, sum(row.num_bytes for row, _ in rows))
        data = [_entry(row, given) for row, given in rows]
        return counted_list(request, list_object(data, [row.id for row, _ in rows], has_more=has_more))

    async def delete(self, request: Request) -> Response:
        owner = _asked_owner(request)
        await self._answers.flush()

        def delete(connection: Any) -> int:
            count = table.delete(connection, owner)
            self._answers.count(connection)
            return count

        count = await self._store.run(delete)
        return json_response({"object": "feedback.deleted", "deleted": True, "responses": count})

    async def count(self, request: Request) -> Response:
        owner = _asked_owner(request)
        await self._answers.flush()
        found: Totals = await self._store.run(lambda connection: table.totals(connection, owner))
        content = asdict(found)
        content = {"responses": content.pop("requests"), "bytes": content.pop("num_bytes"), **content}
        return json_response({"object": "feedback.statistics", **content})


def _asked_owner(request: Request) -> str | None:
    """The owner whose feedback the request is about. None: all owners."""
    given = request.query_params.get("key")
    own = owner_of(request)
    if given is None or given == own:
        return own
    key: ApiKey | None = request.scope[KEY]
    if key is None or not key.admin:
        raise ApiError(
            403, "feedback of other keys needs an admin key", param="key", code="admin_key_required"
        )
    return None if given == "*" else given


def _correction(given: FeedbackRequest) -> str | None:
    size = len((given.correction or "").encode())
    if size > MAX_CORRECTION:
        raise refusal(f"correction has {size} bytes; allowed: {MAX_CORRECTION}", "correction")
    return given.correction or None


def _labels(given: FeedbackRequest) -> list[str]:
    if len(given.labels) > MAX_LABELS:
        raise refusal(f"labels has {len(given.labels)} entries; allowed: {MAX_LABELS}", "labels")
    for label in given.labels:
        if not 1 <= len(label) <= MAX_LABEL:
            message = f"labels has a text of {len(label)} characters; allowed: 1 to {MAX_LABEL}"
            raise refusal(message, "labels")
    return given.labels


def _not_found(response_id: str) -> ApiError:
    message = (
        f"no answer of {response_id!r:.80} is kept: the id is unknown, or belongs to another key, or the answer was "
        "deleted"
    )
    return ApiError(404, message, param="response_id", code="response_not_found")


def _sign(score: float) -> Literal["positive", "negative", "neutral"]:
    return "positive" if score > 0 else "negative" if score < 0 else "neutral"


def _entry(row: KeptAnswers, given: Sequence[Feedback]) -> dict[str, Any]:
    content = msgspec.json.decode(row.input, type=dict[str, msgspec.Raw])
    by_index = {one.answer: one for one in given}
    return {
        "id": row.id,
        "object": "feedback.entry",
        "created_at": int(row.created_at),
        "model": row.model,
        "key": row.owner or None,
        **{name: content.get(name) for name in ("messages", "tools", "prompts")},
        "answers": [
            _answer(index, output, by_index.get(index))
            for index, output in enumerate(msgspec.json.decode(row.answers, type=list[msgspec.Raw]))
        ],
    }


def _answer(index: int, output: msgspec.Raw, feedback: Feedback | None) -> dict[str, Any]:
    return {
        "index": index,
        "output": output,
        "score": None if feedback is None else feedback.score,
        "correction": None if feedback is None else feedback.correction,
        "labels": [] if feedback is None else msgspec.Raw(feedback.labels),
    }
