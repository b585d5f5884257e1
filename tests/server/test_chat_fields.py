"""Fields that clients of the OpenAI API send to chat completions: each has its meaning, or is refused clearly."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from in_process import InProcess, Reply, in_process
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from server_process import Server as Real

from weft.request import MAX_NAME_LENGTH, InferenceRequest

CHAT = "/v1/chat/completions"
QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]
WORDS = "The weather in Paris is fine and the sun shines all day. "


def tool(name: str, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, **more}
    return {"type": "function", "function": {"name": name, "description": WORDS, "parameters": parameters}}


def custom(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": name, **more}}


def custom_call(**fields: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": 'a "b"\n', **fields}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


class Server:
    """One server for all tests of this file. It notes what reaches the engine."""

    def __init__(self, loop: asyncio.AbstractEventLoop, app: InProcess) -> None:
        self._loop, self._app = loop, app
        self.submitted: list[InferenceRequest] = []
        engine = app.server.engine
        submit = engine.submit

        async def noted(request: InferenceRequest, *arguments: Any, **options: Any) -> Any:
            self.submitted.append(request)
            return await submit(request, *arguments, **options)

        engine.submit = noted  # type: ignore[method-assign]

    def reply(self, path: str = CHAT, **fields: Any) -> Reply:
        body = {"messages": QUESTION, "max_tokens": 3, "temperature": 0, **fields}
        return self._loop.run_until_complete(self._app.send(path, json.dumps(body).encode()))

    def chat(self, **fields: Any) -> ChatCompletion:
        reply = self.reply(**fields)
        assert reply.status == 200, reply.body
        assert b"warning" not in {name.lower() for name in reply.headers}, "an unknown field"
        return ChatCompletion.model_validate(json.loads(reply.body), strict=True)

    def refusal(self, **fields: Any) -> tuple[str, str]:
        """The field that the error names, and its message."""
        reply = self.reply(**fields)
        assert reply.status == 400, reply.body
        error = json.loads(reply.body)["error"]
        return error["param"], error["message"]

    def request(self, **fields: Any) -> InferenceRequest:
        self.chat(**fields)
        return self.submitted[-1]


@pytest.fixture(scope="module")
def server(default_model_path: Path) -> Iterator[Server]:
    with asyncio.Runner() as runner:
        context = in_process(default_model_path, max_context=2048)
        app = runner.run(context.__aenter__())
        yield Server(runner.get_loop(), app)
        runner.run(context.__aexit__(None, None, None))


ACCEPTED: dict[str, Any] = {
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, *QUESTION]},
    "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 2},
    "reasoning_effort": {"reasoning_effort": "minimal"},
    "prompt_cache_key": {"prompt_cache_key": "k", "prompt_cache_retention": "24h"},
    "users": {"user": "u", "safety_identifier": "s"},
    "stored": {"store": True, "metadata": {"a": "b"}},
    "not stored": {"store": False, "metadata": None},
    "verbosity": {"verbosity": "low"},
    "service_tier": {"service_tier": "auto"},
    "modalities": {"modalities": ["text"]},
    "prediction": {"prediction": {"type": "content", "content": "It is fine."}},
    "no prediction": {"prediction": None, "audio": None, "web_search_options": None, "functions": None},
    "tools": {"tools": [tool("a")], "tool_choice": "auto", "parallel_tool_calls": False},
    "custom tools": {
        "tools": [
            tool("a"),
            custom("b", description="Takes text.", format={"type": "text"}),
            custom("c", format={"type": "grammar", "grammar": {"syntax": "regex", "definition": "[ab]+"}}),
            custom(
                "d", format={"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}
            ),
        ],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "custom", "custom": {"name": "b"}}]},
        },
    },
    "text format": {"response_format": {"type": "text"}},
    "sampling": {"seed": 3, "logit_bias": {"5": 1}, "top_p": 0.9, "stop": None, "n": 1, "logprobs": False},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "ann"}]},
    "an answer of the openai package": {
        "messages": [
            *QUESTION,
            {
                "role": "assistant",
                "content": "Fine.",
                "refusal": None,
                "annotations": [],
                "audio": None,
                "function_call": None,
                "tool_calls": None,
            },
            {"role": "user", "content": "Really?"},
        ]
    },
    "refusals": {
        "messages": [
            *QUESTION,
            {"role": "assistant", "content": None, "refusal": "I cannot."},
            {"role": "user", "content": "Why?"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]},
            {"role": "user", "content": "Why?"},
        ]
    },
}


@pytest.mark.parametrize("fields", ACCEPTED.values(), ids=ACCEPTED)
def test_fields_that_clients_send_are_accepted(server: Server, fields: dict[str, Any]) -> None:
    answer = server.chat(**fields)
    assert answer.usage is not None and answer.usage.completion_tokens <= 3


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"web_search_options": {}}, "web_search_options", "does not search the web"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio", "text only"),
        ({"modalities": ["text", "audio"]}, "modalities", "'audio'; allowed: text"),
        ({"functions": [{"name": "f"}]}, "functions", "replaced by tools"),
        ({"function_call": "auto"}, "function_call", "replaced by tool_choice"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "allowed: none, minimal, low, medium, high"),
        ({"verbosity": "chatty"}, "verbosity", "allowed: low, medium, high"),
        ({"prediction": {"type": "text", "content": "x"}}, "prediction", "allowed: content"),
        ({"prediction": {"type": "content"}}, "prediction", "send a string or a list of text parts"),
        ({"prediction": {"type": "content", "content": [{"type": "image"}]}}, "prediction", "text parts"),
        (
            {"prediction": {"type": "content", "content": "a b " * 4000}},
            "prediction",
            "has 2048; send a shorter",
        ),
        ({"prediction": "x"}, "prediction", "Expected `object"),
        ({"max_completion_tokens": 5}, "max_completion_tokens", "send one of them"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type", "allowed: function, custom"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom", "has no custom"),
        ({"tools": [custom("c d")]}, "tools[0].custom.name", "allowed: 1 to 64 letters"),
        ({"tools": [custom("c", format="text")]}, "tools[0].custom.format", "nor a grammar"),
        ({"tools": [custom("c", format={"type": "grammar"})]}, "tools[0].custom.format", "nor a grammar"),
        (
            {
                "tools": [
                    custom("c", format={"type": "grammar", "grammar": {"definition": "", "syntax": "x"}})
                ]
            },
            "tools[0].custom.format.syntax",
            "allowed: lark, regex",
        ),
        ({"messages": [*QUESTION, custom_call(input=3)]}, "messages", "custom has no input; send a string"),
        ({"messages": [*QUESTION, custom_call(name=None)]}, "messages", "no custom tool with a name"),
        ({"messages": [{"role": "function", "name": "f", "content": "1"}]}, "messages", "role tool"),
        (
            {"messages": [{"role": "assistant", "content": None, "function_call": {"name": "f"}}]},
            "messages",
            "send tool_calls",
        ),
    ],
)
def test_what_weft_cannot_do_is_refused_with_the_field_and_the_remedy(
    server: Server, fields: dict[str, Any], param: str, message: str
) -> None:
    named, text = server.refusal(**fields)
    assert named == param and message in text


def test_a_prompt_cache_key_is_the_session_unless_there_is_a_session_id(server: Server) -> None:
    assert server.request(prompt_cache_key="k").session_id == "k"
    assert server.request(prompt_cache_key="k", session_id="s").session_id == "s"
    assert server.request(prompt_cache_key="").session_id is None
    assert server.request(user="u", safety_identifier="v").session_id is None
    long = "k" * (MAX_NAME_LENGTH + 1)
    assert server.request(prompt_cache_key=long).session_id == hashlib.sha256(long.encode()).hexdigest()
    assert server.request(prompt_cache_key=long[:-1]).session_id == long[:-1]


def test_a_prediction_reaches_the_engine_as_tokens_without_bos(
    server: Server, default_tokenizer: Any
) -> None:
    text = WORDS * 3
    tokens = tuple(default_tokenizer.encode(text, add_bos=False))
    assert server.request(prediction={"type": "content", "content": text}).prediction == tokens
    parts = [{"type": "text", "text": WORDS}, {"type": "text", "text": WORDS * 2}]
    assert server.request(prediction={"type": "content", "content": parts}).prediction == tokens
    assert server.request(prediction={"type": "content", "content": ""}).prediction == ()
    # A long text is tokenised in a worker process.
    many = WORDS * 150
    prediction = server.request(prediction={"type": "content", "content": many}).prediction
    assert prediction == tuple(default_tokenizer.encode(many, add_bos=False))


def test_the_usage_has_the_tokens_of_a_prediction_if_there_was_one(server: Server) -> None:
    usage = server.chat(prediction={"type": "content", "content": "x"}).usage
    assert usage is not None and usage.completion_tokens_details is not None
    details = usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)
    other = server.chat().usage
    assert other is not None and other.completion_tokens_details is None
    stream = server.reply(
        prediction={"type": "content", "content": "x"}, stream=True, stream_options={"include_usage": True}
    ).body
    events = [event.removeprefix(b"data: ") for event in stream.strip().split(b"\n\n")][:-1]
    last = ChatCompletionChunk.model_validate(json.loads(events[-1]), strict=True)
    assert last.usage is not None and last.usage.completion_tokens_details == details


def test_with_its_own_answer_as_prediction_the_real_model_answers_the_same(real_server: Real) -> None:
    """How many draft tokens are checked depends on the processor."""

    def ask(**fields: Any) -> ChatCompletion:
        question = [{"role": "user", "content": "Write a short poem about the sea."}]
        body = {"messages": question, "max_tokens": 40, "temperature": 0, **fields}
        answer = real_server.client.post(CHAT, json=body).json()
        return ChatCompletion.model_validate(answer, strict=True)

    plain = ask()
    content = plain.choices[0].message.content
    for predicted in (content, "Something else entirely."):
        answer = ask(prediction={"type": "content", "content": predicted})
        assert answer.choices[0].message.content == content
        assert answer.usage is not None and answer.usage.completion_tokens_details is not None
        details = answer.usage.completion_tokens_details
        accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
        assert accepted is not None and 0 <= accepted < answer.usage.completion_tokens
        assert rejected is not None and rejected >= 0


def test_developer_messages_are_system_messages_for_a_template_without_the_role(server: Server) -> None:
    prompts = [
        server.request(messages=[{"role": role, "content": "Be brief."}, *QUESTION]).prompt
        for role in ("developer", "system")
    ]
    assert prompts[0] == prompts[1]


def test_a_text_and_a_list_of_parts_give_the_same_prompt(server: Server) -> None:
    history = [
        {"role": "system", "content": "Be brief."},
        *QUESTION,
        {"role": "assistant", "content": "Fine."},
        {"role": "user", "content": "Really?"},
    ]
    parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in history]
    assert server.request(messages=parts).prompt == server.request(messages=history).prompt


def test_reordered_tools_are_prefix_hits(server: Server) -> None:
    tools = [tool(name) for name in ("read", "write", "bash", "glob")]
    first = server.chat(tools=tools, cache_salt="order").usage
    second = server.chat(tools=tools[::-1], cache_salt="order").usage
    assert first is not None and second is not None and second.prompt_tokens_details is not None
    assert second.prompt_tokens == first.prompt_tokens
    cached = second.prompt_tokens_details.cached_tokens or 0
    assert cached >= 0.95 * (second.prompt_tokens - 16), "all complete blocks"


ALLOWED: Any = {"type": "function", "function": {"name": "b"}}


def allowed_tools(mode: Any, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def test_allowed_tools_restrict_the_calls_and_leave_the_prompt_as_it_is(server: Server) -> None:
    tools = [tool("a"), tool("b")]
    every = server.request(tools=tools, tool_choice="required")
    some = server.request(tools=tools, tool_choice=allowed_tools("required", ALLOWED))
    assert some.prompt == every.prompt
    assert every.params.grammar is not None and some.params.grammar is not None
    assert '\\"a\\"' in every.params.grammar.definition and '\\"b\\"' in every.params.grammar.definition
    assert '\\"a\\"' not in some.params.grammar.definition and '\\"b\\"' in some.params.grammar.definition
    auto = server.request(tools=tools, tool_choice=allowed_tools("auto", ALLOWED))
    assert auto.prompt == every.prompt and auto.params.grammar is None


@pytest.mark.parametrize(
    "choice",
    [
        allowed_tools("required", {"type": "function", "function": {"name": "c"}}),
        allowed_tools("auto"),
        allowed_tools("none", ALLOWED),
        allowed_tools(["auto"], ALLOWED),
        allowed_tools("auto", 5),
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": 5}},
        {"type": "allowed_tools"},
    ],
)
def test_invalid_allowed_tools_are_refused(server: Server, choice: Any) -> None:
    assert server.refusal(tools=[tool("a"), tool("b")], tool_choice=choice)[0] == "tool_choice"
