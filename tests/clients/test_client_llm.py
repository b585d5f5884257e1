"""The llm command with the server as an extra model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from client_questions import ABOUT_A_PERSON, ABOUT_WEATHER, QUESTION, Person

TEXT = QUESTION[0]["content"]
WEATHER = '''
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"
'''


@pytest.fixture(scope="module")
def environment(base_url: str, model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A settings folder with one model, as the documentation of llm describes."""
    folder = tmp_path_factory.mktemp("llm")
    lines = (
        "- model_id: weft",
        f"  model_name: {model}",
        f"  api_base: {base_url}",
        "  api_key_name: weft",
        "  supports_schema: true",
        "  supports_tools: true",
    )
    (folder / "extra-openai-models.yaml").write_text("\n".join(lines) + "\n")
    (folder / "keys.json").write_text('{"weft": "secret"}')
    return {**os.environ, "LLM_USER_PATH": str(folder)}


def llm(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llm", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def ask(environment: dict[str, str], text: str = TEXT, *more: str, max_tokens: int = 12) -> str:
    options = ("-o", "temperature", "0", "-o", "max_tokens", str(max_tokens))
    return llm(environment, "-m", "weft", text, *options, *more).stdout.rstrip("\n")


@pytest.mark.parametrize("more", [(), ("--no-stream",)], ids=["streamed", "whole"])
def test_a_completion_returns_the_expected_answer(
    environment: dict[str, str], expected: str, more: tuple[str, ...]
) -> None:
    assert ask(environment, TEXT, *more) == expected.rstrip("\n")


def test_a_conversation_can_be_continued(environment: dict[str, str]) -> None:
    ask(environment)
    assert ask(environment, TEXT, "-c")
    (entry,) = json.loads(llm(environment, "logs", "-n", "1", "--json").stdout)
    assert entry["response"]


@pytest.mark.parametrize("more", [(), ("--no-stream",)], ids=["streamed", "whole"])
def test_a_schema_is_followed(environment: dict[str, str], more: tuple[str, ...]) -> None:
    schema = json.dumps(Person.model_json_schema())
    text = ask(environment, ABOUT_A_PERSON[0]["content"], "--schema", schema, *more, max_tokens=120)
    Person.model_validate_json(text)


def test_the_model_may_call_a_function_or_answer(environment: dict[str, str], tmp_path: Path) -> None:
    """llm lets the model choose, so both a call and an answer are correct."""
    functions = tmp_path / "functions.py"
    functions.write_text(WEATHER)
    text = ask(
        environment,
        ABOUT_WEATHER[0]["content"],
        "--functions",
        str(functions),
        "--chain-limit",
        "2",
        max_tokens=60,
    )
    assert text
