"""The Responses API in one process with the noop engine: items, parameters, the stream, and errors."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from in_process import InProcess, Reply, in_process
from responses_checks import checked_events, checked_response

from weft.server.admission.keys import plain_keys

URL = "/v1/responses"
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "3"}
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
NAMESPACE = {"type": "namespace", "name": "math", "description": "Numbers.", "tools": [TOOL]}


class Api:
    """Requests of one client to the application."""

    def __init__(self, app: InProcess, key: str | None = None) -> None:
        self.app, self.key = app, key

    async def post(self, path: str = URL, leaves_after: float | None = None, **fields: Any) -> Reply:
        fields = {"max_output_tokens": 8, "ignore_eos": True, **fields} if path == URL else fields
        return await self.app.send(path, json.dumps(fields).encode(), leaves_after, key=self.key)

    async def create(self, **fields: Any) -> dict[str, Any]:
        reply = await self.post(**fields)
        assert reply.status == 200, reply.body
        return checked_response(reply.body)

    async def stream(self, **fields: Any) -> list[dict[str, Any]]:
        reply = await self.post(stream=True, **fields)
        assert reply.status == 200, reply.body
        return checked_events(reply.body)

    async def error(self, **fields: Any) -> tuple[int, Any, Any, str]:
        reply = await self.post(**fields)
        assert reply.status >= 400, fields
        error = json.loads(reply.body)["error"]
        return reply.status, error["param"], error["code"], error["message"]

    async def get(self, path: str, query: str = "", method: str = "GET") -> tuple[int, Any]:
        reply = await self.app.send(f"{URL}/{path}?{query}", method=method, key=self.key)
        return reply.status, json.loads(reply.body)

    async def count(self, **fields: Any) -> int:
        reply = await self.post(f"{URL}/input_tokens", **fields)
        assert reply.status == 200, reply.body
        content = json.loads(reply.body)
        assert content["object"] == "response.input_tokens"
        return int(content["input_tokens"])

    async def ended(self, response_id: str) -> dict[str, Any]:
        """The object of a background response after its end."""
        for _ in range(3000):
            status, content = await self.get(response_id)
            assert status == 200, content
            if content["status"] not in ("queued", "in_progress"):
                return checked_response(json.dumps(content))
            await asyncio.sleep(0.02)
        raise AssertionError("the response did not end")


def run(model_path: Path, folder: Path, work: Callable[[Api], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        given = {"max_context": 2048, "state_path": str(folder), **settings}
        async with in_process(model_path, **given) as app:
            await work(Api(app))

    asyncio.run(main())


def test_the_effort_reaches_the_chat_template(default_model_path: Path, tmp_path: Path) -> None:
    """The template writes 50 words at a high effort."""
    words = "{{ 'word ' * 50 if reasoning_effort == 'high' }}"
    (tmp_path / "template.jinja").write_text(
        f"{words}{{% for one in messages %}}{{{{ one.content }}}}{{% endfor %}}"
    )

    async def work(api: Api) -> None:
        low, high = [await api.count(input="x", reasoning={"effort": one}) for one in ("low", "high")]
        assert high >= low + 50

    run(default_model_path, tmp_path, work, chat_template=str(tmp_path / "template.jinja"))


# ---------------------------------------------------------------------- the response object and the stream


def test_a_body_has_the_types_of_the_openai_package_and_repeats_the_parameters(
    default_model_path: Path, tmp_path: Path
) -> None:
    async def work(api: Api) -> None:
        given = {
            "instructions": "Be brief.",
            "metadata": {"a": "b"},
            "temperature": 0.5,
            "top_p": 0.9,
            "parallel_tool_calls": False,
            "max_tool_calls": 3,
            "prompt_cache_key": "k",
            "safety_identifier": "s",
            "user": "u",
            "truncation": "auto",
        }
        text = {"format": {"type": "text"}, "verbosity": "low"}
        response = await api.create(
            input="Hello",
            reasoning={"effort": "low", "summary": "auto"},
            text=text,
            tools=[TOOL, NAMESPACE],
            **given,
        )
        assert response | given == response
        assert (response["text"], response["tools"]) == (text, [TOOL, NAMESPACE])
        assert response["reasoning"] == {"effort": "low", "summary": "auto"}
        assert (response["status"], response["incomplete_details"]) == (
            "incomplete",
            {"reason": "max_output_tokens"},
        )
        usage = response["usage"]
        assert usage["output_tokens"] == 8 and usage["total_tokens"] == 8 + usage["input_tokens"] > 8

    run(default_model_path, tmp_path, work)


def test_the_usage_says_what_the_next_request_finds_in_the_cache(
    default_model_path: Path, tmp_path: Path
) -> None:
    async def work(api: Api) -> None:
        given = {"input": "word " * 200, "store": False}
        first, second = [(await api.create(**given))["usage"] for _ in range(2)]
        written, found = first["input_tokens_details"], second["input_tokens_details"]
        assert written["cached_tokens"] == 0 and 190 < written["cache_write_tokens"] < first["input_tokens"]
        assert found == {"cached_tokens": written["cache_write_tokens"], "cache_write_tokens": 0}

    run(default_model_path, tmp_path, work)


def test_a_stream_has_the_events_in_order_and_ends_with_the_object_of_a_body(
    default_model_path: Path, tmp_path: Path
) -> None:
    async def work(api: Api) -> None:
        fields = {"input": "Hello", "seed": 3, "temperature": 1}
        body = await api.create(**fields)
        events = await api.stream(**fields)
        final = events[-1]["response"]
        same = ("status", "incomplete_details", "tools", "text")
        assert [final[name] for name in same] == [body[name] for name in same]
        assert final["output"][0]["content"] == body["output"][0]["content"]

    run(default_model_path, tmp_path, work)


def test_logprobs_are_those_of_the_text_in_deltas_and_in_the_last_events(
    default_model_path: Path, tmp_path: Path
) -> None:
    async def work(api: Api) -> None:
        fields = {
            "input": "Hello",
            "seed": 3,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
        }
        whole = (await api.create(**fields))["output"][0]["content"][0]
        events = await api.stream(**fields)
        assert "".join(entry["token"] for entry in whole["logprobs"]) == whole["text"]
        assert all(len(entry["top_logprobs"]) == 2 for entry in whole["logprobs"])
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert [entry for delta in deltas for entry in delta["logprobs"]] == whole["logprobs"]
        assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == whole["logprobs"]
        plain = (await api.create(input="Hello"))["output"][0]["content"][0]
        assert plain["logprobs"] == []

    run(default_model_path, tmp_path, work)


# ---------------------------------------------------------------------- input


def test_a_text_and_items_in_every_variant_give_the_same_prompt(
    default_model_path: Path, tmp_path: Path
) -> None:
    async def work(api: Api) -> None:
        part = {"type": "input_text", "text": "Hello"}
        variants: list[Any] = [
            "Hello",
            [{"role": "user", "content": "Hello"}],
            [{"type": "message", "role": "user", "content": "Hello", "id": "msg_1", "status": "completed"}],
            [{"role": "user", "content": [part]}],
        ]
        assert len({await api.count(input=one) for one in variants}) == 1
        system = [
            {"instructions": "Be brief.", "input": "Hello"},
            {"input": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello"}]},
            {"input": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [part]}]},
        ]
        assert len({await api.count(**one) for one in system}) == 1
        assert await api.count(input="") < await api.count(input="Hello")

    run(default_model_path, tmp_path, work)


def test_every_type_of_item_is_accepted_and_listed(default_model_path: Path, tmp_path: Path) -> None:
    async def work(api: Api) -> None:
        items: list[dict[str, Any]] = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "Add."}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "of another server"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {**CALL, "id": "fc_1", "status": "completed", "namespace": "math"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": 'say "hi"\n'},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
            {**RESULT, "output": [{"type": "input_text", "text": "3"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "3", "annotations": []}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"role": "user", "content": "Thanks."},
        ]
        reply = await api.post(input=items)
        assert reply.status == 200 and b"web_search_call" in reply.headers[b"warning"]
        response = checked_response(reply.body)
        status, listed = await api.get(f"{response['id']}/input_items", "order=asc&limit=100")
        assert status == 200
        kinds = [one.get("type", "message") for one in items if one.get("type") != "web_search_call"]
        assert [one["type"] for one in listed["data"]] == kinds
        assert len({one["id"] for one in listed["data"]}) == len(kinds)
        assert listed["data"][5]["namespace"] == "math" and listed["data"][5]["id"] == "fc_1"
        again = await api.count(input=listed["data"])
        assert again == response["usage"]["input_tokens"] == await api.count(input=items)

    run(default_model_path, tmp_path, work)


BAD_ITEMS: list[tuple[Any, str]] = [
    (
        [{"role": "user", "content": [{"type": "input_image", "image_url": "http://10.0.0.1/"}]}],
        "input[0].content[0]",
    ),
    ([{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}], "input[0].content[0]"),
    ([{"role": "robot", "content": "x"}], "input[0].role"),
    ([{"role": "user", "content": 3}], "input[0].content"),
    ([{"role": "user"}], "input[0].content"),
    ([{"type": "mesage", "content": "x"}], "input[0].type"),
    ([{"type": 3}], "input[0].type"),
    (["text"], "input[0]"),
    ([{"type": "item_reference"}], "input[0].id"),
    ([{**CALL, "arguments": {}}], "input[0].arguments"),
    ([{**CALL, "call_id": None}], "input[0].call_id"),
    ([{"type": "custom_tool_call", "call_id": "c", "name": "n"}], "input[0].input"),
    ([{"type": "reasoning", "summary": 3}], "input[0].summary"),
    ([{"type": "reasoning", "summary": [3]}], "input[0].summary[0]"),
    (
        [{"type": "reasoning", "summary": [], "encrypted_content": "weft-1:?"}],
        "input[0].encrypted_content",
    ),
    ([RESULT], "input"),
    ([CALL], "input"),
    ([RESULT, CALL], "input"),
    ([CALL, RESULT, RESULT], "input"),
    ([{"role": "user", "content": "x"}] * 100_000, "input"),
    ([{"type": "item_reference", "id": "msg_1"}] * 100_000, "input"),
    ([], "input"),
]


def test_invalid_items_are_refused_with_their_place(default_model_path: Path, tmp_path: Path) -> None:
    async def work(api: Api) -> None:
        for items, param in BAD_ITEMS:
            status, found, _, message = await api.error(input=items)
            assert (status, found) == (400, param) and "messages" not in message, message

    run(default_model_path, tmp_path, work)


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"n": 2}, "n"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"reasoning": {"effort": "huge"}}, "reasoning"),
    ({"reasoning": {"summary": "long"}}, "reasoning"),
    ({"text": {"verbosity": "loud"}}, "text"),
    ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "text"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}, "guided_regex": "a"}, "text"),
    (
        {"text": {"format": {"type": "json_schema", "schema": {"$ref": "http://127.0.0.1:1/x.json"}}}},
        "text",
    ),
    ({"truncation": "middle"}, "truncation"),
    ({"background": True, "stream": True}, "stream"),
    ({"background": True, "store": False}, "background"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"metadata": {"a": "x" * 513}}, "metadata"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"temperature": -1}, "temperature"),
    ({"text": {"format": {"type": "xml"}}}, "text"),
    ({"text": {"format": {"type": "json_schema", "schema": 3}}}, "text"),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": "no"}}}}, "text"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": ["x"]}, "tools[0]"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [{"type": "namespace", "name": "x"}]}, "tools[0]"),
    (
        {"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar"}}]},
        "tools[0].format",
    ),
    ({"tool_choice": "maybe"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "no"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
    ({"previous_response_id": "x" * 300}, "previous_response_id"),
]


def test_invalid_parameters_are_refused_by_name(default_model_path: Path, tmp_path: Path) -> None:
    async def work(api: Api) -> None:
        for fields, param in BAD_FIELDS:
            status, found, _, message = await api.error(input="Hello", **fields)
            assert (status, found) == (400, param), message

    run(default_model_path, tmp_path, work)


def test_a_grammar_that_cannot_be_rewritten_is_refused(default_model_path: Path, tmp_path: Path) -> None:
    async def work(api: Api) -> None:
        form = {"type": "grammar", "syntax": "lark", "definition": "start: /(?=a)a/"}
        status, param, _, message = await api.error(
            input="x", tools=[{"type": "custom", "name": "x", "format": form}]
        )
        assert (status, param) == (400, "tools[0].format.definition") and "assert" in message
        form["definition"] = "start: missing_rule"
        status, param, _, _ = await api.error(
            input="x", tools=[{"type": "custom", "name": "x", "format": form}], tool_choice="required"
        )
        assert (status, param) == (400, "tools")

    run(default_model_path, tmp_path, work)


def test_hosted_tools_and_unknown_fields_are_ignored_with_a_warning(
    default_model_path: Path, tmp_path: Path
) -> None:
    async def work(api: Api) -> None:
        tools = [{"type": "web_search", "external_web_access": False}, {"type": "tool_search"}]
        reply = await api.post(input="Hello", tools=tools, tool_choice={"type": "web_search"}, shape="round")
        warning = reply.headers[b"warning"].decode()
        assert reply.status == 200 and "shape" in warning and "web_search" in warning
        assert checked_response(reply.body)["tools"] == []
        assert await api.count(input="Hello", tools=tools) == await api.count(input="Hello")
        group = {"type": "namespace", "name": "n", "tools": [{"type": "computer"}]}
        reply = await api.post(input="Hello", tools=[group])
        assert reply.status == 200 and "tools.0.computer" in reply.headers[b"warning"].decode()

    run(default_model_path, tmp_path, work)


def test_a_required_call_is_optional_if_every_tool_is_ignored(
    default_model_path: Path, tmp_path: Path
) -> None:
    """A 400 ends Codex."""
    web, group = {"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [{"type": "computer"}]}
    choices: list[Any] = ["required", {"type": "allowed_tools", "mode": "required", "tools": [web]}]

    async def work(api: Api) -> None:
        for tools in ([web], [group], [web, group]):
            for choice in choices:
                reply = await api.post(input="Hello", tools=tools, tool_choice=choice)
                assert reply.status == 200, reply.body
                warning = reply.headers[b"warning"].decode()
                assert "tools.0" in warning and "tool_choice" in warning
                assert json.loads(reply.body)["tool_choice"] == "auto"
        status, param, _, message = await api.error(input="Hello", tools=[], tool_choice="required")
        assert (status, param) == (400, "tool_choice") and "no tools" in message
        named = {"type": "function", "name": "add"}
        assert (await api.error(input="Hello", tools=[web], tool_choice=named))[:2] == (400, "tool_choice")
        kept = await api.create(input="Hello", tools=[web, TOOL], tool_choice="required", ignore_eos=False)
        assert kept["tool_choice"] == "required"

    run(default_model_path, tmp_path, work)


# ---------------------------------------------------------------------- a conversation longer than the context


def test_a_long_conversation_is_an_error_with_both_numbers_or_loses_its_oldest_items(
    default_model_path: Path, tmp_path: Path
) -> None:
    async def work(api: Api) -> None:
        talk: list[Any] = [{"role": "system", "content": "Be brief."}]
        for number in range(40):
            talk += [{"role": "user", "content": f"Question {number} " + "word " * 20}]
            talk += [{**CALL, "call_id": f"c{number}"}, {**RESULT, "call_id": f"c{number}"}]
        status, param, code, message = await api.error(input=talk)
        assert (status, param, code) == (400, "input", "context_length_exceeded")
        assert [int(number) > 1000 for number in re.findall(r"\d{3,}", message)] == [True, False, False]
        response = await api.create(input=talk, truncation="auto")
        assert 512 - 120 < response["usage"]["input_tokens"] <= 512 - 8
        stored = (await api.get(f"{response['id']}/input_items", "limit=100&order=asc"))[1]["data"]
        assert len(stored) == 100
        status, _, code, _ = await api.error(input="word " * 600, truncation="auto")
        assert (status, code) == (400, "context_length_exceeded")

    run(default_model_path, tmp_path, work, max_context=512)


def test_without_keys_of_its_own_a_request_needs_a_key_and_gets_the_usual_error(
    default_model_path: Path, tmp_path: Path
) -> None:
    async def work(api: Api) -> None:
        assert (await api.post(input="Hello")).status == 401
        api.key = "one"
        assert (await api.post(input="Hello")).status == 200

    run(default_model_path, tmp_path, work, api_keys=plain_keys(["one"]))
