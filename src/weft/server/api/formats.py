"""The routes that generate, and their API formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.routing import Route

from weft.server.api import batches, files, responses, responses_routes
from weft.server.api.answer_format import AnswerFormat
from weft.server.api.chat import ChatFormat
from weft.server.api.completion import CompletionFormat
from weft.server.api.messages import MessagesFormat
from weft.server.api.models import model_routes
from weft.server.api.ollama_chat import OllamaChatFormat
from weft.server.api.ollama_generate import OllamaGenerateFormat
from weft.server.api.ollama_models import ollama_routes
from weft.server.api.services import Services
from weft.server.errors import ApiError

Formats = Mapping[str, AnswerFormat[Any]]
"""By path."""

ANTHROPIC_VERSION = b"anthropic-version"
"""Clients of the Anthropic API send this header on every route, also on those of all APIs."""

ErrorWriter = Callable[[ApiError], tuple[int, Any]]

_MESSAGES = MessagesFormat()
FORMATS: Formats = {
    "/v1/chat/completions": ChatFormat(),
    "/v1/completions": CompletionFormat(),
    "/v1/messages": _MESSAGES,
    responses.PATH: responses.ResponsesFormat(),
    "/api/chat": OllamaChatFormat(),
    "/api/generate": OllamaGenerateFormat(),
}

ROUTES: Sequence[Callable[[Services], Sequence[Route]]] = (
    model_routes,
    responses_routes.routes,
    files.routes,
    batches.routes,
    ollama_routes,
)
"""Each makes the other routes of one API, which do not generate."""


def error_writer(formats: Formats, path: str, headers: Mapping[bytes, bytes]) -> ErrorWriter | None:
    """Writes the errors of a route. None: in the form of weft's own routes."""
    if (exact := formats.get(path)) is not None:
        return exact.error
    for one in formats.values():
        if one.family and (path == one.family or path.startswith(one.family + "/")):
            return one.error
    return _MESSAGES.error if ANTHROPIC_VERSION in headers else None
