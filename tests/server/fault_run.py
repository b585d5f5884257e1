"""Runs seeded faults against the real processes of a server, with tests/ in PYTHONPATH: fault_run.py --minutes 30 --seed 1

Each run starts a server, keeps clients busy, and injects the faults of `fault_plan`. Every answer is checked as in
`weft bench soak`. At the end every request has ended once, and each error is explained by a concurrent fault. `/health`
and `/ready` were correct throughout. Memory, descriptors and gauges are back at the baseline.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fault_checks import Footprint, HealthPolls, footprint, is_open, send_and_stall
from fault_clients import OTHER_CLIENTS, Failure, FaultClient
from fault_plan import SHOWN_BY_HEALTH, Fault, Plan, Window, draw_plan
from fault_state import run_state_faults
from server_process import NOOP, Server, running_server

from weft.bench.soak import with_answers
from weft.bench.soak_client import Ledger, Target, Violation
from weft.bench.soak_plan import NOOP as NOOP_SIZES
from weft.bench.soak_plan import REAL as REAL_SIZES
from weft.bench.soak_plan import Behaviour, draw_questions, wrong_questions
from weft.loading.checkpoint import open_checkpoint
from weft.loading.pull import pull
from weft.text.model_text import open_model_text

STALL_SECONDS = 3.0
STALLED_READER_SECONDS = 2.0
NOTICED_SECONDS = 2.0
"""`/ready` must return 503 within this time after the engine stopped."""
CLIENTS = 12
GROWN_MIB = 32.0
_NOTICE_SECONDS = 10.0
"""Limit for the time from a fault of the engine to a 503 of `/ready`. On an idle machine it takes 2 s."""
_RECOVERY_SECONDS = 90.0
_POLL_SECONDS = 0.05
_HERE = Path(__file__).parent


@dataclass
class Run:
    """One server under faults, and all observations of it."""

    server: Server
    plan: Plan
    target: Target
    folder: Path
    """The folder that `faulty/sitecustomize` reads."""
    packed: Path
    """The folder of packed weights."""
    polls: HealthPolls
    disk: Path
    """The folder of the engine's log."""
    disk_is_small: bool
    """Whether that folder is a file system of its own, which can be filled."""
    ledger: Ledger = field(default_factory=Ledger)
    failures: list[Failure] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    """Answered requests of the other APIs, by name."""

    @contextlib.contextmanager
    def fault(self, name: str, content: str) -> Iterator[None]:
        path = self.folder / name
        path.write_text(content)
        try:
            yield
        finally:
            path.unlink()

    async def engine(self) -> int:
        """The engine process; waits until there is one."""
        give_up_at = time.monotonic() + _RECOVERY_SECONDS
        while True:
            with contextlib.suppress(AssertionError):
                return self.server.engine_pid()
            if time.monotonic() > give_up_at:
                raise Violation("the engine process did not come back")
            await asyncio.sleep(0.05)

    async def recovered(self, window: Window) -> None:
        """Waits until polls that began after the fault see 200 from both routes again."""
        began = time.monotonic()
        needs_notice = window.fault in SHOWN_BY_HEALTH
        while time.monotonic() < began + _RECOVERY_SECONDS:
            polls = [poll for poll in self.polls.polls if poll.began > window.began]
            noticed = next((n for n, poll in enumerate(polls) if poll.health not in (200, 0)), None)
            last = [poll for poll in polls if poll.began > began][-3:]
            is_good = len(last) == 3 and all(poll.health == 200 == poll.ready for poll in last)
            if is_good and (noticed is not None or not needs_notice):
                break
            if is_good and time.monotonic() > began + 10:
                self.violations.append(f"{window.fault.name}: /health never returned 503")
                break
            await asyncio.sleep(_POLL_SECONDS)
        else:
            self.violations.append(f"{window.fault.name}: not ready again after {_RECOVERY_SECONDS:g} s")
        window.ended = time.monotonic()

    # ------------------------------------------------------------------ the faults

    async def inject(self, fault: Fault) -> None:
        """Injects a fault, undoes it if it lasts, and waits until the server has recovered."""
        source = self.plan.source
        window = Window(fault, time.monotonic())
        self.windows.append(window)
        if fault is Fault.BRIEF_STOP:
            await self._stop(source.uniform(0.1, STALL_SECONDS - 0.6))
        elif fault is Fault.LONG_STOP:
            os.kill(await self.engine(), signal.SIGSTOP)
        elif fault is Fault.KILLED_ENGINE:
            os.kill(await self.engine(), signal.SIGKILL)
        elif fault is Fault.KILLED_WORKER:
            await self._kill_worker()
        elif fault is Fault.NO_DESCRIPTORS:
            await self._kill_without_descriptors(source.uniform(1.0, 3.0))
        elif fault is Fault.NO_FORK:
            number = source.choice((errno.ENOMEM, errno.EAGAIN))
            with self.fault("fork", str(number)):
                os.kill(await self.engine(), signal.SIGKILL)
                await asyncio.sleep(source.uniform(1.0, 3.0))
        elif fault is Fault.FULL_DISK:
            await self._fill_disk(source.uniform(0.5, 2.0))
        elif fault is Fault.STALLED_READERS:
            await self._stall_readers()
        elif fault is Fault.LEAVERS:
            await asyncio.gather(*(self._leave(number) for number in range(24)))
        elif fault is Fault.CLOCK_JUMP:
            for days in (30, -30):
                with self.fault("clock", str(days * 86400)):
                    await asyncio.sleep(source.uniform(0.2, 1.0))
        else:
            await self._damage_weights(fault)
        await self.recovered(window)

    async def _stop(self, seconds: float) -> None:
        pid = await self.engine()
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    async def _kill_worker(self) -> None:
        engine = await self.engine()
        workers = [pid for pid in self.server.children() if pid != engine]
        if workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.plan.source.choice(workers), signal.SIGKILL)
        await asyncio.sleep(0.5)

    async def _kill_without_descriptors(self, seconds: float) -> None:
        pid = self.server.process.pid
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        highest = max(map(int, os.listdir(f"/proc/{pid}/fd")))
        resource.prlimit(
            pid, resource.RLIMIT_NOFILE, (min(highest, len(os.listdir(f"/proc/{pid}/fd"))), hard)
        )
        try:
            os.kill(await self.engine(), signal.SIGKILL)
            await asyncio.sleep(seconds)
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))

    async def _fill_disk(self, seconds: float) -> None:
        pid = await self.engine()
        if self.disk_is_small:  # ENOSPC
            filler = self.disk / "filler"
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 20))
            await asyncio.sleep(seconds)
            filler.unlink()
            return
        # EFBIG, where no file system can be mounted.
        soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
        await asyncio.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))

    async def _stall_readers(self) -> None:
        """Opens streams of megabytes and reads nothing: the server must close each of them."""
        body = {"prompt": [1], "max_tokens": 1500, "n": 4, "logprobs": 20, "stream": True, "ignore_eos": True}
        message = self.target.message("POST", "/v1/completions", json.dumps(body).encode())
        connections = [await asyncio.to_thread(send_and_stall, self.server.port, message) for _ in range(3)]
        try:
            give_up_at = time.monotonic() + STALLED_READER_SECONDS + 60
            while any(map(is_open, connections)):
                if time.monotonic() > give_up_at:
                    self.violations.append("a stream whose client does not read was never closed")
                    break
                await asyncio.sleep(0.1)
        finally:
            for connection in connections:
                connection.close()

    async def _leave(self, number: int) -> None:
        """Disconnects at a random moment of a request that keeps one stage busy: body, text, template or grammar."""
        source = self.plan.source
        words = " ".join(
            source.choices(("river", "stone", "winter", "letter"), k=20_000 + 20_000 * (number % 3))
        )
        properties = {f"p{n}": {"type": "string", "maxLength": n + 1} for n in range(200)}
        fields: dict[str, Any] = (
            {"prompt": words[: 100_000 if number % 2 else 400_000]},
            {"messages": [{"role": "user", "content": words[:60_000]}] * 4},
            {"prompt": "x", "response_format": {"type": "regex", "regex": f"(a|b){{1,{900 + number}}}c"}},
            {
                "messages": [{"role": "user", "content": "x"}],
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": f"s{number}",
                        "schema": {"type": "object", "properties": properties},
                    },
                },
            },
        )[number % 4]
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        message = self.target.message("POST", path, json.dumps({**fields, "max_tokens": 4}).encode())
        # Drawn before the first wait: else the order of the draws would depend on the order of the connections.
        cut = source.randrange(1, len(message)) if source.random() < 0.3 else len(message)
        pause = source.uniform(0, 0.3)
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
            writer.write(message[:cut])
            await asyncio.sleep(pause)
            writer.transport.abort()

    async def _damage_weights(self, fault: Fault) -> None:
        """Damages the files while the engine is stopped, so that no token is computed from damaged weights."""
        pid = await self.engine()
        os.kill(pid, signal.SIGSTOP)
        for path in self.packed.glob("*.packed"):
            size = path.stat().st_size
            with path.open("r+b") as file:
                if fault is Fault.CUT_WEIGHTS:
                    file.truncate(self.plan.source.randrange(size))
                    continue
                for _ in range(64):
                    file.seek(self.plan.source.randrange(size))
                    (byte,) = file.read(1)
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte ^ 1 << self.plan.source.randrange(8)]))
        os.kill(pid, signal.SIGKILL)

    # ------------------------------------------------------------------ judging

    def judge(self) -> list[str]:
        found = [*self.violations, *self.ledger.violations]
        for failure in self.failures:
            windows = [one for one in self.windows if one.covers(failure.began, failure.ended)]
            if not any(window.explains(failure.code) for window in windows):
                during = ", ".join(window.fault.name for window in windows) or "no fault"
                found.append(f"{failure.code} of a request during {during}")
        for poll in self.polls.polls:
            windows = [one for one in self.windows if one.covers(poll.began, poll.ended)]
            if not windows and (poll.health, poll.ready) != (200, 200):
                found.append(f"/health {poll.health} and /ready {poll.ready} without a fault")
            if poll.health not in (200, 0) and any(one.fault is Fault.BRIEF_STOP for one in windows):
                found.append(f"/health {poll.health} during a brief stop")
        noticed = self.notice_seconds()
        for number, window in enumerate(self.windows):
            seconds = noticed.get(name := f"{number} {window.fault.name}", _NOTICE_SECONDS)
            if window.fault in SHOWN_BY_HEALTH and seconds >= _NOTICE_SECONDS:
                found.append(f"{name}: /ready did not return 503 within {_NOTICE_SECONDS:g} s")
        return [f"{line} ({count} times)" if count > 1 else line for line, count in Counter(found).items()]

    def notice_seconds(self) -> dict[str, float]:
        """For each fault that stopped or killed the engine: the seconds until `/ready` returned 503."""
        noticed = {}
        for number, window in enumerate(self.windows):
            if window.fault in SHOWN_BY_HEALTH:
                later = (
                    poll
                    for poll in self.polls.polls
                    if poll.began > window.began and poll.ready not in (200, 0)
                )
                if (first := next(later, None)) is not None:
                    noticed[f"{number} {window.fault.name}"] = first.ended - window.began
        return noticed


