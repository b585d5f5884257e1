"""The valid requests that the fuzzer mutates, for every route of every API, and the values that it puts into them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batch_client import line, lines

HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@dataclass(frozen=True)
class Case:
    """`path` and the texts of `body` may have the names of `IDS`: they become ids of objects that exist. `upload`: the
    parts of a form, in place of a body."""

    path: str
    body: dict[str, Any] | None = None
    method: str = "POST"
    upload: dict[str, Any] | None = None


IDS = ("RESPONSE", "BACKGROUND", "ITEM", "FILE", "BATCH", "STORE", "DOCUMENT", "GROUP")
"""Stand for a stored response, a background response, an item of a response, a file, a batch, a vector store, a file that is
attached to it, and a file batch of it. `OLD` in the path of a DELETE is a response, a file or a vector store that an
earlier request made."""

CHAT: dict[str, Any] = {"messages": HELLO, "max_tokens": 3}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
_CALLED = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_CHAT_TURNS = [
    {"role": "developer", "content": "x"},
    *HELLO,
    {"role": "assistant", "content": None, "tool_calls": [_CALLED], "reasoning_content": "r"},
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "1"}]},
]
_CHAT_CASES = (
    CHAT,
    {**CHAT, "stream": True, "stream_options": {"include_usage": True}, "n": 2},
    {**CHAT, "logprobs": True, "top_logprobs": 2, "stop": ["a", "b"], "seed": 3},
    {**CHAT, "tools": [TOOL], "tool_choice": "none", "temperature": 0.5, "top_p": 0.9},
    {**CHAT, "messages": _CHAT_TURNS, "tools": [TOOL], "tool_choice": "auto", "stream": True},
    {
        **CHAT,
        "tools": [TOOL],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}},
    },
    {**CHAT, "logit_bias": {"5": -1}, "priority": "high", "response_format": {"type": "text"}},
    {**CHAT, "prediction": {"type": "content", "content": "Hi"}, "reasoning_effort": "low", "store": True},
    {**CHAT, "verbosity": "low", "prompt_cache_key": "k", "safety_identifier": "s", "modalities": ["text"]},
)  # fmt: skip
_COMPLETION_CASES: tuple[dict[str, Any], ...] = (
    {"prompt": "Hello", "max_tokens": 3},
    {"prompt": [1, 2, 3], "max_tokens": 3, "logprobs": 2, "echo": True},
    {"prompt": ["a", "b"], "max_tokens": 2, "n": 2, "stream": True, "stop": "x"},
    {"prompt": "x", "max_tokens": 2, "deadline": 5, "cache_salt": "s", "session_id": "t"},
)
_RESPONSE: dict[str, Any] = {"input": "Hello", "max_output_tokens": 3, "store": False}
_RESPONSE_TOOLS = [
    {"type": "function", "name": "f", "parameters": SCHEMA, "strict": False},
    {"type": "custom", "name": "g", "format": {"type": "text"}},
    {"type": "namespace", "name": "m", "description": "d", "tools": [{"type": "function", "name": "h"}]},
    {"type": "web_search"},
]
_RESPONSE_ITEMS = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "a"}]},
    {"role": "user", "content": "b"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "c"}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "id": "fc_1"},
    {"type": "function_call_output", "call_id": "c1", "output": "d"},
    {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "e"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": "f"},
]
_RESPONSE_CASES: tuple[dict[str, Any], ...] = (
    _RESPONSE,
    {**_RESPONSE, "stream": True, "instructions": "Be short.", "include": ["reasoning.encrypted_content"]},
    {**_RESPONSE, "store": True, "metadata": {"a": "b"}, "top_logprobs": 2, "user": "u"},
    {**_RESPONSE, "store": True, "previous_response_id": "RESPONSE", "stream": True, "truncation": "auto"},
    {**_RESPONSE, "previous_response_id": "RESPONSE", "input": [{"type": "item_reference", "id": "ITEM"}]},
    {**_RESPONSE, "input": _RESPONSE_ITEMS, "tools": _RESPONSE_TOOLS, "tool_choice": "none"},
    {**_RESPONSE, "input": _RESPONSE_ITEMS, "tools": _RESPONSE_TOOLS, "stream": True, "max_tool_calls": 1},
    {**_RESPONSE, "text": {"format": {"type": "text"}, "verbosity": "low"}, "reasoning": {"effort": "low"}},
    {
        **_RESPONSE,
        "tools": _RESPONSE_TOOLS,
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": _RESPONSE_TOOLS[:1]},
    },
    {**_RESPONSE, "store": True, "background": True},
)
_BLOCKS = [
    *HELLO,
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "a", "signature": "b"},
            {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "x"}]},
            {"type": "text", "text": "y", "cache_control": {"type": "ephemeral"}},
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "z"}},
        ],
    },
    {"role": "system", "content": "z"},
]
_MESSAGES_TOOL = {"name": "f", "description": "d", "input_schema": SCHEMA}
_MESSAGES_CASES: tuple[dict[str, Any], ...] = (
    {**CHAT, "stop_sequences": ["a"], "thinking": {"type": "enabled", "budget_tokens": 9}, "stream": True},
    {**CHAT, "system": [{"type": "text", "text": "a"}], "output_config": {"effort": "low"}},
    {**CHAT, "messages": _BLOCKS, "tools": [_MESSAGES_TOOL], "tool_choice": {"type": "none"}},
    {**CHAT, "messages": _BLOCKS, "tools": [_MESSAGES_TOOL], "stream": True, "metadata": {"user_id": "u"}},
)
_OLLAMA: dict[str, Any] = {
    "options": {"num_predict": 3, "top_k": 4, "stop": ["a"], "seed": 3, "num_ctx": 200}
}
_OLLAMA_TURNS = [
    *HELLO,
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
    {"role": "tool", "tool_name": "f", "content": "1"},
]
_GENERATING: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/chat/completions": _CHAT_CASES,
    "/v1/completions": _COMPLETION_CASES,
    "/v1/responses": _RESPONSE_CASES,
    "/v1/messages": _MESSAGES_CASES,
    "/api/chat": (
        {**_OLLAMA, "messages": HELLO},
        {**_OLLAMA, "messages": _OLLAMA_TURNS, "stream": False, "tools": [TOOL], "think": False},
        {"messages": [], "keep_alive": 0},
    ),
    "/api/generate": (
        {**_OLLAMA, "prompt": "Hello", "system": "x", "context": [1, 2, 3]},
        {**_OLLAMA, "prompt": "Hello", "raw": True, "stream": False, "logprobs": True},
        {**_OLLAMA, "prompt": "Hello", "format": "json", "think": "low", "suffix": ""},
    ),
}
_BATCH = {"input_file_id": "FILE", "endpoint": "/v1/completions", "completion_window": "24h"}
_UPLOAD = {"content": lines([line(0), line(1)]), "purpose": "batch"}
_SEARCH: dict[str, Any] = {
    **{"query": ["Hello", "a"], "max_num_results": 3, "rewrite_query": True},
    "filters": {"type": "and", "filters": [{"type": "in", "key": "a", "value": ["b", 1]}]},
    "ranking_options": {
        **{"ranker": "none", "score_threshold": 0.1},
        "hybrid_search": {"embedding_weight": 1, "text_weight": 2},
    },
}
_FILE_SEARCH = {"type": "file_search", "vector_store_ids": ["STORE"], "max_num_results": 2}
_CHUNKS = {
    "type": "static",
    "static": {"max_chunk_size_tokens": 200, "chunk_overlap_tokens": 50},
}
_DETAILS = {"attributes": {"a": "b", "c": 1, "d": True}, "chunking_strategy": _CHUNKS}
_STORE = "/v1/vector_stores/STORE"
_BROKEN_LINES = lines(
    [line(0), b"{", line(0), line(2, method="GET"), line(3, body={"prompt": 5}), b"\xff\x00"]
)


def _gets(path: str, *queries: str) -> tuple[Case, ...]:
    return tuple(Case(path + query, method="GET") for query in ("", *queries))


CASES: tuple[Case, ...] = (
    *(Case(path, body) for path, bodies in _GENERATING.items() for body in bodies),
    Case("/v1/responses/input_tokens", {"input": _RESPONSE_ITEMS, "tools": _RESPONSE_TOOLS}),
    Case("/v1/responses/input_tokens", {"input": "a", "previous_response_id": "RESPONSE"}),
    Case("/v1/messages/count_tokens", {"messages": _BLOCKS, "tools": [_MESSAGES_TOOL]}),
    Case("/tokenize", {"prompt": "Hello"}),
    Case("/tokenize", {"messages": HELLO}),
    Case("/detokenize", {"tokens": [1, 2, 3]}),
    *_gets("/v1/responses/RESPONSE", "?stream=true", "?include=a&starting_after=3"),
    *_gets("/v1/responses/RESPONSE/input_items", "?limit=1&order=asc", "?after=ITEM", "?limit=0", "?order=x"),
    Case("/v1/responses/BACKGROUND/cancel", {}),
    Case("/v1/responses/OLD", method="DELETE"),
    *_gets("/v1/models", "?limit=1000", "?limit=1&after_id=x", "?before_id=test-model&limit=-1"),
    *_gets("/v1/models/test-model"),
    *_gets("/api/tags"),
    *_gets("/api/ps"),
    *_gets("/api/version"),
    Case("/api/show", {"model": "test-model", "verbose": True}),
    Case("/api/pull", {"model": "test-model", "insecure": False}),
    Case("/api/pull", {"name": "test-model", "stream": False}),
    Case("/api/delete", {"model": "test-model"}, "DELETE"),
    Case("/api/embed", {"model": "test-model", "input": "x"}),
    Case("/v1/files", upload=_UPLOAD),
    Case("/v1/files", upload={**_UPLOAD, "content": _BROKEN_LINES}),
    Case("/v1/files", upload={"content": b"x", "purpose": "user_data", "expires_after[seconds]": "3600"}),
    *_gets("/v1/files", "?purpose=batch&limit=2&order=asc", "?after=FILE", "?limit=-1", "?after=x"),
    *_gets("/v1/files/FILE"),
    *_gets("/v1/files/FILE/content"),
    Case("/v1/files/OLD", method="DELETE"),
    Case("/v1/batches", _BATCH),
    Case("/v1/batches", {**_BATCH, "metadata": {"a": "b"}, "output_expires_after": {"anchor": "created_at", "seconds": 3600}}),
    *_gets("/v1/batches", "?limit=2", "?after=BATCH&limit=100", "?limit=x"),
    *_gets("/v1/batches/BATCH"),
    Case("/v1/batches/BATCH/cancel", {}),
    Case("/v1/embeddings", {"input": "Hello", "dimensions": 4, "user": "u"}),
    Case("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64", "input_type": "query"}),
    Case("/v1/embeddings", {"input": [[1, 2], [3]], "truncate": True, "deadline": 5}),
    Case("/api/embeddings", {"model": "noop-embedder", "prompt": "x", "keep_alive": 0}),
    Case("/api/embed", {"model": "noop-embedder", "input": ["x", "y"], "truncate": True, "dimensions": 3}),
    *(
        Case(path, {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": True})
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    Case("/score", {"text_1": "a", "text_2": ["b", "c"]}),
    Case("/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "d"], "user": "u"}),
    Case("/v1/vector_stores", {"name": "n", "file_ids": ["FILE"], "description": "d", "chunking_strategy": _CHUNKS}),
    Case("/v1/vector_stores", {"metadata": {"a": "b"}, "expires_after": {"anchor": "last_active_at", "days": 3}}),
    *_gets("/v1/vector_stores", "?limit=2&order=asc", "?after=STORE", "?before=STORE", "?limit=-1"),
    *_gets(_STORE),
    Case(_STORE, {"name": "m", "metadata": {"a": "b"}, "expires_after": None}),
    Case("/v1/vector_stores/OLD", method="DELETE"),
    Case(f"{_STORE}/search", _SEARCH),
    Case(f"{_STORE}/search", {"query": "Hello", "filters": {"type": "gt", "key": "c", "value": 0}}),
    Case(f"{_STORE}/files", {"file_id": "FILE", **_DETAILS}),
    *_gets(f"{_STORE}/files", "?filter=completed&limit=1", "?after=DOCUMENT", "?filter=x"),
    *_gets(f"{_STORE}/files/DOCUMENT"),
    Case(f"{_STORE}/files/DOCUMENT", {"attributes": _DETAILS["attributes"]}),
    *_gets(f"{_STORE}/files/DOCUMENT/content", "?page=1"),
    Case(f"{_STORE}/files/FILE", method="DELETE"),
    Case(f"{_STORE}/file_batches", {"file_ids": ["FILE"], **_DETAILS}),
    Case(f"{_STORE}/file_batches", {"files": [{"file_id": "FILE", **_DETAILS}]}),
    *_gets(f"{_STORE}/file_batches/GROUP"),
    *_gets(f"{_STORE}/file_batches/GROUP/files", "?filter=failed&order=asc"),
    Case(f"{_STORE}/file_batches/GROUP/cancel", {}),
    Case("/v1/responses", {**_RESPONSE, "tools": [_FILE_SEARCH], "include": ["file_search_call.results"]}),
    Case("/v1/responses", {**_RESPONSE, "tools": [_FILE_SEARCH], "stream": True}),
    Case("/v1/chat/completions", {**CHAT, "tools": [{"type": "file_search", "file_search": _FILE_SEARCH}]}),
    *(Case("/v1/feedback", {"response_id": "RESPONSE", "score": score, "index": 0, "correction": "x", "labels": ["a", "b"]}) for score in (1, -0.5)),
    *_gets("/v1/feedback", "?limit=2&order=asc", "?after=RESPONSE", "?key=*", "?limit=0"),
    *_gets("/v1/feedback/statistics", "?key=x"),
    Case("/v1/feedback?key=none", method="DELETE"),
    # Without a number of frames, the stream would have no end.
    *(Case(f"/live?frames={count}", method="GET") for count in (1, 2, 0)),
    *_gets("/live/info"),
    Case("/live/requests/none", method="GET"),
    *(Case(path, method="GET") for path in ("/", "/tokenizer_info", "/health", "/ready", "/metrics", "/version")),
    *(Case(path, method="GET") for path in ("/openapi.json", "/docs", "/admin/requests")),
    Case("/admin/requests/none", method="DELETE"),
    Case("/admin/learned", method="GET"),
    Case("/admin/learned", method="DELETE"),
)  # fmt: skip

FIELDS = tuple({name for one in CASES for name in one.body or ()} | {
    *("model", "min_tokens", "top_k", "min_p", "typical_p", "repetition_penalty", "frequency_penalty"),
    *("xtc_probability", "xtc_threshold", "presence_penalty", "stop_token_ids", "ignore_eos", "ttft_target"),
    *("best_of", "documents", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    *("images", "template", "guided_json", "grammar", "json_schema", "chat_template", "conversation", "prompt"),
    *("num_predict", "num_ctx", "service_tier", "context_management", "truncate", "shift", "top_logprobs"),
})  # fmt: skip
"""Sorted where they are drawn: the order of a set differs from run to run."""

NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 0.5, 1e308, -0.0, 2**31, 2**63, -(2**63) - 1, 10**30, 1e-320),
    *("", "a", "0", "null", "\x00", "\u202e", "\ud7ff", "🧵" * 9, "<|im_end|>", "{{ 7 * 7 }}", "../../x"),
    *("a" * 5000, "RESPONSE", "ITEM", "FILE", "BATCH", "BACKGROUND", "STORE", "DOCUMENT", "GROUP", "required", "24h", "/v1/responses"),
    *([], [[]], [None], [0] * 70, [{}], {}, {"a": {}}, {"type": "x"}, {"": ""}, {"type": ["text"]}, [["a"]], [1, "a"]),
    *({"role": "user"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}, {"content": None}),
    *({"type": "item_reference", "id": "ITEM"}, [{"type": "item_reference", "id": "RESPONSE"}]),
    *({"type": "function_call_output", "call_id": "c9", "output": "x"}, {"type": "function_call", "name": "f"}),
    *({"type": "tool_result", "tool_use_id": "t9"}, {"type": "tool_use", "id": "t9", "name": "f", "input": 1}),
    *({"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/"}}, {"type": "enabled"}),
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "http://127.0.0.1:1/"}}},
)  # fmt: skip

LEGAL: dict[str, tuple[Any, ...]] = {
    "n": (1, 2, 5),
    "max_tokens": (1, 7, 60, 2**31 - 1, None),
    "max_output_tokens": (1, 7, 60, 2**31 - 1, None),
    "min_tokens": (0, 2),
    "temperature": (0, 0.01, 1, 100),
    "top_p": (1e-9, 1),
    "top_k": (-1, 0, 1, 10**9),
    "seed": (0, -(2**63), 2**63 - 1),
    "stop": ("", ["\n", "🧵"], "e", []),
    "stop_sequences": (["\n", "🧵"], ["e"], []),
    "stop_token_ids": ([], [0, 5], [49151]),
    "logit_bias": ({}, {"0": 100}, {"49151": -100.0}),
    "priority": (0, 3, "low", "CRITICAL"),
    "deadline": (0, 1e-9, 1e9),
    "stream": (True, False),
    "ignore_eos": (True, False),
    "echo": (True, False),
    "prompt": ("", "x", [0], ["", "y"], [[1], [2]], ["\u0000"], "word " * 100),
    "input": ("", "x", "word " * 100, [], [{"role": "user", "content": "a" * 2000}], HELLO * 9),
    "messages": (
        [{"role": "system", "content": ""}],
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": "a" * 2000}],
        HELLO * 9,
    ),
    "system": ("", "x", []),
    "instructions": ("", "x"),
    "store": (True, False),
    "background": (True, False),
    "truncation": ("auto", "disabled"),
    "previous_response_id": ("RESPONSE", "BACKGROUND", "resp_none"),
    "options": ({}, {"num_predict": -1}, {"num_ctx": 1}, {"temperature": 0, "num_predict": 9}),
    "format": ("", "json", SCHEMA),
    "think": (True, False, "high"),
    "context": ([], [0], list(range(300))),
    "input_file_id": ("FILE", "file-none"),
    "endpoint": ("/v1/completions", "/v1/responses", "/v1/messages", "/v1/batches"),
    "continue_final_message": (True,),
    "cache_salt": ("", "\ud7ff"),
    "dimensions": (1, 8, None),
    "documents": (["a"], ["a" * 3000, "b"], [{"text": ""}], ["c"] * 60),
    "query": ("x", "word " * 800, ["a", "b"]),
    "filters": ({"type": "eq", "key": "a", "value": "b"}, {"type": "or", "filters": []}),
    "file_ids": ([], ["FILE"], ["DOCUMENT", "FILE"], ["file-none"]),
    "top_n": (1, 10**9),
    "truncate": (True, False),
}
"""Unusual values that are mostly valid, so that the code after the checks is tested too."""

RAW = (
    *(b"NaN", b"Infinity", b"1e400", b"-", b'"\\ud800"', b'"\xff"', b"01", b"1" + b"0" * 400, b'"\\u0000"'),
    b"\xef\xbb\xbf",
)
