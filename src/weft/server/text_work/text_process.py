"""The worker process that tokenises long prompts and detokenises long lists of tokens.

The tokenizer holds the interpreter lock: half a second for a megabyte. In a thread of the server, it would stop every
stream for that time.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from weft.errors import InvalidRequestError, WeftError
from weft.loading.checkpoint import open_checkpoint
from weft.server.text_work.worker import ignore_signals, serve_jobs
from weft.text.model_text import ModelText, open_model_text


class Chat(msgspec.Struct, frozen=True, tag=True):
    """The arguments of `ModelText.encode_chat`, with the field names of the API."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: str | None = None


class Text(msgspec.Struct, frozen=True, tag=True):
    text: str
    add_special_tokens: bool = True
    """Add the special tokens of the tokenizer, such as BOS."""


class Ids(msgspec.Struct, frozen=True, tag=True):
    """Tokens to detokenise."""

    ids: list[int]


Part = Chat | Text | Ids


class TextJob(msgspec.Struct, frozen=True):
    parts: list[Part]
    max_tokens: int
    """If a result has more tokens, only its length is sent back."""


class Tokens(msgspec.Struct, frozen=True, tag=True):
    ids: list[int]


class Refusal(msgspec.Struct, frozen=True, tag=True):
    message: str
    field: str
    code: str


class TooLong(msgspec.Struct, frozen=True, tag=True):
    count: int


TextResult = Tokens | Text | Refusal | TooLong


def convert(text: ModelText, part: Part) -> list[int] | str:
    """The tokens of a prompt, or the text of tokens. Raises InvalidRequestError if a prompt cannot be encoded."""
    if isinstance(part, Ids):
        return text.tokenizer.decode(part.ids, skip_control=False)
    if isinstance(part, Text):
        return text.tokenizer.encode(part.text, add_bos=None if part.add_special_tokens else False)
    if part.continue_final_message and not part.messages:
        raise InvalidRequestError("messages is empty; send at least one message", field="messages")
    return text.encode_chat(
        part.messages,
        tools=part.tools,
        documents=part.documents,
        options=part.chat_template_kwargs,
        add_generation_prompt=part.add_generation_prompt,
        continue_final_message=part.continue_final_message,
        reasoning_effort=part.reasoning_effort,
    )


def _result(text: ModelText, part: Part, max_tokens: int) -> TextResult:
    try:
        value = convert(text, part)
    except InvalidRequestError as error:
        return Refusal(str(error), error.field, error.code)
    except WeftError as error:
        return Refusal(str(error), "", "failed")
    if isinstance(value, str):
        return Text(value)
    return Tokens(value) if len(value) <= max_tokens else TooLong(len(value))


def _results(text: ModelText, job: TextJob) -> list[TextResult]:
    return [_result(text, part, job.max_tokens) for part in job.parts]


def main() -> None:
    ignore_signals()
    path, chat_template, tool_format = sys.argv[1:]
    jobs = msgspec.msgpack.Decoder(TextJob)
    text = open_model_text(open_checkpoint(path), chat_template or None, tool_format or None)
    serve_jobs(lambda job: msgspec.msgpack.encode(_results(text, jobs.decode(job))))


if __name__ == "__main__":
    main()
