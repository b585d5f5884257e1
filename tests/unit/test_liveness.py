"""Stuck and slow engines, on a simulated clock; and the CPU time of real processes."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from weft.engine.ipc import wire
from weft.engine.ipc.liveness import (
    CHECK_SECONDS,
    SILENT_SECONDS,
    Liveness,
    state_of,
    work_of,
    work_of_children,
)

STALL_SECONDS = 30.0


class Engine:
    """Checks an engine with simulated heartbeats and CPU time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.work = self.work_of_children = 0.0
        self.ignored: tuple[int, ...] = ()
        self.num_searches = 0
        self.liveness = Liveness(STALL_SECONDS, lambda: self.now, self._work, self._work_of_children)
        self.liveness.is_started = True

    def _work(self, without: tuple[int, ...]) -> float:
        self.ignored = without
        return self.work

    def _work_of_children(self) -> float:
        self.num_searches += 1
        return self.work_of_children

    def live(
        self, seconds: float, *heartbeats: wire.Heartbeat, work: float = 0.0, work_of_children: float = 0.0
    ) -> None:
        """Runs checks for `seconds`, with these heartbeats before each check. `work` is a share of one core."""
        end = self.now + seconds
        while self.now < end:
            self.now += CHECK_SECONDS
            self.work += work * CHECK_SECONDS
            self.work_of_children += work_of_children * CHECK_SECONDS
            for heartbeat in heartbeats:
                self.liveness.on_heartbeat(heartbeat)
            self.liveness.check()

    @property
    def verdict(self) -> str:
        return (
            "stalled" if self.liveness.is_stalled else "silent" if self.liveness.is_silent else "responding"
        )


def heartbeat(loop: int | None = None, reader: int | None = None, waits: bool = False) -> wire.Heartbeat:
    return wire.Heartbeat(loop, reader, (11, 12, 13), waits)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_an_idle_engine_is_never_stuck(engine: Engine) -> None:
    engine.live(100 * STALL_SECONDS, heartbeat())
    assert engine.verdict == "responding"


def test_without_heartbeats_an_engine_is_silent_within_two_seconds_and_stalled_later(engine: Engine) -> None:
    engine.live(10, heartbeat())
    engine.live(2 - CHECK_SECONDS)  # the last heartbeat may be this much older than the last check
    assert engine.verdict == "silent"
    engine.live(STALL_SECONDS - 5)
    assert engine.verdict == "silent"
    engine.live(5)
    assert engine.verdict == "stalled"


def test_a_heartbeat_with_progress_ends_the_silence(engine: Engine) -> None:
    engine.live(10, heartbeat())
    engine.live(STALL_SECONDS - 5, heartbeat(7))
    assert engine.verdict == "silent"
    engine.live(CHECK_SECONDS, heartbeat(8))
    assert engine.verdict == "responding"
    engine.live(STALL_SECONDS - 5, heartbeat(8))
    assert engine.verdict == "silent", "the time starts from zero after progress"


def test_finished_steps_are_progress(engine: Engine) -> None:
    for number in range(300):
        engine.live(1, heartbeat(number))
        assert engine.verdict == "responding"


def test_reported_steps_are_progress_even_without_heartbeats(engine: Engine) -> None:
    for _ in range(100):
        engine.liveness.on_step()
        engine.live(CHECK_SECONDS)
        assert engine.verdict == "responding"


def test_a_step_that_uses_cpu_time_is_slow_and_not_stuck(engine: Engine) -> None:
    engine.live(10, heartbeat())
    engine.live(9 * STALL_SECONDS, heartbeat(7), work=0.3)
    assert engine.verdict == "responding"


def test_a_step_that_uses_cpu_time_is_not_stuck_even_without_heartbeats(engine: Engine) -> None:
    engine.live(10, heartbeat())
    engine.live(9 * STALL_SECONDS, work=0.3)  # such as native code that holds the GIL
    assert engine.verdict == "responding"


def test_a_step_that_waits_for_a_compiler_is_slow_and_not_stuck(engine: Engine) -> None:
    engine.live(10, heartbeat())
    engine.live(9 * STALL_SECONDS, heartbeat(7), work_of_children=1.0)
    assert engine.verdict == "responding"


def test_a_step_that_uses_almost_no_cpu_time_is_stuck(engine: Engine) -> None:
    engine.live(10, heartbeat())
    engine.live(STALL_SECONDS + 1, heartbeat(7), work=0.002)
    assert engine.verdict == "stalled"


def test_a_step_that_uses_cpu_time_forever_is_stuck_in_the_end(engine: Engine) -> None:
    engine.live(10, heartbeat())
    engine.live(10 * STALL_SECONDS + 1, heartbeat(7), work=1.0)
    assert engine.verdict == "stalled"


def test_a_busy_wait_for_a_gpu_is_stuck_after_stall_seconds(engine: Engine) -> None:
    engine.live(10, heartbeat())
    engine.live(STALL_SECONDS - 1, heartbeat(7, waits=True), work=1.0)
    assert engine.verdict == "responding"
    engine.live(2, heartbeat(7, waits=True), work=1.0)
    assert engine.verdict == "stalled"


