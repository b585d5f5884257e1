"""The server of a soak, in a process of its own: real but for its backend, which no flag of `weft serve` chooses.

It says its port in one line, and ends when its input does: a soak that is killed leaves nothing running.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import msgspec

from weft.server.serve import Started, serve
from weft.server.settings import ServerSettings


def _announce(started: Started) -> None:
    print(started.port, flush=True)


def _end_with_parent() -> None:
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    settings = msgspec.json.decode(sys.argv[1], type=ServerSettings)
    serve(settings, _announce, lambda line: print(line, file=sys.stderr, flush=True))


if __name__ == "__main__":
    main()
