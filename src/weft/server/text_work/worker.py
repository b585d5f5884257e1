"""A process that does for the server what would keep the interpreter to itself: one question in, one answer out.

A message is bytes behind their length; the end of its input ends the process, however the server ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import msgspec

from weft.errors import InvalidRequestError, WeftError
from weft.server.text_work.places import WorkSlots

_START_SECONDS = 60.0
_RESTART_SECONDS = 1.0
"""What a new process costs, about."""
_LENGTH = struct.Struct("<I")


class Worker:
    """Owns one process, which starts with the first question. It is asked one question at a time."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = (sys.executable, "-m", module, *arguments)
        self._process: asyncio.subprocess.Process | None = None
        self._ending: set[asyncio.Task[int]] = set()

    async def run(self, *job: bytes | bytearray, seconds: float) -> bytes:
        """The answer to a question, whose parts are sent as one; TimeoutError where it takes longer than `seconds`,
        without the start of the process. A question that gets no answer, or is cancelled, ends the process: its answer
        must not be taken for the next one's."""
        is_done = False
        try:
            process = await self._started_process()
            async with asyncio.timeout(seconds):
                result = await _exchange(process, job)
            is_done = True
            return result
        except TimeoutError:
            raise  # an OSError too, by its class
        # A RuntimeError is a thread that cannot be started; the next question tries again.
        except (OSError, RuntimeError, MemoryError, asyncio.IncompleteReadError) as error:
            raise WeftError("a process of the server died over this request; try again") from error
        finally:
            if not is_done:
                self._kill()

    async def close(self) -> None:
        """Ends the process and waits until it is gone, with all that were ended before it."""
        self._kill()
        await asyncio.gather(*self._ending)

    async def _started_process(self) -> asyncio.subprocess.Process:
        process = self._process
        if process is None or process.returncode is not None:
            self._process = process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                process_group=0,  # so that processes which it started end with it
            )
            try:
                async with asyncio.timeout(_START_SECONDS):
                    await _exchange(process, ())
            except TimeoutError:
                raise WeftError("a process of the server does not start; try again") from None
        return process

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        ending = asyncio.create_task(process.wait())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


class Workers:
    """Owns several processes of one kind, and the questions that wait for one (in the order of `Places`)."""

    def __init__(self, module: str, *arguments: str, count: int = 1) -> None:
        self._workers = tuple(Worker(module, *arguments) for _ in range(count))
        self._idle = list(self._workers)
        self._slots = WorkSlots(count)
        self._running_jobs: dict[asyncio.Task[bytes], tuple[Worker, float]] = {}
        """The process and the cost of each question that is being answered."""

    async def run(self, *job: bytes | bytearray, client_id: str, cost: float, seconds: float) -> bytes:
        """As `Worker.ask`, for a question that takes about `cost` seconds. Cancelled, a question that waits is dropped. One
        that is being answered ends with its process where a new process costs less than the answer."""
        await self._slots.take(client_id, cost)
        worker = self._idle.pop()  # the one used last: another is started only where it is busy
        running = asyncio.create_task(worker.run(*job, seconds=seconds))
        self._running_jobs[running] = worker, cost
        running.add_done_callback(self._end)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if cost > _RESTART_SECONDS:
                running.cancel()
            raise

    async def close(self) -> None:
        """Ends the processes and waits until they are gone."""
        running = tuple(self._running_jobs)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for worker in self._workers:
            await worker.close()

    def _end(self, running: asyncio.Task[bytes]) -> None:
        worker, cost = self._running_jobs.pop(running)
        if not running.cancelled():
            running.exception()  # its client may have left: asyncio would log an error that no task retrieved
        self._idle.append(worker)
        self._slots.free(cost)


async def _exchange(process: asyncio.subprocess.Process, job: Sequence[bytes | bytearray]) -> bytes:
    """The answer; for no question the first word of a process that is ready."""
    assert process.stdin is not None and process.stdout is not None
    if job:
        process.stdin.write(_LENGTH.pack(sum(map(len, job))))
        for part in job:
            process.stdin.write(part)
        await process.stdin.drain()
    (size,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
    return await process.stdout.readexactly(size)


def encode_message(message: Any, asked: msgspec.Struct) -> bytes:
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


def serve_jobs(result: Callable[[bytes], bytes]) -> None:
    """The main loop of the process: reports that it is ready, then answers questions until its input ends."""
    source = sys.stdin.buffer
    _write(b"")
    while True:
        (size,) = _LENGTH.unpack(_read(source, _LENGTH.size))
        _write(result(_read(source, size)))


def ignore_signals() -> None:
    """They are for the server, whose end closes the input."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _read(stream: BinaryIO, size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise SystemExit(0)
    return content


def _write(content: bytes) -> None:
    try:
        sys.stdout.buffer.write(_LENGTH.pack(len(content)) + content)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os._exit(0)  # the server is gone; a normal exit would write once more
