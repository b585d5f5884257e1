"""Open descriptors: the server raises its limit, and never takes more requests than that allows."""

from __future__ import annotations

import json
import resource
from contextlib import ExitStack
from pathlib import Path

import httpx
from server_process import SLOW, running_server, wait_for


def test_a_server_raises_its_limit_of_descriptors_to_the_hard_one(
    default_model_path: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with (
        log.open("w") as stderr,
        running_server(
            default_model_path,
            shell="ulimit -Sn 80; ulimit -Hn 300",
            max_requests=100,
            log_format="json",
            stderr=stderr,
        ) as server,
    ):
        assert resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE) == (300, 300)
    assert '"warning"' not in log.read_text()


def test_no_more_requests_are_taken_than_descriptors_allow(default_model_path: Path, tmp_path: Path) -> None:
    log, max_requests = tmp_path / "log", (160 - 64) // 2
    with (
        log.open("w") as stderr,
        running_server(
            default_model_path,
            shell="ulimit -n 160",
            backend_options=SLOW,
            log_format="json",
            stderr=stderr,
        ) as server,
        ExitStack() as streams,
    ):
        body = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True}
        client = streams.enter_context(
            httpx.Client(base_url=server.url, timeout=60, limits=httpx.Limits(max_connections=None))
        )
        for _ in range(max_requests):
            answer = streams.enter_context(client.stream("POST", "/v1/completions", json=body))
            assert answer.status_code == 200
        wait_for(lambda: server.metric("http_requests_open") == max_requests)
        for _ in range(3):
            refused = server.complete()
            assert refused.status_code == 429 and "Retry-After" in refused.headers
        assert server.client.get("/health").status_code == 200
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    (warning,) = [line["message"] for line in lines if line["event"] == "warning"]
    assert f"max_requests is {max_requests} instead of 4096" in warning and "160 descriptors" in warning
    assert not [line for line in lines if line["event"] in ("library", "mistake")], lines
