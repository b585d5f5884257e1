"""litellm: completions, streams, schemas, tools and errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
import pytest
from client_questions import ABOUT_A_PERSON, ABOUT_WEATHER, NAMED, QUESTION, TOOL, Person

litellm.telemetry = False


@pytest.fixture(scope="module")
def fields(base_url: str, model: str) -> dict[str, Any]:
    return {
        "model": f"openai/{model}",
        "api_base": base_url,
        "api_key": "secret",
        "messages": QUESTION,
        "max_tokens": 12,
        "temperature": 0,
        "num_retries": 0,
    }


def test_a_completion_returns_the_expected_answer(fields: dict[str, Any], expected: str) -> None:
    answer = litellm.completion(**fields)
    assert answer.choices[0].message.content == expected
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_returns_the_expected_answer(fields: dict[str, Any], expected: str) -> None:
    chunks = litellm.completion(**fields, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected


def test_an_asynchronous_completion_returns_the_expected_answer(
    fields: dict[str, Any], expected: str
) -> None:
    answer = asyncio.run(litellm.acompletion(**fields))
    assert answer.choices[0].message.content == expected


def test_text_completions_work(base_url: str, model: str) -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{model}",
        api_base=base_url,
        api_key="secret",
        prompt="The capital of France is",
        max_tokens=4,
        temperature=0,
    )
    assert "Paris" in answer.choices[0].text


def test_errors_have_the_exception_classes_of_the_package(fields: dict[str, Any]) -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**{**fields, "api_key": "wrong"})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**fields, "messages": [{"role": "user", "content": "word " * 3000}]})


def test_a_schema_is_followed_streamed_or_not(fields: dict[str, Any]) -> None:
    request = {**fields, "messages": ABOUT_A_PERSON, "max_tokens": 120, "response_format": Person}
    text = litellm.completion(**request).choices[0].message.content
    Person.model_validate_json(text)
    chunks = litellm.completion(**request, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call_has_the_name_and_arguments_of_the_tool(fields: dict[str, Any], choice: Any) -> None:
    request = {
        **fields,
        "messages": ABOUT_WEATHER,
        "max_tokens": 80,
        "tools": [TOOL],
        "tool_choice": choice,
    }
    (call,) = litellm.completion(**request).choices[0].message.tool_calls
    assert call.function.name == "get_weather" and set(json.loads(call.function.arguments)) == {"city"}
    chunks = list(litellm.completion(**request, stream=True))
    (streamed,) = litellm.stream_chunk_builder(chunks, ABOUT_WEATHER).choices[0].message.tool_calls
    assert (streamed.function.name, streamed.function.arguments) == (
        call.function.name,
        call.function.arguments,
    )
