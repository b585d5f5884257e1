"""Loops of coding agents against `weft serve` with the scripted model: requests of the structure that each agent sends.

`make test-agents` runs the agents themselves. Here each class builds the bodies of one kind of agent and reads the
streams that it gets; one loop is for all of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripted"))

from scripted_server import ScriptedServer

ARGUMENTS = {"command": "cat hello.txt", "description": "Reads the file"}
RESULT = "hello kumquat"
FINAL = "The file says kumquat."
SCRIPT = {
    "rules": [
        {"contains": ["<tool_response>", RESULT], "text": FINAL},
        {"contains": ["twice"], "calls": [["bash", ARGUMENTS], ["bash", {**ARGUMENTS, "command": "ls"}]]},
        {"contains": ["Read hello.txt"], "text": "I will read it.\n", "calls": [["bash", ARGUMENTS]]},
        {"contains": ["Change the greeting"], "text": "hello.txt\n```\nhello weft\n```\n"},
        {"contains": ["Thank you"], "text": "You are welcome."},
        {"contains": ["As JSON"], "calls": [["json", {"city": "Rome"}]]},
    ]
}
INSTRUCTIONS = " ".join(f"Rule {number}: read a file before you change it." for number in range(60))
SCHEMA = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "command": {"type": "string", "description": "The command."},
        "timeout": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
        "description": {"type": "string"},
    },
    "required": ["command", "description"],
    "additionalProperties": False,
}
TOOL = {"name": "bash", "description": "Runs a command."}


@dataclass
class Turn:
    """What one answer brought."""

    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    items: list[Any] = field(default_factory=list)
    """What the agent sends back of the answer, where that is more than text and calls."""


def events_of(response: httpx.Response) -> Iterator[dict[str, Any]]:
    assert response.status_code == 200, response.read()
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


class OpenCode:
    """Chat completions with text as content."""

    path = "/v1/chat/completions"
    tool_choice: str | None = "auto"

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": self.content(INSTRUCTIONS)}]

    def content(self, text: str) -> Any:
        return text

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": self.content(text)})

    def body(self) -> dict[str, Any]:
        tools = [{"type": "function", "function": {**TOOL, "parameters": SCHEMA}}]
        options = {"max_tokens": 32_000, "stream": True, "stream_options": {"include_usage": True}}
        choice = {"tool_choice": self.tool_choice} if self.tool_choice else {}
        return {"model": "default", "messages": self.messages, "tools": tools, **options, **choice}

    def read(self, response: httpx.Response) -> Turn:
        turn, finish = Turn(), None
        for event in events_of(response):
            if event.get("usage"):
                turn.prompt_tokens = event["usage"]["prompt_tokens"]
                turn.cached_tokens = event["usage"]["prompt_tokens_details"]["cached_tokens"]
            for choice in event["choices"]:
                finish = choice["finish_reason"] or finish
                turn.text += choice["delta"].get("content") or ""
                for part in choice["delta"].get("tool_calls", ()):
                    if part["index"] == len(turn.calls):
                        turn.calls.append(
                            {"id": part["id"], "name": part["function"]["name"], "arguments": ""}
                        )
                    turn.calls[part["index"]]["arguments"] += part["function"].get("arguments") or ""
        assert finish == ("tool_calls" if turn.calls else "stop")
        for call in turn.calls:
            call["arguments"] = json.loads(call["arguments"])
        return turn

    def answer(self, turn: Turn, results: list[str]) -> None:
        calls = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
            }
            for call in turn.calls
        ]
        message = {"role": "assistant", "content": turn.text, "reasoning_content": ""}
        self.messages.append({**message, "tool_calls": calls} if calls else message)
        for call, result in zip(calls, results, strict=True):
            self.messages.append(
                {"role": "tool", "tool_call_id": call["id"], "content": self.content(result)}
            )


class QwenCode(OpenCode):
    """Chat completions with parts as content of every message but the system's, and without a tool choice."""

    tool_choice = None

    def content(self, text: str) -> Any:
        return text if text is INSTRUCTIONS else [{"type": "text", "text": text}]


