"""Ollama's API: chats and prompts, their options, load requests, and errors in every stage."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from in_process import InProcess, Reply, in_process
from ollama_lines import Answer, streamed, validated, whole
from server_process import MODEL, Server

from weft.request import InferenceRequest
from weft.server.admission.keys import ApiKey, plain_keys
from weft.server.api.answer_format import AnswerFormat, ServedModel
from weft.server.api.ollama_chat import (
    GivenCall,
    GivenFunction,
    GivenMessage,
    OllamaChatFormat,
    OllamaChatRequest,
    items_of,
)
from weft.server.api.ollama_generate import OllamaGenerateFormat, OllamaGenerateRequest
from weft.server.api.schema import read
from weft.server.errors import ApiError, renamed_fields
from weft.server.stream.events import EventStream
from weft.text.conversation import Conversation, Message, Thought, ToolCall, ToolResult
from weft.text.gguf_tokenizer import tokenizer_of
from weft.text.infill import infill_prompt
from weft.text.tokenizer import Tokenizer

CHAT, GENERATE = "/api/chat", "/api/generate"
HELLO = [{"role": "user", "content": "Hello"}]
SHORT = {"options": {"num_predict": 6, "seed": 3, "temperature": 1}}
FORMATS: Any = {
    CHAT: (OllamaChatFormat(), OllamaChatRequest),
    GENERATE: (OllamaGenerateFormat(), OllamaGenerateRequest),
}
THINKING_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>{% endif %}"
    "{{ reasoning_effort | default('') }}"
)


def served(path: Path, *sent: tuple[str, Any], work: Any = None, **options: Any) -> Any:
    """The replies to the bodies, or the result of `work`."""

    async def run() -> Any:
        async with in_process(path, **options) as server:
            result = await work(server) if work else [await send(server, *one) for one in sent]
            assert await server.server.wait_until_idle(60)
            return result

    return asyncio.run(run())


async def send(server: InProcess, path: str, body: Any, **options: Any) -> Reply:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await server.send(path, content, **options)


def posted(server: Server, *sent: tuple[str, Any]) -> list[Reply]:
    """The replies of the shared server."""
    replies = []
    for path, body in sent:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = server.client.post(path, content=content)
        replies.append(Reply(response.status_code, dict(response.headers.raw), response.content))
    return replies


def error_of(reply: Reply, status: int, *words: str) -> str:
    assert reply.status == status, reply.body
    assert reply.headers[b"content-type"] == b"application/json"
    content = json.loads(reply.body)
    assert set(content) == {"error"} and isinstance(content["error"], str)
    for word in words:
        assert word in content["error"]
    text: str = content["error"]
    return text


def parsed(path: str, tokenizer: Tokenizer, body: dict[str, Any], **model: Any) -> Any:
    """The content of a body, independent of the format. Errors have the client's field names."""
    answer_format: AnswerFormat[Any] = FORMATS[path][0]
    api_request, _ = read(FORMATS[path][1], json.dumps(body).encode())
    with renamed_fields(answer_format.field_names(api_request)):
        return answer_format.parse(api_request, ServedModel("m", tokenizer, {}, 8, **model))


