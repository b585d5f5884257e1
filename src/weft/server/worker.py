"""A process that does for the server what would keep the interpreter to itself: one question in, one answer out.

A message is bytes behind their length; the end of its input ends the process, however the server ends.
"""

from __future__ import annotations

import asyncio
import signal
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import msgspec

from weft.errors import InvalidRequestError, WeftError

_LENGTH = struct.Struct("<I")


class Worker:
    """Owns the process, which starts with the first question. Questions take turns."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = (sys.executable, "-m", module, *arguments)
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def ask(self, *question: bytes | bytearray, seconds: float | None = None) -> bytes:
        """The answer to a question, whose parts are sent as one; TimeoutError where it takes longer than `seconds`. Whoever
        gets none, or is cancelled meanwhile, takes the process along: its answer must not be taken for the next one's."""
        async with self._turn:
            is_answered = False
            try:
                async with asyncio.timeout(seconds):
                    answer = await self._ask(question)
                is_answered = True
                return answer
            except TimeoutError:
                raise  # an OSError too, by its class
            # A RuntimeError is a thread that cannot be started; the next question tries again.
            except (OSError, RuntimeError, MemoryError, asyncio.IncompleteReadError) as error:
                raise WeftError("a process of the server died over this request; try again") from error
            finally:
                if not is_answered:
                    self._kill()

    async def close(self) -> None:
        """Ends the process and waits until it is gone."""
        if (process := self._kill()) is not None:
            await process.wait()

    async def _ask(self, question: Sequence[bytes | bytearray]) -> bytes:
        process = self._process
        if process is None or process.returncode is not None:
            self._process = process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(_LENGTH.pack(sum(map(len, question))))
        for part in question:
            process.stdin.write(part)
        await process.stdin.drain()
        (size,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
        return await process.stdout.readexactly(size)

    def _kill(self) -> asyncio.subprocess.Process | None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.kill()
            except ProcessLookupError:
                pass
        return process


def packed(message: Any, asked: msgspec.Struct) -> bytes:
    """A message between the server and such a process. Raises InvalidRequestError that names the field of `asked`, which
    is part of it, that fits no message."""
    try:
        return msgspec.msgpack.encode(message)
    except (OverflowError, RecursionError):
        pass
    for name in asked.__struct_fields__:
        try:
            msgspec.msgpack.encode(getattr(asked, name))
        except OverflowError:
            message = f"{name} holds a whole number of more than 64 bits; send it as text"
            raise InvalidRequestError(message, field=name) from None
        except RecursionError:
            raise InvalidRequestError(f"{name} is nested too deeply; send it flatter", field=name) from None
    raise InvalidRequestError("the body is nested too deeply; send it flatter")


def answer_all(answer: Callable[[bytes], bytes]) -> None:
    """The life of the process: answers questions until there are no more."""
    source, drain = sys.stdin.buffer, sys.stdout.buffer
    while True:
        (size,) = _LENGTH.unpack(_read(source, _LENGTH.size))
        content = answer(_read(source, size))
        drain.write(_LENGTH.pack(len(content)) + content)
        drain.flush()


def ignore_signals() -> None:
    """They are for the server, whose end closes the input."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _read(stream: BinaryIO, size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise SystemExit(0)
    return content
