"""`python -m benchmarks apis`: what a stream of each API costs, relative to a stream of chat completions on the same server.

Every round measures all APIs, in turn, and gives one ratio for each API. The table shows the geometric mean of the ratios
with its 95% interval.
"""

from __future__ import annotations

import asyncio
from statistics import median

from benchmarks.revisions import Ratios
from weft.bench.overhead import NOOP_STEP_SECONDS, SLOWER_THAN_CHAT, costs_by_api
from weft.bench.report import machine, print_json, print_line, print_table
from weft.bench.serve_api import Api
from weft.bench.serve_client import Client
from weft.bench.soak_server import running_server
from weft.loading.checkpoint import open_checkpoint
from weft.loading.pull import pull
from weft.text.model_text import open_tokenizer

_FIGURES = ("server CPU time for a token", "time for a token")

Costs = dict[Api, list[tuple[float, float]]]


def main(*, backend: str, rounds: int, streams: int, tokens: int, json: bool) -> bool:
    """Measures and prints. Returns True if no API costs more processor time than allowed: the upper end of its interval
    is below `SLOWER_THAN_CHAT`."""
    costs = asyncio.run(_measure(backend, rounds, streams, tokens))
    chat = costs.pop("chat")
    rows, is_met = [], True
    for index, figure in enumerate(_FIGURES):
        for api, pairs in costs.items():
            mean, low, high = Ratios([one[index] for one in chat], [one[index] for one in pairs]).change()
            is_met = is_met and (index > 0 or high < SLOWER_THAN_CHAT)
            before, after = (f"{1e6 * median(one[index] for one in found):.1f}" for found in (chat, pairs))
            rows.append((f"{figure}, {api}", before, after, f"{mean:+.1%} [{low:+.1%}, {high:+.1%}]"))
    if json:
        print_json({"chat": chat, "others": costs, "rows": rows, "machine": machine()})
        return is_met
    print_line(machine())
    print_table(
        f"{backend}: {streams} streams of at most {tokens} tokens, {rounds} rounds in turn, microseconds",
        ("", "chat", "this API", "change, 95% interval"),
        rows,
    )
    return is_met


async def _measure(backend: str, rounds: int, streams: int, tokens: int) -> Costs:
    path = str(pull("default"))
    vocabulary_size = open_tokenizer(open_checkpoint(path)).vocabulary_size
    options = {"seconds_per_step": NOOP_STEP_SECONDS} if backend == "noop" else {}
    async with running_server(backend, path, vocabulary_size, **options) as port:
        client = Client(f"http://127.0.0.1:{port}")
        costs = await costs_by_api(client, rounds, streams, tokens)
        client.close()
    return costs
