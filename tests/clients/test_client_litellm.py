"""litellm, which many tools call models through."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from client_questions import QUESTION, TOOL

litellm = pytest.importorskip("litellm")
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


def test_an_answer_is_what_the_server_says(fields: dict[str, Any], expected: str) -> None:
    answer = litellm.completion(**fields)
    assert answer.choices[0].message.content == expected
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_is_what_the_server_says(fields: dict[str, Any], expected: str) -> None:
    chunks = litellm.completion(**fields, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected


def test_an_asynchronous_answer_is_what_the_server_says(fields: dict[str, Any], expected: str) -> None:
    answer = asyncio.run(litellm.acompletion(**fields))
    assert answer.choices[0].message.content == expected


def test_text_completions_work_too(fields: dict[str, Any], base_url: str, model: str) -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{model}",
        api_base=base_url,
        api_key="secret",
        prompt="The capital of France is",
        max_tokens=4,
        temperature=0,
    )
    assert "Paris" in answer.choices[0].text


def test_errors_are_those_that_the_package_knows(fields: dict[str, Any]) -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**{**fields, "api_key": "wrong"})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**fields, "messages": [{"role": "user", "content": "word " * 3000}]})


@pytest.mark.usefixtures("tools")
def test_a_forced_call_has_the_name_of_the_tool(fields: dict[str, Any]) -> None:
    answer = litellm.completion(**{**fields, "max_tokens": 80}, tools=[TOOL], tool_choice="required")
    assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"
