"""The process that makes tokens of long prompts.

The tokenizer holds the interpreter's lock while it works, half a second for a megabyte: a thread of the server would
stop every stream for as long. One message in, one out, as in `weft.engine.wire`; the end of the input ends the process.
"""

from __future__ import annotations

import signal
import struct
import sys
from typing import Any, BinaryIO

import msgspec

from weft.errors import InvalidRequestError, WeftError
from weft.loading.checkpoint import open_checkpoint
from weft.text.model_text import ModelText, open_model_text

LENGTH = struct.Struct("<I")


class Chat(msgspec.Struct, frozen=True, tag=True):
    """The arguments of `ChatTemplate.encode`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    options: dict[str, Any] = {}
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
    return text.require_chat_template().encode(
        prompt.messages,
        tools=prompt.tools,
        documents=prompt.documents,
        options=prompt.options,
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


def _read(stream: BinaryIO, size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise SystemExit(0)
    return content


def main() -> None:
    # Signals are for the server, whose end closes the input.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    questions = msgspec.msgpack.Decoder(Question)
    source, drain = sys.stdin.buffer, sys.stdout.buffer
    text = open_model_text(open_checkpoint(sys.argv[1]))
    while True:
        (size,) = LENGTH.unpack(_read(source, LENGTH.size))
        content = msgspec.msgpack.encode(_answer(text, questions.decode(_read(source, size))))
        drain.write(LENGTH.pack(len(content)) + content)
        drain.flush()


if __name__ == "__main__":
    main()
