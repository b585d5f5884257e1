"""The openai package with the real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from server_process import MESSAGES, MODEL, Server

from weft.llm import LLM
from weft.request import SamplingParams

QUESTION: Any = [{"role": "user", "content": "Name the capital of France."}]


@pytest.fixture(scope="module")
def client(shared_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shared_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def real_client(real_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(default_model_path: Path) -> str:
    """The answer of `LLM` in Python."""
    with LLM(str(default_model_path), max_context=2048) as llm:
        return llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=12)).text


def test_the_server_gives_the_same_answer_as_the_llm_class(real_client: openai.OpenAI, expected: str) -> None:
    answer = real_client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_completion_tokens=12
    )
    [choice] = answer.choices
    assert choice.message.content == expected and "Paris" in expected
    assert choice.message.role == "assistant" and choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens <= 12


def test_a_stream_of_the_real_model_gives_the_same_text(real_client: openai.OpenAI, expected: str) -> None:
    stream = real_client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    *body, last = chunks
    assert body[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in body) == expected
    assert [chunk.choices[0].finish_reason for chunk in body[:-1]] == [None] * (len(body) - 1)
    assert body[-1].choices[0].finish_reason in ("stop", "length")
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in body)
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stop_string_of_the_real_model_is_cut_off_streamed_or_not(
    real_client: openai.OpenAI, expected: str
) -> None:
    stop = "Paris"
    whole = real_client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=12, stop=[stop, "\n\n\n"]
    )
    assert whole.choices[0].message.content == expected[: expected.index(stop)]
    assert whole.choices[0].finish_reason == "stop"
    stream = real_client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=12, stop=stop, stream=True
    )
    texts = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(texts) == whole.choices[0].message.content


def test_logprobs_of_the_real_model_match_its_text(real_client: openai.OpenAI) -> None:
    answer = real_client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    [choice] = answer.choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    content = choice.logprobs.content
    assert len(content) == 5
    assert "".join(entry.token for entry in content) == choice.message.content
    for entry in content:
        assert len(entry.top_logprobs) == 3
        # Greedy sampling takes the most likely token.
        assert entry.top_logprobs[0].token == entry.token
        assert bytes(entry.bytes or []).decode() == entry.token


def test_echo_with_logprobs_scores_the_prompt(real_client: openai.OpenAI) -> None:
    prompt = "The capital of France is"
    answer = real_client.completions.create(
        model=MODEL, prompt=prompt, echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    [choice] = answer.choices
    assert choice.text.startswith(prompt) and choice.logprobs is not None
    tokens, scores, offsets = (
        choice.logprobs.tokens,
        choice.logprobs.token_logprobs,
        choice.logprobs.text_offset,
    )
    assert tokens is not None and scores is not None and offsets is not None
    assert "".join(tokens) == choice.text
    assert scores[0] is None and all(score is not None and score < 0 for score in scores[1:])
    assert [
        choice.text[offset:][: len(token)] for offset, token in zip(offsets, tokens, strict=True)
    ] == tokens


def test_text_offsets_of_a_stream_equal_those_of_the_whole_answer_while_text_is_held_back(
    client: openai.OpenAI,
) -> None:
    options: Any = {"model": MODEL, "prompt": "One", "max_tokens": 40, "seed": 3, "logprobs": 0}
    text = client.completions.create(**options).choices[0].text
    options["stop"] = [
        f"{text[3 * position : 3 * position + 3]}\0" for position in range(10)
    ]  # the beginnings match, the whole strings never do
    whole = client.completions.create(**options).choices[0]
    assert whole.text == text and whole.logprobs is not None and whole.logprobs.text_offset
    offsets: list[int] = []
    for chunk in client.completions.create(**options, stream=True):
        if (logprobs := chunk.choices[0].logprobs) is not None:
            offsets += logprobs.text_offset or []
    assert offsets == whole.logprobs.text_offset


def test_16_a_stop_string_over_several_tokens_never_leaks(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "prompt": "One", "max_tokens": 40, "seed": 3}
    text = client.completions.create(**options).choices[0].text
    stop = text[60:85]
    assert len(stop) == 25
    cut = client.completions.create(**options, stop=stop)
    assert cut.choices[0].text == text[: text.index(stop)] and cut.choices[0].finish_reason == "stop"
    assert cut.usage is not None and cut.usage.completion_tokens < 40
    stream = client.completions.create(
        **options, stop=stop, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == cut.choices[0].text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == cut.usage.completion_tokens


def test_the_same_seed_gives_the_same_text_and_another_does_not(client: openai.OpenAI) -> None:
    def text(seed: int) -> str | None:
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, seed=seed)  # type: ignore[arg-type]
        return answer.choices[0].message.content

    assert text(1) == text(1) != text(2)


def test_several_answers_are_separated_by_their_index(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 6, "n": 3, "seed": 5}
    whole = client.chat.completions.create(**options)
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3 and [choice.index for choice in whole.choices] == [0, 1, 2]
    assert whole.usage is not None and whole.usage.completion_tokens == 18
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


@pytest.mark.parametrize(
    "prompt", ["One two", ["One two"], ["One", "two"], [1, 2, 3], [[1, 2], [3]]], ids=str
)
def test_prompts_may_be_text_or_tokens_one_or_several(client: openai.OpenAI, prompt: Any) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=3, n=2, seed=1)
    is_several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    count = len(prompt) if is_several else 1
    assert [choice.index for choice in answer.choices] == list(range(2 * count))
    assert answer.usage is not None and answer.usage.completion_tokens == 6 * count
    streamed = [""] * (2 * count)
    for chunk in client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=3, n=2, seed=1, stream=True
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in answer.choices]


def test_a_streamed_completion_with_echo_repeats_its_prompt(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="One two", echo=True, max_tokens=3, seed=1, stream=True
    )
    text = "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
    plain = client.completions.create(model=MODEL, prompt="One two", max_tokens=3, seed=1)
    assert text == "One two" + plain.choices[0].text


def test_streamed_logprobs_equal_those_of_the_whole_answer(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "prompt": "One", "max_tokens": 6, "seed": 1, "logprobs": 2}
    whole = client.completions.create(**options).choices[0].logprobs
    tokens: list[str] = []
    scores: list[float | None] = []
    for chunk in client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            if choice.logprobs is not None:
                tokens += choice.logprobs.tokens or []
                scores += choice.logprobs.token_logprobs or []
    assert whole is not None and (tokens, scores) == (whole.tokens, whole.token_logprobs)


def test_many_concurrent_streams_get_the_same_text_as_alone(client: openai.OpenAI, server: Server) -> None:
    """No token is lost, doubled or mixed up when events are coalesced."""
    count = 40

    async def text(asynchronous: openai.AsyncOpenAI, seed: int) -> str:
        stream = await asynchronous.completions.create(
            model=MODEL, prompt=f"Story {seed}", max_tokens=100, seed=seed, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

    async def all_texts() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as asynchronous:
            return list(await asyncio.gather(*(text(asynchronous, seed) for seed in range(count))))

    texts = asyncio.run(all_texts())
    for seed in (0, 17, count - 1):
        alone = client.completions.create(model=MODEL, prompt=f"Story {seed}", max_tokens=100, seed=seed)
        assert texts[seed] == alone.choices[0].text


def test_errors_have_the_exception_classes_of_the_package(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="no-such-model", messages=MESSAGES)  # type: ignore[arg-type]
    assert unknown.value.param == "model" and unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1, stream=True)  # type: ignore[arg-type]
    assert bad.value.param == "temperature"


def test_the_model_is_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_the_second_message_of_a_conversation_is_a_prefix_hit(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "max_tokens": 4, "extra_body": {"session_id": "talk"}}
    talk: Any = [{"role": "user", "content": "Tell me a story about " + "a dog and " * 30}]
    first = client.chat.completions.create(messages=talk, **options)
    talk += [{"role": "assistant", "content": first.choices[0].message.content}, *MESSAGES]
    second = client.chat.completions.create(messages=talk, **options)
    assert first.usage is not None and second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens - 32


def test_every_answer_has_timings(server: Server) -> None:
    [choice] = server.chat().json()["choices"]
    assert set(choice["timings"]) == {"queue", "prefill", "decode", "preemptions", "completion_tokens"}


def test_timings_have_the_tokens_of_their_own_answer(server: Server) -> None:
    for fields in ({"n": 3}, {"n": 3, "stream": True}):
        reply = server.complete(["a", "b"], max_tokens=5, ignore_eos=True, **fields)
        lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.endswith("}")]
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        assert [one["timings"]["completion_tokens"] for one in choices if "timings" in one] == [5] * 6


def test_tokenising_and_detokenising_gives_the_same_text(server: Server) -> None:
    tokenized = server.client.post("/tokenize", json={"prompt": "Grüße, 世界!"}).json()
    assert tokenized["count"] == len(tokenized["tokens"]) > 0
    back = server.client.post("/detokenize", json={"tokens": tokenized["tokens"]}).json()
    assert back == {"prompt": "Grüße, 世界!"}


def test_metrics_count_requests_and_tokens(server: Server) -> None:
    names = ("prompt_tokens_total", "generation_tokens_total", "request_success_total")
    histograms = ("time_to_first_token_seconds_count", "e2e_request_latency_seconds_count")
    before = {name: server.metric(name) for name in (*names, *histograms)}
    server.complete([1, 2, 3, 4, 5], max_tokens=7)
    assert server.complete("One", max_tokens=7, stream=True).text.endswith("data: [DONE]\n\n")
    server.wait_until_free()
    grown = {name: server.metric(name) - value for name, value in before.items()}
    assert grown == {**dict.fromkeys(before, 2), "prompt_tokens_total": 6, "generation_tokens_total": 14}


def test_xtc_over_http_changes_the_answer_and_the_same_seed_gives_it_again(real_server: Server) -> None:
    def answer(**fields: Any) -> str:
        response = real_server.complete("The capital of France is", max_tokens=12, seed=5, **fields)
        assert response.status_code == 200 and "Warning" not in response.headers
        text: str = response.json()["choices"][0]["text"]
        return text

    excluding = {"xtc_probability": 1.0, "xtc_threshold": 0.01}
    without = answer(temperature=0.5)
    changed = answer(temperature=0.5, **excluding)
    assert changed != without
    assert answer(temperature=0.5, **excluding) == changed
    assert answer(temperature=0.5, xtc_probability=0.0, xtc_threshold=0.01) == without
    assert answer(temperature=0.0, **excluding) == answer(temperature=0.0)
