"""A short run of the fuzzer; `fuzz_requests.py --count` runs longer."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fuzz_cases import CASES
from fuzz_requests import fuzz, leftovers, settings
from in_process import in_process
from server_process import MESSAGES, Server


def test_no_mutated_request_breaks_the_server_or_leaves_anything_behind(
    default_model_path: Path, tmp_path: Path
) -> None:
    async def run() -> tuple[Counter[int], list[str], dict[str, float]]:
        async with in_process(default_model_path, **settings(tmp_path)) as server:
            statuses, problems = await fuzz(server, seed=1, count=4000)
            return statuses, problems, await leftovers(server)

    statuses, problems, held = asyncio.run(run())
    assert not problems, problems[:5]
    assert not held
    # Both invalid requests and unusual valid ones occurred.
    assert statuses[400] > 1000 and statuses[200] > 1000


def test_every_route_has_a_request_that_the_fuzzer_mutates(server: Server) -> None:
    paths = server.client.get("/openapi.json").json()["paths"]
    routes = {(method.upper(), path) for path, operations in paths.items() for method in operations}
    for method, path in routes:
        pattern = re.compile(re.sub(r"{\w+}", "[^/]+", path) + r"(\?.*)?")
        assert any(case.method == method and pattern.fullmatch(case.path) for case in CASES), (method, path)


def test_values_that_do_not_fit_a_message_between_processes_are_refused(server: Server) -> None:
    """Found by schemathesis: a long prompt goes to a worker process in msgpack, whose integers have 64 bits."""
    for more in (10**30, deep(900)):
        messages = [*MESSAGES, {"role": "user", "content": "word " * 2000, "more": more}]
        error = server.chat(messages=messages)
        assert error.status_code == 400 and error.json()["error"]["param"].startswith("messages"), error.text


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("token", [10**30, 2**64, -(2**63) - 1, 2**31, -1])
def test_token_ids_that_do_not_fit_a_message_are_refused(server: Server, token: int) -> None:
    """Found by the fuzzer: the engine client waited forever for the answer to such a prompt."""
    for prompt, param in (([1, token], "prompt"), ([[1], [token]], "prompt[1]")):
        for echo in (False, True):
            response = server.complete(prompt, echo=echo)
            assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text
