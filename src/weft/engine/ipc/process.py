"""The engine's process: builds the engine that the client describes, then runs requests and reports every step.

The process and the client share a socket pair. The process ends when the client closes its end.

    main thread       runs the loop of the engine; sends step reports through the outbox
    reader            reads messages, submits requests, makes the frames of the live page
    writer            sends what the socket did not accept at once (`Outbox`)
    compilers         submit requests with a grammar: compiling may take long and must not delay other requests
    heartbeat         reports twice a second whether the loop and the reader make progress

A slow client or a long message delays no step: other threads wait for the socket and decode messages.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import logging
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from weft.backends import registry
from weft.engine.compile_queue import CompileQueue
from weft.engine.ipc import wire
from weft.engine.ipc.liveness import HEARTBEAT_SECONDS
from weft.engine.ipc.outbox import Outbox
from weft.engine.serving import ServingEngine
from weft.errors import WeftError, id_in_use
from weft.request import GenerationResult, InferenceRequest, RequestId, TokenOutput

_READ_BYTES = 1 << 18
_COMPILERS = 2
_PROMPT_LOGPROBS = 64
"""Prompt tokens in one message of logprobs."""


class _Warnings(logging.Handler):
    """Sends warnings of the engine to the server, which logs them."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__(logging.WARNING)
        self._outbox = outbox

    def emit(self, record: logging.LogRecord) -> None:
        self._outbox.send(wire.Warned(record.getMessage()))