def test_a_step_that_computes_before_it_waits_for_the_gpu_has_the_whole_time_to_wait(engine: Engine) -> None:
    engine.live(10, heartbeat())
    for _ in range(4):
        engine.live(STALL_SECONDS - 1, heartbeat(7), work=1.0)
        engine.live(STALL_SECONDS - 1, heartbeat(7, waits=True), work=1.0)
        assert engine.verdict == "responding"


def test_steps_on_a_gpu_that_end_are_no_stall_even_while_the_reader_works(engine: Engine) -> None:
    """A long message: the reader makes no progress, but uses CPU time."""
    for number in range(round(5 * STALL_SECONDS / CHECK_SECONDS)):
        engine.live(CHECK_SECONDS, heartbeat(number, 3, waits=True), work=1.0)
        assert engine.verdict == "responding"


def test_a_start_may_take_any_time_as_long_as_it_uses_cpu_time(engine: Engine) -> None:
    engine.liveness.is_started = False
    engine.live(100 * STALL_SECONDS, heartbeat(0), work=0.1)
    assert engine.verdict == "responding"
    engine.live(STALL_SECONDS + 1, heartbeat(0))
    assert engine.verdict == "stalled"


def test_a_stuck_reader_is_detected_while_the_loop_is_idle(engine: Engine) -> None:
    engine.live(10, heartbeat(None, 3))
    engine.live(STALL_SECONDS + 1, heartbeat(None, 3))
    assert engine.verdict == "stalled"


def test_a_reader_with_progress_does_not_hide_a_stuck_loop(engine: Engine) -> None:
    for number in range(round((STALL_SECONDS + 1) / CHECK_SECONDS)):
        engine.live(CHECK_SECONDS, heartbeat(7, number))
    assert engine.verdict == "stalled"
    assert engine.ignored == (11, 12, 13), "the CPU time of the message threads does not count"


def test_time_in_which_the_checking_process_was_stopped_does_not_count(engine: Engine) -> None:
    engine.live(10, heartbeat())
    for _ in range(2):
        engine.now += 10 * STALL_SECONDS
        engine.liveness.check()
        assert engine.verdict == "responding"


def test_children_are_searched_only_if_the_process_itself_is_quiet(engine: Engine) -> None:
    engine.live(10, heartbeat())
    engine.live(100, heartbeat(7), work=0.5)
    engine.live(10, heartbeat())
    assert engine.num_searches == 0
    engine.live(SILENT_SECONDS, heartbeat(7))
    assert engine.num_searches > 0


# --- CPU time of real processes ---------------------------------------------------------------------------------------

COMPUTING = "while True: pass"
SLEEPING = "import time; time.sleep(600)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {COMPUTING!r}])"


@pytest.fixture
def program(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", request.param], start_new_session=True)
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for(condition: object, seconds: float = 60.0) -> None:
    give_up_at = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < give_up_at
        time.sleep(0.05)


@pytest.mark.parametrize("program", [COMPUTING], indirect=True)
def test_a_computing_process_uses_cpu_time_and_a_stopped_one_does_not(
    program: subprocess.Popen[bytes],
) -> None:
    wait_for(lambda: work_of(program.pid) > 0.3)
    os.kill(program.pid, signal.SIGSTOP)
    wait_for(lambda: state_of(program.pid) == "T")
    before = work_of(program.pid)
    time.sleep(0.5)
    assert work_of(program.pid) == before


@pytest.mark.parametrize("program", [PARENT], indirect=True)
def test_the_cpu_time_of_a_child_is_found(
    program: subprocess.Popen[bytes],
) -> None:
    wait_for(lambda: work_of_children(program.pid) > 1.0)
    assert work_of(program.pid) < 1.0


@pytest.mark.parametrize("program", [SLEEPING], indirect=True)
def test_a_sleeping_process_uses_no_cpu_time(program: subprocess.Popen[bytes]) -> None:
    wait_for(lambda: state_of(program.pid) == "S")
    time.sleep(0.5)
    before = work_of(program.pid) + work_of_children(program.pid)
    time.sleep(1.0)
    assert work_of(program.pid) + work_of_children(program.pid) - before < 0.05


def test_the_cpu_time_of_single_threads_can_be_excluded() -> None:
    ids: list[int] = []
    done = threading.Event()

    def compute() -> None:
        ids.append(threading.get_native_id())
        while time.thread_time() < 0.5:
            pass
        done.wait()

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        wait_for(lambda: ids and work_of(os.getpid()) - work_of(os.getpid(), (ids[0],)) > 0.4)
    finally:
        done.set()
        thread.join()


def test_the_cpu_time_of_ended_children_counts_even_if_threads_are_excluded() -> None:
    threads = (threading.get_native_id(), threading.get_native_id())
    before = work_of(os.getpid(), threads)
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True)
    assert work_of(os.getpid(), threads) - before > 0.3


def test_a_process_that_has_ended_has_no_cpu_time_and_no_state() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert (work_of(process.pid), work_of_children(process.pid), state_of(process.pid)) == (0.0, 0.0, "")


def test_an_engine_is_not_stuck_if_no_descriptor_is_left_to_measure_it() -> None:
    def work(without: tuple[int, ...]) -> float:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            return work_of(os.getpid(), without)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    engine = Engine()
    engine.liveness = Liveness(STALL_SECONDS, lambda: engine.now, work, lambda: 0.0)
    engine.liveness.is_started = True
    engine.live(3 * STALL_SECONDS, heartbeat(loop=7))
    assert engine.verdict == "responding"
