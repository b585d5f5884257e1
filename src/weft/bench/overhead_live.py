"""The cost of a viewer of the live page, for `weft bench overhead`: rounds with and without one, in turn."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from weft.bench.ratios import Ratios
from weft.bench.report import Check, print_table
from weft.bench.serve_client import Client
from weft.bench.serve_machine import find_server, take_snapshot
from weft.errors import WeftError

MOST_CPU = 0.01
"""A viewer may add this fraction to the CPU time of the engine's thread."""
LOST_SPEED = 0.03
_SHAPES = ((1, 7000), (32, 1800))
"""(sequences, tokens of each sequence). All sequences fit the KV cache and are decoded together. So a round has one
step for each token of a sequence."""
_ROUNDS = 10
_LAPSE_SECONDS = 5.5
"""A pause that is longer than the 5 s for which the engine records steps after the last frame."""


@dataclass
class ViewerCost:
    """Measurements of each round: `before` without a viewer, `after` with one."""

    sequences: int
    steps: int
    thread_seconds: Ratios = field(default_factory=Ratios)
    """CPU time of the engine's thread."""
    process_seconds: Ratios = field(default_factory=Ratios)
    """CPU time of the engine's process, with the thread that makes the frames."""
    tokens_per_second: Ratios = field(default_factory=Ratios)
    frames: list[int] = field(default_factory=list)
    """Frames that the viewer got in each round."""


def viewer_checks(costs: list[ViewerCost]) -> list[Check]:
    """Compares the costs with their criteria. A criterion is met if the worse end of the 95% interval meets it."""
    checks = []
    for cost in costs:
        name = f"a live viewer, {cost.sequences} sequences"
        cpu, speed = cost.thread_seconds.change(), cost.tokens_per_second.change()
        most_cpu, least_speed = cpu[2], speed[1]
        checks += [
            Check(
                f"{name}: CPU time of the engine's thread",
                _percents(cpu),
                f"{MOST_CPU:+.0%}",
                most_cpu < MOST_CPU,
            ),
            Check(
                f"{name}: tokens per second",
                _percents(speed),
                f"{-LOST_SPEED:+.0%}",
                least_speed > -LOST_SPEED,
            ),
        ]
    return checks


def print_viewer_costs(costs: list[ViewerCost]) -> None:
    print_table(
        f"With a viewer of the live page and without, {_ROUNDS} rounds in turn, CPU microseconds a step",
        ("", "without", "with", "change, 95% interval"),
        [
            (
                f"{cost.sequences} sequences, {name}",
                *(f"{scale * median(values):,.1f}" for values in (found.before, found.after)),
                _percents(found.change()),
            )
            for cost in costs
            for name, found, scale in (
                ("engine's thread", cost.thread_seconds, 1e6 / cost.steps),
                ("engine's process", cost.process_seconds, 1e6 / cost.steps),
                ("tokens per second", cost.tokens_per_second, 1.0),
            )
        ],
    )


def _percents(change: tuple[float, float, float]) -> str:
    mean, low, high = change
    return f"{mean:+.1%} ({low:+.1%} to {high:+.1%})"


async def viewer_costs(client: Client, prompt: list[int]) -> list[ViewerCost]:
    """Measures the cost of a viewer for each of `_SHAPES`. Empty if the engine's process is not visible in /proc."""
    snapshot = take_snapshot()
    pids = () if snapshot is None else find_server(client.host, client.port, snapshot.processes)
    engines = [pid for pid in pids if _is_engine(pid)]
    if len(engines) != 1:
        return []
    return [await _measure(client, engines[0], prompt, *shape) for shape in _SHAPES]


async def _measure(client: Client, engine: int, prompt: list[int], sequences: int, steps: int) -> ViewerCost:
    fields = {"prompt": prompt, "n": sequences, "max_tokens": steps, "stream": True, "ignore_eos": True}
    message = client.message("POST", "/v1/completions", json.dumps(fields).encode())
    cost = ViewerCost(sequences, steps)
    was_watched = False
    for number in range(_ROUNDS + 1):
        # The order alternates (with, without; without, with). So only every second pass of the outer loop needs a pause.
        for is_watched in (True, False) if number % 2 == 0 else (False, True):
            if was_watched and not is_watched:
                await asyncio.sleep(_LAPSE_SECONDS)
                await _round(client, engine, message)  # the first round after a pause is slower
            was_watched = is_watched
            if is_watched:
                async with _viewer(client) as frames:
                    measured = await _round(client, engine, message)
            else:
                frames = []
                measured = await _round(client, engine, message)
            if number == 0:  # the first round warms up
                continue
            thread, process, seconds = measured
            for ratios, value in (
                (cost.thread_seconds, thread),
                (cost.process_seconds, process),
                (cost.tokens_per_second, sequences * steps / seconds),
            ):
                (ratios.after if is_watched else ratios.before).append(value)
            if is_watched:
                cost.frames.append(len(frames))
    return cost


async def _round(client: Client, engine: int, message: bytes) -> tuple[float, float, float]:
    """Runs one round. Returns CPU seconds of the engine's thread and of its process, and the elapsed seconds."""
    before, began = _cpu_seconds(engine), time.perf_counter()
    answer, _ = await client.send(message, 120.0)
    seconds = time.perf_counter() - began
    after = _cpu_seconds(engine)
    if answer.failure:
        raise WeftError(f"a stream failed: {answer.failure.kind}: {answer.failure.detail}")
    return after[0] - before[0], after[1] - before[1], seconds


@asynccontextmanager
async def _viewer(client: Client) -> AsyncIterator[list[int]]:
    """Reads live data during the `with` block. Yields the list of frame sizes, which grows as frames arrive."""
    reader, writer = await asyncio.open_connection(client.host, client.port, limit=1 << 20)
    writer.write(client.message("GET", "/live"))
    sizes: list[int] = []

    async def read() -> None:
        while line := await reader.readline():
            if line.startswith(b"data: "):
                sizes.append(len(line))

    reading = asyncio.create_task(read())
    try:
        while not sizes:
            if reading.done():
                raise WeftError("the server sends no live data")
            await asyncio.sleep(0.01)
        sizes.clear()
        yield sizes
    finally:
        reading.cancel()
        writer.close()
        await asyncio.wait((reading,))


def _cpu_seconds(pid: int) -> tuple[float, float]:
    """CPU seconds of the main thread, which runs the engine loop, and of all threads. The resolution is a nanosecond."""
    total = own = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        spent = int((task / "schedstat").read_text().split()[0])
        total += spent
        if int(task.name) == pid:
            own = spent
    return own / 1e9, total / 1e9


def _is_engine(pid: int) -> bool:
    try:
        return b"weft.engine.ipc.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended, or belongs to another user
        return False
