"""Runs a model's chat templates in a process of their own.

A template is code from a model file. minijinja gives it no way out and counts its instructions, but ten of them
double a string ten times, and a string that does not fit into memory ends the process. So that process is not ours:
it has a limit on its memory, its time and its answer, and when it dies, one request gets an error.
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
_ANSWER_BYTES = 64 << 20


class TemplateFailed(Exception):
    """The template does not compile, refused what it was given, or went over a limit; the message says which."""


class TemplateProcess:
    """The templates of one model, by name. May be used from several threads, which take turns.

    It begins to compile them at once; `confirm` says how that went, so that whoever starts it may do something else
    meanwhile.
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = dict(sources)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_compiled = False
        self._end: Callable[[], object] = lambda: None
        with self._lock:
            self._start()

    def confirm(self) -> None:
        """Waits until the templates are compiled; raises TemplateFailed where they cannot be."""
        with self._lock:
            self._wait_until_compiled()

    def render(self, name: str, context: Mapping[str, Any], *, mark: str, now: datetime) -> str:
        """The text of a template. `context` is JSON all through."""
        request = {"name": name, "context": context, "mark": mark, "time": now.isoformat()}
        with self._lock:
            self._wait_until_compiled()
            return self._ask(request)["text"]

    def close(self) -> None:
        """End the process; it is started again when there is something to render."""
        with self._lock:
            self._end()

    def _start(self) -> None:
        self._end()
        if not sys.executable:
            raise TemplateFailed("its process cannot be started: this Python does not know its own path")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is for the program, not for this process
            )
        except OSError as error:
            raise TemplateFailed(f"its process cannot be started: {error}") from error
        self._end = weakref.finalize(self, _end, self._process)
        self._is_compiled = False
        try:
            _write_line(self._process, self._sources)
        except OSError:
            pass  # it has ended, as whoever waits for its answer will find

    def _wait_until_compiled(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self._start()
        if not self._is_compiled:
            try:
                self._ask(None)
            except TemplateFailed:
                self._end()
                self._process = None
                raise
            self._is_compiled = True

    def _ask(self, request: Any) -> dict[str, str]:
        """The answer to a request, or, for None, to what was sent when the process started."""
        process = self._process
        assert process is not None and process.stdout is not None
        try:
            if request is not None:
                _write_line(process, request)
            answer = json.loads(_read_line(process.stdout.fileno()))
        except (OSError, EOFError) as error:
            self._process = None
            code = _end(process, patience=1.0)
            # A signal is what running out of memory ends it with; one that ends by itself never began.
            cause = (
                "it ran out of memory" if code < 0 else "its process does not run; is minijinja installed?"
            )
            limit = str(error) if isinstance(error, EOFError) else ""
            raise TemplateFailed(limit or cause) from error
        except BaseException:
            # Ctrl-C between question and answer: the answer must not be taken for the next one.
            self._process = None
            _end(process)
            raise
        if "error" in answer:
            raise TemplateFailed(answer["error"])
        return answer


def _write_line(process: subprocess.Popen[bytes], value: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(value).encode() + b"\n")
    process.stdin.flush()


def _end(process: subprocess.Popen[bytes], patience: float = 0.0) -> int:
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # what was not written yet has no reader any more
                pass
    return process.returncode


def _read_line(descriptor: int) -> bytes:
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
        if size > _ANSWER_BYTES:
            raise EOFError(f"its text has more than {_ANSWER_BYTES >> 20} MiB")
    return b"".join(parts)
