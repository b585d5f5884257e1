"""The public engine on the detector backend, with real threads and real event loops."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from weft.backends import noop
from weft.backends.noop import NoopBackend
from weft.backends.noop_model import generate_alone
from weft.clock import VirtualClock
from weft.config import (
    KvCachePoolConfig,
    PreemptionMode,
    PriorityPolicy,
    SchedulerConfig,
    ServingEngineConfig,
)
from weft.engine.serving import ServingEngine
from weft.errors import EngineStoppedError, InvalidRequestError, QueueFullError, WeftError
from weft.plan import IterationPlan, StepResult, SwapTask
from weft.request import (
    Failure,
    FailureKind,
    FinishReason,
    InferenceRequest,
    Priority,
    RequestId,
    RequestState,
    SamplingParams,
    TokenOutput,
    child_seed,
    numbered_ids,
)

TIMEOUT = 60.0
"""Maximum seconds of a wait. It is long: no test depends on speed."""
SLOW: dict[str, Any] = {"seconds_per_step": 0.01}
"""Options of a slow backend, for a request that must not end before another thread has run."""


def request(length: int = 8, max_tokens: int = 8, family: int = 0, **fields: Any) -> InferenceRequest:
    prompt = tuple(1000 * family + position for position in range(length))
    return InferenceRequest(prompt, SamplingParams(max_tokens=max_tokens, seed=5, ignore_eos=True), **fields)


def expected(engine: ServingEngine, sent: InferenceRequest) -> tuple[int, ...]:
    limit = len(sent.prompt) + sent.params.max_tokens
    return tuple(generate_alone(sent.prompt, 5, sent.params, limit, engine.scheduler.info))


def make_engine(
    backend: NoopBackend | None = None,
    *,
    blocks: int = 256,
    swap_blocks: int | None = None,
    scheduler: dict[str, Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> ServingEngine:
    config = ServingEngineConfig(
        scheduler=SchedulerConfig(**{"max_running": 8, **(scheduler or {})}),
        cache=KvCachePoolConfig(num_blocks=blocks, block_size=4, swap_blocks=swap_blocks),
        **options,
    )
    return ServingEngine(
        backend or NoopBackend(max_context=4096), config, clock=clock, seed=1, new_id=numbered_ids()
    )


class Gate:
    """No faults, but every step waits until the test opens the gate."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()

    def at_submit(self, plan: IterationPlan) -> str | None:
        return None

    def at_result(self, plan: IterationPlan) -> tuple[str | None, Mapping[RequestId, Failure]]:
        self.reached.set()
        assert self.open.wait(TIMEOUT)
        return None, {}

    def at_wait(self, plan: IterationPlan) -> str | None:
        return None

    def at_swap(self, task: SwapTask) -> str | None:
        return None


class Culprits:
    """Fails every step that contains one of these requests."""

    def __init__(self, *culprits: int, named: bool, rejects: bool = False) -> None:
        self.culprits = set(map(str, culprits))
        self.named = named
        self.rejects = rejects
        self.sizes: list[int] = []
        """Number of sequences of each failed step."""

    def _hit(self, plan: IterationPlan) -> list[RequestId]:
        hit = [rid for rid in plan.request_ids if rid in self.culprits]
        if hit:
            self.sizes.append(len(plan.request_ids))
        return hit

    def at_submit(self, plan: IterationPlan) -> str | None:
        return "will not take it" if self.rejects and self._hit(plan) else None

    def at_result(self, plan: IterationPlan) -> tuple[str | None, Mapping[RequestId, Failure]]:
        if self.rejects or not (hit := self._hit(plan)):
            return None, {}
        return (
            (None, {rid: Failure(FailureKind.STEP, f"bad input of {rid}") for rid in hit})
            if self.named
            else ("device error", {})
        )

    def at_wait(self, plan: IterationPlan) -> str | None:
        return None

    def at_swap(self, task: SwapTask) -> str | None:
        return None


def assert_all_memory_is_free(engine: ServingEngine) -> None:
    engine.scheduler.check_integrity()
    cache = engine.stats()[1]
    assert (cache.rows_used, cache.blocks_used, cache.swap_blocks_used) == (0, 0, 0)


# ---------------------------------------------------------------------- the published examples


def test_published_example_submit_and_poll() -> None:
    with make_engine() as engine:
        sent = request()
        request_id = engine.submit(sent)
        deadline = time.monotonic() + TIMEOUT
        while not engine.is_complete(request_id):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        result = engine.get_result(request_id)
    assert result is not None
    assert result.state is RequestState.COMPLETED and result.finish_reason is FinishReason.LENGTH
    assert result.tokens == expected(engine, sent)
    assert (result.prompt_token_count, result.completion_token_count) == (8, 8)


def test_published_example_stream_with_a_callback() -> None:
    outputs: list[TokenOutput] = []
    threads: set[str] = set()

    def on_token(output: TokenOutput) -> None:
        outputs.append(output)
        threads.add(threading.current_thread().name)

    with make_engine() as engine:
        sent = request()
        request_id = engine.submit_with_callback(sent, on_token)
        assert engine.get_result(request_id, wait=TIMEOUT) is not None
    assert tuple(output.token_id for output in outputs) == expected(engine, sent)
    assert [output.is_final for output in outputs] == [False] * 7 + [True]
    assert [output.sequence_length for output in outputs] == list(range(9, 17))
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert threads == {"weft-engine"}


def test_published_example_async_stream() -> None:
    async def read(engine: ServingEngine, sent: InferenceRequest) -> list[TokenOutput]:
        return [output async for output in engine.stream(sent)]

    async def main(engine: ServingEngine) -> list[list[TokenOutput]]:
        return await asyncio.gather(*(read(engine, request(family=number)) for number in range(5)))

    with make_engine() as engine:
        streams = asyncio.run(main(engine))
    for number, outputs in enumerate(streams):
        assert tuple(output.token_id for output in outputs) == expected(engine, request(family=number))
        assert outputs[-1].is_final


# ---------------------------------------------------------------------- other ways to submit


