"""The routes of `/v1/models`, for all APIs: the models of the server, in the form of the OpenAI or the Anthropic API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.request import PARAMETERS
from weft.server.api.answer_format import Operation
from weft.server.api.listing import checked_number
from weft.server.api.response_shapes import Shape
from weft.server.api.services import Services
from weft.server.errors import json_response
from weft.server.vectors.model import VectorModel

_CONTEXT = Meta(description="Maximum context length in tokens, prompt and answer together.")
_PARAMETERS = (
    *("max_tokens", *PARAMETERS, "seed", "stop", "logprobs", "top_logprobs", "logit_bias"),
    *(
        "response_format",
        "structured_outputs",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "max_completion_tokens",
        "reasoning_effort",
    ),
)


class Sizes(Shape):
    n_ctx: int
    n_ctx_train: int
    n_vocab: int


class Architecture(Shape):
    modality: str
    input_modalities: list[str]
    output_modalities: list[str]


class Model(Shape):
    """A model. Several fields have the same value: clients of different servers read different names. `type` and the
    fields after it are only in the form of the Anthropic API, for requests with the header anthropic-version."""

    id: str
    object: Literal["model"] | UnsetType = UNSET
    created: int | UnsetType = UNSET
    owned_by: str | UnsetType = UNSET
    max_model_len: Annotated[int | UnsetType, _CONTEXT] = UNSET
    context_length: Annotated[int | UnsetType, _CONTEXT] = UNSET
    context_window: Annotated[int | UnsetType, _CONTEXT] = UNSET
    max_context_length: Annotated[int | UnsetType, _CONTEXT] = UNSET
    meta: Sizes | UnsetType = UNSET
    architecture: Architecture | UnsetType = UNSET
    supported_parameters: list[str] | UnsetType = UNSET
    capabilities: Annotated[
        list[str] | dict[str, Any] | UnsetType,
        Meta(
            description="Words. In the form of the Anthropic API: an object, from the name to what is supported."
        ),
    ] = UNSET
    dimensions: Annotated[
        int | UnsetType, Meta(description="Numbers in a vector, if the model makes embeddings.")
    ] = UNSET
    type: Literal["model"] | UnsetType = UNSET
    display_name: str | UnsetType = UNSET
    created_at: str | UnsetType = UNSET
    lifecycle: Literal["active"] | UnsetType = UNSET
    max_input_tokens: Annotated[int | UnsetType, Meta(description="Maximum prompt length in tokens.")] = UNSET
    max_tokens: Annotated[int | UnsetType, Meta(description="Maximum answer length in tokens.")] = UNSET


class ModelList(Shape):
    data: list[Model]
    object: Literal["list"] | UnsetType = UNSET
    has_more: bool | UnsetType = UNSET
    first_id: str | UnsetType | None = UNSET
    last_id: str | UnsetType | None = UNSET


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("get", "/v1/models"): Operation(
        "List models",
        "The model that generates, and those that make embeddings or score documents. With the header anthropic-version, the answer has the form of the Anthropic API.",
        "Models",
        ModelList,
        errors=(400, 404),
        query={
            "limit": {
                "type": "integer",
                "minimum": 1,
                "maximum": 1000,
                "description": "Only with anthropic-version.",
            },
            "before_id": {"type": "string", "description": "Only with anthropic-version."},
            "after_id": {"type": "string", "description": "Only with anthropic-version."},
        },
    ),
    ("get", "/v1/models/{name}"): Operation(
        "Describe a model", "Accepts any name of the model, and its aliases.", "Models", Model, errors=(404,)
    ),
}


def routes(services: Services) -> Sequence[Route]:
    return (
        Route("/v1/models", partial(_list, services), methods=["GET"]),
        Route("/v1/models/{name:path}", partial(_one, services), methods=["GET"]),
    )


async def _list(services: Services, request: Request) -> Response:
    if not _is_anthropic(request):
        return json_response({"object": "list", "data": _all(services, _described, _described_vectors)})
    query = request.query_params
    limit = checked_number(query.get("limit", "20"), "limit", 1, 1000)
    models = _all(services, _in_anthropic_form, _vectors_in_anthropic_form)
    for border in ("before_id", "after_id"):
        if query.get(border):
            found = services.models.vector_model(query[border])  # raises if there is no such model
            name = services.settings.names[0] if found is None else found.name
            place = [model["id"] for model in models].index(name)
            models = models[:place] if border == "before_id" else models[place + 1 :]
    page = models[-limit:] if query.get("before_id") else models[:limit]
    ids = [model["id"] for model in page] or [None]
    has_more = len(models) > len(page)
    return json_response({"data": page, "has_more": has_more, "first_id": ids[0], "last_id": ids[-1]})


async def _one(services: Services, request: Request) -> Response:
    model = services.models.vector_model(request.path_params["name"])
    if model is None:
        describe = _in_anthropic_form if _is_anthropic(request) else _described
        return json_response(describe(services))
    describe_vectors = _vectors_in_anthropic_form if _is_anthropic(request) else _described_vectors
    return json_response(describe_vectors(services, model))


def _all(
    services: Services,
    describe: Callable[[Services], dict[str, Any]],
    describe_vectors: Callable[[Services, VectorModel], dict[str, Any]],
) -> list[dict[str, Any]]:
    generators = [] if services.models.generator is None else [describe(services)]
    return generators + [describe_vectors(services, model) for model in services.models.vector_models]


def _is_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def _described(services: Services) -> dict[str, Any]:
    length = services.engine.max_sequence_length
    info = services.engine.info
    assert info is not None, "the engine is started before the server"
    return {
        **_sizes(services, services.settings.names[0], length, info.vocabulary_size, "text"),
        "supported_parameters": list(_PARAMETERS),
        "capabilities": _capabilities(services),
    }


def _described_vectors(services: Services, model: VectorModel) -> dict[str, Any]:
    spec = model.spec
    makes, capability = ("embeddings", "embedding") if spec.kind == "embed" else ("scores", "rerank")
    return {
        **_sizes(services, model.name, spec.max_tokens, model.vocabulary_size, makes),
        "capabilities": [capability],
        **({"dimensions": spec.dimensions} if spec.kind == "embed" else {}),
    }


def _sizes(services: Services, name: str, length: int, vocabulary_size: int, makes: str) -> dict[str, Any]:
    """The fields that models of every use have. The length has several names: each client reads one of them."""
    return {
        "id": name,
        "object": "model",
        "created": services.created,
        "owned_by": "weft",
        "max_model_len": length,  # as in vLLM
        "context_length": length,  # as in OpenRouter
        "context_window": length,  # as in Groq
        "max_context_length": length,  # as in LM Studio and Mistral
        "meta": {"n_ctx": length, "n_ctx_train": length, "n_vocab": vocabulary_size},  # as in llama.cpp
        "architecture": {
            "modality": f"text->{makes}",
            "input_modalities": ["text"],
            "output_modalities": [makes],
        },
    }


def _capabilities(services: Services) -> list[str]:
    if services.text.chat_template is None:
        return ["completion"]
    thinking = ["thinking"] if services.text.reasoning is not None else []
    return ["completion", "chat", "tools", "tool_use", "structured_output", *thinking]


def _in_anthropic_form(services: Services) -> dict[str, Any]:
    length = services.engine.max_sequence_length - 1
    return {
        **_anthropic(services, services.settings.names[0], length, length),
        "capabilities": _anthropic_capabilities(_capabilities(services)),
    }


def _vectors_in_anthropic_form(services: Services, model: VectorModel) -> dict[str, Any]:
    return _anthropic(services, model.name, model.spec.max_tokens, 0)


def _anthropic(services: Services, name: str, max_input_tokens: int, max_tokens: int) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(services.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": max_input_tokens,
        "max_tokens": max_tokens,
    }


def _anthropic_capabilities(known: Sequence[str]) -> dict[str, Any]:
    """The object `capabilities` with all keys of the Anthropic API. A model that does not think accepts the fields for
    thoughts, without effect."""

    def support(is_supported: bool, **more: Any) -> dict[str, Any]:
        return {"supported": is_supported, **more}

    no, yes = support(False), support(True)
    thinks = "thinking" in known
    modes = ("adaptive", "between_tools", "disabled", "enabled")
    return {
        **dict.fromkeys(("batch", "citations", "code_execution", "image_input", "pdf_input"), no),
        "context_management": no,
        "effort": support(
            thinks, **dict.fromkeys(("low", "medium", "high", "xhigh", "max"), support(thinks))
        ),
        "server_tools": support(False, code_execution=no, web_search=no),
        "structured_outputs": support("structured_output" in known),
        "thinking": support(thinks, types=dict.fromkeys(modes, yes)),
    }
