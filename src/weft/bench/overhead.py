"""`weft bench overhead`: what HTTP adds to the time to first token, how many tokens per second a server streams, and
what a viewer of the live page costs.

The server runs the noop backend, so that only the runtime is measured.
"""

from __future__ import annotations

import asyncio
import json as json_module
import os
import time
from dataclasses import dataclass
from operator import truediv
from typing import Any

from weft.bench.overhead_live import ViewerCost, print_viewer_costs, viewer_checks, viewer_costs
from weft.bench.report import Check, machine, print_checks, print_json, print_line, print_table, quantile
from weft.bench.serve_api import APIS, Api, Dialect
from weft.bench.serve_client import Client
from weft.bench.serve_load import Item
from weft.bench.serve_machine import find_server, take_snapshot
from weft.bench.soak_server import NOOP_CONTEXT, running_server
from weft.config import ServingEngineConfig
from weft.engine.ipc.client import EngineClient
from weft.errors import WeftError
from weft.loading.checkpoint import open_checkpoint
from weft.loading.pull import pull
from weft.request import InferenceRequest, SamplingParams
from weft.text.model_text import open_model_text

ADDED_SECONDS = 0.005
TOKENS_PER_SECOND = 20_000
_NUM_FIRST_TOKENS = 300
_TEXT = "Once upon a time there was a careful engineer who liked short sentences and plain words very much."
_STREAMS = ((128, 200), (500, 200))
API_STREAMS = (8, 128)
_API_ROUNDS = 10
NOOP_STEP_SECONDS = 0.005
"""Duration of a step of the noop backend while APIs are compared, as with a small model. If steps took no time, an event
would have several tokens, and their number would depend on the load of the machine."""
SLOWER_THAN_CHAT = 0.05


@dataclass(frozen=True)
class Throughput:
    streams: int
    tokens_each: int
    tokens_per_second: float
    server_seconds: float
    """CPU time of all server processes, including the engine."""


def main(json: bool) -> None:
    path = str(pull("default"))
    tokenizer = open_model_text(open_checkpoint(path)).tokenizer
    prompt = tokenizer.encode(_TEXT)
    first, throughputs, by_api, viewers = asyncio.run(_measure(path, tokenizer.vocabulary_size, prompt))
    direct = first.pop("engine alone")
    checks = [
        Check(
            f"time to first token, {name}: added to the median",
            f"{1000 * (quantile(times, 0.5) - quantile(direct, 0.5)):.2f} ms",
            f"{1000 * ADDED_SECONDS:g} ms",
            quantile(times, 0.5) - quantile(direct, 0.5) < ADDED_SECONDS,
        )
        for name, times in first.items()
    ]
    best = max(result.tokens_per_second for result in throughputs)
    checks.append(
        Check(
            "streamed tokens per second", f"{best:,.0f}", f"{TOKENS_PER_SECOND:,}", best >= TOKENS_PER_SECOND
        )
    )
    checks += [
        Check(
            f"streams of /{api}: server CPU seconds, over those of chat",
            f"{ratio - 1:+.1%}",
            f"{SLOWER_THAN_CHAT:+.0%}",
            ratio < 1 + SLOWER_THAN_CHAT,
        )
        for api, seconds in by_api.items()
        if api != "chat"
        for ratio in (quantile(map(truediv, seconds, by_api["chat"]), 0.5),)
    ]
    checks += viewer_checks(viewers)
    figures = {"engine alone": direct, **first}
    if json:
        print_json(
            {
                "first_token": figures,
                "throughput": throughputs,
                "by_api": by_api,
                "live_viewer": viewers,
                "checks": checks,
                "machine": machine(),
            }
        )
        return
    print_line(machine())
    print_table(
        f"Time to first token of {_NUM_FIRST_TOKENS} requests, one after another, ms",
        ("", "p50", "p99", "largest"),
        [
            (
                name,
                *(
                    f"{1000 * value:.2f}"
                    for value in (quantile(times, 0.5), quantile(times, 0.99), max(times))
                ),
            )
            for name, times in figures.items()
        ],
    )
    print_table(
        "Concurrent streams",
        ("streams x tokens", "tokens/s", "server CPU seconds"),
        [
            (
                f"{result.streams} x {result.tokens_each}",
                f"{result.tokens_per_second:,.0f}",
                f"{result.server_seconds:.2f}",
            )
            for result in throughputs
        ],
    )
    streams, tokens = API_STREAMS
    print_table(
        f"Server CPU milliseconds for 1,000 tokens, {streams} streams of {tokens}, {_API_ROUNDS} rounds in turn",
        ("API", "median", "least", "largest"),
        [
            (api, *(f"{1e6 * value:.1f}" for value in (quantile(found, 0.5), min(found), max(found))))
            for api, found in by_api.items()
        ],
    )
    print_viewer_costs(viewers)
    print_checks(checks)


