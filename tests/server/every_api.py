"""One table of all APIs: how each says the same conversation, and how its answers, streams and errors are read."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import ollama_lines
from anthropic_types import EventStream, message_of
from api_shapes import Family, message_of_error
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from responses_checks import checked_events, checked_response


class Turn(NamedTuple):
    """A turn of a conversation: system, user, assistant (a text), thought, call or result."""

    kind: str
    text: str = ""
    """The text, the arguments of a call as JSON, or a result."""
    call_id: str = ""
    name: str = ""


class Tool(NamedTuple):
    name: str
    description: str
    parameters: dict[str, Any]


@dataclass
class Answer:
    """What a client has read of an answer."""

    text: str = ""
    thoughts: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    """Name and arguments: an object, or the text of incomplete JSON."""
    stop: str | None = None
    """stop, calls or length; None: the answer failed."""
    prompt_tokens: int = 0
    completion_tokens: int = 0


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


class Api(ABC):
    path: ClassVar[str]
    family: ClassVar[Family] = "openai"
    counting: ClassVar[tuple[str, str] | None] = None
    """The route that counts tokens, and the field of its answer."""

    def __str__(self) -> str:
        return self.path

    def body(
        self,
        turns: Sequence[Turn],
        tools: Sequence[Tool] = (),
        *,
        max_tokens: int = 40,
        stop: Sequence[str] = (),
        stream: bool = False,
        **more: Any,
    ) -> dict[str, Any]:
        return {**self.fields(turns, tools, max_tokens, list(stop)), "stream": stream, **more}

    @abstractmethod
    def fields(
        self, turns: Sequence[Turn], tools: Sequence[Tool], max_tokens: int, stop: list[str]
    ) -> dict[str, Any]: ...

    @abstractmethod
    def whole(self, body: bytes) -> Answer:
        """Reads a body. Raises if it is not one of this API."""

    @abstractmethod
    def streamed(self, body: bytes) -> Answer:
        """Joins a stream that did not fail. Raises if its events or their order are not those of this API."""

    @abstractmethod
    def failed(self, body: bytes) -> tuple[str, str]:
        """The text of a stream before its error, and the message of the error, which must be the last event."""

    def error(self, body: bytes) -> str:
        """The message of an error."""
        return message_of_error(self.family, json.loads(body))


class Chat(Api):
    path = "/v1/chat/completions"

    def fields(
        self, turns: Sequence[Turn], tools: Sequence[Tool], max_tokens: int, stop: list[str]
    ) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        for turn in turns:
            call = {
                "id": turn.call_id,
                "type": "function",
                "function": {"name": turn.name, "arguments": turn.text},
            }
            if turn.kind in ("thought", "assistant", "call") and messages[-1]["role"] == "assistant":
                message = messages[-1]
            else:
                role = {"thought": "assistant", "call": "assistant", "result": "tool"}.get(
                    turn.kind, turn.kind
                )
                message = {"role": role, "content": ""}
                messages.append(message)
            if turn.kind == "thought":
                message["reasoning_content"] = turn.text
            elif turn.kind == "call":
                message.setdefault("tool_calls", []).append(call)
            else:
                message["content"] = turn.text
                if turn.kind == "result":
                    message["tool_call_id"] = turn.call_id
        fields: dict[str, Any] = {"messages": messages, "max_tokens": max_tokens, "stop": stop}
        if tools:
            fields["tools"] = [{"type": "function", "function": tool._asdict()} for tool in tools]
        return fields

    def body(self, *arguments: Any, stream: bool = False, **options: Any) -> dict[str, Any]:
        body = super().body(*arguments, stream=stream, **options)
        return {**body, "stream_options": {"include_usage": True}} if stream else body

    def whole(self, body: bytes) -> Answer:
        answer = ChatCompletion.model_validate_json(body, strict=True)
        [choice] = answer.choices
        message, usage = choice.message, answer.usage
        assert usage is not None
        calls: list[Any] = message.tool_calls or []
        return Answer(
            message.content or "",
            getattr(message, "reasoning_content", None) or "",
            [(one.function.name, _arguments(one.function.arguments)) for one in calls],
            _chat_stop(choice.finish_reason),
            usage.prompt_tokens,
            usage.completion_tokens,
        )

    def streamed(self, body: bytes) -> Answer:
        *events, last, end = body.decode().split("\n\n")
        assert (last, end) == ("data: [DONE]", "")
        answer = self._read(events)
        assert answer.stop is not None and answer.prompt_tokens
        return answer

    def _read(self, events: Sequence[str]) -> Answer:
        """The order: a role, deltas of one choice, its finish_reason once, then usage and nothing else."""
        answer, calls, is_begun = Answer(), dict[int, list[str]](), False
        for event in events:
            assert event.startswith("data: ")
            chunk = ChatCompletionChunk.model_validate_json(event.removeprefix("data: "), strict=True)
            if not chunk.choices:
                assert answer.stop is not None and chunk.usage is not None and not answer.prompt_tokens
                answer.prompt_tokens = chunk.usage.prompt_tokens
                answer.completion_tokens = chunk.usage.completion_tokens
                continue
            [choice] = chunk.choices
            delta = choice.delta
            assert answer.stop is None, "a delta after the finish_reason"
            assert is_begun or delta.role == "assistant"
            is_begun = True
            answer.text += delta.content or ""
            answer.thoughts += getattr(delta, "reasoning_content", None) or ""
            for part in delta.tool_calls or ():
                assert part.function is not None
                if part.index not in calls:
                    assert part.index == len(calls) and part.id and part.function.name
                    calls[part.index] = [part.function.name, ""]
                calls[part.index][1] += part.function.arguments or ""
            answer.stop = _chat_stop(choice.finish_reason)
        answer.calls = [(name, _arguments(text)) for name, text in calls.values()]
        return answer

    def failed(self, body: bytes) -> tuple[str, str]:
        *events, last, end = body.decode().split("\n\n")
        assert end == "" and last.startswith("data: ")
        answer = self._read(events)
        assert answer.stop is None
        return answer.text, message_of_error("openai", json.loads(last.removeprefix("data: ")))


def _chat_stop(reason: str | None) -> str | None:
    return "calls" if reason == "tool_calls" else reason


class Responses(Api):
    path = "/v1/responses"
    counting = ("/v1/responses/input_tokens", "input_tokens")

    def fields(
        self, turns: Sequence[Turn], tools: Sequence[Tool], max_tokens: int, stop: list[str]
    ) -> dict[str, Any]:
        items: list[dict[str, Any]] = []
        for turn in turns:
            if turn.kind == "thought":
                content = [{"type": "reasoning_text", "text": turn.text}]
                items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": content})
            elif turn.kind == "call":
                call = {"call_id": turn.call_id, "name": turn.name, "arguments": turn.text}
                items.append({"type": "function_call", **call})
            elif turn.kind == "result":
                items.append({"type": "function_call_output", "call_id": turn.call_id, "output": turn.text})
            else:
                items.append({"role": turn.kind, "content": turn.text})
        fields: dict[str, Any] = {
            "input": items,
            "max_output_tokens": max_tokens,
            "stop": stop,
            "store": False,
        }
        if tools:
            fields["tools"] = [{"type": "function", **tool._asdict()} for tool in tools]
        return fields

    def whole(self, body: bytes) -> Answer:
        return self._answer(checked_response(body))

    def streamed(self, body: bytes) -> Answer:
        last = checked_events(body)[-1]
        assert last["type"] in ("response.completed", "response.incomplete")
        return self._answer(last["response"])

    def failed(self, body: bytes) -> tuple[str, str]:
        events = checked_events(body)
        assert events[-1]["type"] == "response.failed"
        text = "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta")
        return text, events[-1]["response"]["error"]["message"]

    def _answer(self, response: dict[str, Any]) -> Answer:
        answer = Answer(
            prompt_tokens=response["usage"]["input_tokens"],
            completion_tokens=response["usage"]["output_tokens"],
        )
        for item in response["output"]:
            if item["type"] == "message":
                answer.text += item["content"][0]["text"]
            elif item["type"] == "reasoning":
                answer.thoughts += (item["summary"] or item["content"])[0]["text"]
            else:
                answer.calls.append((item["name"], _arguments(item["arguments"])))
        if response["status"] == "incomplete":
            assert response["incomplete_details"]["reason"] == "max_output_tokens"
            answer.stop = "length"
        else:
            answer.stop = "calls" if answer.calls else "stop"
        return answer


class Messages(Api):
    path = "/v1/messages"
    family = "anthropic"
    counting = ("/v1/messages/count_tokens", "input_tokens")

    def fields(
        self, turns: Sequence[Turn], tools: Sequence[Tool], max_tokens: int, stop: list[str]
    ) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        fields: dict[str, Any] = {"messages": messages, "max_tokens": max_tokens, "stop_sequences": stop}
        for turn in turns:
            role = "user" if turn.kind in ("user", "result") else "assistant"
            if turn.kind == "system":
                fields["system"] = turn.text
                continue
            if not messages or messages[-1]["role"] != role:
                messages.append({"role": role, "content": []})
            messages[-1]["content"].append(self._block(turn))
        if tools:
            fields["tools"] = [
                {"name": tool.name, "description": tool.description, "input_schema": tool.parameters}
                for tool in tools
            ]
        return fields

    def _block(self, turn: Turn) -> dict[str, Any]:
        if turn.kind == "thought":
            return {"type": "thinking", "thinking": turn.text, "signature": "x"}
        if turn.kind == "call":
            return {"type": "tool_use", "id": turn.call_id, "name": turn.name, "input": json.loads(turn.text)}
        if turn.kind == "result":
            return {"type": "tool_result", "tool_use_id": turn.call_id, "content": turn.text}
        return {"type": "text", "text": turn.text}

    def whole(self, body: bytes) -> Answer:
        message_of(body)
        content = json.loads(body)
        return self._answer(content["content"], content["stop_reason"], content["usage"])

    def streamed(self, body: bytes) -> Answer:
        stream = EventStream(body)
        assert stream.error is None
        return self._answer(_blocks(stream), stream.stop_reason, stream.usage)

    def failed(self, body: bytes) -> tuple[str, str]:
        stream = EventStream(body)
        assert stream.error is not None
        return "".join(stream.texts), stream.error["message"]

    def _answer(self, blocks: Sequence[dict[str, Any]], reason: str | None, usage: dict[str, Any]) -> Answer:
        stops = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "calls", "max_tokens": "length"}
        cached = usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
        answer = Answer(
            stop=stops[reason or ""],
            prompt_tokens=usage["input_tokens"] + cached,
            completion_tokens=usage["output_tokens"],
        )
        for block in blocks:
            answer.text += block.get("text", "")
            answer.thoughts += block.get("thinking", "")
            if block["type"] == "tool_use":
                answer.calls.append((block["name"], block["input"]))
        return answer


def _blocks(stream: EventStream) -> list[dict[str, Any]]:
    blocks = []
    for block in stream.blocks:
        whole = block["whole"]
        field_name = {"text": "text", "thinking": "thinking", "tool_use": "input"}[block["type"]]
        blocks.append({**block, field_name: _arguments(whole) if field_name == "input" else whole})
    return blocks


class OllamaChat(Api):
    path = "/api/chat"
    family = "ollama"

    def fields(
        self, turns: Sequence[Turn], tools: Sequence[Tool], max_tokens: int, stop: list[str]
    ) -> dict[str, Any]:
        fields = Chat().fields(turns, tools, max_tokens, stop)
        for message in fields["messages"]:
            if "reasoning_content" in message:
                message["thinking"] = message.pop("reasoning_content")
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        options = {"num_predict": fields.pop("max_tokens"), "stop": fields.pop("stop")}
        return {**fields, "options": options}

    def whole(self, body: bytes) -> Answer:
        return self._answer(ollama_lines.whole(self.path, body))

    def streamed(self, body: bytes) -> Answer:
        return self._answer(ollama_lines.streamed(self.path, body))

    def failed(self, body: bytes) -> tuple[str, str]:
        assert body.endswith(b"\n")
        *lines, last = [json.loads(line) for line in body.splitlines()]
        assert not any(line["done"] for line in lines)
        return "".join(line["message"]["content"] for line in lines), message_of_error("ollama", last)

    def _answer(self, found: ollama_lines.Answer) -> Answer:
        calls = [(one["function"]["name"], one["function"]["arguments"]) for one in found.calls]
        reason = found.last["done_reason"]
        stop = "calls" if calls and reason == "stop" else reason
        tokens = found.last["prompt_eval_count"], found.last["eval_count"]
        return Answer(found.text, found.thinking, calls, stop, *tokens)


APIS: tuple[Api, ...] = (Chat(), Responses(), Messages(), OllamaChat())


def formatted(path: str, schema: Any) -> dict[str, Any]:
    """The fields that ask for an answer of this schema."""
    if path == "/v1/chat/completions":
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
    if path == "/v1/completions":
        return {"guided_json": schema}
    if path.startswith("/api/"):
        return {"format": schema}
    form = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    return {"text": form} if path == "/v1/responses" else {"output_config": form}
