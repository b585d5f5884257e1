"""The OpenAPI document is correct about routes, fields, ranges and responses."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from in_process import in_process
from server_process import Server, api_key, running_server
from vector_models import embedder_path, noop_embedder, noop_reranker

from weft.errors import InvalidRequestError
from weft.request import InferenceRequest, SamplingParams
from weft.server.admission.keys import plain_keys
from weft.server.api import response_shapes as shapes
from weft.server.api.batches import OutputExpiry
from weft.server.api.completion import CompletionFormat
from weft.server.api.field_docs import FIELDS, Field
from weft.server.api.ollama import OllamaOptions
from weft.server.api.openapi import OPERATIONS
from weft.server.api.schema import StreamOptions

KINDS = {
    *(operation.request for operation in OPERATIONS.values() if operation.request is not None),
    *(StreamOptions, OllamaOptions, OutputExpiry),
}


@pytest.fixture(scope="module")
def server_of_all_kinds(default_model_path: Path) -> Iterator[Server]:
    """Also makes vectors and scores."""
    models = [noop_embedder(embedder_path()), noop_reranker(embedder_path())]
    with running_server(default_model_path, vector_models=models) as server:
        yield server


@pytest.fixture(scope="module")
def document(shared_server: Server) -> dict[str, Any]:
    response = shared_server.client.get("/openapi.json")
    assert response.status_code == 200
    content: dict[str, Any] = response.json()
    return content


def test_every_field_of_every_request_is_described(document: dict[str, Any]) -> None:
    for kind in KINDS:
        properties = document["components"]["schemas"][kind.__name__]["properties"]
        assert set(properties) == set(kind.__struct_fields__)
        missing = [name for name, content in properties.items() if not content.get("description")]
        assert not missing, f"{kind.__name__}: describe {missing} in server/api/field_docs.py"


def test_every_route_is_in_the_document(default_model_path: Path, document: dict[str, Any]) -> None:
    async def routes() -> set[tuple[str, str]]:
        async with in_process(default_model_path) as server:
            starlette = server._asgi._app._app  # type: ignore[attr-defined]
            return {
                (method.lower(), re.sub(r":\w+}", "}", route.path))
                for route in starlette.routes
                if route.include_in_schema
                for method in route.methods - {"HEAD"}
            }

    described = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert described == asyncio.run(routes())
    assert described <= set(OPERATIONS)


def test_every_reference_exists_and_every_operation_has_responses(document: dict[str, Any]) -> None:
    def references(content: Any) -> Iterator[str]:
        if isinstance(content, dict):
            if "$ref" in content:
                yield content["$ref"]
            for value in content.values():
                yield from references(value)
        elif isinstance(content, list):
            for value in content:
                yield from references(value)

    for reference in references(document):
        found: Any = document
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]
    for methods in document["paths"].values():
        for operation in methods.values():
            assert {"200", "default"} <= set(operation["responses"]) and operation["summary"]


def test_the_documented_ranges_are_those_that_are_checked(document: dict[str, Any]) -> None:
    """The limit itself is accepted and the next value refused, with the name of the field."""

    def build(name: str, value: Any) -> None:
        if name in SamplingParams.__dataclass_fields__:
            # Without max_tokens, so that every min_tokens is valid.
            SamplingParams(**{"max_tokens": None, name: value})
        else:
            InferenceRequest((1,), **{name: value})

    checked = 0
    properties = document["components"]["schemas"]["CompletionRequest"]["properties"]
    for name in properties:
        field: Field = {**FIELDS, **CompletionFormat.fields}[name]
        for limit, beyond in ((field.minimum, -1), (field.maximum, 1), (field.above, 0)):
            if limit is None or name not in (
                *SamplingParams.__dataclass_fields__,
                *InferenceRequest.__dataclass_fields__,
            ):
                continue
            checked += 1
            if beyond:
                build(name, limit)
            with pytest.raises(InvalidRequestError) as caught:
                build(name, limit + beyond if abs(limit) < 1e9 or isinstance(limit, int) else limit * 2)
            assert caught.value.field == name
    assert checked > 25


CASES = [
    pytest.param(path, example, id=f"{path} {name}")
    for (method, path), operation in OPERATIONS.items()
    for name, example in operation.examples.items()
]


@pytest.mark.parametrize(("path", "example"), CASES)
def test_the_response_to_every_example_has_the_documented_type(
    server_of_all_kinds: Server, path: str, example: Any
) -> None:
    server = server_of_all_kinds
    operation = OPERATIONS["post", path]
    response = server.client.post(path, json={**example})
    assert response.status_code == 200, response.text
    assert operation.answer is not None
    if not example.get("stream"):
        msgspec.convert(response.json(), operation.answer)
        return
    assert operation.event is not None
    if operation.event_media_type == "application/x-ndjson":
        events = response.text.splitlines()
    else:
        events = re.findall(r"^data: (.*)$", response.text, re.MULTILINE)
        if events[-1] == "[DONE]":
            events.pop()
    assert events
    for event in events:
        msgspec.convert(json.loads(event), operation.event)


PAGES = [
    path
    for method, path in OPERATIONS
    if method == "get" and "{" not in path and not path.startswith("/admin")  # they need an admin key
]


@pytest.mark.parametrize("path", PAGES)
def test_the_response_of_every_get_route_has_the_documented_type(server: Server, path: str) -> None:
    operation = OPERATIONS["get", path]
    response = server.client.get(path)
    assert response.status_code == 200
    if operation.answer is None:
        assert response.headers["content-type"].startswith(operation.media_type)
    else:
        msgspec.convert(response.json(), operation.answer)


def test_errors_have_the_documented_type_and_a_request_id(server: Server) -> None:
    for response in (
        server.client.get("/nowhere"),
        server.client.get("/v1/completions"),
        server.complete(temperature=-1),
        server.client.get("/version", headers={"Host": "evil.example"}),
    ):
        msgspec.convert(response.json(), shapes.Error)
        assert response.headers["x-request-id"]


def test_the_document_says_which_routes_need_a_key(default_model_path: Path) -> None:
    async def security(**settings: Any) -> dict[str, Any]:
        async with in_process(default_model_path, **settings) as server:
            paths = json.loads(server.server._document)["paths"]
            return {path: one["security"] for path, each in paths.items() for one in each.values()}

    is_open = {path for (_, path), operation in OPERATIONS.items() if operation.is_open}
    for path, required in asyncio.run(security()).items():
        assert required == ([] if path in is_open else [{}, {"key": []}])
    for path, required in asyncio.run(security(api_keys=plain_keys(["one"]))).items():
        assert required == ([] if path in is_open else [{"key": []}])


def test_a_browser_without_a_key_can_open_only_the_two_pages(
    default_model_path: Path,
) -> None:
    with running_server(default_model_path, api_keys=[api_key("sk-secret")]) as server:
        for method, path in OPERATIONS:
            response = server.client.request(method, path.replace("{", "").replace("}", ""))
            if path in ("/", "/docs", "/openapi.json", "/health"):
                assert response.status_code == 200 and "sk-secret" not in response.text, path
            else:
                assert response.status_code == (403 if path.startswith("/admin") else 401), path


def test_the_docs_page_runs_only_its_own_script_and_loads_nothing_from_other_hosts(server: Server) -> None:
    response = server.client.get("/docs")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "connect-src 'self'" in policy
    for element in ("script", "style"):
        [inline] = re.findall(rf"<{element}>(.*?)</{element}>", response.text, re.S)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert f"{element}-src 'sha256-{digest}'" in policy
    assert not re.search(r"https?://|innerHTML|\bstyle=|\bon\w+=\"", response.text)
