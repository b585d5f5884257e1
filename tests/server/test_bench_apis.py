"""`weft bench serve --api` against the real server on noop."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from server_process import Server

from weft.bench.serve_api import APIS
from weft.cli import main as cli


@pytest.mark.parametrize("api", APIS)
def test_bench_serve_measures_every_api(
    server: Server, api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, document = tmp_path / "trace.jsonl", tmp_path / "report.json"
    lines = [{"at": 0, "prompt": f"prompt {number}", "max_tokens": 3 + number} for number in range(4)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--trace", str(trace), "--json", str(document), "--ttft", "10s", "--api", api]
    monkeypatch.setattr(sys, "argv", ["weft", "bench", "serve", server.url, *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    (phase,) = json.loads(document.read_text())["phases"]
    assert len(phase["requests"]) == 4
    for request, line in zip(phase["requests"], lines, strict=True):
        assert 1 <= request["output_tokens"] <= line["max_tokens"], request
