"""`weft generate --input`: runs a file of any length through the engine and writes each answer as it is ready."""

from __future__ import annotations

import json
import os
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

from weft.cli.answers import answer, error_answer, error_of
from weft.cli.lines import Form, Line, Wishes, make_job, read_line, read_lines
from weft.errors import InvalidRequestError, WeftError
from weft.request import GenerationResult

if TYPE_CHECKING:
    from weft.llm import LLM, Job


class Output:
    """JSON lines, each written whole or not at all: Ctrl-C waits until the line that is being written is there."""

    def __init__(self, file: IO[bytes], done: frozenset[str | int] = frozenset()) -> None:
        self.done = done
        """The lines that an earlier run has answered."""
        self._file = file
        self._is_writing = False
        self._was_interrupted = False

    def write(self, content: dict[str, Any]) -> None:
        self._is_writing = True
        self._file.write(json.dumps(content, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self._is_writing = False
        if self._was_interrupted:
            raise KeyboardInterrupt

    def interrupt(self, signal_number: int, frame: FrameType | None) -> None:
        """Takes the place of Python's own handler of Ctrl-C."""
        self._was_interrupted = True
        if not self._is_writing:
            raise KeyboardInterrupt


@contextmanager
def open_output(path: Path | None, overwrite: bool, resume: bool) -> Iterator[Output]:
    """Standard output, or a file that is new unless the caller said what to do with the old one."""
    with ExitStack() as stack:
        if path is None:
            output = Output(sys.stdout.buffer)
        else:
            if path.exists() and not overwrite and not resume:
                raise InvalidRequestError(
                    f"{path}: exists already; --resume keeps its answers and adds what is missing, "
                    "--overwrite starts anew",
                    field="output",
                )
            try:
                done = _keep_answers(path) if resume and path.exists() else frozenset()
                file = stack.enter_context(path.open("ab" if resume else "wb"))
            except OSError as error:
                raise InvalidRequestError(
                    f"{path}: cannot be written: {error.strerror}", field="output"
                ) from error
            output = Output(file, done)
        previous = signal.signal(signal.SIGINT, output.interrupt)
        stack.callback(signal.signal, signal.SIGINT, previous)
        yield output


def _keep_answers(path: Path) -> frozenset[str | int]:
    """The keys of all answers in an output. What failed, or was cut when the run was killed, is taken out of the file."""
    done: set[str | int] = set()
    kept = path.with_name(f".{path.name}.resume")
    with path.open("rb") as old, kept.open("wb") as new:
        for raw in read_lines(old):
            key = _key_of_answer(raw) if isinstance(raw, bytes) else None
            if key is not None:
                done.add(key)
                new.write(raw)  # type: ignore[arg-type]
    os.replace(kept, path)
    return frozenset(done)


def _key_of_answer(raw: bytes) -> str | int | None:
    """None for a line that is not a whole answer."""
    try:
        content = json.loads(raw)
        if not raw.endswith(b"\n") or content.get("error") is not None:
            return None
        if "custom_id" in content:
            return content["custom_id"] if content["response"]["status_code"] == 200 else None
        return content.get("id", content["index"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


class Batch:
    """One run: takes lines as fast as answers come, and counts them."""

    def __init__(self, llm: LLM, model: str, wishes: Wishes, output: Output) -> None:
        self.num_read = self.num_done = self.num_failed = self.num_skipped = self.num_tokens = 0
        self._llm = llm
        self._model = model
        self._wishes = wishes
        self._output = output
        self._started = time.monotonic()

    def run(self, source: IO[bytes]) -> None:
        """Answer all lines and say how it went; raises where some failed."""
        try:
            with _progress(source) as show:
                for job, result in self._llm.run(self._jobs(source)):
                    self._take(job.key, result)
                    # Lines are read ahead of their answers.
                    answered = self.num_done + self.num_failed + self.num_skipped
                    show(answered / self.num_read, self._says())
        finally:
            skipped = f"; {self.num_skipped} were answered before" if self.num_skipped else ""
            Console(stderr=True, highlight=False).print(
                f"{self._says()}{skipped}", style="dim", soft_wrap=True
            )
        if self.num_failed:
            total = self.num_done + self.num_failed
            raise WeftError(f"{self.num_failed} of {total} lines failed; the error in the output says why")

    def _jobs(self, source: IO[bytes]) -> Iterator[Job]:
        """The jobs of all good lines; bad ones are answered on the way."""
        form: Form = "plain"
        for index, raw in enumerate(read_lines(source)):
            if isinstance(raw, bytes) and not raw.strip():
                continue
            self.num_read += 1
            line, content = (
                read_line(raw, index, form) if isinstance(raw, bytes) else (Line(index, form), raw)
            )
            form = line.form
            if line.key in self._output.done:
                self.num_skipped += 1
                continue
            try:
                if isinstance(content, InvalidRequestError):
                    raise content
                yield make_job(line, content, self._wishes, self._llm.default_params)
            except InvalidRequestError as error:
                self._take(line, error)

    def _take(self, line: Line, result: GenerationResult | WeftError) -> None:
        error = result if isinstance(result, WeftError) else error_of(result)
        if error is not None:
            self.num_failed += 1
            self._output.write(error_answer(line, error))
            return
        assert isinstance(result, GenerationResult)
        self.num_done += 1
        self.num_tokens += sum(len(choice.tokens) for choice in result.choices)
        self._output.write(answer(line, result, self._llm.text.tokenizer, self._model))

    def _says(self) -> str:
        speed = self.num_tokens / max(time.monotonic() - self._started, 1e-9)
        return f"{self.num_done} done, {self.num_failed} failed, {speed:,.0f} tokens/s"


@contextmanager
def _progress(source: IO[bytes]) -> Iterator[Callable[[float, str], None]]:
    """A bar over the bytes of the input, where a person looks at it; a pipe has no end to run towards. It is shown
    which part of what was read is answered, and what to say beside the bar."""
    console = Console(stderr=True)
    columns = (
        TextColumn("generating"),
        BarColumn(24),
        TimeRemainingColumn(),
        TextColumn("{task.fields[says]}"),
    )
    is_file, begin, total = source.seekable(), 0, None
    if is_file:
        begin = source.tell()
        total = source.seek(0, os.SEEK_END) - begin
        source.seek(begin)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("", total=total, says="")

        def show(share: float, says: str) -> None:
            bars.update(task, completed=(source.tell() - begin) * share if is_file else 0, says=says)

        yield show
