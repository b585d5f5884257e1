"""The list of bad inputs for every route that reads a prompt: each is refused with the status and the error of its API,
or is legal there. One server in this process answers all of them, and holds nothing at the end."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_shapes import family, message_of_error
from every_api import APIS, Api, Tool, Turn, formatted
from fuzz_requests import leftovers
from in_process import InProcess, Reply, in_process
from test_bad_inputs import test_08_a_body_that_is_not_json_is_refused as _bodies
from test_structured import bomb

from weft.server.api.formats import FORMATS

HELLO = [{"role": "user", "content": "Hello"}]
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2, "store": False},
    "/api/chat": {"messages": HELLO, "options": {"num_predict": 2}, "stream": False},
    "/api/generate": {"prompt": "x", "options": {"num_predict": 2}, "stream": False},
}
COUNTING = {one.counting.path: path for path, one in FORMATS.items() if one.counting is not None}
PATHS = [*VALID, *COUNTING]
EVERY_PATH = pytest.mark.parametrize("path", PATHS)
EVERY = pytest.mark.parametrize("api", APIS, ids=str)
_IS_CONTENT = {"messages", "input", "prompt"}
BODIES: list[bytes] = _bodies.pytestmark[0].args[1]
"""The bodies of case 8: no JSON, bad UTF-8, lone surrogates, NaN, 100,000 levels."""


class Served:
    def __init__(self, loop: asyncio.AbstractEventLoop, server: InProcess) -> None:
        self.loop, self.server = loop, server

    def post(self, path: str, body: Any, **options: Any) -> Reply:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.loop.run_until_complete(self.server.send(path, content, **options))

    def error(self, path: str, body: Any, status: int = 400, **options: Any) -> str:
        """The message of a refusal, which must have this status and the shape of its API."""
        reply = self.post(path, body, **options)
        assert reply.status == status, (reply.status, reply.body[:500], str(body)[:200])
        return message_of_error(family(path), json.loads(reply.body))


@pytest.fixture(scope="module")
def served(default_model_path: Path) -> Iterator[Served]:
    loop = asyncio.new_event_loop()
    running = in_process(default_model_path, max_context=1024)
    server = loop.run_until_complete(running.__aenter__())
    yield Served(loop, server)
    assert not loop.run_until_complete(leftovers(server))
    loop.run_until_complete(running.__aexit__(None, None, None))
    loop.close()


def valid(path: str) -> dict[str, Any]:
    return VALID[COUNTING.get(path, path)]


@EVERY_PATH
def test_04_a_host_that_is_none_is_refused(served: Served, path: str) -> None:
    assert served.error(path, valid(path), 400, more_headers={b"host": b"x/v1?y="})


@EVERY_PATH
def test_07_another_host_or_origin_is_refused(served: Served, path: str) -> None:
    for headers in ({b"host": b"evil.example"}, {b"origin": b"https://evil.example"}):
        assert served.error(path, valid(path), 403, more_headers=headers)


@EVERY_PATH
def test_08_a_body_that_is_not_json_is_refused(served: Served, path: str) -> None:
    [name] = _IS_CONTENT & valid(path).keys()
    for body in BODIES:
        assert served.error(path, body.replace(b"prompt", name.encode()))


@EVERY_PATH
def test_09_a_wrong_type_in_any_field_is_refused_and_null_is_the_default(served: Served, path: str) -> None:
    api_format = FORMATS[COUNTING.get(path, path)]
    kind = api_format.request_type if path in VALID else api_format.counting.request_type  # type: ignore[union-attr]
    for field in kind.__struct_fields__:
        # A list of lists is valid for no field.
        message = served.error(path, {**valid(path), field: [[{}]]})
        assert field in message or path.startswith("/api/"), (field, message)
        if field not in _IS_CONTENT:
            body = {**valid(path), field: None}
            if path.startswith("/api/"):
                body["stream"] = False
            reply = served.post(path, body)
            assert reply.status == 200, (field, reply.body)


@EVERY_PATH
def test_10_an_unknown_model_is_a_404_and_a_wrong_method_a_405(served: Served, path: str) -> None:
    assert "no-such-model" in served.error(path, {**valid(path), "model": "no-such-model"}, 404)
    assert served.error(path, valid(path), 405, method="PATCH")


def out_of_range(path: str) -> list[dict[str, Any]]:
    fields: list[tuple[str, Any]] = [
        *(("temperature", value) for value in (-0.1, 1e9, "x")),
        *(("top_p", value) for value in (0, 1.1)),
        *(("top_k", value) for value in (-2, 10**30)),
        *(("seed", value) for value in (2**63, 1.5)),
    ]
    limit = {"/v1/responses": "max_output_tokens"}.get(path, "max_tokens")
    limits = [(limit, value) for value in (0, -1, 10**23)]
    stops: list[Any] = ["a" * 10**6, ["a"] * 10**5, [""], [5]]
    if path.startswith("/api/"):
        # A negative num_predict, and 0 for top_p, mean something there.
        options = [*fields, ("num_predict", 10**23), *(("stop", value) for value in stops)]
        return [
            {"options": {name: value}}
            for name, value in options
            if (name, value) not in (("top_p", 0), ("seed", 1.5))
        ]
    name = "stop_sequences" if path == "/v1/messages" else "stop"
    return [{name: value} for name, value in [*fields, *limits, *((name, value) for value in stops)]]


@pytest.mark.parametrize("path", VALID)
def test_12_to_17_values_out_of_range_are_refused(served: Served, path: str) -> None:
    for fields in out_of_range(path):
        for stream in (False, True):
            assert served.error(path, {**valid(path), **fields, "stream": stream}), fields


@EVERY_PATH
def test_20_contents_that_are_no_conversation_are_refused(served: Served, path: str) -> None:
    [name] = _IS_CONTENT & valid(path).keys()
    contents: list[Any] = [[5], [[]], 5, True]
    if name != "prompt":
        contents += [["x"], [{"role": "user", "content": 5}], [{"role": 5, "content": "x"}]]
        contents += [HELLO * 10**5, [{"role": "user", "content": [{"type": "text", "text": ""}] * 2000}]]
    for content in contents if path != "/v1/completions" else [[5, "x"], 5, True, ["a"] * 10**5]:
        assert served.error(path, {**valid(path), name: content}), str(content)[:80]


@EVERY
def test_21_control_tokens_in_messages_are_plain_text(served: Served, api: Api) -> None:
    def tokens(text: str) -> int:
        reply = served.post(api.path, api.body([Turn("user", text)], max_tokens=1))
        assert reply.status == 200, reply.body
        return api.whole(reply.body).prompt_tokens

    # As a control token it would be one.
    assert tokens("a<|im_end|>") >= tokens("a") + 3


@EVERY
def test_30_tools_that_are_none_are_refused(served: Served, api: Api) -> None:
    tool = Tool("f", "d", {"type": "object"})
    body = api.body([Turn("user", "x")], [tool], max_tokens=2)
    for tools in (["x"], [{}], [body["tools"][0]] * 129):
        if tools == [{}] and api.path == "/v1/responses":
            continue  # tools of unknown types are ignored with a warning: a 400 ends Codex
        assert served.error(api.path, {**body, "tools": tools}), tools
    if api.family != "ollama":  # it has no tool_choice
        choices: list[Any] = ["x", {"type": "function", "name": "g"}]
        if api.path != "/v1/responses":  # there, choices of unknown types are ignored with a warning
            choices += [{"type": "x"}, {"type": "tool", "name": "g"}]
        for choice in choices:
            assert served.error(api.path, {**body, "tool_choice": choice}), choice


def out_of_limits(path: str) -> list[dict[str, Any]]:
    """Fields that not every API has."""
    logprobs: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"logprobs": True, "top_logprobs": 10**6},
        "/v1/completions": {"logprobs": 10**6},
        "/v1/responses": {"top_logprobs": 10**6},
        "/api/chat": {"logprobs": True, "top_logprobs": 10**6},
        "/api/generate": {"logprobs": True, "top_logprobs": 10**6},
    }
    found = [logprobs[path]] if path in logprobs else []
    if path not in OPENAI:
        return found
    biases: list[Any] = [{"49152": 1}, {"a": 1}, {"1": 101}, dict.fromkeys(map(str, range(10**5)), 1)]
    banned = {"stop_token_ids": list(range(49152)), "min_tokens": 1}  # case 18: no token would be left
    return [*found, {"min_tokens": 9}, banned, *({"logit_bias": bias} for bias in biases)]


OPENAI = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


@pytest.mark.parametrize("path", [path for path in VALID if out_of_limits(path)])
def test_13_to_18_limits_of_the_fields_that_an_api_has(served: Served, path: str) -> None:
    for fields in out_of_limits(path):
        for stream in (False, True):
            assert served.error(path, {**valid(path), **fields, "stream": stream}), str(fields)[:80]


@EVERY_PATH
def test_22_a_prompt_of_megabytes_is_refused_and_other_requests_are_answered_meanwhile(
    served: Served, path: str
) -> None:
    """2 MB might fit with another vocabulary: they are tokenised in a worker process."""
    [name] = _IS_CONTENT & valid(path).keys()
    text = "word " * 400_000
    content = json.dumps({**valid(path), name: [{**HELLO[0], "content": text}] if name != "prompt" else text})

    async def ask() -> tuple[Reply, int]:
        asking = asyncio.create_task(served.server.send(path, content.encode()))
        num_healthy = 0
        while not asking.done():
            assert (await served.server.send("/health", method="GET")).status == 200
            num_healthy += 1
            await asyncio.sleep(0)
        return asking.result(), num_healthy

    reply, num_healthy = served.loop.run_until_complete(ask())
    assert reply.status == 400 and message_of_error(family(path), json.loads(reply.body))
    assert num_healthy > 20, num_healthy  # with a tokenizer in the event loop, only a few would get through


@EVERY_PATH
def test_23_a_template_of_a_request_is_refused_or_has_no_effect(served: Served, path: str) -> None:
    template = "{% for one in messages %}{{ 7 * 7 }}{% endfor %}"
    reply = served.post(path, {**valid(path), "chat_template": template})
    assert reply.status == 400 or b"chat_template" in reply.headers[b"warning"], reply
    if path in ("/v1/chat/completions", "/v1/responses"):
        for name in ("messages", "add_generation_prompt", "bos_token"):
            assert served.error(path, {**valid(path), "chat_template_kwargs": {name: "x"}})
    if path in ("/api/chat", "/api/generate"):
        reply = served.post(path, {**valid(path), "template": "{{ .Prompt }}"})
        assert reply.status == 400 or b"template" in reply.headers[b"warning"], reply


@pytest.mark.parametrize("path", VALID)
def test_26_formats_that_no_answer_has_are_refused_and_nothing_is_fetched(served: Served, path: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as waiting:
        address = f"http://127.0.0.1:{waiting.getsockname()[1]}/x.json"
        for schema in (
            *({"$ref": address}, {"properties": {"a": {"$ref": address}}}, {"type": "no"}),
            *({"type": "string", "pattern": "a(b"}, {"type": "string", "minLength": 3, "maxLength": 1}),
        ):
            for stream in (False, True):
                assert served.error(path, {**valid(path), **formatted(path, schema), "stream": stream})
        waiting.settimeout(0.05)
        with pytest.raises(TimeoutError):
            waiting.accept()


@pytest.mark.parametrize("path", VALID)
def test_27_a_grammar_bomb_is_refused(served: Served, path: str) -> None:
    assert "complex" in served.error(path, {**valid(path), **formatted(path, bomb(16))})


@pytest.mark.parametrize("path", OPENAI)
def test_28_two_formats_that_differ_are_refused(served: Served, path: str) -> None:
    body = {**valid(path), **formatted(path, {"type": "object"}), "guided_regex": "a"}
    assert "both define the format" in served.error(path, body)


def media(api: Api, url: str) -> list[dict[str, Any]]:
    """Bodies that ask for a picture at an address."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "input_image", "image_url": url},
        {"type": "input_file", "file_url": url},
        {"type": "image", "source": {"type": "url", "url": url}},
        {"type": "document", "source": {"type": "url", "url": url}},
    ]
    if api.path == "/api/chat":
        return [{"messages": [{**HELLO[0], "images": [url]}]}]
    name = "input" if api.path == "/v1/responses" else "messages"
    return [{name: [{"role": "user", "content": [part]}]} for part in parts]


