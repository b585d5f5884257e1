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
    name, _, value = command.strip().partition(" ")
    if name == "take":
        lease.take()
    elif name == "end":
        lease.end_step(has_next=value == "more")
    elif name == "steps":
        while True:
            lease.take()
            time.sleep(float(value))
            lease.end_step(has_next=True)
    print(name, flush=True)
"""


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
        lease.end_step(has_next=False)
        other.wait()
        other.send("end")
        lease.take()
        other.wait()
        lease.end_step(has_next=False)


def test_the_lease_of_a_killed_process_is_free(descriptor: int, patient: None) -> None:
    lease = CoreLease(descriptor, 0)
    with other_process(descriptor) as other:
        other.do("take")
        other.process.kill()
        lease.take()
        lease.end_step(has_next=False)


def test_a_process_killed_while_it_waits_blocks_nothing(descriptor: int, patient: None) -> None:
    lease = CoreLease(descriptor, 0)
    with other_process(descriptor) as other:
        lease.take()
        other.send("take")
        time.sleep(0.1)
        other.process.kill()
        other.process.wait()
        for _ in range(3):
            lease.end_step(has_next=False)
            lease.take()
        lease.end_step(has_next=False)


def test_a_stopped_process_does_not_stop_the_others(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_lease, "_MAX_WAIT", 0.2)
    lease = CoreLease(descriptor, 0)
    with other_process(descriptor) as other:
        other.do("take")
        os.kill(other.process.pid, signal.SIGSTOP)
        for _ in range(100):  # only the first one waits
            lease.take()
            lease.end_step(has_next=True)
        os.kill(other.process.pid, signal.SIGCONT)
        other.do("end")
        monkeypatch.setattr(core_lease, "_MAX_WAIT", 3600.0)
        give_up_at = time.monotonic() + 60
        while not lease._is_held:  # the lease that was asked for first is given back, then it is free
            assert time.monotonic() < give_up_at
            lease.take()
            if not lease._is_held:
                lease.end_step(has_next=False)
        lease.end_step(has_next=False)


def test_a_process_with_short_steps_keeps_the_cores_as_long_as_a_step_of_the_others_takes(
    descriptor: int, patient: None
) -> None:
    lease = CoreLease(descriptor, 0)
    with other_process(descriptor) as other:
        other.do("take")
        other.do("end more")
        assert lease._seconds[1] > 0, "how long its step took"
        for seconds, is_kept in ((3600.0, True), (0.0, False)):
            lease._seconds[1] = seconds
            lease.take()
            for _ in range(3):
                lease.end_step(has_next=True)
                assert lease._is_held is is_kept
            lease.end_step(has_next=False)
            assert not lease._is_held, "no step follows"
        other.do("take")
        other.do("end")
        assert lease._seconds[1] == 0, "a process without work delays no one"
