"""Runs a real Prometheus that scrapes a server of a test."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

UNPACKED = Path(__file__).parents[2] / "build" / "prometheus" / "usr" / "bin"
JOB = "weft"


def program(name: str) -> str:
    """The path of prometheus or promtool. Skips the test if there is none."""
    found = shutil.which(name) or shutil.which(name, path=str(UNPACKED))
    if found is None:
        pytest.skip(f"there is no {name}: tests/server/find_prometheus.sh unpacks Debian's package")
    return found


@dataclass(frozen=True)
class Prometheus:
    client: httpx.Client

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an expression. Raises if Prometheus does not accept it."""
        found = self.client.post("/api/v1/query", data={"query": expression}).json()
        assert found["status"] == "success", f"{expression}: {found}"
        series: list[dict[str, Any]] = found["data"]["result"]
        return series

    def values_of_label(self, label: str, selector: str) -> list[str]:
        found = self.client.get(f"/api/v1/label/{label}/values", params={"match[]": selector}).json()
        assert found["status"] == "success", found
        values: list[str] = found["data"]
        return values

    def rules(self) -> list[dict[str, Any]]:
        groups = self.client.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def firing(self) -> set[str]:
        alerts = self.client.get("/api/v1/alerts").json()["data"]["alerts"]
        return {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"}


@contextmanager
def running_prometheus(folder: Path, target: str, key: str, rules: str) -> Iterator[Prometheus]:
    """Scrapes `target` every second with an API key, and evaluates `rules` every second."""
    path = program("prometheus")
    (folder / "rules.yml").write_text(rules)
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [
            {
                "job_name": JOB,
                "authorization": {"credentials": key},
                "static_configs": [{"targets": [target]}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    log = folder / "log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [
                path,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    try:
        address = None
        while address is None:
            assert process.poll() is None, log.read_text()
            address = re.search(r'msg="Listening on" address=(\S+)', log.read_text())
        with httpx.Client(base_url=f"http://{address[1]}", timeout=60) as client:
            yield Prometheus(client)
    finally:
        process.terminate()
        process.wait(60)
