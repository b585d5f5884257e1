"""The public engine: accepts requests from any thread, runs the loop, delivers tokens and results."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from weft.backends import registry
from weft.backends.base import Backend, OpenedModel
from weft.clock import Clock
from weft.config import PriorityPolicy, SchedulerConfig, ServingEngineConfig
from weft.engine.delivery import Callback, Delivery
from weft.engine.engine_metrics import EngineMetrics
from weft.engine.live_recorder import LiveRecorder
from weft.engine.loop import MAX_FAILED_STEPS, EngineCore
from weft.engine.replay import RunRecorder
from weft.engine.request_ids import new_request_id
from weft.engine.streams import TokenBuffer
from weft.errors import EngineStoppedError, QueueFullError, id_in_use
from weft.learned_costs import LearnedCosts, LearnedText
from weft.live import LiveFrame, LiveInfo
from weft.metrics import SchedulerStats, ServingMetrics
from weft.request import (
    GenerationResult,
    InferenceRequest,
    RequestId,
    TokenOutput,
)
from weft.scheduling.cache.manager import KvCacheManagerStats
from weft.scheduling.scheduler import ContinuousBatchScheduler
from weft.scheduling.sequence import Sequence

if TYPE_CHECKING:
    import asyncio  # for type checks only; functions that need asyncio import it, so that other engines start faster


class ServingEngine:
    """An engine with continuous batching.

    Use it as a context manager (a thread runs the loop), call `run()` in your own thread, or call `run_iteration()`
    yourself. All other methods may be called from any thread, and from callbacks. Callbacks run in the thread of the
    loop, without its lock, once for each token. `after_delivery` runs once after all callbacks of a step.

    The engine works on token ids. With `from_model` it also has a tokenizer: outputs and results contain text, and stop
    strings end an answer.
    """

    def __init__(
        self,
        backend: Backend,
        config: ServingEngineConfig | None = None,
        *,
        clock: Clock = time.monotonic,
        seed: int | None = None,
        new_id: Callable[[], RequestId] = new_request_id,
        max_failed_steps: int | None = MAX_FAILED_STEPS,
        after_delivery: Callable[[], object] | None = None,
        model: OpenedModel | None = None,
    ) -> None:
        """`new_id` makes the ids of requests that have none. `model` is the model that `backend` runs; with it, outputs
        have text.

        A step can fail with an error that belongs to no request. After `max_failed_steps` such steps in a row, the
        engine stops. None: it never stops.
        """
        self.config = config or ServingEngineConfig()
        self.tokenizer = None if model is None else model.tokenizer
        self._backend = backend
        self._clock = clock
        self._seeds = random.Random(seed)
        self.new_id = new_id
        scheduling = self.config.scheduler
        info = backend.allocate(self.config.cache, scheduling.max_running, scheduling.max_tokens_per_step)
        self._recorder: RunRecorder | None = None
        try:
            if self.config.log_path is not None:
                self._recorder = RunRecorder(self.config.log_path, self.config.scheduler, info, clock)
                self.scheduler: ContinuousBatchScheduler = self._recorder.scheduler
            else:
                self.scheduler = ContinuousBatchScheduler(self.config.scheduler, info, clock)
        except BaseException:
            backend.close()  # otherwise its memory stays allocated
            raise
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        """Notified of new requests, results, and the stop of the engine."""
        self._core = EngineCore(self.scheduler, backend, clock, self._lock, max_failed_steps)
        self._metrics = EngineMetrics(self.scheduler, clock())
        self._delivery = Delivery(
            self.scheduler,
            self._metrics,
            model,
            self._changed,
            clock,
            self.config.max_kept_results,
            after_delivery,
        )
        self._thread: threading.Thread | None = None
        self._iteration_lock = threading.RLock()
        """Held during an iteration and during shutdown."""
        self._iterating_thread: int | None = None
        """The thread that runs an iteration or the shutdown now. Calls from this thread come from a callback."""
        self._stopping = False
        self._closed = False
        self._failure: str | None = None
        self._is_waiting = False
        """Whether `run` has nothing to do and waits for a request."""
        self._live = LiveRecorder(self.scheduler, self._metrics)

    @classmethod
    def from_model(
        cls,
        model: str = "default",
        config: ServingEngineConfig | None = None,
        *,
        device: str = "auto",
        seed: int | None = None,
        **options: Any,
    ) -> ServingEngine:
        """Opens a model with its tokenizer and returns an engine for it.

        `model` is "default" (fetched on first use), `hf:owner/name` or a path. `options` go to the backend
        (`weft.backends.registry.build`), such as `max_context` or `threads`.
        """
        device = registry.chosen(device, options)
        if config is None:
            budgets = registry.GPU_BUDGETS if device == "cuda" else {}
            config = ServingEngineConfig(scheduler=SchedulerConfig(policy=PriorityPolicy.ADAPTIVE, **budgets))
        opened = registry.open_model(model, device, options)
        return cls(opened.backend, config, seed=seed, model=opened)

    # ------------------------------------------------------------------ requests

    def submit(
        self, request: InferenceRequest, *, block: bool = False, timeout: float | None = None
    ) -> RequestId:
        """Queues a request and returns its id. Raises QueueFullError if the queue is full.

        With `block`, it first waits up to `timeout` seconds for room in the queue. Another thread must run the loop
        meanwhile.
        """
        return self._submit([self._sequence(request)], None, block, timeout)[0]

    def submit_with_callback(
        self,
        request: InferenceRequest,
        callback: Callback,
        *,
        block: bool = False,
        timeout: float | None = None,
    ) -> RequestId:
        """Like `submit`; `callback` is called with every token. If it raises, only this request fails."""
        return self._submit([self._sequence(request)], callback, block, timeout)[0]

    def submit_choices(
        self,
        request: InferenceRequest,
        callback: Callback | None = None,
        *,
        indices: range | None = None,
        block: bool = False,
        timeout: float | None = None,
    ) -> tuple[RequestId, ...]:
        """Like `submit`, for a request with `n` answers, or for those in `indices`. Either all are queued or none.

        Returns one request id for each answer. The prompt is computed once for all.
        """
        first, *others = self._with_defaults(request).children(self._seed_for(request), indices)
        sequence = self._sequence(first)
        siblings = [sequence.sibling(other, self._seed_for(other)) for other in others]
        return self._submit([sequence, *siblings], callback, block, timeout)

    def check(self, request: InferenceRequest) -> None:
        """Raises InvalidRequestError if the request can never run. Does not queue it."""
        self.scheduler.check(request)
        if request.params.grammar is not None:
            self._backend.check_grammar(request.params.grammar)

    async def submit_async(self, request: InferenceRequest) -> GenerationResult:
        """Submits a request and waits for its result. Cancelling the task cancels the request."""
        import asyncio

        loop = asyncio.get_running_loop()
        future: asyncio.Future[GenerationResult] = loop.create_future()

        def deliver(output: TokenOutput) -> None:
            if output.is_final and not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, future, self._delivery.results[output.request_id])

        request_id = self._submit([self._sequence(request)], deliver)[0]
        try:
            return await future
        except BaseException:
            self.cancel(request_id)
            raise

    async def stream(self, request: InferenceRequest) -> AsyncIterator[TokenOutput]:
        """Submits a request and yields its tokens. Leaving the `async for` early cancels the request.

        The request is also cancelled when more than `stream_buffer` tokens are unread: a slow reader must not delay
        other requests.
        """
        import asyncio

        buffer = TokenBuffer(self.config.stream_buffer, asyncio.get_running_loop())

        def deliver(output: TokenOutput) -> None:
            if not buffer.put(output):
                reason = (
                    f"the reader is gone or too slow: more than {self.config.stream_buffer} tokens are unread"
                )
                self.cancel(output.request_id, reason)

        request_id = self._submit([self._sequence(request)], deliver)[0]
        is_over = False
        try:
            while not is_over:
                for output in await buffer.get():
                    is_over = output.is_final
                    yield output
        finally:
            # A request that is over may have given its id to a new one, which must not be cancelled.
            if not is_over:
                self.cancel(request_id)

    def cancel(self, request_id: RequestId, reason: str | None = None) -> bool:
        """Cancels a request in any state. Its KV blocks are freed within a step. Returns False if it had ended
        already."""
        with self._lock:
            cancelled = self.scheduler.cancel(request_id, reason)
            if cancelled:
                self._changed.notify_all()
        return cancelled

    def finish(self, request_id: RequestId, num_tokens: int) -> bool:
        """Completes a request (FinishReason.STOP) after its first `num_tokens` new tokens. Callers use it when the
        text contains a stop string. Returns False if the request had ended already."""
        with self._changed:
            finished = self.scheduler.finish(request_id, num_tokens)
            if finished:
                self._changed.notify_all()
        return finished

    def drop_deadline(self, request_id: RequestId) -> bool:
        """Removes the deadline of a request: from now on the caller must cancel it. Returns False if it had ended before."""
        with self._lock:
            return self.scheduler.drop_deadline(request_id)

    def is_complete(self, request_id: RequestId) -> bool:
        """Whether a submitted request has ended. Its result may be dropped already (`max_kept_results`). True also for
        an id that was never submitted: ids of dropped results are not kept."""
        with self._lock:
            return not self._delivery.is_unfinished(request_id)

    def get_result(self, request_id: RequestId, wait: float | None = None) -> GenerationResult | None:
        """Returns the result, or None if there is none. Waits up to `wait` seconds for a request that has not ended."""
        with self._changed:
            if wait is not None:
                seconds = min(wait, threading.TIMEOUT_MAX)
                self._changed.wait_for(lambda: not self._delivery.is_unfinished(request_id), seconds)
            return self._delivery.results.get(request_id)

    def _sequence(self, request: InferenceRequest) -> Sequence:
        """Checks a request and prepares its sequence. It is the slow part of `submit`, so it runs without the lock."""
        request = self._with_defaults(request)
        sequence = Sequence(request, self._seed_for(request))
        self.scheduler.prepare(sequence)
        if request.params.grammar is not None:
            self._backend.check_grammar(request.params.grammar)
        return sequence

    def _with_defaults(self, request: InferenceRequest) -> InferenceRequest:
        """Adds an id to a request without one, and the engine's `request_timeout` to one without a deadline. Idle
        work has no timeout of its own: it waits until others leave capacity."""
        default = None if request.is_idle_work else self.config.request_timeout
        deadline = default if request.deadline is None else request.deadline
        if request.request_id and deadline == request.deadline:
            return request
        return request.replaced(request_id=request.request_id or self.new_id(), deadline=deadline)

    def _submit(
        self,
        sequences: list[Sequence],
        callback: Callback | None,
        block: bool = False,
        timeout: float | None = None,
    ) -> tuple[RequestId, ...]:
        """Queues prepared sequences, all or none. Returns their ids."""
        deadline = None if timeout is None else time.monotonic() + timeout
        ids = tuple(sequence.request_id for sequence in sequences)
        with self._changed:
            while True:
                if self._stopping:
                    cause = self._failure or "the engine was stopped"
                    raise EngineStoppedError(f"{cause} and accepts no more requests")
                for request_id in ids:
                    if self._delivery.uses(request_id):
                        raise id_in_use(request_id)
                try:
                    self.scheduler.add(*sequences)
                    break
                except QueueFullError:
                    left = None if deadline is None else deadline - time.monotonic()
                    # A callback must not wait: it blocks the loop, and only the loop removes requests from the queue.
                    if not block or self._is_in_callback or (left is not None and left <= 0):
                        raise
                    self._changed.wait(left)
            self._delivery.begin(sequences, callback)
            self._changed.notify_all()
        return ids

    def _seed_for(self, request: InferenceRequest) -> int:
        seed = request.params.seed
        return self._seeds.getrandbits(63) if seed is None else seed

    # ------------------------------------------------------------------ the loop

    @property
    def has_work(self) -> bool:
        """Whether an iteration has something to do: a request is unfinished, or its last output is not delivered."""
        return not self._closed and (self.scheduler.has_work or self.scheduler.has_outputs)

    def run_iteration(self) -> list[TokenOutput]:
        """Runs one iteration, delivers its outputs and returns them. The list may be empty; use `has_work` to see
        whether there is more to do."""
        if self._is_in_callback:
            raise RuntimeError("run_iteration was called from a callback, inside an iteration")
        with self._iteration_lock:
            if self._closed:
                return []
            self._iterating_thread = threading.get_ident()
            try:
                if self.config.overlap:
                    self._core.run_overlapped()
                else:
                    self._core.run_plain()
                return self._delivery.deliver()
            except Exception as error:
                self._fail_engine(error)
                raise
            finally:
                self._iterating_thread = None
                if self._stopping:
                    self._shut_down()

    def run(self) -> None:
        """Runs until `stop`. Uses no CPU time while idle."""
        while not self._stopping:
            self.run_iteration()
            if not self.has_work:
                with self._changed:
                    if not (self.has_work or self._stopping):
                        self._is_waiting = True
                        self._changed.wait()
                        self._is_waiting = False
        with self._iteration_lock:
            self._shut_down()

    @property
    def progress(self) -> int | None:
        """Shows whether the loop is stuck: a number that changes with every step, or None while `run` is idle. Takes no
        lock, which a stuck loop may hold."""
        stats = self.scheduler.stats
        return None if self._is_waiting else stats.steps + stats.steps_failed

    @property
    def waits_for_device(self) -> bool:
        """Whether the loop waits for a GPU now. Takes no lock, as `progress`."""
        return self._core.waits_for_device

    def run_until_idle(self) -> None:
        """Runs until all submitted requests have ended."""
        while self.has_work:
            self.run_iteration()

    def start(self) -> ServingEngine:
        """Starts a thread that runs the loop."""
        if self._stopping:
            raise EngineStoppedError(
                f"{self._failure or 'the engine was stopped'} and cannot be started again"
            )
        if self._thread is None:
            self._thread = threading.Thread(target=self.run, name="weft-engine", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        """Stops the loop and cancels unfinished requests. Safe to call twice, from any thread, and from a callback."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._is_in_callback:
            return  # the iteration that runs this callback shuts down at its end
        with self._iteration_lock:
            self._shut_down()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> ServingEngine:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _is_in_callback(self) -> bool:
        return self._iterating_thread == threading.get_ident()

    def _shut_down(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._iterating_thread = threading.get_ident()
        try:
            if self._failure is None:
                self._core.drain()
                with self._lock:
                    for request_id in list(self.scheduler.sequences):
                        self.scheduler.cancel(request_id, "the engine was stopped")
                self._delivery.deliver()
        except Exception as error:
            self._fail_engine(error)
        finally:
            self._iterating_thread = None
            self._core.drop_in_flight()
            self._backend.close()
            if self._recorder is not None:
                self._recorder.close()

    def _fail_engine(self, error: Exception) -> None:
        """Handles an error inside the engine: fails all requests and accepts no more."""
        self._failure = f"the engine failed ({type(error).__name__}: {error})"
        self._stopping = True
        with self._lock:
            self.scheduler.abandon(self._failure)
        self._delivery.deliver()

    # ------------------------------------------------------------------ metrics and what was learned

    def learned_costs(self) -> LearnedCosts:
        with self._lock:
            return self.scheduler.learned_costs()

    def restore_costs(self, costs: LearnedCosts) -> None:
        with self._lock:
            self.scheduler.restore_costs(costs)

    def new_answers(self) -> tuple[LearnedText, ...]:
        """The finished answers that were learned since the last call (`AnswerIndexes.take_new`)."""
        with self._lock:
            return self.scheduler.speculation.answers.take_new()

    def restore_answers(self, texts: tuple[LearnedText, ...]) -> None:
        with self._lock:
            self.scheduler.restore_answers(texts)

    def forget_learned(self) -> None:
        """Forgets the costs of steps and all finished answers."""
        with self._lock:
            self.scheduler.restore_costs(LearnedCosts())
            self.scheduler.forget_answers()

    def metrics(self) -> ServingMetrics:
        with self._lock:
            return self._metrics.metrics(self._clock())

    def live_info(self) -> LiveInfo:
        return self._live.info()

    def live_frame(self) -> LiveFrame:
        """A snapshot for the live page. Steps and events are recorded while frames are asked for."""
        with self._lock:
            return self._live.frame(self._clock())

    def stats(self) -> tuple[SchedulerStats, KvCacheManagerStats]:
        with self._lock:
            return dataclasses.replace(self.scheduler.stats), self.scheduler.kv_cache.stats()


def _resolve(future: asyncio.Future[GenerationResult], result: GenerationResult) -> None:
    if not future.done():
        future.set_result(result)
