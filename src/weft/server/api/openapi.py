"""Builds the OpenAPI document from the request and response types of each route."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from starlette.routing import BaseRoute, Route

from weft import __version__
from weft.server.api import response_shapes as shapes
from weft.server.api.answer_format import HELLO, Operation
from weft.server.api.field_docs import FIELDS, Field
from weft.server.api.formats import FORMATS, OTHER_ROUTES, Formats
from weft.server.api.schema import DetokenizeRequest, TokenizeRequest

_REFERENCE = "#/components/schemas/{name}"
_DESCRIPTION = """\
The APIs of OpenAI, Anthropic and Ollama, served by weft. Unknown fields are ignored and listed in a `Warning` header. A `null` means the
default. Every response has an `x-request-id` header: the id that the client sent, or a new one."""

_MESSAGE: dict[str, Any] = {
    "type": "object",
    "title": "Message",
    "description": "One message of a conversation.",
    "properties": {
        "role": {
            "type": "string",
            "description": "The author of the message: system, user, assistant or tool.",
            "examples": ["user"],
        },
        "content": {
            "description": "Text, or a list of parts with the type text.",
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}],
        },
        "tool_calls": {
            "type": "array",
            "items": {"type": "object"},
            "description": "Tool calls of the model.",
        },
        "tool_call_id": {"type": "string", "description": "In a message of a tool: the id of the call."},
    },
    "required": ["role"],
}


def _of_formats(formats: Formats) -> dict[tuple[str, str], Operation]:
    """The routes that generate, and the routes that count tokens for them."""
    generating = {path: one.operation for path, one in formats.items()}
    countings = [one.counting for one in formats.values() if one.counting is not None]
    counting = {one.path: one.operation for one in countings}
    return {("post", path): operation for path, operation in {**generating, **counting}.items()}


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    **_of_formats(FORMATS),
    **{key: operation for one in OTHER_ROUTES for key, operation in one.OPERATIONS.items()},
    ("post", "/tokenize"): Operation(
        "Tokenise text or messages",
        "Returns the prompt tokens of a completion (prompt) or a chat (messages). Send one of them.",
        "Text",
        shapes.Tokens,
        TokenizeRequest,
        examples={"Text": {"prompt": "Hello"}, "Messages": {"messages": HELLO}},
        errors=(400, 404, 408, 413, 429, 500, 503),
    ),
    ("post", "/detokenize"): Operation(
        "Detokenise",
        "The text includes control tokens.",
        "Text",
        shapes.Detokenized,
        DetokenizeRequest,
        examples={"Tokens": {"tokens": [19556]}},
        errors=(400, 404, 408, 413, 429, 500, 503),
    ),
    ("get", "/tokenizer_info"): Operation(
        "Describe the tokenizer", "Its special tokens; null for missing ones.", "Text", shapes.TokenizerInfo
    ),
    ("get", "/health"): Operation(
        "Health check",
        "200 while the engine runs; 503 while it is down.",
        "Operating",
        shapes.Status,
        errors=(503,),
        is_open=True,
    ),
    ("get", "/ready"): Operation(
        "Readiness check",
        "503 while the engine starts or does not respond, or while the server shuts down; 429 while it is full.",
        "Operating",
        shapes.Status,
        errors=(429, 503),
    ),
    ("get", "/metrics"): Operation(
        "Metrics for Prometheus",
        "The names are those of vLLM with the prefix weft:.",
        "Operating",
        None,
        media_type="text/plain",
    ),
    ("get", "/version"): Operation("Version of weft", "", "Operating", shapes.Version),
    ("get", "/openapi.json"): Operation("This document", "", "Operating", dict, is_open=True),
    ("get", "/docs"): Operation(
        "This document as a web page that can send requests",
        "",
        "Operating",
        None,
        media_type="text/html",
        is_open=True,
    ),
}

_STATUSES = {
    400: "The request is invalid; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "This host, web page or API key is not allowed.",
    404: "The model, the request or the object does not exist.",
    405: "The route does not support this method.",
    408: "The request did not arrive in time, or the client read its stream too slowly.",
    409: "The state of the object does not allow this.",
    413: "The body or the requested answer is too large.",
    429: "Too many requests; retry after the seconds in `Retry-After`.",
    500: "Internal server error.",
    503: "The engine is starting, or the server is shutting down; retry after the seconds in `Retry-After`.",
    504: "The deadline passed.",
    507: "The disk is full, or the limit for stored bytes is reached.",
}


def document(routes: Iterable[BaseRoute], formats: Formats = FORMATS, *, needs_key: bool) -> dict[str, Any]:
    """The document for these routes."""
    paths: dict[str, Any] = {}
    existing = set(_methods(routes))
    operations = {**OPERATIONS, **_of_formats(formats)}
    for (method, path), operation in operations.items():
        if (method, path) in existing:
            paths.setdefault(path, {})[method] = _described(method, path, operation, needs_key)
    tags = dict.fromkeys(one["tags"][0] for each in paths.values() for one in each.values())
    return {
        "openapi": "3.1.0",
        "info": {"title": "weft", "version": __version__, "description": _DESCRIPTION},
        "tags": [{"name": name} for name in tags],
        "paths": paths,
        "components": {
            "schemas": _schemas(operations.values(), formats),
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key, if the server needs one.",
                }
            },
        },
    }


def _methods(routes: Iterable[BaseRoute]) -> Iterable[tuple[str, str]]:
    for route in routes:
        if isinstance(route, Route) and route.include_in_schema:
            for method in (route.methods or set()) - {"HEAD"}:
                yield method.lower(), re.sub(r":\w+}", "}", route.path)


def _described(method: str, path: str, operation: Operation, needs_key: bool) -> dict[str, Any]:
    """One operation of the document: its summary, parameters, body and responses."""
    described: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method}{path}").strip("_"),
        "summary": operation.summary,
        "tags": [operation.tag],
        "security": [] if operation.is_open else [{"key": []}] if needs_key else [{}, {"key": []}],
        "responses": _responses(operation),
    }
    if operation.description:
        described["description"] = operation.description
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    parameters += [
        {"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.form is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"multipart/form-data": {"schema": operation.form}},
        }
    if operation.request is not None:
        content: dict[str, Any] = {"schema": _reference(operation.request)}
        content["examples"] = {name: {"value": value} for name, value in operation.examples.items()}
        described["requestBody"] = {"required": True, "content": {"application/json": content}}
    return described


def _responses(operation: Operation) -> dict[str, Any]:
    """The responses of an operation, by status."""
    if operation.media_type in ("application/octet-stream", "text/event-stream"):
        good: dict[str, Any] = {operation.media_type: {}}  # any bytes, or events without an end
    elif operation.answer is None:
        good = {operation.media_type: {"schema": {"type": "string"}}}
    elif operation.answer is dict:
        good = {"application/json": {"schema": {"type": "object"}}}
    else:
        good = {"application/json": {"schema": _reference(operation.answer)}}
    if operation.event is not None:
        event = {"schema": {"description": operation.event_note}, "x-event": _reference(operation.event)}
        good[operation.event_media_type] = event
    responses: dict[str, Any] = {"200": {"description": "Success.", "content": good}}
    shown = sorted({*operation.errors, *((401, 403) if not operation.is_open else ())})
    for status in shown:
        responses[str(status)] = _error(_STATUSES[status], operation)
    # /health: the body with 503 is the same as with 200.
    if operation.is_open and 503 in operation.errors:
        responses["503"] = {"description": "The engine is down.", "content": good}
    responses["default"] = _error("Any other error.", operation)
    return responses


def _error(description: str, operation: Operation) -> dict[str, Any]:
    content = {"application/json": {"schema": _reference(operation.error or shapes.Error)}}
    return {"description": description, "content": content}


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=kind.__name__)}


def _schemas(operations: Iterable[Operation], formats: Formats) -> dict[str, Any]:
    """The schemas of all types, with descriptions of the fields of request types."""
    operations = list(operations)
    requests = {one.request for one in operations if one.request is not None}
    responses = {
        kind for one in operations for kind in (one.answer, one.event, one.error) if kind is not None
    }
    kinds = sorted((requests | responses | {shapes.Error}) - {dict}, key=lambda kind: kind.__name__)
    _, found = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    _, request_schemas = msgspec.json.schema_components(list(requests), ref_template=_REFERENCE)
    body_types = {kind.__name__ for kind in requests}
    own_fields = {one.request_type.__name__: one.fields for one in formats.values()}
    for name in request_schemas:
        fields = {**FIELDS, **own_fields.get(name, {})}
        found[name] = _with_field_docs(found[name], fields, may_be_null=name in body_types)
    return {"Message": _MESSAGE, **found}


def _with_field_docs(
    schema: dict[str, Any], fields: Mapping[str, Field], may_be_null: bool
) -> dict[str, Any]:
    """Adds descriptions and ranges to a request type. Optional fields of a body may also be null."""
    required = set(schema.get("required", ()))
    properties = {}
    for name, given in schema["properties"].items():
        docs = None if "description" in given else fields.get(name)
        content = dict(docs.schema if docs is not None and docs.schema is not None else given)
        default = content.pop("default", None)
        if isinstance(default, dict):
            default = {key: value for key, value in default.items() if value is not None}
        if may_be_null and name not in required and {"type": "null"} not in content.get("anyOf", ()):
            content = {"anyOf": [content, {"type": "null"}]}
            if "description" in given:
                content["description"] = content["anyOf"][0].pop("description")
        if default is not None:
            content["default"] = default
        if docs is not None:
            content["description"] = docs.description
            limits = {"minimum": docs.minimum, "maximum": docs.maximum, "exclusiveMinimum": docs.above}
            content |= {limit: value for limit, value in limits.items() if value is not None}
        properties[name] = content
    return {**schema, "properties": properties}
