"""What a start imports and what it does not; `weft serve` parsed without typer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from weft.cli import entry
from weft.cli.main import app

SOURCE = Path(__file__).parents[2] / "src"


def loaded_by(code: str) -> set[str]:
    """The modules that a new interpreter has loaded after `code`."""
    program = f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n{code}\nimport json; print(json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return set(json.loads(done.stdout))


def test_a_server_imports_little_before_its_engine_starts() -> None:
    loaded = loaded_by("import weft.cli.entry, weft.cli.serve_command")
    assert not loaded & {
        "typer",
        "rich",
        "asyncio",
        "uvicorn",
        "starlette",
        "tokenizers",
        "numpy",
        "http.client",
    }


def test_a_server_opens_its_tokenizer_without_numpy_or_downloaders(default_model_path: Path) -> None:
    loaded = loaded_by(
        "import weft.server.lifecycle\n"
        "from weft.loading.checkpoint import open_checkpoint\n"
        "from weft.text.model_text import open_model_text\n"
        f"text = open_model_text(open_checkpoint({str(default_model_path)!r}))\n"
        "assert text.encode_chat([{'role': 'user', 'content': 'hello'}])\n"
        "text.close()"
    )
    assert not loaded & {"numpy", "huggingface_hub", "llguidance", "rich", "typer", "weft.server.api.openapi"}


def test_the_engine_imports_neither_an_event_loop_nor_a_tokenizer() -> None:
    loaded = loaded_by("import weft.engine.ipc.process, weft.backends.cpu.runner")
    assert not loaded & {"asyncio", "tokenizers", "llguidance", "typer", "rich"}


# --- the command line ---------------------------------------------------------------------------------------------


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], Path | None]]:
    """Records the calls of `serve_command` instead of serving."""
    calls: list[tuple[dict[str, Any], Path | None]] = []

    def serve_command(flags: dict[str, Any], config: Path | None, print_config: bool) -> None:
        assert not print_config
        calls.append(({key: value for key, value in flags.items() if value is not None}, config))

    monkeypatch.setattr("weft.cli.serve_command.serve_command", serve_command)
    return calls


PLAIN = [
    [],
    ["model.gguf"],
    ["model=1.gguf", "--port", "0"],
    ["--port", "9000", "--host=0.0.0.0", "default"],
    ["--name", "small", "--context=512", "--memory", "4GiB", "--threads", "2", "--quantize=int8"],
    ["--kv-cache", "two-tier", "--tail-length=128", "--store-bits", "4", "--drafts=0"],
    ["--api-key", "a", "--api-key=b", "--api-key-file", "keys.toml"],
    ["--chat-template", "chat.jinja", "--config", "weft.toml"],
]


@pytest.mark.parametrize("arguments", PLAIN, ids=" ".join)
def test_plain_arguments_of_serve_are_parsed_as_typer_parses_them(
    arguments: list[str],
    served: list[tuple[dict[str, Any], Path | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["weft", "serve", *arguments])
    entry.main()
    assert entry.plain_serve_settings(sys.argv[1:]) is not None
    assert CliRunner().invoke(app, ["serve", *arguments]).exit_code == 0
    ours, theirs = served
    assert ours == theirs


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["chat"],
        ["serve", "--help"],
        ["serve", "--print-config"],
        ["serve", "one", "two"],
        ["serve", "--port"],
        ["serve", "--port", "many"],
        ["serve", "--port", "-1"],
        ["serve", "--port", "1", "--port", "2"],
        ["serve", "--host="],
        ["serve", "--no-such-option", "1"],
        ["serve", "--", "model.gguf"],
        ["--version", "serve"],
    ],
    ids=" ".join,
)
def test_all_other_arguments_are_left_to_typer(arguments: list[str]) -> None:
    assert entry.plain_serve_settings(arguments) is None


def test_every_option_of_serve_with_a_value_is_known_to_the_fast_parser() -> None:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = {name for parameter in command.params for name in parameter.opts if name.startswith("--")}
    assert options - {"--print-config", "--help"} == entry.SERVE_OPTIONS.keys()