def test_submit_async_returns_the_result() -> None:
    with make_engine() as engine:
        result = asyncio.run(engine.submit_async(request()))
    assert result.tokens == expected(engine, request())


def test_submit_async_returns_its_result_even_if_only_one_result_is_kept() -> None:
    async def main(engine: ServingEngine) -> list[Any]:
        return await asyncio.gather(
            *(engine.submit_async(request(family=n, max_tokens=3 + n % 4)) for n in range(20))
        )

    with make_engine(max_kept_results=1) as engine:
        results = asyncio.run(main(engine))
    for number, result in enumerate(results):
        assert result.tokens == expected(engine, request(family=number, max_tokens=3 + number % 4))


def test_cancelling_the_task_cancels_the_request() -> None:
    gate = Gate()
    engine = make_engine(NoopBackend(faults=gate))

    async def main() -> None:
        task = asyncio.create_task(engine.submit_async(request(max_tokens=100)))
        await asyncio.to_thread(gate.reached.wait, TIMEOUT)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with engine:
        asyncio.run(main())
        gate.open.set()
        result = engine.get_result(RequestId("0"), wait=TIMEOUT)
    assert result is not None and result.state is RequestState.CANCELLED
    assert_all_memory_is_free(engine)


def test_iterations_can_run_without_a_thread() -> None:
    for overlap in (True, False):
        engine = make_engine(overlap=overlap)
        ids = [engine.submit(request(family=family)) for family in range(3)]
        engine.run_until_idle()
        for family, request_id in enumerate(ids):
            result = engine.get_result(request_id)
            assert result is not None and result.tokens == expected(engine, request(family=family))
        assert engine.run_iteration() == [] and not engine.has_work
        assert_all_memory_is_free(engine)


def test_a_step_takes_the_seconds_that_the_noop_backend_is_configured_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(noop, "time", SimpleNamespace(sleep=slept.append))
    engine = make_engine(NoopBackend(seconds_per_step=0.5))
    engine.submit(request(max_tokens=4))
    engine.run_until_idle()
    assert slept == [0.5] * 4


def test_run_until_idle_ends_all_requests_if_memory_is_short() -> None:
    engine = make_engine(
        blocks=10,
        swap_blocks=0,
        scheduler={"max_running": 2, "max_sequences_per_step": 1, "prefer_pure_decode": True},
    )
    ids = [engine.submit(request(10, 16, family)) for family in range(3)]
    engine.run_until_idle()
    assert all(engine.is_complete(request_id) for request_id in ids)


def test_output_is_the_same_with_and_without_overlap_and_in_any_batch() -> None:
    for overlap in (True, False):
        for mode in PreemptionMode:
            backend = NoopBackend(random_source=random.Random(3))
            engine = make_engine(backend, blocks=12, overlap=overlap, scheduler={"preemption": mode})
            ids = [engine.submit(request(10, 20, family)) for family in range(5)]
            engine.run_until_idle()
            for family, request_id in enumerate(ids):
                result = engine.get_result(request_id)
                assert result is not None and result.tokens == expected(engine, request(10, 20, family))
            assert engine.metrics().preemptions > 0


# ---------------------------------------------------------------------- cancel, in every state


def state_of(engine: ServingEngine, request_id: RequestId) -> str:
    sequence = engine.scheduler.sequences.get(request_id)
    if sequence is None:
        return "over"
    if sequence.state is RequestState.PREEMPTED:
        if sequence.allocation is None:
            return "preempted"
        return "swapped" if sequence.allocation.is_swapped else "swapping in"
    return sequence.seq_state.value


STATES = ["waiting", "prefilling", "decoding", "preempted", "swapped", "swapping in", "over"]


@pytest.mark.parametrize(
    ("state", "overlap"),
    # Without overlap a swap-in ends with its iteration, so a test never sees this state.
    [(state, overlap) for state in STATES for overlap in (True, False) if overlap or state != "swapping in"],
)
def test_cancel_ends_a_request_in_every_state_and_frees_its_memory(state: str, overlap: bool) -> None:
    mode = PreemptionMode.SWAP if state.startswith("swap") else PreemptionMode.RECOMPUTE
    options = {"preemption": mode, "max_chunk_tokens": 4, "max_prefill_tokens": 8, "prefix_caching": False}
    engine = make_engine(blocks=16, overlap=overlap, scheduler=options)
    finals: list[TokenOutput] = []
    other = request(12, 40)
    sent = request(12, 40, 1)
    other_id = engine.submit(other)
    request_id = engine.submit_with_callback(sent, lambda o: finals.append(o) if o.is_final else None)
    for _ in range(1000):
        if state_of(engine, request_id) == state:
            break
        engine.run_iteration()
    assert state_of(engine, request_id) == state
    assert engine.cancel(request_id, "not needed any more") is (state != "over")
    assert engine.cancel(request_id) is False, "a second cancel has no effect"
    engine.run_until_idle()
    result, other_result = engine.get_result(request_id), engine.get_result(other_id)
    assert result is not None and other_result is not None
    assert other_result.tokens == expected(engine, other), "the other request is not affected"
    if state == "over":
        assert result.state is RequestState.COMPLETED
    else:
        assert result.state is RequestState.CANCELLED and result.finish_reason is FinishReason.CANCELLED
        assert result.error == "not needed any more"
        assert finals[0].finish_reason is FinishReason.CANCELLED and finals[0].token_id is None
    assert result.tokens == expected(engine, sent)[: len(result.tokens)]
    assert len(finals) == 1, "the final output comes once"
    assert_all_memory_is_free(engine)


def test_cancelling_an_unknown_request_returns_false() -> None:
    assert make_engine().cancel(RequestId("99")) is False


def test_a_request_cancelled_just_before_the_loop_waits_still_gets_its_result() -> None:
    class Sleepy(ServingEngine):
        """Submits and cancels a request after the loop has found no work and before it waits."""

        cancelled: RequestId | None = None

        def run_iteration(self) -> list[TokenOutput]:
            outputs = super().run_iteration()
            if not self.has_work and self.cancelled is None:
                self.cancelled = self.submit(request())
                self.cancel(self.cancelled)
            return outputs

    with Sleepy(NoopBackend(), ServingEngineConfig(), new_id=numbered_ids()) as engine:
        result = engine.get_result(RequestId("0"), wait=TIMEOUT)
    assert result is not None and result.state is RequestState.CANCELLED