class ClaudeCode:
    """Messages: system blocks, the first of which changes; a system message in between; blocks and plain strings for
    the same text; results in another order than their calls."""

    path = "/v1/messages?beta=true"

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.num_requests = 0

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        if len(self.messages) == 1:
            self.messages.append({"role": "system", "content": "The folder is empty but for one file."})

    def body(self) -> dict[str, Any]:
        self.num_requests += 1
        marked = {"cache_control": {"type": "ephemeral"}}
        messages = list(self.messages)
        last = max(index for index, message in enumerate(messages) if message["role"] == "user")
        content = messages[last]["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        messages[last] = {"role": "user", "content": [*blocks[:-1], {**blocks[-1], **marked}]}
        billing = f"x-anthropic-billing-header: cc_version=2.1.{self.num_requests}; cc_entrypoint=cli;"
        return {
            "model": "claude-opus-5-5",
            "max_tokens": 32_000,
            "stream": True,
            "system": [
                {"type": "text", "text": billing},
                {"type": "text", "text": "You are a coding agent.", **marked},
                {"type": "text", "text": INSTRUCTIONS, **marked},
            ],
            "messages": messages,
            "tools": [
                {**TOOL, "input_schema": SCHEMA},
                {
                    "name": "Later",
                    "description": "",
                    "input_schema": {"type": "object"},
                    "defer_loading": True,
                },
            ],
            "thinking": {"type": "adaptive", "display": "omitted"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "metadata": {"user_id": json.dumps({"device_id": "d", "session_id": "s"})},
        }

    def read(self, response: httpx.Response) -> Turn:
        turn, stop_reason = Turn(), None
        for event in events_of(response):
            match event["type"]:
                case "message_start":
                    usage = event["message"]["usage"]
                case "content_block_start":
                    turn.items.append(event["content_block"])
                    arguments = ""
                case "content_block_delta" if event["delta"]["type"] == "text_delta":
                    turn.items[-1]["text"] += event["delta"]["text"]
                case "content_block_delta" if event["delta"]["type"] == "input_json_delta":
                    arguments += event["delta"]["partial_json"]
                case "content_block_stop" if turn.items[-1]["type"] == "tool_use":
                    turn.items[-1]["input"] = json.loads(arguments)
                case "message_delta":
                    stop_reason = event["delta"]["stop_reason"]
                    usage |= event["usage"]
        turn.cached_tokens = usage["cache_read_input_tokens"]
        turn.prompt_tokens = usage["input_tokens"] + usage["cache_creation_input_tokens"] + turn.cached_tokens
        turn.text = "".join(item["text"] for item in turn.items if item["type"] == "text")
        turn.calls = [
            {"id": item["id"], "name": item["name"], "arguments": item["input"]}
            for item in turn.items
            if item["type"] == "tool_use"
        ]
        assert stop_reason == ("tool_use" if turn.calls else "end_turn")
        return turn

    def answer(self, turn: Turn, results: list[str]) -> None:
        self.messages.append({"role": "assistant", "content": turn.items})
        blocks = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": result, "is_error": False}
            for call, result in zip(turn.calls, results, strict=True)
        ]
        if blocks:
            self.messages.append({"role": "user", "content": blocks[::-1]})


class Codex:
    """Responses: instructions as a developer message, items, and tools of kinds that weft does not run."""

    path = "/v1/responses"

    def __init__(self) -> None:
        self.input: list[dict[str, Any]] = [self.message("developer", "input_text", INSTRUCTIONS)]

    def message(self, role: str, kind: str, text: str) -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    def say(self, text: str) -> None:
        self.input.append(self.message("user", "input_text", text))

    def body(self) -> dict[str, Any]:
        function = {"type": "function", **TOOL, "strict": False, "parameters": SCHEMA}
        agents = {"type": "namespace", "name": "multi_agent_v1", "description": "Agents."}
        return {
            "model": "default",
            "input": self.input,
            "tools": [
                function,
                {**agents, "tools": [{**function, "name": "spawn_agent"}]},
                {"type": "web_search", "external_web_access": False},
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "00000000-0000-0000-0000-000000000000",
            "client_metadata": {"installation": "1"},
        }

    def read(self, response: httpx.Response) -> Turn:
        turn = Turn()
        for event in events_of(response):
            if event["type"] == "response.output_text.delta":
                turn.text += event["delta"]
            elif event["type"] == "response.output_item.done":
                turn.items.append(event["item"])
            last = event
        assert last["type"] == "response.completed", last
        usage = last["response"]["usage"]
        turn.prompt_tokens = usage["input_tokens"]
        turn.cached_tokens = usage["input_tokens_details"]["cached_tokens"]
        turn.calls = [
            {"id": item["call_id"], "name": item["name"], "arguments": json.loads(item["arguments"])}
            for item in turn.items
            if item["type"] == "function_call"
        ]
        return turn

    def answer(self, turn: Turn, results: list[str]) -> None:
        self.input += turn.items
        self.input += [
            {"type": "function_call_output", "call_id": call["id"], "output": result}
            for call, result in zip(turn.calls, results, strict=True)
        ]


class OpenCodeMessages(ClaudeCode):
    """Messages by the AI SDK: marks also on calls and their results."""

    path = "/v1/messages"

    def body(self) -> dict[str, Any]:
        marked = {"cache_control": {"type": "ephemeral"}}
        messages = [one for one in self.messages if one["role"] != "system"]
        for message in messages[-2:]:
            blocks = message["content"]
            if isinstance(blocks, str):
                blocks = [{"type": "text", "text": blocks}]
            message["content"] = [*blocks[:-1], {**blocks[-1], **marked}]
        return {
            "model": "default",
            "max_tokens": 32_000,
            "stream": True,
            "system": [{"type": "text", "text": INSTRUCTIONS, **marked}],
            "messages": messages,
            "tools": [{**TOOL, "input_schema": SCHEMA}],
            "tool_choice": {"type": "auto"},
        }


class OpenCodeResponses(Codex):
    """Responses by the AI SDK: the role system, items without type and ids."""

    def message(self, role: str, kind: str, text: str) -> dict[str, Any]:
        if role == "developer":
            return {"role": "system", "content": text}
        return {"role": role, "content": [{"type": kind, "text": text}]}

    def body(self) -> dict[str, Any]:
        return {
            "model": "default",
            "input": self.input,
            "tools": [{"type": "function", **TOOL, "parameters": SCHEMA}],
            "tool_choice": "auto",
            "max_output_tokens": 32_000,
            "store": False,
            "stream": True,
            "prompt_cache_key": "ses_1",
        }

    def answer(self, turn: Turn, results: list[str]) -> None:
        if turn.text:
            self.input.append(self.message("assistant", "output_text", turn.text))
        for call in turn.calls:
            fields = {"call_id": call["id"], "name": call["name"], "arguments": json.dumps(call["arguments"])}
            self.input.append({"type": "function_call", **fields})
        super().answer(Turn(calls=turn.calls), results)


class OllamaAgent:
    """Ollama's chat: lines of JSON, arguments as an object, a body without a Content-Type."""

    path = "/api/chat"

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": INSTRUCTIONS}]

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text, "images": []})

    def body(self) -> dict[str, Any]:
        tools = [{"type": "function", "function": {**TOOL, "parameters": SCHEMA}}]
        options = {"num_ctx": 32_768, "temperature": 0}
        return {"model": "default", "messages": self.messages, "tools": tools, "options": options}

    def read(self, response: httpx.Response) -> Turn:
        assert response.status_code == 200, response.read()
        turn = Turn()
        for line in response.iter_lines():
            part = json.loads(line)
            turn.text += part["message"]["content"]
            turn.calls += [call["function"] for call in part["message"].get("tool_calls", ())]
        assert part["done"] and part["done_reason"] == "stop" and part["eval_count"] > 0
        return turn

    def answer(self, turn: Turn, results: list[str]) -> None:
        calls = [{"function": call} for call in turn.calls]
        self.messages.append({"role": "assistant", "content": turn.text, "tool_calls": calls})
        self.messages += [
            {"role": "tool", "tool_name": call["name"], "content": result}
            for call, result in zip(turn.calls, results, strict=True)
        ]


