"""`/v1/models` in the forms of the OpenAI and the Anthropic API: fields, aliases, pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from anthropic_types import error_of, model_of
from in_process import InProcess
from test_messages import VERSION, served
from vector_models import embedder_path, noop_embedder, noop_reranker


def test_models_have_the_form_of_the_api_that_asks(default_model_path: Path) -> None:
    async def work(server: InProcess) -> list[Any]:
        found = []
        for path, headers in (
            ("/v1/models", {}),
            ("/v1/models", VERSION),
            ("/v1/models/claude-opus-5-5", VERSION),
            ("/v1/models/gpt-5", {}),
            ("/v1/models/unknown", VERSION),
            ("/v1/models/unknown", {}),
        ):
            reply = await server.send(path, method="GET", more_headers=headers)
            found.append((reply.status, json.loads(reply.body)))
        return found

    openai, anthropic, alias, other_alias, unknown, other_unknown = served(default_model_path, work=work)
    [model] = openai[1]["data"]
    assert openai[1]["object"] == "list" and model["object"] == "model"
    for name in ("max_model_len", "context_length", "context_window", "max_context_length"):
        assert model[name] == 4096
    assert model["meta"]["n_ctx"] == 4096 and "tools" in model["capabilities"]
    assert other_alias == (200, model)
    page = anthropic[1]
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, model["id"], model["id"])
    described = model_of(page["data"][0])
    assert described.capabilities is not None and described.capabilities.structured_outputs.supported
    assert not described.capabilities.image_input.supported
    assert {"reasoning_effort", "max_completion_tokens"} < set(model["supported_parameters"])
    assert described.id == model["id"] and alias == (200, page["data"][0])
    assert page["data"][0]["max_input_tokens"] == 4095
    assert unknown[0] == 404 == other_unknown[0]
    error_of(json.dumps(unknown[1]), "not_found_error")
    assert other_unknown[1]["error"]["code"] == "model_not_found"


def test_models_are_listed_in_pages_of_the_anthropic_api(default_model_path: Path) -> None:
    embedder = noop_embedder(embedder_path())
    reranker = noop_reranker(embedder_path())
    embedder["names"] = ["noop-embedder", "embedder-alias"]
    expected = ["test-model", "noop-embedder", "noop-reranker"]

    async def work(server: InProcess) -> None:
        async def page(query: str) -> tuple[list[str], bool]:
            reply = await server.send(f"/v1/models?{query}", method="GET", more_headers=VERSION)
            found = json.loads(reply.body)
            names = [model["id"] for model in found["data"]]
            assert (found["first_id"], found["last_id"]) == ((names[0], names[-1]) if names else (None, None))
            return names, found["has_more"]

        assert await page("") == (expected, False)
        names, has_more = await page("limit=1")
        while has_more and len(names) < len(expected):
            found, has_more = await page(f"limit=1&after_id={names[-1]}")
            names += found
        assert (names, has_more) == (expected, False)
        assert await page("limit=1&before_id=noop-reranker") == (["noop-embedder"], True)
        assert await page("limit=1&before_id=noop-embedder") == (["test-model"], False)
        assert await page("after_id=embedder-alias") == (["noop-reranker"], False)

    served(default_model_path, work=work, vector_models=[embedder, reranker])


def test_pages_of_models_are_empty_beyond_the_only_model(default_model_path: Path) -> None:
    async def work(server: InProcess) -> list[Any]:
        found = []
        for query in (
            "limit=1000",
            "after_id=test-model",
            "before_id=test-model",
            "limit=0",
            "after_id=x",
        ):
            reply = await server.send(f"/v1/models?{query}", method="GET", more_headers=VERSION)
            found.append((reply.status, json.loads(reply.body)))
        return found

    all_models, after, before, limit, unknown = served(default_model_path, work=work)
    assert len(all_models[1]["data"]) == 1
    for status, page in (after, before):
        assert status == 200 and page == {"data": [], "has_more": False, "first_id": None, "last_id": None}
    assert limit[0] == 400 and unknown[0] == 404