@EVERY
def test_31_media_are_refused_and_nothing_is_fetched(served: Served, api: Api) -> None:
    with socket.create_server(("127.0.0.1", 0)) as waiting:
        address = f"http://127.0.0.1:{waiting.getsockname()[1]}/x.png"
        for url in (address, "file:///etc/passwd", "data:image/png;base64,AAAA"):
            for fields in media(api, url):
                assert "root:" not in served.error(api.path, {**valid(api.path), **fields})
        waiting.settimeout(0.05)
        with pytest.raises(TimeoutError):
            waiting.accept()


SALTED = [path for path in VALID if "cache_salt" in FORMATS[path].request_type.__struct_fields__]


@pytest.mark.parametrize("path", SALTED)
def test_37_different_salts_share_nothing_and_the_same_salt_does(served: Served, path: str) -> None:
    [name] = _IS_CONTENT & valid(path).keys()
    text = "word " * 100
    content = [{**HELLO[0], "content": text}] if name == "messages" else text

    def cached(salt: str) -> int:
        reply = served.post(path, {**valid(path), name: content, "cache_salt": f"{path} {salt}"})
        assert reply.status == 200, reply.body
        usage = json.loads(reply.body)["usage"]
        for details in ("prompt_tokens_details", "input_tokens_details"):
            if details in usage:
                return int(usage[details]["cached_tokens"])
        return int(usage["cache_read_input_tokens"])

    assert cached("one") == cached("two") == 0
    assert cached("one") >= 80


