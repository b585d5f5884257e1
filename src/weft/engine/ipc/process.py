"""The engine in a process of its own: builds what the client asks for, then runs requests and reports every step.

The process talks to the client over one end of a socket pair, whose other end only the client has; when that is
closed, the process ends. One thread reads, another writes what does not fit at once, and the loop of the engine runs in
the main thread: neither a slow client nor a long message makes a step wait. Requests with a grammar, which may take
long to compile, are taken in by threads beside the reader, so that no other request waits for them. One more thread sends a
beat twice a second: whether loop and reader make progress.
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
from weft.engine.ipc.liveness import BEAT_SECONDS
from weft.engine.ipc.outbox import Outbox
from weft.engine.serving import ServingEngine
from weft.errors import WeftError
from weft.request import GenerationResult, InferenceRequest, RequestId, TokenOutput

_READ_BYTES = 1 << 18
_COMPILERS = 2
_PROMPT_LOGPROBS = 64
"""Tokens of a prompt in one message."""

Order = Callable[[RequestId], object]


class _Warnings(logging.Handler):
    """Sends warnings of the engine to the server, for its log."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__(logging.WARNING)
        self._outbox = outbox

    def emit(self, record: logging.LogRecord) -> None:
        self._outbox.send(wire.Warned(record.getMessage()))


