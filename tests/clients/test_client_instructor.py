"""instructor: objects of a class out of a model, by schema and by tool call."""

from __future__ import annotations

from typing import Any

import pytest

instructor = pytest.importorskip("instructor")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

MESSAGES = [{"role": "user", "content": "Tell me about a person called Ada, aged 36."}]


class Person(pydantic.BaseModel):  # type: ignore[name-defined,misc]
    name: str
    age: int


def ask(base_url: str, model: str, mode: Any) -> Any:
    client = openai.OpenAI(base_url=base_url, api_key="secret", max_retries=0)
    return instructor.from_openai(client, mode=mode).chat.completions.create(
        model=model,
        messages=MESSAGES,
        response_model=Person,
        max_tokens=120,
        temperature=0,
        max_retries=0,
    )


@pytest.mark.usefixtures("structured")
def test_an_object_comes_out_of_a_schema(base_url: str, model: str) -> None:
    assert isinstance(ask(base_url, model, instructor.Mode.JSON_SCHEMA), Person)


@pytest.mark.usefixtures("tools")
def test_an_object_comes_out_of_a_tool_call(base_url: str, model: str) -> None:
    assert isinstance(ask(base_url, model, instructor.Mode.TOOLS), Person)
