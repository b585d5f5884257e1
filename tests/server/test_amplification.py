"""What one small body may cost: no list of a request is looked at again for each of its prompts and answers.

Counted in processor time of the event loop's thread and of the engine's process, against the same request without the
list on the same machine: how busy or fast that is does not matter.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from in_process import InProcess, in_process

_SECONDS_PER_BYTE = 1e-5
"""Reading, checking, sending and reading again what the body holds, once, takes a hundredth of it."""
_TICKS = os.sysconf("SC_CLK_TCK")
_TOOL = {"type": "function", "function": {"name": "", "parameters": {"type": "object", "properties": {"a": {}}}}}

LISTS: dict[str, Any] = {
    "logit_bias": {str(token): 1.5 for token in range(40_000, 40_000 + 1024)},
    "stop_token_ids": list(range(40_000, 40_000 + 1024)),
    "stop": ["é" * 1000 + str(number) for number in range(16)],
    "metadata": {str(number): "x" * 100 for number in range(64)},
    "session_id": "s" * 256,
    "cache_salt": "s" * 256,
    "guided_choice": [f"choice {number}" for number in range(500)],
}
SHAPES: dict[str, dict[str, Any]] = {
    "8 prompts, 128 answers each": {"prompt": [[5, 6, 7]] * 8, "n": 128},
    "1,024 prompts": {"prompt": [[5, 6, 7]] * 1024},
}


async def cost(server: InProcess, body: dict[str, Any], path: str = "/v1/completions") -> tuple[float, float]:
    """Seconds of the event loop's thread and of the engine's process for one request that is answered."""
    process = server.server.engine._process
    assert process is not None
    used = _process_seconds(process.pid)
    began = time.thread_time()
    reply = await server.ask(path, json.dumps({"max_tokens": 1, **body}).encode())
    seconds = time.thread_time() - began
    assert reply.status == 200, reply.body
    return seconds, _process_seconds(process.pid) - used


def _process_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def with_server(model_path: Path, work: Callable[[InProcess], Any]) -> Any:
    async def run() -> Any:
        async with in_process(model_path) as server:
            await cost(server, {"prompt": [5]})
            return await work(server)

    return asyncio.run(run())


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_no_list_is_paid_for_again_with_every_prompt_and_answer(
    default_model_path: Path, shape: dict[str, Any]
) -> None:
    async def work(server: InProcess) -> None:
        plain = await cost(server, shape)
        for name, value in LISTS.items():
            body = {**shape, name: value}
            allowed = len(json.dumps(body)) * _SECONDS_PER_BYTE
            if name == "guided_choice":
                await cost(server, {"prompt": [5], name: value})  # starts the process that compiles
            for what, without, found in zip(("loop", "engine"), plain, await cost(server, body), strict=True):
                print(f"{name} {what} {without:.3f} {found:.3f} {allowed:.3f}")

    with_server(default_model_path, work)
