"""instructor: objects of a class, by JSON schema and by tool call."""

from __future__ import annotations

import asyncio
from typing import Any

import instructor
import openai
import pytest
from client_questions import ABOUT_A_PERSON, Person

FIELDS: dict[str, Any] = {
    "messages": ABOUT_A_PERSON,
    "response_model": Person,
    "max_tokens": 120,
    "temperature": 0,
    "max_retries": 0,
}
MODES = [instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS]


@pytest.mark.parametrize("mode", MODES, ids=[mode.name for mode in MODES])
def test_create_returns_an_object_of_the_class(base_url: str, model: str, mode: Any) -> None:
    client = openai.OpenAI(base_url=base_url, api_key="secret", max_retries=0)
    patched = instructor.from_openai(client, mode=mode)
    assert isinstance(patched.chat.completions.create(model=model, **FIELDS), Person)


@pytest.mark.parametrize("mode", MODES, ids=[mode.name for mode in MODES])
def test_a_stream_returns_a_growing_object(base_url: str, model: str, mode: Any) -> None:
    client = openai.OpenAI(base_url=base_url, api_key="secret", max_retries=0)
    patched = instructor.from_openai(client, mode=mode)
    *_, last = patched.chat.completions.create_partial(model=model, **FIELDS)
    Person.model_validate(last.model_dump())


def test_an_asynchronous_create_returns_an_object_of_the_class(base_url: str, model: str) -> None:
    async def ask() -> Any:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="secret", max_retries=0) as client:
            patched = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
            return await patched.chat.completions.create(model=model, **FIELDS)

    assert isinstance(asyncio.run(ask()), Person)
