"""The server that a benchmark starts in a separate process: the real server, with `ServerSettings` given as JSON.

It prints its port as one line and ends when its standard input is closed, so that a killed benchmark leaves no process
behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from weft.errors import WeftError
from weft.server.lifecycle import Started, serve
from weft.server.logs import ServerLog
from weft.server.settings import ServerSettings

NOOP_CONTEXT = 8192
_CPU_BLOCKS = 384


@asynccontextmanager
async def running_server(
    backend: str, path: str, vocabulary_size: int, **backend_options: Any
) -> AsyncIterator[int]:
    """Runs a server during the `with` block. Yields its port."""
    settings: dict[str, Any] = {"model": path, "names": ["soaked"], "port": 0, "backend": backend}
    if backend == "noop":
        settings["backend_options"] = {"vocabulary_size": vocabulary_size, "max_context": NOOP_CONTEXT}
    else:
        settings["backend_options"] = {"checkpoint": path, "max_context": 2048}
        # Few KV blocks: sequences are preempted, and the cache is full after a minute or two. Later growth is a leak.
        settings["engine"] = {"scheduler": {"policy": "adaptive"}, "cache": {"num_blocks": _CPU_BLOCKS}}
    settings["backend_options"] |= backend_options
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "weft.bench.soak_server", json.dumps(settings)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
        if not line:
            raise WeftError("the server did not start; its messages are above")
        yield int(line)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        if await process.wait() != 0:
            print(f"the server ended with exit code {process.returncode}", file=sys.stderr, flush=True)


def _announce(started: Started) -> None:
    print(started.port, flush=True)


def _end_with_parent() -> None:
    """Waits until standard input is closed, then ends this process."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    settings = msgspec.json.decode(sys.argv[1], type=ServerSettings)
    serve(settings, _announce, ServerLog("off"))


if __name__ == "__main__":
    main()
