"""`weft generate --input`: runs a file of any length through the engine and writes each answer as soon as it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from weft.cli.lines import MAX_LINE_BYTES, Form, Key, Line, LineDefaults, make_job, read_line
from weft.cli.result_json import answer, error_answer, error_of, id_of_request
from weft.errors import InvalidRequestError, WeftError
from weft.json_lines import read_lines
from weft.request import GenerationResult

if TYPE_CHECKING:
    from weft.llm import LLM, PromptJob


class Output:
    """Writes JSON lines, each completely or not at all: Ctrl-C takes effect after the current line."""

    def __init__(
        self,
        file: IO[bytes],
        path: Path | None = None,
        done: frozenset[Key] = frozenset(),
        overwrite: bool = False,
    ) -> None:
        self.done = done
        """Lines that an earlier run has answered."""
        self._file = file
        self._path = path
        self._overwrite = overwrite
        self._is_writing = False
        self._was_interrupted = False

    def begin(self) -> None:
        """Empties the file with --overwrite. Called only after the model is loaded, because loading may fail."""
        if self._overwrite:
            self._file.truncate(0)

    def write(self, content: dict[str, Any]) -> None:
        line = json.dumps(content, ensure_ascii=False).encode() + b"\n"
        self._is_writing = True
        try:
            while line:
                line = line[self._file.write(line) :]  # an unbuffered write may accept only a part
            self._file.flush()
        except OSError as error:
            if self._path is None:
                raise
            raise WeftError(
                f"{self._path}: cannot be written: {error.strerror}; --resume continues after the last whole line"
            ) from error
        finally:
            self._is_writing = False
        if self._was_interrupted:
            raise KeyboardInterrupt

    def interrupt(self, signal_number: int, frame: FrameType | None) -> None:
        """Replaces Python's handler for Ctrl-C."""
        self._was_interrupted = True
        if not self._is_writing:
            raise KeyboardInterrupt


@contextmanager
def open_output(path: Path | None, overwrite: bool, resume: bool) -> Iterator[Output]:
    """Opens the output: standard output, or a file. An existing file needs `overwrite` or `resume`."""
    with ExitStack() as stack:
        if path is None:
            output = Output(sys.stdout.buffer)
        else:
            try:
                holds_something = path.is_file() and path.stat().st_size > 0
                if holds_something and not overwrite and not resume:
                    raise InvalidRequestError(
                        f"{path}: exists already; --resume keeps its answers and adds the missing ones, "
                        "--overwrite replaces it",
                        field="output",
                    )
                done = _keep_answers(path.resolve()) if resume and holds_something else frozenset()
                # Unbuffered: after a failed write, a buffer would fail again when the file is closed.
                file = stack.enter_context(path.open("ab", buffering=0))
            except OSError as error:
                raise InvalidRequestError(
                    f"{path}: cannot be written: {error.strerror}", field="output"
                ) from error
            output = Output(file, path, done, overwrite and holds_something)
        previous = signal.getsignal(signal.SIGINT)
        # A background job of a script starts with SIGINT ignored; it must stay ignored.
        if previous is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, output.interrupt)
            stack.callback(signal.signal, signal.SIGINT, previous)
        yield output


def _keep_answers(path: Path) -> frozenset[Key]:
    """Returns the keys of all answers in an output file. Removes failed lines and an incomplete last line from it.
    Refuses a file with any other line, and does not change it."""
    done: set[Key] = set()
    kept = path.with_name(f".{path.name}.resume")
    try:
        with path.open("rb") as old, kept.open("wb") as new:
            shutil.copymode(path, kept)
            for number, raw in enumerate(read_lines(old, MAX_LINE_BYTES), start=1):
                content = _parse(raw)
                key = None if content is None else _key_of_answer(content)
                if content is None and isinstance(raw, bytes) and not raw.endswith(b"\n"):
                    break  # the last line is incomplete
                if content is None:
                    raise InvalidRequestError(
                        f"{path}: line {number} was not written by weft, so the file cannot be resumed; "
                        "check the name, or replace the file with --overwrite",
                        field="output",
                    )
                if key is not None:
                    done.add(key)
                    new.write(raw)  # type: ignore[arg-type]
        os.replace(kept, path)
    finally:
        kept.unlink(missing_ok=True)
    return frozenset(done)


def _parse(raw: bytes | InvalidRequestError) -> dict[str, Any] | None:
    """Parses a complete line of an output; None for anything else."""
    if isinstance(raw, InvalidRequestError) or not raw.endswith(b"\n"):
        return None
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    is_ours = isinstance(content, dict) and (
        "index" in content or {"custom_id", "response"} <= content.keys()
    )
    return content if is_ours else None


