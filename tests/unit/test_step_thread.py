"""The thread of the CPU backend: the order of steps, and when their results are reported."""

from __future__ import annotations

import gc
import mmap
import threading
from collections.abc import Callable
from tempfile import TemporaryFile

import pytest

from weft.backends.cpu.core_lease import CoreLease
from weft.backends.cpu.step_thread import StepThread
from weft.plan import StepResult

WAIT = 60.0


def numbered(number: int) -> Callable[[], StepResult]:
    return lambda: StepResult(tokens=[number])


def test_steps_run_in_submission_order_and_each_has_its_own_result() -> None:
    thread = StepThread("steps")
    steps = [thread.submit(numbered(number)) for number in range(50)]
    assert [step.result().tokens for step in steps] == [[number] for number in range(50)]
    assert steps[0].result().tokens == [0], "a result can be read twice"
    thread.close()


def test_a_step_is_reported_when_the_next_step_begins_to_compute_and_not_while_it_is_prepared() -> None:
    thread = StepThread("steps")
    may_start, is_preparing, may_compute, may_end = (threading.Event() for _ in range(4))

    def first() -> StepResult:
        assert may_start.wait(WAIT)
        return StepResult(tokens=[1])

    def second() -> StepResult:
        is_preparing.set()
        assert may_compute.wait(WAIT)
        thread.report()
        assert may_end.wait(WAIT)
        return StepResult(tokens=[2])

    one, two = thread.submit(first), thread.submit(second)
    may_start.set()
    assert is_preparing.wait(WAIT)
    assert one._report_lock.locked(), "the next step is being prepared"
    may_compute.set()
    assert one.result().tokens == [1], "the next step computes"
    may_end.set()
    assert two.result().tokens == [2], "no step follows: it is reported when it ends"
    thread.close()


def test_an_exception_of_a_step_is_raised_by_its_result_and_other_steps_run() -> None:
    thread = StepThread("steps")

    def broken() -> StepResult:
        raise SystemExit("a mistake that is no Exception")

    steps = [thread.submit(run) for run in (numbered(0), broken, numbered(2))]
    assert steps[0].result().tokens == [0]
    with pytest.raises(SystemExit, match="a mistake"):
        steps[1].result()
    assert steps[2].result().tokens == [2]
    thread.close()


def test_a_step_that_runs_while_the_thread_is_closed_is_reported() -> None:
    thread = StepThread("steps")
    may_end = threading.Event()

    def waiting() -> StepResult:
        assert may_end.wait(WAIT)
        return StepResult(tokens=[1])

    step = thread.submit(waiting)
    closing = threading.Thread(target=thread.close)
    closing.start()
    while thread._end.alive:
        pass  # until the end marker is in the queue, or about to be
    may_end.set()
    closing.join(WAIT)
    assert not step._report_lock.locked() and step.result().tokens == [1]


def test_closing_waits_for_submitted_steps_and_a_collected_thread_ends_by_itself() -> None:
    closed, collected = StepThread("closed"), StepThread("collected")
    steps = [closed.submit(numbered(number)) for number in range(20)]
    collected.submit(numbered(0)).result()
    closed.close()
    assert all(not step._report_lock.locked() for step in steps)
    with pytest.raises(RuntimeError, match="closed"):
        closed.submit(numbered(20))
    del collected
    gc.collect()
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"closed", "collected"}


def test_submitting_to_an_idle_thread_returns_when_the_step_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weft.backends.cpu.step_thread._START_SECONDS", WAIT)
    thread = StepThread("steps")
    events: list[str] = []
    may_end = threading.Event()

    def computing() -> StepResult:
        events.append("started")
        thread.report()
        assert may_end.wait(WAIT)
        return StepResult(tokens=[1])

    step = thread.submit(computing)
    events.append("submitted")
    assert events == ["started", "submitted"]
    may_end.set()
    assert step.result().tokens == [1]
    assert thread.submit(numbered(2)).result().tokens == [2], "submit returns for a step without work too"
    thread.close()


def test_submitting_does_not_wait_behind_another_step_or_for_a_step_that_does_not_start() -> None:
    thread = StepThread("steps")
    may_start = threading.Event()

    def slow() -> StepResult:
        assert may_start.wait(WAIT)
        return StepResult(tokens=[1])

    one, two = thread.submit(slow), thread.submit(numbered(2))
    assert one._report_lock.locked()
    may_start.set()
    assert [one.result().tokens, two.result().tokens] == [[1], [2]]
    thread.close()


def test_a_short_step_that_is_alone_is_computed_by_the_thread_that_asks_for_its_result() -> None:
    thread = StepThread("steps")
    computed_by: list[threading.Thread] = []

    def computing() -> StepResult:
        computed_by.append(threading.current_thread())
        return StepResult(tokens=[1])

    for _ in range(3):
        step = thread.submit_short(computing)
        assert step.result().tokens == step.result().tokens == [1]
    assert computed_by == [threading.current_thread()] * 3
    thread.close()
    with pytest.raises(RuntimeError, match="closed"):
        thread.submit_short(computing)


def test_a_short_step_is_computed_in_the_thread_if_another_step_is_submitted_before_its_result() -> None:
    thread = StepThread("steps")
    computed: list[tuple[int, str]] = []

    def computing(number: int) -> Callable[[], StepResult]:
        def run() -> StepResult:
            computed.append((number, threading.current_thread().name))
            return StepResult(tokens=[number])

        return run

    steps = [thread.submit_short(computing(number)) for number in range(3)]
    steps.append(thread.submit(computing(3)))
    assert [step.result().tokens for step in steps] == [[0], [1], [2], [3]]
    assert computed[:2] == [(0, "steps"), (1, "steps")]
    assert [number for number, _ in computed] == [0, 1, 2, 3]
    thread.close()


def test_a_short_step_waits_for_no_other_thread_and_is_computed_again_after_an_interrupt() -> None:
    thread = StepThread("steps")
    may_end, attempts = threading.Event(), [0]

    def interrupted_once() -> StepResult:
        attempts[0] += 1
        if attempts[0] == 1:
            raise KeyboardInterrupt
        return StepResult(tokens=[2])

    def slow() -> StepResult:
        assert may_end.wait(WAIT)
        return StepResult(tokens=[1])

    alone = thread.submit_short(interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        alone.result()
    assert alone.result().tokens == [2] and attempts == [2]
    running = thread.submit(slow)
    behind = thread.submit_short(numbered(3))
    may_end.set()
    assert [running.result().tokens, behind.result().tokens] == [[1], [3]]
    thread.close()


def test_with_a_lease_short_steps_run_in_the_thread_that_holds_it() -> None:
    with TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        thread = StepThread("steps", CoreLease(file.fileno(), place=0))
        names: list[str] = []

        def computing() -> StepResult:
            thread.report()
            names.append(threading.current_thread().name)
            return StepResult(tokens=[1])

        assert thread.submit_short(computing).result().tokens == [1]
        thread.close()
    assert names == ["steps"]
