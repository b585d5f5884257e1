"""The openai package: plain, asynchronous, streamed, structured, with tools, and its errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from client_questions import QUESTION, TOOL

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")


class Person(pydantic.BaseModel):  # type: ignore[name-defined,misc]
    name: str
    age: int


@pytest.fixture(scope="module")
def client(base_url: str) -> Any:
    return openai.OpenAI(base_url=base_url, api_key="secret", max_retries=0)


def test_an_answer_and_its_stream_are_what_the_server_says(client: Any, model: str, expected: str) -> None:
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=12)
    assert answer.choices[0].message.content == expected
    assert answer.usage.completion_tokens > 0
    with client.chat.completions.stream(
        model=model, messages=QUESTION, temperature=0, max_tokens=12
    ) as events:
        for _ in events:
            pass
        assert events.get_final_completion().choices[0].message.content == expected


def test_asynchronous_streams_at_once_are_what_the_server_says(
    base_url: str, model: str, expected: str
) -> None:
    async def ask(client: Any) -> str:
        stream = await client.chat.completions.create(
            model=model, messages=QUESTION, temperature=0, max_tokens=12, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_four_times() -> list[str]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="secret", max_retries=0) as client:
            return list(await asyncio.gather(*(ask(client) for _ in range(4))))

    assert asyncio.run(ask_four_times()) == [expected] * 4


def test_errors_are_those_that_the_package_knows(client: Any, base_url: str, model: str) -> None:
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=base_url, api_key="wrong", max_retries=0).models.list()
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4", messages=QUESTION)
    assert unknown.value.code == "model_not_found" and unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=model, messages=QUESTION, temperature=-1)
    assert bad.value.param == "temperature"


@pytest.mark.usefixtures("structured")
def test_parse_gives_an_object_of_the_class_that_was_asked_for(client: Any, model: str) -> None:
    messages = [{"role": "user", "content": "Tell me about a person called Ada, aged 36."}]
    answer = client.chat.completions.parse(
        model=model, messages=messages, response_format=Person, max_tokens=120, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_call_has_the_name_and_arguments_of_the_tool(client: Any, model: str, choice: Any) -> None:
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    fields = {"model": model, "messages": messages, "tools": [TOOL], "tool_choice": choice, "max_tokens": 80}
    answer = client.chat.completions.create(**fields, temperature=0)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather" and set(json.loads(call.function.arguments)) == {"city"}
    stream = client.chat.completions.create(**fields, temperature=0, stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    parts = [part for delta in deltas for part in delta.tool_calls or []]
    assert "".join(part.function.arguments or "" for part in parts) == call.function.arguments
    assert parts[0].function.name == "get_weather"