@contextlib.asynccontextmanager
async def _asking(run: Run) -> AsyncIterator[None]:
    is_over = False
    clients = [
        FaultClient(run.target, Behaviour(run.plan.seed, number), run.ledger) for number in range(CLIENTS)
    ]
    others = [
        kind(run.server.url, run.ledger, Behaviour(run.plan.seed, CLIENTS + number), run.counts)
        for number, kind in enumerate(OTHER_CLIENTS)
    ]
    tasks = [
        asyncio.create_task(client.run_until(lambda: is_over, run.failures)) for client in (*clients, *others)
    ]
    try:
        yield
    finally:
        is_over = True
        await asyncio.gather(*tasks)


@dataclass(frozen=True)
class Outcome:
    plan: Plan
    backend: str
    seconds: float
    requests: int
    violations: list[str]
    noticed: dict[str, float]
    before: Footprint
    after: Footprint
    log: str
    counts: dict[str, int]
    """Answered requests of the other APIs, by name."""


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mounts a file system of 128 MiB at this new folder. False: that is not allowed, and the folder is a normal one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", str(folder)]
    try:
        is_mounted = subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        is_mounted = False
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


async def _run(plan: Plan, backend: str, work: Path) -> Outcome:
    began = time.monotonic()
    model = pull("default")
    tokenizer = open_model_text(open_checkpoint(model)).tokenizer
    (faults := work / "faults").mkdir()
    home = work / "home"
    options: dict[str, Any] = {**NOOP, "seconds_per_step": 0.002}
    engine: dict[str, Any] = {
        "scheduler": {"policy": "adaptive"},
        "log_path": str(work / "disk" / "engine.log"),
    }
    if backend == "cpu":
        options = {"checkpoint": str(model), "max_context": 2048}
        engine["cache"] = {"num_blocks": 512}
    log = work / "server.log"
    environment = {"WEFT_FAULTS": str(faults), "WEFT_HOME": str(home)}
    with (
        small_disk(work / "disk") as disk_is_small,
        log.open("w") as stderr,
        running_server(
            model,
            backend=backend,
            backend_options=options,
            engine=engine,
            stall_seconds=STALL_SECONDS,
            stalled_reader_seconds=STALLED_READER_SECONDS,
            log_format="json",
            stderr=stderr,
            environment=environment,
            python_path=[str(_HERE / "faulty")],
        ) as server,
        HealthPolls(server.port) as polls,
    ):
        client = Target("127.0.0.1", server.port, (), (), ())
        sizes = REAL_SIZES if backend == "cpu" else dataclasses.replace(NOOP_SIZES, questions=60)
        known = None if backend == "cpu" else tokenizer
        target = dataclasses.replace(
            client,
            questions=await with_answers(client, draw_questions(plan.seed, sizes), known),
            slow_questions=await with_answers(client, draw_questions(plan.seed, sizes, slow=True), known),
            wrong_questions=wrong_questions(8192),
        )
        run = Run(server, plan, target, faults, home / "packed", polls, work / "disk", disk_is_small)
        async with _asking(run):
            await asyncio.sleep(2.0)  # fills the caches of every process
        before = await footprint(server)
        async with _asking(run):
            for fault in plan.faults:
                await asyncio.sleep(plan.source.uniform(0.3, 1.5))
                await run.inject(fault)
            await asyncio.sleep(1.0)
        try:
            after = await footprint(server)
        except AssertionError as error:
            run.violations.append(f"not all requests ended: {error}")
            after = before
        violations = run.judge()
    if server.process.returncode not in (0, 128 + signal.SIGTERM):  # a second signal may have ended it
        violations.append(f"the server ended with exit code {server.process.returncode}")
    if after.gauges != before.gauges or after.descriptors > before.descriptors:
        violations.append(f"not back at the baseline: {before} before, {after} after")
    if after.mib > before.mib + GROWN_MIB:
        violations.append(f"memory grew from {before.mib:.0f} to {after.mib:.0f} MiB")
    violations += _internal_errors(log)
    requests = sum(run.ledger.outcomes.values()) + sum(run.counts.values())
    if missing := {kind.__name__ for kind in OTHER_CLIENTS} - run.counts.keys():
        violations.append(f"no request of {sorted(missing)} was answered")
    seconds = time.monotonic() - began
    return Outcome(
        *(plan, backend, seconds, requests, violations, run.notice_seconds(), before, after, log.read_text()),
        counts=run.counts,
    )


