"""The anthropic package with the real server. Its strict mode checks every answer against its types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pydantic
import pytest
from server_process import MODEL, Server, wait_for

QUESTION: Any = [{"role": "user", "content": "Name the capital of France."}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
    },
}
GREEDY = {"temperature": 0}  # the package has no such parameter any more
FIELDS: Any = {"model": MODEL, "max_tokens": 12, "messages": QUESTION, "extra_body": GREEDY}


def client_of(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=server.url, api_key="none", max_retries=0, _strict_response_validation=True
    )


@pytest.fixture(scope="module")
def client(shared_server: Server) -> Iterator[anthropic.Anthropic]:
    with client_of(shared_server) as client:
        yield client


@pytest.fixture(scope="module")
def real_client(real_server: Server) -> Iterator[anthropic.Anthropic]:
    with client_of(real_server) as client:
        yield client


def test_the_answer_is_that_of_the_openai_api(real_client: anthropic.Anthropic, real_server: Server) -> None:
    [block] = real_client.messages.create(**FIELDS).content
    body = {"max_tokens": 12, "messages": QUESTION, **GREEDY}
    other = real_server.client.post("/v1/chat/completions", json=body).json()
    assert block.text == other["choices"][0]["message"]["content"] and "Paris" in block.text


def test_a_stream_has_the_text_and_the_usage_of_the_whole_answer(real_client: anthropic.Anthropic) -> None:
    whole = real_client.messages.create(**FIELDS)
    with real_client.messages.stream(**FIELDS) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    cached = final.usage.cache_read_input_tokens
    assert cached is not None
    counted = real_client.messages.count_tokens(model=MODEL, messages=QUESTION)
    assert counted.input_tokens == final.usage.input_tokens + cached


def test_a_forced_call_its_result_and_the_next_answer(real_client: anthropic.Anthropic) -> None:
    messages: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    fields: Any = {**FIELDS, "max_tokens": 80, "messages": messages, "tools": [WEATHER]}
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        message = real_client.messages.create(**fields, tool_choice=choice)
        [call] = message.content
        assert call.type == "tool_use" and call.id.startswith("toolu_") and message.stop_reason == "tool_use"
        assert call.name == "get_weather" and set(call.input) == {"city"}
        with real_client.messages.stream(**fields, tool_choice=choice) as stream:
            [streamed] = stream.get_final_message().content
        assert streamed.type == "tool_use" and streamed.input == call.input
    answer: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    history: Any = [
        *messages,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [answer]},
    ]
    after = real_client.messages.create(**{**fields, "messages": history, "max_tokens": 8})
    assert after.content and after.usage.cache_read_input_tokens


def test_parse_returns_an_object_of_the_requested_class(real_client: anthropic.Anthropic) -> None:
    class City(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=20)

    parsed = real_client.messages.parse(**{**FIELDS, "max_tokens": 60}, output_format=City)
    assert isinstance(parsed.parsed_output, City)


def test_16_a_stop_sequence_ends_the_answer_and_is_named(real_client: anthropic.Anthropic) -> None:
    message = real_client.messages.create(**FIELDS, stop_sequences=["\0", "Paris"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Paris")
    assert "Paris" not in message.content[0].text


def test_errors_have_the_exception_classes_of_the_package(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(**{**FIELDS, "extra_body": {"temperature": -1}})
    assert bad.value.type == "invalid_request_error" and "temperature" in (bad.value.api_message or "")
    assert bad.value.request_id
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(**{**FIELDS, "model": "unknown"})
    assert unknown.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 8191 maximum"):
        client.messages.create(**{**FIELDS, "messages": [{"role": "user", "content": "word " * 9000}]})


def test_models_are_listed_and_found_by_an_alias(client: anthropic.Anthropic) -> None:
    [model] = list(client.models.list(limit=1000))
    assert model.id == MODEL and model.lifecycle == "active"
    assert client.models.retrieve("claude-opus-5-5").id == MODEL


def test_38_closing_a_stream_ends_its_answer(client: anthropic.Anthropic, shared_server: Server) -> None:
    with client.messages.stream(**{**FIELDS, "max_tokens": 8000}) as stream:
        for event in stream:
            if event.type == "content_block_delta":
                break
    wait_for(lambda: shared_server.metric("num_requests_running") == 0)