class EngineProcess:
    """Owns the connection and the names that the client gave to requests."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = wire.Frames()
        self._outbox = Outbox(connection)
        self._ids: dict[int, RequestId] = {}
        """Of what is not over, by the client's names."""
        self._names: dict[RequestId, int] = {}
        """The other way round."""
        self._named = threading.Condition()
        self._compiling: dict[int, list[Order]] = {}
        """Requests that are not taken in yet, by the client's names, and what is to be done with each once it is."""
        self._to_compile = CompileQueue()
        """Those of them that are not being compiled either."""
        self._compilers = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="weft-compiler")
        self._lock = threading.Lock()
        """Held where a request goes from being compiled to being taken in."""
        self._token_ids: list[int] = []
        self._tokens: list[int] = []
        self._outputs: list[wire.Output] = []
        self._ended: list[GenerationResult] = []
        self._progress: Callable[[], int | None] = lambda: 0
        """That of the loop; while the engine is built there is none."""
        self._reader: threading.Thread | None = None
        self._num_read, self._is_reading = 0, False
        """Messages, and whether one is being worked on."""

    def run(self) -> int:
        """Until the client is gone or says stop; the exit code."""
        threading.Thread(target=self._beat, name="weft-pulse", daemon=True).start()
        logging.getLogger("weft").addHandler(_Warnings(self._outbox))
        try:
            start = wire.to_engine.decode(next(self._received()))
            assert isinstance(start, wire.Start), "the first message says what to build"
            backend = registry.build(start.backend, **start.options)
            # A result is told as soon as it is there; nobody asks for it a second time.
            config = dataclasses.replace(start.config, max_kept_results=1)
            self._engine = ServingEngine(backend, config, after_delivery=self._flush)
            self._engine.scheduler.keeps_logprobs = False  # outputs have them
        except WeftError as error:
            return self._fail(str(error), error.exit_code)
        except (Exception, StopIteration) as error:
            return self._fail(f"{type(error).__name__}: {error}", 1)
        self._progress = lambda: self._engine.progress
        scheduler = self._engine.scheduler
        self._outbox.send(wire.Ready(scheduler.info, scheduler.max_sequence_length))
        gc.freeze()  # what is here stays, and need not be looked through
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
        # A thread that sleeps in `recv` is woken for nothing whenever the client takes something in; one in `poll` is not.
        arrival = select.poll()
        arrival.register(self._connection, select.POLLIN)
        while arrival.poll() and (received := self._connection.recv(_READ_BYTES)):
            yield from self._frames.feed(received)

    def _read(self) -> None:
        try:
            for content in self._received():
                self._is_reading = True
                self._obey(wire.to_engine.decode(content))
                self._num_read += 1
                self._is_reading = False
        except (OSError, ValueError, msgspec.MsgspecError):
            pass  # gone, or no longer to be understood: either way there is nobody to work for
        except Exception as error:  # no memory, no thread: an engine that cannot be reached is of no use
            self._outbox.send(wire.Failed(f"the engine's reader failed ({type(error).__name__}: {error})", 1))
        self._engine.stop()

    def _obey(self, message: wire.ToEngine) -> None:
        if isinstance(message, wire.Submit):
            request = message.whole_request
            if request.params.grammar is None:
                self._submit(message, request)
            else:
                with self._lock:
                    self._compiling.update((name, []) for name in message.ids)
                    self._to_compile.add(message, request)
                self._compilers.submit(self._compile_next)
        elif isinstance(message, wire.Cancel):
            if self._drop(message.id):
                return
            reason = message.reason
            self._do(message.id, lambda request_id: self._engine.cancel(request_id, reason))
        elif isinstance(message, wire.Finish):
            num_tokens = message.num_tokens
            self._do(message.id, lambda request_id: self._engine.finish(request_id, num_tokens))
        elif isinstance(message, wire.AskMetrics):
            self._outbox.send(wire.Metrics(message.number, self._engine.metrics()))
        elif isinstance(message, wire.Stop):
            self._engine.stop()

    def _do(self, name: int, order: Order) -> None:
        """At once; or, with a request that is not taken in yet, when it is. Nothing, with one that is over."""
        with self._lock:
            if name in self._compiling:
                self._compiling[name].append(order)
                return
        if (request_id := self._ids.get(name)) is not None:
            order(request_id)

    def _drop(self, name: int) -> bool:
        """Whether all answers of a request are cancelled before its grammar is compiled; then it is dropped."""
        with self._lock:
            message = self._to_compile.cancel(name)
            if message is None:
                return False
            for one in message.ids:
                del self._compiling[one]
        text = "the request was cancelled before its grammar was compiled"
        self._outbox.send(wire.Refused(message.ids, WeftError.__name__, text))
        return True

    def _compile_next(self) -> None:
        """In one of the threads for that."""
        with self._lock:
            waiting = self._to_compile.take()
        if waiting is None:
            return
        message, request = waiting
        try:
            self._submit(message, request)
        except BaseException as error:  # a panic in a library too; here nobody else would hear of it
            text = f"the grammar failed ({type(error).__name__}: {error})"
            self._outbox.send(wire.Refused(message.ids, WeftError.__name__, text))
        with self._lock:
            orders = [(name, order) for name in message.ids for order in self._compiling.pop(name)]
        for name, order in orders:
            self._do(name, order)

    def _submit(self, message: wire.Submit, request: InferenceRequest) -> None:
        indices = range(message.first, message.first + len(message.ids))
        try:
            ids = self._engine.submit_choices(request, self._take, indices=indices)
        except WeftError as error:
            field, code = getattr(error, "field", ""), getattr(error, "code", "")
            self._outbox.send(wire.Refused(message.ids, type(error).__name__, str(error), field, code))
            return
        self._ids.update(zip(message.ids, ids, strict=True))
        with self._named:
            self._names.update(zip(ids, message.ids, strict=True))
            self._named.notify_all()

    # -- in a thread of its own

    def _beat(self) -> None:
        """Sends beats. Waits for no lock that the loop or the reader may hold."""
        own_id = threading.get_native_id()
        while True:
            reader = self._reader
            threads = (own_id, self._outbox.thread_id, *((reader.native_id or 0,) if reader else ()))
            reading = self._num_read if self._is_reading else None
            self._outbox.send(wire.Beat(self._progress(), reading, threads))
            time.sleep(BEAT_SECONDS)

    # -- in the engine's thread

    def _take(self, output: TokenOutput) -> None:
        """The same for all requests: with something of its own each, most of the time went into fetching it from memory."""
        name = self._names.get(output.request_id)
        if name is None:
            name = self._await_name(output.request_id)
        if output.token_id is not None and output.logprob is None and not output.is_final:
            self._token_ids.append(name)
            self._tokens.append(output.token_id)
            return
        self._outputs.append(wire.Output.of(output, name))
        if output.is_final:
            del self._ids[name], self._names[output.request_id]
            result = self._engine.get_result(output.request_id)
            assert result is not None
            for start in range(0, len(result.prompt_logprobs or ()), _PROMPT_LOGPROBS):
                some = (result.prompt_logprobs or ())[start : start + _PROMPT_LOGPROBS]
                self._outbox.send(wire.PromptLogprobs(name, wire.encode(some)))
            told = dataclasses.replace(
                result,
                request_id=RequestId(name),
                tokens=(),
                num_tokens=len(result.tokens),
                logprobs=None,
                prompt_logprobs=None,
            )
            self._ended.append(told)

    def _await_name(self, request_id: RequestId) -> int:
        """The first token may be quicker than the line that notes the name."""
        with self._named:
            self._named.wait_for(lambda: request_id in self._names)
            return self._names[request_id]

    def _flush(self) -> None:
        if self._tokens or self._outputs:
            ids, tokens = tuple(self._token_ids), tuple(self._tokens)
            self._outbox.send(wire.StepReport(ids, tokens, tuple(self._outputs), tuple(self._ended)))
            self._token_ids.clear()
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
    # Ctrl-C in a terminal, and a service manager that ends a whole group, reach the client too: it decides when to
    # stop, after what is under way has ended, and closing the connection is how it says so.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    descriptor, *stacks = map(int, sys.argv[1:])
    if stacks:
        faulthandler.enable(stacks[0])
        faulthandler.register(signal.SIGUSR1, stacks[0])
    connection = socket.socket(fileno=descriptor)
    exit_code = EngineProcess(connection).run()
    gc.unfreeze()  # what the kernels hold is given back in order, or they complain
    raise SystemExit(exit_code)


if __name__ == "__main__":
    main()
