"""The openai package: completions, asynchronous, streamed and structured ones, tools, and errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from client_questions import ABOUT_A_PERSON, ABOUT_WEATHER, NAMED, QUESTION, TOOL, Person


@pytest.fixture(scope="module")
def client(base_url: str) -> Any:
    return openai.OpenAI(base_url=base_url, api_key="secret", max_retries=0)


def test_a_chat_and_its_stream_return_the_expected_answer(client: Any, model: str, expected: str) -> None:
    fields = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 12}
    answer = client.chat.completions.create(**fields)
    assert answer.choices[0].message.content == expected
    assert answer.usage.completion_tokens > 0
    with client.chat.completions.stream(**fields) as events:
        for _ in events:
            pass
        assert events.get_final_completion().choices[0].message.content == expected


def test_concurrent_asynchronous_streams_return_the_expected_answer(
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


def test_errors_have_the_exception_classes_of_the_package(client: Any, base_url: str, model: str) -> None:
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=base_url, api_key="wrong", max_retries=0).models.list()
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    assert unknown.value.code == "model_not_found" and unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=model, messages=QUESTION, temperature=-1)
    assert bad.value.param == "temperature"
    with openai.OpenAI(base_url=base_url, api_key="once", max_retries=0) as limited:
        assert model in [one.id for one in limited.models.list()]
        limited.completions.create(model=model, prompt="x", max_tokens=1)
        with pytest.raises(openai.RateLimitError) as late:
            limited.completions.create(model=model, prompt="x", max_tokens=1)
    assert late.value.code == "rate_limit_exceeded" and int(late.value.response.headers["retry-after"]) > 0


def test_a_name_of_its_vendor_is_an_alias_of_the_served_model(client: Any, model: str) -> None:
    answer = client.chat.completions.create(model="gpt-4", messages=QUESTION, max_tokens=1)
    assert answer.model == model


def test_parse_returns_an_object_of_the_requested_class(client: Any, model: str) -> None:
    fields = {"model": model, "messages": ABOUT_A_PERSON, "response_format": Person}
    answer = client.chat.completions.parse(**fields, max_tokens=120, temperature=0)
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Person)
    with client.chat.completions.stream(**fields, max_tokens=120, temperature=0) as events:
        assert events.get_final_completion().choices[0].message.parsed == parsed


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call_has_the_name_and_arguments_of_the_tool(client: Any, model: str, choice: Any) -> None:
    fields = {"model": model, "tools": [TOOL], "max_tokens": 80, "temperature": 0}
    request = {**fields, "messages": ABOUT_WEATHER, "tool_choice": choice}
    message = client.chat.completions.create(**request).choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "get_weather" and set(json.loads(call.function.arguments)) == {"city"}
    with client.chat.completions.stream(**request) as events:
        (streamed,) = events.get_final_completion().choices[0].message.tool_calls
    assert (streamed.function.name, streamed.function.arguments) == (
        call.function.name,
        call.function.arguments,
    )
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    after = client.chat.completions.create(**fields, messages=[*ABOUT_WEATHER, message, result])
    assert after.choices[0].message.content or after.choices[0].message.tool_calls
