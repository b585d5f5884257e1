"""From what a request asks to token ids, without ever holding up the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import msgspec

from weft.errors import InvalidRequestError
from weft.server.text_process import Answer, Chat, Question, Refusal, Text, Tokens, encode_prompt
from weft.server.worker import Worker, packed
from weft.text.model_text import ModelText

_TINY_BYTES = 1 << 10
"""Up to this size a text takes less than waking a thread, which then fights the event loop for the interpreter."""
_SHORT_BYTES = 8 << 10
"""Up to this size a prompt takes about 10 ms, and is not worth a trip to another process."""
_THREADS = 4
_SURELY_TOO_LONG = 4
"""A normaliser may shorten a text, composing characters at most to a third; beyond that there is no need to count."""


class PromptEncoder:
    """Owns the threads that make tokens of short prompts, and the process for long ones, which starts when the first
    comes."""

    def __init__(
        self, text: ModelText, path: str, max_context: int, chat_template: str | None = None
    ) -> None:
        self._text = text
        self._max_context = max_context
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="weft-text")
        self._worker = Worker(
            "weft.server.text_process", path, chat_template or "", text.tool_format_name or ""
        )
        self._answers = msgspec.msgpack.Decoder(Answer)

    async def encode(self, prompt: Chat | Text, size: int) -> list[int]:
        """The tokens of a prompt; `size` is about how many bytes it has."""
        if isinstance(prompt, Text) and size <= _TINY_BYTES:
            return encode_prompt(self._text, prompt)
        loop = asyncio.get_running_loop()
        if size <= _SHORT_BYTES:
            return await loop.run_in_executor(self._threads, encode_prompt, self._text, prompt)
        await loop.run_in_executor(self._threads, self._check_length, prompt)
        question = packed(Question(prompt, self._max_context), prompt)
        answer = self._answers.decode(await self._worker.ask(question))
        if isinstance(answer, Tokens):
            return answer.ids
        if isinstance(answer, Refusal):
            raise InvalidRequestError(answer.message, field=answer.field, code=answer.code)
        raise self._too_long(f"{answer.count}", _field(prompt))

    def check_tokens(self, tokens: list[int]) -> list[int]:
        """A prompt that came as token ids. Refused here where it cannot fit, before anybody looks at each of them."""
        if len(tokens) >= self._max_context:
            raise self._too_long(f"{len(tokens)}", "prompt")
        return tokens

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._worker.close()

    def _check_length(self, prompt: Chat | Text) -> None:
        """Refuses what no tokenising could make fit: no token stands for more bytes than the longest one."""
        if isinstance(prompt, Text):
            num_characters = len(prompt.text)
        else:
            contents = (message.get("content") for message in prompt.messages)
            num_characters = sum(len(content) for content in contents if isinstance(content, str))
        at_least = num_characters // self._text.tokenizer.longest_token  # looked for with the first that asks
        if at_least > _SURELY_TOO_LONG * self._max_context:
            raise self._too_long(f"at least {at_least // _SURELY_TOO_LONG}", _field(prompt))

    def _too_long(self, count: str, field: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"the prompt has {count} tokens; allowed: at most {self._max_context - 1}, so that one new token fits; "
            # Clients tell this error from others by these words, which are those of the OpenAI API.
            f"this model's maximum context length is {self._max_context} tokens here; shorten it",
            field=field,
            code="context_length_exceeded",
        )


def _field(prompt: Chat | Text) -> str:
    return "prompt" if isinstance(prompt, Text) else "messages"
