"""An engine that is stopped, stuck, slow, broken or cannot start: what the server reports, and that it recovers."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from every_api import APIS, Turn
from server_process import SLOW, Server, running_server, wait_for
from vector_models import embedder_path, engines, noop_embedder

LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True}
STALL_SECONDS = 6.0

FAULTS = """
import dataclasses, pathlib, subprocess, sys, threading, time

if "weft.engine.ipc.process" in " ".join(sys.orig_argv):
    from weft.backends import noop

    fault, finish = pathlib.Path({!r}), noop.NoopBackend._finish

    def wait_for_a_lock_that_is_never_released():
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    def finish_with_faults(self, step):
        kind, _, seconds = (fault.read_text() if fault.exists() else "").partition(" ")
        if kind == "broken":
            raise RuntimeError("an illegal memory access was encountered")
        if kind:
            fault.unlink()
        if kind == "stuck":
            wait_for_a_lock_that_is_never_released()
        if kind == "hung":
            while True:  # as a GPU driver waits
                pass
        if kind == "slow":
            end = time.monotonic() + float(seconds)
            while time.monotonic() < end:
                pass
        if kind == "compiling":
            program = "import time, sys\\nend = time.monotonic() + float(sys.argv[1])\\nwhile time.monotonic() < end: pass"
            subprocess.run([sys.executable, "-c", program, seconds])
        return finish(self, step)

    def allocate_on_a_device(self, *arguments, **more):
        return dataclasses.replace(allocate(self, *arguments, **more), device="a GPU")

    allocate = noop.NoopBackend.allocate
    if fault.with_name("device").exists():
        noop.NoopBackend.allocate = allocate_on_a_device
    noop.NoopBackend._finish = finish_with_faults
    while fault.exists() and fault.read_text() == "broken":
        time.sleep(0.02)
    if fault.exists() and fault.read_text() == "stuck start":
        fault.unlink()
        wait_for_a_lock_that_is_never_released()
