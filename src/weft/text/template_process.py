"""Runs a model's chat templates in a separate process.

A template is untrusted code from a model file. minijinja sandboxes it and limits its instructions, but a few
instructions can build a string that exhausts memory and kills the process. So templates run in a process with limits
on memory, time and output size. If it dies, only one request fails.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

_WORKER = Path(__file__).with_name("template_worker.py")
_SECONDS = 10.0
_RESPONSE_BYTES = 64 << 20


class TemplateFailed(Exception):
    """The template does not compile, raised an error, or exceeded a limit. The message says which."""


class TemplateProcess:
    """The process of one model's templates. Thread-safe; one request runs at a time.

    Compilation starts at once, in the background. `check_compiled` waits for it and reports errors.
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = dict(sources)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_compiled = False
        self._end: Callable[[], object] = lambda: None
        with self._lock:
            self._start()

    def check_compiled(self) -> None:
        """Waits until the templates are compiled. Raises TemplateFailed if one does not compile."""
        with self._lock:
            self._wait_until_compiled()

    def render(self, name: str, context: Mapping[str, Any], *, mark: str, now: datetime) -> str:
        """Renders a template. `context` contains only JSON values."""
        request = {"name": name, "context": context, "mark": mark, "time": now.isoformat()}
        with self._lock:
            self._wait_until_compiled()
            return self._request(request)["text"]

    def close(self) -> None:
        """Ends the process. The next `render` starts it again."""
        with self._lock:
            self._end()

    def _start(self) -> None:
        self._end()
        if not sys.executable:
            raise TemplateFailed("its process cannot be started: sys.executable is empty")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal must not interrupt this process
            )
        except OSError as error:
            raise TemplateFailed(f"its process cannot be started: {error}") from error
        self._end = weakref.finalize(self, _end, self._process)
        self._is_compiled = False
        try:
            _write_line(self._process, self._sources)
        except OSError:
            pass  # the process has ended; waiting for its response will report that

    def _wait_until_compiled(self) -> None:
        """Starts the process if it does not run, and waits until the templates are compiled."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        if not self._is_compiled:
            try:
                self._request(None)
            except TemplateFailed:
                self._end()
                self._process = None
                raise
            self._is_compiled = True

    def _request(self, request: Any) -> dict[str, str]:
        """Sends a request and returns the response. `request` None: sends nothing. The response is then the one to the
        sources, which were sent at the start."""
        process = self._process
        assert process is not None and process.stdout is not None
        try:
            if request is not None:
                _write_line(process, request)
            response = json.loads(_read_line(process.stdout.fileno()))
        except (OSError, EOFError) as error:
            self._process = None
            code = _end(process, timeout=1.0)
            # If the process runs out of memory, a signal kills it. A normal exit means that it failed to start.
            cause = (
                "it ran out of memory" if code < 0 else "its process does not start; is minijinja installed?"
            )
            limit = str(error) if isinstance(error, EOFError) else ""
            raise TemplateFailed(limit or cause) from error
        except BaseException:
            # Ctrl-C between request and response: the next request must not read this response.
            self._process = None
            _end(process)
            raise
        if "error" in response:
            raise TemplateFailed(response["error"])
        return response


def _write_line(process: subprocess.Popen[bytes], value: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(value).encode() + b"\n")
    process.stdin.flush()


def _end(process: subprocess.Popen[bytes], timeout: float = 0.0) -> int:
    """Waits for the process up to `timeout` seconds, then kills it. Returns its exit code."""
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # the pipe has unwritten data, and the process is gone
                pass
    return process.returncode


def _read_line(descriptor: int) -> bytes:
    """Reads one line, within the limits of time and size."""
    deadline = time.monotonic() + _SECONDS
    parts: list[bytes] = []
    size = 0
    while not parts or not parts[-1].endswith(b"\n"):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise EOFError(f"it took more than {_SECONDS:.0f} seconds")
        part = os.read(descriptor, 1 << 20)
        if not part:
            raise EOFError
        parts.append(part)
        size += len(part)
        if size > _RESPONSE_BYTES:
            raise EOFError(f"its text has more than {_RESPONSE_BYTES >> 20} MiB")
    return b"".join(parts)
