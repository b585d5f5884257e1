"""Errors of the API. Each has a status, and a body with a message, a type, a field and a code. An API format may write
both differently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from weft.engine.ipc.client import EngineDiedError, EngineStalledError
from weft.engine.ipc.remote_answer import SlowReaderError
from weft.errors import (
    EngineStoppedError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    WeftError,
)
from weft.request import FailureKind, GenerationResult
from weft.server.admission.waiting import retry_after
from weft.server.logs import current_record
from weft.server.state.store import StoreError, StoreFullError

ERROR_WRITER = "weft.error_writer"
"""Scope entry with `AnswerFormat.error`; None if the route has no API format."""
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """Ends a request with this status. The message is sent to the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.retry_after = retry_after
        """Seconds after which a retry can succeed. If it is None, the app predicts a value for 429 and 503."""
        self.prompt_lengths: tuple[int, int] | None = None
        """For a prompt that is too long: the number of its tokens, and the limit. Some formats write a message of their own
        with both."""

    @classmethod
    def internal_error(cls) -> ApiError:
        return cls(500, "internal server error; the log of the server has the details", code="internal_error")

    @property
    def is_client_fault(self) -> bool:
        """Whether the request caused the error. All other errors are faults of the server."""
        return self.status < 500 or self.code == "deadline_exceeded"

    @property
    def body(self) -> dict[str, Any]:
        """The body in the form of the OpenAI API. weft's own routes use it too."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, scope: Scope) -> Response:
        """The response, in the API format of the route."""
        current_record().error_code = self.code
        write = scope.get(ERROR_WRITER)
        status, content = (self.status, self.body) if write is None else write(self)
        headers = self.headers
        if self.retry_after is not None:
            headers = {**headers, "Retry-After": retry_after(self.retry_after)}
        return json_response(content, status, headers)


def failed_result(result: GenerationResult) -> ApiError | WeftError:
    """The error for a result of the engine that is not complete."""
    message = result.error or f"the request was {result.state.value}"
    if result.failure is FailureKind.DEADLINE:
        return ApiError(504, message, code="deadline_exceeded")
    if result.failure is FailureKind.NO_ALLOWED_TOKEN:
        return ApiError(400, message, code="cannot_continue")
    return WeftError(message)


def refusal(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    """The error for a field of a request that is wrong."""
    return ApiError(400, message, param=param, code=code)


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def warning_header(unknown: Sequence[str]) -> dict[str, str]:
    """The header that names the parts of a body that were ignored."""
    return {"Warning": f'299 weft "unknown fields ignored: {", ".join(unknown)}"'} if unknown else {}


def as_api_error(error: WeftError) -> ApiError:
    """Converts an expected error of weft to an error with an HTTP status and code."""
    message = str(error)
    if isinstance(error, InvalidRequestError):
        refusal = ApiError(400, message, param=error.field or None, code=error.code or None)
        if isinstance(error, PromptTooLongError):
            refusal.prompt_lengths = error.num_tokens, error.most
        return refusal
    if isinstance(error, QueueFullError):
        return ApiError(429, message, code="queue_full")
    if isinstance(error, EngineStoppedError):
        return ApiError(503, message, code="engine_not_ready")
    if isinstance(error, EngineStalledError):
        return ApiError(503, message, code="engine_stalled")
    if isinstance(error, EngineDiedError):
        return ApiError(503, message, code="engine_died")
    if isinstance(error, SlowReaderError):
        return ApiError(408, message, code="slow_reader")
    if isinstance(error, StoreFullError):
        return ApiError(507, message, code="storage_full")
    if isinstance(error, StoreError):
        return ApiError(503, message, code="storage_failed")
    return ApiError(500, message, code="failed")


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Translates field names in errors that are raised inside: from the engine's name to the client's."""
    try:
        yield
    except WeftError as error:
        raised = as_api_error(error)
    except ApiError as error:
        raised = error
    else:
        return
    raised.param = names.get(raised.param or "", raised.param)
    try:
        raise raised
    finally:
        del raised  # the traceback of `raised` refers to this frame: a reference cycle
