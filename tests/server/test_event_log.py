"""The event log of the engine under a server: a crash keeps the log, and a full disk fails no request."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path

from server_process import running_server, wait_for

from weft.engine.replay import replay


def test_the_event_log_of_a_dead_engine_is_kept_next_to_the_new_one(
    default_model_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "engine.log"
    with running_server(default_model_path, engine={"log_path": str(path)}) as server:
        assert server.complete().status_code == 200
        os.kill(server.engine_pid(), signal.SIGKILL)
        wait_for(lambda: server.client.get("/health").status_code == 503)
        wait_for(lambda: server.client.get("/health").status_code == 200)
        assert server.complete().status_code == 200
        assert server.complete().status_code == 200
    assert replay(f"{path}.1").requests == 1
    assert replay(str(path)).requests == 2
    assert path.stat().st_mode & 0o777 == 0o600


def test_49_a_full_disk_ends_the_event_log_with_one_warning_and_no_request(
    default_model_path: Path, tmp_path: Path
) -> None:
    path, server_log = tmp_path / "engine.log", tmp_path / "server.log"
    with (
        server_log.open("w") as stderr,
        running_server(
            default_model_path, engine={"log_path": str(path)}, log_format="json", stderr=stderr
        ) as server,
    ):
        engine = server.engine_pid()
        assert server.complete().status_code == 200
        limit = path.stat().st_size + 1_000  # room for a few more lines
        resource.prlimit(engine, resource.RLIMIT_FSIZE, (limit, limit))
        for _ in range(5):
            assert server.complete(max_tokens=50).status_code == 200
        assert server.engine_pid() == engine
        assert server.client.get("/health").status_code == 200
    lines = [json.loads(line) for line in server_log.read_text().splitlines()]
    (warning,) = [line for line in lines if line["event"] == "warning"]
    assert str(path) in warning["message"] and "the engine continues without it" in warning["message"]
    assert replay(str(path)).requests >= 1
