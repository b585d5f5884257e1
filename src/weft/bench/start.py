"""`weft bench start`: the time from the start of the `weft serve` process to the first token, and its memory use.

Every start is a new server that gets one request. The first start is not counted: it writes bytecode, packs weights and
fills the page cache.
"""

from __future__ import annotations

import http.client
import json as json_module
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from weft.bench.report import Check, machine, print_checks, print_json, print_line, print_table, quantile
from weft.bench.serve_machine import find_server, take_snapshot, use_between
from weft.bench.soak_watch import role_of
from weft.errors import WeftError

FIRST_TOKEN_SECONDS = 1.0
PEAK_MIB = {8: 480, 32: 950}
"""Limits of the peak resident memory, by number of concurrent streams."""
_HOST = "127.0.0.1"
_POLL_SECONDS = 0.002
_SAMPLE_SECONDS = 0.1
_TIMEOUT_SECONDS = 120.0
_TOKENS = 128
_PROGRAM = "from weft.cli.entry import main; main()"
_PHASES = ("listening", "ready", "first token")


@dataclass(frozen=True)
class ProcessUse:
    """One process of the server. In `pss_mib`, a page that n processes share counts as 1/n."""

    role: str
    cpu_seconds: float
    rss_mib: float
    pss_mib: float


@dataclass(frozen=True)
class Start:
    """Seconds from the start of the process to each phase, and what all processes had used at the first token."""

    seconds: Mapping[str, float]
    processes: tuple[ProcessUse, ...]
    is_disturbed: bool
    """Whether other processes used the machine during the start."""


@dataclass(frozen=True)
class Peak:
    """Peak memory of all processes together while `streams` streams ran."""

    streams: int
    rss_mib: float
    pss_mib: float


def main(model: str, starts: int, streams: Sequence[int], json: bool) -> bool:
    """Measures and prints. Returns True if every criterion was met."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that SIGTERM ends the servers too
    try:
        measured = _measure(model, starts)
        peaks = [_peak(model, number) for number in streams]
    finally:
        signal.signal(signal.SIGTERM, before)
    checks = _checks(measured, peaks)
    if json:
        print_json({"starts": measured, "peaks": peaks, "checks": checks, "machine": machine()})
    else:
        _print(measured, peaks, checks)
    return all(check.is_met for check in checks)


def _measure(model: str, starts: int) -> list[Start]:
    with started_server(model) as (port, process):
        wait_for_phases(port, process, time.perf_counter())
    measured = []
    for _ in range(starts):
        before, began = take_snapshot(), time.perf_counter()
        with started_server(model) as (port, process):
            seconds = wait_for_phases(port, process, began)
            use = use_between(before, take_snapshot(), _HOST, port)
            measured.append(Start(seconds, tuple(_uses(port)), use.is_disturbed))
    return measured


def parse_streams(text: str) -> list[int]:
    """Parses --streams: numbers of at least 1, separated by commas, or nothing."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = [0]
    if any(number < 1 for number in numbers):
        raise WeftError(f"--streams is {text!r}; give whole numbers from 1, such as 8,32")
    return numbers


