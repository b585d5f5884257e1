"""Requests that the server sends to itself as idle work reach the engine as idle work."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from in_process import in_process

from weft.config import ServingEngineConfig
from weft.server.internal import InternalRequest


def test_an_internal_request_is_idle_work_in_the_engine_and_a_request_of_a_client_is_not(
    default_model_path: Path, tmp_path: Path
) -> None:
    log = tmp_path / "events.jsonl"
    engine = ServingEngineConfig(log_path=str(log))

    async def run() -> None:
        async with in_process(default_model_path, engine=engine) as served:
            body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 2}).encode()
            assert (await served.send("/v1/completions", body)).status == 200
            for _ in range(2):
                request = InternalRequest(None, is_idle_work=True)
                assert (await served.server.send_internal("/v1/completions", body, request)).status == 200

    asyncio.run(run())
    events = [json.loads(line) for line in log.read_text().splitlines()]
    added = [
        one["request"]["is_idle_work"]
        for event in events
        if event["event"] == "add"
        for one in event["requests"]
    ]
    assert added == [False, True, True]
