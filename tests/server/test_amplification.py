"""The cost of one small body: a list of a request is processed once, not for each of its prompts and answers.

The tests measure CPU time of the event loop and of the engine process, relative to the same request without the list.
The speed and load of the machine do not matter.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from in_process import InProcess, in_process
from server_process import Server

from scripted_engine import ScriptedEngine, with_scripted_engine
from weft.engine.ipc.remote_answer import RemoteAnswer
from weft.request import InferenceRequest, SamplingParams
from weft.server.admission.keys import ApiKey
from weft.server.api.batches import BatchRequest
from weft.server.api.formats import FORMATS, OTHER_ROUTES
from weft.server.api.schema import MAX_ENTRIES, DetokenizeRequest, TokenizeRequest, read
from weft.server.errors import ApiError

_SECONDS_PER_BYTE = 5e-6
"""Allowed cost per byte of the body: ten times what parsing, checking and sending it takes."""
_TICKS = os.sysconf("SC_CLK_TCK")
LISTS: dict[str, Any] = {
    "logit_bias": {str(token): 1.5 for token in range(40_000, 40_000 + 1024)},
    "stop_token_ids": list(range(40_000, 40_000 + 1024)),
    "stop": ["é" * 1000 + str(number) for number in range(16)],
    "metadata": {str(number): "x" * 100 for number in range(64)},
    "session_id": "s" * 256,
    "cache_salt": "s" * 256,
    "guided_choice": [f"choice {number}" for number in range(500)],
}
SHAPES: dict[str, dict[str, Any]] = {
    "8 prompts, 128 answers each": {"prompt": [[5, 6, 7]] * 8, "n": 128},
    "1,024 prompts": {"prompt": [[5, 6, 7]] * 1024},
}


async def cost(
    server: InProcess,
    body: dict[str, Any],
    key: str | None = None,
    path: str = "/v1/completions",
    statuses: tuple[int, ...] = (200,),
    of_process: bool = False,
) -> tuple[float, float]:
    """CPU seconds of the event loop (`of_process`: of all threads of the server) and of the engine processes for one
    answered request."""
    content = json.dumps({"max_tokens": 1, **body} if path == "/v1/completions" else body).encode()
    used = _engine_seconds(server)
    clock = time.process_time if of_process else time.thread_time
    began = clock()
    reply = await server.send(path, content, key=key)
    seconds = clock() - began
    assert reply.status in statuses, reply.body
    return seconds, _engine_seconds(server) - used


def _engine_seconds(server: InProcess) -> float:
    ticks = 0
    for _, _, engine in server.server.models.engines():
        assert engine._process is not None
        fields = Path(f"/proc/{engine._process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS


def with_server(model_path: Path, work: Callable[[InProcess], Any], **settings: Any) -> Any:
    async def run() -> Any:
        async with in_process(model_path, **settings) as server:
            await cost(server, {"prompt": [5]})
            return await work(server)

    return asyncio.run(run())


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_cost_of_a_list_does_not_multiply_with_prompts_and_answers(
    default_model_path: Path, shape: dict[str, Any]
) -> None:
    bodies = {name: {**shape, name: value} for name, value in LISTS.items()}
    bodies["all but a grammar"] = {**shape, **LISTS}
    del bodies["all but a grammar"]["guided_choice"]

    async def work(server: InProcess) -> None:
        # Starts the grammar process.
        await cost(server, {"prompt": [5], "guided_choice": LISTS["guided_choice"]})
        plain = [await cost(server, shape) for _ in range(3)]
        for name, body in bodies.items():
            listed = [await cost(server, body) for _ in range(2)]
            num_bytes = len(json.dumps(body))
            for index, process_name in enumerate(("the event loop", "the engine")):
                without, found = max(one[index] for one in plain), min(one[index] for one in listed)
                assert found < 2 * without + num_bytes * _SECONDS_PER_BYTE, (
                    f"{process_name} needs {found:.3f} s for {num_bytes} bytes with {name}, and {without:.3f} s without"
                )

    with_server(default_model_path, work)


@pytest.mark.parametrize("has_keys", [False, True])
def test_submitting_a_thousand_answers_does_not_block_the_event_loop(
    default_model_path: Path, has_keys: bool
) -> None:
    """The event loop runs other tasks between any two messages to the engine."""
    keys = (ApiKey("a", sha256(b"a").hexdigest()), ApiKey("b", sha256(b"b").hexdigest())) if has_keys else ()

    async def run() -> None:
        async with in_process(default_model_path, api_keys=keys) as server:
            engine, iterations, sent = server.server.engine, 0, []
            submit = engine.submit

            async def recording_submit(
                request: InferenceRequest, *arguments: Any, **options: Any
            ) -> list[RemoteAnswer]:
                answers = await submit(request, *arguments, **options)
                sent.append((iterations, len(answers)))
                return answers

            async def count_iterations() -> None:
                nonlocal iterations
                while True:
                    iterations += 1
                    await asyncio.sleep(0)

            engine.submit = recording_submit  # type: ignore[method-assign]
            counting = asyncio.create_task(count_iterations())
            await cost(server, SHAPES["8 prompts, 128 answers each"], key="a" if has_keys else None)
            counting.cancel()
            assert sum(count for _, count in sent) == 1024 and max(count for _, count in sent) <= 128
            assert len({iteration for iteration, _ in sent}) == len(sent) >= 8

    asyncio.run(run())


def functions(**more: Any) -> list[dict[str, Any]]:
    return [{"name": f"f{index}", "description": "d" * 200, **more} for index in range(128)]


SCHEMA = {"type": "object"}
TOOLS = [{"type": "function", "function": one} for one in functions(parameters=SCHEMA)]
MESSAGES = [{"role": ("user", "assistant")[index % 2], "content": "x"} for index in range(4001)]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1024}]
STOPS = ["é" * 1000 + str(number) for number in range(16)]
USES = [{"type": "tool_use", "id": f"t{n}", "name": "f", "input": {}} for n in range(1000)]
RESULTS = [{"type": "tool_result", "tool_use_id": f"t{n}"} for n in reversed(range(1000))]
CALLS = [{"type": "function_call", "call_id": f"t{n}", "name": "f", "arguments": "{}"} for n in range(2000)]
OUTPUTS = [{"type": "function_call_output", "call_id": f"t{n}", "output": ""} for n in reversed(range(2000))]
NAMESPACES = [{"type": "namespace", "name": f"n{n}", "tools": functions(type="function")} for n in range(8)]
PREDICTION = {"type": "content", "content": [{"type": "text", "text": "the cat sat on a mat. "}] * 400}
ALLOWED = [{"type": "function", "name": "f0"}] * 1024
DOCUMENTS = [{"title": f"t{n}", "text": "x" * 100} for n in range(1024)]
TEMPLATE_VALUES = {f"k{n}": ["x" * 10] * 200 for n in range(64)}
OLLAMA_CALLS = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 1024}
OLLAMA_RESULTS = [{"role": "tool", "tool_name": "g", "content": ""}] * 4000
OLLAMA_STOPS = {"options": {"num_predict": 1, "stop": STOPS}}
EVERY_API: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "/v1/chat/completions": (
        {"messages": MESSAGES[:1], "max_tokens": 1},
        {
            "messages": {"messages": MESSAGES},
            "parts": {"messages": PARTS},
            "tools": {"tools": TOOLS},
            "a prediction for 128 answers": {"prediction": PREDICTION, "n": 128},
            "documents": {"documents": DOCUMENTS},
            "chat_template_kwargs": {"chat_template_kwargs": TEMPLATE_VALUES},
        },
    ),
    "/v1/messages": (
        {"messages": MESSAGES[:1], "max_tokens": 1},
        {
            "messages": {"messages": MESSAGES},
            "parts": {"messages": PARTS, "system": PARTS[0]["content"]},
            "tools": {"tools": functions(input_schema=SCHEMA)},
            "stop_sequences": {"stop_sequences": STOPS},
            "results": {
                "messages": [
                    *MESSAGES[:1],
                    {"role": "assistant", "content": USES},
                    {"role": "user", "content": RESULTS},
                ]
            },
        },
    ),
    "/v1/responses": (
        {"input": "x", "max_output_tokens": 1, "store": False},
        {
            "items": {"input": MESSAGES},
            "parts": {"input": PARTS},
            "tools": {"tools": functions(type="function", parameters=SCHEMA)},
            "namespaces": {"tools": NAMESPACES},
            "metadata": {"metadata": {str(number): "x" * 100 for number in range(64)}},
            "allowed_tools": {
                "tools": functions(type="function", parameters=SCHEMA),
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": ALLOWED},
            },
            "include": {"include": ["reasoning.encrypted_content"] * 1000},
            "references": {"input": [{"type": "item_reference", "id": f"msg_{n}"} for n in range(4000)]},
            "results": {"input": [*CALLS, *OUTPUTS]},
        },
    ),
    "/api/chat": (
        {"messages": MESSAGES[:1], "options": {"num_predict": 1}, "stream": False},
        {
            "messages": {"messages": MESSAGES},
            "tools": {"tools": TOOLS},
            "stop": OLLAMA_STOPS,
            "results": {"messages": [*MESSAGES[:1], *[OLLAMA_CALLS] * 3, *OLLAMA_RESULTS]},
        },
    ),
    "/api/generate": (
        {"prompt": "x", "options": {"num_predict": 1}, "stream": False},
        {"context": {"context": [5] * 10_000}, "stop": OLLAMA_STOPS},
    ),
}


@pytest.mark.parametrize("path", EVERY_API)
def test_the_cost_of_each_list_of_an_api_is_bounded_by_its_bytes(default_model_path: Path, path: str) -> None:
    """Also for requests that are refused, for example because the prompt is too long. Large bodies are read in threads,
    which hold the interpreter, so these count too."""
    base, lists = EVERY_API[path]
    with_server(default_model_path, lambda server: check_costs(server, path, base, lists), max_context=4096)


OF_MANY_ANSWERS: dict[str, dict[str, Any]] = {
    "tools": {"tools": TOOLS},
    "allowed_tools": {
        "tools": TOOLS,
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "auto",
                "tools": [{"type": "function", "function": {"name": "f0"}}] * 1024,
            },
        },
    },
    "logit_bias": {"logit_bias": LISTS["logit_bias"]},
    "stop_token_ids": {"stop_token_ids": LISTS["stop_token_ids"]},
    "tools, logit_bias and stop_token_ids": {
        "tools": TOOLS,
        "logit_bias": LISTS["logit_bias"],
        "stop_token_ids": LISTS["stop_token_ids"],
    },
    "documents": {"documents": DOCUMENTS},
    "chat_template_kwargs": {"chat_template_kwargs": TEMPLATE_VALUES},
}


def test_the_cost_of_a_list_of_a_chat_does_not_multiply_with_its_answers(default_model_path: Path) -> None:
    path = "/v1/chat/completions"
    base = {**EVERY_API[path][0], "n": 128}
    with_server(
        default_model_path,
        lambda server: check_costs(server, path, base, OF_MANY_ANSWERS, statuses=(200,)),
        max_context=32768,
    )


def test_a_request_that_joins_a_long_answer_costs_no_more_than_one_that_joins_a_short_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_joins, body = 200, 100

    async def join(engine: ScriptedEngine) -> None:
        for number, count in enumerate((10, 100_000)):
            params = SamplingParams(max_tokens=count + 1, temperature=0)
            request = InferenceRequest((1, number), params)
            await engine.client.submit(request, is_unbounded=True)
            for _ in range(count):
                engine.step()
            await engine.client.submit(request, is_unbounded=True)
            began = time.thread_time()
            for _ in range(num_joins):
                [late] = await engine.client.submit(request)
                assert late.num_tokens == count
            costs.append(time.thread_time() - began)
            engine.step()

    costs: list[float] = []
    with_scripted_engine(monkeypatch, join)
    short, long = costs
    assert long < 2 * short + num_joins * body * _SECONDS_PER_BYTE, costs


async def check_costs(
    server: InProcess,
    path: str,
    base: dict[str, Any],
    lists: dict[str, dict[str, Any]],
    statuses: tuple[int, ...] = (200, 400, 404),
) -> None:
    plain = [await cost(server, base, path=path, of_process=True) for _ in range(3)]
    for name, fields in lists.items():
        body = {**base, **fields}
        listed = [await cost(server, body, path=path, statuses=statuses, of_process=True) for _ in range(2)]
        num_bytes = len(json.dumps(body))
        for index, process_name in enumerate(("the server", "the engine")):
            without, found = max(one[index] for one in plain), min(one[index] for one in listed)
            assert found < 2 * without + num_bytes * _SECONDS_PER_BYTE, (
                f"{process_name} needs {found:.3f} s for {num_bytes} bytes with {name}, and {without:.3f} s without"
            )


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("stop_token_ids", [1] * 1025, "stop_token_ids has 1025 entries; allowed: at most 1024"),
        ("stop_token_ids", [1] * 120_000, "stop_token_ids has 120000 entries; allowed: at most 1024"),
        (
            "logit_bias",
            {str(n): 1 for n in range(1025)},
            "logit_bias has 1025 entries; allowed: at most 1024",
        ),
        ("stop", ["a"] * 17, "stop has 17 entries; allowed: at most 16"),
        ("metadata", {str(n): "" for n in range(65)}, "metadata has 65 entries; allowed: at most 64"),
        ("tools", [{}] * 129, "tools has 129 entries; allowed: at most 128"),
        ("documents", [{}] * 1025, "documents has 1025 entries; allowed: at most 1024"),
        ("messages", [{}] * 8193, "messages has 8193 entries; allowed: at most 8192"),
        (
            "messages",
            [{"role": "user", "content": [{"type": "text", "text": ""}] * 1025}],
            "messages[0].content has 1025 entries; allowed: at most 1024",
        ),
        ("chat_template_kwargs", {str(n): 0 for n in range(65)}, "has 65 entries; allowed: at most 64"),
        (
            "prediction",
            {"type": "content", "content": [{"type": "text", "text": ""}] * 1025},
            "prediction.content has 1025 entries; allowed: at most 1024",
        ),
        (
            "tool_choice",
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{}] * 1025}},
            "tool_choice.allowed_tools.tools has 1025 entries; allowed: at most 1024",
        ),
    ],
)
def test_every_list_has_a_limit_and_the_error_has_both_numbers(
    server: Server, field: str, value: Any, message: str
) -> None:
    refused = server.chat(**{field: value})
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"].startswith(field) and message in error["message"]


LIMITED_OTHERWISE = {"prompt", "context", "tokens", "guided_choice"}
"""Lists with a limit that is no number of entries: the number of answers, the context, the length of a grammar."""
LIMITED_BY_ROUTE = {"text_1", "text_2", "file_ids", "files", "labels", "query"}
"""Lists whose route checks their length: see the bad bodies of test_embeddings.py, test_vector_stores.py and
test_feedback.py."""


def lists_of(kind: Any) -> Iterator[str]:
    """The fields that may have a list, also those of inner objects."""
    for name, each in get_type_hints(kind).items():
        for one in (each, *get_args(each)):
            if one is list or get_origin(one) is list:
                yield name
            elif isinstance(one, type) and issubclass(one, msgspec.Struct):
                yield from lists_of(one)


def test_every_list_field_of_every_api_has_a_limit() -> None:
    kinds = [
        *(one.request_type for one in FORMATS.values()),
        TokenizeRequest,
        DetokenizeRequest,
        BatchRequest,
    ]
    for routes in OTHER_ROUTES:
        kinds += [one.request for one in routes.OPERATIONS.values() if one.request is not None]
    found = {name for kind in kinds for name in lists_of(kind)}
    assert {"messages", "input", "tools", "stop_sequences", "context", "documents"} <= found
    unlimited = {
        name
        for kind in kinds
        for name in lists_of(kind)
        if name not in MAX_ENTRIES and name not in getattr(kind, "max_entries", ())
    }
    assert unlimited == LIMITED_OTHERWISE | LIMITED_BY_ROUTE


def test_the_allowed_tools_of_a_response_have_a_limit(server: Server) -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [*ALLOWED, ALLOWED[0]]}
    refused = server.client.post("/v1/responses", json={"input": "x", "tool_choice": choice})
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "tool_choice"
    assert error["message"] == "tool_choice.tools has 1025 entries; allowed: at most 1024"


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [{}] * 1025}]},
            "messages[0].tool_calls has 1025 entries; allowed: at most 1024",
        ),
        (
            "/api/chat",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 1025}]},
            "messages[0].tool_calls has 1025 entries; allowed: at most 1024",
        ),
        (
            "/v1/messages",
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 1025}],
                "max_tokens": 1,
            },
            "messages[0].content has 1025 entries; allowed: at most 1024",
        ),
        *(
            (
                "/v1/responses",
                {"input": ["x", {"type": "x", name: [{}] * 1025}]},
                f"input[1].{name} has 1025 entries; allowed: at most 1024",
            )
            for name in ("content", "output", "summary")
        ),
        (
            "/v1/responses",
            {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [{}] * 129}]},
            "tools[0].tools has 129 entries; allowed: at most 128",
        ),
    ],
)
def test_lists_inside_messages_items_and_tools_have_limits(
    path: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ApiError) as refused:
        read(FORMATS[path].request_type, json.dumps(fields).encode())
    assert refused.value.status == 400 and refused.value.message == message
