"""A running engine: its process is started, asked, frozen while others are measured, watched, and ended.

Servers are asked by the load generator of `weft bench serve`; libraries through a driver that gets the same work as
one line of JSON and gives back the times of every token.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from benchmarks.peers_engines import Launch
from benchmarks.peers_environment import PeerError, last_error
from weft.bench.serve_client import Client
from weft.bench.serve_load import Item, Phase
from weft.bench.serve_machine import MachineUse, family_of, take_snapshot, use_of
from weft.bench.serve_measure import Record, Summary, Targets, summarise
from weft.bench.serve_run import WARM_UP_TOKENS, measure

START_SECONDS = 600.0
"""A start that takes longer has failed; vLLM compiles for two minutes."""
REQUEST_SECONDS = 900.0
_RETRY_SECONDS = 0.01
_END_SECONDS = 15.0
_SAMPLE_SECONDS = 0.1
_NUM_WARM_UP = 2
_PROC = Path("/proc")
_LIBC = ctypes.CDLL(None)
_SET_PARENT_DEATH_SIGNAL = 1


@dataclass(frozen=True)
class Outcome:
    """One phase of work on one engine."""

    summary: Summary
    machine: MachineUse
    peak_rss: int
    """Bytes, all processes of the engine together, from its start to the end of the phase."""
    pss: int
    """Bytes at the end of the phase, with pages that several processes share counted once."""


class RunningEngine:
    """One process of an engine, with its children."""

    def __init__(self, launch: Launch, log: Path) -> None:
        self._launch = launch
        self._log = log
        self._output = log.open("wb")
        self._before = take_snapshot()
        self._began = perf_counter()
        self._process = subprocess.Popen(
            launch.command,
            stdin=subprocess.PIPE,
            stdout=self._output if launch.port is not None else subprocess.PIPE,
            stderr=self._output,
            env=dict(launch.environment),
            start_new_session=True,  # a group of its own: it is frozen and ended with all its children
            preexec_fn=_end_with_parent,
        )
        self._memory = MemoryWatch(self._process.pid)
        self._is_frozen = False

    # --- asking -----------------------------------------------------------------------------------------------------

    def first_token(self, prompt: Sequence[int]) -> tuple[float, MachineUse]:
        """Seconds from the start of the process to the first token of its first answer, and who else was busy."""
        item = Item(tuple(prompt), 1)
        if self._launch.port is None:
            self._drive(Phase("start", (item,)), START_SECONDS)
        else:
            asyncio.run(self._ask_until_answered(item))
        seconds = perf_counter() - self._began
        return seconds, self._use(self._before)

    def run(self, phases: Sequence[Phase]) -> Iterator[Outcome]:
        """Warms the engine up, and runs the phases one after the other, each when the caller asks for the next."""
        for number, phase in enumerate(phases):
            yield self._outcome(phase, 0 if number else _NUM_WARM_UP)

    def _outcome(self, phase: Phase, num_warm_up: int) -> Outcome:
        if self._launch.port is not None:
            summary, machine = asyncio.run(self._ask(phase, num_warm_up))
        else:
            # As `measure` does: the prompts to come, backwards, which are as long and no help to a cache.
            items = [Item(item.prompt[::-1], WARM_UP_TOKENS) for item in phase.items[:num_warm_up]]
            if items:
                self._drive(Phase("warm-up", tuple(items)), REQUEST_SECONDS)
            before = take_snapshot()
            records = self._drive(phase, REQUEST_SECONDS)
            summary, machine = summarise(records, Targets()), self._use(before)
        if summary.answered < summary.requests:
            kinds = ", ".join(f"{count} {kind}" for kind, count in summary.failures.items())
            raise PeerError(
                f"{summary.requests - summary.answered} of {summary.requests} requests of {phase.name} failed: {kinds}; "
                f"{last_error(self._log)}"
            )
        if summary.short_answers:
            raise PeerError(
                f"{summary.short_answers} answers of {phase.name} were shorter than asked: that is other work"
            )
        self._memory.look()
        return Outcome(summary, machine, self._memory.peak, self._memory.pss())

    async def _ask(self, phase: Phase, num_warm_up: int) -> tuple[Summary, MachineUse]:
        report = await measure(
            Client(f"http://127.0.0.1:{self._launch.port}"),
            [phase],
            targets=Targets(),
            num_warm_up=num_warm_up,
            decode=_no_text,
            seconds=REQUEST_SECONDS,
            say=lambda _: None,
        )
        return report.phases[0].summary, report.phases[0].machine

    async def _ask_until_answered(self, item: Item) -> None:
        """Asks again and again from the moment the process begins, as a client would that waits for its server."""
        client = Client(f"http://127.0.0.1:{self._launch.port}")
        model = await self._when_ready(client, client.message("GET", "/v1/models"))
        fields = {
            "model": model,
            "prompt": list(item.prompt),
            "max_tokens": 1,
            "temperature": 0,
            "stream": True,
        }
        message = client.message("POST", "/v1/completions", json.dumps(fields).encode())
        try:
            while (await client.ask(message, REQUEST_SECONDS))[0].failure:
                await self._wait_a_little("answers no request")
        finally:
            client.close()

    async def _when_ready(self, client: Client, message: bytes) -> str:
        """The model that the server lists, once it does."""
        while True:
            _, exchange = await client.ask(message, REQUEST_SECONDS)
            if exchange is not None and exchange.response.status == 200:
                return str(json.loads(exchange.body)["data"][0]["id"])
            await self._wait_a_little("lists no model")

    async def _wait_a_little(self, problem: str) -> None:
        self._check_alive()
        if perf_counter() - self._began > START_SECONDS:
            raise PeerError(f"it {problem} after {START_SECONDS:g} s; {last_error(self._log)}")
        await asyncio.sleep(_RETRY_SECONDS)

    def _drive(self, phase: Phase, seconds: float) -> list[Record]:
        items = [
            {"prompt": item.prompt, "max_tokens": item.max_tokens, "at": item.at} for item in phase.items
        ]
        work = json.dumps({"items": items, "one_by_one": phase.clients == 1})
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(work.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._check_alive()
        return driver_records(phase, self._read_line(seconds))

    def _read_line(self, seconds: float) -> bytes:
        """The driver's answer. It is read whole: a driver says nothing before it is done."""
        assert self._process.stdout is not None
        give_up, line = perf_counter() + seconds, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, give_up - perf_counter())):
                    raise PeerError(f"it did not answer within {seconds:g} s; {last_error(self._log)}")
                piece = os.read(self._process.stdout.fileno(), 1 << 20)
                if not piece:
                    raise PeerError(f"it ended; {last_error(self._log)}")
                line += piece
        return line

    def _check_alive(self) -> None:
        code = self._process.poll()
        if code is not None:
            raise PeerError(f"it ended with exit code {code}; {last_error(self._log)}")

    def _use(self, before: Any) -> MachineUse:
        after = take_snapshot()
        pids = family_of(self._process.pid, after.processes) if after else frozenset()
        return use_of(before, after, pids)

    # --- its life ---------------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Takes its CPU time away while others are measured; its memory stays."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        self._is_frozen = True

    def thaw(self) -> None:
        if self._is_frozen:
            os.killpg(self._process.pid, signal.SIGCONT)
            self._is_frozen = False

    def end(self) -> None:
        self._memory.stop()
        self.thaw()
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                pass
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # children that outlived it
        except ProcessLookupError:
            pass
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._output.close()


