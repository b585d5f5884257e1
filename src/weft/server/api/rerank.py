"""`/rerank`, `/v1/rerank`, `/v2/rerank` (Cohere, Jina) and `/score`, `/v1/score` (vLLM): scores of documents for a query."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.server.api.answer_format import Operation
from weft.server.api.response_shapes import Error, Shape
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
from weft.server.errors import ApiError, refusal
from weft.server.plain_requests import PlainRequest

RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")
SCORE_PATHS = ("/v1/score", "/score")
_MAX_DOCUMENT = 1 << 20
"""Limit for the characters of a document."""

_MODEL = Meta(description="Name of a model that scores documents. Default: that of the server.")
_DEADLINE = Meta(description="Seconds after which the request ends with an error.")


class RerankRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A null means the default, and is removed before the conversion."""

    max_entries: ClassVar[Mapping[str, int]] = {"documents": MAX_INPUTS}

    query: Annotated[str, Meta(description="The question or the text that the documents are compared with.")]
    documents: Annotated[
        list[str | dict[str, Any]],
        Meta(
            description=f"Texts, or objects with a text; at most {MAX_INPUTS}, of {_MAX_DOCUMENT} characters each. Long ones are cut."
        ),
    ]
    model: Annotated[str | None, _MODEL] = None
    top_n: Annotated[int | None, Meta(description="How many results to return. Default: all.")] = None
    return_documents: Annotated[bool, Meta(description="Repeat each document in its result.")] = False
    max_tokens_per_doc: Annotated[
        int | None,
        Meta(description="Use so many tokens of each document at most. Default: what the model reads."),
    ] = None
    deadline: Annotated[float | None, _DEADLINE] = None


class RerankDocument(Shape):
    text: str


class RerankResult(Shape):
    index: Annotated[int, Meta(description="The position of the document in the request.")]
    relevance_score: Annotated[
        float, Meta(description="Higher is more relevant. The range depends on the model.")
    ]
    document: RerankDocument | UnsetType = UNSET


class RerankVersion(Shape):
    version: str


class RerankTokens(Shape):
    input_tokens: int


class RerankMeta(Shape):
    api_version: RerankVersion
    tokens: RerankTokens


class VectorUsage(Shape):
    prompt_tokens: int
    total_tokens: int


class Reranked(Shape):
    id: str
    model: str
    results: Annotated[list[RerankResult], Meta(description="The most relevant document first.")]
    meta: RerankMeta
    usage: VectorUsage


