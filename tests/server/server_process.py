"""Starts a real server process on a free port for tests."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
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
"""A slow backend: its long answers take more than a minute on any machine, so that tests can observe them running."""


def api_key(secret: str, **fields: Any) -> dict[str, Any]:
    """A key as a setting. Its name is its secret."""
    return {"name": secret, "key_sha256": hashlib.sha256(secret.encode()).hexdigest(), **fields}


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[str]
    port: int
    client: httpx.Client
    ollama_port: int | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def metric(self, name: str) -> float:
        """The value of a metric, summed over its labels."""
        return self.metrics(name)[0]

    def metrics(self, *names: str) -> list[float]:
        """The values of several metrics from one scrape during which the engine responds: otherwise its gauges are
        zero."""
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
        """Waits until no request runs or waits and no KV block is in use."""
        engine = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        wait_for(lambda: not any(self.metrics(*engine, "http_requests_open")))

    def children(self) -> list[int]:
        """Running child processes of the server."""
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
            with suppress(OSError):  # the process may have ended
                if b"weft.engine.ipc.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        raise AssertionError("no engine process runs")


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at, f"condition not met within {seconds} s"
        time.sleep(0.02)


@contextmanager
def running_server(model_path: Path, **settings: Any) -> Iterator[Server]:
    """Runs a server with the noop backend and the text side of a real model, unless `settings` change that. `shell`:
    commands of the shell that starts it, such as ulimit."""
    shell = settings.pop("shell", "")
    headers, stderr = settings.pop("headers", {}), settings.pop("stderr", None)
    more_environment = settings.pop("environment", {})
    path = os.pathsep.join([*settings.pop("python_path", []), str(SOURCE)])
    state = tempfile.TemporaryDirectory(prefix="weft-state-")
    given = {
        "state_path": state.name,
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
        ports = json.loads(process.stdout.readline())
        port = ports["port"]
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=60, headers=headers) as client:
            yield Server(process, port, client, ports["ollama_port"])
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.stdin.close()  # launch.py then sends itself a second signal
        process.wait(60)
        process.stdout.close()
        state.cleanup()
