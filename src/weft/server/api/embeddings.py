"""`/v1/embeddings`: vectors of texts, as in the OpenAI API."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.server.api.answer_format import Operation
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
from weft.server.errors import refusal
from weft.server.plain_requests import PlainRequest
from weft.server.vectors.model import VectorModel
from weft.server.vectors.text_tokens import MAX_TOKENS
from weft.server.vectors.vector_text_process import JobKind
from weft.vectors import Vectors, check_dimensions, shortened

PATH = "/v1/embeddings"
_KINDS: Mapping[str, JobKind] = {
    "query": "query",
    "search_query": "query",
    "document": "document",
    "search_document": "document",
    "passage": "document",
}
_MAX_IDS = 1 << 17


class EmbeddingsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A null means the default, and is removed before the conversion."""

    max_entries: ClassVar[Mapping[str, int]] = {"input": _MAX_IDS}

    input: Annotated[
        str | list[str | int | list[int]],
        Meta(
            description=f"A text, a list of token ids, or a list of up to {MAX_INPUTS} of those. All inputs together have at "
            f"most {MAX_TOKENS} tokens. Token ids are those of the model, special tokens included."
        ),
    ]
    model: Annotated[
        str | None, Meta(description="Name of a model that makes embeddings. Default: that of the server.")
    ] = None
    dimensions: Annotated[
        int | None,
        Meta(
            description="Keep this many numbers of each vector, scaled to length 1 again. Only models that were trained for "
            "it (Matryoshka) keep their quality. Default: all."
        ),
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64"],
        Meta(description="float: a list of numbers. base64: the numbers as little-endian float32."),
    ] = "float"
    input_type: Annotated[
        str | None,
        Meta(
            description="query or document (also search_query, search_document, passage): which prompt of the model to put "
            "before each text. Default: the default prompt of the model's files, which most models lack. An extension of weft."
        ),
    ] = None
    truncate: Annotated[
        bool, Meta(description="Cut texts that are too long, instead of an error. An extension of weft.")
    ] = False
    user: Annotated[str | None, Meta(description="Accepted, without effect.")] = None
    deadline: Annotated[
        float | None, Meta(description="Seconds after which the request ends with an error.")
    ] = None


class EmbeddingsUsage(Shape):
    prompt_tokens: int
    total_tokens: int


class Embedding(Shape):
    object: Literal["embedding"]
    index: int
    embedding: Annotated[list[float] | str, Meta(description="A text with encoding_format base64.")]


class Embeddings(Shape):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("post", PATH): Operation(
        "Make embeddings",
        "Vectors of texts, from the model that --embedder names, or MODEL if it makes embeddings.",
        "Embeddings",
        Embeddings,
        EmbeddingsRequest,
        examples={
            "Text": {"input": "The food was delicious."},
            "Texts": {"input": ["first text", "second text"], "input_type": "query"},
        },
        errors=ERRORS,
    )
}


def routes(services: Services) -> Sequence[Route]:
    return [Route(PATH, partial(_answer, services), methods=["POST"])]


async def _answer(services: Services, request: Request) -> Response:
    return await services.plain_requests.handle(request, EmbeddingsRequest, partial(_embeddings, services))


async def _embeddings(services: Services, plain: PlainRequest[EmbeddingsRequest]) -> Response:
    fields = plain.fields
    model = chosen_model(services, fields.model, "embed")
    check_dimensions(fields.dimensions, model.spec)
    prompts = await _prompts(model, fields, plain.client_id)
    vectors, num_tokens = await run(services, plain, model, prompts, "input")
    del prompts
    vectors = shortened(vectors, fields.dimensions, model.spec)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    after = b'],"model":' + encode(model.name) + b',"usage":' + encode(usage) + b"}"
    entries = _entries(vectors, is_base64=fields.encoding_format == "base64")
    return await list_response(services, plain, b'{"object":"list","data":[', entries, after)


def _entries(vectors: Vectors, *, is_base64: bool) -> Iterator[bytes]:
    for index, vector in enumerate(vectors):
        content: Any = base64.b64encode(vector.astype("<f4").tobytes()) if is_base64 else vector.tolist()
        embedding = b'"' + content + b'"' if is_base64 else encode(content)
        yield b'{"object":"embedding","index":%d,"embedding":%b}' % (index, embedding)


async def _prompts(model: VectorModel, fields: EmbeddingsRequest, client_id: str) -> list[list[int]]:
    """The tokens of each input."""
    kind = _kind(fields.input_type)
    given = fields.input
    if isinstance(given, str):
        check_text(given, "input")
        return await model.texts.encode(kind, [given], client_id, truncate=fields.truncate)
    if given and all(isinstance(one, int) for one in given):
        model.check_tokens(given, "input")  # type: ignore[arg-type]
        return [given]  # type: ignore[list-item]
    check_count("input", len(given))
    if all(isinstance(one, str) for one in given):
        for index, text in enumerate(given):
            check_text(text, f"input[{index}]")  # type: ignore[arg-type]
        return await model.texts.encode(kind, given, client_id, truncate=fields.truncate)  # type: ignore[arg-type]
    for index, one in enumerate(given):
        if not isinstance(one, list):
            raise refusal("input mixes texts and token ids; send a list of one kind", f"input[{index}]")
        model.check_tokens(one, f"input[{index}]")
    return given  # type: ignore[return-value]


def _kind(input_type: str | None) -> JobKind:
    if input_type is None:
        return "default"
    if input_type not in _KINDS:
        raise refusal(f"input_type is {input_type!r:.80}; allowed: {', '.join(_KINDS)}", "input_type")
    return _KINDS[input_type]
