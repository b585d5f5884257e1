"""Observes the server during a soak test: its processes, its health, and the kills of its engine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from weft.bench.serve_machine import find_server, take_snapshot

_PROC = Path("/proc")
_ENGINE = b"weft.engine.ipc.process"
_SAMPLE_SECONDS = 1.0
_MIB = 1 << 20


@dataclass(frozen=True)
class Poll:
    """One poll of /health. Times are from the monotonic clock; `due` is the scheduled one."""

    due: float
    seconds: float
    status: int

    @property
    def ended(self) -> float:
        return self.due + self.seconds


@dataclass
class ProcessHistory:
    """Memory and open files of one server process over time."""

    name: str
    times: list[float] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    def growth(self) -> float:
        """MiB per minute: the slope of a least-squares line through the second half of the samples."""
        half = len(self.times) // 2
        times, mib = self.times[half:], self.mib[half:]
        mean_time, mean_mib = sum(times) / len(times), sum(mib) / len(mib)
        variance = sum((at - mean_time) ** 2 for at in times)
        if not variance:
            return 0.0
        covariance = sum((at - mean_time) * (size - mean_mib) for at, size in zip(times, mib, strict=True))
        return 60 * covariance / variance


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
