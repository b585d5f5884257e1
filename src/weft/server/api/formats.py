"""The routes that generate, and their API formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.routing import Route

from weft.server.api import batches, files
from weft.server.api.answer_format import AnswerFormat
from weft.server.api.chat import ChatFormat
from weft.server.api.completion import CompletionFormat
from weft.server.api.services import Services
from weft.server.errors import ApiError

Formats = Mapping[str, AnswerFormat[Any]]
"""By path."""

ErrorWriter = Callable[[ApiError], tuple[int, Any]]

FORMATS: Formats = {
    "/v1/chat/completions": ChatFormat(),
    "/v1/completions": CompletionFormat(),
}

ROUTES: Sequence[Callable[[Services], Sequence[Route]]] = (files.routes, batches.routes)
"""Each makes the other routes of one API, which do not generate."""


def error_writer(formats: Formats, path: str, headers: Mapping[bytes, bytes]) -> ErrorWriter | None:
    """Writes the errors of a route. None: in the form of weft's own routes."""
    if (exact := formats.get(path)) is not None:
        return exact.error
    for one in formats.values():
        if one.family and (path == one.family or path.startswith(one.family + "/")):
            return one.error
    return None
