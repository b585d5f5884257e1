"""Which request with a grammar the engine compiles next, and which it drops."""

from __future__ import annotations

from weft.engine.compile_queue import CompileQueue, Waiting
from weft.engine.ipc import wire
from weft.request import Grammar, InferenceRequest, SamplingParams


def submit(*handles: int, length: int = 1, salt: str = "") -> Waiting:
    params = SamplingParams(n=len(handles), grammar=Grammar("regex", "a" * length))
    request = InferenceRequest((1,), params, cache_salt=salt)
    return wire.Submit.of(handles, request), request


def drained(queue: CompileQueue) -> list[int]:
    found = []
    while (waiting := queue.take()) is not None:
        found.append(waiting[0].handles[0])
    return found


def test_07_cache_salts_are_served_in_rotation_and_short_grammars_first() -> None:
    queue = CompileQueue()
    for handle in range(5):
        queue.add(*submit(handle, length=100 - handle, salt="a"))
    queue.add(*submit(10, length=500, salt="b"))
    queue.add(*submit(11, length=400, salt="b"))
    assert drained(queue) == [4, 11, 3, 10, 2, 1, 0]
    queue.add(*submit(20, length=2, salt="a"))
    queue.add(*submit(21, length=3, salt="b"))
    assert drained(queue) == [20, 21], "requests served before the queue was empty do not count"


def test_07_a_request_is_dropped_when_its_last_answer_is_cancelled() -> None:
    queue = CompileQueue()
    several, single = submit(1, 2, 3), submit(4)
    queue.add(*several)
    queue.add(*single)
    assert queue.cancel(2) is None and queue.cancel(2) is None and queue.cancel(3) is None
    assert queue.cancel(1) == several
    assert queue.cancel(1) is None and queue.cancel(99) is None
    assert queue.take() == single and queue.take() is None
    assert queue.cancel(4) is None, "it is being compiled"
