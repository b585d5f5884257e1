"""`/api/embed` and `/api/embeddings`: vectors of texts, as in Ollama's API."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.server.api.answer_format import Operation
from weft.server.api.ollama import TAG, OllamaError
from weft.server.api.response_shapes import Shape
from weft.server.api.services import Services
from weft.server.api.vector_requests import (
    ERRORS,
    MAX_INPUTS,
    check_count,
    check_text,
    chosen_model,
    encode,
    list_response,
    run,
)
from weft.server.errors import json_response
from weft.server.plain_requests import PlainRequest
from weft.vectors import check_dimensions, shortened

PATHS = ("/api/embed", "/api/embeddings")
_MODEL = Meta(description="Name of a model that makes embeddings. Default: that of the server.")
_WITHOUT_EFFECT = Meta(description="Accepted, without effect.")


class EmbedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A null means the default, and is removed before the conversion."""

    max_entries: ClassVar[Mapping[str, int]] = {"input": MAX_INPUTS}

    input: Annotated[str | list[str], Meta(description=f"A text, or a list of up to {MAX_INPUTS}.")] = ""
    model: Annotated[str | None, _MODEL] = None
    truncate: Annotated[bool, Meta(description="Cut texts that are too long. false: an error.")] = True
    dimensions: Annotated[
        int | None, Meta(description="Keep this many numbers of each vector. Default: all.")
    ] = None
    options: Annotated[dict[str, Any], _WITHOUT_EFFECT] = {}
    keep_alive: Annotated[float | str | None, _WITHOUT_EFFECT] = None
    deadline: Annotated[
        float | None, Meta(description="Seconds after which the request ends with an error.")
    ] = None


class OldEmbedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A null means the default, and is removed before the conversion."""

    prompt: Annotated[str, Meta(description="The text. It is cut if it is too long.")] = ""
    model: Annotated[str | None, _MODEL] = None
    options: Annotated[dict[str, Any], _WITHOUT_EFFECT] = {}
    keep_alive: Annotated[float | str | None, _WITHOUT_EFFECT] = None


class OllamaEmbeddings(Shape):
    model: str
    embeddings: list[list[float]]
    total_duration: Annotated[int | UnsetType, Meta(description="Nanoseconds.")] = UNSET
    load_duration: Annotated[int | UnsetType, Meta(description="Nanoseconds.")] = UNSET
    prompt_eval_count: int | UnsetType = UNSET


class OllamaEmbedding(Shape):
    embedding: list[float]


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("post", "/api/embed"): Operation(
        "Make embeddings for clients of Ollama",
        "",
        TAG,
        OllamaEmbeddings,
        EmbedRequest,
        examples={"Texts": {"input": ["first text", "second text"]}},
        errors=ERRORS,
        error=OllamaError,
    ),
    ("post", "/api/embeddings"): Operation(
        "Make one embedding (an older route of Ollama)",
        "",
        TAG,
        OllamaEmbedding,
        OldEmbedRequest,
        examples={"Text": {"prompt": "a text"}},
        errors=ERRORS,
        error=OllamaError,
    ),
}


def routes(services: Services) -> Sequence[Route]:
    async def embed(request: Request) -> Response:
        return await services.plain_requests.handle(request, EmbedRequest, partial(_embed, services))

    async def embed_one(request: Request) -> Response:
        return await services.plain_requests.handle(request, OldEmbedRequest, partial(_embed_one, services))

    return [
        Route(PATHS[0], embed, methods=["POST"]),
        Route(PATHS[1], embed_one, methods=["POST"]),
    ]


async def _embed(services: Services, plain: PlainRequest[EmbedRequest]) -> Response:
    fields, began = plain.fields, time.monotonic_ns()
    model = chosen_model(services, fields.model, "embed")
    check_dimensions(fields.dimensions, model.spec)
    texts = [fields.input] if isinstance(fields.input, str) else fields.input
    # Clients send an empty input to load a model.
    if texts in ([], [""]):
        return json_response({"model": model.name, "embeddings": []})
    check_count("input", len(texts))
    for index, text in enumerate(texts):
        check_text(text, f"input[{index}]")
    prompts = await model.texts.encode("default", texts, plain.client_id, truncate=fields.truncate)
    vectors, num_tokens = await run(services, plain, model, prompts, "input")
    vectors = shortened(vectors, fields.dimensions, model.spec)
    facts = {
        "total_duration": time.monotonic_ns() - began,
        "load_duration": 0,
        "prompt_eval_count": num_tokens,
    }
    before = b'{"model":%b,"embeddings":[' % encode(model.name)
    entries = (encode(vector.tolist()) for vector in vectors)
    return await list_response(services, plain, before, entries, b"]," + encode(facts)[1:])


async def _embed_one(services: Services, plain: PlainRequest[OldEmbedRequest]) -> Response:
    model = chosen_model(services, plain.fields.model, "embed")
    if not plain.fields.prompt:
        return json_response({"embedding": []})
    prompts = await model.texts.encode(
        "default", [plain.fields.prompt], plain.client_id, field="prompt", truncate=True
    )
    vectors, _ = await run(services, plain, model, prompts, "prompt")
    return json_response({"embedding": vectors[0].tolist()})