"""


class Watched:
    """A server, its log, and the file that injects a fault into the next step of its engine."""

    def __init__(self, server: Server, log: Path, fault: Path) -> None:
        self.server = server
        self._log = log
        self.fault = fault

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = self._log.read_text().splitlines()
        return [event for line in lines if line[:1] == "{" and (event := json.loads(line))["event"] == name]

    def status(self, path: str) -> int:
        return self.server.client.get(path).status_code

    def raw_metric(self, name: str) -> float:
        """The value of a metric, also while the engine does not respond."""
        lines = self.server.client.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"weft:{name}{{"))


@contextmanager
def watched_server(model_path: Path, tmp_path: Path, **settings: Any) -> Iterator[Watched]:
    log, fault = tmp_path / "log", tmp_path / "fault"
    (tmp_path / "sitecustomize.py").write_text(FAULTS.format(str(fault)))
    given = {"stall_seconds": STALL_SECONDS, "log_format": "json", **settings}
    with (
        log.open("w") as stderr,
        running_server(model_path, python_path=[str(tmp_path)], stderr=stderr, **given) as server,
    ):
        yield Watched(server, log, fault)


class BackgroundRequest(threading.Thread):
    """A request in a thread; `answer` is set when it ends."""

    def __init__(self, server: Server, path: str = "/v1/completions", **fields: Any) -> None:
        super().__init__(daemon=True)
        self._url, self._fields = f"{server.url}{path}", fields
        self.answer: httpx.Response
        self.start()

    def run(self) -> None:
        self.answer = httpx.post(self._url, json=self._fields, timeout=120)

    def wait(self) -> tuple[int, str]:
        """The status and the error code; of a stream, that of the last event."""
        self.join(120)
        lines = [line for line in self.answer.text.splitlines() if line]
        last = json.loads(lines[-1].removeprefix("data: "))
        return self.answer.status_code, last["error"]["code"]


def test_41_a_stopped_engine_is_not_ready_then_unhealthy_fails_its_requests_and_restarts(
    default_model_path: Path, tmp_path: Path
) -> None:
    with watched_server(default_model_path, tmp_path, backend_options=SLOW) as watched:
        server, engine = watched.server, watched.server.engine_pid()
        pending = [BackgroundRequest(server, **LONG), BackgroundRequest(server, **LONG, stream=True)]
        others = []
        for api, stream in product(APIS, (False, True)):
            body = api.body([Turn("user", f"{api} {stream}")], max_tokens=8000, stream=stream)
            others.append((api, stream, BackgroundRequest(server, api.path, **body)))
        wait_for(lambda: server.metric("num_requests_running") == 2 + len(others))
        os.kill(engine, signal.SIGSTOP)
        wait_for(lambda: watched.status("/ready") == 503, 10)
        assert watched.status("/health") == 200, "it may still continue"
        assert watched.raw_metric("engine_up") == 0
        wait_for(lambda: watched.status("/health") == 503)
        assert [one.wait() for one in pending] == [(503, "engine_stalled"), (200, "engine_stalled")]
        for api, stream, one in others:
            one.join(120)
            content = one.answer.content
            message = api.failed(content)[1] if stream else api.error(content)
            assert (one.answer.status_code, "stuck" in message) == (200 if stream else 503, True), str(api)
        wait_for(lambda: watched.status("/ready") == 200)
        assert watched.status("/health") == 200 and server.engine_pid() != engine
        assert server.complete().status_code == 200
        assert server.metrics("engine_stalls_total", "engine_restarts_total") == [1, 1]
        [stalled] = watched.events("engine_stalled")
        assert stalled["process_state"] == "T" and "weft/engine/serving.py" in stalled["traceback"]
        server.wait_until_free()


def test_a_stopped_embedder_is_shown_fails_its_requests_and_restarts_while_chats_go_on(
    default_model_path: Path, tmp_path: Path
) -> None:
    model = noop_embedder(embedder_path(), seconds_per_step=0.05)
    with watched_server(default_model_path, tmp_path, backend_options=SLOW, vector_models=[model]) as watched:
        server = watched.server
        chat, embedder = engines(server)
        states = lambda path: server.client.get(path).json().get("models", {}).get("noop-embedder")  # noqa: E731
        pending = BackgroundRequest(server, "/v1/embeddings", input=["word " * 60] * 2048)
        wait_for(lambda: server.metric("num_requests_running") > 0)
        os.kill(embedder, signal.SIGSTOP)
        wait_for(lambda: states("/health") == states("/ready") == "not responding", 10)
        refused = server.client.post("/v1/embeddings", json={"input": "x"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_not_responding"
        assert watched.status("/health") == watched.status("/ready") == server.complete().status_code == 200
        assert pending.wait() == (503, "engine_stalled")
        wait_for(lambda: states("/ready") == "ready")
        assert server.client.post("/v1/embeddings", json={"input": "x"}).status_code == 200
        assert engines(server)[0] == chat and embedder not in engines(server)
        assert len(watched.events("engine_stalled")) == 1
        server.wait_until_free()


def test_41_a_stuck_step_is_detected_and_the_log_names_the_function(
    default_model_path: Path, tmp_path: Path
) -> None:
    with watched_server(default_model_path, tmp_path) as watched:
        server, engine = watched.server, watched.server.engine_pid()
        watched.fault.write_text("stuck")
        pending = [BackgroundRequest(server, **LONG), BackgroundRequest(server, **LONG, stream=True)]
        wait_for(lambda: watched.status("/ready") == 503, 10)
        assert watched.status("/health") == 200
        assert [one.wait()[1] for one in pending] == ["engine_stalled"] * 2
        wait_for(lambda: watched.status("/ready") == 200)
        assert server.engine_pid() != engine and server.complete().status_code == 200
        [stalled] = watched.events("engine_stalled")
        assert "wait_for_a_lock_that_is_never_released" in stalled["traceback"]
        assert stalled["process_state"] == "S"


def test_a_gpu_that_hangs_while_the_engine_waits_in_a_busy_loop_is_a_stall(
    default_model_path: Path, tmp_path: Path
) -> None:
    """On a processor the same loop may be a slow step, and would have ten times as long."""
    (tmp_path / "device").touch()
    with watched_server(default_model_path, tmp_path, stall_seconds=6.0) as watched:
        server, engine = watched.server, watched.server.engine_pid()
        watched.fault.write_text("hung")
        began = time.monotonic()
        assert BackgroundRequest(server, **LONG).wait() == (503, "engine_stalled")
        assert time.monotonic() - began < 55
        wait_for(lambda: watched.status("/ready") == 200)
        assert server.engine_pid() != engine and server.complete().status_code == 200
        [stalled] = watched.events("engine_stalled")
        assert "finish_with_faults" in stalled["traceback"]


@pytest.mark.parametrize("fault", ["slow", "compiling"])
def test_42_a_slow_step_and_a_compiling_step_are_not_stalls(
    default_model_path: Path, tmp_path: Path, fault: str
) -> None:
    with watched_server(default_model_path, tmp_path, stall_seconds=3.0) as watched:
        server, engine = watched.server, watched.server.engine_pid()
        watched.fault.write_text(f"{fault} 8")
        assert server.complete().status_code == 200
        assert not watched.fault.exists(), "the fault was injected"
        assert server.engine_pid() == engine and server.metric("engine_stalls_total") == 0


def test_an_idle_engine_is_not_a_stall(default_model_path: Path, tmp_path: Path) -> None:
    with watched_server(default_model_path, tmp_path, stall_seconds=3.0) as watched:
        engine = watched.server.engine_pid()
        time.sleep(8)
        assert watched.status("/ready") == 200 and watched.server.engine_pid() == engine
        assert not watched.events("engine_stalled")


def test_an_engine_that_is_stopped_briefly_continues_and_loses_nothing(
    default_model_path: Path, tmp_path: Path
) -> None:
    with watched_server(default_model_path, tmp_path, backend_options=SLOW, stall_seconds=600.0) as watched:
        server, engine = watched.server, watched.server.engine_pid()
        request_fields = {**LONG, "max_tokens": 300}
        pending = [
            BackgroundRequest(server, **request_fields, stream=True),
            BackgroundRequest(server, **request_fields),
        ]
        wait_for(lambda: server.metric("num_requests_running") == 2)
        os.kill(engine, signal.SIGSTOP)
        wait_for(lambda: watched.status("/ready") == 503, 10)
        pending.append(BackgroundRequest(server, **request_fields))
        time.sleep(0.5)
        os.kill(engine, signal.SIGCONT)
        wait_for(lambda: watched.status("/ready") == 200)
        for one in pending:
            one.join(120)
        streamed, *whole = (one.answer for one in pending)
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert [one.json()["usage"]["completion_tokens"] for one in whole] == [300, 300]
        assert server.engine_pid() == engine and server.metric("engine_restarts_total") == 0


def test_deadlines_are_enforced_while_the_engine_is_stopped(default_model_path: Path, tmp_path: Path) -> None:
    with watched_server(default_model_path, tmp_path, backend_options=SLOW, stall_seconds=600.0) as watched:
        server, engine = watched.server, watched.server.engine_pid()
        running = [
            BackgroundRequest(server, **LONG, deadline=5),
            BackgroundRequest(server, **LONG, deadline=5, stream=True),
        ]
        wait_for(lambda: server.metric("num_requests_running") == 2)
        os.kill(engine, signal.SIGSTOP)
        new = [
            BackgroundRequest(server, **LONG, deadline=1),
            BackgroundRequest(server, **LONG, deadline=1, stream=True),
        ]
        late = [one.wait() for one in (*running, *new)]
        assert [code for _, code in late] == ["deadline_exceeded"] * 4
        assert [status for status, _ in late] == [504, 200, 504, 200]
        os.kill(engine, signal.SIGCONT)
        server.wait_until_free()


def test_request_timeout_is_enforced_while_the_engine_is_stopped(
    default_model_path: Path, tmp_path: Path
) -> None:
    engine_settings = {"request_timeout": 1.0}
    with watched_server(
        default_model_path, tmp_path, backend_options=SLOW, stall_seconds=600.0, engine=engine_settings
    ) as watched:
        os.kill(watched.server.engine_pid(), signal.SIGSTOP)
        assert BackgroundRequest(watched.server, **LONG).wait() == (504, "deadline_exceeded")


def test_a_deadline_is_enforced_while_a_prompt_is_tokenised(default_model_path: Path, tmp_path: Path) -> None:
    with watched_server(default_model_path, tmp_path) as watched:
        server = watched.server
        assert server.complete("word " * 3000).status_code == 200
        [encoder] = [pid for pid in server.children() if b"text_process" in command(pid)]
        os.kill(encoder, signal.SIGSTOP)
        assert BackgroundRequest(server, prompt="word " * 3000, deadline=1).wait() == (
            504,
            "deadline_exceeded",
        )
        assert server.complete("word " * 3000).status_code == 200, "another worker process is started"


def test_an_engine_whose_steps_all_fail_is_restarted(default_model_path: Path, tmp_path: Path) -> None:
    with watched_server(default_model_path, tmp_path) as watched:
        server, engine = watched.server, watched.server.engine_pid()
        watched.fault.write_text("broken")
        statuses = []
        while len(statuses) < 25 and not watched.events("engine_died"):
            statuses.append(server.complete().status_code)
            time.sleep(0.05)
        assert statuses[:2] == [500, 500] and len(statuses) < 25
        # The next engine starts as soon as the fault is gone.
        assert watched.status("/health") == watched.status("/ready") == 503
        watched.fault.unlink()
        wait_for(lambda: watched.status("/health") == 200 and server.complete().status_code == 200)
        assert server.engine_pid() != engine
        died = watched.events("engine_died")[0]
        assert "6 steps in a row failed" in died["message"] and "illegal memory access" in died["message"]


def test_an_engine_that_is_stuck_during_its_start_is_restarted(
    default_model_path: Path, tmp_path: Path
) -> None:
    with watched_server(default_model_path, tmp_path, stall_seconds=3.0) as watched:
        watched.fault.write_text("stuck start")
        os.kill(watched.server.engine_pid(), signal.SIGKILL)
        wait_for(lambda: watched.events("engine_restart_failed"))
        assert "stuck while it started" in watched.events("engine_restart_failed")[0]["message"]
        wait_for(lambda: watched.status("/ready") == 200)
        assert watched.server.complete().status_code == 200


def test_an_engine_that_crashes_writes_its_stacks_to_the_log(
    default_model_path: Path, tmp_path: Path
) -> None:
    with watched_server(default_model_path, tmp_path) as watched:
        os.kill(watched.server.engine_pid(), signal.SIGSEGV)
        wait_for(lambda: watched.events("engine_restarted"))
        [died] = watched.events("engine_died")
        assert died["exit_code"] == -signal.SIGSEGV and "weft/engine/serving.py" in died["traceback"]


@contextmanager
def no_descriptors(pid: int) -> Iterator[None]:
    """No descriptor can be opened; open ones stay."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_an_engine_that_cannot_start_without_descriptors_is_started_again_later(
    default_model_path: Path, tmp_path: Path
) -> None:
    with watched_server(default_model_path, tmp_path) as watched:
        server = watched.server
        assert server.complete().status_code == 200
        num_open = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
        with no_descriptors(server.process.pid):
            os.kill(server.engine_pid(), signal.SIGKILL)
            wait_for(lambda: len(watched.events("engine_restart_failed")) >= 2)
            assert watched.status("/health") == 503
        wait_for(lambda: watched.status("/health") == 200)
        assert server.complete().status_code == 200
        failed = watched.events("engine_restart_failed")
        assert all("Too many open files" in one["message"] for one in failed)
        tries = [one["tries"] for one in failed]
        assert tries == sorted(set(tries))
        pauses = [float(one["message"].rpartition("Next try in ")[2].split()[0]) for one in failed]
        assert 0 < pauses[0] < pauses[1] and pauses == sorted(pauses)
        times = [datetime.fromisoformat(one["time"]).timestamp() for one in failed]
        assert all(
            after - at > pause - 0.01 for at, after, pause in zip(times, times[1:], pauses, strict=False)
        )
        wait_for(lambda: len(list(Path(f"/proc/{server.process.pid}/fd").iterdir())) <= num_open)


