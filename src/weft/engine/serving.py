"""The public engine: takes requests from any thread, runs the loop, and delivers tokens and results."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from weft.backends import registry
from weft.backends.base import Backend, OpenedModel
from weft.clock import Clock
from weft.config import PriorityPolicy, SchedulerConfig, ServingEngineConfig
from weft.engine.engine_metrics import Figures
from weft.engine.loop import MAX_FAILED_STEPS, EngineCore
from weft.engine.output_texts import AnswerTexts
from weft.engine.replay import RunRecorder
from weft.engine.streams import TokenBuffer
from weft.errors import EngineStoppedError, QueueFullError
from weft.metrics import ServingMetrics
from weft.request import (
    FinishReason,
    GenerationResult,
    InferenceRequest,
    RequestId,
    RequestState,
    TokenOutput,
)
from weft.scheduling.cache.manager import KvCacheManagerStats
from weft.scheduling.scheduler import ContinuousBatchScheduler
from weft.scheduling.sequence import Sequence
from weft.scheduling.stats import SchedulerStats

if TYPE_CHECKING:
    import asyncio  # imported where it is used: an engine without an event loop starts without it

Callback = Callable[[TokenOutput], object]


class ServingEngine:
    """Continuous batching over a backend.

    Use it as a context manager (a thread runs the loop), call `run()` in a thread of your own, or call
    `run_iteration()` yourself. Every other method may be called from any thread at any time, and from callbacks.
    Callbacks run in the thread of the loop, outside its lock: once per token, the final one once; then
    `after_delivery`, once for all that a step gave.

    The engine knows tokens. One that `from_model` made has a tokenizer: outputs and results have their text, and stop
    strings end an answer.
    """

    def __init__(
        self,
        backend: Backend,
        config: ServingEngineConfig | None = None,
        *,
        clock: Clock = time.monotonic,
        seed: int | None = None,
        max_failed_steps: int | None = MAX_FAILED_STEPS,
        after_delivery: Callable[[], object] | None = None,
        model: OpenedModel | None = None,
    ) -> None:
        """After `max_failed_steps` failures in a row that belong to no request the engine breaks down; None: never. `model` is
        the one that `backend` was opened for, where outputs are to have text."""
        self.config = config or ServingEngineConfig()
        self.tokenizer = None if model is None else model.tokenizer
        self._after_delivery = after_delivery
        self._backend = backend
        self._clock = clock
        self._seeds = random.Random(seed)
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
            backend.close()  # nothing else has it
            raise
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        """Told of new requests, results, and the end."""
        self._core = EngineCore(self.scheduler, backend, clock, self._lock, max_failed_steps)
        self._texts: AnswerTexts | None = None
        if model is not None and model.text_of is not None:
            self._texts = AnswerTexts(model.text_of, self.scheduler.finish, self.scheduler.fail_request)
        self._callbacks: dict[RequestId, Callback] = {}
        self._results: OrderedDict[RequestId, GenerationResult] = OrderedDict()
        self._alive: set[RequestId] = set()
        """Submitted, and the result not there yet."""
        self._next_id = 0
        self._thread: threading.Thread | None = None
        self._turn = threading.RLock()
        """Held by whoever runs an iteration or shuts down."""
        self._busy_thread: int | None = None
        """The thread that runs an iteration or shuts down right now: a callback that calls back finds itself here."""
        self._stopping = False
        self._closed = False
        self._failure: str | None = None
        self._is_waiting = False
        self._figures = Figures(self.scheduler, clock())

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
        """The engine for a model: "default" (fetched on first use), `hf:owner/name` or a path, with its tokenizer.

        `options` are those of the device's backend (`weft.backends.registry.build`), such as max_context or threads.
        """
        device = registry.chosen(device, options)
        if config is None:
            budgets = registry.CARD_BUDGETS if device == "cuda" else {}
            config = ServingEngineConfig(scheduler=SchedulerConfig(policy=PriorityPolicy.ADAPTIVE, **budgets))
        opened = registry.open_model(model, device, options)
        return cls(opened.backend, config, seed=seed, model=opened)

    # ------------------------------------------------------------------ requests

    def submit(
        self, request: InferenceRequest, *, block: bool = False, timeout: float | None = None
    ) -> RequestId:
        """Takes a request in. Where the queue is full: QueueFullError, or with `block` a wait (of at most `timeout`
        seconds) for room, which a loop that runs elsewhere has to make."""
        return self._submit([self._sequence(request)], None, block, timeout)[0]

    def submit_with_callback(
        self,
        request: InferenceRequest,
        callback: Callback,
        *,
        block: bool = False,
        timeout: float | None = None,
    ) -> RequestId:
        """As submit; `callback` gets every token. If it raises, this request fails and no other."""
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
        """As submit, for a request that asks for `n` answers, or for those of them in `indices`: all are taken in, or none.
        Each is a request of its own from then on; the prompt they share is computed once."""
        first, *others = self._timed(request).children(self._seed_for(request), indices)
        sequence = self._sequence(first)
        siblings = [sequence.sibling(other, self._seed_for(other)) for other in others]
        return self._submit([sequence, *siblings], callback, block, timeout)

    def check(self, request: InferenceRequest) -> None:
        """Raises InvalidRequestError for a request that could never run; takes nothing in."""
        self.scheduler.check(request)
        if request.params.grammar is not None:
            self._backend.check_grammar(request.params.grammar)

    async def submit_async(self, request: InferenceRequest) -> GenerationResult:
        """Submits and waits for the result. Cancelling the task cancels the request."""
        import asyncio

        loop = asyncio.get_running_loop()
        future: asyncio.Future[GenerationResult] = loop.create_future()

        def deliver(output: TokenOutput) -> None:
            if output.is_final and not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, future, self._results[output.request_id])

        request_id = self._submit([self._sequence(request)], deliver)[0]
        try:
            return await future
        finally:
            self.cancel(request_id)

    async def stream(self, request: InferenceRequest) -> AsyncIterator[TokenOutput]:
        """Submits and yields tokens as they come. Leaving the loop early cancels the request.

        A reader more than `stream_buffer` tokens behind has its request cancelled: it never stalls the others.
        """
        import asyncio

        buffer = TokenBuffer(self.config.stream_buffer, asyncio.get_running_loop())

        def deliver(output: TokenOutput) -> None:
            if not buffer.put(output):
                reason = f"reader is gone or more than {self.config.stream_buffer} tokens behind"
                self.cancel(output.request_id, reason)

        request_id = self._submit([self._sequence(request)], deliver)[0]
        try:
            while True:
                for output in await buffer.get():
                    yield output
                    if output.is_final:
                        return
        finally:
            self.cancel(request_id)

    def cancel(self, request_id: RequestId, reason: str | None = None) -> bool:
        """Ends a request wherever it is; its memory is free within a step. False: it was over already."""
        with self._lock:
            cancelled = self.scheduler.cancel(request_id, reason)
            if cancelled:
                self._changed.notify_all()
        return cancelled

    def finish(self, request_id: RequestId, num_tokens: int) -> bool:
        """Ends a request as complete (FinishReason.STOP) after its first `num_tokens` new tokens: for who finds stop
        strings in its text. False: it was over already."""
        with self._changed:
            finished = self.scheduler.finish(request_id, num_tokens)
            if finished:
                self._changed.notify_all()
        return finished

    def is_complete(self, request_id: RequestId) -> bool:
        """Whether a request that was submitted is over. Its result may have had to make room for newer ones."""
        with self._lock:
            return 0 <= request_id < self._next_id and request_id not in self._alive

    def get_result(self, request_id: RequestId, wait: float | None = None) -> GenerationResult | None:
        """The result, or None where it is not there; `wait` up to that many seconds while it may still come."""
        with self._changed:
            if wait is not None:
                seconds = min(wait, threading.TIMEOUT_MAX)
                self._changed.wait_for(lambda: request_id not in self._alive, seconds)
            return self._results.get(request_id)

    def _sequence(self, request: InferenceRequest) -> Sequence:
        """A sequence that may run: the long part of taking a request in, done in the caller's thread."""
        request = self._timed(request)
        sequence = Sequence(request, RequestId(-1), self._seed_for(request))
        self.scheduler.prepare(sequence)
        if request.params.grammar is not None:
            self._backend.check_grammar(request.params.grammar)
        return sequence

    def _timed(self, request: InferenceRequest) -> InferenceRequest:
        """With the deadline that all requests have, where it has none of its own."""
        timeout = self.config.request_timeout
        return (
            request if timeout is None or request.deadline is not None else request.replaced(deadline=timeout)
        )

    def _submit(
        self,
        sequences: list[Sequence],
        callback: Callback | None,
        block: bool = False,
        timeout: float | None = None,
    ) -> tuple[RequestId, ...]:
        give_up_at = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                if self._stopping:
                    cause = self._failure or "the engine was stopped"
                    raise EngineStoppedError(f"{cause} and takes no more requests")
                for number, sequence in enumerate(sequences):
                    sequence.request_id = RequestId(self._next_id + number)
                try:
                    self.scheduler.add(*sequences)
                    break
                except QueueFullError:
                    left = None if give_up_at is None else give_up_at - time.monotonic()
                    # A callback must not wait: it is the loop that would make room.
                    if not block or self._is_called_back or (left is not None and left <= 0):
                        raise
                    self._changed.wait(left)
            ids = tuple(sequence.request_id for sequence in sequences)
            self._next_id += len(ids)
            self._alive.update(ids)
            if self._texts is not None:
                for sequence in sequences:
                    self._texts.begin(sequence.request_id, sequence.request.params)
            if callback is not None:
                self._callbacks.update(dict.fromkeys(ids, callback))
            self._changed.notify_all()
        return ids

    def _seed_for(self, request: InferenceRequest) -> int:
        seed = request.params.seed
        return self._seeds.getrandbits(63) if seed is None else seed

    # ------------------------------------------------------------------ the loop

    @property
    def has_work(self) -> bool:
        """Whether an iteration has something to do: a request is not over, or its end is not delivered."""
        return not self._closed and (self.scheduler.has_work or self.scheduler.has_outputs)

    def run_iteration(self) -> list[TokenOutput]:
        """One step, with what it gave delivered, and returned. A step may give nothing: `has_work` says whether there
        is more to do."""
        if self._is_called_back:
            raise RuntimeError("run_iteration was called from a callback, inside an iteration")
        with self._turn:
            if self._closed:
                return []
            self._busy_thread = threading.get_ident()
            try:
                if self.config.overlap:
                    self._core.run_overlapped()
                else:
                    self._core.run_plain()
                return self._deliver()
            except Exception as error:
                self._break_down(error)
                raise
            finally:
                self._busy_thread = None
                if self._stopping:
                    self._shut_down()

    def run(self) -> None:
        """Runs until `stop`. Uses no CPU while there is nothing to do."""
        while not self._stopping:
            self.run_iteration()
            if not self.has_work:
                with self._changed:
                    if not (self.has_work or self._stopping):
                        self._is_waiting = True
                        self._changed.wait()
                        self._is_waiting = False
        with self._turn:
            self._shut_down()

    @property
    def progress(self) -> int | None:
        """None while `run` waits for requests, else a number that changes with every step. Takes no lock: it is read
        where the loop may be stuck."""
        stats = self.scheduler.stats
        return None if self._is_waiting else stats.steps + stats.steps_failed

    def run_until_idle(self) -> None:
        """Runs until every request so far is over."""
        while self.has_work:
            self.run_iteration()

    def start(self) -> ServingEngine:
        """Runs the loop in a thread of its own."""
        if self._stopping:
            raise EngineStoppedError(
                f"{self._failure or 'the engine was stopped'} and cannot be started again"
            )
        if self._thread is None:
            self._thread = threading.Thread(target=self.run, name="weft-engine", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        """Ends the loop; what is not over is cancelled. Safe to call twice, from any thread, from a callback."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._is_called_back:
            return  # what called back shuts down when it is done
        with self._turn:
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
    def _is_called_back(self) -> bool:
        return self._busy_thread == threading.get_ident()

    def _shut_down(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._busy_thread = threading.get_ident()
        try:
            if self._failure is None:
                self._core.drain()
                with self._lock:
                    for request_id in list(self.scheduler.sequences):
                        self.scheduler.cancel(request_id, "the engine was stopped")
                self._deliver()
        except Exception as error:
            self._break_down(error)
        finally:
            self._busy_thread = None
            self._core.forget()
            self._backend.close()
            if self._recorder is not None:
                self._recorder.close()

    def _break_down(self, error: Exception) -> None:
        """A mistake inside the engine: every request is told, and none is taken any more."""
        self._failure = f"the engine failed ({type(error).__name__}: {error})"
        self._stopping = True
        with self._lock:
            self.scheduler.abandon(self._failure)
        self._deliver()

    def _deliver(self) -> list[TokenOutput]:
        """Hands out what happened. Callbacks run outside the lock; one that raises ends its own request only."""
        with self._changed:
            outputs, results = self.scheduler.take_outputs()
            if not outputs and not results:
                return outputs
            if self._texts is not None:
                outputs, results = self._texts.fill(outputs, results)
            self._figures.book(results, self._clock())
            for result in results:
                self._results[result.request_id] = result
                self._alive.discard(result.request_id)
            callbacks = self._callbacks
        for output in outputs if callbacks else ():
            callback = callbacks.get(output.request_id)
            if callback is None:
                continue
            if output.is_final:
                callbacks.pop(output.request_id, None)
            try:
                callback(output)
            except Exception as error:
                callbacks.pop(output.request_id, None)
                self._fail_for_callback(output.request_id, f"callback raised {type(error).__name__}: {error}")
        if self._after_delivery is not None:
            self._after_delivery()
        with self._changed:
            while len(self._results) > self.config.max_kept_results:
                self._results.popitem(last=False)
            self._changed.notify_all()
        return outputs

    def _fail_for_callback(self, request_id: RequestId, message: str) -> None:
        with self._lock:
            if self.scheduler.fail_request(request_id, message) or request_id not in self._results:
                return
            # It was over already: only what is told of it can change.
            result = self._results[request_id]
            self._figures.ended[result.state] -= 1
            self._figures.ended[RequestState.FAILED] += 1
            self._results[request_id] = dataclasses.replace(
                result, state=RequestState.FAILED, finish_reason=FinishReason.ERROR, error=message
            )

    # ------------------------------------------------------------------ figures

    def metrics(self) -> ServingMetrics:
        with self._lock:
            return self._figures.metrics(self._clock())

    def stats(self) -> tuple[SchedulerStats, KvCacheManagerStats]:
        with self._lock:
            return dataclasses.replace(self.scheduler.stats), self.scheduler.kv_cache.stats()


def _resolve(future: asyncio.Future[GenerationResult], result: GenerationResult) -> None:
    if not future.done():
        future.set_result(result)
