"""Runs the load: plans the phases, sends every request at its time, and records the answers.

A request's clock starts when it is sent, on an open connection, and stops at the last bytes of the answer. In an open
loop, arrivals never wait for answers, so that a slow server cannot reduce its own load.
"""

from __future__ import annotations

import asyncio
import gc
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from weft.bench.serve_api import Api, Dialect, find_dialect, served_model
from weft.bench.serve_client import Client, Connection
from weft.bench.serve_load import (
    WORKLOADS,
    Item,
    Lengths,
    Phase,
    Text,
    burst_times,
    make_items,
    poisson_times,
    read_trace,
    workloads,
)
from weft.bench.serve_machine import MachineUse, take_snapshot, use_between
from weft.bench.serve_measure import Record, Summary, Targets, record_of, summarise
from weft.errors import InvalidRequestError

LEAD = 0.05
"""A connection is opened this many seconds before its request is sent."""
WARM_UP_TOKENS = 16
MOST_CONNECTIONS = 65_536
USUAL_LENGTH = Lengths(128, 128)


@dataclass(frozen=True)
class Work:
    """The load, as given on the command line. At most one arrival process is set; the default is `clients`."""

    clients: int | None = None
    rates: tuple[float, ...] = ()
    burst: int | None = None
    every: float = 1.0
    trace: Path | None = None
    workloads: tuple[str, ...] = ()
    requests: int = 64
    prompt_tokens: Lengths = USUAL_LENGTH
    max_tokens: Lengths = USUAL_LENGTH
    warm_up: int = 2
    seed: int = 0
    run: int = 0


@dataclass(frozen=True)
class PhaseResult:
    name: str
    rate: float | None
    summary: Summary
    machine: MachineUse
    reconnects: int
    """Requests that were sent again on a new connection, because the server had closed an idle one."""
    records: tuple[Record, ...] = field(repr=False)


@dataclass(frozen=True)
class Report:
    url: str
    dialect: Dialect
    targets: Targets
    phases: tuple[PhaseResult, ...]

    @property
    def sweep(self) -> list[tuple[float, Summary]]:
        """Rate and summary of each phase that has a rate; empty unless at least two rates differ."""
        points = [(phase.rate, phase.summary) for phase in self.phases if phase.rate is not None]
        return points if len({rate for rate, _ in points}) > 1 else []


def plan(work: Work, open_text: Callable[[], Text]) -> list[Phase]:
    """Makes the phases. The text is opened only if needed: a trace has its own prompts."""
    kinds = (work.clients, work.rates, work.burst, work.trace, work.workloads)
    if sum(bool(kind) for kind in kinds) > 1:
        raise InvalidRequestError(
            "--clients, --rate (or --rates), --burst, --trace and --workload each define when requests arrive; give one of them"
        )
    if work.trace is not None:
        items = read_trace(work.trace)
        span = items[-1].at - items[0].at
        rate = (len(items) - 1) / span if span > 0 else None
        return [Phase(work.trace.name, items, rate=rate)]
    text = open_text()
    if work.workloads:
        return workloads(WORKLOADS if work.workloads == ("all",) else work.workloads, text)

    def items_at(times: Sequence[float]) -> tuple[Item, ...]:
        return make_items(text, times, work.prompt_tokens, work.max_tokens, work.seed)

    if work.rates:
        return [
            Phase(f"{rate:g}/s", items_at(poisson_times(work.requests, rate, work.seed)), rate=rate)
            for rate in work.rates
        ]
    if work.burst:
        times = burst_times(work.requests, work.burst, work.every)
        return [Phase(f"bursts of {work.burst}", items_at(times), rate=work.burst / work.every)]
    clients = work.clients or 8
    return [Phase(f"{clients} clients", items_at([0.0] * work.requests), clients=clients)]


