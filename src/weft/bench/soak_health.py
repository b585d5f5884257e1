"""Asks a server for its health twenty times a second, from a process of its own: python -m weft.bench.soak_health HOST PORT.

Each poll is one line: when it was due (the machine's monotonic clock), the seconds from then to the whole answer, and
the status, 0 where there was none. A poll that is late because the one before it was counts from when it was due. The
process ends when its input does.
"""

from __future__ import annotations

import select
import socket
import sys
import time

POLLS_PER_SECOND = 20
_PATIENCE_SECONDS = 10.0


def poll(host: str, port: int) -> int:
    """The status of one answer, on a connection of its own as a probe has it."""
    host_header = f"[{host}]" if ":" in host else host
    try:
        with socket.create_connection((host, port), timeout=_PATIENCE_SECONDS) as connection:
            connection.sendall(
                f"GET /health HTTP/1.1\r\nHost: {host_header}:{port}\r\nConnection: close\r\n\r\n".encode()
            )
            received = b""
            while part := connection.recv(4096):
                received += part
    except OSError:
        return 0
    head, _, _ = received.partition(b"\r\n")
    fields = head.split(b" ")
    return int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else 0


def main() -> None:
    host, port = sys.argv[1], int(sys.argv[2])
    due = time.monotonic()
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))
        if ready:  # closed
            return
        status = poll(host, port)
        print(f"{due:.6f} {time.monotonic() - due:.6f} {status}", flush=True)
        due += 1 / POLLS_PER_SECOND


if __name__ == "__main__":
    main()
