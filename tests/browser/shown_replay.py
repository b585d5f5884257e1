"""Starts `weft replay --show` as a process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from server_process import SOURCE, Server


@contextmanager
def shown(path: Path) -> Iterator[Server]:
    command = [sys.executable, "-m", "weft.cli.entry", "replay", "--show", str(path), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    assert process.stdout is not None
    try:
        port = re.search(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())
        assert port is not None
        with httpx.Client(base_url=f"http://127.0.0.1:{port[1]}", timeout=60) as client:
            yield Server(process, int(port[1]), client)
    finally:
        process.kill()
        process.communicate()
