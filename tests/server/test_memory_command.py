"""`weft memory` with a real server, and the questions of `weft chat --memory`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from memory_client import document, noop_memory
from server_process import SOURCE, Server, api_key, running_server

from weft.cli.chat import _recall
from weft.cli.memory_command import add_command, list_command, remove_command, search_command
from weft.errors import InvalidRequestError, WeftError


@pytest.fixture(scope="module")
def server(default_model_path: Path) -> Iterator[Server]:
    settings = {"vector_models": noop_memory(), "api_keys": [api_key("secret")]}
    with running_server(default_model_path, **settings) as running:
        yield running


def test_files_are_added_searched_listed_and_removed(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = (server.url, "secret")
    name, text = document(1)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "one.md").write_text(text)
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "two.txt").write_text("other words")
    add_command("notes", [tmp_path], *where, False)
    added = capsys.readouterr().out
    assert added.count("completed") == 2 and "hidden" not in added
    search_command("notes", name, 2, *where, True)
    found = json.loads(capsys.readouterr().out)["data"]
    assert found[0]["filename"].endswith("one.md") and found[0]["content"][0]["text"] in text
    (tmp_path / "guide.md").write_text(f"# Start\n\n{document(2)[0]} here\n")
    add_command("notes", [tmp_path / "guide.md"], *where, False)
    capsys.readouterr()
    search_command("notes", document(2)[0], 1, *where, False)
    assert "  guide.md, Start, characters 0 to 20\n" in capsys.readouterr().out
    remove_command("notes", ["guide.md"], *where, False)
    capsys.readouterr()
    (tmp_path / "three.bin").write_bytes(b"\0\1")
    with pytest.raises(WeftError, match="1 of 1 files"):
        add_command("notes", [tmp_path / "three.bin"], *where, False)
    assert "zero byte" in capsys.readouterr().out
    list_command(None, *where, False)
    assert "2 of 3 files, 1 failed  notes" in capsys.readouterr().out
    list_command("notes", *where, False)
    listed = capsys.readouterr().out
    assert "two.txt" in listed and "three.bin" in listed
    remove_command("notes", ["two.txt"], *where, False)
    assert "1 files removed\n" in capsys.readouterr().out
    [found_again] = [one.text for one in _recall("notes", *where)(name)][:1]
    assert found_again in text
    remove_command("notes", [], *where, False)
    assert "and the vector store" in capsys.readouterr().out
    list_command(None, *where, True)
    assert json.loads(capsys.readouterr().out) == {"data": []}
    assert server.client.get("/v1/files", headers={"authorization": "Bearer secret"}).json()["data"] == []


def test_a_chat_answers_each_question_from_its_own_passages_and_names_them(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = (server.url, "secret")
    (first, text), (second, _) = document(11), document(12)
    (tmp_path / "first.md").write_text(f"# Rivers\n\n{text}")
    (tmp_path / "second.txt").write_text(f"{second} alone")
    add_command("chat", [tmp_path / "first.md", tmp_path / "second.txt"], *where, False)
    capsys.readouterr()
    saved = tmp_path / "saved.jsonl"
    typed = f"{first}\n/stats\n{second} alone\n/save {saved}\n"
    command = (sys.executable, "-m", "weft.cli.main", "chat", "--memory", "chat", "--max-tokens", "4")
    ended = subprocess.run(
        [*command, "--url", server.url, "--api-key", "secret"],
        input=typed,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    before, _, after = ended.stderr.partition("prompt ")
    assert "[1] first.md, Rivers, characters 0 to " in before
    num_tokens = int(after.split()[0])
    assert num_tokens > 100, "the passages are in the prompt"
    assert "[1] second.txt, characters 0 to 13\n" in after
    messages = [json.loads(line) for line in saved.read_text().splitlines()]
    questions = [message["content"] for message in messages if message["role"] == "user"]
    assert questions == [first, f"{second} alone"], "the conversation keeps the questions alone"
    remove_command("chat", [], *where, False)


def test_errors_say_what_to_do(server: Server, tmp_path: Path) -> None:
    where = (server.url, "secret")
    with pytest.raises(InvalidRequestError, match="weft memory list"):
        search_command("none", "x", 1, *where, False)
    with pytest.raises(InvalidRequestError, match="no vector store"):
        _recall("none", *where)
    with pytest.raises(InvalidRequestError, match="no files"):
        add_command("notes", [tmp_path], *where, False)
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        add_command("notes", [tmp_path / "none"], *where, False)
    with pytest.raises(WeftError, match="API key is missing"):
        list_command(None, server.url, None, False)
