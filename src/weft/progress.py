"""Progress bars on standard error: for pulling a model and for answering prompts.

rich is imported only when there is progress to show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.loading.cache import Progress, PullProgress
from weft.request import GenerationResult

_STAGES = {
    "wait": "Waiting for another process that pulls this model",
    "find": "Looking up the files",
    "download": "Downloading",
    "unpack": "Unpacking",
    "check": "Checking",
}


class PullBar:
    """Shows the progress of a pull: bars in a terminal, else one line per stage (none with `only_in_terminal`)."""

    def __init__(self, model: str, *, only_in_terminal: bool = False) -> None:
        self.was_fetched = False
        self._model = model
        self._only_in_terminal = only_in_terminal
        self._console: Any = None
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Progress:
        return self.show

    def __exit__(self, *error: object) -> None:
        self.stop()

    def show(self, event: PullProgress) -> None:
        if self._console is None:
            self._open()
        if event.stage not in self._tasks:
            self._begin(event)
        self._bars.update(self._tasks[event.stage], completed=event.done_bytes)

    def say(self, text: str) -> None:
        """Prints a line above the bars. Call it only after `show`."""
        if not self._only_in_terminal or self._console.is_terminal:
            self._console.print(text, style="dim", markup=False, soft_wrap=True)

    def stop(self) -> None:
        if self._bars is not None and self._console.is_terminal:
            self._bars.stop()

    def _open(self) -> None:
        from rich import progress
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False)
        self._bars = progress.Progress(
            *(progress.TextColumn("{task.description}"), progress.BarColumn(24), progress.DownloadColumn()),
            *(progress.TransferSpeedColumn(), progress.TimeRemainingColumn()),
            console=self._console,
            transient=True,
        )

    def _begin(self, event: PullProgress) -> None:
        from rich.filesize import decimal

        if event.stage == "download" and not self.was_fetched:
            self.was_fetched = True
            size = decimal(event.total_bytes)
            done = f" ({decimal(event.done_bytes)} are here already)" if event.done_bytes else ""
            self.say(f"The model '{self._model}' is not on this machine yet. Downloading {size}{done}.")
        if self._console.is_terminal:
            self._bars.start()
        elif event.stage != "find":
            self.say(_STAGES[event.stage])
        total = event.total_bytes or None
        self._tasks[event.stage] = self._bars.add_task(
            _STAGES[event.stage], total=total, completed=event.done_bytes
        )
        if "find" in self._tasks and event.stage != "find":
            self._bars.update(self._tasks["find"], visible=False)


class GenerationBar:
    """Shows the number of answered prompts and the tokens per second. Shows nothing if standard error is no
    terminal."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[speed]}"),
        )
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("generating"),
            *columns,
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, speed="")
        self._tokens = 0

    def __enter__(self) -> Callable[[GenerationResult], None]:
        self._bar.start()
        return self._advance

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def _advance(self, result: GenerationResult) -> None:
        self._tokens += sum(len(choice.tokens) for choice in result.choices)
        elapsed = self._bar.tasks[self._task].elapsed or 0.0
        speed = f"{self._tokens / elapsed:,.0f} tokens/s" if elapsed > 0 else ""
        self._bar.update(self._task, advance=1, speed=speed)