# ---------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {"messages": HELLO}), (GENERATE, {"prompt": "Hello"}), (GENERATE, {"prompt": "Hello", "raw": True})]
)  # fmt: skip
def test_a_stream_is_the_default_and_has_the_text_of_the_whole_answer(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    body = {**body, **SHORT, "model": MODEL}
    whole_reply, stream = posted(server, (path, {**body, "stream": False}), (path, body))
    assert whole_reply.headers[b"content-type"] == b"application/json"
    assert stream.headers[b"content-type"] == b"application/x-ndjson"
    answer, again = whole(path, whole_reply.body), streamed(path, stream.body)
    assert answer.text == again.text != ""
    for one in (answer, again):
        assert (one.last["done_reason"], one.last["eval_count"], one.last["model"]) == ("length", 6, MODEL)
    assert answer.last.get("context") == again.last.get("context")
    assert ("context" in answer.last) is (path == GENERATE and "raw" not in body)


def test_each_line_has_the_time_at_which_it_was_written(server: Server) -> None:
    [stream] = posted(server, (CHAT, {"messages": HELLO, **SHORT}))
    times = [json.loads(line)["created_at"] for line in stream.body.splitlines()]
    assert times[0] < times[-1], times


def test_logprobs_are_a_list_whole_and_streamed(server: Server) -> None:
    body = {"messages": HELLO, **SHORT, "logprobs": True, "top_logprobs": 2}
    replies = posted(server, (CHAT, {**body, "stream": False}), (CHAT, body))
    answers = [whole(CHAT, replies[0].body), streamed(CHAT, replies[1].body)]
    assert answers[0].logprobs == answers[1].logprobs
    assert [len(entry["top_logprobs"]) for entry in answers[0].logprobs] == [2] * 6


@pytest.mark.parametrize("headers", [{}, {"content-type": "text/plain"}])
def test_a_request_without_a_content_type_or_with_another_works(
    server: Server, headers: dict[str, str]
) -> None:
    body = {"messages": [{**HELLO[0], "images": []}], **SHORT, "tools": [], "model": f"{MODEL}:latest"}
    response = server.client.post(CHAT, content=json.dumps(body), headers=headers)
    assert response.request.headers.get("content-type") == headers.get("content-type")
    assert streamed(CHAT, response.content).text


def test_the_context_of_an_answer_continues_the_conversation(
    default_model_path: Path, default_tokenizer: Tokenizer
) -> None:
    async def work(server: InProcess) -> list[Answer]:
        first = whole(GENERATE, (await send(server, GENERATE, {**body, "prompt": "One?"})).body)
        more = {**body, "prompt": "Two?", "context": first.last["context"]}
        return [first, whole(GENERATE, (await send(server, GENERATE, more)).body)]

    body = {**SHORT, "stream": False}
    first, second = served(default_model_path, work=work, max_context=512)
    before, after = first.last["context"], second.last["context"]
    assert after[: len(before)] == before
    assert second.last["prompt_eval_count"] == len(after) - 6 > len(before)
    text = default_tokenizer.decode(after, skip_control=False)
    assert "user\nOne?<|im_end|>" in text and "user\nTwo?<|im_end|>" in text and second.text in text


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, {}), (CHAT, {"messages": []}), (GENERATE, {}), (GENERATE, {"prompt": "", "stream": False})],
)
def test_a_request_without_a_prompt_loads_or_unloads_and_generates_nothing(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    values: dict[Any, str] = {
        None: "load",
        "5m": "load",
        -1: "load",
        0: "unload",
        "0": "unload",
        "0s": "unload",
    }
    replies = posted(server, *((path, {**body, "keep_alive": value}) for value in values))
    for reply, reason in zip(replies, values.values(), strict=True):
        line = validated(path, reply.body)
        assert (line["done"], line["done_reason"]) == (True, reason) and "eval_count" not in line
        assert line.get("response", "") == line.get("message", {"content": ""})["content"] == ""
    [missing] = posted(server, (path, {**body, "model": "nowhere"}))
    error_of(missing, 404, "not found", "nowhere")


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_a_json_schema_as_format_is_followed(real_server: Server, path: str) -> None:
    properties = {"city": {"enum": ["Rome", "Oslo"]}}
    schema = {"type": "object", "properties": properties, "required": ["city"]}
    body = {"messages": HELLO, "prompt": "Hello", "stream": False, "options": {"num_predict": 60}}
    bound, free = posted(real_server, *((path, {**body, "format": one}) for one in (schema, "json")))
    assert json.loads(whole(path, bound.body).text)["city"] in ("Rome", "Oslo")
    assert whole(path, free.body).text.lstrip().startswith("{")


def test_think_reaches_the_template_and_needs_a_model_that_thinks(
    default_model_path: Path, default_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(THINKING_TEMPLATE)
    body = {"prompt": "Hi", "stream": False, **SHORT}
    values = (None, True, False, "high")
    sent = [(GENERATE, {**body, "think": value}) for value in values]
    replies = served(default_model_path, *sent, chat_template=str(template))
    prompts = [
        default_tokenizer.decode(whole(GENERATE, reply.body).last["context"], skip_control=False)
        for reply in replies
    ]
    assert ["<think>\n\n</think>" in prompt for prompt in prompts] == [False, False, True, False]
    assert ["assistant\nhigh" in prompt for prompt in prompts] == [False, False, False, True]
    (wrong,) = served(default_model_path, (GENERATE, {**body, "think": "much"}), chat_template=str(template))
    error_of(wrong, 400, "think", "much", "high")
    plain = served(
        default_model_path, *((GENERATE, {**body, "think": value}) for value in (True, "low", False))
    )
    error_of(plain[0], 400, "does not support thinking")
    error_of(plain[1], 400, "does not support thinking")
    assert whole(GENERATE, plain[2].body).text


def test_a_model_without_a_template_continues_prompts(
    default_model_path: Path, default_tokenizer: Tokenizer
) -> None:
    request = parsed(GENERATE, default_tokenizer, {"prompt": "Hi"}, has_chat_template=False)
    assert request.prompt == ["Hi"]
    assert isinstance(parsed(GENERATE, default_tokenizer, {"prompt": "Hi"}).prompt, Conversation)


# ---------------------------------------------------------------------- what requests contain


def test_options_become_sampling_parameters(default_tokenizer: Tokenizer) -> None:
    options = {
        "num_predict": 7.0, "temperature": 0, "top_k": 5.0, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.9,
        "repeat_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4, "seed": 11, "stop": ["a", "b"],
        "num_ctx": 100, "num_keep": 4, "mirostat": 2, "num_gpu": 99, "use_mmap": None, "num_thread": 8,
    }  # fmt: skip
    request = parsed(CHAT, default_tokenizer, {"messages": HELLO, "options": options})
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (7, 0, 5, 0.5)
    assert (params.min_p, params.typical_p, params.repetition_penalty) == (0.1, 0.9, 1.2)
    assert (params.presence_penalty, params.frequency_penalty) == (0.3, 0.4)
    assert (params.seed, params.stop, request.max_context) == (11, ("a", "b"), 100)
    InferenceRequest((1,), params, max_sequence_length=request.max_context)


def test_without_options_the_defaults_are_those_of_ollama(default_tokenizer: Tokenizer) -> None:
    for fields in ({}, {"options": None}, {"options": {"temperature": None, "stop": None, "seed": -1}}):
        params = parsed(CHAT, default_tokenizer, {"messages": HELLO, **fields}).params
        assert (params.temperature, params.top_k, params.top_p) == (0.8, 40, 0.9)
        assert (params.max_tokens, params.seed, params.repetition_penalty) == (None, None, 1)


@pytest.mark.parametrize("limit", [-1, -2, 0, None])
def test_num_predict_without_a_limit_ends_with_the_context(server: Server, limit: int | None) -> None:
    body = {"messages": HELLO, "stream": False, "options": {"num_predict": limit, "num_ctx": 45}}
    [reply] = posted(server, (CHAT, body))
    last = whole(CHAT, reply.body).last
    assert last["done_reason"] == "length" and last["prompt_eval_count"] + last["eval_count"] == 45


def test_num_ctx_limits_the_prompt_and_may_exceed_the_context_of_the_server(server: Server) -> None:
    bodies = [
        {"messages": HELLO, "stream": False, "options": {"num_ctx": size, "num_predict": 3}}
        for size in (20, 10**6)
    ]
    small, large = posted(server, *((CHAT, body) for body in bodies))
    error_of(small, 400, "19", "20", "maximum context length is")
    assert whole(CHAT, large.body).last["eval_count"] == 3


def test_unknown_options_and_fields_are_named_in_a_warning(server: Server) -> None:
    body = {
        "messages": HELLO,
        "stream": False,
        "odd": 1,
        "options": {"num_predict": 1, "num_foo": 2, "mirostat": 1},
    }
    [reply] = posted(server, (CHAT, body))
    assert whole(CHAT, reply.body).text
    warning = reply.headers[b"warning"].decode()
    assert "odd" in warning and "options.num_foo" in warning and "mirostat" not in warning


def test_messages_become_items_and_results_find_their_calls(default_tokenizer: Tokenizer) -> None:
    def call(name: str, **arguments: Any) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": arguments, "index": 0}}

    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?", "images": []},
        {
            "role": "assistant",
            "thinking": "Two cities.",
            "tool_calls": [call("f", city="Rome"), call("g"), call("f")],
        },
        {"role": "tool", "tool_name": "g", "content": "rain"},
        {"role": "tool", "content": "sun", "tool_name": "f"},
        {"role": "tool", "content": "snow"},
        {"role": "assistant", "content": "So.", "tool_calls": [{"id": "x", "function": {"name": "f"}}]},
        {"role": "tool", "content": "fog", "tool_call_id": "x"},
        {"role": "assistant"},
    ]
    request = parsed(CHAT, default_tokenizer, {"messages": messages})
    assert request.prompt.items == [
        Message("system", "Be brief."),
        Message("user", "Weather?"),
        Thought("Two cities."),
        Message("assistant", None),
        ToolCall("call_2_0", "f", '{"city":"Rome"}'),
        ToolCall("call_2_1", "g", "{}"),
        ToolCall("call_2_2", "f", "{}"),
        ToolResult("call_2_1", "rain", {"name": "g"}),
        ToolResult("call_2_0", "sun", {"name": "f"}),
        ToolResult("call_2_2", "snow"),
        Message("assistant", "So."),
        ToolCall("x", "f", "{}"),
        ToolResult("x", "fog"),
        Message("assistant", ""),
    ]


def test_a_result_is_not_compared_with_every_call() -> None:
    """Otherwise a body of 500 kB with thousands of calls and of results takes seconds."""
    num_comparisons = 0

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal num_comparisons
            num_comparisons += 1
            return str.__eq__(self, other)

    calls = [GivenCall(GivenFunction(Name("f"))) for _ in range(200)]
    for name, most in (("g", 0), ("f", 200), (None, 200)):
        given = [GivenMessage("assistant", tool_calls=calls)]
        results = [GivenMessage("tool", tool_name=None if name is None else Name(name)) for _ in range(300)]
        num_comparisons = 0
        ids = [one.call_id for one in items_of([*given, *results]) if isinstance(one, ToolResult)]
        assert ids == [f"call_0_{number}" for number in range(most)] + [None] * (300 - most)
        assert num_comparisons < 1000, f"{num_comparisons} comparisons for 200 calls and 300 results"


def test_a_chat_with_tools_and_their_results_is_answered(default_model_path: Path) -> None:
    tool = {"function": {"name": "f", "parameters": {"properties": {"a": {"type": ["string", "null"]}}}}}
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": {"a": "b"}}}],
        },
        {"role": "tool", "tool_name": "f", "content": "12"},
    ]
    body = {"messages": messages, "tools": [tool], **SHORT}
    [reply] = served(default_model_path, (CHAT, body), max_context=1024)
    assert streamed(CHAT, reply.body).last["prompt_eval_count"] > 100  # the tools are in the prompt


