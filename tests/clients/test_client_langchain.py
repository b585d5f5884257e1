"""langchain-openai: invoke, stream, batch, structured output, tools and embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import langchain_openai
import pytest
from client_questions import ABOUT_A_PERSON, ABOUT_WEATHER, QUESTION, TOOL, Person
from langchain_core.messages import HumanMessage, ToolMessage
from vector_models import DIMENSIONS, EMBEDDER

TEXT = QUESTION[0]["content"]
Chat = Callable[..., langchain_openai.ChatOpenAI]


@pytest.fixture(scope="module")
def chat(base_url: str, model: str) -> Chat:
    def build(max_tokens: int = 12) -> Any:
        return langchain_openai.ChatOpenAI(
            model=model,
            base_url=base_url,
            api_key="secret",  # type: ignore[arg-type]
            temperature=0,
            max_tokens=max_tokens,  # type: ignore[call-arg]
            max_retries=0,
        )

    return build


def test_invoke_stream_and_batch_return_the_expected_answer(chat: Chat, expected: str) -> None:
    answer = chat().invoke(TEXT)
    assert answer.content == expected and answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in chat().stream(TEXT)) == expected
    assert [one.content for one in chat().batch([TEXT, TEXT])] == [expected] * 2
    assert asyncio.run(chat().ainvoke(TEXT)).content == expected


def test_text_completions_work(base_url: str, model: str) -> None:
    plain = langchain_openai.OpenAI(
        model=model, base_url=base_url, api_key="secret", temperature=0, max_tokens=4
    )
    assert "Paris" in plain.invoke("The capital of France is")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_object_of_the_class(chat: Chat, method: str) -> None:
    structured = chat(120).with_structured_output(Person, method=method)
    assert isinstance(structured.invoke(ABOUT_A_PERSON), Person)


def test_a_bound_tool_is_called_and_the_model_continues_after_its_result(chat: Chat) -> None:
    question = HumanMessage(ABOUT_WEATHER[0]["content"])
    bound = chat(80).bind_tools([TOOL], tool_choice="required")
    answer = bound.invoke([question])
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather" and set(call["args"]) == {"city"}
    whole: Any = None
    for chunk in bound.stream([question]):
        whole = chunk if whole is None else whole + chunk
    assert [(one["name"], one["args"]) for one in whole.tool_calls] == [(call["name"], call["args"])]
    result = ToolMessage("sunny", tool_call_id=call["id"])
    after = chat(20).bind_tools([TOOL]).invoke([question, answer, result])
    assert after.content or after.tool_calls


def test_embeddings_are_those_of_the_server(base_url: str) -> None:
    embeddings = langchain_openai.OpenAIEmbeddings(
        model=EMBEDDER,
        base_url=base_url,
        api_key="secret",  # type: ignore[arg-type]
        check_embedding_ctx_length=False,  # else it sends token ids of OpenAI's models
    )
    texts = ["How do I cook rice?", "Boil rice in water.", "The stock market fell."]
    query, near, far = embeddings.embed_documents(texts)
    assert len(query) == DIMENSIONS and embeddings.embed_query(texts[0]) == query

    def similarity(other: list[float]) -> float:
        return sum(a * b for a, b in zip(query, other, strict=True))

    assert similarity(near) > 0.4 > similarity(far)