class EngineProcess:
    """Owns the connection, and the handles of unfinished answers."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = wire.Frames()
        self._outbox = Outbox(connection)
        self._handles: dict[RequestId, int] = {}
        """The client's handles of unfinished answers. An answer has its handle before the engine gets its request."""
        self._compiling: dict[int, list[wire.Cancel | wire.Finish | wire.DropDeadline]] = {}
        """Handle of an answer with a grammar that is not submitted yet -> messages to handle after its submission."""
        self._to_compile = CompileQueue()
        """Of the requests in `_compiling`, those whose compilation has not started."""
        self._compilers = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="weft-compiler")
        self._lock = threading.Lock()
        """Guards `_compiling` and `_to_compile`."""
        self._token_handles: list[int] = []
        self._tokens: list[int] = []
        self._outputs: list[wire.Output] = []
        self._ended: list[GenerationResult] = []
        self._progress: Callable[[], int | None] = lambda: 0
        """Progress of the loop; constant while the engine is being built."""
        self._waits_for_device: Callable[[], bool] = lambda: False
        self._reader: threading.Thread | None = None
        self._num_read, self._is_reading = 0, False
        """Messages handled so far, and whether one is being handled now."""

    def run(self) -> int:
        """Runs until the client stops the engine or closes the connection. Returns the exit code."""
        threading.Thread(target=self._send_heartbeats, name="weft-heartbeat", daemon=True).start()
        logging.getLogger("weft").addHandler(_Warnings(self._outbox))
        try:
            start = wire.to_engine.decode(next(self._received()))
            assert isinstance(start, wire.Start), "the first message says what to build"
            backend = registry.build(start.backend, **start.options)
            # Each result is reported at once and never read again, so the engine need not keep results.
            config = dataclasses.replace(start.config, max_kept_results=1)
            self._engine = ServingEngine(backend, config, after_delivery=self._flush)
            self._engine.scheduler.tokens.keeps_logprobs = False  # the outputs have the logprobs already
        except WeftError as error:
            return self._fail(str(error), error.exit_code)
        except (Exception, StopIteration) as error:
            return self._fail(f"{type(error).__name__}: {error}", 1)
        self._progress = lambda: self._engine.progress
        self._waits_for_device = lambda: self._engine.waits_for_device
        scheduler = self._engine.scheduler
        ready = wire.Ready(scheduler.info, scheduler.max_sequence_length, self._engine.live_info())
        self._outbox.send(ready)
        gc.freeze()  # objects that exist now stay alive, so the garbage collector need not scan them
        gc.enable()
        self._reader = threading.Thread(target=self._read, name="weft-reader", daemon=True)
        self._reader.start()
        try:
            self._engine.run()
        except WeftError as error:
            return self._fail(str(error), error.exit_code)
        except Exception as error:
            return self._fail(f"{type(error).__name__}: {error}", 1)
        return self._end(0)

    # -- in the reader's thread

    def _received(self) -> Any:
        # A thread blocked in `recv` wakes up whenever the client reads from the socket; one blocked in `poll` does not.
        arrival = select.poll()
        arrival.register(self._connection, select.POLLIN)
        while arrival.poll() and (received := self._connection.recv(_READ_BYTES)):
            yield from self._frames.feed(received)

    def _read(self) -> None:
        try:
            for content in self._received():
                self._is_reading = True
                self._handle(wire.to_engine.decode(content))
                self._num_read += 1
                self._is_reading = False
        except (OSError, ValueError, msgspec.MsgspecError):
            pass  # the client has closed the connection or sends invalid data; the engine stops in both cases
        except Exception as error:  # such as out of memory: the engine cannot receive requests any more
            self._outbox.send(wire.Failed(f"the engine's reader failed ({type(error).__name__}: {error})", 1))
        self._engine.stop()

    def _handle(self, message: wire.ToEngine) -> None:
        """Handles one message of the client, in the reader thread."""
        if isinstance(message, wire.Submit):
            request = message.whole_request
            ids = [request.answer_id(index) for index in message.indices]
            if used := [request_id for request_id in ids if request_id in self._handles]:
                self._refuse(message, request, id_in_use(used[0]))
                return
            self._handles.update(zip(ids, message.handles, strict=True))
            if request.params.grammar is None:
                self._submit(message, request)
            else:
                with self._lock:
                    self._compiling.update((handle, []) for handle in message.handles)
                    self._to_compile.add(message, request)
                self._compilers.submit(self._compile_next)
        elif isinstance(message, wire.Cancel | wire.Finish | wire.DropDeadline):
            if not isinstance(message, wire.Cancel) or not self._drop(message.handle):
                self._change(message)
        elif isinstance(message, wire.GetMetrics):
            self._outbox.send(wire.Metrics(message.number, self._engine.metrics()))
        elif isinstance(message, wire.GetLive):
            self._send_frame(message.number)
        elif isinstance(message, wire.GetLearned):
            self._outbox.send(wire.Learned(message.number, self._engine.learned_costs()))
        elif isinstance(message, wire.Restore):
            self._engine.restore_costs(message.costs)
        elif isinstance(message, wire.Forget):
            self._engine.forget_learned()
        elif isinstance(message, wire.Stop):
            self._engine.stop()

    def _send_frame(self, number: int) -> None:
        """Makes a frame of the live page. The loop waits only while the snapshot is taken."""
        began = time.thread_time()
        frame = msgspec.json.encode(self._engine.live_frame())
        self._outbox.send(wire.Live(number, frame, time.thread_time() - began))

    def _change(self, message: wire.Cancel | wire.Finish | wire.DropDeadline) -> None:
        """Ends an answer or drops its deadline: now, or once it is submitted. Does nothing if it has ended."""
        with self._lock:
            if message.handle in self._compiling:
                self._compiling[message.handle].append(message)
                return
        if self._handles.get(message.request_id) != message.handle:
            return
        if isinstance(message, wire.Cancel):
            self._engine.cancel(message.request_id, message.reason)
        elif isinstance(message, wire.DropDeadline):
            self._engine.drop_deadline(message.request_id)
        else:
            self._engine.finish(message.request_id, message.num_tokens)

    def _drop(self, handle: int) -> bool:
        """Cancels an answer that waits for compilation. If its request has no other answer left, drops the request and
        returns True."""
        with self._lock:
            waiting = self._to_compile.cancel(handle)
            if waiting is None:
                return False
            message, request = waiting
            for one in message.handles:
                del self._compiling[one]
        error = WeftError("the request was cancelled before its grammar was compiled")
        self._refuse(message, request, error)
        return True

    def _compile_next(self) -> None:
        """Compiles the next grammar and submits its request. Then handles the messages that arrived for its answers. Runs in
        a compiler thread."""
        with self._lock:
            waiting = self._to_compile.take()
        if waiting is None:
            return
        message, request = waiting
        try:
            self._submit(message, request)
        except BaseException as error:  # also a panic in a library: nothing else would report it
            self._refuse(message, request, WeftError(f"the grammar failed ({type(error).__name__}: {error})"))
        with self._lock:
            deferred = [one for handle in message.handles for one in self._compiling.pop(handle)]
        for one in deferred:
            self._change(one)

    def _submit(self, message: wire.Submit, request: InferenceRequest) -> None:
        try:
            self._engine.submit_choices(request, self._take, indices=message.indices)
        except WeftError as error:
            self._refuse(message, request, error)

    def _refuse(self, message: wire.Submit, request: InferenceRequest, error: WeftError) -> None:
        """Reports an error instead of answers."""
        for index, handle in zip(message.indices, message.handles, strict=True):
            request_id = request.answer_id(index)
            # The id may belong to a later answer by now, which must keep its handle.
            if self._handles.get(request_id) == handle:
                del self._handles[request_id]
        field, code = getattr(error, "field", ""), getattr(error, "code", "")
        self._outbox.send(wire.Refused(message.handles, type(error).__name__, str(error), field, code))

    # -- in the heartbeat thread

    def _send_heartbeats(self) -> None:
        """Sends heartbeats. Must not wait for a lock of the loop or the reader: a heartbeat must arrive even if these are
        stuck."""
        own_id = threading.get_native_id()
        while True:
            reader = self._reader
            threads = (own_id, self._outbox.thread_id, *((reader.native_id or 0,) if reader else ()))
            reading = self._num_read if self._is_reading else None
            waits = self._waits_for_device()
            self._outbox.send(wire.Heartbeat(self._progress(), reading, threads, waits))
            time.sleep(HEARTBEAT_SECONDS)

    # -- in the engine's thread

    def _take(self, output: TokenOutput) -> None:
        """The callback of all requests. One closure per request was slower: each call missed the CPU cache."""
        handle = self._handles[output.request_id]
        if output.token_id is not None and output.logprob is None and not output.is_final:
            self._token_handles.append(handle)
            self._tokens.append(output.token_id)
            return
        self._outputs.append(wire.Output.of(output, handle))
        if output.is_final:
            del self._handles[output.request_id]
            result = self._engine.get_result(output.request_id)
            assert result is not None
            for start in range(0, len(result.prompt_logprobs or ()), _PROMPT_LOGPROBS):
                some = (result.prompt_logprobs or ())[start : start + _PROMPT_LOGPROBS]
                self._outbox.send(wire.PromptLogprobs(handle, wire.encode(some)))
            reported = dataclasses.replace(
                result,
                tokens=(),
                num_tokens=len(result.tokens),
                logprobs=None,
                prompt_logprobs=None,
            )
            self._ended.append(reported)

    def _flush(self) -> None:
        """Sends one report with the outputs of a step, after all its callbacks."""
        if self._tokens or self._outputs:
            handles, tokens = tuple(self._token_handles), tuple(self._tokens)
            self._outbox.send(wire.StepReport(handles, tokens, tuple(self._outputs), tuple(self._ended)))
            self._token_handles.clear()
            self._tokens.clear()
            self._outputs.clear()
            self._ended.clear()

    def _fail(self, message: str, exit_code: int) -> int:
        self._outbox.send(wire.Failed(message, exit_code))
        return self._end(exit_code)

    def _end(self, exit_code: int) -> int:
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._outbox.close(5.0)
        return exit_code


def main() -> None:
    # Ctrl-C and service managers signal the whole process group. The client gets the signal too: it drains its
    # requests, then closes the connection, which ends this process.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    descriptor, *stacks = map(int, sys.argv[1:])
    if stacks:
        faulthandler.enable(stacks[0])
        faulthandler.register(signal.SIGUSR1, stacks[0])
    connection = socket.socket(fileno=descriptor)
    exit_code = EngineProcess(connection).run()
    gc.unfreeze()  # frees the objects of the kernels at exit; else nanobind reports them as leaks
    raise SystemExit(exit_code)


if __name__ == "__main__":
    main()
