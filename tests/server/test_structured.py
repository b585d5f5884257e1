"""Structured output over HTTP: the fields of several APIs, their effect on answers, and refused ones."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from server_process import MODEL, Server, running_server, wait_for

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
        "facts": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 8}, "is_true": {"type": "boolean"}},
                "required": ["name", "is_true"],
                "additionalProperties": False,
            },
            "minItems": 1,
            "maxItems": 2,
        },
    },
    "required": ["city", "population", "facts"],
    "additionalProperties": False,
}
GBNF = """
# an answer of llama.cpp's kind
root   ::= answer "!"
answer ::= ("yes" | "no") (" " [a-c]{1,3})?
"""
LARK = 'start: NUMBER ("+" NUMBER){2}\nNUMBER: /[0-9]{1,2}/'
YES_OR_NO = ["yes", "no"]
QUESTION: Any = [{"role": "user", "content": "Tell me about the capital of France."}]


class Fact(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    is_true: bool


class City(pydantic.BaseModel):
    city: Literal["Paris", "Rome"]
    population: int = pydantic.Field(ge=0, le=99999999)
    facts: list[Fact] = pydantic.Field(min_length=1, max_length=2)


def refused(response: httpx.Response, param: str, code: str | None = None) -> str:
    assert response.status_code == 400, response.text[:300]
    error = response.json()["error"]
    assert error["param"] == param, error
    assert code is None or error["code"] == code, error
    return str(error["message"])


@pytest.fixture(scope="module")
def client(real_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


# --- answers of the real model -----------------------------------------------------------------------------------------


def test_parse_of_the_openai_client_gives_an_object_of_its_class(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=City, temperature=0, max_tokens=120
    )
    [choice] = answer.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, City)


def test_every_answer_in_a_stream_of_several_follows_the_schema(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    stream = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        response_format=form,
        temperature=1.5,
        seed=5,
        n=2,
        max_tokens=150,
        logprobs=True,
        top_logprobs=2,
        stream=True,
    )
    texts, ends = [""] * 2, [""] * 2
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert ends == ["stop"] * 2
    for text in texts:
        City.model_validate(json.loads(text))


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "regex", "pattern": r"\d{3}-\d{2}"}}, r"\d{3}-\d{2}"),
        ({"response_format": {"type": "choice", "choices": YES_OR_NO}}, "yes|no"),
        ({"response_format": {"type": "grammar", "grammar": LARK}}, r"\d{1,2}(\+\d{1,2}){2}"),
        ({"response_format": {"type": "grammar", "grammar": GBNF}}, "(yes|no)( [a-c]{1,3})?!"),
        ({"guided_regex": "^[ab]{4}$"}, "[ab]{4}"),
        ({"guided_choice": YES_OR_NO}, "yes|no"),
        ({"guided_grammar": GBNF}, "(yes|no)( [a-c]{1,3})?!"),
        ({"grammar": GBNF}, "(yes|no)( [a-c]{1,3})?!"),
        ({"structured_outputs": {"regex": "[xyz]{2}"}}, "[xyz]{2}"),
        ({"structured_outputs": {"choice": ["Größe 😀", "b"]}}, "Größe 😀|b"),
        ({"guided_json": {"const": 7}}, "7"),
        ({"guided_json": '{"enum": ["a", null]}'}, '"a"|null'),
        ({"json_schema": {"type": "boolean"}}, "true|false"),
        ({"structured_outputs": {"json": {"type": "null"}}}, "null"),
    ],
)
def test_the_fields_of_vllm_and_llama_cpp_are_enforced(
    real_server: Server, fields: dict[str, Any], pattern: str
) -> None:
    answer = real_server.complete("The answer is", temperature=1, seed=3, max_tokens=24, **fields).json()
    [choice] = answer["choices"]
    assert re.fullmatch(pattern, choice["text"]), choice
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
        {"response_format": {"type": "json_object", "schema": {"required": ["ok"]}}},
    ],
)
def test_json_object_gives_a_json_object(real_server: Server, fields: dict[str, Any]) -> None:
    talk = [{"role": "user", "content": 'Answer with {"ok": true} and nothing else.'}]
    answer = real_server.chat(messages=talk, temperature=0, max_tokens=40, **fields).json()
    [choice] = answer["choices"]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    assert "\n\n" not in choice["message"]["content"], "whitespace is limited"


def test_json_object_gives_a_json_object_in_responses(real_server: Server) -> None:
    body = {
        "input": 'Answer with {"ok": true} and nothing else.',
        "text": {"format": {"type": "json_object"}},
        **{"temperature": 0, "max_output_tokens": 40, "store": False},
    }
    plain = real_server.client.post("/v1/responses", json={**body, "text": {}}).json()
    answer = real_server.client.post("/v1/responses", json=body).json()
    [before], [after] = ([item["content"][0]["text"] for item in one["output"]] for one in (plain, answer))
    assert not before.lstrip().startswith("{"), "else the test proves nothing"
    assert after.lstrip().startswith("{")
    if answer["status"] == "completed":
        assert isinstance(json.loads(after), dict)


def test_an_object_has_only_the_properties_that_the_schema_names(real_server: Server) -> None:
    """A schema as instructor and llm send it. With open objects the model added properties without end."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "maximum": 150},
        },
        "required": ["name", "age"],
    }
    body = {
        "messages": [{"role": "user", "content": "Tell me about a person called Ada, aged 36."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
    }
    [choice] = real_server.chat(**body, temperature=0, max_tokens=60).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert set(json.loads(choice["message"]["content"])) == {"name", "age"}


def test_an_answer_truncated_by_max_tokens_keeps_its_text(real_server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    [choice] = real_server.chat(response_format=form, max_tokens=3, temperature=0).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith("{")


def test_answers_under_a_schema_are_the_same_with_and_without_draft_tokens_alone_and_under_load(
    real_server: Server, default_model_path: Path
) -> None:
    """Twelve requests with different seeds, so that none are coalesced."""
    schema = {
        "type": "object",
        "properties": {
            "identification_number": {"type": "integer", "minimum": 0, "maximum": 999},
            "preferred_contact_method": {"enum": ["email", "telephone", "postal_service"]},
        },
        "required": ["identification_number", "preferred_contact_method"],
    }

    def answer(server: Server, number: int) -> dict[str, Any]:
        fields = {"temperature": number % 2, "seed": number, "max_tokens": 120, "logprobs": 1}
        [choice] = server.complete("A record:", guided_json=schema, **fields).json()["choices"]
        assert list(json.loads(choice["text"])) == schema["required"] and choice["finish_reason"] == "stop"
        return {name: choice[name] for name in ("text", "logprobs")}

    def drafted(server: Server) -> float:
        return server.metric("spec_decode_num_draft_tokens_total")

    before = drafted(real_server)
    alone = [answer(real_server, number) for number in range(12)]
    assert drafted(real_server) > before
    with ThreadPoolExecutor(12) as threads:
        assert list(threads.map(lambda number: answer(real_server, number), range(12))) == alone
    options = {"checkpoint": str(default_model_path), "max_context": 2048}
    off = {"scheduler": {"max_draft_tokens": 0}}
    with running_server(default_model_path, backend="cpu", backend_options=options, engine=off) as bare:
        assert [answer(bare, number) for number in range(12)] == alone
        assert drafted(bare) == 0


def test_the_same_seed_gives_the_same_text_with_other_requests_running(real_server: Server) -> None:
    fields: dict[str, Any] = {"guided_regex": "[a-z ]{12}", "seed": 11, "temperature": 1.0, "max_tokens": 30}

    def text(index: int) -> str:
        if index % 2:
            real_server.complete("Once upon a time", max_tokens=12, temperature=1)
            return ""
        return str(real_server.complete("A word:", **fields).json()["choices"][0]["text"])

    alone = text(0)
    with ThreadPoolExecutor(8) as threads:
        assert {one for one in threads.map(text, range(8)) if one} == {alone}


def test_logprobs_are_those_of_the_model_without_the_grammar(real_server: Server) -> None:
    fields = {"temperature": 0, "max_tokens": 2, "logprobs": 3}
    free = real_server.complete("The capital of France is", **fields).json()["choices"][0]["logprobs"]
    bound = real_server.complete("The capital of France is", **fields, guided_choice=["Rome"]).json()
    bound = bound["choices"][0]["logprobs"]
    likeliest = {name for name in free["top_logprobs"][0] if name in bound["top_logprobs"][0]}
    assert len(likeliest) >= 3, "the most likely tokens are the same"
    assert bound["token_logprobs"][0] < free["token_logprobs"][0]


def test_18_a_request_that_bans_every_token_fails_alone(real_server: Server) -> None:
    """Over HTTP the limit for the list refuses it. With a vocabulary smaller than that limit the sampler does."""
    banned = {"stop_token_ids": list(range(49152)), "min_tokens": 1}
    check_that_it_errors_alone(real_server, banned, "stop_token_ids has 49152 entries; allowed: at most 1024")


def test_29_a_grammar_that_fails_during_decode_ends_only_its_request(real_server: Server) -> None:
    """It compiles, but after a few letters the state of the parser exceeds its limit."""
    endless = {"guided_regex": "(([a-z]{0,999}){0,999}){0,999}"}
    check_that_it_errors_alone(real_server, endless, "the grammar cannot be followed any further")


def check_that_it_errors_alone(server: Server, fields: dict[str, Any], message: str) -> None:
    def others(text: str) -> str:
        more = {"guided_regex": "[a-z]{12}"} if text == "b" else {"ignore_eos": True}
        answer = server.complete(text, max_tokens=16, temperature=1, seed=1, **more)
        return str(answer.json()["choices"][0]["text"])

    alone = [others(text) for text in "ab"]
    with ThreadPoolExecutor(3) as threads:
        neighbours = [threads.submit(others, text) for text in "ab"]
        failed = server.complete("x", max_tokens=16, temperature=1, **fields)
        assert [neighbour.result() for neighbour in neighbours] == alone
    error = failed.json()["error"]
    assert failed.status_code == 400 and message in error["message"], error
    events = server.complete("x", max_tokens=16, temperature=1, stream=True, **fields).text
    assert message in events and "[DONE]" not in events
    assert server.client.get("/health").status_code == 200
    server.wait_until_free()


# --- refused requests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"guided_regex": "a(b"}, "guided_regex", "at character 2 of 3"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
        ({"guided_regex": r"[^\s\S]"}, "guided_regex", "nothing can ever match"),
        ({"guided_json": {"type": "integer", "minimum": 3, "maximum": 2}}, "guided_json", "nothing can ever"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
        ({"guided_json": {"$ref": "#/nowhere"}}, "guided_json", "nowhere"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_json": "3"}, "guided_json", "an object"),
        ({"json_schema": {"type": "cheese"}}, "json_schema", "cheese"),
        ({"grammar": "root ::= foo"}, "grammar", "foo"),
        ({"grammar": "start: foo"}, "grammar", "foo"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"response_format": {"type": "choice", "choices": [1]}}, "response_format", "list of strings"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
        ({"response_format": {"type": "json_schema", "json_schema": 3}}, "response_format", "schema"),
        ({"response_format": {"type": "regex"}}, "response_format", "pattern"),
        ({"response_format": {}}, "response_format", "type"),
        ({"guided_regex": "a" * 300_000}, "guided_regex", "262144"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "grammar"),
    ],
)
def test_26_an_invalid_grammar_is_refused_with_its_field_and_position(
    server: Server, fields: dict[str, Any], param: str, message: str
) -> None:
    for response in (server.chat(**fields), server.complete(**fields, stream=True)):
        assert message in refused(response, param)


@pytest.mark.parametrize("depth", [230, *range(480, 500)])
def test_26_a_schema_as_deep_as_a_body_may_be_is_a_400_and_not_a_500(server: Server, depth: int) -> None:
    """The JSON decoder allows deeper nesting than the encoder."""
    schema = '{"properties":{"a":' * depth + "{}" + "}}" * depth
    refused = server.client.post("/v1/completions", content=f'{{"prompt":"x","guided_json":{schema}}}')
    assert refused.status_code == 400, refused.text
    message = refused.json()["error"]["message"]
    assert "400 levels" in message or "nested too deeply" in message


def test_26_a_remote_reference_is_refused_and_nothing_is_fetched(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.5)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/schema.json"
        for schema in (
            {"$ref": address},
            {"$id": address, "type": "object", "properties": {"a": {"$ref": f"{address}x#/a"}}},
        ):
            assert "another document" in refused(server.chat(guided_json=schema), "guided_json")
        with pytest.raises(TimeoutError):
            listener.accept()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "grammar": GBNF}, "grammar"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format"),
        ({"response_format": {"type": "regex", "pattern": "a", "grammar": "b"}}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ],
)
def test_28_two_different_formats_for_one_answer_are_refused(
    server: Server, fields: dict[str, Any], param: str
) -> None:
    refused(server.chat(**fields), param)
    refused(server.complete(**fields), param)


def test_28_the_same_format_in_two_fields_is_accepted(server: Server) -> None:
    schema = {"type": "object"}
    assert server.chat(guided_json=schema, json_schema=schema, grammar="").status_code == 200
    assert server.chat(response_format={"type": "text"}, guided_regex="a").status_code == 200


def bomb(size: int) -> dict[str, Any]:
    """All combinations of one of each pair: 2 to the power of `size` objects."""
    pairs = [
        {
            "anyOf": [
                {"type": "object", "required": [name], "properties": {name: {"const": 1}}} for name in pair
            ]
        }
        for pair in ((f"a{index}", f"b{index}") for index in range(size))
    ]
    return {"allOf": pairs}


MANY_OPTIONAL = {
    "type": "object",
    "properties": {f"p{index}": {"type": "string"} for index in range(300)},
    "minProperties": 1,
    "additionalProperties": False,
}
"""It takes a second or more to detect that it is too large. Whether the time limit is reached first depends on the
machine."""


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "(" * 40 + "a" + "){0,9}" * 40},
        {"guided_json": bomb(16)},
        {"guided_json": MANY_OPTIONAL},
        {"guided_json": json.loads('{"not_": ' * 300 + "1" + "}" * 300)},
        {"guided_grammar": "start: A\nA: /.*a.{40}/ & /.*b.{41}/ & /.*c.{43}/ & ~/.*d.{44}/"},
    ],
    ids=["regex", "schema", "optional", "nesting", "lark"],
)
def test_27_a_grammar_bomb_is_refused(server: Server, fields: dict[str, Any]) -> None:
    refused(server.chat(**fields), next(iter(fields)), "grammar_too_complex")