# ---------------------------------------------------------------------- stop


def test_stop_cancels_unfinished_requests_delivers_their_ends_and_refuses_new_ones() -> None:
    gate = Gate()
    finals: list[TokenOutput] = []
    engine = make_engine(NoopBackend(faults=gate, **SLOW)).start()
    ids = [
        engine.submit_with_callback(
            request(max_tokens=1000, family=n), lambda o: finals.append(o) if o.is_final else None
        )
        for n in range(12)
    ]
    assert gate.reached.wait(TIMEOUT)
    gate.open.set()
    engine.stop()
    engine.stop()
    results = [engine.get_result(request_id) for request_id in ids]
    assert all(result is not None and result.state is RequestState.CANCELLED for result in results)
    assert sorted(output.request_id for output in finals) == sorted(ids)
    with pytest.raises(EngineStoppedError):
        engine.submit(request())
    assert_all_memory_is_free(engine)


@pytest.mark.parametrize("own_thread", [True, False], ids=["start()", "run_iteration() by hand"])
def test_stop_from_a_callback_ends_the_loop_and_every_callback_gets_its_tokens_in_order(
    own_thread: bool,
) -> None:
    engine = make_engine()
    received: dict[RequestId, list[TokenOutput]] = {}

    def on_token(output: TokenOutput) -> None:
        received.setdefault(output.request_id, []).append(output)
        if output.request_id == "0" and len(received[RequestId("0")]) == 3:
            engine.stop()

    for family in range(4):
        engine.submit_with_callback(request(max_tokens=50, family=family), on_token)
    if own_thread:
        engine.start()
        for number in range(4):
            assert engine.get_result(RequestId(str(number)), wait=TIMEOUT) is not None
        engine.stop()
    else:
        engine.run_until_idle()
    for request_id, outputs in received.items():
        result = engine.get_result(request_id)
        assert result is not None and result.state is RequestState.CANCELLED
        assert tuple(o.token_id for o in outputs if o.token_id is not None) == result.tokens
        assert [o.is_final for o in outputs] == [False] * (len(outputs) - 1) + [True]


def test_stop_ends_a_loop_in_a_thread_of_the_caller() -> None:
    for _ in range(10):
        engine = make_engine()
        failures: list[BaseException] = []

        def loop(engine: ServingEngine = engine, failures: list[BaseException] = failures) -> None:
            try:
                engine.run()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=loop)
        thread.start()
        ids = [engine.submit(request(max_tokens=2000, family=family)) for family in range(3)]
        engine.stop()
        thread.join(TIMEOUT)
        assert not thread.is_alive() and not failures
        assert all(engine.is_complete(request_id) for request_id in ids)
        assert_all_memory_is_free(engine)


def test_stop_before_the_start_cancels_submitted_requests() -> None:
    engine = make_engine()
    request_id = engine.submit(request())
    engine.stop()
    result = engine.get_result(request_id)
    assert result is not None and result.state is RequestState.CANCELLED


def test_the_context_manager_stops_the_engine_and_does_not_hide_errors() -> None:
    engine = make_engine()
    with pytest.raises(KeyError), engine:
        engine.submit(request(max_tokens=1000))
        raise KeyError("the caller's own")
    assert engine._thread is not None and not engine._thread.is_alive()
    with pytest.raises(EngineStoppedError):
        engine.submit(request())


def test_stop_wakes_a_submit_that_waits_for_the_queue() -> None:
    gate = Gate()
    engine = make_engine(
        NoopBackend(faults=gate), scheduler={"max_running": 1, "max_waiting_requests": 1}
    ).start()
    engine.submit(request())
    assert gate.reached.wait(TIMEOUT)
    engine.submit(request(family=1))
    raised: list[Exception] = []

    def blocked() -> None:
        try:
            engine.submit(request(family=2), block=True)
        except EngineStoppedError as error:
            raised.append(error)

    thread = threading.Thread(target=blocked)
    thread.start()
    threading.Timer(0.05, gate.open.set).start()
    engine.stop()
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    assert raised or engine.is_complete(RequestId("2"))


# ---------------------------------------------------------------------- idle, threads, back-pressure


def test_an_idle_engine_uses_no_cpu() -> None:
    with make_engine() as engine:
        request_id = engine.submit(request())
        assert engine.get_result(request_id, wait=TIMEOUT) is not None
        used = []
        while not used or min(used) >= 0.05:  # another thread of this process may still be working
            assert len(used) < 60
            before = time.process_time()
            time.sleep(1.0)
            used.append(time.process_time() - before)


