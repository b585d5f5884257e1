"""Worker processes: they run jobs that would hold the interpreter lock of the server. One job in, one result out.

A message is its length, then its bytes. A worker process ends when its input ends, even if the server crashed.
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
from weft.server.text_work.work_slots import WorkSlots

_START_SECONDS = 60.0
_RESTART_SECONDS = 1.0
"""Approximate cost of starting a new process."""
_LENGTH = struct.Struct("<I")


class Worker:
    """Owns one worker process, which starts with the first job. It runs one job at a time."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = (sys.executable, "-m", module, *arguments)
        self._process: asyncio.subprocess.Process | None = None
        self._ending: set[asyncio.Task[int]] = set()

    async def run(self, *job: bytes | bytearray, seconds: float) -> bytes:
        """Sends the parts of a job as one message and returns its result. Raises TimeoutError after `seconds`, not
        counting the start of the process. If a job is cancelled or has no result, its process is killed: the next job
        must not get its late result."""
        is_done = False
        try:
            process = await self._started_process()
            async with asyncio.timeout(seconds):
                result = await _exchange(process, job)
            is_done = True
            return result
        except TimeoutError:
            raise  # else the next clause would catch it: TimeoutError is a subclass of OSError
        # RuntimeError: a thread could not be started. The next job starts the process again.
        except (OSError, RuntimeError, MemoryError, asyncio.IncompleteReadError) as error:
            raise WeftError("a worker process of the server died during this request; try again") from error
        finally:
            if not is_done:
                self._kill()

    async def close(self) -> None:
        """Ends the process, and waits until it and all earlier ones are gone."""
        self._kill()
        await asyncio.gather(*self._ending)

    async def _started_process(self) -> asyncio.subprocess.Process:
        process = self._process
        if process is None or process.returncode is not None:
            self._process = process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                process_group=0,  # so that `_kill` ends its child processes too
            )
            try:
                async with asyncio.timeout(_START_SECONDS):
                    await _exchange(process, ())
            except TimeoutError:
                raise WeftError("a worker process of the server did not start in time; try again") from None
        return process

    def _kill(self) -> None:
        """Kills the process and its children."""
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
    """Owns several worker processes of one kind. `WorkSlots` orders the jobs that wait for one."""

    def __init__(self, module: str, *arguments: str, count: int = 1) -> None:
        self._workers = tuple(Worker(module, *arguments) for _ in range(count))
        self._idle = list(self._workers)
        self._slots = WorkSlots(count)
        self._running_jobs: dict[asyncio.Task[bytes], tuple[Worker, float]] = {}
        """Task of a running job -> its worker, and its cost in seconds."""

    async def run(self, *job: bytes | bytearray, client_id: str, cost: float, seconds: float) -> bytes:
        """Runs a job of about `cost` seconds in one of the processes. On cancellation a waiting job is dropped. A
        running job is killed with its process only if it costs more than a new process."""
        await self._slots.take(client_id, cost)
        worker = self._idle.pop()  # the worker used last: its process runs, others may not be started
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
            running.exception()  # asyncio would log an error that is not retrieved; the client may be gone
        self._idle.append(worker)
        self._slots.free(cost)


async def _exchange(process: asyncio.subprocess.Process, job: Sequence[bytes | bytearray]) -> bytes:
    """Sends a job and reads its result. Without a job, reads the empty message of a process that is ready."""
    assert process.stdin is not None and process.stdout is not None
    if job:
        process.stdin.write(_LENGTH.pack(sum(map(len, job))))
        for part in job:
            process.stdin.write(part)
        await process.stdin.drain()
    (size,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
    return await process.stdout.readexactly(size)


def encode_message(message: Any, content: msgspec.Struct) -> bytes:
    """Encodes a message for a worker process. `content` is the part of the message that comes from the client. If it
    cannot be encoded, raises InvalidRequestError with the name of the invalid field."""
    try:
        return msgspec.msgpack.encode(message)
    except (OverflowError, RecursionError):
        pass
    for name in content.__struct_fields__:
        try:
            msgspec.msgpack.encode(getattr(content, name))
        except OverflowError:
            message = f"{name} contains an integer of more than 64 bits; send it as a string"
            raise InvalidRequestError(message, field=name) from None
        except RecursionError:
            raise InvalidRequestError(f"{name} is nested too deeply; use fewer levels", field=name) from None
    raise InvalidRequestError("the body is nested too deeply; use fewer levels")


def serve_jobs(run: Callable[[bytes], bytes]) -> None:
    """The main loop of a worker process: reports that it is ready, then runs jobs until its input ends."""
    source = sys.stdin.buffer
    _write(b"")
    while True:
        (size,) = _LENGTH.unpack(_read(source, _LENGTH.size))
        _write(run(_read(source, size)))


def ignore_signals() -> None:
    """Ignores SIGINT and SIGTERM, which are for the server. This process ends when the server closes its input."""
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
        os._exit(0)  # the server is gone; a normal exit would flush stdout and fail again