def _key_of_answer(content: dict[str, Any]) -> Key | None:
    """The key of the input line that a line of the output answers. None if that line failed."""
    response = content.get("response")
    is_refused = isinstance(response, dict) and response.get("status_code") != 200
    if content.get("error") is not None or is_refused:
        return None
    if "custom_id" in content or "id" in content:
        identifier = content.get("custom_id", content.get("id"))
        return ("id", identifier) if isinstance(identifier, str | int) else None
    return ("index", content["index"]) if isinstance(content["index"], int) else None


class BatchFileRun:
    """One run over a batch file. It reads a line only when the engine has room for it, and counts the answers."""

    def __init__(self, llm: LLM, model: str, defaults: LineDefaults, output: Output) -> None:
        self.num_read = self.num_done = self.num_failed = self.num_skipped = self.num_tokens = 0
        self._llm = llm
        self._model = model
        self._defaults = defaults
        self._output = output
        self._started = time.monotonic()

    def run(self, source: IO[bytes]) -> None:
        """Answers all lines and prints a summary. Raises if some failed."""
        self._output.begin()
        try:
            with _progress(source) as show:
                for job, result in self._llm.run(self._jobs(source)):
                    self._take(job.key, result)
                    # The position in the file would be too far ahead: lines are read before they are answered.
                    answered = self.num_done + self.num_failed + self.num_skipped
                    show(answered / self.num_read, self._summary())
        finally:
            skipped = f"; {self.num_skipped} were answered before" if self.num_skipped else ""
            Console(stderr=True, highlight=False).print(
                f"{self._summary()}{skipped}", style="dim", soft_wrap=True
            )
        if self.num_failed:
            total = self.num_done + self.num_failed
            raise WeftError(f"{self.num_failed} of {total} lines failed; see their errors in the output")

    def _jobs(self, source: IO[bytes]) -> Iterator[PromptJob]:
        """Yields the jobs of all valid lines. Writes the errors of invalid ones."""
        form: Form = "plain"
        lines_of: dict[Key, int] = {}
        for index, raw in enumerate(read_lines(source, MAX_LINE_BYTES)):
            if isinstance(raw, bytes) and not raw.strip():
                continue
            self.num_read += 1
            line, content = (
                read_line(raw, index, form) if isinstance(raw, bytes) else (Line(index, form), raw)
            )
            form = line.form
            first = index if line.identifier is None else lines_of.setdefault(line.key, index)
            # A duplicate id is an error even if the output has an answer for it: that answer belongs to the first line.
            if first == index and line.key in self._output.done:
                self.num_skipped += 1
                continue
            try:
                if first != index:
                    raise InvalidRequestError(
                        f"line {first + 1} has the id {line.identifier!r} already; give line {index + 1} another",
                        field="id" if line.form == "plain" else "custom_id",
                        code="duplicate_id",
                    )
                if isinstance(content, InvalidRequestError):
                    raise content
                yield make_job(line, content, self._defaults, self._llm)
            except InvalidRequestError as error:
                self._take(line, error)

    def _take(self, line: Line, result: GenerationResult | WeftError) -> None:
        """Writes the output line of a result or an error, and counts it."""
        error = result if isinstance(result, WeftError) else error_of(result)
        if error is not None:
            name = id_of_request(result) if isinstance(result, GenerationResult) else ""
            self._output.write(error_answer(line, error, name))
            self.num_failed += 1
            return
        assert isinstance(result, GenerationResult)
        self._output.write(answer(line, result, self._llm.text.tokenizer, self._model))
        self.num_done += 1
        self.num_tokens += sum(len(choice.tokens) for choice in result.choices)

    def _summary(self) -> str:
        speed = self.num_tokens / max(time.monotonic() - self._started, 1e-9)
        return f"{self.num_done} done, {self.num_failed} failed, {speed:,.0f} tokens/s"


@contextmanager
def _progress(source: IO[bytes]) -> Iterator[Callable[[float, str], None]]:
    """Shows a progress bar in a terminal. The size of a pipe is unknown, so its bar has no total.

    The arguments of the callback: the fraction of the lines read so far that are answered, and the text beside the bar.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("generating"),
        BarColumn(24),
        TimeRemainingColumn(),
        TextColumn("{task.fields[summary]}"),
    )
    is_file, begin, total = source.seekable(), 0, None
    if is_file:
        begin = source.tell()
        total = source.seek(0, os.SEEK_END) - begin
        source.seek(begin)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("", total=total, summary="")

        def show(share: float, summary: str) -> None:
            bars.update(task, completed=(source.tell() - begin) * share if is_file else 0, summary=summary)

        yield show
