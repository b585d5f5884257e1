"""Starts `weft serve` with the scripted backend, and reads its log: one entry for each request that ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Waits until `condition` returns something true, and returns it."""
    give_up_at = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < give_up_at, f"condition not met within {seconds} s"
        time.sleep(0.02)
    return value


class ScriptedServer:
    """The process of one server, which may be started again at the same port. `backend` is "cpu" for the real model."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        script: Mapping[str, Any],
        options: Sequence[str] = (),
        backend: str = "scripted",
        key: str = "none",
    ) -> None:
        """`key`: with which metrics are read, for a server with keys."""
        self.port, self._key = 0, key
        self._folder, self._model, self._options, self._backend = folder, model, options, backend
        self._process: subprocess.Popen[bytes] | None = None
        self._log = folder / "serve.log"
        folder.mkdir(parents=True, exist_ok=True)
        self._script = folder / "script.json"
        self._script.write_text(json.dumps(script), "utf-8")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), str(SOURCE)]),
            "WEFT_TEST_SCRIPT": str(self._script),
            "WEFT_HOME": str(self._folder / "home"),
        }
        command = [
            str(Path(sys.executable).with_name("weft")),
            "serve",
            str(self._model),
            "--name",
            "default",
        ]
        command += ["--device", self._backend, "--port", str(self.port), *self._options]
        num_ready = len(self._entries("ready"))
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

        def is_ready() -> bool:
            assert self._process is not None and self._process.poll() is None, self._log.read_text()[-4000:]
            return len(self._entries("ready")) > num_ready

        wait_for(is_ready)
        self.port = int(self._entries("ready")[-1]["url"].split(":")[2].split("/")[0])

    def stop(self) -> None:
        """Stops at once: the second signal ends active requests."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(60)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(60)

    def requests(self, since: int = 0, route: str = "", at_least: int = 0) -> list[dict[str, Any]]:
        """The log entries of the requests that have ended, without the first `since`; only those of `route`, if it is
        given. None if there are not `at_least` so many: the log is written a moment after an answer."""
        entries = [entry for entry in self._entries("request")[since:] if route in ("", entry["route"])]
        return entries if len(entries) >= at_least else []

    def refused(self, since: int, route: str) -> list[dict[str, Any]]:
        """The log entries of requests that were refused with a 429."""
        return [entry for entry in self.requests(since, route) if entry["status"] == 429]

    def num_running(self) -> int:
        """The requests that the engine computes now."""
        for line in self._get("/metrics").splitlines():
            if line.startswith("weft:num_requests_running"):
                return int(float(line.rpartition(" ")[2]))
        return 0

    def use_up(self, key: str, is_enough: Callable[[], Any]) -> None:
        """Takes all requests that the limit of a key allows, until `is_enough`."""
        body = json.dumps({"model": "default", "prompt": "x", "max_tokens": 1}).encode()

        def take() -> Any:
            request = urllib.request.Request(f"{self.url}/v1/completions", body)
            request.add_header("Authorization", f"Bearer {key}")
            try:
                urllib.request.urlopen(request, timeout=60).close()
            except urllib.error.HTTPError as error:
                assert error.code == 429, error
            return is_enough()

        wait_for(take, 120)

    def _get(self, path: str) -> str:
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {self._key}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            text: str = answer.read().decode()
        return text

    def _entries(self, event: str) -> list[dict[str, Any]]:
        if not self._log.exists():
            return []
        lines = self._log.read_text("utf-8").splitlines()
        entries = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [entry for entry in entries if entry["event"] == event]
