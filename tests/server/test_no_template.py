"""A model without a chat template: the errors of its server, and the template of the operator."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from every_api import APIS, Turn
from server_process import MESSAGES, Server, running_server

from weft.errors import ModelFileError
from weft.loading.checkpoint import open_checkpoint
from weft.text.model_text import open_model_text

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def plain_model(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The default model with its chat template hidden."""
    content = default_model_path.read_bytes()
    name = b"tokenizer.chat_template"
    assert content.count(name) == 1
    path = tmp_path_factory.mktemp("model") / "plain.gguf"
    path.write_bytes(content.replace(name, b"tokenizer.chat_templat_"))
    yield path
    path.unlink()


def test_25_a_chat_is_refused_and_the_error_names_the_flag(plain_model: Path) -> None:
    with running_server(plain_model) as server:
        refused = server.chat()
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["param"] == "messages"
        assert "--chat-template" in error["message"]
        for api in APIS:
            for stream in (False, True):
                body = api.body([Turn("user", "x")], stream=stream)
                answer = server.client.post(api.path, json=body)
                assert answer.status_code == 400 and "--chat-template" in api.error(answer.content)
        assert server.complete().status_code == 200


def test_25_the_template_of_the_operator_is_used_for_short_and_long_chats(
    plain_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text(TEMPLATE)
    with running_server(plain_model, chat_template=str(path)) as server:
        assert server.chat().status_code == 200

        def rendered(messages: list[dict[str, str]]) -> str:
            tokens = server.client.post("/tokenize", json={"messages": messages}).json()["tokens"]
            text: str = server.client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
            return text

        assert rendered(MESSAGES) == "<user>Hello\n"
        long = "word " * 3000  # tokenised in a worker process
        assert rendered([{"role": "user", "content": long}]) == f"<user>{long}\n"


def test_the_template_of_the_operator_replaces_that_of_the_model(
    default_model_path: Path, tmp_path: Path, server: Server
) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text(TEMPLATE)
    with running_server(default_model_path, chat_template=str(path)) as other:
        counts = [
            one.client.post("/tokenize", json={"messages": MESSAGES}).json()["count"]
            for one in (server, other)
        ]
    assert counts[1] < counts[0]


@pytest.mark.parametrize("content", [None, "{% for %}"])
def test_an_invalid_template_is_an_error_with_its_path(
    default_model_path: Path, tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "chat.jinja"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ModelFileError, match=f"^chat template {re.escape(str(path))}: "):
        open_model_text(open_checkpoint(default_model_path), path)
