"""Sends mutated requests, by seed, to the application: `python fuzz_requests.py --count 1000000`. The engine is real,
on noop.

Valid requests get wrong types, ranges, nesting, text, numbers and bytes. Every response must be an answer or an error
in the format of the API, never a 5xx. In the end nothing may be held.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from anthropic_types import EventStream
from in_process import InProcess, Reply, in_process

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
_CALL = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}
_RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "x"}]}
_TURNS = [
    *CHAT["messages"],
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "a", "signature": "b"}, _CALL]},
    {"role": "user", "content": [_RESULT, {"type": "text", "text": "y", "cache_control": {}}]},
    {"role": "system", "content": "z"},
]
_ANTHROPIC_TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
OLLAMA: dict[str, Any] = {"options": {"num_predict": 3, "top_k": 4, "stop": ["a"], "seed": 3, "num_ctx": 60}}
RESPONSE: dict[str, Any] = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "x"}]},
    ],
    "tools": [
        {"type": "function", "name": "f", "parameters": {"type": "object"}},
        {"type": "custom", "name": "g", "format": {"type": "text"}},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "h"}]},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "include": ["reasoning.encrypted_content"],
    "max_output_tokens": 3,
}
VALID: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}, "n": 2}),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "stop": ["a", "b"], "seed": 3}),
    (
        "/v1/chat/completions",
        {**CHAT, "tools": [TOOL], "tool_choice": "none", "temperature": 0.5, "top_p": 0.9},
    ),
    (
        "/v1/chat/completions",
        {**CHAT, "logit_bias": {"5": -1}, "priority": "high", "response_format": {"type": "text"}},
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "a"}]},
                *CHAT["messages"],
            ],
            "max_completion_tokens": 3,
            "reasoning_effort": "low",
            "prediction": {"type": "content", "content": [{"type": "text", "text": "a"}]},
            "prompt_cache_key": "k",
            "verbosity": "low",
            "modalities": ["text"],
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                *CHAT["messages"],
                {
                    "role": "assistant",
                    "content": None,
                    "refusal": None,
                    "tool_calls": [
                        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": "a"},
            ],
            "max_tokens": 3,
            "tools": [TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "f"}}],
                },
            },
        },
    ),
    ("/v1/completions", {"prompt": "Hello", "max_tokens": 3}),
    ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 3, "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "n": 2, "stream": True, "stop": "x"}),
    (
        "/v1/completions",
        {"prompt": "x", "max_tokens": 2, "deadline": 5, "cache_salt": "s", "session_id": "t"},
    ),
    ("/v1/messages", {**CHAT, "stop_sequences": ["a"], "thinking": {"type": "enabled"}, "stream": True}),
    ("/v1/messages", {**CHAT, "system": [{"type": "text", "text": "a"}], "output_config": {"effort": "low"}}),
    (
        "/v1/messages",
        {**CHAT, "messages": _TURNS, "tools": [_ANTHROPIC_TOOL], "tool_choice": {"type": "none"}},
    ),
    ("/v1/messages/count_tokens", {"messages": _TURNS, "metadata": {"user_id": "u"}}),
    ("/api/chat", {**OLLAMA, "messages": CHAT["messages"]}),
    ("/api/chat", {**OLLAMA, "messages": CHAT["messages"], "stream": False, "tools": [TOOL], "think": False}),
    ("/api/chat", {"messages": [], "keep_alive": 0}),
    ("/api/generate", {**OLLAMA, "prompt": "Hello", "system": "x", "context": [1, 2, 3]}),
    ("/api/generate", {**OLLAMA, "prompt": "Hello", "raw": True, "stream": False, "logprobs": True}),
    ("/api/show", {"model": "test-model"}),
    ("/api/pull", {"model": "test-model"}),
    ("/v1/responses", {"input": "Hello", "max_output_tokens": 3}),
    ("/v1/responses", {**RESPONSE, "stream": True, "top_logprobs": 2, "reasoning": {"effort": "low"}}),
    ("/v1/responses", {**RESPONSE, "truncation": "auto", "metadata": {"a": "b"}, "store": False}),
    ("/v1/responses/input_tokens", {"input": "Hello", "instructions": "x", "text": {"verbosity": "low"}}),
    ("/tokenize", {"prompt": "Hello"}),
    ("/tokenize", {"messages": CHAT["messages"]}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
)
FIELDS = tuple({name for _, body in VALID for name in body} | {
    *("model", "min_tokens", "top_k", "min_p", "typical_p", "repetition_penalty", "frequency_penalty"),
    *("xtc_probability", "xtc_threshold"),
    *("presence_penalty", "stop_token_ids", "ignore_eos", "ttft_target", "metadata", "suffix", "best_of"),
    *("documents", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "user"),
    *("num_predict", "num_ctx", "images", "keep_alive", "template", "suffix", "format", "top_logprobs"),
    *("max_completion_tokens", "parallel_tool_calls", "guided_json", "grammar", "json_schema", "chat_template"),
})  # fmt: skip
NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 0.5, 1e308, -0.0, 2**31, 2**63, -(2**63) - 1, 10**30, 1e-320),
    *(
        "",
        "a",
        "0",
        "null",
        "\x00",
        "\u202e",
        "\ud7ff",
        "🧵" * 9,
        "<|im_end|>",
        "{{ 7 * 7 }}",
        "../../x",
        "a" * 5000,
    ),
    *(
        [],
        [[]],
        [None],
        [0] * 70,
        [{}],
        {},
        {"a": {}},
        {"type": "x"},
        {"": ""},
        {"type": ["text"]},
        [["a"]],
        [1, "a"],
    ),
    *({"role": "user"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}, {"content": None}),
    *(
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "http://127.0.0.1:1/"}}},
        "required",
    ),
)
LEGAL: dict[str, tuple[Any, ...]] = {
    "n": (1, 2, 5),
    "max_tokens": (1, 7, 60, 2**31 - 1, None),
    "min_tokens": (0, 2),
    "temperature": (0, 0.01, 1, 100),
    "top_p": (1e-9, 1),
    "top_k": (-1, 0, 1, 10**9),
    "seed": (0, -(2**63), 2**63 - 1),
    "stop": ("", ["\n", "🧵"], "e", []),
    "stop_token_ids": ([], [0, 5], [49151]),
    "logit_bias": ({}, {"0": 100}, {"49151": -100.0}),
    "priority": (0, 3, "low", "CRITICAL"),
    "deadline": (0, 1e-9, 1e9),
    "stream": (True, False),
    "ignore_eos": (True, False),
    "echo": (True, False),
    "prompt": ("", "x", [0], ["", "y"], [[1], [2]], ["\u0000"], "word " * 100),
    "messages": (
        [{"role": "system", "content": ""}],
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": "a" * 2000}],
    ),
    "continue_final_message": (True,),
    "cache_salt": ("", "\ud7ff"),
}
"""Unusual values that are mostly valid, so that the code after the checks is tested too."""
RAW = (
    b"NaN",
    b"Infinity",
    b"1e400",
    b"-",
    b'"\\ud800"',
    b'"\xff"',
    b"01",
    b"1" + b"0" * 400,
    b'"\\u0000"',
    b"\xef\xbb\xbf",
)


def mutated(chance: random.Random) -> tuple[str, bytes]:
    path, valid = chance.choice(VALID)
    body = json.loads(json.dumps(valid))
    if chance.random() < 0.4:
        names = chance.sample(sorted(LEGAL), chance.randint(1, 4))
        return path, json.dumps({**body, **{name: chance.choice(LEGAL[name]) for name in names}}).encode()
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        body = _changed(chance, body, 0)
    if chance.random() < 0.5 and isinstance(body, dict):
        body = {**body, chance.choice(FIELDS): chance.choice(NASTY)}
    if chance.random() < 0.03 and isinstance(body, dict) and "messages" in valid:
        # Long enough to be tokenised in a worker process.
        long = {"role": "user", "content": "word " * 2000, "extra": chance.choice((*NASTY, _nested(900)))}
        body = {**body, "messages": [*CHAT["messages"], long]}
    content = json.dumps(body).encode()
    kind = chance.random()
    if kind < 0.1:
        return path, _broken_bytes(chance, content)
    if kind < 0.15 and content.startswith(b"{") and len(content) > 2:
        name = json.dumps(chance.choice(FIELDS)).encode()
        return path, b"{" + name + b": " + chance.choice(RAW) + b", " + content[1:]
    if kind < 0.17:
        depth = chance.choice((10, 1000, 20_000))
        return path, content[:-1] + b', "metadata": ' + b'{"a":' * depth + b"1" + b"}" * (depth + 1)
    return path, content


def _changed(chance: random.Random, value: Any, depth: int) -> Any:
    """`value` with a change at one position."""
    if depth < 5 and isinstance(value, dict) and value and chance.random() < 0.8:
        name = chance.choice(list(value))
        kind = chance.random()
        if kind < 0.1:
            return {other: one for other, one in value.items() if other != name}
        if kind < 0.2:
            return {**value, chance.choice(FIELDS): value[name]}
        return {**value, name: _changed(chance, value[name], depth + 1)}
    if depth < 5 and isinstance(value, list) and value and chance.random() < 0.7:
        at = chance.randrange(len(value))
        return [*value[:at], _changed(chance, value[at], depth + 1), *value[at + chance.randrange(2) :]]
    if isinstance(value, int) and not isinstance(value, bool) and chance.random() < 0.5:
        return value * chance.choice((-1, 10, 1000, 2**40)) + chance.choice((-1, 0, 1))
    if isinstance(value, str) and chance.random() < 0.3:
        return value + chr(chance.choice((0, 7, 0x300, 0x200D, 0xFFFF, 0x10FFFF)))
    return chance.choice(NASTY)


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def _broken_bytes(chance: random.Random, content: bytes) -> bytes:
    at = chance.randrange(len(content))
    return chance.choice(
        (
            content[:at],
            content[:at] + bytes([chance.randrange(256)]) + content[at + 1 :],
            content[:at] + chance.choice(RAW) + content[at:],
            content + content,
            content.replace(b":", b":\x00", 1),
        )
    )


def problem_of(reply: Reply, path: str) -> str | None:
    """The problem of a response; None if there is none."""
    if reply.status == 0:
        return "no response"
    if reply.status >= 500 and reply.status != 504:
        return f"status {reply.status}: {reply.body[:300]!r}"
    if b"x-request-id" not in reply.headers:
        return "no x-request-id"
    if reply.headers.get(b"content-type", b"").startswith(b"text/event-stream"):
        return _problem_of_stream(reply.body)
    if reply.headers.get(b"content-type", b"").startswith(b"application/x-ndjson"):
        return _problem_of_lines(reply.body)
    content = json.loads(reply.body)
    if reply.status == 200:
        return "an error with status 200" if content.get("error") else None
    if path.startswith("/api/"):
        return None if _is_ollama_error(content) else f"not an error of Ollama's API: {content!r:.300}"
    return _problem_of_error(content)


def _is_ollama_error(content: Any) -> bool:
    return set(content) == {"error"} and isinstance(content["error"], str) and content["error"] != ""


def _problem_of_lines(body: bytes) -> str | None:
    *lines, last = [json.loads(line) for line in body.splitlines()]
    is_over = last.get("done") or last.get("status") == "success"
    if any("error" in line or line.get("done") for line in lines) or not (is_over or _is_ollama_error(last)):
        return f"not a stream of lines: {body[:200]!r}"
    return None


def _problem_of_stream(body: bytes) -> str | None:
    if body.startswith(b"event: "):
        if body.startswith(b"event: response."):
            return f"in a stream: {body[-500:]!r}" if b"internal server error" in body else None
        try:
            failed = EventStream(body).error
        except (AssertionError, ValueError) as problem:
            return f"{problem!r} in {body[:400]!r}"
        return f"in a stream: {failed}" if failed and failed["type"] == "api_error" else None
    *events, last, end = body.split(b"\n\n")
    if end or not all(event.startswith(b"data: {") for event in events):
        return f"not an event stream: {body[:200]!r}"
    if last == b"data: [DONE]":
        return None
    error = json.loads(last.removeprefix(b"data: "))
    return _problem_of_error(error) or (
        f"in a stream: {error}" if error["error"]["code"] == "failed" else None
    )


def _problem_of_error(content: Any) -> str | None:
    if set(content) == {"type", "error", "request_id"} and set(content["error"]) == {"type", "message"}:
        return None if content["error"]["message"] and content["request_id"] else "an error without a message"
    if set(content) != {"error"} or set(content["error"]) != {"message", "type", "param", "code"}:
        return f"not an error of the API: {content!r:.300}"
    return None if content["error"]["message"] else "an error without a message"


async def fuzz(server: InProcess, seed: int, count: int, at_once: int = 16) -> tuple[Counter[int], list[str]]:
    """The number of responses by status, and the problems."""
    statuses: Counter[int] = Counter()
    problems: list[str] = []
    numbers = iter(range(count))

    async def ask_some() -> None:
        for number in numbers:
            chance = random.Random(f"{seed}:{number}")
            path, body = mutated(chance)
            leaves_after = chance.choice((0.0, 0.001, 0.01)) if chance.random() < 0.03 else None
            try:
                reply = await asyncio.wait_for(server.send(path, body, leaves_after), 60)
                problem = None if leaves_after is not None else problem_of(reply, path)
                statuses[reply.status] += 1
            except Exception as error:
                problem = repr(error)
            if problem:
                problems.append(f"seed {seed}, number {number}: {path} {body[:400]!r}: {problem}")

    await asyncio.gather(*(ask_some() for _ in range(at_once)))
    return statuses, problems


HELD = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "http_requests_open")


async def leftovers(server: InProcess) -> dict[str, float]:
    """The gauges that are not zero after all requests have ended. It must be empty."""
    held: dict[str, float] = {}
    for _ in range(1200):
        page = (await server.send("/metrics", method="GET")).body.decode()
        held = {}
        for line in page.splitlines():
            name, _, value = line.rpartition(" ")
            if name.partition("{")[0].removeprefix("weft:") in HELD and float(value):
                held[name] = float(value)
        if server.server.engine.num_unfinished:
            held["answers"] = server.server.engine.num_unfinished
        if not held:
            break
        await asyncio.sleep(0.05)
    return held


async def _main(arguments: argparse.Namespace) -> int:
    from weft.loading.pull import pull

    async with in_process(Path(pull("default"))) as server:
        began = time.monotonic()
        statuses, problems = await fuzz(server, arguments.seed, arguments.count)
        seconds = time.monotonic() - began
        held = await leftovers(server)
    print(
        f"{arguments.count} requests in {seconds:.1f} s, {arguments.count / seconds:.0f}/s; {dict(statuses)}"
    )
    print(f"{len(problems)} problems; still held: {held or 'nothing'}")
    print("\n".join(problems[:20]))
    return 1 if problems or held else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    sys.exit(asyncio.run(_main(parser.parse_args())))
