"""The routes that generate, and their API formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from starlette.routing import Route

from weft.server.api import (
    admin,
    batches,
    embeddings,
    feedback,
    files,
    models,
    ollama_embed,
    ollama_models,
    rerank,
    responses,
    responses_routes,
    vector_store_files,
    vector_stores,
)
from weft.server.api.answer_format import AnswerFormat, Operation
from weft.server.api.chat import ChatFormat
from weft.server.api.completion import CompletionFormat
from weft.server.api.messages import MessagesFormat
from weft.server.api.ollama_chat import OllamaChatFormat
from weft.server.api.ollama_generate import OllamaGenerateFormat
from weft.server.api.services import Services
from weft.server.errors import ApiError
from weft.server.live import routes as live
from weft.server.page import routes as page

Formats = Mapping[str, AnswerFormat[Any]]
"""Path of a route -> its API format."""

ErrorWriter = Callable[[ApiError], tuple[int, Any]]

FORMATS: Formats = {
    "/v1/chat/completions": ChatFormat(),
    "/v1/completions": CompletionFormat(),
    "/v1/messages": MessagesFormat(),
    responses.PATH: responses.ResponsesFormat(),
    "/api/chat": OllamaChatFormat(),
    "/api/generate": OllamaGenerateFormat(),
}


VECTOR_OPERATIONS: Mapping[str, str] = {
    embeddings.PATH: "embeddings",
    **dict.fromkeys(ollama_embed.PATHS, "embeddings"),
    **dict.fromkeys(rerank.RERANK_PATHS, "rerank"),
    **dict.fromkeys(rerank.SCORE_PATHS, "score"),
}
"""Path of a route for vectors or scores -> `gen_ai.operation.name` in traces. The conventions have no name for scores."""


class OtherRoutes(Protocol):
    """The routes of one API that do not generate. A module implements this protocol. It may also have `ERROR_WRITERS`, by
    path, for routes whose errors have a form of their own."""

    @property
    def OPERATIONS(self) -> Mapping[tuple[str, str], Operation]:
        """The part of the OpenAPI document for these routes, by method and path."""
        ...

    def routes(self, services: Services) -> Sequence[Route]: ...


OTHER_ROUTES: Sequence[OtherRoutes] = (
    *(models, embeddings, rerank, responses_routes, files, batches, vector_stores, vector_store_files),
    *(feedback, ollama_models, ollama_embed, page, live, admin),
)

_ERRORS: dict[str, ErrorWriter] = {
    path: writer for one in OTHER_ROUTES for path, writer in getattr(one, "ERROR_WRITERS", {}).items()
}


def error_writer(formats: Formats, path: str, headers: Mapping[bytes, bytes]) -> ErrorWriter | None:
    """The function that writes the errors of a route. None: they have the form of weft's own routes."""
    if (exact := formats.get(path)) is not None:
        return exact.error
    if (other := _ERRORS.get(path)) is not None:
        return other
    by_client = None
    for one in formats.values():
        if one.family and (path == one.family or path.startswith(one.family + "/")):
            return one.error
        if one.client_header and one.client_header in headers:
            by_client = one.error
    return by_client
