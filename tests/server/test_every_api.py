"""The same requests through every API: the answers, their usage, their errors and their ends must be the same.

The model is scripted: it answers a prompt with a prepared text, through the real scheduler, detokeniser and parsers.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from api_shapes import problem_of_stream
from every_api import APIS, Answer, Api, Tool, Turn, formatted
from in_process import InProcess, Reply, in_process

from weft.config import ServingEngineConfig
from weft.server.admission.keys import plain_keys
from weft.server.http.byte_budget import ByteBudget

SCRIPTED = Path(__file__).parents[1] / "scripted"
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}{{ '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
THOUGHT = "<think>\nIt asks.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "é.txt", "lines": [1, 2]}}\n</tool_call>'
CUT = '<tool_call>\n{"name": "read", "arguments": {"path": "a long path that ends too early'
BROKEN = '<tool_call>\n{"name": "read", "arguments": {"path": }'
RULES: dict[str, dict[str, Any]] = {
    "plain": {"text": "Rome is a city. It has seven hills\nand a river: 🧵 é."},
    "empty": {"text": ""},
    "think": {"text": f"{THOUGHT}It is Rome."},
    "only": {"text": "<think>\nNothing else.\n</think>"},
    "call": {"text": "I will read.\n", "calls": [["read", {"path": "é.txt", "lines": [1, 2]}]]},
    "parallel": {"calls": [["read", {"path": "a"}], ["list", {}], ["read", {"path": "b"}]]},
    "both": {"text": THOUGHT + "Reading.", "calls": [["read", {"path": "a"}]]},
    "cut": {"text": CUT},
    "broken": {"text": f"{BROKEN}\n</tool_call>"},
    "fails": {"text": "Rome is a city. It has seven hills.", "fails_at": 5},
    "letters": {"text": '"' + "river" * 20 + '"'},
    "amid": {"text": f"I will read.\n{BROKEN}\n</tool_call>\nI have read."},
}
TOOLS = (
    Tool("read", "Reads a file.", {"type": "object", "properties": {"path": {"type": "string"}}}),
    Tool("list", "Lists files.", {"type": "object", "properties": {}}),
)
EVERY = pytest.mark.parametrize("api", APIS, ids=str)


def asks(word: str) -> list[Turn]:
    return [Turn("system", "Be short."), Turn("user", f"The case {word} please.")]


@dataclass
class Running:
    server: InProcess
    loop: asyncio.AbstractEventLoop

    def send(self, api: Api, *arguments: Any, **options: Any) -> Reply:
        content = json.dumps(api.body(*arguments, **options)).encode()
        reply = self.loop.run_until_complete(self.server.send(api.path, content))
        assert reply.status == 200, reply.body
        return reply

    def ask(self, api: Api, *arguments: Any, **options: Any) -> Answer:
        return api.whole(self.send(api, *arguments, **options).body)

    def stream(self, api: Api, *arguments: Any, **options: Any) -> Answer:
        return api.streamed(self.send(api, *arguments, stream=True, **options).body)


@pytest.fixture(scope="module")
def scripted(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("scripted")
    rules = [{"contains": [f"The case {word} please."], **rule} for word, rule in RULES.items()]
    (folder / "script.json").write_text(json.dumps({"rules": rules}))
    (folder / "template.jinja").write_text(TEMPLATE)
    environment = {
        "WEFT_TEST_SCRIPT": str(folder / "script.json"),
        "PYTHONPATH": os.pathsep.join([str(SCRIPTED), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    loop = asyncio.new_event_loop()
    running = in_process(
        default_model_path,
        max_context=2048,
        backend="scripted",
        backend_options={"checkpoint": str(default_model_path)},
        chat_template=str(folder / "template.jinja"),
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        server = loop.run_until_complete(running.__aenter__())
    yield Running(server, loop)
    loop.run_until_complete(running.__aexit__(None, None, None))
    loop.close()


# ---------------------------------------------------------------------- answers


@EVERY
@pytest.mark.parametrize("word", ["plain", "empty", "think", "only", "call", "parallel", "both"])
def test_the_body_and_the_joined_stream_are_equal(scripted: Running, api: Api, word: str) -> None:
    whole, streamed = (ask(api, asks(word), TOOLS, max_tokens=200) for ask in (scripted.ask, scripted.stream))
    assert whole == streamed
    expected = {
        "plain": (RULES["plain"]["text"], "", [], "stop"),
        "empty": ("", "", [], "stop"),
        "think": ("It is Rome.", "It asks.", [], "stop"),
        "only": ("", "Nothing else.", [], "stop"),
        "call": ("I will read.", "", [("read", {"path": "é.txt", "lines": [1, 2]})], "calls"),
        "parallel": ("", "", [("read", {"path": "a"}), ("list", {}), ("read", {"path": "b"})], "calls"),
        "both": ("Reading.", "It asks.", [("read", {"path": "a"})], "calls"),
    }
    assert (whole.text, whole.thoughts, whole.calls, whole.stop) == expected[word]


@EVERY
@pytest.mark.parametrize("word", ["broken", "amid"])
def test_the_text_of_a_call_that_is_no_json_is_kept_in_the_order_of_the_model(
    scripted: Running, api: Api, word: str
) -> None:
    whole, streamed = (ask(api, asks(word), TOOLS, max_tokens=200) for ask in (scripted.ask, scripted.stream))
    text = words(RULES[word]["text"])
    broken = [("read", '{"path": }')]
    if api.family == "openai":
        assert whole == streamed
        assert (whole.calls, words(whole.text)) == (broken, text.replace(words(BROKEN), ""))
        return
    assert (whole.calls, words(whole.text)) == ([], text)
    if api.family == "ollama":
        assert whole == streamed
    else:  # the stream has begun a block for the call before it turns out to be text
        assert (streamed.calls, words(streamed.text)) == (broken, text.replace(words(BROKEN), ""))


ONE_CALL: dict[str, dict[str, Any]] = {
    "openai": {"parallel_tool_calls": False},
    "anthropic": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
}


@pytest.mark.parametrize("api", [api for api in APIS if api.family in ONE_CALL], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_an_answer_ends_after_its_first_call(
    scripted: Running, api: Api, stream: bool
) -> None:
    body = {**api.body(asks("parallel"), TOOLS, max_tokens=200, stream=stream), **ONE_CALL[api.family]}
    reply = scripted.loop.run_until_complete(scripted.server.send(api.path, json.dumps(body).encode()))
    answer = (api.streamed if stream else api.whole)(reply.body)
    assert (answer.calls, answer.stop) == ([("read", {"path": "a"})], "calls")


def words(text: str) -> str:
    """The text without white space, which a parser drops around calls."""
    return "".join(text.split())


@EVERY
def test_a_call_that_the_token_limit_cuts_is_reported_as_cut_and_its_text_is_kept(
    scripted: Running, api: Api
) -> None:
    for max_tokens in (4, 14, 22):
        whole, streamed = (
            ask(api, asks("cut"), TOOLS, max_tokens=max_tokens) for ask in (scripted.ask, scripted.stream)
        )
        for answer in (whole, streamed):
            assert answer.stop == "length" and answer.completion_tokens == max_tokens
            # The text of the model, or a call whose arguments no client takes for complete ones.
            found = answer.text
            if answer.calls:
                [(name, arguments)] = answer.calls
                assert (name, found) == ("read", "") and isinstance(arguments, str)
                found = CUT.partition('{"path"')[0] + arguments
            assert found and CUT.startswith(found), answer
            assert max_tokens < 22 or "a long path" in found, answer
        if api.family == "anthropic":  # a stream has begun a block for the call
            assert whole.text.endswith(streamed.calls[0][1] if streamed.calls else streamed.text)
            assert not whole.calls
        else:
            assert whole == streamed


@EVERY
def test_an_answer_is_cut_at_the_token_limit_and_before_a_stop_string(scripted: Running, api: Api) -> None:
    for ask in (scripted.ask, scripted.stream):
        cut = ask(api, asks("plain"), max_tokens=3)
        assert (cut.stop, cut.completion_tokens) == ("length", 3)
        stopped = ask(api, asks("plain"), stop=["seven hills\nand", "Oslo"])
        assert (stopped.text.rstrip(), stopped.stop) == ("Rome is a city. It has", "stop")


@EVERY
def test_a_token_limit_beyond_the_context_is_lowered(scripted: Running, api: Api) -> None:
    for ask in (scripted.ask, scripted.stream):
        assert ask(api, asks("plain"), max_tokens=1_000_000).text == RULES["plain"]["text"]


CONVERSATIONS: dict[str, tuple[list[Turn], Sequence[Tool]]] = {
    "text": ([*asks("plain"), Turn("assistant", "Yes."), Turn("user", "The case plain please.")], ()),
    "no system": ([Turn("user", "The case plain please.")], ()),
    "tools": (asks("plain"), TOOLS),
    "calls": (
        [
            *asks("call"),
            Turn("assistant", "I will read."),
            Turn("call", '{"path": "é.txt", "lines": [1, 2]}', "c1", "read"),
            Turn("call", "{}", "c2", "list"),
            Turn("result", "one", "c1", "read"),
            Turn("result", "two", "c2", "list"),
            Turn("user", "The case plain please."),
        ],
        TOOLS,
    ),
    "thoughts": (
        [
            *asks("both"),
            Turn("thought", "It asks."),
            Turn("call", '{"path": "a"}', "c1", "read"),
            Turn("result", "The case plain please.", "c1", "read"),
        ],
        TOOLS,
    ),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_same_conversation_has_the_same_tokens_and_the_same_answer_in_every_api(
    scripted: Running, name: str
) -> None:
    turns, tools = CONVERSATIONS[name]
    answers = {str(api): scripted.ask(api, turns, tools) for api in APIS}
    expected = answers.pop(str(APIS[0]))
    assert expected.text == RULES["plain"]["text"] and expected.prompt_tokens > 10
    assert answers == dict.fromkeys(answers, expected)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_counting_route_counts_the_prompt_tokens_of_the_answer(scripted: Running, name: str) -> None:
    turns, tools = CONVERSATIONS[name]
    for api in APIS:
        if api.counting is None:
            continue
        path, field = api.counting
        body = api.body(turns, tools)
        reply = scripted.loop.run_until_complete(scripted.server.send(path, json.dumps(body).encode()))
        assert json.loads(reply.body)[field] == scripted.ask(api, turns, tools).prompt_tokens, api


# ---------------------------------------------------------------------- errors and ends, with an engine on noop

Work = Callable[[InProcess], Awaitable[None]]
LONG: dict[str, Any] = {"max_tokens": 3500}
TOKEN = {"openai": b'"delta":', "anthropic": b"content_block_delta", "ollama": b'"content":"'}


def run(model_path: Path, work: Work, **settings: Any) -> None:
    async def main() -> None:
        async with in_process(model_path, **{"max_context": 4096, **settings}) as server:
            await work(server)
            assert await free(server), "something is held"
            budgets = [one for one in gc.get_objects() if isinstance(one, ByteBudget)]
            assert budgets and not any(one.num_bytes for one in budgets)

    asyncio.run(main())


async def free(server: InProcess) -> bool:
    """Waits until no request is active and no answer unfinished. Returns False if that takes a minute."""
    for _ in range(6000):
        if not (server.server.engine.num_unfinished or len(server.server.active_requests)):
            return True
        await asyncio.sleep(0.01)
    return False


async def post(server: InProcess, api: Api, fields: dict[str, Any] | None = None, **options: Any) -> Reply:
    body = {**api.body(asks("plain")), **(fields or {})}
    return await server.send(api.path, json.dumps(body).encode(), **options)


def test_errors_before_and_after_the_body_have_the_status_and_the_shape_of_the_api(
    default_model_path: Path,
) -> None:
    async def work(server: InProcess) -> None:
        for api in APIS:
            for reply, status in (
                (await post(server, api), 401),
                (await post(server, api, key="wrong"), 401),
                (await post(server, api, {"model": "no-such-model"}, key="a"), 404),
                (await post(server, api, {"temperature": "x", "options": "x"}, key="a"), 400),
                (await post(server, api, {"padding": "x" * 200_000}, key="a"), 413),
                (await server.send(api.path, b"{", key="a"), 400),
                (await server.send(api.path, b"", key="a", method="PUT"), 405),
                (
                    await server.send(f"{api.path}/", json.dumps(api.body(asks("plain"))).encode(), key="a"),
                    404,
                ),
            ):
                assert reply.status == status, (api.path, reply)
                assert api.error(reply.body)
            long = [Turn("user", "word " * 6000)]
            reply = await server.send(api.path, json.dumps(api.body(long)).encode(), key="a")
            message = api.error(reply.body)
            assert reply.status == 400 and "4095" in message and "60" in message, message

    run(default_model_path, work, api_keys=plain_keys(["a"]), max_body_bytes=100_000)


def test_a_full_queue_is_a_429_and_a_draining_server_a_503_each_with_retry_after(
    default_model_path: Path,
) -> None:
    async def work(server: InProcess) -> None:
        first = asyncio.create_task(post(server, APIS[0], {**LONG, "ignore_eos": True}, leaves_after=1e9))
        while not len(server.server.active_requests):
            await asyncio.sleep(0)
        for status in (429, 503):
            server.server.is_draining = status == 503
            for api in APIS:
                for stream in (False, True):
                    reply = await post(server, api, {"stream": stream})
                    assert reply.status == status and int(reply.headers[b"retry-after"]) >= 1, reply
                    assert api.error(reply.body)
        server.server.is_draining = False
        first.cancel()
        await asyncio.wait([first])

    run(default_model_path, work, max_requests=1, seconds_per_step=0.01)


def test_a_client_that_leaves_at_any_stage_leaves_nothing_behind(default_model_path: Path) -> None:
    """An answer takes longer than `free` waits, so it must have been cancelled."""

    async def leave(server: InProcess, api: Api) -> None:
        long = api.body(asks("plain"), **LONG)
        body, stream = (json.dumps({**long, "stream": one}).encode() for one in (False, True))
        begun = {"openai": b"{", "anthropic": b"message_start", "ollama": b"{"}[api.family]
        for content in (body, stream):
            for leaves_after in (0.0, 0.002, 0.05):
                await server.send(api.path, content, leaves_after)
                assert await free(server), leaves_after
        for leaves_at in (begun, TOKEN[api.family]):
            await server.send(api.path, stream, leaves_at=leaves_at)
            assert await free(server), leaves_at
        assert (await post(server, api)).status == 200

    async def work(server: InProcess) -> None:
        for api in APIS:
            await leave(server, api)

    run(default_model_path, work, seconds_per_step=0.02)


def test_a_deadline_is_a_504_or_the_last_event_of_a_stream(default_model_path: Path) -> None:
    async def ask(server: InProcess, api: Api) -> None:
        body = {**api.body(asks("plain"), **LONG), "deadline": 0.4}
        reply = await server.send(api.path, json.dumps(body).encode())
        assert reply.status == 504 and api.error(reply.body)
        reply = await server.send(api.path, json.dumps({**body, "stream": True}).encode())
        assert reply.status == 200
        text, message = api.failed(reply.body)
        assert text and "deadline" in message

    async def work(server: InProcess) -> None:
        await asyncio.gather(*(ask(server, api) for api in APIS))

    run(default_model_path, work, seconds_per_step=0.005)


def test_an_engine_that_dies_ends_every_stream_with_the_error_of_its_api(default_model_path: Path) -> None:
    async def work(server: InProcess) -> None:
        bodies = [json.dumps(api.body(asks("plain"), stream=True, **LONG)).encode() for api in APIS]
        sent = [
            asyncio.create_task(server.send(api.path, body)) for api, body in zip(APIS, bodies, strict=True)
        ]
        whole = [asyncio.create_task(post(server, api, json.loads(body) | {"stream": False})) for api, body in zip(APIS, bodies, strict=True)]  # fmt: skip
        engine = server.server.engine
        while engine.num_unfinished < 2 * len(APIS):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)  # the status of a stream is sent after 0.25 s
        assert engine._process is not None
        engine._process.kill()
        for api, reply in zip(APIS, await asyncio.gather(*sent), strict=True):
            assert reply.status == 200
            _, message = api.failed(reply.body)
            assert message
        for api, reply in zip(APIS, await asyncio.gather(*whole), strict=True):
            assert reply.status in (500, 503) and api.error(reply.body)

    run(default_model_path, work, seconds_per_step=0.005)


def message_of_end(api: Api, reply: Reply, status: int) -> str:
    """The error of a stream. If it fails in its first 0.25 s, it has a status in place of an event."""
    assert reply.status in (200, status), reply
    return api.failed(reply.body)[1] if reply.status == 200 else api.error(reply.body)


@EVERY
def test_40_logits_that_are_no_numbers_fail_that_request_alone(scripted: Running, api: Api) -> None:
    def reply(word: str, stream: bool) -> Awaitable[Reply]:
        body = json.dumps(api.body(asks(word), stream=stream)).encode()
        return scripted.server.send(api.path, body)

    async def ask() -> list[Reply]:
        return await asyncio.gather(
            *(reply(*one) for one in (("fails", True), ("fails", False), ("plain", False)))
        )

    streamed, whole, other = scripted.loop.run_until_complete(ask())
    assert message_of_end(api, streamed, 500)
    assert whole.status == 500 and api.error(whole.body)
    assert api.whole(other.body).text == RULES["plain"]["text"]


@EVERY
def test_29_a_grammar_that_cannot_be_followed_any_further_fails_its_request(
    scripted: Running, api: Api
) -> None:
    """It compiles, but after a few letters the state of the parser exceeds its limit."""
    endless = formatted(api.path, {"type": "string", "pattern": "^(([a-z]{0,999}){0,999}){0,999}$"})
    for stream in (False, True):
        body = json.dumps(api.body(asks("letters"), stream=stream, **endless)).encode()
        reply = scripted.loop.run_until_complete(scripted.server.send(api.path, body))
        assert stream or reply.status == 400
        assert "cannot be followed any further" in message_of_end(api, reply, 400)


def test_39_a_reader_that_is_too_slow_gets_the_error_of_its_api_in_the_end(default_model_path: Path) -> None:
    async def ask(server: InProcess, api: Api) -> None:
        body = {**api.body(asks("plain"), stream=True, **LONG), "ignore_eos": True}
        reads = asyncio.Event()
        asking = asyncio.create_task(server.send(api.path, json.dumps(body).encode(), reads_after=reads))
        engine = server.server.engine
        while not engine.num_unfinished:
            await asyncio.sleep(0.001)
        while engine.num_unfinished:  # its answer is cancelled, though it has read nothing
            await asyncio.sleep(0.001)
        assert not asking.done()
        reads.set()
        reply = await asking
        assert "too slow" in message_of_end(api, reply, 408)

    async def work(server: InProcess) -> None:
        for api in APIS:
            await asyncio.wait_for(ask(server, api), 60)

    run(default_model_path, work, engine=ServingEngineConfig(stream_buffer=16), seconds_per_step=0.005)


SIGNS_OF_LIFE = {
    "/v1/chat/completions": (b'"role":"assistant"', b'"delta":{"content":""}', 0),
    "/v1/responses": (b"event: response.created", b"event: response.in_progress", 1),
    "/v1/messages": (b"event: message_start", b"event: ping", 1),
    "/api/chat": (b'"role":"assistant"', b'"done":false', 1),
    "/v1/completions": (b'"text":""', b'"text":""', 1),
    "/api/generate": (b'"response":""', b'"done":false', 1),
}
"""What a stream begins with, the event that clients count as a sign of life (some do not count comments), and how many
of these every stream has."""


def test_while_a_prompt_is_computed_every_stream_begins_and_repeats_an_event_that_clients_count(
    default_model_path: Path,
) -> None:
    bodies = {api.path: api.body(asks("plain"), max_tokens=1, stream=True) for api in APIS}
    bodies["/v1/completions"] = {"prompt": "x", "max_tokens": 1, "stream": True}
    bodies["/api/generate"] = {"prompt": "x", "options": {"num_predict": 1}}

    async def ask(server: InProcess, path: str) -> None:
        first, sign, usual = SIGNS_OF_LIFE[path]
        sent = (await server.send(path, json.dumps(bodies[path]).encode())).body
        assert problem_of_stream(path, sent) is None
        # One may be that of the token.
        assert first in sent[:500] and sent.count(sign) >= usual + 2, sent

    async def work(server: InProcess) -> None:
        await asyncio.gather(*(ask(server, path) for path in SIGNS_OF_LIFE))

    # The first step takes several times the longest silence.
    run(default_model_path, work, seconds_per_step=3.5, silence_seconds=1.0)
