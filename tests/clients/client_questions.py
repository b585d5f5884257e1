"""The requests that every client sends."""

from __future__ import annotations

from typing import Any

import pydantic

QUESTION: Any = [{"role": "user", "content": "Name the capital of France."}]
ABOUT_A_PERSON: Any = [{"role": "user", "content": "Tell me about a person called Ada, aged 36."}]
ABOUT_WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


class Person(pydantic.BaseModel):
    """A person."""

    # The default model is small: without limits it may never end a text or a number.
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
