"""The lease by which engine processes share the cores. The other process of each test is real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from weft.backends.cpu import core_lease
from weft.backends.cpu.core_lease import CoreLease
from weft.engine.ipc.launch import shared_cores

_OTHER = """
import sys, time
from weft.backends.cpu.core_lease import CoreLease
lease = CoreLease(int(sys.argv[1]), 1)
for command in sys.stdin:
    name = command.strip()
    if name == "take":
        lease.take()
    elif name == "end":
        lease.end_step()
        lease.release()
    print(name, flush=True)
"""


def end(lease: CoreLease) -> None:
    """Ends a step after which none follows."""
    lease.end_step()
    lease.release()


class Other:
    """Another process that shares the cores."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def send(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def do(self, command: str) -> None:
        self.send(command)
        self.wait()

    def wait(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline()


@contextmanager
def other_process(descriptor: int) -> Iterator[Other]:
    command = (sys.executable, "-c", _OTHER, str(descriptor))
    process = subprocess.Popen(
        command, pass_fds=(descriptor,), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield Other(process)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = shared_cores()
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process never gives up."""
    monkeypatch.setattr(core_lease, "_MAX_WAIT", 3600.0)


def test_a_step_waits_for_the_step_of_another_process(descriptor: int, patient: None) -> None:
    lease = CoreLease(descriptor, 0)
    with other_process(descriptor) as other:
        lease.take()
        other.send("take")
        time.sleep(0.1)
        end(lease)
        other.wait()
        other.send("end")
        lease.take()
        other.wait()
        end(lease)


def test_the_lease_of_a_killed_process_is_free(descriptor: int, patient: None) -> None:
    lease = CoreLease(descriptor, 0)
    with other_process(descriptor) as other:
        other.do("take")
        other.process.kill()
        lease.take()
        end(lease)


def test_a_process_killed_while_it_waits_blocks_nothing(descriptor: int, patient: None) -> None:
    lease = CoreLease(descriptor, 0)
    with other_process(descriptor) as other:
        lease.take()
        other.send("take")
        time.sleep(0.1)
        other.process.kill()
        other.process.wait()
        for _ in range(3):
            end(lease)
            lease.take()
        end(lease)


def test_a_stopped_process_does_not_stop_the_others(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_lease, "_MAX_WAIT", 0.2)
    lease = CoreLease(descriptor, 0)
    with other_process(descriptor) as other:
        other.do("take")
        os.kill(other.process.pid, signal.SIGSTOP)
        for _ in range(100):  # only the first one waits
            lease.take()
            end(lease)
        os.kill(other.process.pid, signal.SIGCONT)
        other.do("end")
        monkeypatch.setattr(core_lease, "_MAX_WAIT", 3600.0)
        give_up_at = time.monotonic() + 60
        while not lease.is_held:  # the lease that was asked for first is given back, then it is free
            assert time.monotonic() < give_up_at
            lease.take()
            if not lease.is_held:
                end(lease)
        end(lease)


def test_a_process_with_short_steps_keeps_the_cores_as_long_as_a_step_of_the_others_took(
    descriptor: int, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = CoreLease(descriptor, 0)
    with other_process(descriptor) as other:
        other.do("take")
        other.do("end")
        assert lease._seconds[1] > 0 and lease._ended_at[1] > 0
        monkeypatch.setattr(core_lease, "_RECENT_SECONDS", 3600.0)
        for seconds, is_kept in ((3600.0, True), (0.0, False)):
            lease._seconds[1] = seconds
            lease.take()
            for _ in range(3):
                lease.end_step()
                assert lease.is_held is is_kept
            lease.release()
            other.do("take")  # no process has the cores now
            other.do("end")
        lease._seconds[1] = 3600.0
        monkeypatch.setattr(core_lease, "_RECENT_SECONDS", 0.0)
        lease.take()
        lease.end_step()
        assert not lease.is_held, "the other process is idle"
