"""Requests of the Anthropic API: what becomes of their blocks, prompts, caches and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from anthropic_types import EventStream, count_of, error_of, message_of
from in_process import InProcess, Reply, in_process

from weft.request import InferenceRequest
from weft.server.admission.keys import plain_keys
from weft.server.api.answer_format import ServedModel
from weft.server.api.messages import MessagesFormat, MessagesRequest
from weft.server.errors import ApiError
from weft.server.stream.events import EventStream as ServerStream
from weft.text.conversation import Item, Message, Thought, ToolCall, ToolResult

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "Hello"}]
VERSION = {b"anthropic-version": b"2023-06-01"}
MARK = {"cache_control": {"type": "ephemeral"}}
TOOL = {
    "name": "read_file",
    "description": "Reads a file.",
    "input_schema": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"path": {"type": "string"}},
        "required": ["path"],
        "additionalProperties": False,
    },
}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}

Work = Callable[[InProcess], Coroutine[Any, Any, Any]]


def served(path: Path, *bodies: dict[str, Any], work: Work | None = None, **options: Any) -> Any:
    """The replies to the bodies, or the result of `work`."""

    async def run() -> Any:
        async with in_process(path, **{"max_context": 4096, **options}) as server:
            replies = await work(server) if work else [await send(server, body) for body in bodies]
            assert await server.server.wait_until_idle(60)
            return replies

    return asyncio.run(run())


async def send(server: InProcess, body: dict[str, Any], path: str = PATH, **options: Any) -> Reply:
    content = json.dumps({"max_tokens": 4, "messages": HELLO, **body}).encode()
    return await server.send(path, content, **{"more_headers": VERSION, **options})


def recorded(server: InProcess) -> list[InferenceRequest]:
    """The requests that the server makes for the engine from now on."""
    found: list[InferenceRequest] = []
    preparer = server.server._preparer
    prepare = preparer.prepare

    async def record(*arguments: Any, **options: Any) -> Any:
        prepared = await prepare(*arguments, **options)
        found.extend(prepared.requests)
        return prepared

    preparer.prepare = record  # type: ignore[method-assign]
    return found


def prompts(path: Path, *bodies: dict[str, Any]) -> list[tuple[int, ...]]:
    """The prompt tokens of each body."""

    async def work(server: InProcess) -> list[tuple[int, ...]]:
        found = recorded(server)
        for body in bodies:
            reply = await send(server, body)
            assert reply.status == 200, reply.body
        return [tuple(one.prompt) for one in found]

    return list(served(path, work=work))


def items(messages: list[dict[str, Any]], **fields: Any) -> list[Item]:
    return conversation(messages, **fields).items


def conversation(messages: list[dict[str, Any]], **fields: Any) -> Any:
    model = ServedModel("m", None, {}, 1)  # type: ignore[arg-type]
    return MessagesFormat().parse(MessagesRequest(messages=messages, **fields), model).prompt


# ---------------------------------------------------------------------- messages


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": name, "name": "read_file", "input": arguments}


def result(name: str, content: Any = "done", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": name, "content": content, **more}


def test_a_text_and_a_list_of_one_block_give_the_same_tokens(default_model_path: Path) -> None:
    calls = [{"role": "assistant", "content": [call("toolu_1", path="a.txt")]}]
    plain, blocks, marked = prompts(
        default_model_path,
        *(
            {
                "system": given("Be brief."),
                "tools": [{**TOOL, **more}],
                "messages": [
                    {"role": "user", "content": given("Read a.txt")},
                    *calls,
                    {"role": "user", "content": [result("toolu_1", given("words"), **more)]},
                    {"role": "assistant", "content": given("It has words.")},
                    {"role": "user", "content": given("Thanks")},
                ],
            }
            for given, more in (
                (str, {}),
                (lambda one: [text(one)], {}),
                (lambda one: [text(one, **MARK)], MARK),
            )
        ),
    )
    assert plain == blocks == marked


def test_the_billing_header_of_claude_code_is_left_out_of_the_prompt(default_model_path: Path) -> None:
    header = "x-anthropic-billing-header: cc_version=2.1.326.{}; cc_entrypoint=cli;"
    first, second, without, as_text = prompts(
        default_model_path,
        {"system": [text(header.format("a1f")), text("Be brief.", **MARK)]},
        {"system": [text(header.format("7e2")), text("Be brief.")]},
        {"system": "Be brief."},
        {"system": f"{header.format('c05')}\nBe brief."},
    )
    assert first == second == without == as_text


def test_calls_and_results_keep_their_ids() -> None:
    found = items(
        [
            {"role": "user", "content": "Read both"},
            {
                "role": "assistant",
                "content": [text("Yes."), call("toolu_a", path="a"), call("toolu_b", path="b")],
            },
            {
                "role": "user",
                "content": [
                    result("toolu_b", [text("B"), text("2")]),
                    result("toolu_a", "A", is_error=True),
                    text("Go on"),
                ],
            },
        ]
    )
    assert found == [
        Message("user", "Read both"),
        Message("assistant", "Yes."),
        ToolCall("toolu_a", "read_file", '{"path": "a"}'),
        ToolCall("toolu_b", "read_file", '{"path": "b"}'),
        ToolResult("toolu_b", "B\n2"),
        ToolResult("toolu_a", "Error: A"),
        Message("user", "Go on"),
    ]


def test_thoughts_come_back_with_any_signature_and_redacted_ones_are_left_out() -> None:
    thinking = [
        {"type": "thinking", "thinking": "Hm.", "signature": "EqoBCkgIARABGAIiQL2U"},
        {"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3pzix"},
    ]
    found = items([*HELLO, {"role": "assistant", "content": [*thinking, text("Hi")]}, *HELLO])
    assert found == [
        Message("user", "Hello"),
        Thought("Hm."),
        Message("assistant", "Hi"),
        Message("user", "Hello"),
    ]


def test_a_system_message_after_the_first_message_becomes_a_reminder_of_the_user() -> None:
    late = {"role": "system", "content": [text("Today is Monday.")]}
    reminder = "<system-reminder>\nToday is Monday.\n</system-reminder>"
    assert items([*HELLO, late], system="Be brief.") == [
        Message("system", "Be brief."),
        Message("user", f"Hello\n{reminder}"),
    ]
    assert items([late, *HELLO], system="Be brief.")[0] == Message("system", "Be brief.\nToday is Monday.")


@pytest.mark.parametrize("role", ["system", "user"])
def test_a_message_between_a_call_and_its_result_follows_the_result(role: str) -> None:
    """Some templates refuse a message between both."""
    calls = [{"type": "tool_use", "id": one, "name": "f", "input": {}} for one in ("a", "b")]
    results = [{"type": "tool_result", "tool_use_id": one, "content": one} for one in ("a", "b")]
    found = items(
        [
            *HELLO,
            {"role": "assistant", "content": calls},
            {"role": role, "content": "Late"},
            {"role": "user", "content": results[:1]},
            {"role": role, "content": "Later"},
            {"role": "user", "content": [results[1], text("Go on")]},
        ]
    )
    reminders = [f"<system-reminder>\n{one}\n</system-reminder>" for one in ("Late", "Later")]
    texts = reminders if role == "system" else ["Late", "Later"]
    assert found[1:] == [
        *(ToolCall(one, "f", "{}") for one in ("a", "b")),
        *(ToolResult(one, one) for one in ("a", "b")),
        Message("user", "\n".join([*texts, "Go on"])),
    ]


def test_documents_are_read_as_text() -> None:
    documents = [
        {
            "type": "document",
            "title": "T",
            "source": {"type": "text", "media_type": "text/plain", "data": "D"},
        },
        {"type": "document", "source": {"type": "content", "content": [text("C")]}},
        {"type": "search_result", "title": "S", "source": "u", "content": [text("R")]},
    ]
    assert items([{"role": "user", "content": [*documents, text("Why?")]}]) == [
        Message("user", "T\nD\nC\nS\nu\nR\nWhy?")
    ]


@pytest.mark.parametrize("depth", [2, 480])
def test_documents_inside_documents_are_refused_at_any_depth(depth: int) -> None:
    block = text("R")
    for _ in range(depth):
        block = {"type": "search_result", "content": [block]}
    place = r"messages\[0\]\.content\[0\]\.content\[0\] has the type 'search_result': allowed here: text"
    with pytest.raises(ApiError, match=place):
        items([{"role": "user", "content": [block]}])


def test_an_answer_continues_a_last_message_of_the_assistant() -> None:
    started = [*HELLO, {"role": "assistant", "content": "The best answer is ("}]
    assert conversation(started).continues_last and not conversation(HELLO).continues_last


@pytest.mark.parametrize(
    ("thinking", "effort", "expected"),
    [
        (None, None, "none"),
        (None, "low", "low"),
        ({"type": "disabled"}, "high", "none"),
        ({"type": "enabled", "budget_tokens": 32000}, None, "high"),
        ({"type": "adaptive", "display": "omitted"}, "max", "max"),
    ],
)
def test_thinking_and_effort_become_one_effort(thinking: Any, effort: Any, expected: str) -> None:
    config = None if effort is None else {"effort": effort}
    assert conversation(HELLO, thinking=thinking, output_config=config).reasoning_effort == expected


def test_the_order_of_results_does_not_change_the_prompt(default_model_path: Path) -> None:
    calls = {"role": "assistant", "content": [call("toolu_a", path="a"), call("toolu_b", path="b")]}
    results = [result("toolu_a", "A"), result("toolu_b", "B")]
    first, second = prompts(
        default_model_path,
        *(
            {"messages": [*HELLO, calls, {"role": "user", "content": order}]}
            for order in (results, results[::-1])
        ),
    )
    assert first == second


Send = Callable[..., Reply]


@pytest.fixture(scope="module")
def shared_app(default_model_path: Path) -> Any:
    """Sends one body to a server that all tests of this module share."""
    with asyncio.Runner() as runner:
        context = in_process(default_model_path, max_context=4096)
        server = runner.run(context.__aenter__())
        yield lambda body, path=PATH, **options: runner.run(send(server, body, path, **options))
        assert runner.run(server.server.wait_until_idle(60))
        runner.run(context.__aexit__(None, None, None))


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}
CALLED = [*HELLO, {"role": "assistant", "content": [call("toolu_1")]}]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0] has the type 'image'"),
        (
            {"messages": [*CALLED, {"role": "user", "content": [result("toolu_1", [IMAGE])]}]},
            "messages[2].content[0].content[0] has the type 'image'",
        ),
        ({"messages": [{"role": "user", "content": [PDF]}]}, "source has the type 'base64'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is not a string"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content is not a string"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0] is not a block"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text is missing"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "user", "content": [result("toolu_9")]}]}, "'toolu_9'"),
        ({"messages": CALLED}, "the calls 'toolu_1' have no result"),
        ({"messages": [*CALLED, *HELLO, {"role": "assistant", "content": "x"}]}, "have no result"),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": [call("a"), call("a")]}]},
            "ids must be unique",
        ),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": [{**call("a"), "input": "x"}]}]},
            "input is not an object",
        ),
        ({"messages": [{"role": "user", "content": [text("x")] * 1025}]}, "1025 entries"),
        ({"messages": HELLO * 8193}, "entries; allowed: at most 8192"),
        ({"messages": {"role": "user"}}, "messages"),
        ({"system": 3}, "system"),
        ({"system": [IMAGE]}, "system[0] has the type 'image'"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**23}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": [""]}, "stop"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences has 17 entries"),
        ({"stop_sequences": ["x" * (1 << 20)]}, "stop"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"seed": 2**70}, "seed"),
        ({"thinking": {"budget_tokens": 5}}, "thinking.type"),
        ({"output_config": {"effort": "extreme"}}, "effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "schema"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "http://127.0.0.1:1/"}}}},
            "",
        ),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
        ({"tools": [TOOL, TOOL]}, "names must be unique"),
        ({"tools": [{**TOOL, "name": f"f{number}"} for number in range(129)]}, "tools has 129 entries"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice has no name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "'other'"),
        ({"tool_choice": {"type": "any"}}, "no tools"),
        ({"session_id": "x" * 300}, "session_id"),
        ({"functions": [TOOL]}, "functions"),
    ],
)
def test_a_bad_request_gets_an_error_in_the_form_of_the_api(
    shared_app: Send, fields: dict[str, Any], words: str
) -> None:
    reply = shared_app(fields)
    assert reply.status == 400, reply.body
    assert words in error_of(reply.body, "invalid_request_error")


@pytest.mark.parametrize("body", [b"NaN", b'{"a": 1e400}', b'"\xff"', b"[1]", b"{" * 100_000, b'"\\ud800"'])
def test_8_broken_json_gets_an_error_in_the_form_of_the_api(default_model_path: Path, body: bytes) -> None:
    async def work(server: InProcess) -> Any:
        return await server.send(PATH, body)

    reply = served(default_model_path, work=work)
    assert reply.status == 400
    error_of(reply.body, "invalid_request_error")


def test_19_a_prompt_that_is_too_long_is_refused_with_both_numbers(shared_app: Send) -> None:
    for content in ("word " * 3000, "word " * 30_000):  # tokenised in a thread, and in a process
        reply = shared_app({"messages": [{"role": "user", "content": content * 2}]})
        assert reply.status == 400
        message = error_of(reply.body, "invalid_request_error")
        words = message.split()
        assert message.startswith("prompt is too long: ") and message.endswith(" tokens > 4095 maximum")
        assert int(words[4]) > 4095


def test_a_thread_is_refused_in_the_words_at_which_the_package_sends_all_messages(shared_app: Send) -> None:
    reply = shared_app({"thread": {"type": "continue", "previous_message_id": "msg_1"}})
    error = json.loads(reply.body)["error"]  # the types of the package for Python have no details
    assert reply.status == 400 and error["type"] == "invalid_request_error"
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_max_tokens_beyond_the_context_is_lowered(default_model_path: Path) -> None:
    [reply] = served(default_model_path, {"max_tokens": 32_000, "seed": 1}, max_context=64)
    message = message_of(reply.body)
    assert message.stop_reason in ("model_context_window_exceeded", "end_turn")
    assert message.usage.input_tokens + message.usage.output_tokens <= 64


def test_unknown_fields_hosted_tools_and_beta_headers_are_ignored(shared_app: Send) -> None:
    body = {
        "tools": [SEARCH, {"type": "bash_20250124", "name": "bash"}],
        "tool_choice": {"type": "tool", "name": "web_search"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "safeguards": [{"type": "x"}],
        "metadata": {"user_id": '{"session_id": "1"}'},
        "service_tier": "auto",
    }
    headers = {**VERSION, b"anthropic-beta": b"claude-code-20250219,effort-2025-11-24,unknown-1"}
    reply = shared_app(body, more_headers=headers)
    message_of(reply.body)
    assert reply.headers[b"warning"] == (
        b'299 weft "unknown fields ignored: context_management, safeguards, '
        b'tools.web_search_20250305, tools.bash_20250124"'
    )
    assert reply.headers[b"request-id"] == reply.headers[b"x-request-id"]
    deferred = shared_app({"tools": [{**TOOL, "defer_loading": True}, SEARCH]})
    assert deferred.status == 200 and b"read_file" not in deferred.headers[b"warning"]


def test_blocks_of_tools_that_the_vendor_runs_are_left_out_with_a_warning(shared_app: Send) -> None:
    """A conversation that began at Anthropic goes on here."""
    search = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}}
    result = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []}
    question = {"role": "user", "content": "Now?"}
    talk = [*HELLO, {"role": "assistant", "content": [text("One."), search, result, text("Two.")]}, question]
    plain = [*HELLO, {"role": "assistant", "content": [text("One."), text("Two.")]}, question]
    reply = shared_app({"messages": talk})
    assert reply.status == 200, reply.body
    warning = reply.headers[b"warning"]
    assert b"messages.server_tool_use" in warning and b"messages.web_search_tool_result" in warning
    assert total(message_of(reply.body).usage) == total(
        message_of(shared_app({"messages": plain}).body).usage
    )
    assert shared_app({"messages": talk}, COUNT).status == 200
    for last in ([search, result], [search]):  # a turn that was paused
        assert shared_app({"messages": [*HELLO, {"role": "assistant", "content": last}]}).status == 200
    nested = {"role": "user", "content": [{"type": [], "text": "x"}]}
    assert shared_app({"messages": [nested]}).status == 400


# ---------------------------------------------------------------------- counting and caching


def total(usage: Any) -> int:
    return int(usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens)


def test_count_tokens_is_the_usage_of_the_real_request(shared_app: Send) -> None:
    for body in (
        {"messages": [{"role": "user", "content": "one two " * 20}]},
        {"system": [text("Be brief.", **MARK)], "tools": [TOOL], "tool_choice": {"type": "none"}},
        {"system": "x", "tools": [TOOL], "thinking": {"type": "enabled", "budget_tokens": 1024}},
    ):
        counted = shared_app({**body, "max_tokens": None}, COUNT)
        message = message_of(shared_app(body).body)
        assert count_of(counted.body) == total(message.usage)
        stream = EventStream(shared_app({**body, "stream": True}).body)
        assert count_of(counted.body) == stream.message["usage"]["input_tokens"]
    assert count_of(shared_app({"tools": []}, COUNT).body) > 0


def test_the_usage_of_a_marked_prompt_says_what_the_next_request_finds_in_the_cache(
    default_model_path: Path,
) -> None:
    marked = {"system": [text("word " * 200, **MARK)], "seed": 1}
    first, second, other = served(default_model_path, marked, marked, {"system": "other " * 200})
    created, found, plain = (message_of(reply.body).usage for reply in (first, second, other))
    assert created.cache_read_input_tokens == 0 and created.cache_creation_input_tokens > 190
    assert found.cache_read_input_tokens == created.cache_creation_input_tokens
    assert found.cache_creation_input_tokens == 0
    assert 1 <= found.input_tokens == created.input_tokens <= 16
    # Without a mark nothing is reported as created.
    assert plain.cache_creation_input_tokens == 0 and plain.input_tokens > 190


def test_the_last_token_of_whole_blocks_is_not_counted_as_created(default_model_path: Path) -> None:
    async def work(server: InProcess) -> list[Any]:
        for length in range(16):
            body = {"system": [text("word " * (100 + length), **MARK)], "seed": 1}
            if count_of((await send(server, body, COUNT)).body) % 16 == 0:
                return [message_of((await send(server, body)).body).usage for _ in range(2)]
        raise AssertionError("no prompt has whole blocks")

    created, found = served(default_model_path, work=work)
    assert created.cache_creation_input_tokens == found.cache_read_input_tokens
    assert created.input_tokens == 16 == found.input_tokens  # the last block is computed each time


def test_a_marked_conversation_is_one_session_and_a_title_request_another(default_model_path: Path) -> None:
    user = {"metadata": {"user_id": '{"session_id": "1"}'}}
    marked = {"system": [text("Be brief.", **MARK)], **user}
    longer = [
        *HELLO,
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": [text("x", **MARK)]},
    ]

    async def work(server: InProcess) -> list[str | None]:
        found = recorded(server)
        for body in (
            marked,
            {"system": "Be brief.", "messages": longer, **user},
            {**marked, "metadata": {"user_id": "another"}},
            {**marked, "system": [text("Name the topic.", **MARK)]},
            {"system": "Be brief.", **user},
            {**marked, "session_id": "given"},
            MARK,
            {**MARK, "messages": longer},
        ):
            assert (await send(server, body)).status == 200
        return [one.session_id for one in found]

    first, second, other_user, title, unmarked, given, automatic, next_turn = served(
        default_model_path, work=work
    )
    assert first == second != other_user and title not in (None, first, other_user)
    assert unmarked is None and given == "given" and automatic == next_turn is not None
    assert len(first) < 64


def claude_code(turn: int) -> dict[str, Any]:
    """The request of a turn, with the structure of Claude Code's: the marks move, the billing header changes, and texts
    become lists of blocks and texts again."""
    last = turn == 0
    messages: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [text("Fix the tests. " * 30, **MARK)] if last else "Fix the tests. " * 30,
        },
        {"role": "system", "content": "The date is 2026-11-18. " * 10},
    ]
    for number in range(turn):
        name = f"toolu_{number}"
        read = result(name, f"line {number} of the file\n" * 40)
        messages += [
            {"role": "assistant", "content": [text(f"I read {number}."), call(name, path=f"{number}.py")]},
            {"role": "user", "content": [{**read, **MARK} if number == turn - 1 else read]},
        ]
    return {
        "system": [
            text(f"x-anthropic-billing-header: cc_version=2.1.326.{turn * 7}; cc_entrypoint=cli;"),
            text("You are a coding agent.", **MARK),
            text("Follow these rules. " * 60, **MARK),
        ],
        "messages": messages,
        "tools": [{**TOOL, "name": f"tool_{number}"} for number in range(3)],
        "metadata": {"user_id": '{"session_id": "1"}'},
        "thinking": {"type": "adaptive"},
        "stream": turn % 2 == 0,
    }


def test_from_its_second_request_on_claude_code_finds_its_unchanged_prompt_in_the_cache(
    default_model_path: Path,
) -> None:
    async def work(server: InProcess) -> list[float]:
        found = recorded(server)
        shares = []
        for turn in range(4):
            reply = await send(server, claude_code(turn))
            if turn % 2 == 0:
                cached = EventStream(reply.body).usage["cache_read_input_tokens"]
            else:
                cached = message_of(reply.body).usage.cache_read_input_tokens
            if turn:
                pairs = zip(found[-2].prompt, found[-1].prompt, strict=False)
                differs = [one != other for one, other in pairs]
                unchanged = differs.index(True) if True in differs else len(differs)
                assert unchanged >= 0.97 * len(found[-2].prompt), "the earlier prompt is repeated"
                shares.append(cached / unchanged)
        return shares

    shares = served(default_model_path, work=work)
    assert len(shares) == 3 and min(shares) >= 0.95, shares


# ---------------------------------------------------------------------- streams and errors


def test_a_stream_begins_with_the_message_and_ends_with_its_usage(shared_app: Send) -> None:
    body = {"max_tokens": 6, "seed": 3}
    whole = message_of(shared_app(body).body)
    reply = shared_app({**body, "stream": True})
    assert reply.headers[b"content-type"].startswith(b"text/event-stream")
    stream = EventStream(reply.body)
    assert stream.texts == [block.text for block in whole.content]
    assert stream.message["role"] == "assistant" and stream.message["id"].startswith("msg_")
    assert stream.usage["output_tokens"] == whole.usage.output_tokens
    assert stream.stop_reason == whole.stop_reason


LONG = {"max_tokens": 15_000, "stream": True, "seed": 1, "temperature": 0}


def test_an_error_during_the_stream_is_its_last_event(default_model_path: Path) -> None:
    async def work(server: InProcess) -> Reply:
        active = server.server.active_requests
        sending = asyncio.create_task(send(server, LONG))
        while not ServerStream.open_streams:
            await asyncio.sleep(0)
        active.cancel(active.described()[0]["id"])
        return await sending

    stream = EventStream(served(default_model_path, work=work, max_context=16_384).body)
    assert stream.error is not None and "operator" in stream.error["message"]


def test_a_client_that_disconnects_ends_its_answer(default_model_path: Path) -> None:
    async def work(server: InProcess) -> Reply:
        reply = await send(server, LONG, leaves_after=0.02)
        while server.server.engine.num_unfinished:
            await asyncio.sleep(0.01)
        return reply

    assert b"message_stop" not in served(default_model_path, work=work, max_context=16_384).body


def test_every_error_has_the_type_of_its_status(default_model_path: Path) -> None:
    good, limited = plain_keys(["good", "limited"])
    keys = (good, replace(limited, requests_per_minute=1))

    async def work(server: InProcess) -> list[Reply]:
        good: Any = {"key": "good"}
        own = server.server
        replies = [
            await send(server, {}),
            await send(server, {}, more_headers={b"x-api-key": b"wrong"}),
            await send(server, {}, more_headers={b"origin": b"https://evil.example"}, **good),
            await send(server, {"model": "unknown"}, **good),
            await send(server, {}, "/v1/messages/nowhere", more_headers={}, **good),
            await server.send(PATH, method="GET", **good),
            await send(server, {"system": "x" * 5000}, **good),
        ]
        assert (await send(server, {}, key="limited")).status == 200
        replies.append(await send(server, {}, key="limited"))
        own.is_draining = True
        replies += [await send(server, {}, **good), await send(server, {}, COUNT, more_headers={}, **good)]
        own.is_draining = False
        return replies

    replies = served(default_model_path, work=work, api_keys=keys, max_body_bytes=4096)
    expected = [
        (401, "authentication_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (503, "overloaded_error"),
        (503, "overloaded_error"),
    ]
    assert [reply.status for reply in replies] == [status for status, _ in expected]
    for reply, (status, kind) in zip(replies, expected, strict=True):
        error_of(reply.body, kind)
        assert status not in (429, 503) or int(reply.headers[b"retry-after"]) > 0


def test_both_forms_of_a_key_are_read(default_model_path: Path) -> None:
    async def work(server: InProcess) -> list[int]:
        own = {**VERSION, b"x-api-key": b"good"}
        return [
            (await send(server, {}, key="good")).status,
            (await send(server, {}, more_headers=own)).status,
            (await send(server, {}, COUNT, more_headers=own)).status,
            (await server.send("/v1/models", method="GET", more_headers=own)).status,
        ]

    assert served(default_model_path, work=work, api_keys=plain_keys(["good"])) == [200] * 4


def test_an_internal_error_is_an_api_error(default_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a fault of the server")

    monkeypatch.setattr(MessagesFormat, "parse", fail)
    [reply] = served(default_model_path, {})
    assert reply.status == 500 and "log" in error_of(reply.body, "api_error")