def test_27_health_responds_while_grammar_bombs_are_compiled(server: Server) -> None:
    """Each grammar is new, so that none is cached."""
    stop = threading.Event()
    answers: list[int] = []

    def throw(number: int) -> None:
        while not stop.is_set():
            answers.append(
                server.chat(guided_json={**bomb(9), "title": f"{number} {len(answers)}"}).status_code
            )

    throwers = [threading.Thread(target=throw, args=(number,)) for number in range(3)]
    for thrower in throwers:
        thrower.start()
    try:
        waits = []
        for _ in range(40):
            began = time.monotonic()
            assert server.client.get("/health").status_code == 200
            waits.append(time.monotonic() - began)
    finally:
        stop.set()
        for thrower in throwers:
            thrower.join()
    print(f"/health: {1e3 * max(waits):.0f} ms at most, {len(answers)} grammars meanwhile")
    assert set(answers) <= {200, 400}


def test_grammar_processes_start_with_the_first_grammar_and_end_with_the_server(
    default_model_path: Path,
) -> None:
    with running_server(default_model_path) as server:
        before = set(server.children())
        assert server.chat().status_code == 200
        assert set(server.children()) == before, "no process starts without a grammar"
        assert server.chat(guided_regex="a+").status_code == 200
        [pid] = set(server.children()) - before
        assert b"weft.server.text_work.grammar_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
        for _ in range(3):  # the verdict is cached and the process stays
            assert server.chat(guided_regex="a+").status_code == 200
        assert set(server.children()) - before == {pid}
    wait_for(lambda: not Path(f"/proc/{pid}").exists())