async def _measure(
    path: str, vocabulary_size: int, prompt: list[int]
) -> tuple[dict[str, list[float]], list[Throughput], dict[Api, list[float]], list[ViewerCost]]:
    engine = EngineClient(
        "noop", {"vocabulary_size": vocabulary_size, "max_context": NOOP_CONTEXT}, ServingEngineConfig()
    )
    await engine.start()
    try:
        async with running_server("noop", path, vocabulary_size) as port:
            client = Client(f"http://127.0.0.1:{port}")
            first = await _first_tokens(engine, client, prompt)
            throughputs = [await _throughput(client, *streams, prompt) for streams in _STREAMS]
            viewers = await viewer_costs(client, prompt)
            client.close()
        async with running_server("noop", path, vocabulary_size, seconds_per_step=NOOP_STEP_SECONDS) as port:
            client = Client(f"http://127.0.0.1:{port}")
            costs = await costs_by_api(client, _API_ROUNDS, *API_STREAMS)
            client.close()
        by_api = {api: [spent for spent, _ in found] for api, found in costs.items()}
        return first, throughputs, by_api, viewers
    finally:
        await engine.stop()


async def _first_tokens(engine: EngineClient, client: Client, prompt: list[int]) -> dict[str, list[float]]:
    """Measures the variants in turn, so that other load on the machine affects all of them."""
    completion, chat = "/v1/completions", "/v1/chat/completions"
    variants: dict[str, tuple[str, dict[str, Any]]] = {
        "HTTP, token ids": (completion, {"prompt": prompt}),
        "HTTP, text": (completion, {"prompt": _TEXT}),
        "HTTP, chat": (chat, {"messages": [{"role": "user", "content": _TEXT}]}),
    }
    times: dict[str, list[float]] = {"engine alone": [], **{name: [] for name in variants}}
    for number in range(_NUM_FIRST_TOKENS + 20):
        is_warm = number >= 20
        began = time.perf_counter()
        (answer,) = await engine.submit(InferenceRequest(tuple(prompt), SamplingParams(max_tokens=8)))
        outputs = await answer.read()
        if is_warm:
            times["engine alone"].append(time.perf_counter() - began)
        while not outputs[-1].is_final:
            outputs = await answer.read()
        for name, (path, fields) in variants.items():
            body = json_module.dumps({**fields, "max_tokens": 8, "stream": True}).encode()
            streamed, _ = await client.send(client.message("POST", path, body), 30.0)
            if streamed.failure:
                raise WeftError(f"{name}: {streamed.failure.kind}: {streamed.failure.detail}")
            if is_warm:
                times[name].append(streamed.chunk_times[0] - streamed.began)
    return times


async def _throughput(client: Client, streams: int, tokens: int, prompt: list[int]) -> Throughput:
    fields = {"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    message = client.message("POST", "/v1/completions", json_module.dumps(fields).encode())
    await client.open_idle(streams)
    before, began = _server_ticks(client), time.perf_counter()
    answers = await asyncio.gather(*(client.send(message, 120.0) for _ in range(streams)))
    seconds = time.perf_counter() - began
    failed = [answer.failure for answer, _ in answers if answer.failure]
    if failed:
        raise WeftError(f"{len(failed)} of {streams} streams failed, one with {failed[0]}")
    spent = (_server_ticks(client) - before) / os.sysconf("SC_CLK_TCK")
    return Throughput(streams, tokens, streams * tokens / seconds, spent)


async def costs_by_api(
    client: Client, rounds: int, streams: int, tokens: int
) -> dict[Api, list[tuple[float, float]]]:
    """For each API and round: CPU seconds of the server, and elapsed seconds, per streamed token. The APIs take turns, in
    another order in each round, so that other load on the machine affects all of them."""
    item = Item(_TEXT, tokens)
    bodies = {
        api: (dialect.path, dialect.body(item, lambda _: _TEXT))
        for api in APIS
        if api != "completions"
        for dialect in (Dialect("soaked", api, takes_ids=False, takes_exact_length=False),)
    }
    costs: dict[Api, list[tuple[float, float]]] = {api: [] for api in bodies}
    await client.open_idle(streams)
    snapshot = take_snapshot()
    server = find_server(client.host, client.port, snapshot.processes) if snapshot is not None else ()
    for number in range(rounds + 1):
        for api in sorted(bodies, key=lambda api: (APIS.index(api) + number) % len(APIS)):
            path, body = bodies[api]
            message = client.message("POST", path, body)
            before, began = sum(map(_cpu_seconds, server)), time.perf_counter()
            answers = await asyncio.gather(*(client.send(message, 120.0) for _ in range(streams)))
            seconds, spent = time.perf_counter() - began, sum(map(_cpu_seconds, server)) - before
            failed = [answer.failure for answer, _ in answers if answer.failure]
            if failed:
                raise WeftError(f"{path}: {len(failed)} of {streams} streams failed, one with {failed[0]}")
            if number:  # the first round warms up
                count = sum(answer.completion_tokens or 0 for answer, _ in answers)
                costs[api].append((spent / count, seconds / count))
    return costs


def _cpu_seconds(pid: int) -> float:
    """Processor time of a process: from its clock, which counts nanoseconds. /proc counts hundredths of a second."""
    return time.clock_gettime((~pid << 3) | 2)  # the id that clock_getcpuclockid(3) returns on Linux


def _server_ticks(client: Client) -> int:
    snapshot = take_snapshot()
    if snapshot is None:
        return 0
    return sum(
        snapshot.processes[pid].ticks for pid in find_server(client.host, client.port, snapshot.processes)
    )
