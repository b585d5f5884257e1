"""langchain-openai: invoke, stream, batch, structured output and tools."""

from __future__ import annotations

from typing import Any

import pytest
from client_questions import QUESTION, TOOL

langchain_openai = pytest.importorskip("langchain_openai")
pydantic = pytest.importorskip("pydantic")


class Person(pydantic.BaseModel):  # type: ignore[name-defined,misc]
    name: str
    age: int


@pytest.fixture(scope="module")
def chat(base_url: str, model: str) -> Any:
    def build(max_tokens: int = 12) -> Any:
        return langchain_openai.ChatOpenAI(
            model=model,
            base_url=base_url,
            api_key="secret",
            temperature=0,
            max_tokens=max_tokens,
            max_retries=0,
        )

    return build


def test_an_answer_a_stream_and_a_batch_are_what_the_server_says(chat: Any, expected: str) -> None:
    text = QUESTION[0]["content"]
    answer = chat().invoke(text)
    assert answer.content == expected and answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in chat().stream(text)) == expected
    assert [one.content for one in chat().batch([text, text])] == [expected] * 2


def test_plain_completions_work_too(base_url: str, model: str) -> None:
    plain = langchain_openai.OpenAI(
        model=model, base_url=base_url, api_key="secret", temperature=0, max_tokens=4
    )
    assert "Paris" in plain.invoke("The capital of France is")


@pytest.mark.usefixtures("structured")
def test_structured_output_is_an_object_of_the_class(chat: Any) -> None:
    asking = chat(120).with_structured_output(Person, method="json_schema")
    assert isinstance(asking.invoke("Tell me about a person called Ada, aged 36."), Person)


@pytest.mark.usefixtures("tools")
def test_a_bound_tool_is_called(chat: Any) -> None:
    answer = chat(80).bind_tools([TOOL], tool_choice="required").invoke("What is the weather in Paris?")
    assert [call["name"] for call in answer.tool_calls] == ["get_weather"]