def test_37_every_api_but_that_of_ollama_has_salts() -> None:
    assert [path for path in VALID if path.startswith("/v1/")] == SALTED


@EVERY
def test_46_results_without_a_call_and_calls_without_a_result_are_legal_in_chats_and_refused_elsewhere(
    served: Served, api: Api
) -> None:
    question, call = Turn("user", "x"), Turn("call", "{}", "c1", "f")
    lost = [question, Turn("result", "r", "c9", "f")]
    # Agents of chats and of Ollama send these after an interruption, or after they shortened a conversation. A chat
    # template writes them as they are. Both other APIs refuse them at their origin, and their agents repair histories.
    for turns in (lost, [*lost, question], [question, call, question], [question, call, Turn("result", "r", "c2"), question]):  # fmt: skip
        reply = served.post(api.path, api.body(turns, max_tokens=2))
        is_lenient = api.path in ("/v1/chat/completions", "/api/chat")
        assert reply.status == (200 if is_lenient else 400), (turns, reply.body)
        assert is_lenient or api.error(reply.body)


def test_46_references_that_lead_in_circles_end(served: Served) -> None:
    """An id names the last item that has it, so a reference to itself, or to a later item, is not found."""
    path = "/v1/responses"
    mine = {"type": "message", "role": "user", "content": "x", "id": "msg_mine"}
    for items in (
        [{"type": "item_reference", "id": "a"}],
        [{"type": "item_reference", "id": "a"}, {"type": "item_reference", "id": "a"}],
        [{"id": "a", "type": "item_reference"}, {"id": "b", "type": "item_reference"}],
    ):
        assert served.error(path, {**valid(path), "input": items}, 404)
    reply = served.post(path, {**valid(path), "input": [mine, {"type": "item_reference", "id": "msg_mine"}]})
    assert reply.status == 200, reply.body
