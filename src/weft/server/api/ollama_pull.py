"""Pulls and deletes models for clients of Ollama's API: in a thread, with progress, cancelled if the client leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.errors import WeftError
from weft.loading.cache import Progress, PullProgress
from weft.loading.pull import cached_models, pull, remove
from weft.server.api.ollama_writer import error_body
from weft.server.errors import ApiError, as_api_error

_MAX_THREADS = 4
_LONG = 3600.0
"""Seconds of one wait for progress while nothing is sent to the client."""
_HUB_PREFIXES = ("hf.co/", "huggingface.co/", "hf:")
"""The prefixes that the name of a repository may have. Ollama's clients write the first two."""
_STATUSES = {
    "wait": "waiting for another pull of this model",
    "find": "pulling manifest",
    "download": "pulling {model}",
    "unpack": "unpacking {model}",
    "check": "verifying {model}",
}


class _Cancelled(BaseException):
    """Ends the thread at its next progress. Not an `Exception`: the code that downloads must not handle it."""


def fetchable_name(name: str) -> str | None:
    """The name under which weft fetches the model. None: weft cannot fetch it."""
    if name.removesuffix(":latest") == "default":
        return "default"
    for prefix in _HUB_PREFIXES:
        if name.startswith(prefix):
            return "hf:" + name.removeprefix(prefix).removesuffix(":latest")
    return None


class ModelWork:
    """One pull or removal. It runs in a thread, which reports progress to the event loop."""

    def __init__(self, work: Callable[[Progress], object], on_end: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._work = work
        self._on_end = on_end
        self._is_cancelled = False
        self._pending: dict[str, PullProgress] = {}
        """Stage -> its newest progress that is not sent yet. Newer progress replaces older, so a client that reads
        slowly costs little memory."""
        self._has_news = asyncio.Event()
        self._is_over = False
        self._error: Exception | None = None
        # A daemon: a thread that waits for a lock or for the network does not keep the server alive.
        threading.Thread(target=self._run, name="weft-models", daemon=True).start()

    def cancel(self) -> None:
        self._is_cancelled = True

    async def news(self, seconds: float) -> list[PullProgress]:
        """The newest progress. Waits for it or for the end, at most `seconds`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._has_news.wait(), seconds)
        self._has_news.clear()
        news = list(self._pending.values())
        self._pending.clear()
        return news

    @property
    def is_over(self) -> bool:
        return self._is_over and not self._pending

    def check(self) -> None:
        """Raises if the work failed."""
        if self._error is not None:
            raise self._error

    async def wait(self) -> None:
        """Waits for the end. Raises if the work failed. If the caller is cancelled, so is the work."""
        try:
            while not self.is_over:
                await self.news(_LONG)
            self.check()
        finally:
            self.cancel()

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        error: Exception | None = None
        try:
            self._work(self._progress)
        except _Cancelled:
            pass
        except Exception as failure:
            error = failure
        with suppress(RuntimeError):  # raised if the server has closed its event loop
            self._loop.call_soon_threadsafe(self._end, error)

    def _progress(self, progress: PullProgress) -> None:
        if self._is_cancelled:
            raise _Cancelled
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._report, progress)

    # ------------------------------------------------------------------ in the event loop

    def _report(self, progress: PullProgress) -> None:
        self._pending[progress.stage] = progress
        self._has_news.set()

    def _end(self, error: Exception | None) -> None:
        self._error, self._is_over = error, True
        self._on_end()
        self._has_news.set()


class ModelStore:
    """Starts pulls and removals of one server, and limits how many run at once."""

    def __init__(self, served: Sequence[Path], silence_seconds: float) -> None:
        self._served = served
        self._silence_seconds = silence_seconds
        self._num_threads = 0

    def pull(self, name: str) -> ModelWork:
        return self._start(lambda progress: pull(name, progress, verify=True))

    async def remove(self, name: str) -> None:
        """Removes a model from the disk. Raises ApiError if the model is unknown, or is being served."""
        await self._start(lambda progress: self._remove(name, progress)).wait()

    def _start(self, work: Callable[[Progress], object]) -> ModelWork:
        if self._num_threads >= _MAX_THREADS:
            message = f"{_MAX_THREADS} models are being pulled or deleted; wait for one of them"
            raise ApiError(429, message, code="too_many_pulls")
        self._num_threads += 1
        return ModelWork(work, self._free)

    def _free(self) -> None:
        self._num_threads -= 1

    def _remove(self, name: str, progress: Progress) -> None:
        kept = next((one for one in cached_models() if one.name == name), None)
        if kept is None:
            message = f"there is no downloaded model {name!r:.200}; `weft models` lists them"
            raise ApiError(404, message, param="model", code="model_not_found")
        path = kept.path.resolve()
        if any(path == one or path in one.parents for one in (each.resolve() for each in self._served)):
            raise in_use(name)
        remove(name, progress)

    async def lines(self, work: ModelWork, name: str) -> AsyncIterator[dict[str, Any]]:
        """The progress of a pull, as lines. The last line is success or an error. While there is no new progress, the
        previous line is repeated, so that the client does not give up."""
        last: dict[str, Any] = {"status": _STATUSES["find"]}
        yield last
        try:
            while not work.is_over:
                news = [_line(name, progress) for progress in await work.news(self._silence_seconds)]
                for line in news or [last]:
                    yield line
                last = news[-1] if news else last
            work.check()
            yield {"status": "success"}
        except WeftError as error:
            yield error_body(as_api_error(error))
        except Exception:
            yield error_body(ApiError.internal_error())
            raise
        finally:
            work.cancel()


def in_use(name: str) -> ApiError:
    message = f"the model {name!r:.200} is being served; stop the server, then delete it with `weft remove`"
    return ApiError(409, message, param="model", code="model_in_use")


def _line(name: str, progress: PullProgress) -> dict[str, Any]:
    """A line of progress. Clients show one bar for each digest, so each stage has its own digest."""
    status = {"status": _STATUSES[progress.stage].format(model=name)}
    if not progress.total_bytes:
        return status
    digest = f"{progress.stage}:{name}"
    return {**status, "digest": digest, "total": progress.total_bytes, "completed": progress.done_bytes}
