"""From what a request asks to token ids and back, without ever holding up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from weft.errors import InvalidRequestError
from weft.server.errors import ApiError
from weft.server.text_work.places import WorkSlots
from weft.server.text_work.text_process import (
    Chat,
    Ids,
    Part,
    Text,
    TextJob,
    TextResult,
    Tokens,
    TooLong,
    convert,
)
from weft.server.text_work.worker import Workers, encode_message
from weft.text.model_text import ModelText

_TINY_BYTES = 1 << 10
"""Up to this size a text takes less than waking a thread, which then fights the event loop for the interpreter."""
_SHORT_BYTES = 8 << 10
"""Up to this size a prompt takes about 10 ms, and is not worth a trip to another process."""
_GROUP_BYTES = 64 << 10
"""Several prompts go to the process in groups of about this size; work of other requests goes between them."""
_BYTES_PER_PROMPT = 32
"""A prompt costs as much as so many bytes more than it has. To make text of a token costs as much as one byte."""
_SECONDS_PER_BYTE = 5e-7
_THREADS = 4
_PROCESSES = 2
_SECONDS = 120.0
"""For one group. The longest text that is taken in needs 20 s."""
_MAX_NORMALISER_SHRINK = 4
"""A normaliser may shorten a text, composing characters at most to a third; beyond that there is no need to count."""

T = TypeVar("T")


class PromptEncoder:
    """Owns the threads that make tokens of short prompts, and the processes for long ones, which start when the first
    comes."""

    def __init__(
        self, text: ModelText, path: str, max_context: int, chat_template: str | None = None
    ) -> None:
        self._text = text
        self._max_context = max_context
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="weft-text")
        self._slots = WorkSlots(_THREADS)
        arguments = (path, chat_template or "", text.tool_format_name or "")
        self._workers = Workers("weft.server.text_work.text_process", *arguments, count=_PROCESSES)
        self._decoder = msgspec.msgpack.Decoder(list[TextResult])

    async def encode(self, prompt: Chat | Text, size: int, client_id: str) -> list[int]:
        """The tokens of a prompt; `size` is about how many bytes it has."""
        [tokens] = await self._convert([prompt], size, client_id)
        return tokens

    async def encode_texts(self, texts: Sequence[str], client_id: str) -> list[list[int]]:
        """The tokens of each text."""
        found: list[list[int]] = []
        for group, size in _groups(texts):
            found += await self._convert([Text(text) for text in group], size, client_id)
        return found

    async def decode(self, prompts: Sequence[list[int]], client_id: str) -> list[str]:
        """The text of each list of tokens, control tokens too."""
        found: list[str] = []
        for group, size in _groups(prompts):
            found += await self._convert([Ids(ids) for ids in group], size, client_id)
        return found

    async def run_in_thread(self, size: int, client_id: str, work: Callable[..., T], *arguments: Any) -> T:
        """What `work` returns in one of the threads. It takes about as long as to make tokens of `size` bytes."""
        cost = _SECONDS_PER_BYTE * size
        await self._slots.take(client_id, cost)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        finally:
            self._slots.free(cost)

    def check_tokens(self, tokens: list[int]) -> list[int]:
        """A prompt that came as token ids. Refused here where it cannot fit, before anybody looks at each of them."""
        if len(tokens) >= self._max_context:
            raise self._too_long(f"{len(tokens)}", "prompt")
        return tokens

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._workers.close()

    async def _convert(self, parts: Sequence[Part], size: int, client_id: str) -> list[Any]:
        """Tokens for each part, or text for each that is tokens; here, in a thread or in a process."""
        if size <= _TINY_BYTES and not any(isinstance(part, Chat) for part in parts):
            return [convert(self._text, part) for part in parts]
        if size <= _SHORT_BYTES:
            return await self.run_in_thread(
                size, client_id, lambda: [convert(self._text, part) for part in parts]
            )
        await self.run_in_thread(_SHORT_BYTES, client_id, self._check_lengths, parts)
        job = encode_message(TextJob(list(parts), self._max_context), parts[0])
        try:
            result = await self._workers.run(
                job, client_id=client_id, cost=_SECONDS_PER_BYTE * size, seconds=_SECONDS
            )
        except TimeoutError:
            message = f"the text took more than {_SECONDS:g} s to read; send it again later, or a shorter one"
            raise ApiError(503, message, code="server_busy") from None
        return [self._value(part, one) for part, one in zip(parts, self._decoder.decode(result), strict=True)]

    def _value(self, part: Part, result: TextResult) -> list[int] | str:
        if isinstance(result, Tokens):
            return result.ids
        if isinstance(result, Text):
            return result.text
        if isinstance(result, TooLong):
            raise self._too_long(f"{result.count}", _field(part))
        raise InvalidRequestError(result.message, field=result.field, code=result.code)

    def _check_lengths(self, parts: Sequence[Part]) -> None:
        """Refuses what no tokenising could make fit: no token stands for more bytes than the longest one."""
        longest = self._text.tokenizer.longest_token  # looked for with the first that asks
        for part in parts:
            num_characters = 0
            if isinstance(part, Text):
                num_characters = len(part.text)
            elif isinstance(part, Chat):
                contents = (message.get("content") for message in part.messages)
                num_characters = sum(len(content) for content in contents if isinstance(content, str))
            at_least = num_characters // longest
            if at_least > _MAX_NORMALISER_SHRINK * self._max_context:
                raise self._too_long(f"at least {at_least // _MAX_NORMALISER_SHRINK}", _field(part))

    def _too_long(self, count: str, field: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"the prompt has {count} tokens; allowed: at most {self._max_context - 1}, so that one new token fits; "
            # Clients tell this error from others by these words, which are those of the OpenAI API.
            f"this model's maximum context length is {self._max_context} tokens here; shorten it",
            field=field,
            code="context_length_exceeded",
        )


S = TypeVar("S", str, list[int])


def _groups(prompts: Sequence[S]) -> Iterator[tuple[Sequence[S], int]]:
    """Prompts that are dealt with at once, and about how many bytes that is."""
    first, size = 0, 0
    for index, prompt in enumerate(prompts):
        more = len(prompt) + _BYTES_PER_PROMPT
        if index > first and size + more > _GROUP_BYTES:
            yield prompts[first:index], size
            first, size = index, 0
        size += more
    if prompts:
        yield prompts[first:], size


def _field(part: Part) -> str:
    return "messages" if isinstance(part, Chat) else "prompt"
