"""Observes the server during a soak test: its processes, its health, and the kills of its engine."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, linear_regression

from weft.bench.ratios import t_95
from weft.bench.serve_machine import find_server, take_snapshot

_PROC = Path("/proc")
_ENGINE = b"weft.engine.ipc.process"
_SAMPLE_SECONDS = 1.0
_MIB = 1 << 20
_PARTS = 12


@dataclass(frozen=True)
class Poll:
    """One poll of /health. Times are from the monotonic clock; `due` is the scheduled one."""

    due: float
    seconds: float
    status: int

    @property
    def ended(self) -> float:
        return self.due + self.seconds


@dataclass(frozen=True)
class Growth:
    """Slope of a least-squares line in MiB per minute, and the ends of its 95% interval."""

    slope: float
    low: float
    high: float


@dataclass
class ProcessHistory:
    """Memory and open files of one server process over time."""

    name: str
    times: list[float] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    def growth(self) -> Growth:
        """The growth over the last half of the samples. Neighbouring samples are nearly equal, so an interval computed from
        single samples would be far too small. So the line goes through the means of `_PARTS` parts."""
        half = len(self.times) // 2
        count = len(self.times) - half
        bounds = [half + count * part // _PARTS for part in range(_PARTS + 1)]
        parts = [slice(begin, end) for begin, end in pairwise(bounds) if end > begin]
        minutes = [fmean(self.times[part]) / 60 for part in parts]
        mib = [fmean(self.mib[part]) for part in parts]
        if len(parts) < 3:
            return Growth(0.0, -math.inf, math.inf)
        slope, start = linear_regression(minutes, mib)
        error = sum((y - start - slope * x) ** 2 for x, y in zip(minutes, mib, strict=True))
        spread = sum((x - fmean(minutes)) ** 2 for x in minutes)
        margin = t_95(len(parts) - 2) * math.sqrt(error / (len(parts) - 2) / spread)
        return Growth(slope, slope - margin, slope + margin)


class ServerProcesses:
    """The processes of a local server, found by its port."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self.histories: dict[int, ProcessHistory] = {}

    def pids(self) -> frozenset[int]:
        snapshot = take_snapshot()
        return find_server(self._host, self._port, snapshot.processes) if snapshot else frozenset()

    def engine(self) -> int | None:
        for pid in self.pids():
            try:
                if _ENGINE in (_PROC / str(pid) / "cmdline").read_bytes():
                    return pid
            except OSError:
                continue
        return None

    def sample(self) -> None:
        now = time.monotonic()
        for pid in self.pids():
            try:
                pages = int((_PROC / str(pid) / "statm").read_text().split()[1])
                files = len(os.listdir(_PROC / str(pid) / "fd"))
                if not pages:  # a zombie: it has ended, and its parent has not waited for it yet
                    continue
                if pid not in self.histories:
                    self.histories[pid] = ProcessHistory(role_of(pid))
            except OSError:  # the process ended meanwhile
                continue
            history = self.histories[pid]
            history.times.append(now)
            history.mib.append(pages * os.sysconf("SC_PAGE_SIZE") / _MIB)
            history.files.append(files)

    async def watch(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(_SAMPLE_SECONDS)


def role_of(pid: int) -> str:
    """The role of a server process, from its command line."""
    command = (_PROC / str(pid) / "cmdline").read_bytes()
    for part, name in (
        (_ENGINE, "engine"),
        (b"template_worker", "templates"),
        (b"text_process", "tokeniser"),
    ):
        if part in command:
            return name
    return "HTTP"


class HealthWatch:
    """Owns the process that polls /health, and its results."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, str(port))
        self.polls: list[Poll] = []
        self._process: asyncio.subprocess.Process
        self._reading: asyncio.Task[None]

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "weft.bench.soak_health", *self._address),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self._reading = asyncio.create_task(self._read())

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._reading
        await self._process.wait()

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            due, seconds, status = line.split()
            self.polls.append(Poll(float(due), float(seconds), int(status)))


@dataclass(frozen=True)
class Kill:
    """A kill of the engine. `noticed`: when /health first failed after it. `ready`: when /health then succeeded again.
    None: that never happened."""

    at: float
    noticed: float | None
    ready: float | None


async def kill_engine(processes: ServerProcesses, at: list[float]) -> list[float]:
    """Kills the engine process at each time in `at`. If no engine runs then, it is killed as soon as it runs. Returns
    the times of the kills."""
    done = []
    for moment in at:
        await asyncio.sleep(max(0.0, moment - time.monotonic()))
        while (pid := processes.engine()) is None:
            await asyncio.sleep(0.1)
        now = time.monotonic()  # taken before the kill: a poll that sees the kill always ends later
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        done.append(now)
    return done


def follow_kills(moments: list[float], polls: list[Poll]) -> list[Kill]:
    """What the polls show about each kill in `moments`, up to the next kill."""
    kills = []
    for number, at in enumerate(moments):
        end = moments[number + 1] if number + 1 < len(moments) else float("inf")
        later = [poll for poll in polls if at < poll.ended < end]
        noticed = next((poll.ended for poll in later if poll.status != 200), None)
        ready = None
        if noticed is not None:
            ready = next((poll.ended for poll in later if poll.status == 200 and poll.due > noticed), None)
        kills.append(Kill(at, noticed, ready))
    return kills


def undisturbed(polls: list[Poll], kills: list[Kill]) -> list[Poll]:
    """The polls that no kill of the engine affects."""
    return [
        poll
        for poll in polls
        if not any(
            kill.noticed is not None
            and poll.ended > kill.at
            and (kill.ready is None or poll.due < kill.ready)
            for kill in kills
        )
    ]
