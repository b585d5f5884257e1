"""`weft bench soak`: many clients, good and bad, on a real server whose engine is killed now and then; everything checked."""

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
"""Hundreds of clients would be on other machines: here they give way to the server that they ask."""
_REFERENCE_CLIENTS = 4
_GAUGES = ("http_requests_open", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@dataclass(frozen=True)
class SoakWork:
    """One soak: against `url`, or against a server of its own on `backend`."""

    url: str | None
    backend: str
    model: str
    clients: int
    seconds: float
    kills: int
    seed: int
    api_key: str | None = None


def main(work: SoakWork, json_path: Path | None) -> bool:
    """Soaks, prints and writes; whether nothing was violated."""
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
    """`noop` is the tokenizer where the server is known to compute nothing, and its answers can be."""
    asker = Target(host, port, (), (), (), work.api_key)
    max_context = (await _ask(asker, "GET", "/v1/models"))["data"][0].get("max_model_len", 1 << 17)
    _say("finding out what the answers have to be")
    questions = await with_answers(asker, draw_questions(work.seed, sizes), noop)
    slow = await with_answers(asker, draw_questions(work.seed, sizes, slow=True), noop)
    target = dataclasses.replace(
        asker, questions=questions, slow_questions=slow, wrong_questions=wrong_questions(max_context)
    )
    processes, health, ledger = ServerProcesses(host, port), HealthWatch(host, port), Ledger()
    baseline, lag_before = await _gauges(asker), await _loop_lag(asker)
    processes.sample()
    files_before = _files(processes)
    began = time.monotonic()
    planned = [began + at for at in kill_times(work.seed, work.kills, work.seconds)]
    _say(f"{work.clients} clients for {work.seconds:g} s, {work.kills} kills, seed {work.seed}")
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
    # Health is polled until the storm is over and no longer: an idle server would only make its figures look better.
    await health.stop()
    watching.cancel()
    loop_lag = await _loop_lag(asker)
    loop_lag.subtract(lag_before)
    gauges = await _settled(asker, baseline)
    files_after = 0
    give_up_at = time.monotonic() + _SETTLE_SECONDS
    while time.monotonic() < give_up_at:
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
    asker: Target, questions: Sequence[Question], noop: Tokenizer | None
) -> list[Question]:
    """The questions with what answers them: computed where the backend's arithmetic is known, else asked for once."""
    turn = asyncio.Semaphore(_REFERENCE_CLIENTS)

    async def answer(question: Question) -> Question:
        async with turn:
            fields = question.fields
            if noop is None:
                said = await _ask(asker, "POST", question.path, fields)
                choices = sorted(said["choices"], key=lambda choice: choice["index"])
                texts = [one["message"]["content"] if question.is_chat else one["text"] for one in choices]
                return dataclasses.replace(
                    question, texts=tuple(texts), num_tokens=said["usage"]["completion_tokens"]
                )
            name = "messages" if question.is_chat else "prompt"
            prompt = {name: fields[name]}
            tokens = (await _ask(asker, "POST", "/tokenize", prompt))["tokens"]
            count = question.num_choices * fields["max_tokens"]
            known = noop_texts(question, tokens, info, noop)
            return dataclasses.replace(question, texts=known, num_tokens=count)

    if noop is not None:
        backend = NoopBackend(vocabulary_size=noop.vocabulary_size, max_context=NOOP_CONTEXT)
        info = backend.allocate(KvCachePoolConfig(), 1)
    return list(await asyncio.gather(*(answer(question) for question in questions)))


async def _ask(asker: Target, method: str, path: str, fields: dict[str, Any] | None = None) -> Any:
    status, body = await _exchange(asker, method, path, json.dumps(fields).encode() if fields else b"")
    if status != 200:
        raise WeftError(f"{path} answered {status}: {body[:300].decode('utf-8', 'replace')}")
    return json.loads(body)


async def _exchange(asker: Target, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    try:
        reader, writer = await asyncio.open_connection(asker.host, asker.port)
    except OSError as error:
        raise WeftError(f"cannot reach {asker.host}, port {asker.port}: {error}") from error
    writer.write(asker.message(method, path, body))
    response, received = ResponseReader(), b""
    while not response.is_complete and (data := await reader.read(1 << 16)):
        received += response.feed(data)
    writer.close()
    return response.status, received


async def _gauges(asker: Target) -> Gauges | None:
    """None for a server that has no such figures."""
    status, body = await _exchange(asker, "GET", "/metrics")
    found: dict[str, float] = {}
    for line in body.decode("utf-8", "replace").splitlines():
        name, _, value = line.rpartition(" ")
        for gauge in _GAUGES:
            if name.startswith(f"weft:{gauge}"):
                found[gauge] = found.get(gauge, 0.0) + float(value)
    return Gauges(*(found[gauge] for gauge in _GAUGES)) if status == 200 and len(found) == 4 else None


async def _loop_lag(asker: Target) -> Counter[float]:
    """How often the server's event loop was late by at most so many seconds; empty for a server without that metric."""
    _, body = await _exchange(asker, "GET", "/metrics")
    pattern = r'^weft:event_loop_lag_seconds_bucket{.*le="([^"]+)".*} (\S+)$'
    found = re.findall(pattern, body.decode("utf-8", "replace"), re.MULTILINE)
    return Counter({float(bound): int(float(count)) for bound, count in found})


async def _settled(asker: Target, baseline: Gauges | None) -> Gauges | None:
    """The figures once they are back where they were, or once it is too late for that."""
    give_up_at = time.monotonic() + _SETTLE_SECONDS
    while (gauges := await _gauges(asker)) != baseline and time.monotonic() < give_up_at:
        await asyncio.sleep(0.2)
    return gauges


def _files(processes: ServerProcesses) -> int:
    """Open files of the HTTP process, as last seen."""
    return next((one.files[-1] for one in processes.histories.values() if one.name == "HTTP"), 0)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
