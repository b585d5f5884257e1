"""Runs one batch from the status in its row to its end. docs/internals/batches.md has every status and crash."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from weft.server.admission.keys import ApiKey
from weft.server.api.services import Services
from weft.server.batches.lines import (
    MAX_LINES,
    CustomIds,
    Line,
    WrongLine,
    error_result,
    read_pieces,
    reply_result,
)
from weft.server.batches.sending import LineSender
from weft.server.metrics import ServerMetrics
from weft.server.state import batches as rows
from weft.server.state.batches import Batch, LineError, Result, Status
from weft.server.state.files import NewFile, StoredFile
from weft.server.state.store import StoreError

_MAX_ERRORS = 100
"""A batch object lists at most this many wrong lines. The error file has all of them."""
_SMALLEST_LINE = 40
"""A line that can run has at least this many bytes. This bounds the lines of a file, and so the table of their ids."""
_RETRY_SECONDS = 2.0
"""Delay before another attempt to save results, after an attempt has failed."""
_SPACE_SECONDS = 5.0
"""Time between two checks of the disk space that is left for results."""


@dataclass(frozen=True)
class LineLimits:
    """The limits for the lines in flight of one batch. One line is always allowed."""

    num_lines: int
    num_bytes: int
    """Limit for the bytes of bodies, and of results that are not saved yet."""


class BatchRun:
    """Owns the lines in flight of one batch, and their results that are not saved yet."""

    def __init__(
        self,
        services: Services,
        batch_id: str,
        key: ApiKey | None,
        sender: LineSender,
        metrics: ServerMetrics,
        log: Callable[..., object],
        limits: Callable[[], LineLimits],
    ) -> None:
        self._services = services
        self._store = services.store
        self._id = batch_id
        self._key = key
        self._sender = sender
        self._metrics = metrics
        self._log = log
        self._limits = limits
        self._num_open = 0
        """Lines that began and whose results are not saved."""
        self._num_bytes = 0
        self._unsaved: list[Result] = []
        self._has_unsaved = asyncio.Event()
        self._has_room = asyncio.Event()
        self._checked_space_at = -math.inf

    async def run(self) -> None:
        """Returns when the batch has ended. If it is cancelled, the results that have arrived are saved."""
        batch = await self._store.run(lambda connection: rows.find(connection, self._id))
        if batch is not None and batch.status == "validating":
            batch = await self._validate(batch)
        if batch is not None and batch.status == "in_progress":
            batch = await self._run_lines(batch)
        if batch is not None and batch.status in ("finalizing", "cancelling"):
            batch = await self._finish(batch)
        if batch is not None:
            message = (
                f"{batch.id} is {batch.status}: {batch.completed} lines completed, {batch.failed} failed, "
                f"{batch.total} in all."
            )
            self._log("batch_ended", message, batch=batch.id, status=batch.status)
            await self._remove_results()

    # ------------------------------------------------------------------ validating

    async def _validate(self, batch: Batch) -> Batch | None:
        """Checks all lines, and saves an error as the result of each wrong one. The batch fails if all are wrong."""
        total = num_wrong = 0
        errors: list[LineError] = []
        try:
            size = self._services.files.path(batch.input_file_id).stat().st_size
            ids = CustomIds(min(MAX_LINES, size // _SMALLEST_LINE + 1))
            async for piece in self._pieces(batch):
                wrong = [one for one in map(ids.checked, piece) if isinstance(one, WrongLine)]
                total, num_wrong = total + len(piece), num_wrong + len(wrong)
                errors += [one.error for one in wrong[: _MAX_ERRORS - len(errors)]]
                if total > MAX_LINES:
                    message = f"the file has more than {MAX_LINES} lines; allowed: {MAX_LINES}; split it"
                    return await self._fail(batch, [LineError("too_many_lines", message)])
                if wrong:
                    await self._save([self._error(one.index, one.custom_id, one.error) for one in wrong])
        except OSError as error:
            message = f"the input file cannot be read: {error.strerror}"
            return await self._fail(batch, [LineError("unreadable_file", message)])
        if total == num_wrong:
            reason = f"all {total} lines are wrong" if total else "the file has no lines"
            return await self._fail(batch, [LineError("no_valid_line", reason), *errors], total)
        message = f"{batch.id} runs: {total} lines of {batch.details.endpoint}, {num_wrong} of them wrong."
        self._log("batch_started", message, batch=batch.id, lines=total, wrong=num_wrong)
        return await self._change(("validating",), "in_progress", total=total, errors=errors)

    async def _fail(self, batch: Batch, errors: list[LineError], total: int = 0) -> Batch | None:
        return await self._change(("validating",), "failed", total=total, errors=errors)

    async def _pieces(self, batch: Batch) -> AsyncIterator[list[Line | WrongLine]]:
        path = self._services.files.path(batch.input_file_id)
        pieces = read_pieces(path, batch.details.endpoint, self._services.settings.max_body_bytes)
        while piece := await asyncio.to_thread(next, pieces, None):
            yield piece

    # ------------------------------------------------------------------ lines

    async def _run_lines(self, batch: Batch) -> Batch | None:
        """Runs all lines without a result. After the completion window they get an error instead."""
        is_expired = self._store.wall_clock() >= batch.expires_at
        if is_expired and batch.completed + batch.failed < batch.total:
            await self._change(("in_progress",), "in_progress", is_expired=True)
        try:
            async with asyncio.TaskGroup() as group:
                saving = group.create_task(self._save_results())
                async for line in self._lines_without_result(batch):
                    await self._wait_for_room(len(line.body))
                    self._num_open += 1
                    self._num_bytes += len(line.body)
                    if is_expired:
                        message = "the completion window passed before this line could run"
                        error = LineError("batch_expired", message)
                        self._take(line, self._error(line.index, line.custom_id, error))
                    else:
                        group.create_task(self._run_line(batch, line))
                await self._wait_for_room(None)
                saving.cancel()
        finally:
            # If the run was cancelled, save the results that have arrived: their lines then do not run again.
            if self._unsaved:
                with suppress(StoreError):
                    await self._save(self._unsaved)
        return await self._change(("in_progress",), "finalizing")

    async def _lines_without_result(self, batch: Batch) -> AsyncIterator[Line]:
        """Yields the valid lines that have no result yet, so that a batch continues where it stopped."""
        try:
            async for piece in self._pieces(batch):
                first, last = piece[0].index, piece[-1].index
                done = await self._store.run(
                    partial(rows.lines_with_result, batch_id=self._id, first=first, last=last)
                )
                for line in piece:
                    if line.index not in done and isinstance(line, Line):
                        yield line
        except FileNotFoundError:  # the file was removed by hand; the batch must still end
            message = "the input file is gone; lines without a result did not run"
            errors = [*batch.details.errors, LineError("unreadable_file", message)]
            await self._change(("in_progress",), "in_progress", errors=errors)

    async def _run_line(self, batch: Batch, line: Line) -> None:
        with self._metrics.batch_lines_running.track_inprogress():
            reply = await self._sender.send(batch.details.endpoint, line.body, self._key)
        self._take(line, reply_result(self._id, line, reply))

    def _take(self, line: Line, result: Result) -> None:
        """Queues the result of a line for `_save_results`."""
        self._num_bytes += len(result.content) - len(line.body)
        self._unsaved.append(result)
        self._has_unsaved.set()

    async def _wait_for_room(self, num_bytes: int | None) -> None:
        """Waits until one more line with this many bytes may begin. None: until no line is in flight."""
        while self._num_open:
            limits = self._limits()
            has_place = self._num_open < limits.num_lines
            if num_bytes is not None and has_place and self._num_bytes + num_bytes <= limits.num_bytes:
                return
            self._has_room.clear()
            await self._has_room.wait()

    async def _save_results(self) -> None:
        """Saves results until it is cancelled. All that arrive during a transaction are in the next one."""
        while True:
            await self._has_unsaved.wait()
            self._has_unsaved.clear()
            results = list(self._unsaved)
            while not await self._try_save(results):
                await asyncio.sleep(_RETRY_SECONDS)
            del self._unsaved[: len(results)]
            self._num_open -= len(results)
            self._num_bytes -= sum(len(one.content) for one in results)
            self._has_room.set()

    async def _try_save(self, results: Sequence[Result]) -> bool:
        """Returns False if the store cannot save the results now."""
        try:
            await self._save(results)
        except StoreError as error:
            self._log("batch_waits", f"{self._id} waits: {error}", "warning", batch=self._id)
            return False
        return True

    async def _save(self, results: Sequence[Result]) -> None:
        """Saves results in one transaction, and sometimes checks the disk space before."""
        now = self._store.wall_clock()
        # abs: an operator may set the clock back
        checks_space = abs(now - self._checked_space_at) >= _SPACE_SECONDS

        def save(connection: Any) -> tuple[int, int]:
            if checks_space:
                self._services.files.check_space(connection, sum(len(one.content) for one in results))
            return rows.add_results(connection, self._id, results)

        completed, failed = await self._store.run(save)
        if checks_space:
            self._checked_space_at = now
        self._metrics.batch_lines(completed, failed)

    # ------------------------------------------------------------------ the end

    async def _finish(self, batch: Batch) -> Batch | None:
        """Writes the results to files. One transaction adds the rows of the files and sets the last status."""
        details = batch.details
        files: dict[bool, NewFile] = {}
        try:
            await self._export(files)
        except BaseException:
            for file in files.values():
                await asyncio.to_thread(file.discard)
            raise
        now = self._store.wall_clock()
        expires_at = None if details.output_seconds is None else now + details.output_seconds
        status: Status = "expired" if details.is_expired else "completed"
        ids = {is_error: file.id for is_error, file in files.items()}

        def end(connection: Any) -> Batch | None:
            return rows.change(
                connection,
                self._id,
                ("finalizing", "cancelling"),
                "cancelled" if batch.status == "cancelling" else status,
                now,
                output_file_id=ids.get(False),
                error_file_id=ids.get(True),
            )

        new = [
            (
                file,
                StoredFile(
                    *(file.id, batch.owner, now, expires_at),
                    f"{self._id}_{'error' if is_error else 'output'}.jsonl",
                    "batch_output",
                    file.num_bytes,
                ),
            )
            for is_error, file in files.items()
        ]
        return await self._services.files.keep(new, end)

    async def _export(self, files: dict[bool, NewFile]) -> None:
        """Writes all results to at most two new files: answers and errors. Adds each file to `files` when it is made, so
        that the caller can discard it after an error."""
        line = -1
        while results := await self._store.run(partial(rows.results_after, batch_id=self._id, line=line)):
            for is_error in {one.is_error for one in results} - files.keys():
                files[is_error] = await self._services.files.create(f"file-{self._services.engine.new_id()}")
            await asyncio.to_thread(_write, files, results)
            line = results[-1].line

    async def _remove_results(self) -> None:
        while await self._store.run(rows.remove_results):
            pass

    async def _change(self, before: Sequence[Status], status: Status, **changes: Any) -> Batch | None:
        """Changes the row of the batch if its status is one of `before`. Returns the row afterwards."""
        now = self._store.wall_clock()
        return await self._store.run(
            lambda connection: rows.change(connection, self._id, before, status, now, **changes)
        )

    def _error(self, index: int, custom_id: str | None, error: LineError) -> Result:
        return error_result(self._id, index, custom_id, error.code, error.message)


def _write(files: dict[bool, NewFile], results: Sequence[Result]) -> None:
    for is_error, file in files.items():
        content = b"".join(one.content + b"\n" for one in results if one.is_error == is_error)
        file.write(content)