def test_many_threads_can_submit_at_once() -> None:
    answers: dict[int, tuple[RequestId, InferenceRequest]] = {}
    lock = threading.Lock()

    def submit_some(engine: ServingEngine, thread: int) -> None:
        for number in range(10):
            sent = request(4 + number, 6, family=10 * thread + number)
            request_id = engine.submit(sent)
            with lock:
                answers[len(answers)] = (request_id, sent)

    with make_engine(NoopBackend(vocabulary_size=100_000), blocks=64) as engine:
        threads = [threading.Thread(target=submit_some, args=(engine, number)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
        assert len({request_id for request_id, _ in answers.values()}) == 80, "every request has its own id"
        for request_id, sent in answers.values():
            result = engine.get_result(request_id, wait=TIMEOUT)
            assert result is not None and result.tokens == expected(engine, sent)
    assert_all_memory_is_free(engine)


def test_a_full_queue_refuses_with_both_numbers_and_loses_no_request() -> None:
    engine = make_engine(scheduler={"max_waiting_requests": 2})
    ids = [engine.submit(request(family=family)) for family in range(2)]
    with pytest.raises(QueueFullError, match=r"2 requests are waiting, at most 2"):
        engine.submit(request(family=3))
    with pytest.raises(QueueFullError):
        engine.submit(request(family=3), block=True, timeout=0.01)
    engine.run_until_idle()
    assert all(engine.is_complete(request_id) for request_id in ids)
    assert engine.submit(request(family=3)) is not None


def test_a_blocking_submit_succeeds_once_the_queue_has_room() -> None:
    with make_engine(scheduler={"max_running": 1, "max_waiting_requests": 1}) as engine:
        ids = [engine.submit(request(family=family), block=True) for family in range(10)]
        for family, request_id in enumerate(ids):
            result = engine.get_result(request_id, wait=TIMEOUT)
            assert result is not None and result.tokens == expected(engine, request(family=family))


def test_a_request_that_can_never_run_is_refused_at_once_even_with_block() -> None:
    engine = make_engine(blocks=4, scheduler={"max_waiting_requests": 1})
    with pytest.raises(InvalidRequestError, match=r"prompt has 16 tokens; allowed: at most 15"):
        engine.submit(request(16), block=True)


# ---------------------------------------------------------------------- time limits


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding"])
def test_a_deadline_ends_a_request_in_every_state(state: str) -> None:
    clock = VirtualClock()
    options = {"max_running": 1, "max_chunk_tokens": 4, "max_prefill_tokens": 4, "prefix_caching": False}
    engine = make_engine(clock=clock, scheduler=options)
    other_id = None
    if state == "waiting":
        other_id = engine.submit(request(max_tokens=50, family=1))
        engine.run_iteration()
    request_id = engine.submit(request(12, 200, deadline=10.0))
    for _ in range(100):
        if state_of(engine, request_id) == state:
            break
        engine.run_iteration()
    assert state_of(engine, request_id) == state
    clock.advance(9.9)
    engine.run_iteration()
    assert not engine.is_complete(request_id)
    clock.advance(0.2)
    engine.run_iteration()
    result = engine.get_result(request_id)
    assert result is not None and result.state is RequestState.CANCELLED
    assert result.error is not None and "deadline of 10 s" in result.error
    engine.run_until_idle()
    if other_id is not None:
        other = engine.get_result(other_id)
        assert other is not None and other.state is RequestState.COMPLETED
    assert_all_memory_is_free(engine)


def test_an_expired_request_never_runs() -> None:
    engine = make_engine(clock=VirtualClock())
    request_id = engine.submit(request(deadline=0.0))
    engine.run_until_idle()
    result = engine.get_result(request_id)
    assert result is not None and result.tokens == () and result.prefill_time == 0
    assert engine.stats()[0].tokens_computed == 0


def test_the_request_timeout_is_the_deadline_of_requests_without_one() -> None:
    clock = VirtualClock()
    engine = make_engine(clock=clock, request_timeout=5.0)
    without = engine.submit(request(max_tokens=500))
    longer = engine.submit(request(max_tokens=500, family=1, deadline=60.0))
    engine.run_iteration()
    clock.advance(6.0)
    engine.run_iteration()
    assert engine.is_complete(without) and not engine.is_complete(longer)
    engine.run_until_idle()
    result = engine.get_result(longer)
    assert result is not None and result.state is RequestState.COMPLETED


def test_a_request_whose_deadline_was_dropped_completes_and_another_expires_on_time() -> None:
    clock = VirtualClock()
    engine = make_engine(clock=clock)
    dropped = engine.submit(request(max_tokens=500, deadline=5.0))
    other = engine.submit(request(max_tokens=500, family=1, deadline=5.5))
    engine.run_iteration()
    assert engine.drop_deadline(dropped) and not engine.drop_deadline(RequestId("unknown"))
    clock.advance(6.0)
    engine.run_iteration()
    assert engine.is_complete(other) and not engine.is_complete(dropped)
    engine.run_until_idle()
    result = engine.get_result(dropped)
    assert result is not None and result.state is RequestState.COMPLETED
    assert not engine.drop_deadline(dropped)


def test_a_deadline_ends_a_waiting_request_while_the_loop_is_busy() -> None:
    with make_engine(scheduler={"max_running": 1}) as engine:
        busy = engine.submit(request(max_tokens=4000))
        waiting = engine.submit(request(family=1, deadline=0.0))
        result = engine.get_result(waiting, wait=TIMEOUT)
        assert result is not None and result.state is RequestState.CANCELLED
        engine.cancel(busy)


# ---------------------------------------------------------------------- callbacks and readers


def test_a_callback_that_raises_fails_only_its_own_request() -> None:
    def raises(output: TokenOutput) -> None:
        if output.sequence_length == 11:
            raise RuntimeError("error of the caller")

    with make_engine() as engine:
        bad = engine.submit_with_callback(request(max_tokens=50), raises)
        good = engine.submit(request(max_tokens=50, family=1))
        bad_result = engine.get_result(bad, wait=TIMEOUT)
        good_result = engine.get_result(good, wait=TIMEOUT)
        later = engine.get_result(engine.submit(request(family=2)), wait=TIMEOUT)
    assert bad_result is not None and bad_result.state is RequestState.FAILED
    assert bad_result.error is not None and "error of the caller" in bad_result.error
    assert good_result is not None and good_result.tokens == expected(
        engine, request(max_tokens=50, family=1)
    )
    assert later is not None and later.state is RequestState.COMPLETED
    assert_all_memory_is_free(engine)


def test_callbacks_run_without_the_lock_and_do_not_block_other_threads() -> None:
    entered = threading.Event()
    answered: list[bool] = []

    def on_token(output: TokenOutput) -> None:
        entered.set()
        answered.append(done.wait(TIMEOUT))

    done = threading.Event()
    with make_engine() as engine:
        engine.submit_with_callback(request(max_tokens=1), on_token)
        assert entered.wait(TIMEOUT)
        engine.metrics()
        engine.submit(request(family=1))
        assert engine.cancel(RequestId("1"))
        done.set()
    assert answered == [True]


def test_a_callback_may_submit_and_cancel() -> None:
    engine = make_engine()
    second: list[RequestId] = []
    victim = engine.submit(request(max_tokens=500, family=7))

    def on_token(output: TokenOutput) -> None:
        if output.is_final:
            second.append(engine.submit(request(family=1)))
            engine.cancel(victim)

    engine.submit_with_callback(request(max_tokens=3), on_token)
    engine.run_until_idle()
    result, cancelled = engine.get_result(second[0]), engine.get_result(victim)
    assert result is not None and result.tokens == expected(engine, request(family=1))
    assert cancelled is not None and cancelled.state is RequestState.CANCELLED


def test_a_slow_reader_is_cancelled_and_others_are_not_affected() -> None:
    async def main(engine: ServingEngine) -> tuple[list[TokenOutput], list[TokenOutput]]:
        slow: list[TokenOutput] = []
        stream = engine.stream(request(max_tokens=500))
        slow.append(await anext(stream))
        other = [output async for output in engine.stream(request(max_tokens=60, family=1))]
        # The slow reader read one token while the other read sixty. Its buffer holds four.
        await asyncio.to_thread(engine.get_result, slow[0].request_id, TIMEOUT)
        slow += [output async for output in stream]
        return slow, other

    with make_engine(stream_buffer=4) as engine:
        slow, other = asyncio.run(main(engine))
        result = engine.get_result(slow[0].request_id)
    assert result is not None and result.state is RequestState.CANCELLED
    assert result.error is not None and "4 tokens are unread" in result.error
    assert slow[-1].is_final and slow[-1].finish_reason is FinishReason.CANCELLED
    received = [output.token_id for output in slow if output.token_id is not None]
    assert received == list(expected(engine, request(max_tokens=500)))[: len(received)], (
        "no token is missing before the end"
    )
    assert other[-1].finish_reason in (FinishReason.LENGTH, FinishReason.CANCELLED)


def test_a_reader_that_leaves_early_cancels_its_request() -> None:
    async def main(engine: ServingEngine) -> RequestId:
        stream = engine.stream(request(max_tokens=4000))
        async for output in stream:
            if output.sequence_length == 12:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        return output.request_id

    with make_engine(NoopBackend(**SLOW)) as engine:
        request_id = asyncio.run(main(engine))
        result = engine.get_result(request_id, wait=TIMEOUT)
    assert result is not None and result.state is RequestState.CANCELLED
    assert_all_memory_is_free(engine)


def test_a_stream_of_a_stopped_engine_ends() -> None:
    gate = Gate()
    engine = make_engine(NoopBackend(faults=gate, **SLOW)).start()

    async def main() -> list[TokenOutput]:
        async def stop() -> None:
            await asyncio.to_thread(gate.reached.wait, TIMEOUT)
            gate.open.set()
            await asyncio.to_thread(engine.stop)

        task = asyncio.create_task(stop())
        outputs = [output async for output in engine.stream(request(max_tokens=4000))]
        await task
        return outputs

    outputs = asyncio.run(main())
    assert outputs[-1].is_final and outputs[-1].finish_reason is FinishReason.CANCELLED


# ---------------------------------------------------------------------- metrics and results


def test_every_request_is_counted_once_at_every_moment() -> None:
    options = {"preemption": PreemptionMode.SWAP, "policy": PriorityPolicy.PRIORITY, "prefix_caching": False}
    engine = make_engine(NoopBackend(random_source=random.Random(4)), blocks=16, scheduler=options)
    submitted = 0
    states: set[str] = set()
    for iteration in range(400):
        if iteration % 5 == 0 and submitted < 12:
            engine.submit(request(10, 20, submitted, priority=Priority(submitted % 3)))
            submitted += 1
        engine.run_iteration()
        metrics = engine.metrics()
        ended = metrics.requests_completed + metrics.requests_failed + metrics.requests_cancelled
        present = metrics.requests_pending + metrics.requests_running + metrics.requests_preempted
        assert present + ended == submitted
        busy = [slot for slot in metrics.slots if slot.request_id is not None]
        assert len(metrics.slots) == 8 and len({slot.row for slot in metrics.slots}) == 8
        assert metrics.requests_running <= len(busy) <= metrics.requests_running + metrics.requests_preempted
        assert 0 <= metrics.cache_utilisation <= 1 and 0 <= metrics.batch_utilisation <= 1
        states |= {state_of(engine, rid) for rid in engine.scheduler.sequences}
    assert {"decoding", "swapped", "swapping in"} <= states, "the run did not reach all states"


def test_the_metrics_agree_with_the_results() -> None:
    clock = VirtualClock()
    engine = make_engine(clock=clock)
    engine.submit(request(8, 5))
    engine.submit(request(8, 9, 1))
    engine.submit(request(8, 100, 2))
    for _ in range(30):
        engine.run_iteration()
        clock.advance(0.5)
    engine.cancel(RequestId("2"))
    engine.run_until_idle()
    results = [engine.get_result(RequestId(str(number))) for number in range(3)]
    metrics = engine.metrics()
    tokens = sum(len(result.tokens) for result in results if result)
    assert (metrics.requests_completed, metrics.requests_cancelled, metrics.requests_failed) == (2, 1, 0)
    assert metrics.generated_tokens == tokens == engine.stats()[0].tokens_generated
    assert metrics.prompt_tokens == 24
    assert metrics.tokens_per_second == pytest.approx(2.0), "one request ran in the last ten seconds"
    assert metrics.latency.count == 2 and metrics.time_to_first_token.count == 3
    assert metrics.inter_token_latency.count == tokens - 3
    assert metrics.inter_token_latency.p50 == pytest.approx(0.5, rel=0.05)
    for result in results:
        assert result is not None and result.time_to_first_token is not None
        assert result.decode_steps == len(result.tokens) - 1
        assert result.decode_time == pytest.approx(0.5 * result.decode_steps, abs=0.51)
    assert all(slot.request_id is None for slot in metrics.slots) and metrics.cache_utilisation == 0


def test_results_are_kept_up_to_the_limit_and_the_oldest_are_dropped_first() -> None:
    engine = make_engine(max_kept_results=3)
    ids = [engine.submit(request(max_tokens=2 + number, family=number)) for number in range(8)]
    engine.run_until_idle()
    assert all(engine.is_complete(request_id) for request_id in ids), (
        "a request stays complete after its result is dropped"
    )
    assert [engine.get_result(request_id) is None for request_id in ids] == [True] * 5 + [False] * 3
    assert engine.get_result(ids[0]) is None
    assert not engine._delivery._callbacks


def test_get_result_returns_none_after_its_timeout() -> None:
    engine = make_engine()
    request_id = engine.submit(request())
    assert engine.get_result(request_id) is None
    assert engine.get_result(request_id, wait=0.01) is None


# ---------------------------------------------------------------------- faults


@pytest.mark.parametrize("overlap", [True, False])
def test_a_fault_of_one_request_fails_only_that_request(overlap: bool) -> None:
    faults = Culprits(2, named=True)
    engine = make_engine(NoopBackend(faults=faults), overlap=overlap)
    ids = [engine.submit(request(family=family)) for family in range(5)]
    engine.run_until_idle()
    for family, request_id in enumerate(ids):
        result = engine.get_result(request_id)
        assert result is not None
        if request_id == "2":
            assert result.state is RequestState.FAILED and result.error == "bad input of 2"
            assert result.finish_reason is FinishReason.ERROR
        else:
            assert result.tokens == expected(engine, request(family=family))
    assert_all_memory_is_free(engine)


@pytest.mark.parametrize("rejects", [False, True], ids=["fails", "is refused at submit"])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_with_an_unattributed_fault_is_retried_in_halves(overlap: bool, rejects: bool) -> None:
    faults = Culprits(1, named=False, rejects=rejects)
    engine = make_engine(NoopBackend(faults=faults), overlap=overlap)
    ids = [engine.submit(request(family=family)) for family in range(6)]
    engine.run_until_idle()
    failed = [rid for rid in ids if (r := engine.get_result(rid)) and r.state is RequestState.FAILED]
    assert "1" in failed and len(failed) <= 3, "at most the half that contains it"
    assert set(faults.sizes) == {6, 3}, "the whole step failed, then one half"
    for family, request_id in enumerate(ids):
        result = engine.get_result(request_id)
        assert result is not None
        if request_id not in failed:
            assert result.tokens == expected(engine, request(family=family))
    assert_all_memory_is_free(engine)


def test_every_failure_has_its_kind_whatever_its_message_is() -> None:
    engine = make_engine(NoopBackend(faults=Culprits(1, named=True)))

    def broken(output: TokenOutput) -> None:
        raise ValueError("deadline")

    late = engine.submit(request(deadline=0.0))
    failing = engine.submit(request(family=1))
    undelivered = engine.submit_with_callback(request(family=2), broken)
    cancelled = engine.submit(request(family=3))
    good = engine.submit(request(family=4))
    engine.cancel(cancelled, "every token is forbidden")
    engine.run_until_idle()
    kinds = {
        late: FailureKind.DEADLINE,
        failing: FailureKind.STEP,
        undelivered: FailureKind.DELIVERY,
        cancelled: FailureKind.CANCELLED,
        good: None,
    }
    for request_id, kind in kinds.items():
        result = engine.get_result(request_id)
        assert result is not None and result.failure is kind


def test_a_fault_that_does_not_repeat_fails_no_request() -> None:
    class Once(Culprits):
        def at_result(self, plan: IterationPlan) -> tuple[str | None, Mapping[RequestId, Failure]]:
            failure = super().at_result(plan)
            if failure[0] is not None:
                self.culprits.clear()
            return failure

    engine = make_engine(NoopBackend(faults=Once(3, named=False)))
    ids = [engine.submit(request(family=family)) for family in range(6)]
    engine.run_until_idle()
    for family, request_id in enumerate(ids):
        result = engine.get_result(request_id)
        assert result is not None and result.tokens == expected(engine, request(family=family))
    assert engine.stats()[0].steps_failed == 1


@pytest.mark.parametrize("rejects", [False, True], ids=["fails", "is refused at submit"])
@pytest.mark.parametrize("overlap", [True, False])
def test_the_engine_stops_after_several_failed_steps_in_a_row(overlap: bool, rejects: bool) -> None:
    faults = Culprits(*range(100), named=False, rejects=rejects)
    engine = make_engine(NoopBackend(faults=faults), overlap=overlap)
    ids = []
    with pytest.raises(WeftError, match=r"6 steps in a row failed, the last with: .*(device error|take it)"):
        for family in range(25):
            ids.append(engine.submit(request(family=family)))
            engine.run_until_idle()
    assert len(ids) == 3, "each request fails alone twice"
    results = [engine.get_result(request_id) for request_id in ids]
    assert all(result is not None and result.state is RequestState.FAILED for result in results)
    with pytest.raises(EngineStoppedError, match="6 steps in a row failed"):
        engine.submit(request())


def test_a_successful_step_resets_the_count_of_failed_steps() -> None:
    faults = Culprits(*range(0, 50, 2), named=False)
    engine = make_engine(NoopBackend(faults=faults))
    for family in range(50):
        request_id = engine.submit(request(family=family))
        engine.run_until_idle()
        result = engine.get_result(request_id)
        assert result is not None
        assert result.state is (RequestState.FAILED if int(request_id) % 2 == 0 else RequestState.COMPLETED)
    assert_all_memory_is_free(engine)


def test_failures_of_single_requests_do_not_stop_the_engine() -> None:
    engine = make_engine(NoopBackend(faults=Culprits(*range(50), named=True)))
    for family in range(50):
        engine.submit(request(family=family))
        engine.run_until_idle()
    assert engine.metrics().requests_failed == 50


def test_failed_swaps_cost_only_a_recompute() -> None:
    class FailingSwaps(Culprits):
        def at_wait(self, plan: IterationPlan) -> str | None:
            return None

        def at_swap(self, task: SwapTask) -> str | None:
            return "no host memory" if task.swap_id % 2 else None

    backend = NoopBackend(faults=FailingSwaps(named=False), random_source=random.Random(2))
    engine = make_engine(backend, blocks=14, scheduler={"preemption": PreemptionMode.SWAP})
    ids = [engine.submit(request(10, 24, family)) for family in range(5)]
    engine.run_until_idle()
    for family, request_id in enumerate(ids):
        result = engine.get_result(request_id)
        assert result is not None and result.tokens == expected(engine, request(10, 24, family))
    assert engine.stats()[0].swaps_failed > 0
    assert_all_memory_is_free(engine)


def test_a_backend_that_returns_too_few_tokens_fails_the_requests() -> None:
    class Forgetful(NoopBackend):
        """Always returns one token too few."""

        def _finish(self, step: Any) -> StepResult:
            result = super()._finish(step)
            return dataclasses.replace(result, tokens=result.tokens[:-1])

    with make_engine(Forgetful()) as engine:
        request_id = engine.submit(request())
        result = engine.get_result(request_id, wait=TIMEOUT)
    assert result is not None and result.state is RequestState.FAILED
    assert result.error is not None and "0 tokens where 1" in result.error


def test_an_error_inside_the_engine_fails_all_requests_and_stops_the_engine() -> None:
    engine = ServingEngine(NoopBackend(), clock=VirtualClock())
    delivered: list[TokenOutput] = []
    ids = [
        engine.submit_with_callback(
            InferenceRequest((1, 2, 3), SamplingParams(max_tokens=50)), delivered.append
        )
        for _ in range(3)
    ]
    engine.run_iteration()

    def broken() -> None:
        raise ZeroDivisionError("planted")

    engine.scheduler.schedule = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(ZeroDivisionError):
        engine.run_iteration()
    assert [o.request_id for o in delivered if o.is_final] == ids
    for request_id in ids:
        result = engine.get_result(request_id)
        assert result is not None and result.state is RequestState.FAILED
        assert "planted" in (result.error or "")
    with pytest.raises(EngineStoppedError, match="planted"):
        engine.submit(InferenceRequest((1,)))


def test_stop_does_not_deadlock_if_a_final_callback_calls_stop() -> None:
    engine = make_engine(NoopBackend(**SLOW))
    finals: list[TokenOutput] = []

    def stop_again(output: TokenOutput) -> None:
        if output.is_final:
            finals.append(output)
            engine.stop()

    engine.start()
    for number in range(4):
        engine.submit_with_callback(request(max_tokens=1000, family=number), stop_again)
    stopper = threading.Thread(target=engine.stop, daemon=True)
    stopper.start()
    stopper.join(TIMEOUT)
    assert not stopper.is_alive()
    assert len(finals) == 4


def test_a_callback_that_submits_never_waits_for_a_full_queue() -> None:
    engine = make_engine(scheduler={"max_waiting_requests": 1, "max_running": 1})
    refused: list[BaseException] = []

    def submit_more(output: TokenOutput) -> None:
        try:
            engine.submit(request(max_tokens=2), block=True)
        except QueueFullError as error:
            refused.append(error)

    engine.submit_with_callback(request(max_tokens=6), submit_more)
    engine.run_until_idle()
    assert refused, "the queue holds one: a second submit from the loop is refused at once"


def test_an_iteration_inside_an_iteration_is_refused() -> None:
    engine = make_engine()
    request_id = engine.submit_with_callback(request(max_tokens=3), lambda output: engine.run_iteration())
    engine.run_until_idle()
    result = engine.get_result(request_id)
    assert result is not None and "inside an iteration" in (result.error or "")


def test_an_interrupt_while_waiting_for_a_step_loses_nothing() -> None:
    class Interrupted(NoopBackend):
        is_pressed = False

        def _finish(self, step: Any) -> StepResult:
            if self.is_pressed:
                Interrupted.is_pressed = False
                raise KeyboardInterrupt
            return super()._finish(step)

    backend = Interrupted()
    engine = ServingEngine(backend, ServingEngineConfig(overlap=False), clock=VirtualClock())
    sent = request(max_tokens=5)
    request_id = engine.submit(sent)
    engine.run_iteration()
    Interrupted.is_pressed = True
    with pytest.raises(KeyboardInterrupt):
        engine.run_iteration()
    engine.stop()
    result = engine.get_result(request_id)
    assert result is not None and result.state is RequestState.CANCELLED
    limit = len(sent.prompt) + 5
    alone = generate_alone(sent.prompt, sent.params.seed or 0, sent.params, limit, backend.info)
    assert list(result.tokens) == alone[: len(result.tokens)] and len(result.tokens) >= 2


def test_an_interrupt_with_a_step_of_draft_tokens_in_flight_loses_nothing() -> None:
    """Two steps are in flight, the second with draft tokens. Both must end before the next one is planned."""

    class Interrupted(NoopBackend):
        presses = 0

        def _finish(self, step: Any) -> StepResult:
            if self.presses and step.plan.num_prefills:
                self.presses -= 1
                raise KeyboardInterrupt
            return super()._finish(step)

    backend = Interrupted(vocabulary_size=3, fixed_cost_rows=1000.0)
    scheduler = SchedulerConfig(prefer_pure_decode=True, max_running=8)
    engine = ServingEngine(backend, ServingEngineConfig(scheduler=scheduler), clock=VirtualClock())
    params = SamplingParams(max_tokens=40, seed=5, ignore_eos=True)
    sent = [InferenceRequest((0, 1, 2) * 4, params) for _ in range(3)]
    ids = [engine.submit(sent[0])]
    num_interrupted_with_drafts = 0
    for number in range(200):
        if number in (5, 9):
            ids.append(engine.submit(sent[len(ids)]))
            backend.presses = 1
        try:
            engine.run_iteration()
            if not engine.has_work:
                break
        except KeyboardInterrupt:
            steps = engine._core._in_flight
            num_interrupted_with_drafts += len(steps) > 1 and bool(steps[-1].plan.drafts)
    assert num_interrupted_with_drafts, "no interrupt came while a step with draft tokens was in flight"
    for one, request_id in zip(sent, ids, strict=True):
        result = engine.get_result(request_id)
        assert result is not None and result.state is RequestState.COMPLETED, result
        limit = len(one.prompt) + 40
        seed = one.params.seed or 0
        assert list(result.tokens) == generate_alone(one.prompt, seed, one.params, limit, backend.info)


def test_finish_completes_a_request_after_the_given_number_of_tokens() -> None:
    engine = make_engine()
    seen: list[TokenOutput] = []

    def stop_at_the_third(output: TokenOutput) -> None:
        seen.append(output)
        if len(seen) == 3:
            engine.finish(output.request_id, 2)

    request_id = engine.submit_with_callback(request(max_tokens=50), stop_at_the_third)
    engine.run_until_idle()
    result = engine.get_result(request_id)
    assert result is not None
    assert (result.state, result.finish_reason) == (RequestState.COMPLETED, FinishReason.STOP)
    assert list(result.tokens) == [output.token_id for output in seen[:2]]
    assert engine.metrics().requests_completed == 1
    assert not engine.finish(request_id, 1)


def test_a_callback_that_raises_on_the_final_output_fails_the_result() -> None:
    engine = make_engine()

    def take(output: TokenOutput) -> None:
        if output.is_final:
            raise RuntimeError("no room for the end")

    request_id = engine.submit_with_callback(request(max_tokens=2), take)
    engine.run_until_idle()
    result = engine.get_result(request_id)
    assert result is not None and result.state is RequestState.FAILED
    assert "no room for the end" in (result.error or "")
    assert (engine.metrics().requests_completed, engine.metrics().requests_failed) == (0, 1)


# --- several answers, and logprobs ------------------------------------------------------------------------------


def test_several_answers_compute_their_prompt_once_and_each_equals_a_request_with_its_seed() -> None:
    params = SamplingParams(max_tokens=6, seed=11, n=3, logprobs=1)
    prompt = tuple(range(100, 142))  # ten full blocks of 4 and two tokens
    with make_engine(NoopBackend()) as engine:
        ids = engine.submit_choices(InferenceRequest(prompt, params))
        answers = [engine.get_result(request_id, wait=TIMEOUT) for request_id in ids]
        computed = engine.stats()[0].tokens_computed
        singles = []
        for index in range(3):
            one = dataclasses.replace(params, n=1, seed=child_seed(11, index))
            singles.append(engine.get_result(engine.submit(InferenceRequest(prompt, one)), wait=TIMEOUT))
    assert all(answer is not None and answer.state is RequestState.COMPLETED for answer in answers)
    assert [a.tokens for a in answers] == [a.tokens for a in singles]  # type: ignore[union-attr]
    assert [a.logprobs for a in answers] == [a.logprobs for a in singles]  # type: ignore[union-attr]
    assert len({a.tokens for a in answers}) == 3, "each answer has its own noise"  # type: ignore[union-attr]
    assert computed == 42 + 2 * 2 + 3 * 5, "only the first answer computes the full blocks of the prompt"


def test_the_first_of_several_answers_equals_that_of_a_single_request() -> None:
    assert child_seed(7, 0) == 7
    seeds = {child_seed(seed, index) for seed in (-(2**63), -1, 0, 1, 2**63 - 1) for index in range(50)}
    assert len(seeds) == 250 and all(-(2**63) <= seed < 2**63 for seed in seeds)


def test_several_answers_are_queued_together_or_not_at_all() -> None:
    engine = make_engine(scheduler={"max_waiting_requests": 4})
    engine.submit(request())
    with pytest.raises(QueueFullError):
        engine.submit_choices(InferenceRequest((1, 2), SamplingParams(n=4)))
    assert engine.metrics().requests_pending == 1
    with pytest.raises(InvalidRequestError, match="5 answers were requested at once; allowed: at most 4"):
        engine.submit_choices(InferenceRequest((1, 2), SamplingParams(n=5)), block=True)
    assert len(engine.submit_choices(InferenceRequest((1, 2), SamplingParams(n=3)))) == 3
    engine.stop()
    # More tokens than the queue holds: accepted if the queue is empty, else refused together.
    engine = make_engine(scheduler={"max_waiting_tokens": 10})
    four = InferenceRequest((1, 2, 3, 4, 5), SamplingParams(n=4, max_tokens=2))
    assert len(engine.submit_choices(four)) == 4
    with pytest.raises(QueueFullError):
        engine.submit_choices(four)
    assert engine.metrics().requests_pending == 4
    engine.stop()


def test_only_the_first_of_several_answers_has_prompt_logprobs() -> None:
    first, *others = InferenceRequest((1, 2), SamplingParams(n=3, prompt_logprobs=2)).children(5)
    assert first.params.prompt_logprobs == 2 and first.params.n == 1
    assert [other.params.prompt_logprobs for other in others] == [None, None]


def test_prompt_logprobs_cover_the_prompt_for_every_chunk_size() -> None:
    prompt = tuple(range(7, 60))
    results = []
    for chunk in (3, 16, 512):
        with make_engine(scheduler={"max_chunk_tokens": chunk}) as engine:
            params = SamplingParams(max_tokens=2, seed=1, prompt_logprobs=2)
            results.append(engine.get_result(engine.submit(InferenceRequest(prompt, params)), wait=TIMEOUT))
    first = results[0]
    assert first is not None and first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None and len(first.prompt_logprobs) == len(prompt)
    assert all(one is not None and len(one.top) == 2 for one in first.prompt_logprobs[1:])
    assert all(result.prompt_logprobs == first.prompt_logprobs for result in results)  # type: ignore[union-attr]


def test_without_max_tokens_an_answer_may_fill_the_context() -> None:
    backend = NoopBackend(max_context=40)
    with make_engine(backend) as engine:
        params = SamplingParams(max_tokens=None, ignore_eos=True)
        result = engine.get_result(engine.submit(InferenceRequest((1, 2, 3), params)), wait=TIMEOUT)
    assert result is not None and len(result.tokens) == 37
    assert result.finish_reason is FinishReason.LENGTH