def test_a_worker_process_that_cannot_start_is_started_by_the_next_request(
    default_model_path: Path, tmp_path: Path
) -> None:
    request_fields = {
        "long prompt": {"prompt": "word " * 3000},
        "large body": {"prompt": "x", "user": "x" * 300_000},
        "grammar": {"prompt": "x", "structured_outputs": {"regex": "[a-z]{3}"}},
    }
    with watched_server(default_model_path, tmp_path) as watched:
        server = watched.server
        assert server.complete().status_code == 200  # the connection stays open for the requests below
        with no_descriptors(server.process.pid):
            for name, fields in request_fields.items():
                refused = server.complete(**fields)
                assert refused.status_code == 500 and "try again" in refused.text, name
            assert watched.status("/health") == 200
        for name, fields in request_fields.items():
            answered = server.complete(**fields)
            assert answered.status_code == 200, (name, answered.text)


def test_a_template_process_that_cannot_start_is_started_by_the_next_request(
    default_model_path: Path, tmp_path: Path
) -> None:
    with watched_server(default_model_path, tmp_path) as watched:
        server = watched.server
        assert server.chat().status_code == 200
        [template] = [pid for pid in server.children() if b"template_worker" in command(pid)]
        with no_descriptors(server.process.pid):
            os.kill(template, signal.SIGKILL)
            assert [server.chat().status_code >= 400 for _ in range(2)] == [True, True]
        assert server.chat().status_code == 200


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
