"""Starts the engine's process and tells it what to build; the client takes over from there.

Nothing is imported before the process runs that it does not need: a server that starts has the engine's interpreter
working on one core while its own imports keep the other busy.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.config import ServingEngineConfig

# Everything that is made while it starts stays: to look for garbage among it is time lost.
_PROGRAM = "import gc; gc.disable(); from weft.engine.ipc.process import main; main()"


@dataclass(frozen=True)
class LaunchedEngine:
    """A process that builds its engine, and our end of the connection: closing it ends the process."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    stacks: io.FileIO
    """Where the process writes what its threads are doing, when it crashes or gets SIGUSR1."""


def launch_engine(backend: str, options: Mapping[str, Any], config: ServingEngineConfig) -> LaunchedEngine:
    """Starts a process that builds the engine; its first message is whether that succeeded. Raises OSError where there is
    no memory, process or descriptor left for it, and keeps none."""
    with contextlib.ExitStack() as undo:
        ours, theirs = socket.socketpair()
        undo.enter_context(ours)
        with theirs:
            stacks = undo.enter_context(io.FileIO(os.memfd_create("weft-stacks"), "r+"))
            descriptors = (theirs.fileno(), stacks.fileno())
            process = subprocess.Popen(
                (sys.executable, "-c", _PROGRAM, *map(str, descriptors)),
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        undo.pop_all()
    # Not at the top: its types take time to make, which the process has begun to use by now.
    from weft.engine.ipc import wire

    try:
        ours.sendall(wire.framed(wire.Start(backend, dict(options), config)))
    except OSError:
        pass  # it is gone already, as whoever listens to it will find
    return LaunchedEngine(process, ours, stacks)
