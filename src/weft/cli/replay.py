"""`weft replay`: replays an event log with the real scheduler, and shows it in a browser."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from weft.engine.replay import ReplayReport, replay
from weft.errors import WeftError

_SWITCH_SECONDS = 0.001
"""Switch interval of the interpreter: a response waits about this long for the thread that replays."""


def replay_command(path: Path) -> None:
    report = replay(str(path))
    end = " up to the last line, which is incomplete" if report.is_cut else ""
    typer.echo(f"{path} replayed exactly: {_counts(report)}, every plan the same{end}")


def show_command(path: Path, port: int) -> None:
    """Serves the live page of an event log until a signal arrives."""
    from weft.engine.replay_frames import ReplayFrames
    from weft.server.replay_server import serve_replay
    from weft.terminal import one_line

    frames = ReplayFrames(str(path))
    sys.setswitchinterval(_SWITCH_SECONDS)

    def on_start(address: str) -> None:
        typer.echo(f"{path} at {address}; Ctrl-C ends")
        sys.stdout.flush()
        frames.start(on_end)

    def on_end() -> None:
        """Runs in the thread of the replay."""
        if frames.problem is None:
            message = f"{path} replayed: {_counts(frames.report)}"
        else:
            message = f"weft: {one_line(WeftError(frames.problem))}. The page shows the {frames.num_frames:,} frames before that"
        print(message, file=sys.stderr, flush=True)

    try:
        serve_replay(frames, path.name, port, on_start)
    finally:
        frames.close()


def _counts(report: ReplayReport) -> str:
    return f"{report.requests} requests, {report.steps} steps, {report.tokens} tokens"