AGENTS = [OpenCode, OpenCodeMessages, OpenCodeResponses, QwenCode, ClaudeCode, Codex, OllamaAgent]
every_agent = pytest.mark.parametrize("kind", AGENTS, ids=lambda kind: kind.__name__)


@pytest.fixture(scope="module")
def served(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    server = ScriptedServer(tmp_path_factory.mktemp("scripted"), default_model_path, SCRIPT)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(served: ScriptedServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


def ask(client: httpx.Client, agent: Any) -> Turn:
    with client.stream("POST", agent.path, content=json.dumps(agent.body())) as response:
        turn: Turn = agent.read(response)
    return turn


@every_agent
def test_a_loop_ends_and_each_prompt_finds_the_one_before(client: httpx.Client, kind: Any) -> None:
    agent = kind()
    agent.say("Read hello.txt, please.")
    first = ask(client, agent)
    (call,) = first.calls
    assert (call["name"], call["arguments"], first.text.strip()) == ("bash", ARGUMENTS, "I will read it.")
    agent.answer(first, [RESULT])
    second = ask(client, agent)
    assert (second.text, second.calls) == (FINAL, [])
    agent.answer(second, [])
    agent.say("Thank you.")
    third = ask(client, agent)
    assert third.text == "You are welcome."
    if kind is not OllamaAgent:  # its answers do not say what was cached
        assert second.cached_tokens >= 0.95 * first.prompt_tokens
        assert third.cached_tokens >= 0.95 * second.prompt_tokens


@every_agent
def test_the_results_of_two_calls_are_answered(client: httpx.Client, kind: Any) -> None:
    agent = kind()
    agent.say("Look twice.")
    first = ask(client, agent)
    assert [call["arguments"]["command"] for call in first.calls] == ["cat hello.txt", "ls"]
    agent.answer(first, [RESULT, "hello.txt"])
    assert ask(client, agent).text == FINAL


def test_an_editor_without_tools_gets_a_whole_file(client: httpx.Client) -> None:
    """As aider asks: no limit of tokens, no usage, temperature 0."""
    messages = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": "Change the greeting"},
    ]
    body = {"model": "default", "messages": messages, "stream": True, "temperature": 0}
    with client.stream("POST", OpenCode.path, json=body) as response:
        events = list(events_of(response))
    texts = [event["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(texts) == "hello.txt\n```\nhello weft\n```\n"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_tool_that_must_be_called_gets_the_object(client: httpx.Client) -> None:
    """As the AI SDK asks for an object through Messages."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    body = {
        "model": "default",
        "max_tokens": 4096,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "As JSON, please."}]}],
        "tools": [{"name": "json", "description": "Respond with a JSON object.", "input_schema": schema}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    (block,) = client.post("/v1/messages", json=body).json()["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "json", {"city": "Rome"})


@every_agent
def test_a_conversation_goes_on_after_a_restart(
    served: ScriptedServer, client: httpx.Client, kind: Any
) -> None:
    agent = kind()
    agent.say("Read hello.txt, please.")
    first = ask(client, agent)
    served.kill()
    served.start()
    agent.answer(first, [RESULT])
    second = ask(client, agent)
    assert (second.text, second.cached_tokens) == (FINAL, 0)