def _end_with_parent() -> None:
    """A bench that is killed leaves nothing running, and nothing frozen, which could not end by itself."""
    _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


class MemoryWatch:
    """A thread that looks at the memory of a process and its children, ten times a second."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.peak = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def look(self) -> None:
        """A look now: a short phase may lie between two of the thread's."""
        self._take(_family(self._pid))

    def pss(self) -> int:
        """Looked at once, since the kernel walks every page for it."""
        return sum(_pss_of(pid) for pid in _family(self._pid))

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        family: frozenset[int] = frozenset()
        count = 0
        while not self._is_over.wait(_SAMPLE_SECONDS):
            if count % 10 == 0:  # finding children reads all of /proc
                family = _family(self._pid)
            count += 1
            self._take(family)

    def _take(self, family: frozenset[int]) -> None:
        self.peak = max(self.peak, sum(_rss_of(pid) for pid in family))


def _family(pid: int) -> frozenset[int]:
    snapshot = take_snapshot()
    return family_of(pid, snapshot.processes) if snapshot else frozenset()


def _rss_of(pid: int) -> int:
    try:
        return int((_PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):  # it ended meanwhile
        return 0


def _pss_of(pid: int) -> int:
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


def driver_records(phase: Phase, line: bytes) -> list[Record]:
    """What a driver answered, as records like those of the load generator."""
    try:
        answered: Any = json.loads(line)
        return [
            Record(
                due=None if phase.clients else item.at,
                began=float(request["began"]),
                # Tokens of one step come at one time: for whoever reads them that is one arrival, as over HTTP.
                chunk_times=tuple(dict.fromkeys(request["tokens"])),
                ended=float(request["ended"]),
                asked_tokens=item.max_tokens,
                output_tokens=len(request["tokens"]),
                prompt_tokens=len(item.prompt),
                cached_tokens=0,
                has_usage=True,
                finish_reason="length",
                failure_kind=None if len(request["tokens"]) == item.max_tokens else "wrong length",
                failure_detail=None,
            )
            for item, request in zip(phase.items, answered, strict=True)
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise PeerError(
            f"its driver answered {line[:80]!r}, which is no list of requests: {error}"
        ) from error


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _no_text(token_ids: Sequence[int]) -> str:
    raise PeerError("the server takes no token ids as a prompt, so that the work would not be the same")


def settle(seconds: float = 0.5) -> None:
    """What a process leaves behind (its memory is given back, its files are written) is over before the next begins."""
    sleep(seconds)
