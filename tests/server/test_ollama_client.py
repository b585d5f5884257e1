"""The official `ollama` package against real server processes, through the second port and with the real model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ollama_lines import ollama
from server_process import MODEL, Server, api_key, running_server, wait_for

QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]
GREEDY = {"temperature": 0, "num_predict": 12}


@pytest.fixture(scope="module")
def client(real_server: Server) -> Any:
    return ollama.Client(real_server.url)


def test_a_streamed_and_a_whole_chat_are_the_same(client: Any) -> None:
    parts = list(client.chat(MODEL, QUESTION, stream=True, options=GREEDY))
    answer = client.chat(MODEL, QUESTION, options=GREEDY)
    assert "".join(part.message.content for part in parts) == answer.message.content
    assert "Tokyo" in answer.message.content and answer.done_reason == "stop"
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == answer.eval_count > 0 and parts[-1].prompt_eval_duration > 0


def test_generate_continues_its_context(client: Any) -> None:
    first = client.generate(MODEL, "Hello", options=GREEDY)
    second = client.generate(MODEL, "And now?", context=first.context, options=GREEDY)
    assert list(second.context[: len(first.context)]) == list(first.context)
    raw = client.generate(MODEL, "The capital of France is", raw=True, options=GREEDY)
    assert raw.response.startswith(" Paris") and raw.context is None


def test_a_function_as_tool_and_its_result(client: Any) -> None:
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: the name of the city
        """
        return city

    called = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}],
    }
    messages = [*QUESTION, called, {"role": "tool", "tool_name": "weather", "content": "sunny"}]
    assert client.chat(MODEL, messages, tools=[weather], options=GREEDY).message.content


def test_a_schema_of_pydantic_is_followed(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
    }
    answer = client.chat(MODEL, QUESTION, format=schema, options={"temperature": 0, "num_predict": 60})
    assert set(json.loads(answer.message.content)) == {"city"}


def test_errors_are_raised_with_their_text(client: Any) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat("nowhere", QUESTION)
    assert caught.value.status_code == 404 and "not found" in caught.value.error
    with pytest.raises(ollama.ResponseError, match="does not support thinking"):
        list(client.chat(MODEL, QUESTION, think=True, stream=True))
    with pytest.raises(ollama.ResponseError, match="embedding"):
        client.embed(MODEL, "x")


@pytest.fixture(scope="module")
def two_ports(default_model_path: Path) -> Iterator[Server]:
    keys, headers = [api_key("secret")], {"Authorization": "Bearer secret"}
    with running_server(default_model_path, ollama_port=0, api_keys=keys, headers=headers) as server:
        yield server


def test_the_second_port_serves_the_same_application_with_the_same_keys(two_ports: Server) -> None:
    url = f"http://127.0.0.1:{two_ports.ollama_port}"
    assert two_ports.ollama_port not in (None, two_ports.port)
    with (
        httpx.Client(base_url=url) as stranger,
        httpx.Client(base_url=url, headers=two_ports.client.headers) as own,
    ):
        assert stranger.get("/").text == "Ollama is running"
        for path in ("/api/tags", "/v1/models"):
            assert stranger.get(path).status_code == 401
        assert isinstance(stranger.get("/api/tags").json()["error"], str)
        assert own.get("/").text == "Ollama is running"
        for path in ("/", "/api/version", "/api/tags"):
            assert own.head(path).status_code == 200
        assert own.get("/v1/models").json() == two_ports.client.get("/v1/models").json()
    assert two_ports.client.get("/").headers["content-type"].startswith("text/html")
    client = ollama.Client(url, headers={"Authorization": "Bearer secret"})
    assert client.list().models[0].model == MODEL and client.ps().models[0].context_length == 8192
    assert list(client.pull(MODEL, stream=True))[-1].status == "success"
    assert client.generate(MODEL, "Hello", options={"num_predict": 4}).eval_count == 4
    before = two_ports.metric("prompt_tokens_total")
    client.chat(MODEL, QUESTION, options={"num_predict": 4})
    wait_for(lambda: two_ports.metric("prompt_tokens_total") > before)


def test_a_second_port_in_use_is_reported_before_the_model_is_loaded(shared_server: Server) -> None:
    command = [sys.executable, "-m", "weft.cli.entry", "serve", "--port", "0"]
    command += ["--ollama-port", str(shared_server.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "--ollama-port" in done.stderr and "cannot listen" in done.stderr
    assert str(shared_server.port) in done.stderr and done.stderr.count("\n") == 1
