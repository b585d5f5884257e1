"""A short run of the fuzzer; `fuzz_requests.py --count` makes long ones."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from fuzz_requests import fuzz, leftovers
from in_process import in_process


def test_no_mutated_request_breaks_the_server_or_leaves_anything_behind(default_model_path: Path) -> None:
    async def run() -> tuple[Counter[int], list[str], dict[str, float]]:
        async with in_process(default_model_path) as server:
            statuses, problems = await fuzz(server, seed=1, count=4000)
            return statuses, problems, await leftovers(server)

    statuses, problems, held = asyncio.run(run())
    assert not problems, problems[:5]
    assert not held
    # Both ways were walked: what is refused, and what is odd and right.
    assert statuses[400] > 1000 and statuses[200] > 1000
