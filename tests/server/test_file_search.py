"""The tool file_search in Responses and chat completions. Words alone find passages: the vectors are those of noop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from api_shapes import family, message_of_error
from in_process import InProcess, Reply, in_process
from memory_client import MemoryClient, document, noop_memory
from responses_checks import checked_events
from server_process import MESSAGES, Server, api_key, running_server

from weft.errors import WeftError


@pytest.fixture(scope="module")
def server(default_model_path: Path) -> Iterator[Server]:
    with running_server(
        default_model_path, vector_models=noop_memory(), api_keys=[api_key("one")]
    ) as running:
        yield running


@pytest.fixture
def one(server: Server) -> MemoryClient:
    return MemoryClient(server, "one")


def test_file_search_puts_passages_into_the_prompt_and_cites_them(server: Server, one: MemoryClient) -> None:
    name, text = document(50)
    store = one.create()
    file_id = one.attach(store, text, "source.txt")
    one.wait(store)
    tool = {"type": "file_search", "vector_store_ids": [store], "max_num_results": 2}
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="one", max_retries=0, _strict_response_validation=True
    ) as client:
        plain = client.responses.create(input=name, max_output_tokens=8)
        response = client.responses.create(
            input=name,
            max_output_tokens=8,
            tools=[tool],  # type: ignore[list-item]
            include=["file_search_call.results"],
            tool_choice="required",
        )
        call, message = response.output
        assert call.type == "file_search_call" and call.queries == [name] and call.results
        assert call.results[0].filename == "source.txt" and call.results[0].text in text
        assert message.type == "message" and message.content[0].type == "output_text"
        [cited] = message.content[0].annotations
        assert cited.type == "file_citation" and cited.file_id == file_id and cited.filename == "source.txt"
        assert response.usage is not None and plain.usage is not None
        assert response.usage.input_tokens > plain.usage.input_tokens + 50
        without = client.responses.create(input=name, max_output_tokens=8, tools=[tool], tool_choice="none")  # type: ignore[list-item]
        assert [item.type for item in without.output] == ["message"]
        again = client.responses.create(input="more", previous_response_id=response.id, max_output_tokens=8)
        assert again.output[0].type == "message"
        stream = client.responses.create(input=name, max_output_tokens=8, tools=[tool], stream=True)  # type: ignore[call-overload]
        seen = list(stream)
        kinds = [event.type for event in seen]
        assert [item.type for item in seen[-1].response.output] == ["file_search_call", "message"]
        assert kinds.index("response.file_search_call.completed") < kinds.index("response.output_text.delta")
        assert "response.output_text.annotation.added" in kinds
    body = {"messages": [{"role": "user", "content": name}], "max_tokens": 8, "tools": [tool]}
    chat = one.send("POST", "/v1/chat/completions", body).json()
    [cited] = chat["choices"][0]["message"]["annotations"]
    assert cited["file_id"] == file_id and chat["usage"]["prompt_tokens"] > 100
    lines = one.send("POST", "/v1/chat/completions", {**body, "stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    text = "".join(each.get("content") or "" for each in deltas)
    [annotations] = [each["annotations"] for each in deltas if "annotations" in each]
    assert annotations == [{**cited, "index": len(text)}]
    one.send("DELETE", f"/v1/vector_stores/{store}")


BAD_TOOLS: dict[str, Any] = {
    "no ids": {"type": "file_search"},
    "an empty list": {"type": "file_search", "vector_store_ids": []},
    "a text": {"type": "file_search", "vector_store_ids": "vs_1"},
    "a bad filter": {"type": "file_search", "vector_store_ids": ["vs_1"], "filters": {"type": "x"}},
    "51 results": {"type": "file_search", "vector_store_ids": ["vs_1"], "max_num_results": 51},
}


def test_a_bad_file_search_is_refused_with_its_field(one: MemoryClient) -> None:
    for case, tool in BAD_TOOLS.items():
        for path, body in (
            ("/v1/responses", {"input": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            refused = one.send("POST", path, {**body, "tools": [tool]})
            assert refused.status_code == 400, (case, refused.text)
            assert refused.json()["error"]["param"].startswith("tools[0]"), (case, refused.text)


# ---------------------------------------------------------------------- a slow search

Embed = Callable[..., Awaitable[Any]]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4, "store": False},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
}
SEARCHING = {"/v1/responses": b"file_search_call.searching", "/v1/chat/completions": b'"role":"assistant"'}
KEPT_ALIVE = {"/v1/responses": b'"sequence_number":6', "/v1/chat/completions": b'"delta":{"content":""}'}
"""In the events after the first: those of keep-alives."""


def ask(
    model_path: Path, path: str, embed: Callable[[Embed], Embed] = lambda embed: embed, **options: Any
) -> Reply:
    """A stream with a file search, of a server that searches with `embed`. `options`: fields of the body and of
    `InProcess.send`."""

    async def run() -> Reply:
        async with in_process(model_path, silence_seconds=0.01, vector_models=noop_memory()) as server:
            store = json.loads((await server.send("/v1/vector_stores", b"{}")).body)["id"]
            embedder = server.server.models.embedder
            assert embedder is not None
            embedder.embed = embed(embedder.embed)  # type: ignore[method-assign]
            tool = {"type": "file_search", "vector_store_ids": [options.pop("store", store)]}
            body = {**ROUTES[path], "tools": [tool], "stream": True, **options.pop("fields", {})}
            reply = await asyncio.wait_for(server.send(path, json.dumps(body).encode(), **options), 60)
            await is_free(server)
            return reply

    return asyncio.run(run())


async def is_free(server: InProcess) -> None:
    while len(server.server.active_requests) or server.server.engine.num_unfinished:
        await asyncio.sleep(0.01)


async def never(*arguments: Any, **options: Any) -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize("path", ROUTES)
def test_a_stream_begins_before_its_file_search_and_is_kept_alive_during_it(
    default_model_path: Path, path: str
) -> None:
    reply = ask(default_model_path, path, lambda _: never, leaves_at=KEPT_ALIVE[path])
    assert reply.status == 200
    begin, _, rest = reply.body.partition(SEARCHING[path])
    assert begin and KEPT_ALIVE[path] in rest
    assert b"_call.completed" not in rest


@pytest.mark.parametrize("path", ROUTES)
def test_a_search_that_fails_after_its_stream_began_ends_it_with_an_error(
    default_model_path: Path, path: str
) -> None:
    async def fail(*arguments: Any, **options: Any) -> Any:
        raise WeftError("the engine of the embedder ended")

    reply = ask(default_model_path, path, lambda _: fail)
    assert reply.status == 200 and SEARCHING[path] in reply.body
    if path == "/v1/responses":
        last = checked_events(reply.body)[-1]
        assert last["type"] == "response.failed" and "embedder ended" in last["response"]["error"]["message"]
    else:
        last = json.loads(reply.body.split(b"\n\n")[-2].removeprefix(b"data: "))
        assert "embedder ended" in message_of_error(family(path), last)


@pytest.mark.parametrize("path", ROUTES)
def test_what_is_wrong_with_a_stream_that_searches_is_refused_before_it_begins(
    default_model_path: Path, path: str
) -> None:
    missing = ask(default_model_path, path, store="vs_none")
    assert (missing.status, json.loads(missing.body)["error"]["param"]) == (404, "vector_store_id")
    for fields, param in (({"temperature": -1}, "temperature"), ({"priority": 99}, "priority")):
        refused = ask(default_model_path, path, fields=fields)
        assert (refused.status, json.loads(refused.body)["error"]["param"]) == (400, param)
