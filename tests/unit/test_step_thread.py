"""The thread of the CPU backend: what it runs, and when it tells that it did."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest

from weft.backends.cpu.step_thread import StepThread
from weft.plan import StepResult

WAIT = 60.0


def numbered(number: int) -> Callable[[], StepResult]:
    return lambda: StepResult(tokens=[number])


def test_steps_run_in_the_order_in_which_they_came_and_each_has_its_own_result() -> None:
    thread = StepThread("steps")
    steps = [thread.submit(numbered(number)) for number in range(50)]
    assert [step.result().tokens for step in steps] == [[number] for number in range(50)]
    assert steps[0].result().tokens == [0], "a result can be asked for again"
    thread.close()


def test_a_step_is_told_once_the_one_behind_it_begins_to_compute_and_not_while_that_is_prepared() -> None:
    thread = StepThread("steps")
    may_begin, is_preparing, may_compute, may_end = (threading.Event() for _ in range(4))

    def first() -> StepResult:
        assert may_begin.wait(WAIT)
        return StepResult(tokens=[1])

    def second() -> StepResult:
        is_preparing.set()
        assert may_compute.wait(WAIT)
        thread.tell()
        assert may_end.wait(WAIT)
        return StepResult(tokens=[2])

    one, two = thread.submit(first), thread.submit(second)
    may_begin.set()
    assert is_preparing.wait(WAIT)
    assert one._is_told.locked(), "the next step is being prepared"
    may_compute.set()
    assert one.result().tokens == [1], "the next step computes"
    may_end.set()
    assert two.result().tokens == [2], "nobody is behind it: it is told when it is over"
    thread.close()


def test_a_step_that_raises_raises_where_it_is_waited_for_and_holds_up_nobody() -> None:
    thread = StepThread("steps")

    def broken() -> StepResult:
        raise SystemExit("a mistake that is no Exception")

    steps = [thread.submit(run) for run in (numbered(0), broken, numbered(2))]
    assert steps[0].result().tokens == [0]
    with pytest.raises(SystemExit, match="a mistake"):
        steps[1].result()
    assert steps[2].result().tokens == [2]
    thread.close()


def test_a_step_that_runs_while_the_thread_is_closed_is_told() -> None:
    thread = StepThread("steps")
    may_end = threading.Event()

    def waiting() -> StepResult:
        assert may_end.wait(WAIT)
        return StepResult(tokens=[1])

    step = thread.submit(waiting)
    closing = threading.Thread(target=thread.close)
    closing.start()
    while thread._end.alive:
        pass  # until the end is in the queue, or about to be
    may_end.set()
    closing.join(WAIT)
    assert not step._is_told.locked() and step.result().tokens == [1]


def test_closing_waits_for_what_was_submitted_and_a_forgotten_one_ends_by_itself() -> None:
    closed, forgotten = StepThread("closed"), StepThread("forgotten")
    steps = [closed.submit(numbered(number)) for number in range(20)]
    forgotten.submit(numbered(0)).result()
    closed.close()
    assert all(not step._is_told.locked() for step in steps)
    with pytest.raises(RuntimeError, match="closed"):
        closed.submit(numbered(20))
    del forgotten
    gc.collect()
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"closed", "forgotten"}


def test_who_submits_a_step_that_the_cores_wait_for_goes_on_when_it_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weft.backends.cpu.step_thread._BEGINNING_SECONDS", WAIT)
    thread = StepThread("steps")
    events: list[str] = []
    may_end = threading.Event()

    def computing() -> StepResult:
        events.append("begins")
        thread.tell()
        assert may_end.wait(WAIT)
        return StepResult(tokens=[1])

    step = thread.submit(computing)
    events.append("submitted")
    assert events == ["begins", "submitted"]
    may_end.set()
    assert step.result().tokens == [1]
    assert thread.submit(numbered(2)).result().tokens == [2], (
        "nor does one that computes nothing keep anybody"
    )
    thread.close()


def test_who_submits_a_step_behind_another_or_one_that_does_not_begin_goes_on_at_once() -> None:
    thread = StepThread("steps")
    may_begin = threading.Event()

    def slow() -> StepResult:
        assert may_begin.wait(WAIT)
        return StepResult(tokens=[1])

    one, two = thread.submit(slow), thread.submit(numbered(2))
    assert one._is_told.locked()
    may_begin.set()
    assert [one.result().tokens, two.result().tokens] == [[1], [2]]
    thread.close()
