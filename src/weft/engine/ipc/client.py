"""The engine as the server sees it: an asyncio client of the engine's process, which it starts, watches and restarts."""

from __future__ import annotations

import asyncio
import copy
import enum
import itertools
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from weft import errors
from weft.config import ServingEngineConfig
from weft.engine.ipc import wire
from weft.engine.ipc.connection import Connection
from weft.engine.ipc.launch import LaunchedEngine, launch_engine
from weft.engine.ipc.liveness import state_of
from weft.engine.ipc.process_watch import WatchedProcess
from weft.errors import EngineStoppedError, WeftError
from weft.metrics import ServingMetrics
from weft.plan import BackendInfo
from weft.request import GenerationResult, InferenceRequest, RequestId, TokenLogprobs, TokenOutput

_RESTART_SECONDS = (0.0, 0.5, 2.0, 5.0, 10.0)
"""Waits before a restart, by how many there were since the engine last ran for a minute."""
_METRICS_SECONDS = 5.0
_OUTPUT_BYTES = 160
"""What a `wire.Output` takes in memory beside its encoded logprobs."""


Unread = int | wire.Output
"""A token without logprobs is its id alone: hundreds of thousands of objects would keep the garbage collector busy for a
tenth of a second at a time."""


class EngineState(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    STOPPED = "stopped"


class EngineDiedError(WeftError):
    """The engine's process ended while it had the request."""


class EngineStalledError(EngineDiedError):
    """The engine's process was stuck while it had the request."""


class SlowReaderError(WeftError):
    """Whoever reads an answer fell too far behind, and it was cancelled."""


class RemoteAnswer:
    """One answer under way: the outputs that arrived and were not read yet. What was read is not kept."""

    def __init__(
        self,
        client: EngineClient,
        answer_id: int,
        capacity: int | None,
        arrived: asyncio.Event,
        prompt_length: int,
        wake_every: int = 1,
        may_grow: Callable[[int], bool] = lambda num_bytes: True,
    ) -> None:
        """`capacity` is how many tokens may be unread; None: any number. `may_grow` is called with the bytes of each output
        that arrives, and with a negative number when outputs are taken. When it returns False, the answer is lost."""
        self.id = answer_id
        self.result: GenerationResult | None = None
        """Known once the final output can be read. It has no tokens, no text and no logprobs."""
        self.num_tokens = 0
        """Those that arrived, read or not."""
        self._prompt_logprobs: list[bytes] = []
        self.arrived = arrived
        """Set when there is something to take: the first token, as many as `wake_every` of them, the end. May be shared
        by answers that are read together."""
        self._client = client
        self._capacity = capacity
        self._wake_every = wake_every if capacity is None else min(wake_every, max(1, capacity // 2))
        self._may_grow = may_grow
        self._unread: list[Unread] = []
        self._length = prompt_length
        """Of the sequence, with what was read."""
        self._failure: WeftError | None = None

    @property
    def has_news(self) -> bool:
        """Whether there is something to take, or to raise."""
        return bool(self._unread) or self._failure is not None

    def check(self) -> None:
        """Raises what kept the request from going on: a copy, since an error that was raised holds all it went through."""
        if self._failure is not None:
            raise copy.copy(self._failure)

    def take(self, most: int | None = None) -> list[TokenOutput]:
        """The outputs that arrived since the last call, the oldest `most` of them; the rest can be taken at once.
        Raises what kept the request from going on."""
        return [self._output(unread) for unread in self.take_plainly(most)]

    def take_plainly(self, most: int | None = None) -> list[Unread]:
        """As `take`, at a fraction of the cost."""
        self.check()
        taken, self._unread = self._unread, []
        if most is not None and len(taken) > most:
            taken, self._unread = taken[:most], taken[most:]
            self.arrived.set()
        if taken and not isinstance(taken[-1], int):
            self._may_grow(-sum(map(_size, taken)))
        return taken

    def prompt_logprobs(self) -> Iterator[Sequence[TokenLogprobs | None]]:
        """Those of all tokens of the prompt, some tokens at a time; complete once there is a result."""
        return map(wire.prompt_logprobs.decode, self._prompt_logprobs)

    def _output(self, unread: Unread) -> TokenOutput:
        if isinstance(unread, int):
            self._length += 1
            return TokenOutput(RequestId(self.id), unread, "", None, False, None, self._length)
        self._length += unread.token_id is not None
        return unread.as_token_output(self._length)

    async def read(self) -> list[TokenOutput]:
        """As `take`, and waits for at least one."""
        while not (outputs := self.take()):
            self.arrived.clear()
            await self.arrived.wait()
        return outputs

    def __aiter__(self) -> AsyncIterator[list[TokenOutput]]:
        return self._outputs()

    async def _outputs(self) -> AsyncIterator[list[TokenOutput]]:
        while True:
            outputs = await self.read()
            yield outputs
            if outputs[-1].is_final:
                return

    def finish(self, num_tokens: int) -> None:
        """A stop was found in the text: the answer is complete after its first `num_tokens` tokens."""
        self._client._send(wire.Finish(self.id, num_tokens))

    def cancel(self, reason: str | None = None) -> None:
        """Ends it wherever it is; nothing happens to one that is over."""
        self._client._cancel(self, reason)

    # -- called by the client

    def put_token(self, token: int) -> bool:
        """A token that is no more than that. Whether it is the first."""
        unread, capacity = self._unread, self._capacity
        if self._failure is not None or (capacity is not None and len(unread) >= capacity):
            self._overflow()
            return False
        unread.append(token)
        self.num_tokens += 1
        is_first = self.num_tokens == 1
        if is_first or len(unread) >= self._wake_every:
            self.arrived.set()
        return is_first

    def put(self, output: wire.Output) -> bool:
        """An output that says more than its token. Whether that is the first."""
        unread, capacity = self._unread, self._capacity
        if self._failure is not None or (capacity is not None and len(unread) >= capacity):
            self._overflow()
            return False
        if not self._may_grow(_size(output)):
            self._lose(WeftError("the answer needs more memory than it may have"), "too large")
            return False
        unread.append(output)
        self.num_tokens += output.token_id is not None
        is_first = self.num_tokens == 1
        if is_first or output.finish_reason is not None or len(unread) >= self._wake_every:
            self.arrived.set()
        return is_first

    def put_prompt_logprobs(self, encoded: bytes) -> None:
        self._prompt_logprobs.append(encoded)
        self._may_grow(len(encoded))

    def _overflow(self) -> None:
        self._lose(SlowReaderError(f"the reader is more than {self._capacity} tokens behind"), "slow reader")

    def _lose(self, error: WeftError, reason: str) -> None:
        """What is missing from the text cannot be made good: the answer is lost, its memory is not."""
        if self._failure is None:
            self._may_grow(-sum(map(_size, self._unread)))
            self._unread.clear()
            self.fail(error)
            self.cancel(reason)

    def fail(self, error: WeftError) -> None:
        if self._failure is None:
            self._failure = error
        self.arrived.set()


class EngineClient:
    """Starts the engine's process and keeps one running. Belongs to one event loop."""

    def __init__(
        self,
        backend: str,
        options: Mapping[str, Any],
        config: ServingEngineConfig,
        *,
        stall_seconds: float = 120.0,
        log: Callable[..., object] = lambda name, message, level="info", **fields: None,
        launched: LaunchedEngine | None = None,
    ) -> None:
        """A process without a sign of life for `stall_seconds` is replaced. `log` gets an event's name, message, level
        and fields. `launched` is a process that was started with the same arguments and becomes the first."""
        self.state = EngineState.STOPPED
        self.info: BackendInfo | None = None
        self.max_sequence_length = 0
        self.restarts = self.stalls = 0
        self.on_progress: Callable[[], object] = lambda: None
        """Called when an answer began or ended, and when the engine is ready."""
        self._launched_at = 0.0
        self._launch_seconds: float | None = None
        self._launch_engine = partial(launch_engine, backend, dict(options), config)
        self._launched = launched
        self._capacity = config.stream_buffer
        self._stall_seconds = stall_seconds
        self._log = log
        self._answers: dict[int, RemoteAnswer] = {}
        self._numbers = itertools.count()
        self._metrics: dict[int, asyncio.Future[ServingMetrics]] = {}
        self._connection: Connection | None = None
        self._running: WatchedProcess | None = None
        self._watch: asyncio.Task[None] | None = None
        self._failure: WeftError | None = None

    async def start(self) -> None:
        """Starts the process and waits until it is ready; raises what keeps it from that."""
        await self._launch()
        self._watch = asyncio.create_task(self._keep_running())

    async def stop(self, patience: float = 10.0) -> None:
        """Stops the engine; what is under way is cancelled, and whoever reads it told."""
        self.state = EngineState.STOPPED
        self._send(wire.Stop())
        if self._watch is not None:
            self._watch.cancel()
        self._fail_all(EngineStoppedError("the engine was stopped before the answer was complete"))
        if self._connection is not None:
            self._connection.close()
        if self._running is not None:
            await self._running.end(patience)

    def kill(self) -> None:
        """Ends the process at once; for who has no time left to wait."""
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
        may_fall_behind: bool = False,
        may_grow: Callable[[int], bool] = lambda num_bytes: True,
    ) -> list[RemoteAnswer]:
        """One answer for each of the request's `n`, or for those in `indices`, all of which set `arrived`: for its first
        token, then for every so many, and at its end. A refusal is raised when one is first read. The request arrived
        `waited` seconds ago. `may_fall_behind`: a reader that does is not cancelled. `may_grow` is that of each `RemoteAnswer`."""
        if self.state is not EngineState.READY:
            raise EngineStoppedError("the engine is not ready; try again in a moment")
        indices = range(request.params.n) if indices is None else indices
        answers = [
            RemoteAnswer(
                self,
                next(self._numbers),
                None if may_fall_behind else self._capacity,
                arrived or asyncio.Event(),
                len(request.prompt),
                wake_every,
                may_grow,
            )
            for _ in indices
        ]
        ids = tuple(answer.id for answer in answers)
        self._send(wire.Submit.of(ids, request, indices.start, waited))
        # After it was sent: what cannot be written down is raised, and leaves nothing behind.
        self._answers.update({answer.id: answer for answer in answers})
        assert self._connection is not None
        try:
            await self._connection.drain()
        except asyncio.CancelledError:
            for answer in answers:  # nobody will have a hold on them
                answer.cancel()
            raise
        return answers

    async def metrics(self) -> ServingMetrics:
        """The engine's figures of this moment."""
        if not self.is_responding:
            raise EngineStoppedError("the engine is not ready; try again in a moment")
        number = next(self._numbers)
        future = self._metrics[number] = asyncio.get_running_loop().create_future()
        self._send(wire.AskMetrics(number))
        try:
            return await asyncio.wait_for(future, _METRICS_SECONDS)
        except TimeoutError:
            raise EngineStoppedError("the engine does not answer") from None
        finally:
            self._metrics.pop(number, None)

    @property
    def is_responding(self) -> bool:
        """Whether it is ready, and its process showed within the last 2 s that it works."""
        running = self._running
        return self.state is EngineState.READY and running is not None and not running.liveness.is_silent

    @property
    def num_under_way(self) -> int:
        return len(self._answers)

    @property
    def num_not_begun(self) -> int:
        """Answers under way that have no token yet."""
        return sum(not answer.num_tokens for answer in self._answers.values())

    @property
    def seconds_until_ready(self) -> float:
        """A guess, from how long the last start took; 0 where none was measured, or this one takes longer."""
        if self._launch_seconds is None:
            return 0.0
        return max(0.0, self._launched_at + self._launch_seconds - asyncio.get_running_loop().time())

    # ------------------------------------------------------------------ the process

    @property
    def _process(self) -> subprocess.Popen[bytes] | None:
        owner = self._launched or self._running
        return None if owner is None else owner.process

    async def _launch(self) -> None:
        """Starts a process and waits for its first word."""
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
            if not await running.is_alive_until(connection.heard):
                raise EngineStalledError("the engine's process was stuck while it started")
            if self.state is not EngineState.READY:
                raise self._failure or EngineDiedError("the engine's process ended before it was ready")
        except Exception as error:
            known = await self._bury(running, error)
            launched.connection.close()
            if "traceback" in known:
                self._log("engine_died", f"The engine did not start: {error}.", "error", **known)
            raise
        running.liveness.is_started = True
        self._launch_seconds = loop.time() - self._launched_at

    async def _keep_running(self) -> None:
        """Waits until the process ends or is stuck, fails its requests, and starts another, for ever: what keeps one from
        starting (no memory, no descriptors, no processes) may be over at the next try."""
        loop = asyncio.get_running_loop()
        tries, began = 0, loop.time()
        while True:
            try:
                if self.state is EngineState.READY:
                    await self._until_over()
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
                said = f"The engine could not be started ({type(error).__name__}: {error})"
                self._log(
                    "engine_restart_failed", f"{said}; tried again in {pause:g} s.", "error", tries=tries
                )

    async def _until_over(self) -> None:
        """Waits until the process ends or is stuck, then fails its requests."""
        connection, running = self._connection, self._running
        assert connection is not None and running is not None
        is_stuck = not await running.is_alive_until(connection.gone)
        self._launched_at = asyncio.get_running_loop().time()
        self.state = EngineState.STARTING
        connection.abort()
        error = self._failure or EngineDiedError("the engine's process died")
        if is_stuck:
            self.stalls += 1
            error = EngineStalledError("the engine was stuck, and another is started; try again in a moment")
        self._fail_all(error)
        known = await self._bury(running, error)
        why = f"showed no sign of life for {self._stall_seconds:g} s" if is_stuck else f"ended ({error})"
        said = f"The engine {why}. Its requests got an error, and another is started."
        self._log("engine_stalled" if is_stuck else "engine_died", said, "error", **known)

    async def _bury(self, running: WatchedProcess, error: Exception) -> dict[str, Any]:
        """Ends a process that is over for this reason. Returns what is known of its end."""
        known: dict[str, Any] = {}
        patience = 1.0
        if self._connection is not None:
            self._connection.abort()  # a stopped process that is woken must not report steps any more
        if isinstance(error, EngineStalledError):
            known["process_state"], patience = state_of(running.process.pid), 0.0
            await running.dump_stacks()
        if stacks := await running.end(patience):
            known["traceback"] = stacks
        return {"exit_code": running.process.returncode, **known}

    # ------------------------------------------------------------------ messages

    def _send(self, message: wire.Message) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def _cancel(self, answer: RemoteAnswer, reason: str | None) -> None:
        if answer.id in self._answers:
            self._send(wire.Cancel(answer.id, reason))

    def _take(self, message: wire.FromEngine) -> None:
        if isinstance(message, wire.StepReport):
            if self._running is not None:
                self._running.liveness.moved()
            self._take_step(message)
        elif isinstance(message, wire.Beat):
            if self._running is not None:
                self._running.liveness.hear(message)
        elif isinstance(message, wire.PromptLogprobs):
            self._answers[message.id].put_prompt_logprobs(message.encoded)
        elif isinstance(message, wire.Refused):
            for answer_id in message.ids:
                self._answers.pop(answer_id).fail(_refusal(message))
            self.on_progress()
        elif isinstance(message, wire.Metrics):
            future = self._metrics.get(message.number)
            if future is not None and not future.done():
                future.set_result(message.metrics)
        elif isinstance(message, wire.Ready):
            self.info, self.max_sequence_length = message.info, message.max_sequence_length
            self.state = EngineState.READY
            self.on_progress()
        elif isinstance(message, wire.Warned):
            self._log("warning", message.message, "warning")
        else:
            self._failure = EngineDiedError(message.message)
            self._failure.exit_code = message.exit_code
            if self.state is EngineState.READY and self._connection is not None:
                self._connection.abort()  # its last message: its end is not waited for

    def _take_step(self, step: wire.StepReport) -> None:
        answers = self._answers
        has_begun = False
        for answer_id, token in zip(step.ids, step.tokens, strict=True):
            if answers[answer_id].put_token(token):
                has_begun = True
        ended: dict[int, GenerationResult] = {result.request_id: result for result in step.ended}
        for output in step.outputs:
            answer = answers[output.request_id]
            has_begun = answer.put(output) or has_begun
            if output.finish_reason is not None:
                answer.result = ended[output.request_id]
                del answers[output.request_id]
        if has_begun or ended:
            self.on_progress()

    def _fail_all(self, error: WeftError) -> None:
        answers = list(self._answers.values())
        self._answers.clear()
        for answer in answers:
            answer.fail(error)
        for future in self._metrics.values():
            if not future.done():
                future.set_exception(error)
        self.on_progress()


def _restart_seconds(tries: int) -> float:
    return _RESTART_SECONDS[min(tries, len(_RESTART_SECONDS) - 1)]


def _size(unread: Unread) -> int:
    return 0 if isinstance(unread, int) else _OUTPUT_BYTES + len(unread.encoded_top)


def _refusal(message: wire.Refused) -> WeftError:
    kind = getattr(errors, message.kind, WeftError)
    if kind is errors.InvalidRequestError:
        return errors.InvalidRequestError(message.message, field=message.field, code=message.code)
    error: WeftError = kind(message.message)
    return error
