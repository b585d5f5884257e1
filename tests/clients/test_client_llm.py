"""The llm command, with the server as an extra model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from client_questions import QUESTION

pytest.importorskip("llm")

TEXT = QUESTION[0]["content"]


@pytest.fixture(scope="module")
def environment(base_url: str, model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A folder of settings with one model in it, as the documentation of llm describes."""
    folder = tmp_path_factory.mktemp("llm")
    lines = (
        "- model_id: weft",
        f"  model_name: {model}",
        f"  api_base: {base_url}",
        "  api_key_name: weft",
    )
    (folder / "extra-openai-models.yaml").write_text("\n".join(lines) + "\n")
    (folder / "keys.json").write_text('{"weft": "secret"}')
    return {**os.environ, "LLM_USER_PATH": str(folder)}


def ask(environment: dict[str, str], *more: str) -> str:
    command = [
        sys.executable,
        "-m",
        "llm",
        "-m",
        "weft",
        TEXT,
        "-o",
        "temperature",
        "0",
        "-o",
        "max_tokens",
        "12",
    ]
    done = subprocess.run([*command, *more], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.rstrip("\n")


@pytest.mark.parametrize("more", [(), ("--no-stream",)], ids=["streamed", "whole"])
def test_an_answer_is_what_the_server_says(
    environment: dict[str, str], expected: str, more: tuple[str, ...]
) -> None:
    assert ask(environment, *more) == expected.rstrip("\n")


def test_a_conversation_goes_on(environment: dict[str, str], expected: str) -> None:
    ask(environment)
    assert ask(environment, "-c")
    log = subprocess.run(
        [sys.executable, "-m", "llm", "logs", "-n", "1", "--json"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert Path(environment["LLM_USER_PATH"], "logs.db").exists() and '"response"' in log.stdout
