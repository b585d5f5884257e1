"""`weft replay`: replays an event log with the real scheduler."""

from __future__ import annotations

from pathlib import Path

import typer

from weft.engine.replay import replay


def replay_command(path: Path) -> None:
    report = replay(str(path))
    typer.echo(
        f"{path} replayed exactly: {report.requests} requests, {report.steps} steps, {report.tokens} tokens, "
        f"every plan the same{' up to the last line, which is incomplete' if report.is_cut else ''}"
    )