@contextmanager
def started_server(
    model: str, *arguments: str, variables: Mapping[str, str] | None = None
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Runs `weft serve` on a free port. The server ends with the `with` block. `variables`: added to its environment."""
    with socket.create_server((_HOST, 0)) as free:
        port = free.getsockname()[1]
    # Python may write bytecode, as an installer does: compiling the sources is not part of a start.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= variables or {}
    process = subprocess.Popen(
        (sys.executable, "-c", _PROGRAM, "serve", model, "--host", _HOST, "--port", str(port), *arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
    )
    try:
        yield port, process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def wait_for_phases(port: int, process: subprocess.Popen[bytes], began: float) -> dict[str, float]:
    """Polls until each phase is reached. Returns the time of each, in seconds after `began`."""
    deadline = began + _TIMEOUT_SECONDS
    reached = {}
    for phase, is_reached in zip(_PHASES, (_is_listening, _is_ready, _is_answering), strict=True):
        while not is_reached(port):
            if process.poll() is not None:
                assert process.stderr is not None
                stderr = process.stderr.read().decode("utf-8", "replace").strip()
                raise WeftError(f"the server ended with exit code {process.returncode}: {stderr[-500:]}")
            if time.perf_counter() > deadline:
                raise WeftError(f"the server did not reach '{phase}' within {_TIMEOUT_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)
        reached[phase] = time.perf_counter() - began
    return reached


def _is_listening(port: int) -> bool:
    try:
        socket.create_connection((_HOST, port), _TIMEOUT_SECONDS).close()
        return True
    except OSError:
        return False


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection(_HOST, port, timeout=_TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    finally:
        connection.close()


def _is_answering(port: int) -> bool:
    """Whether a chat request gets a first token. Does not wait for the rest of the answer."""
    return _request_stream(port, "Hello", 8, until_first=True)


def _request_stream(port: int, text: str, max_tokens: int, *, until_first: bool = False) -> bool:
    """Requests a streamed answer. Returns False if the server is not ready (503)."""
    fields = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "stream": True}
    body = json_module.dumps({**fields, "temperature": 0, "ignore_eos": True})
    connection = http.client.HTTPConnection(_HOST, port, timeout=_TIMEOUT_SECONDS)
    try:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status == 503:
            return False
        if response.status != 200:
            raise WeftError(f"the server answered {response.status}: {response.read()[:300]!r}")
        for line in response:
            if line.startswith(b"data: {"):
                choices = json_module.loads(line[6:])["choices"]
                if until_first and choices and choices[0]["delta"].get("content"):
                    return True
        return True
    finally:
        connection.close()


def _peak(model: str, streams: int) -> Peak:
    """Runs `streams` requests at once, with different prompts, so that they share no KV blocks.

    Each peak is measured on a new server: memory that a server has taken is not given back.
    """
    rss = pss = 0.0
    prompts = [f"{number}. " + "Tell me of weaving. " * (_TOKENS // 5) for number in range(streams)]
    with started_server(model) as (port, process), ThreadPoolExecutor(streams) as threads:
        wait_for_phases(port, process, time.perf_counter())
        pending = {threads.submit(_request_stream, port, text, _TOKENS) for text in prompts}
        while pending:
            done, pending = wait(pending, _SAMPLE_SECONDS)
            for request in done:
                request.result()  # raises the error of a failed request
            uses = _uses(port)
            rss = max(rss, sum(use.rss_mib for use in uses))
            pss = max(pss, sum(use.pss_mib for use in uses))
    return Peak(streams, rss, pss)


def _uses(port: int) -> list[ProcessUse]:
    snapshot = take_snapshot()
    if snapshot is None:
        return []
    uses = []
    for pid in sorted(find_server(_HOST, port, snapshot.processes)):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
            sizes = {
                name: int(rest.split()[0]) / 1024 for name, _, rest in (line.partition(":") for line in lines)
            }
            cpu_seconds = snapshot.processes[pid].ticks / os.sysconf("SC_CLK_TCK")
            uses.append(ProcessUse(role_of(pid), cpu_seconds, sizes["Rss"], sizes["Pss"]))
        except (OSError, KeyError):  # the process ended meanwhile
            continue
    return uses


def _checks(starts: Sequence[Start], peaks: Sequence[Peak]) -> list[Check]:
    best = min(start.seconds["first token"] for start in starts)
    checks = [
        Check(
            "process to first token, best start",
            f"{best:.2f} s",
            f"{FIRST_TOKEN_SECONDS:g} s",
            best <= FIRST_TOKEN_SECONDS,
        )
    ]
    for peak in peaks:
        if (bar := PEAK_MIB.get(peak.streams)) is not None:
            criterion = f"peak resident memory, all processes, {peak.streams} streams"
            checks.append(Check(criterion, f"{peak.rss_mib:.0f} MiB", f"{bar} MiB", peak.rss_mib <= bar))
    return checks


def _print(starts: Sequence[Start], peaks: Sequence[Peak], checks: Sequence[Check]) -> None:
    print_line(machine())
    num_disturbed = sum(start.is_disturbed for start in starts)
    if num_disturbed:
        print_line(
            f"{num_disturbed} of {len(starts)} starts ran beside other load: the best start is the most reliable"
        )
    print_table(
        f"Seconds from the start of `weft serve`, {len(starts)} starts",
        ("", "best", "median", "worst"),
        [
            (
                phase,
                *(
                    f"{value:.3f}"
                    for times in [[start.seconds[phase] for start in starts]]
                    for value in (min(times), quantile(times, 0.5), max(times))
                ),
            )
            for phase in _PHASES
        ],
    )
    best = min(starts, key=lambda start: start.seconds["first token"])
    whole = ProcessUse(
        "all",
        sum(use.cpu_seconds for use in best.processes),
        sum(use.rss_mib for use in best.processes),
        sum(use.pss_mib for use in best.processes),
    )
    rows = [
        (use.role, f"{use.cpu_seconds:.2f}", f"{use.rss_mib:.0f}", f"{use.pss_mib:.0f}")
        for use in (*best.processes, whole)
    ]
    print_table(
        "Server processes at the first token of the best start",
        ("", "CPU seconds", "RSS MiB", "PSS MiB"),
        rows,
    )
    if peaks:
        print_table(
            f"Peak memory of all processes, prompts and answers of {_TOKENS} tokens",
            ("streams", "RSS MiB", "PSS MiB"),
            [(str(peak.streams), f"{peak.rss_mib:.0f}", f"{peak.pss_mib:.0f}") for peak in peaks],
        )
    print_checks(checks)
