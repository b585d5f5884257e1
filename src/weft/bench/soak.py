"""`weft bench soak`: many clients, well and badly behaved, load a real server, and check every answer.

The engine process can be killed several times during the load.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.backends.noop import NoopBackend
from weft.bench.serve_client import Client
from weft.bench.serve_stream import ResponseReader
from weft.bench.soak_client import Ledger, SoakClient, Target
from weft.bench.soak_plan import (
    NOOP,
    REAL,
    Behaviour,
    Question,
    Sizes,
    draw_questions,
    kill_times,
    noop_texts,
    wrong_questions,
)
from weft.bench.soak_report import Gauges, Soaked, print_soak, write_soak
from weft.bench.soak_server import NOOP_CONTEXT, running_server
from weft.bench.soak_watch import HealthWatch, ServerProcesses, follow_kills, kill_engine
from weft.config import KvCachePoolConfig
from weft.errors import InvalidRequestError, WeftError
from weft.loading.checkpoint import open_checkpoint
from weft.loading.pull import pull
from weft.text.model_text import open_model_text
from weft.text.tokenizer import Tokenizer

_SETTLE_SECONDS = 30.0
_CLIENTS_NICE = 10
"""Niceness of this process: real clients run on other machines and take no CPU time from the server."""
_REFERENCE_CLIENTS = 4
_GAUGES = ("http_requests_open", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@dataclass(frozen=True)
class SoakWork:
    """One soak test: of the server at `url`, or of a server that is started with `backend`."""

    url: str | None
    backend: str
    model: str
    clients: int
    seconds: float
    kills: int
    seed: int
    api_key: str | None = None


def main(work: SoakWork, json_path: Path | None) -> bool:
    """Runs the soak test, prints and writes. Returns True if every check was met."""
    soaked = asyncio.run(_soak(work))
    print_soak(soaked)
    if json_path is not None:
        write_soak(soaked, json_path)
    return soaked.is_clean


async def _soak(work: SoakWork) -> Soaked:
    if work.backend not in ("noop", "cpu"):
        raise InvalidRequestError(f"--backend is {work.backend!r}; allowed: noop, cpu", field="backend")
    if work.url is not None:
        client = Client(work.url)  # checks the address
        return await _run(work, client.host, client.port, None, REAL)
    path = str(pull(work.model))
    tokenizer = open_model_text(open_checkpoint(path)).tokenizer
    async with running_server(work.backend, path, tokenizer.vocabulary_size) as port:
        known, sizes = (tokenizer, NOOP) if work.backend == "noop" else (None, REAL)
        return await _run(work, "127.0.0.1", port, known, sizes)


async def _run(work: SoakWork, host: str, port: int, noop: Tokenizer | None, sizes: Sizes) -> Soaked:
    """Runs the soak test against a server. `noop` is the tokenizer if the server runs the noop backend, whose answers can
    be computed here."""
    server = Target(host, port, (), (), (), work.api_key)
    max_context = (await _fetch_json(server, "GET", "/v1/models"))["data"][0].get("max_model_len", 1 << 17)
    _print_status("determining the expected answers")
    questions = await with_answers(server, draw_questions(work.seed, sizes), noop)
    slow = await with_answers(server, draw_questions(work.seed, sizes, slow=True), noop)
    target = dataclasses.replace(
        server, questions=questions, slow_questions=slow, wrong_questions=wrong_questions(max_context)
    )
    processes, health, ledger = ServerProcesses(host, port), HealthWatch(host, port), Ledger()
    baseline, lag_before = await _gauges(server), await _loop_lag(server)
    processes.sample()
    files_before = _files(processes)
    began = time.monotonic()
    planned = [began + at for at in kill_times(work.seed, work.kills, work.seconds)]
    _print_status(f"{work.clients} clients for {work.seconds:g} s, {work.kills} kills, seed {work.seed}")
    await health.start()
    os.nice(_CLIENTS_NICE)
    watching = asyncio.create_task(processes.watch())
    ticking = asyncio.create_task(ledger.lateness.watch())
    killing = asyncio.create_task(kill_engine(processes, planned))
    clients = [SoakClient(target, Behaviour(work.seed, number), ledger) for number in range(work.clients)]
    load_average = os.getloadavg()[0]
    await asyncio.gather(*(client.run(began + work.seconds) for client in clients))
    ended = time.monotonic()
    ticking.cancel()
    kills = await killing
    # Stop polling /health when the load ends: polls of an idle server would only improve the figures.
    await health.stop()
    watching.cancel()
    loop_lag = await _loop_lag(server)
    loop_lag.subtract(lag_before)
    gauges = await _settled(server, baseline)
    files_after = 0
    deadline = time.monotonic() + _SETTLE_SECONDS
    while time.monotonic() < deadline:
        processes.sample()
        files_after = _files(processes)
        if files_after <= files_before:
            break
        await asyncio.sleep(0.5)
    return Soaked(
        clients=work.clients,
        seconds=ended - began,
        seed=work.seed,
        what=work.url or f"weft on {work.backend}",
        load_before=load_average,
        began=began,
        ledger=ledger,
        kills=follow_kills(kills, health.polls),
        polls=health.polls,
        histories=list(processes.histories.values()),
        baseline=baseline,
        gauges=gauges,
        loop_lag=loop_lag,
        files=(files_before, files_after),
    )


async def with_answers(
    server: Target, questions: Sequence[Question], noop: Tokenizer | None
) -> list[Question]:
    """Adds the expected answers: computed for the noop backend, otherwise requested once from the server."""
    slots = asyncio.Semaphore(_REFERENCE_CLIENTS)

    async def answer(question: Question) -> Question:
        async with slots:
            fields = question.fields
            if noop is None:
                reply = await _fetch_json(server, "POST", question.path, fields)
                choices = sorted(reply["choices"], key=lambda choice: choice["index"])
                texts = [
                    choice["message"]["content"] if question.is_chat else choice["text"] for choice in choices
                ]
                return dataclasses.replace(
                    question, texts=tuple(texts), num_tokens=reply["usage"]["completion_tokens"]
                )
            name = "messages" if question.is_chat else "prompt"
            prompt = {name: fields[name]}
            tokens = (await _fetch_json(server, "POST", "/tokenize", prompt))["tokens"]
            count = question.num_choices * fields["max_tokens"]
            known = noop_texts(question, tokens, info, noop)
            return dataclasses.replace(question, texts=known, num_tokens=count)

    if noop is not None:
        backend = NoopBackend(vocabulary_size=noop.vocabulary_size, max_context=NOOP_CONTEXT)
        info = backend.allocate(KvCachePoolConfig(), 1)
    return list(await asyncio.gather(*(answer(question) for question in questions)))


async def _fetch_json(server: Target, method: str, path: str, fields: dict[str, Any] | None = None) -> Any:
    status, body = await _exchange(server, method, path, json.dumps(fields).encode() if fields else b"")
    if status != 200:
        raise WeftError(f"{path} answered {status}: {body[:300].decode('utf-8', 'replace')}")
    return json.loads(body)


async def _exchange(server: Target, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    try:
        reader, writer = await asyncio.open_connection(server.host, server.port)
    except OSError as error:
        raise WeftError(f"cannot reach {server.host}, port {server.port}: {error}") from error
    writer.write(server.message(method, path, body))
    response, received = ResponseReader(), b""
    while not response.is_complete and (data := await reader.read(1 << 16)):
        received += response.feed(data)
    writer.close()
    return response.status, received


async def _gauges(server: Target) -> Gauges | None:
    """The gauges of /metrics; None if the server does not export them."""
    status, body = await _exchange(server, "GET", "/metrics")
    found: dict[str, float] = {}
    for line in body.decode("utf-8", "replace").splitlines():
        name, _, value = line.rpartition(" ")
        for gauge in _GAUGES:
            if name.startswith(f"weft:{gauge}"):
                found[gauge] = found.get(gauge, 0.0) + float(value)
    return Gauges(*(found[gauge] for gauge in _GAUGES)) if status == 200 and len(found) == 4 else None


async def _loop_lag(server: Target) -> Counter[float]:
    """Histogram of the server's event-loop lag: counts by upper bound in seconds. Empty without that metric."""
    _, body = await _exchange(server, "GET", "/metrics")
    pattern = r'^weft:event_loop_lag_seconds_bucket{.*le="([^"]+)".*} (\S+)$'
    found = re.findall(pattern, body.decode("utf-8", "replace"), re.MULTILINE)
    return Counter({float(bound): int(float(count)) for bound, count in found})


async def _settled(server: Target, baseline: Gauges | None) -> Gauges | None:
    """The gauges, once they are back at `baseline` or `_SETTLE_SECONDS` have passed."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while (gauges := await _gauges(server)) != baseline and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    return gauges


def _files(processes: ServerProcesses) -> int:
    """Open files of the HTTP process in its last sample."""
    return next((history.files[-1] for history in processes.histories.values() if history.name == "HTTP"), 0)


def _print_status(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
