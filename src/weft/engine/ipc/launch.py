"""Starts the engine's process and sends it the configuration. `EngineClient` takes over from there.

This module imports little before it starts the process, so that the start of the engine and the imports of the server
run in parallel.
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

# Nearly all objects that a start creates stay alive, so garbage collection would only cost time.
_PROGRAM = "import gc; gc.disable(); from weft.engine.ipc.process import main; main()"


@dataclass(frozen=True)
class LaunchedEngine:
    """An engine process that is starting, and the client's end of its connection. Closing the connection ends the
    process."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    stacks: io.FileIO
    """The process writes the stack traces of its threads here when it crashes or gets SIGUSR1."""


def shared_cores() -> int:
    """A file for `weft.backends.cpu.core_lease`, by which the engine processes of one server share the cores."""
    descriptor = os.memfd_create("weft-cores")
    os.truncate(descriptor, os.sysconf("SC_PAGE_SIZE"))
    return descriptor


def launch_engine(backend: str, options: Mapping[str, Any], config: ServingEngineConfig) -> LaunchedEngine:
    """Starts a process that builds the engine. The process reports the outcome as `wire.Ready` or `wire.Failed`. It
    inherits the file of the option "core_lease" (`shared_cores`).

    Raises OSError if memory, processes or descriptors are exhausted; it then leaves no descriptor open.
    """
    with contextlib.ExitStack() as undo:
        ours, theirs = socket.socketpair()
        undo.enter_context(ours)
        with theirs:
            stacks = undo.enter_context(io.FileIO(os.memfd_create("weft-stacks"), "r+"))
            descriptors = (theirs.fileno(), stacks.fileno())
            process = subprocess.Popen(
                (sys.executable, "-c", _PROGRAM, *map(str, descriptors)),
                pass_fds=(*descriptors, *options.get("core_lease", ())[:1]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        undo.pop_all()
    # Imported only now: building the message types takes time, and the new process uses it to start.
    from weft.engine.ipc import wire

    try:
        ours.sendall(wire.framed(wire.Start(backend, dict(options), config)))
    except OSError:
        pass  # the process has died already; the client finds out when it reads
    return LaunchedEngine(process, ours, stacks)