def test_the_system_message_and_the_prompt_of_generate(default_tokenizer: Tokenizer) -> None:
    request = parsed(GENERATE, default_tokenizer, {"prompt": "Hi", "system": "Be kind.", "context": [1, 2]})
    assert request.prompt.items == [Message("system", "Be kind."), Message("user", "Hi")]
    assert list(request.earlier_tokens) == [1, 2]


def test_a_suffix_needs_a_model_with_tokens_for_it(
    default_tokenizer: Tokenizer, llama_cpp_models: Path
) -> None:
    with pytest.raises(ApiError, match="does not support insert") as caught:
        parsed(GENERATE, default_tokenizer, {"prompt": "a", "suffix": "b"})
    assert caught.value.param == "suffix"
    from weft.loading.gguf import read_gguf
    from weft.loading.vocabulary import read_vocabulary

    path = llama_cpp_models / "ggml-vocab-refact.gguf"
    refact = tokenizer_of(read_vocabulary(read_gguf(path).metadata))
    [prompt] = parsed(GENERATE, refact, {"prompt": "def f(", "suffix": "return 1"}).prompt
    assert prompt == infill_prompt(refact, "def f(", "return 1")
    markers = [refact.decode([token], skip_control=False) for token in prompt if isinstance(token, int)]
    assert [part for part in prompt if isinstance(part, str)] == ["def f(", "return 1"]
    assert len(markers) == 3 and "prefix" in markers[0] and "suffix" in markers[1] and "middle" in markers[2]


