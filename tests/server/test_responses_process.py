"""The Responses API of real server processes: the openai package, tools of the real model, and what survives a kill."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from responses_checks import checked_events, checked_response
from server_process import MODEL, SLOW, Server, running_server, wait_for

URL = "/v1/responses"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["unit"],
        "additionalProperties": False,
    },
}
PATCH: Any = {
    "type": "custom",
    "name": "edit",
    "format": {
        "type": "grammar",
        "syntax": "lark",
        "definition": 'start: "say \\"" /[a-z]{2}/ "\\"" LF\nLF: "\\n"',
    },
}
CODE: Any = {
    "type": "custom",
    "name": "code",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[ab]{3}\n"},
}
CLOCK: Any = {
    "type": "namespace",
    "name": "clock",
    "description": "Time.",
    "tools": [{"type": "function", "name": "now"}],
}


@pytest.fixture(scope="module")
def client(real_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def call(server: Server, **fields: Any) -> dict[str, Any]:
    """The only item of a forced call, streamed and not."""
    given = {
        "input": "What is the weather?",
        "temperature": 0,
        "max_output_tokens": 60,
        "store": False,
        **fields,
    }
    events = checked_events(server.client.post(URL, json={**given, "stream": True}).content)
    response = checked_response(server.client.post(URL, json=given).content)
    ids = re.compile(r'"(call_)?id": "[^"]*"')
    assert [ids.sub("", json.dumps(item)) for item in events[-1]["response"]["output"]] == [
        ids.sub("", json.dumps(item)) for item in response["output"]
    ]
    [item] = response["output"]
    assert response["status"] == "completed"
    found: dict[str, Any] = item
    return found


def test_tools_of_every_kind_are_called_by_the_real_model(real_server: Server) -> None:
    tools = [WEATHER, PATCH, CODE, CLOCK, {"type": "web_search"}]
    item = call(real_server, tools=tools, tool_choice={"type": "function", "name": "weather"})
    assert item["type"] == "function_call" and json.loads(item["arguments"])["unit"] in (
        "celsius",
        "fahrenheit",
    )
    item = call(real_server, tools=tools, tool_choice={"type": "custom", "name": "edit"})
    assert item["type"] == "custom_tool_call" and re.fullmatch('say "[a-z]{2}"\n', item["input"])
    item = call(real_server, tools=tools, tool_choice={"type": "custom", "name": "code"})
    assert re.fullmatch("[ab]{3}\n", item["input"])
    item = call(
        real_server, tools=tools, tool_choice={"type": "function", "name": "now", "namespace": "clock"}
    )
    assert (item["name"], item["namespace"]) == ("now", "clock")
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "code"}]}
    assert call(real_server, tools=tools, tool_choice=allowed)["name"] == "code"


def test_the_openai_package_streams_parses_and_continues(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model=MODEL, input="Name the capital of France.", temperature=0, max_output_tokens=200
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.output_text == text and "Paris" in text and final.status == "completed"
    second = client.responses.create(
        model=MODEL, input="And of Italy?", previous_response_id=final.id, temperature=0, max_output_tokens=8
    )
    assert second.previous_response_id == final.id and second.usage is not None and final.usage is not None
    assert second.usage.input_tokens > final.usage.total_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0
    assert client.responses.retrieve(second.id).output_text == second.output_text
    assert [item.type for item in client.responses.input_items.list(second.id)] == ["message"]
    assert client.responses.input_tokens.count(model=MODEL, input="Hello").input_tokens > 0
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_structured_output_follows_the_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    answer = client.responses.create(
        model=MODEL,
        input="One or two?",
        max_output_tokens=60,
        temperature=0,
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
    )
    assert json.loads(answer.output_text)["n"] in (1, 2)


def test_what_was_acknowledged_survives_a_kill_and_what_was_running_is_reported_failed(
    default_model_path: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"state_path": str(tmp_path), "backend_options": SLOW}
    fields = {"input": "Hello", "max_output_tokens": 2, "ignore_eos": True}
    long = {**fields, "max_output_tokens": 8000, "background": True}
    with running_server(default_model_path, **settings) as server:
        body = server.client.post(URL, json=fields).json()
        events = checked_events(server.client.post(URL, json={**fields, "stream": True}).content)
        running = server.client.post(URL, json=long).json()
        wait_for(lambda: server.client.get(f"{URL}/{running['id']}").json()["status"] == "in_progress")
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(60)
    with running_server(default_model_path, **settings) as server:
        for response in (body, events[-1]["response"]):
            assert server.client.get(f"{URL}/{response['id']}").json() == response
            again = server.client.post(URL, json={**fields, "previous_response_id": response["id"]})
            assert again.status_code == 200
        failed = server.client.get(f"{URL}/{running['id']}").json()
        assert failed["status"] == "failed" and "stopped" in failed["error"]["message"]
        cancelled = server.client.post(f"{URL}/{running['id']}/cancel").json()
        assert cancelled["status"] == "failed"
        assert list((tmp_path / "workers").iterdir()) == []


def test_servers_that_share_a_store_see_and_cancel_each_others_background_responses(
    default_model_path: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"state_path": str(tmp_path), "backend_options": SLOW}
    with (
        running_server(default_model_path, **settings) as one,
        running_server(default_model_path, **settings) as two,
    ):
        fields = {"input": "Hello", "max_output_tokens": 8000, "ignore_eos": True, "background": True}
        running = one.client.post(URL, json=fields).json()
        path = f"{URL}/{running['id']}"
        assert two.client.get(path).json()["status"] in ("queued", "in_progress")
        assert two.client.post(f"{path}/cancel").json()["status"] == "cancelled"
        assert one.client.get(path).json()["status"] == "cancelled"
