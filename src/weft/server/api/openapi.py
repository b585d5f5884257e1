"""The OpenAPI document: what each route takes and answers, from the types that requests are read into."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.routing import BaseRoute, Route

from weft import __version__
from weft.server.api import response_shapes as shapes
from weft.server.api.field_docs import FIELDS
from weft.server.api.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_REFERENCE = "#/components/schemas/{name}"
_DESCRIPTION = """\
The OpenAI API, served by weft. Fields that weft does not know are ignored, and named in a `Warning` header; a
`null` stands for the default. Every answer carries `x-request-id`: the one that was sent, or a new one."""

_MESSAGE: dict[str, Any] = {
    "type": "object",
    "title": "Message",
    "description": "One turn of a conversation.",
    "properties": {
        "role": {
            "type": "string",
            "description": "Who speaks: system, user, assistant or tool.",
            "examples": ["user"],
        },
        "content": {
            "description": "Text, or a list of parts of the type text.",
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}],
        },
        "tool_calls": {"type": "array", "items": {"type": "object"}, "description": "Calls the model made."},
        "tool_call_id": {"type": "string", "description": "In a turn of a tool: which call it answers."},
    },
    "required": ["role"],
}


@dataclass(frozen=True)
class Operation:
    """One route: what goes in, what comes out. `answer` None: plain text."""

    summary: str
    description: str
    tag: str
    answer: type | None
    request: type | None = None
    event: type | None = None
    """Of a stream."""
    examples: Mapping[str, Any] = field(default_factory=dict)
    errors: tuple[int, ...] = ()
    media_type: str = "application/json"
    is_open: bool = False
    """No key is asked for."""


_GENERATING = (400, 404, 408, 413, 429, 500, 503, 504)
_HELLO = [{"role": "user", "content": "Hello"}]
_CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 40}},
    "required": ["city"],
    "additionalProperties": False,
}

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("post", "/v1/chat/completions"): Operation(
        "Answer a conversation",
        "The model's own chat template makes a prompt of the messages. Control tokens in them are plain text.",
        "Generating",
        shapes.ChatCompletion,
        ChatRequest,
        shapes.ChatCompletionChunk,
        {
            "A question": {"messages": _HELLO, "temperature": 0, "max_tokens": 64},
            "As a stream": {
                "messages": _HELLO,
                "stream": True,
                "stream_options": {"include_usage": True},
                "temperature": 0,
                "max_tokens": 64,
            },
            "Repeatable": {"messages": _HELLO, "temperature": 0.7, "seed": 7, "max_tokens": 64},
            "By a schema": {
                "messages": [{"role": "user", "content": "Name a city."}],
                "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": _CITY}},
                "temperature": 0,
                "max_tokens": 64,
            },
            "With a tool": {
                "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
                "tools": [{"type": "function", "function": {"name": "weather", "parameters": _CITY}}],
                "tool_choice": "required",
                "temperature": 0,
                "max_tokens": 64,
            },
            "With logprobs": {"messages": _HELLO, "logprobs": True, "top_logprobs": 3, "max_tokens": 4},
        },
        _GENERATING,
    ),
    ("post", "/v1/completions"): Operation(
        "Continue a text",
        "The prompt is continued as it is, without a template.",
        "Generating",
        shapes.Completion,
        CompletionRequest,
        shapes.Completion,
        {
            "Text": {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
            "Token ids": {"prompt": [504, 3575, 282], "max_tokens": 8},
            "Several": {"prompt": ["One, two,", "Red, green,"], "n": 2, "max_tokens": 8},
            "Score a text": {"prompt": "Hello", "max_tokens": 1, "echo": True, "logprobs": 1},
        },
        _GENERATING,
    ),
    ("get", "/v1/models"): Operation("List the models", "There is one.", "Models", shapes.ModelList),
    ("get", "/v1/models/{name}"): Operation(
        "Describe a model", "By any of its names.", "Models", shapes.Model, errors=(404,)
    ),
    ("post", "/tokenize"): Operation(
        "Make tokens of text or messages",
        "As a completion or a chat would. Send either prompt or messages.",
        "Text",
        shapes.Tokens,
        TokenizeRequest,
        examples={"Text": {"prompt": "Hello"}, "Messages": {"messages": _HELLO}},
        errors=(400, 404, 408, 413, 429, 500, 503),
    ),
    ("post", "/detokenize"): Operation(
        "Make text of tokens",
        "Control tokens are spelled out.",
        "Text",
        shapes.Detokenized,
        DetokenizeRequest,
        examples={"Tokens": {"tokens": [19556]}},
        errors=(400, 404, 408, 413, 429, 500, 503),
    ),
    ("get", "/tokenizer_info"): Operation(
        "Describe the tokenizer", "Its special tokens, null where it has none.", "Text", shapes.TokenizerInfo
    ),
    ("get", "/health"): Operation(
        "Whether it lives",
        "503 while the engine is down.",
        "Operating",
        shapes.Status,
        errors=(503,),
        is_open=True,
    ),
    ("get", "/ready"): Operation(
        "Whether it takes requests",
        "503 while the engine starts or does not respond, or the server drains; 429 while it is full.",
        "Operating",
        shapes.Status,
        errors=(429, 503),
    ),
    ("get", "/metrics"): Operation(
        "Figures for Prometheus",
        "Under vLLM's names, with weft: before them.",
        "Operating",
        None,
        media_type="text/plain",
    ),
    ("get", "/version"): Operation("Which weft it is", "", "Operating", shapes.Version),
    ("get", "/openapi.json"): Operation("This document", "", "Operating", dict, is_open=True),
    ("get", "/docs"): Operation(
        "This document, to read and to try", "", "Operating", None, media_type="text/html", is_open=True
    ),
    ("get", "/admin/requests"): Operation(
        "What is under way", "Needs an admin key.", "Administration", dict, errors=(403,)
    ),
    ("delete", "/admin/requests/{id}"): Operation(
        "Cancel a request", "Needs an admin key.", "Administration", dict, errors=(403, 404)
    ),
}

_STATUSES = {
    400: "The request is wrong; `param` names the field.",
    401: "The key is missing or wrong.",
    403: "This host, page or key may not ask.",
    404: "There is no such model.",
    405: "The route has another method.",
    408: "The request did not arrive in time, or its reader fell too far behind.",
    413: "The body is too large, or the answer that it asks for.",
    429: "Too many requests; `Retry-After` says when to come back.",
    500: "The server made a mistake.",
    503: "The engine is starting, or the server shuts down; `Retry-After` says when to come back.",
    504: "The deadline passed.",
}


def document(routes: Iterable[BaseRoute], *, needs_key: bool) -> dict[str, Any]:
    """Of the routes that there are."""
    paths: dict[str, Any] = {}
    existing = set(_methods(routes))
    for (method, path), operation in OPERATIONS.items():
        if (method, path) in existing:
            paths.setdefault(path, {})[method] = _described(method, path, operation, needs_key)
    tags = dict.fromkeys(one["tags"][0] for each in paths.values() for one in each.values())
    return {
        "openapi": "3.1.0",
        "info": {"title": "weft", "version": __version__, "description": _DESCRIPTION},
        "tags": [{"name": name} for name in tags],
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key, where the server asks for one.",
                }
            },
        },
    }


def _methods(routes: Iterable[BaseRoute]) -> Iterable[tuple[str, str]]:
    for route in routes:
        if isinstance(route, Route):
            for method in (route.methods or set()) - {"HEAD"}:
                yield method.lower(), re.sub(r":\w+}", "}", route.path)


def _described(method: str, path: str, operation: Operation, needs_key: bool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method}{path}").strip("_"),
        "summary": operation.summary,
        "tags": [operation.tag],
        "security": [] if operation.is_open else [{"key": []}] if needs_key else [{}, {"key": []}],
        "responses": _responses(operation),
    }
    if operation.description:
        described["description"] = operation.description
    names = re.findall(r"{(\w+)}", path)
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if operation.request is not None:
        content: dict[str, Any] = {"schema": _reference(operation.request)}
        content["examples"] = {name: {"value": value} for name, value in operation.examples.items()}
        described["requestBody"] = {"required": True, "content": {"application/json": content}}
    return described


def _responses(operation: Operation) -> dict[str, Any]:
    if operation.answer is None:
        good: dict[str, Any] = {operation.media_type: {"schema": {"type": "string"}}}
    elif operation.answer is dict:
        good = {"application/json": {"schema": {"type": "object"}}}
    else:
        good = {"application/json": {"schema": _reference(operation.answer)}}
    if operation.event is not None:
        note = "Each `data:` line is one event, JSON of this form; the last one is `[DONE]`, or an error."
        good["text/event-stream"] = {"schema": {"description": note}, "x-event": _reference(operation.event)}
    answers: dict[str, Any] = {"200": {"description": "The answer.", "content": good}}
    shown = sorted({*operation.errors, *((401, 403) if not operation.is_open else ())})
    for status in shown:
        answers[str(status)] = _error(_STATUSES[status])
    if operation.is_open and 503 in operation.errors:  # /health tells its status either way
        answers["503"] = {"description": "The engine is down.", "content": good}
    answers["default"] = _error("Whatever else goes wrong.")
    return answers


def _error(description: str) -> dict[str, Any]:
    content = {"application/json": {"schema": _reference(shapes.Error)}}
    return {"description": description, "content": content}


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=kind.__name__)}


def _schemas() -> dict[str, Any]:
    requests = {one.request for one in OPERATIONS.values() if one.request is not None}
    answers = {one.answer for one in OPERATIONS.values() if one.answer not in (None, dict)}
    events = {one.event for one in OPERATIONS.values() if one.event is not None}
    kinds = sorted(requests | answers | events | {shapes.Error}, key=lambda kind: kind.__name__)
    _, found = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    _, request_schemas = msgspec.json.schema_components(list(requests), ref_template=_REFERENCE)
    body_types = {kind.__name__ for kind in requests}
    for name in request_schemas:
        found[name] = _with_field_docs(found[name], may_be_null=name in body_types)
    return {"Message": _MESSAGE, **found}


def _with_field_docs(schema: dict[str, Any], may_be_null: bool) -> dict[str, Any]:
    """A request's type with descriptions and ranges. What may be left out of a body may also be null."""
    required = set(schema.get("required", ()))
    properties = {}
    for name, given in schema["properties"].items():
        content = dict(given)
        if name == "messages":
            content = {"type": "array", "items": {"$ref": _REFERENCE.format(name="Message")}, "minItems": 1}
        default = content.pop("default", None)
        if may_be_null and name not in required and {"type": "null"} not in content.get("anyOf", ()):
            content = {"anyOf": [content, {"type": "null"}]}
        if default is not None:
            content["default"] = default
        if (docs := FIELDS.get(name)) is not None:
            content["description"] = docs.description
            limits = {"minimum": docs.minimum, "maximum": docs.maximum, "exclusiveMinimum": docs.above}
            content |= {limit: value for limit, value in limits.items() if value is not None}
        properties[name] = content
    return {**schema, "properties": properties}
