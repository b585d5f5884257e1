"""A running engine: starts, observes and ends its process, sends requests to it, and freezes it (SIGSTOP) while others
are measured.

The load generator of `weft bench serve` sends the requests to a server. A library runs in a driver, which gets the same
requests as one line of JSON and returns the time of every token.
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
from weft.bench.serve_machine import MachineUse, process_tree, take_snapshot, use_of
from weft.bench.serve_measure import Record, Summary, Targets, summarise
from weft.bench.serve_run import WARM_UP_TOKENS, measure

START_SECONDS = 600.0
"""A start that takes longer has failed. vLLM compiles for two minutes."""
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
    """The result of one phase on one engine."""

    summary: Summary
    machine: MachineUse
    peak_rss: int
    """Peak bytes of all engine processes together, from the start of the engine to the end of the phase."""
    pss: int
    """Bytes at the end of the phase; pages that several processes share count once."""


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
            start_new_session=True,  # its own process group: signals reach all its children
            preexec_fn=_end_with_parent,
        )
        self._memory = MemoryWatch(self._process.pid)
        self._is_frozen = False

    # --- requests ---------------------------------------------------------------------------------------------------

    def first_token(self, prompt: Sequence[int]) -> tuple[float, MachineUse]:
        """Sends the first request. Returns the seconds from the start of the process to its first token, and the CPU use
        meanwhile."""
        item = Item(tuple(prompt), 1)
        if self._launch.port is None:
            self._drive(Phase("start", (item,)), START_SECONDS)
        else:
            asyncio.run(self._poll_until_answered(item))
        seconds = perf_counter() - self._began
        return seconds, self._use(self._before)

    def run(self, phases: Sequence[Phase]) -> Iterator[Outcome]:
        """Warms the engine up, runs the phases one after another, and yields their outcomes. A phase starts when its
        outcome is requested."""
        for number, phase in enumerate(phases):
            yield self._outcome(phase, 0 if number else _NUM_WARM_UP)

    def _outcome(self, phase: Phase, num_warm_up: int) -> Outcome:
        if self._launch.port is not None:
            summary, machine = asyncio.run(self._measure_server(phase, num_warm_up))
        else:
            # As in `measure`, the warm-up sends the measured prompts in reversed token order, so that there are no
            # prefix hits later.
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
                f"{summary.short_answers} answers of {phase.name} were shorter than requested, so the work is not comparable"
            )
        self._memory.sample()
        return Outcome(summary, machine, self._memory.peak, self._memory.pss())

    async def _measure_server(self, phase: Phase, num_warm_up: int) -> tuple[Summary, MachineUse]:
        report = await measure(
            Client(f"http://127.0.0.1:{self._launch.port}"),
            [phase],
            targets=Targets(),
            num_warm_up=num_warm_up,
            decode=_reject_text,
            seconds=REQUEST_SECONDS,
            print_status=lambda _: None,
        )
        return report.phases[0].summary, report.phases[0].machine

    async def _poll_until_answered(self, item: Item) -> None:
        """Sends the request again and again from the start of the process, until it is answered."""
        client = Client(f"http://127.0.0.1:{self._launch.port}")
        model = await self._poll_model_name(client, client.message("GET", "/v1/models"))
        fields = {
            "model": model,
            "prompt": list(item.prompt),
            "max_tokens": 1,
            "temperature": 0,
            "stream": True,
        }
        message = client.message("POST", "/v1/completions", json.dumps(fields).encode())
        try:
            while (await client.send(message, REQUEST_SECONDS))[0].failure:
                await self._wait_for_retry("answers no request")
        finally:
            client.close()

    async def _poll_model_name(self, client: Client, message: bytes) -> str:
        """Polls until the server lists its model. Returns its name."""
        while True:
            _, exchange = await client.send(message, REQUEST_SECONDS)
            if exchange is not None and exchange.response.status == 200:
                return str(json.loads(exchange.body)["data"][0]["id"])
            await self._wait_for_retry("lists no model")

    async def _wait_for_retry(self, problem: str) -> None:
        self._check_alive()
        if perf_counter() - self._began > START_SECONDS:
            raise PeerError(f"it {problem} after {START_SECONDS:g} s; {last_error(self._log)}")
        await asyncio.sleep(_RETRY_SECONDS)

    def _drive(self, phase: Phase, seconds: float) -> list[Record]:
        """Sends a phase to the driver, and returns the records of its answer. Waits at most `seconds`."""
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
        """Reads the answer of the driver, which it writes at the end of a phase."""
        assert self._process.stdout is not None
        deadline, line = perf_counter() + seconds, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - perf_counter())):
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
        pids = process_tree(self._process.pid, after.processes) if after else frozenset()
        return use_of(before, after, pids)

    # --- process ----------------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Freezes the process group (SIGSTOP) while other engines are measured; its memory stays."""
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
            os.killpg(self._process.pid, signal.SIGKILL)  # children that are still running
        except ProcessLookupError:
            pass
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._output.close()


def _end_with_parent() -> None:
    """Kills the engine if the benchmark dies: a frozen process could not end by itself."""
    _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


class MemoryWatch:
    """A thread that samples the memory of a process and its children, ten times per second."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.peak = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def sample(self) -> None:
        """Takes a sample now: a short phase may lie between two samples of the thread."""
        self._update_peak(_process_tree(self._pid))

    def pss(self) -> int:
        """Current PSS. Expensive: the kernel visits every page."""
        return sum(_pss_of(pid) for pid in _process_tree(self._pid))

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        pids: frozenset[int] = frozenset()
        count = 0
        while not self._is_over.wait(_SAMPLE_SECONDS):
            if count % 10 == 0:  # finding the children reads all of /proc
                pids = _process_tree(self._pid)
            count += 1
            self._update_peak(pids)

    def _update_peak(self, pids: frozenset[int]) -> None:
        self.peak = max(self.peak, sum(_rss_of(pid) for pid in pids))


def _process_tree(pid: int) -> frozenset[int]:
    snapshot = take_snapshot()
    return process_tree(pid, snapshot.processes) if snapshot else frozenset()


def _rss_of(pid: int) -> int:
    try:
        return int((_PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):  # the process ended meanwhile
        return 0


def _pss_of(pid: int) -> int:
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


def driver_records(phase: Phase, line: bytes) -> list[Record]:
    """Parses the answer of a driver into records like those of the load generator."""
    try:
        answered: Any = json.loads(line)
        return [
            Record(
                due=None if phase.clients else item.at,
                began=float(request["began"]),
                # Tokens of one step have the same time: they count as one chunk, as over HTTP.
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
            f"its driver answered {line[:80]!r}, which is not a list of requests: {error}"
        ) from error


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _reject_text(token_ids: Sequence[int]) -> str:
    raise PeerError("the server does not accept token ids as a prompt, so the work would not be comparable")


def settle(seconds: float = 0.5) -> None:
    """Sleeps, so that the system can free the memory of the last process and write its files."""
    sleep(seconds)
