"""A real server in a process of its own, on a free port, for tests to talk to."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

LAUNCH = Path(__file__).with_name("launch.py")
SOURCE = Path(__file__).parents[2] / "src"
MODEL = "test-model"
MESSAGES = [{"role": "user", "content": "Hello"}]
NOOP = {"vocabulary_size": 49152, "max_context": 8192}
SLOW = {**NOOP, "seconds_per_step": 0.01}
"""Of a backend whose long answers take more than a minute on any machine: for what must be seen while it runs."""


def api_key(secret: str, **fields: Any) -> dict[str, Any]:
    """A key as a setting; it is called like its secret."""
    return {"name": secret, "key_sha256": hashlib.sha256(secret.encode()).hexdigest(), **fields}


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[str]
    port: int
    client: httpx.Client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def metric(self, name: str) -> float:
        """The sum over all labels."""
        return self.metrics(name)[0]

    def metrics(self, *names: str) -> list[float]:
        """Several, all of one moment in which the engine answers: else its figures are zeros that say nothing."""
        lines: list[str] = []

        def is_whole() -> bool:
            lines[:] = self.client.get("/metrics").text.splitlines()
            return any(line.startswith("weft:engine_up{") and line.endswith(" 1.0") for line in lines)

        wait_for(is_whole)
        values = []
        for name in names:
            found = [line for line in lines if line.startswith((f"weft:{name}{{", f"weft:{name} "))]
            assert found, f"no metric weft:{name}"
            values.append(sum(float(line.rpartition(" ")[2]) for line in found))
        return values

    def chat(self, **fields: Any) -> httpx.Response:
        return self.client.post(
            "/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 4, **fields}
        )

    def complete(self, prompt: Any = "Hello", **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4, **fields})

    def wait_until_free(self) -> None:
        """Nothing runs, waits or holds memory."""
        engine = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        wait_for(lambda: not any(self.metrics(*engine, "http_requests_open")))

    def children(self) -> list[int]:
        """Processes that the server started and that still run."""
        found = []
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = status.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == self.process.pid and fields[0] != "Z":
                found.append(int(status.parent.name))
        return found

    def engine_pid(self) -> int:
        for pid in self.children():
            with suppress(OSError):  # it ended meanwhile
                if b"weft.engine.ipc.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        raise AssertionError("no engine's process runs")


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at, f"not within {seconds} s"
        time.sleep(0.02)


@contextmanager
def running_server(model_path: Path, **settings: Any) -> Iterator[Server]:
    """The noop backend behind the text side of a real model, unless `settings` say otherwise. `shell` are commands of the
    shell that starts it, such as ulimit."""
    shell = settings.pop("shell", "")
    headers, stderr = settings.pop("headers", {}), settings.pop("stderr", None)
    more_environment = settings.pop("environment", {})
    path = os.pathsep.join([*settings.pop("python_path", []), str(SOURCE)])
    given = {
        "model": str(model_path),
        "names": [MODEL, "alias"],
        "port": 0,
        "log_format": "off",
        "backend": "noop",
        "backend_options": NOOP,
        **settings,
    }
    environment = {**os.environ, **more_environment, "PYTHONPATH": path}
    process = subprocess.Popen(
        ["sh", "-c", f'{shell}\nexec "$@"', "sh", sys.executable, str(LAUNCH), json.dumps(given)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=environment,
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        port = json.loads(process.stdout.readline())["port"]
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=60, headers=headers) as client:
            yield Server(process, port, client)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.stdin.close()  # and so the second signal
        process.wait(60)
        process.stdout.close()
