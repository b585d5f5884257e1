"""Checks answers and streams of Ollama's API: with the types of the official package, and with a state machine."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec
import pytest

from weft.server.api.ollama_chat import OllamaChatAnswer
from weft.server.api.ollama_generate import OllamaGenerateAnswer

ollama = pytest.importorskip("ollama", reason="pip install -c constraints.txt -e '.[dev]' brings it")

TYPES: Any = {
    "/api/chat": (ollama.ChatResponse, OllamaChatAnswer),
    "/api/generate": (ollama.GenerateResponse, OllamaGenerateAnswer),
    "/api/tags": (ollama.ListResponse, None),
    "/api/ps": (ollama.ProcessResponse, None),
    "/api/show": (ollama.ShowResponse, None),
    "/api/pull": (ollama.ProgressResponse, None),
}
TIMES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def validated(path: str, content: bytes | str) -> dict[str, Any]:
    """The answer or line, after it was validated in strict mode."""
    official, documented = TYPES[path]
    official.model_validate_json(content, strict=True)
    parsed: dict[str, Any] = json.loads(content)
    if documented is not None:
        msgspec.convert(parsed, documented)  # it refuses unknown fields
    return parsed


@dataclass
class Answer:
    """What a client has after an answer or a stream."""

    text: str = ""
    thinking: str = ""
    calls: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)

    def add(self, path: str, line: dict[str, Any]) -> None:
        content = line["message"] if path == "/api/chat" else line
        self.text += content["content" if path == "/api/chat" else "response"]
        self.thinking += content.get("thinking", "")
        self.calls += content.get("tool_calls", ())
        self.logprobs += line.get("logprobs", ())


def whole(path: str, content: bytes) -> Answer:
    line = validated(path, content)
    check_last(line)
    answer = Answer(last=line)
    answer.add(path, line)
    return answer


def streamed(path: str, content: bytes) -> Answer:
    """Lines that are not done, then one that is. Thoughts come before text, and text is not after the end."""
    assert content.endswith(b"\n")
    lines = [validated(path, line) for line in content.splitlines()]
    answer = Answer(last=lines[-1])
    times = [line["created_at"] for line in lines]
    assert times == sorted(times)
    for line in lines:
        assert line["model"] == lines[0]["model"]
        assert line["done"] is (line is lines[-1])
        if line.get("thinking") or line.get("message", {}).get("thinking"):
            assert not answer.text and not answer.calls
        answer.add(path, line)
    for line in lines[:-1]:
        assert not {"done_reason", "context", "eval_count", *TIMES} & line.keys()
    check_last(lines[-1])
    if path == "/api/chat":
        assert lines[-1]["message"] == {"role": "assistant", "content": ""}
    else:
        assert lines[-1]["response"] == ""
    return answer


def check_last(line: dict[str, Any]) -> None:
    assert line["done"] is True and line["done_reason"] in ("stop", "length")
    assert datetime.fromisoformat(line["created_at"]).tzinfo is not None
    assert all(isinstance(line[name], int) for name in TIMES)
    assert line["total_duration"] >= line["prompt_eval_duration"] + line["eval_duration"] - 2
    assert line["prompt_eval_count"] > 0 and line["eval_count"] > 0
