"""The process that makes tokens of long prompts.

The tokenizer holds the interpreter's lock while it works, half a second for a megabyte: a thread of the server would
stop every stream for as long.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from weft.errors import InvalidRequestError, WeftError
from weft.loading.checkpoint import open_checkpoint
from weft.server.worker import answer_all, ignore_signals
from weft.text.model_text import ModelText, open_model_text


class Chat(msgspec.Struct, frozen=True, tag=True):
    """The arguments of `ModelText.encode_chat`, under the names that clients know."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class Text(msgspec.Struct, frozen=True, tag=True):
    text: str
    add_special_tokens: bool = True
    """What the model's files put around a prompt, such as a token for its beginning."""


class Question(msgspec.Struct, frozen=True):
    prompt: Chat | Text
    max_tokens: int
    """More are counted, not sent."""


class Tokens(msgspec.Struct, frozen=True, tag=True):
    ids: list[int]


class Refusal(msgspec.Struct, frozen=True, tag=True):
    message: str
    field: str
    code: str


class TooLong(msgspec.Struct, frozen=True, tag=True):
    count: int


Answer = Tokens | Refusal | TooLong


def encode_prompt(text: ModelText, prompt: Chat | Text) -> list[int]:
    """The tokens of a prompt. Raises InvalidRequestError for one that cannot be encoded."""
    if isinstance(prompt, Text):
        return text.tokenizer.encode(prompt.text, add_bos=None if prompt.add_special_tokens else False)
    if prompt.continue_final_message and not prompt.messages:
        raise InvalidRequestError("messages is empty; send at least one message", field="messages")
    return text.encode_chat(
        prompt.messages,
        tools=prompt.tools,
        documents=prompt.documents,
        options=prompt.chat_template_kwargs,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
    )


def _answer(text: ModelText, question: Question) -> Answer:
    try:
        ids = encode_prompt(text, question.prompt)
    except InvalidRequestError as error:
        return Refusal(str(error), error.field, error.code)
    except WeftError as error:
        return Refusal(str(error), "", "failed")
    return Tokens(ids) if len(ids) <= question.max_tokens else TooLong(len(ids))


def main() -> None:
    ignore_signals()
    path, chat_template, tool_format = sys.argv[1:]
    questions = msgspec.msgpack.Decoder(Question)
    text = open_model_text(open_checkpoint(path), chat_template or None, tool_format or None)
    answer_all(lambda question: msgspec.msgpack.encode(_answer(text, questions.decode(question))))


if __name__ == "__main__":
    main()