async def measure(
    client: Client,
    phases: Sequence[Phase],
    *,
    targets: Targets,
    num_warm_up: int = 0,
    model: str | None = None,
    api: Api = "completions",
    decode: Callable[[Sequence[int]], str],
    seconds: float,
    print_status: Callable[[str], None],
) -> Report:
    """Probes the API of the server, warms it up, and runs the phases one after another."""
    _allow_many_connections()
    items = [item for phase in phases for item in phase.items]
    dialect = await find_dialect(client, model or await served_model(client), items, api, decode)
    print_status(dialect.describe())

    def messages(items: Sequence[Item]) -> list[bytes]:
        return [client.message("POST", dialect.path, dialect.body(item, decode)) for item in items]

    try:
        # The warm-up sends the measured prompts in reversed token order: the same lengths, but no prefix hits later.
        warm_up = [Item(item.prompt[::-1], WARM_UP_TOKENS) for item in items[:num_warm_up]]
        await asyncio.gather(*(client.send(message, seconds) for message in messages(warm_up)))
        results = []
        for phase in phases:
            print_status(f"{phase.name}: {len(phase.items):,} requests")
            for message in messages(phase.warm_up):
                await client.send(message, seconds)
            results.append(await _run_phase(client, phase, messages(phase.items), targets, seconds))
    finally:
        client.close()
    return Report(client.url, dialect, targets, tuple(results))


async def _run_phase(
    client: Client, phase: Phase, messages: Sequence[bytes], targets: Targets, seconds: float
) -> PhaseResult:
    reconnects = client.num_reconnects
    with _without_garbage_collection():
        before = take_snapshot()
        if phase.clients:
            records = await _run_closed_loop(client, phase, messages, seconds)
        else:
            records = await _run_open_loop(client, phase, messages, seconds)
        after = take_snapshot()
    machine = use_between(before, after, client.host, client.port)
    return PhaseResult(
        name=phase.name,
        rate=phase.rate,
        summary=summarise(records, targets),
        machine=machine,
        reconnects=client.num_reconnects - reconnects,
        records=tuple(records),
    )


async def _run_closed_loop(
    client: Client, phase: Phase, messages: Sequence[bytes], seconds: float
) -> list[Record]:
    """A closed loop: each client sends its next request when the previous one is answered."""
    assert phase.clients
    num_clients = min(phase.clients, len(messages))
    await client.open_idle(num_clients)
    records: dict[int, Record] = {}
    indices = iter(range(len(messages)))
    start = perf_counter()

    async def work() -> None:
        for index in indices:
            answer, _ = await client.send(messages[index], seconds)
            records[index] = record_of(answer, phase.items[index], start, None)

    await asyncio.gather(*(work() for _ in range(num_clients)))
    return [records[index] for index in range(len(messages))]


async def _run_open_loop(
    client: Client, phase: Phase, messages: Sequence[bytes], seconds: float
) -> list[Record]:
    """An open loop: every request is sent at its time, whether or not earlier ones are answered."""
    at_once = sum(item.at == phase.items[0].at for item in phase.items)
    await client.open_idle(at_once)
    start = perf_counter() + LEAD - phase.items[0].at

    async def work(index: int) -> Record:
        item = phase.items[index]
        connection: Connection | None = None
        try:
            connection = await client.reserve()
        except (OSError, TimeoutError):
            pass  # The connection is opened again when the request is sent, and a failure is counted then.
        await _sleep_until(start + item.at)
        answer, _ = await client.send(messages[index], seconds, connection)
        return record_of(answer, item, start, item.at)

    tasks = []
    for index, item in enumerate(phase.items):
        await _sleep_until(start + item.at - LEAD)
        tasks.append(asyncio.create_task(work(index)))
    return await asyncio.gather(*tasks)


async def _sleep_until(time: float) -> None:
    delay = time - perf_counter()
    if delay > 0:
        await asyncio.sleep(delay)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disables garbage collection: a pause of the client would look like a pause of the server."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _allow_many_connections() -> None:
    """Raises the soft limit of open files as far as allowed: every connection is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MOST_CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, MOST_CONNECTIONS)
    if soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
