"""What tells a stuck engine from a slow one, decided on a clock of the test's own; and processor time, of real processes."""

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
    """Looks at an engine whose beats and work the test decides."""

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
        self, seconds: float, *beats: wire.Heartbeat, work: float = 0.0, work_of_children: float = 0.0
    ) -> None:
        """So many seconds of looks, before each of which these beats come; work is a share of one core."""
        end = self.now + seconds
        while self.now < end:
            self.now += CHECK_SECONDS
            self.work += work * CHECK_SECONDS
            self.work_of_children += work_of_children * CHECK_SECONDS
            for beat in beats:
                self.liveness.on_heartbeat(beat)
            self.liveness.check()

    @property
    def verdict(self) -> str:
        return (
            "stalled" if self.liveness.is_stalled else "silent" if self.liveness.is_silent else "responding"
        )


def beat(loop: int | None = None, reader: int | None = None) -> wire.Heartbeat:
    return wire.Heartbeat(loop, reader, (11, 12, 13))


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_an_idle_engine_is_never_stuck(engine: Engine) -> None:
    engine.live(100 * STALL_SECONDS, beat())
    assert engine.verdict == "responding"


def test_no_beats_are_silence_within_two_seconds_and_a_stall_in_the_end(engine: Engine) -> None:
    engine.live(10, beat())
    engine.live(2 - CHECK_SECONDS)  # the last beat came up to so long before the last look
    assert engine.verdict == "silent"
    engine.live(STALL_SECONDS - 5)
    assert engine.verdict == "silent"
    engine.live(5)
    assert engine.verdict == "stalled"


def test_beats_that_come_back_end_the_silence(engine: Engine) -> None:
    engine.live(10, beat())
    engine.live(STALL_SECONDS - 5, beat(7))
    assert engine.verdict == "silent"
    engine.live(CHECK_SECONDS, beat(8))
    assert engine.verdict == "responding"
    engine.live(STALL_SECONDS - 5, beat(8))
    assert engine.verdict == "silent", "the time counts anew"


def test_steps_that_are_finished_are_life(engine: Engine) -> None:
    for number in range(300):
        engine.live(1, beat(number))
        assert engine.verdict == "responding"


def test_reported_steps_are_life_even_where_beats_are_late(engine: Engine) -> None:
    for _ in range(100):
        engine.liveness.on_step()
        engine.live(CHECK_SECONDS)
        assert engine.verdict == "responding"


def test_a_step_that_computes_is_slow_and_not_stuck(engine: Engine) -> None:
    engine.live(10, beat())
    engine.live(9 * STALL_SECONDS, beat(7), work=0.3)
    assert engine.verdict == "responding"


def test_a_step_that_computes_without_the_beats_that_would_tell_is_slow_and_not_stuck(engine: Engine) -> None:
    engine.live(10, beat())
    engine.live(9 * STALL_SECONDS, work=0.3)  # as native code that keeps the interpreter to itself
    assert engine.verdict == "responding"


def test_a_step_that_waits_for_a_compiler_is_slow_and_not_stuck(engine: Engine) -> None:
    engine.live(10, beat())
    engine.live(9 * STALL_SECONDS, beat(7), work_of_children=1.0)
    assert engine.verdict == "responding"


def test_a_step_that_uses_next_to_no_processor_is_stuck(engine: Engine) -> None:
    engine.live(10, beat())
    engine.live(STALL_SECONDS + 1, beat(7), work=0.002)
    assert engine.verdict == "stalled"


def test_a_step_that_computes_for_ever_is_stuck_in_the_end(engine: Engine) -> None:
    engine.live(10, beat())
    engine.live(10 * STALL_SECONDS + 1, beat(7), work=1.0)
    assert engine.verdict == "stalled"


def test_a_start_may_take_as_long_as_it_computes_but_not_stand_still(engine: Engine) -> None:
    engine.liveness.is_started = False
    engine.live(100 * STALL_SECONDS, beat(0), work=0.1)
    assert engine.verdict == "responding"
    engine.live(STALL_SECONDS + 1, beat(0))
    assert engine.verdict == "stalled"


def test_a_reader_that_is_stuck_is_found_while_the_loop_is_idle(engine: Engine) -> None:
    engine.live(10, beat(None, 3))
    engine.live(STALL_SECONDS + 1, beat(None, 3))
    assert engine.verdict == "stalled"


def test_messages_that_are_read_do_not_hide_a_stuck_loop(engine: Engine) -> None:
    for number in range(round((STALL_SECONDS + 1) / CHECK_SECONDS)):
        engine.live(CHECK_SECONDS, beat(7, number))
    assert engine.verdict == "stalled"
    assert engine.ignored == (11, 12, 13), "the work of the threads that pass messages is none of the loop's"


def test_time_in_which_the_looking_process_itself_stood_still_does_not_count(engine: Engine) -> None:
    engine.live(10, beat())
    for _ in range(2):
        engine.now += 10 * STALL_SECONDS
        engine.liveness.check()
        assert engine.verdict == "responding"


def test_an_engine_that_works_is_not_looked_for_among_all_processes(engine: Engine) -> None:
    engine.live(10, beat())
    engine.live(100, beat(7), work=0.5)
    engine.live(10, beat())
    assert engine.num_searches == 0
    engine.live(SILENT_SECONDS, beat(7))
    assert engine.num_searches > 0


# --- processor time of real processes ---------------------------------------------------------------------------------

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
def test_a_process_that_computes_works_and_one_that_is_stopped_does_not(
    program: subprocess.Popen[bytes],
) -> None:
    wait_for(lambda: work_of(program.pid) > 0.3)
    os.kill(program.pid, signal.SIGSTOP)
    wait_for(lambda: state_of(program.pid) == "T")
    before = work_of(program.pid)
    time.sleep(0.5)
    assert work_of(program.pid) == before


@pytest.mark.parametrize("program", [PARENT], indirect=True)
def test_the_work_of_a_process_that_waits_for_another_is_found_there(
    program: subprocess.Popen[bytes],
) -> None:
    wait_for(lambda: work_of_children(program.pid) > 1.0)
    assert work_of(program.pid) < 1.0


@pytest.mark.parametrize("program", [SLEEPING], indirect=True)
def test_a_process_that_sleeps_does_not_work(program: subprocess.Popen[bytes]) -> None:
    wait_for(lambda: state_of(program.pid) == "S")
    time.sleep(0.5)
    before = work_of(program.pid) + work_of_children(program.pid)
    time.sleep(1.0)
    assert work_of(program.pid) + work_of_children(program.pid) - before < 0.05


def test_the_work_of_single_threads_can_be_left_out() -> None:
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


def test_the_work_of_children_that_have_ended_counts_whatever_threads_are_left_out() -> None:
    threads = (threading.get_native_id(), threading.get_native_id())
    before = work_of(os.getpid(), threads)
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True)
    assert work_of(os.getpid(), threads) - before > 0.3


def test_a_process_that_is_gone_neither_works_nor_has_a_state() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert (work_of(process.pid), work_of_children(process.pid), state_of(process.pid)) == (0.0, 0.0, "")


def test_an_engine_that_cannot_be_looked_at_for_want_of_descriptors_is_not_taken_for_a_stuck_one() -> None:
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
    engine.live(3 * STALL_SECONDS, beat(loop=7))
    assert engine.verdict == "responding"
