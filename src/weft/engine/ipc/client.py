"""The server's side of the engine: an asyncio client that starts the engine's process, watches it and restarts it."""

from __future__ import annotations

import asyncio
import enum
import itertools
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from weft import errors
from weft.config import ServingEngineConfig
from weft.engine.ipc import wire
from weft.engine.ipc.connection import Connection
from weft.engine.ipc.launch import LaunchedEngine, launch_engine
from weft.engine.ipc.liveness import state_of
from weft.engine.ipc.process_watch import WatchedProcess
from weft.engine.ipc.remote_answer import LateAnswer, RemoteAnswer
from weft.engine.ipc.shared_answers import SharedAnswer, SharedAnswers
from weft.engine.request_ids import new_request_id
from weft.errors import EngineStoppedError, WeftError
from weft.learned_costs import LearnedCosts
from weft.live import LiveInfo
from weft.metrics import ServingMetrics
from weft.plan import BackendInfo
from weft.request import InferenceRequest, RequestId

_RESTART_SECONDS = (0.0, 0.5, 2.0, 5.0, 10.0)
"""Delay before a restart. The index is the number of restarts since the engine last ran for a minute."""
_METRICS_SECONDS = 5.0


class EngineState(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    STOPPED = "stopped"


class EngineDiedError(WeftError):
    """The engine's process ended before the request did."""


class EngineStalledError(EngineDiedError):
    """The engine's process was stuck before the request ended."""


class EngineClient:
    """Starts the engine's process and restarts it when it dies or is stuck. Use it from one event loop only."""

    def __init__(
        self,
        backend: str,
        options: Mapping[str, Any],
        config: ServingEngineConfig,
        *,
        stall_seconds: float = 120.0,
        coalesce: bool | None = False,
        log: Callable[..., object] = lambda name, message, level="info", **fields: None,
        launched: LaunchedEngine | None = None,
        new_id: Callable[[], RequestId] = new_request_id,
    ) -> None:
        """A process that makes no progress for `stall_seconds` is replaced. `log` gets the name, message, level and
        fields of each event. `launched` is a process that was already started with the same arguments; it is used
        first. `new_id` makes the ids of requests that have none. `coalesce`: identical requests in flight share one
        sequence (`SharedAnswers`); None: if the answers of the backend do not depend on the batch."""
        self.state = EngineState.STOPPED
        self.info: BackendInfo | None = None
        self.max_sequence_length = 0
        self.live_info: LiveInfo | None = None
        self.restarts = self.stalls = 0
        self.on_progress: Callable[[], object] = lambda: None
        """Called when an answer gets its first token, when an answer ends, and when the engine becomes ready."""
        self.costs_for: Callable[[BackendInfo], LearnedCosts | None] = lambda info: None
        """Returns the costs that an engine with these properties learned earlier. Called when an engine becomes ready,
        also after a crash."""
        self._launched_at = 0.0
        self._launch_seconds: float | None = None
        self._launch_engine = partial(launch_engine, backend, dict(options), config)
        self._launched = launched
        self._capacity = config.stream_buffer
        self._stall_seconds = stall_seconds
        self._log = log
        self.new_id = new_id
        self._answers: dict[int, RemoteAnswer | SharedAnswer] = {}
        """Unfinished answers, by handle. Several answers to identical requests are one `SharedAnswer`."""
        self.shared_answers = SharedAnswers(self._answers, self._send, coalesce, config)
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[Any]] = {}
        """Number of a message that has a reply -> the future of the reply."""
        self._connection: Connection | None = None
        self._running: WatchedProcess | None = None
        self._watch: asyncio.Task[None] | None = None
        self._failure: WeftError | None = None
        """The error with which the process says that it ends (`wire.Failed`)."""

    async def start(self) -> None:
        """Starts the process and waits until it is ready. Raises if it cannot start."""
        await self._launch()
        self._watch = asyncio.create_task(self._keep_running())

    async def stop(self, timeout: float = 10.0) -> None:
        """Stops the engine. Unfinished answers are cancelled, and reading them raises EngineStoppedError. A process
        that has not ended after `timeout` seconds is killed."""
        self.state = EngineState.STOPPED
        self._send(wire.Stop())
        if self._watch is not None:
            self._watch.cancel()
        self._fail_all(EngineStoppedError("the engine was stopped before the answer was complete"))
        if self._connection is not None:
            self._connection.close()
        if self._running is not None:
            await self._running.end(timeout)

    def kill(self) -> None:
        """Kills the process without waiting for its end."""
        self.state = EngineState.STOPPED
        if self._process is not None:
            self._process.kill()

    async def submit(
        self,
        request: InferenceRequest,
        arrived: asyncio.Event | None = None,
        *,
        wake_every: int = 1,
        indices: range | None = None,
        waited: float = 0.0,
        is_unbounded: bool = False,
        may_grow: Callable[[int], bool] = lambda num_bytes: True,
    ) -> list[RemoteAnswer]:
        """Submits a request and returns one `RemoteAnswer` for each of its `n` answers, or for those in `indices`.

        All answers set `arrived`. If the engine refuses the request, reading an answer raises the error. The request
        arrived `waited` seconds ago. `is_unbounded`: a slow reader is not cancelled. `wake_every` and
        `may_grow` are passed to each `RemoteAnswer`.
        """
        if self.state is not EngineState.READY:
            raise EngineStoppedError("the engine is not ready; try again in a moment")
        indices = range(request.params.n) if indices is None else indices
        if not request.request_id:
            request = request.replaced(request_id=self.new_id())
        shared_answers = self.shared_answers
        key = shared_answers.key_of(request)
        shared = shared_answers.find(key, request.request_id)
        answers = [
            (RemoteAnswer if shared is None else LateAnswer)(
                self,
                request.answer_id(index),
                next(self._numbers) if shared is None else shared.handle,
                None if is_unbounded else self._capacity,
                arrived or asyncio.Event(),
                len(request.prompt),
                wake_every,
                may_grow,
            )
            for index in indices
        ]
        if shared is not None:
            shared_answers.join(shared, answers[0], request, waited)
            return answers
        handles = tuple(answer.handle for answer in answers)
        self._send(wire.Submit.of(handles, request, indices.start, waited))
        # Added after `_send`, which raises if the request cannot be encoded: its answers must not stay in `_answers`.
        self._answers.update(zip(handles, answers, strict=True))
        if key is not None:
            shared_answers.open(key, answers[0], request, waited)
        assert self._connection is not None
        try:
            await self._connection.drain()
        except asyncio.CancelledError:
            # The caller does not get the answers, so it cannot cancel them.
            for answer in answers:
                answer.cancel()
            raise
        return answers

    async def metrics(self) -> ServingMetrics:
        """The current metrics of the engine."""
        try:
            metrics: ServingMetrics = await asyncio.wait_for(self._ask(wire.GetMetrics), _METRICS_SECONDS)
        except TimeoutError:
            raise EngineStoppedError("the engine does not answer") from None
        return metrics

    async def learned_costs(self) -> LearnedCosts:
        """The costs of steps that the engine has learned."""
        try:
            costs: LearnedCosts = await asyncio.wait_for(self._ask(wire.GetLearned), _METRICS_SECONDS)
        except TimeoutError:
            raise EngineStoppedError("the engine does not answer") from None
        return costs

    def restore_costs(self, costs: LearnedCosts) -> None:
        """Sends learned costs to the engine. Requests that are submitted later are planned with them."""
        self._send(wire.Restore(costs))

    def forget_learned(self) -> None:
        """Makes the engine forget the costs of steps and all finished answers."""
        self._send(wire.Forget())

    async def live_frame(self) -> tuple[bytes, float]:
        """A `weft.live.LiveFrame` as JSON, and the CPU seconds that it took. Waits without limit for a silent engine,
        so that no step and no event is lost. Raises when the engine's process ends."""
        live: wire.Live = await self._ask(wire.GetLive)
        return live.frame, live.seconds

    async def _ask(self, question: Callable[[int], wire.Message]) -> Any:
        """Sends a message with a number, and returns the reply."""
        if not self.is_responding:
            raise EngineStoppedError("the engine is not ready; try again in a moment")
        number = next(self._numbers)
        future = self._replies[number] = asyncio.get_running_loop().create_future()
        self._send(question(number))
        try:
            return await future
        finally:
            self._replies.pop(number, None)

    @property
    def is_responding(self) -> bool:
        """Whether the engine is ready, and its process made progress within the last 2 s."""
        running = self._running
        return self.state is EngineState.READY and running is not None and not running.liveness.is_silent

    @property
    def shown_state(self) -> str:
        """The state that `/health` and `/ready` show."""
        is_silent = self.state is EngineState.READY and not self.is_responding
        return "not responding" if is_silent else self.state.value

    @property
    def num_unfinished(self) -> int:
        return len(self._answers)

    @property
    def num_without_tokens(self) -> int:
        """Unfinished answers that have no token yet."""
        return sum(not answer.num_tokens for answer in self._answers.values())

    @property
    def seconds_until_ready(self) -> float:
        """Estimates the rest of this start: the duration of the last start minus the time since this one began. 0 if there
        was no start before, or if this one already takes longer."""
        if self._launch_seconds is None:
            return 0.0
        return max(0.0, self._launched_at + self._launch_seconds - asyncio.get_running_loop().time())

    # ------------------------------------------------------------------ the process

    @property
    def _process(self) -> subprocess.Popen[bytes] | None:
        """The newest process. Before `start` it is the one that was already started, if any."""
        owner = self._launched or self._running
        return None if owner is None else owner.process

    async def _launch(self) -> None:
        """Starts a process and waits until it reports that it is ready or has failed."""
        loop = asyncio.get_running_loop()
        self.state = EngineState.STARTING
        self._launched_at = loop.time()
        launched, self._launched = self._launched or self._launch_engine(), None
        self._running = running = WatchedProcess(launched, self._stall_seconds)
        self._failure = None
        try:
            connection = Connection(self._take, tokens_per_turn=max(1, self._capacity // 2))
            await connection.open(launched.connection)
            self._connection = connection
            if not await running.is_alive_until(connection.first_message):
                raise EngineStalledError("the engine's process was stuck while it started")
            if self.state is not EngineState.READY:
                raise self._failure or EngineDiedError("the engine's process ended before it was ready")
        except Exception as error:
            details = await self._end_process(running, error)
            launched.connection.close()
            if "traceback" in details:
                self._log("engine_died", f"The engine did not start: {error}.", "error", **details)
            raise
        running.liveness.is_started = True
        self._launch_seconds = loop.time() - self._launched_at

    async def _keep_running(self) -> None:
        """Supervises the process: when it ends or is stuck, fails its requests and starts another.

        Retries without limit: a shortage that prevents a start (of memory, descriptors, processes) may end before the
        next try.
        """
        loop = asyncio.get_running_loop()
        tries, began = 0, loop.time()
        while True:
            try:
                if self.state is EngineState.READY:
                    await self._supervise()
                    tries = 0 if loop.time() - began > 60 else tries + 1
                await asyncio.sleep(_restart_seconds(tries))
                self.restarts += 1
                await self._launch()
                began = loop.time()
                self._log("engine_restarted", "The engine is ready again.", restarts=self.restarts)
            except Exception as error:
                self.state = EngineState.STARTING
                if self._connection is not None:
                    self._connection.abort()
                self._fail_all(EngineDiedError("the engine's process died"))
                if self._process is not None:
                    self._process.kill()
                tries += 1
                pause = _restart_seconds(tries)
                message = f"The engine could not be started ({type(error).__name__}: {error}). Next try in {pause:g} s."
                self._log("engine_restart_failed", message, "error", tries=tries)

    async def _supervise(self) -> None:
        """Waits until the process ends or is stuck, then fails its requests."""
        connection, running = self._connection, self._running
        assert connection is not None and running is not None
        is_stuck = not await running.is_alive_until(connection.closed)
        self._launched_at = asyncio.get_running_loop().time()
        self.state = EngineState.STARTING
        connection.abort()
        error = self._failure or EngineDiedError("the engine's process died")
        if is_stuck:
            self.stalls += 1
            error = EngineStalledError("the engine was stuck and is being restarted; try again in a moment")
        self._fail_all(error)
        details = await self._end_process(running, error)
        cause = f"made no progress for {self._stall_seconds:g} s" if is_stuck else f"ended ({error})"
        message = f"The engine {cause}. Its requests got an error, and it is being restarted."
        self._log("engine_stalled" if is_stuck else "engine_died", message, "error", **details)

    async def _end_process(self, running: WatchedProcess, error: Exception) -> dict[str, Any]:
        """Ends a process that failed with `error`. Returns fields for the log: exit code, process state, stack
        traces."""
        details: dict[str, Any] = {}
        timeout = 1.0
        if self._connection is not None:
            self._connection.abort()  # a stopped process may be resumed; it must not report steps then
        if isinstance(error, EngineStalledError):
            details["process_state"], timeout = state_of(running.process.pid), 0.0
            await running.dump_stacks()
        if stacks := await running.end(timeout):
            details["traceback"] = stacks
        return {"exit_code": running.process.returncode, **details}

    # ------------------------------------------------------------------ messages

    def _send(self, message: wire.Message) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def _cancel(self, answer: RemoteAnswer, reason: str | None) -> None:
        if answer.handle in self._answers:
            self.shared_answers.cancel(answer, reason)

    def _finish(self, answer: RemoteAnswer, num_tokens: int) -> None:
        self.shared_answers.finish(answer, num_tokens)

    def _take(self, message: wire.FromEngine) -> None:
        """Handles one message of the engine's process."""
        if isinstance(message, wire.StepReport):
            if self._running is not None:
                self._running.liveness.on_step()
            self._take_step(message)
        elif isinstance(message, wire.Heartbeat):
            if self._running is not None:
                self._running.liveness.on_heartbeat(message)
        elif isinstance(message, wire.PromptLogprobs):
            answer = self._answers[message.handle]
            assert isinstance(answer, RemoteAnswer), "requests with prompt_logprobs share no sequence"
            answer.put_prompt_logprobs(message.encoded)
        elif isinstance(message, wire.Refused):
            for handle in message.handles:
                self._answers.pop(handle).fail(_refusal(message))
                self.shared_answers.close(handle)
            self.on_progress()
        elif isinstance(message, wire.Metrics):
            self._reply(message.number, message.metrics)
        elif isinstance(message, wire.Learned):
            self._reply(message.number, message.costs)
        elif isinstance(message, wire.Live):
            self._reply(message.number, message)
        elif isinstance(message, wire.Ready):
            self.info, self.max_sequence_length = message.info, message.max_sequence_length
            self.live_info = message.live
            if (costs := self.costs_for(message.info)) is not None:
                self.restore_costs(costs)
            self.shared_answers.on_ready(message.info)
            self.state = EngineState.READY
            self.on_progress()
        elif isinstance(message, wire.Warned):
            self._log("warning", message.message, "warning")
        else:
            self._failure = EngineDiedError(message.message)
            self._failure.exit_code = message.exit_code
            if self.state is EngineState.READY and self._connection is not None:
                self._connection.abort()  # Failed is the last message; do not wait for the end of the process

    def _reply(self, number: int, content: object) -> None:
        future = self._replies.get(number)
        if future is not None and not future.done():
            future.set_result(content)

    def _take_step(self, step: wire.StepReport) -> None:
        """Gives the outputs of a step to their answers. An output that ends an answer comes with its result."""
        answers = self._answers
        has_first_token = False
        for handle, token in zip(step.handles, step.tokens, strict=True):
            if answers[handle].put_token(token):
                has_first_token = True
        results = iter(step.ended)
        for output in step.outputs:
            answer = answers[output.handle]
            has_first_token = answer.put(output) or has_first_token
            if output.finish_reason is not None:
                answer.end(next(results))
                del answers[output.handle]
                self.shared_answers.close(output.handle)
        if has_first_token or step.ended:
            self.on_progress()

    def _fail_all(self, error: WeftError) -> None:
        answers = list(self._answers.values())
        self._answers.clear()
        for answer in answers:
            answer.fail(error)
        self.shared_answers.clear()
        for future in self._replies.values():
            if not future.done():
                future.set_exception(error)
        self.on_progress()


def _restart_seconds(tries: int) -> float:
    return _RESTART_SECONDS[min(tries, len(_RESTART_SECONDS) - 1)]


def _refusal(message: wire.Refused) -> WeftError:
    kind = getattr(errors, message.kind, WeftError)
    if kind is errors.InvalidRequestError:
        return errors.InvalidRequestError(message.message, field=message.field, code=message.code)
    error: WeftError = kind(message.message)
    return error