def _internal_errors(log: Path) -> list[str]:
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [f"an internal error in the log: {line}"[:2000] for line in lines if line["event"] == "mistake"]


def run_faults(seed: int, backend: str, count: int | None = None) -> Outcome:
    """Runs one plan with its own server."""
    with tempfile.TemporaryDirectory(prefix="weft-faults-") as work:
        return asyncio.run(_run(draw_plan(seed, backend, count), backend, Path(work)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1, help="of the first run; later ones count up")
    parser.add_argument("--backend", choices=("noop", "cpu", "both"), default="both")
    arguments = parser.parse_args()
    until, seed, failed_runs = time.monotonic() + 60 * arguments.minutes, arguments.seed, 0
    slowest: dict[str, float] = {}
    totals: Counter[str] = Counter()
    while time.monotonic() < until:
        backend = arguments.backend if arguments.backend != "both" else ("noop", "noop", "cpu")[seed % 3]
        outcome = run_faults(seed, backend)
        violations = [*outcome.violations, *run_state_faults(seed)]
        for name, seconds in outcome.noticed.items():
            kind = name.split()[1]
            slowest[kind] = max(slowest.get(kind, 0.0), seconds)
        totals.update(runs=1, faults=len(outcome.plan.faults), requests=outcome.requests)
        print(
            f"seed {seed} on {backend}: {len(outcome.plan.faults)} faults, {outcome.requests} requests, "
            f"{outcome.seconds:.0f} s, HTTP {outcome.before.mib:.0f} to {outcome.after.mib:.0f} MiB, "
            f"{outcome.before.descriptors} to {outcome.after.descriptors} descriptors, "
            f"{len(violations)} violations; other APIs: {outcome.counts}",
            flush=True,
        )
        totals["violations"] += len(violations)
        failed_runs += bool(violations)
        for violation in violations:
            print(f"  violated: {violation}", flush=True)
        seed += 1
    print(
        dict(totals),
        "longest time until /ready returned 503, s:",
        {name: round(s, 2) for name, s in slowest.items()},
    )
    late = [name for name in (Fault.LONG_STOP.name,) if slowest.get(name, 0.0) > NOTICED_SECONDS]
    for name in late:
        print(f"{name} was noticed after {slowest[name]:.2f} s; allowed: {NOTICED_SECONDS:g} s")
    print(summary(totals["runs"], failed_runs, totals["violations"]))
    return 1 if failed_runs or late else 0


def summary(runs: int, failed_runs: int, violations: int) -> str:
    if not failed_runs:
        return f"{runs} runs passed, no violation"
    return f"{runs - failed_runs} runs passed, {failed_runs} failed, {violations} violations"


if __name__ == "__main__":
    sys.exit(main())