class RerankError(Shape):
    """The body of every failed request: `message` as in Cohere's API, `error` as on weft's other routes."""

    message: str
    error: Any


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A null means the default, and is removed before the conversion."""

    text_1: Annotated[
        str | list[str], Meta(description="The query; or a list of queries, one for each text of text_2.")
    ]
    text_2: Annotated[str | list[str], Meta(description=f"One text, or a list of at most {MAX_INPUTS}.")]
    model: Annotated[str | None, _MODEL] = None
    user: Annotated[str | None, Meta(description="Accepted, without effect.")] = None
    deadline: Annotated[float | None, _DEADLINE] = None


class Score(Shape):
    index: int
    object: Literal["score"]
    score: float


class Scores(Shape):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: VectorUsage


def _rerank_operation(path: str) -> Operation:
    return Operation(
        "Rerank documents" if path == RERANK_PATHS[0] else f"The same as {RERANK_PATHS[0]}",
        "Scores each document for a query, as in the APIs of Cohere and Jina. Needs a server with --reranker.",
        "Embeddings",
        Reranked,
        RerankRequest,
        examples={
            "Documents": {
                "query": "Who wrote Faust?",
                "documents": ["Goethe wrote Faust.", "Bees make honey."],
            }
        },
        errors=ERRORS,
        error=RerankError,
    )


def _score_operation(path: str) -> Operation:
    return Operation(
        "Score pairs of texts" if path == SCORE_PATHS[0] else f"The same as {SCORE_PATHS[0]}",
        "As in vLLM. The scores are in the order of the pairs. Needs a server with --reranker.",
        "Embeddings",
        Scores,
        ScoreRequest,
        examples={
            "Pairs": {"text_1": "Who wrote Faust?", "text_2": ["Goethe wrote Faust.", "Bees make honey."]}
        },
        errors=ERRORS,
        error=Error,
    )


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    **{("post", path): _rerank_operation(path) for path in RERANK_PATHS},
    **{("post", path): _score_operation(path) for path in SCORE_PATHS},
}


def routes(services: Services) -> Sequence[Route]:
    def route(path: str, kind: type[Any], work: Any) -> Route:
        async def answer(request: Request) -> Response:
            return await services.plain_requests.handle(request, kind, partial(work, services, path))

        return Route(path, answer, methods=["POST"])

    return [
        *(route(path, RerankRequest, _rerank) for path in RERANK_PATHS),
        *(route(path, ScoreRequest, _score) for path in SCORE_PATHS),
    ]


def _write_error(error: ApiError) -> tuple[int, Any]:
    """The status and the JSON of an error of the rerank routes."""
    return error.status, {"message": error.message, **error.body}


ERROR_WRITERS = dict.fromkeys(RERANK_PATHS, _write_error)


async def _rerank(services: Services, path: str, plain: PlainRequest[RerankRequest]) -> Response:
    fields = plain.fields
    model = chosen_model(services, fields.model, "rerank")
    check_text(fields.query, "query")
    check_count("documents", len(fields.documents))
    if fields.top_n is not None and fields.top_n < 1:
        raise refusal(f"top_n is {fields.top_n}; allowed: at least 1", "top_n")
    most = fields.max_tokens_per_doc
    if most is not None and most < 1:
        raise refusal(f"max_tokens_per_doc is {most}; allowed: at least 1", "max_tokens_per_doc")
    documents = [_text_of(one, f"documents[{index}]") for index, one in enumerate(fields.documents)]
    prompts = await model.texts.encode_pairs([fields.query], documents, plain.client_id, max_document=most)
    vectors, num_tokens = await run(services, plain, model, prompts, "documents")
    scores = vectors[:, 0]
    # The sort is stable: documents with the same score keep their order.
    order = (-scores).argsort(kind="stable")[: fields.top_n].tolist()

    def results() -> Iterator[bytes]:
        for index in order:
            result: dict[str, Any] = {"index": index, "relevance_score": float(scores[index])}
            if fields.return_documents:
                result["document"] = {"text": documents[index]}
            yield encode(result)

    before = b'{"id":%b,"model":%b,"results":[' % (encode(plain.active.id), encode(model.name))
    meta = {
        "api_version": {"version": "2" if path == "/v2/rerank" else "1"},
        "tokens": {"input_tokens": num_tokens},
    }
    after = b'],"meta":%b,"usage":%b}' % (encode(meta), encode(_usage(num_tokens)))
    return await list_response(services, plain, before, results(), after)


def _text_of(document: str | dict[str, Any], where: str) -> str:
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        raise refusal(f"{where} has no text; send a text, or an object with the field text", where)
    _check_length(text, where)
    return text


def _check_length(text: str, where: str) -> None:
    """Refuses a document of which the model could read only a small part."""
    if len(text) > _MAX_DOCUMENT:
        raise refusal(
            f"{where} has {len(text)} characters; allowed: {_MAX_DOCUMENT}; send a part of it", where
        )


async def _score(services: Services, path: str, plain: PlainRequest[ScoreRequest]) -> Response:
    fields = plain.fields
    model = chosen_model(services, fields.model, "rerank")
    queries = [fields.text_1] if isinstance(fields.text_1, str) else fields.text_1
    texts = [fields.text_2] if isinstance(fields.text_2, str) else fields.text_2
    check_count("text_2", len(texts))
    if len(queries) not in (1, len(texts)):
        message = f"text_1 has {len(queries)} entries and text_2 has {len(texts)}; send one text_1, or one for each text_2"
        raise refusal(message, "text_1")
    for index, query in enumerate(queries):
        check_text(query, "text_1" if len(queries) == 1 else f"text_1[{index}]")
    for index, text in enumerate(texts):
        _check_length(text, "text_2" if len(texts) == 1 else f"text_2[{index}]")
    prompts = await model.texts.encode_pairs(
        queries, texts, plain.client_id, query_field="text_1", field="text_2"
    )
    vectors, num_tokens = await run(services, plain, model, prompts, "text_2")
    entries = (
        encode({"index": index, "object": "score", "score": float(score)})
        for index, score in enumerate(vectors[:, 0])
    )
    head = encode(
        {"id": f"score-{plain.active.id}", "object": "list", "created": int(time.time()), "model": model.name}
    )
    after = b'],"usage":%b}' % encode(_usage(num_tokens))
    return await list_response(services, plain, head[:-1] + b',"data":[', entries, after)


def _usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