def test_texts_and_tokens_are_joined_to_one_prompt(
    default_model_path: Path, default_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weft.server.api import ollama_generate

    monkeypatch.setattr(
        ollama_generate, "infill_prompt", lambda tokenizer, *texts: (5, texts[0], 6, texts[1], 7)
    )
    body = {"prompt": "a b c", "suffix": "d e f", "stream": False, **SHORT}
    [reply] = served(default_model_path, (GENERATE, body))
    num_tokens = sum(len(default_tokenizer.encode(text, add_bos=False)) for text in ("a b c", "d e f"))
    last = whole(GENERATE, reply.body).last
    assert last["prompt_eval_count"] == 3 + num_tokens and "context" not in last


# ---------------------------------------------------------------------- errors


IMAGE = [{"role": "user", "content": "x", "images": ["aGk="]}]
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"options": {"temperature": -1}}, "options.temperature"),
    (CHAT, {"options": {"temperature": "hot"}}, "options.temperature"),
    (CHAT, {"options": {"top_p": 1.5}}, "options.top_p"),
    (CHAT, {"options": {"top_k": -2}}, "options.top_k"),
    (CHAT, {"options": {"top_k": 1.5}}, "options.top_k"),
    (CHAT, {"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
    (CHAT, {"options": {"presence_penalty": 3}}, "options.presence_penalty"),
    (CHAT, {"options": {"num_predict": -3}}, "options.num_predict"),
    (CHAT, {"options": {"num_predict": 10**23}}, "options.num_predict"),
    (CHAT, {"options": {"num_ctx": 1}}, "options.num_ctx"),
    (CHAT, {"options": {"seed": 2**63}}, "options.seed"),
    (CHAT, {"options": {"stop": [""]}}, "options.stop"),
    (CHAT, {"options": {"stop": ["a"] * 100_000}}, "options.stop"),
    (CHAT, {"options": {"stop": ["a" * (1 << 20)]}}, "options.stop"),
    (CHAT, {"options": []}, "options"),
    (CHAT, {"stream": 1}, "stream"),
    (CHAT, {"format": "yaml"}, "format"),
    (CHAT, {"format": {"type": "object", "$ref": "http://127.0.0.1:1/"}}, "format"),
    (CHAT, {"format": [1]}, "format"),
    (CHAT, {"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
    (CHAT, {"keep_alive": []}, "keep_alive"),
    (CHAT, {"deadline": -1}, "deadline"),
    (CHAT, {"messages": "x"}, "messages"),
    (CHAT, {"messages": [1]}, "messages[0]"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0]"),
    (CHAT, {"messages": [*HELLO, {"role": "user", "content": 5}]}, "messages[1].content"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, ""),
    (CHAT, {"messages": IMAGE}, "messages[0].images"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}]}, "tool_calls"),
    (CHAT, {"messages": HELLO * 9000}, "messages"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools[0]"),
    (CHAT, {"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
    (CHAT, {"tools": [{"function": {"name": "a"}}] * 2}, "tools[1]"),
    (CHAT, {"tools": [{"function": {"name": "a", "parameters": {"type": "string"}}}]}, "parameters"),
    (GENERATE, {"prompt": 5}, "prompt"),
    (GENERATE, {"images": ["aGk="]}, "images"),
    (GENERATE, {"template": "{{ .Prompt }}"}, "template"),
    (GENERATE, {"raw": True, "system": "x"}, "system"),
    (GENERATE, {"raw": True, "context": [1]}, "context"),
    (GENERATE, {"context": [-1]}, "context"),
    (GENERATE, {"context": [2**40]}, "context"),
    (GENERATE, {"context": [10**6]}, "prompt"),
    (GENERATE, {"context": [1] * 9000}, "maximum context length is"),
    (GENERATE, {"context": "x"}, "context"),
    (GENERATE, {"prompt": "word " * 10_000}, "maximum context length is"),
    (GENERATE, {"chat_template": "x"}, "chat_template"),
]  # fmt: skip


def test_a_wrong_value_is_refused_with_its_field(server: Server) -> None:
    good: dict[str, Any] = {CHAT: {"messages": HELLO}, GENERATE: {"prompt": "Hello"}}
    for path, fields, name in WRONG:
        [reply] = posted(server, (path, {**good[path], **SHORT, **fields}))
        assert reply.status == 400, (str(fields)[:200], reply.body)
        error_of(reply, 400, name)


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b'{"a": NaN}', b'{"a": 1e400}', b"[" * 60_000, b'"x"'])
def test_a_body_that_is_no_json_object_is_refused(server: Server, body: bytes) -> None:
    for reply in posted(server, (CHAT, body), (GENERATE, body), ("/api/show", body), ("/api/pull", body)):
        error_of(reply, 400, "body")


def test_errors_before_the_body_and_of_unknown_routes_are_ollamas_too(default_model_path: Path) -> None:
    async def work(server: InProcess) -> list[Reply]:
        long = {b"content-length": b"17000000"}
        return [
            await send(server, CHAT, {"messages": HELLO}),
            await send(server, CHAT, {"messages": HELLO}, key="wrong"),
            await server.send("/api/tags", method="GET"),
            await send(server, CHAT, b"{}", key="secret", more_headers=long),
            await send(server, "/api/blobs/sha256:0", b"{}", key="secret"),
            await server.send(CHAT, method="GET", key="secret"),
            await send(server, CHAT, {"messages": HELLO, "model": "nowhere"}, key="secret"),
            await server.send("/api/chat", more_headers={b"host": b"elsewhere.example"}),
        ]

    replies = served(default_model_path, work=work, api_keys=plain_keys(["secret"]))
    for reply, status in zip(replies, (401, 401, 401, 413, 404, 405, 404, 403), strict=True):
        error_of(reply, status)


def test_an_error_during_a_stream_is_its_last_line(default_model_path: Path) -> None:
    async def work(server: InProcess) -> Reply:
        active = server.server.active_requests
        long = {"messages": HELLO, "options": {"num_predict": 15_000}}
        sending = asyncio.create_task(send(server, CHAT, long))
        while not EventStream.open_streams:
            await asyncio.sleep(0)
        active.cancel(active.described()[0]["id"])
        return await sending

    reply = served(default_model_path, work=work, max_context=16_384)
    *lines, last = reply.body.splitlines()
    assert reply.status == 200 and all(not validated(CHAT, line)["done"] for line in lines)
    assert "operator" in json.loads(last)["error"] and set(json.loads(last)) == {"error"}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_answer(default_model_path: Path, stream: bool) -> None:
    async def work(server: InProcess) -> None:
        body = {"messages": HELLO, "stream": stream, "options": {"num_predict": 15_000}}
        reply = await send(server, CHAT, body, leaves_after=0.02)
        assert b'"done":true' not in reply.body
        while server.server.engine.num_unfinished:
            await asyncio.sleep(0.01)

    served(default_model_path, work=work, max_context=16_384)


def test_a_silent_stream_sends_lines_without_content(default_model_path: Path) -> None:
    from weft.server.api.answer_format import AnswerContext

    async def work(server: InProcess) -> None:
        context = AnswerContext(MODEL, server.server.text.tokenizer, "id", prompts=[()])
        for path, (answer_format, kind) in FORMATS.items():
            writer = answer_format.writer(kind(), context)
            for line in (writer.begin(), writer.keep_alive()):
                content = validated(path, line)
                assert content["done"] is False and line.endswith(b"\n")
                assert content.get("response", "") == content.get("message", {"content": ""})["content"] == ""

    served(default_model_path, work=work)


def test_the_tokens_of_an_answer_count_for_the_limit_of_its_key(default_model_path: Path) -> None:
    key = ApiKey("narrow", plain_keys(["secret"])[0].key_sha256, tokens_per_minute=60)

    async def work(server: InProcess) -> list[Reply]:
        body = {"messages": HELLO, **SHORT}
        return [await send(server, CHAT, body, key="secret") for _ in range(2)]

    first, second = served(default_model_path, work=work, api_keys=(key,))
    assert streamed(CHAT, first.body).text
    error_of(second, 429)
    assert b"retry-after" in second.headers
