"""Starts the engine's process and tells it what to build; the client takes over from there.

Nothing is imported before the process runs that it does not need: a server that starts has the engine's interpreter
working on one core while its own imports keep the other busy.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.config import ServingEngineConfig

# Everything that is made while it starts stays: to look for garbage among it is time lost.
_PROGRAM = "import gc; gc.disable(); from weft.engine.process import main; main()"


@dataclass(frozen=True)
class LaunchedEngine:
    """A process that builds its engine, and our end of the connection: closing it ends the process."""

    process: subprocess.Popen[bytes]
    connection: socket.socket


def launch_engine(backend: str, options: Mapping[str, Any], config: ServingEngineConfig) -> LaunchedEngine:
    """A new process, at work on what it was told; its first word is whether that went well."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            (sys.executable, "-c", _PROGRAM, str(theirs.fileno())),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    # Not at the top: its types take time to make, which the process has begun to use by now.
    from weft.engine import wire

    try:
        ours.sendall(wire.framed(wire.Start(backend, dict(options), config)))
    except OSError:
        pass  # it is gone already, as whoever listens to it will find
    return LaunchedEngine(process, ours)
