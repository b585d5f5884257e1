"""From what a request asks to token ids, without ever holding up the event loop."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor

import msgspec

from weft.errors import InvalidRequestError, WeftError
from weft.server.text_process import LENGTH, Answer, Chat, Question, Refusal, Text, Tokens, encode_prompt
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

    def __init__(self, text: ModelText, path: str, max_context: int) -> None:
        self._text = text
        self._path = path
        self._max_context = max_context
        tokenizer = text.tokenizer
        self._longest_token = max(
            (len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocabulary_size)), default=1
        )
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="weft-text")
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._answers = msgspec.msgpack.Decoder(Answer)

    async def encode(self, prompt: Chat | Text, size: int) -> list[int]:
        """The tokens of a prompt; `size` is about how many bytes it has."""
        if isinstance(prompt, Text) and size <= _TINY_BYTES:
            return encode_prompt(self._text, prompt)
        if size <= _SHORT_BYTES:
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, encode_prompt, self._text, prompt
            )
        self._check_length(prompt)
        async with self._turn:
            answer = await self._ask(Question(prompt, self._max_context))
        if isinstance(answer, Tokens):
            return answer.ids
        if isinstance(answer, Refusal):
            raise InvalidRequestError(answer.message, field=answer.field, code=answer.code)
        raise self._too_long(f"{answer.count}", prompt)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._end_process()

    def _check_length(self, prompt: Chat | Text) -> None:
        """Refuses what no tokenising could make fit: no token stands for more bytes than the longest one."""
        if isinstance(prompt, Text):
            num_characters = len(prompt.text)
        else:
            contents = (message.get("content") for message in prompt.messages)
            num_characters = sum(len(content) for content in contents if isinstance(content, str))
        at_least = num_characters // self._longest_token
        if at_least > _SURELY_TOO_LONG * self._max_context:
            raise self._too_long(f"at least {at_least // _SURELY_TOO_LONG}", prompt)

    def _too_long(self, count: str, prompt: Chat | Text) -> InvalidRequestError:
        return InvalidRequestError(
            f"the prompt has {count} tokens; allowed: at most {self._max_context - 1}, so that one new token fits; "
            # Clients tell this error from others by these words, which are those of the OpenAI API.
            f"this model's maximum context length is {self._max_context} tokens here; shorten it",
            field="prompt" if isinstance(prompt, Text) else "messages",
            code="context_length_exceeded",
        )

    async def _ask(self, question: Question) -> Answer:
        """Whoever is cancelled meanwhile takes the process along: its answer must not be taken for the next one's."""
        process = self._process
        is_answered = False
        try:
            if process is None or process.returncode is not None:
                self._process = process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "weft.server.text_process", self._path),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                )
            assert process.stdin is not None and process.stdout is not None
            content = msgspec.msgpack.encode(question)
            process.stdin.write(LENGTH.pack(len(content)) + content)
            await process.stdin.drain()
            (size,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
            answer = self._answers.decode(await process.stdout.readexactly(size))
            is_answered = True
            return answer
        except (OSError, asyncio.IncompleteReadError) as error:
            raise WeftError("the process that tokenises long prompts died; try again") from error
        finally:
            if not is_answered:
                self._end_process()

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            try:
                process.kill()
            except ProcessLookupError:
                pass
