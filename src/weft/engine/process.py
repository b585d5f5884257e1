"""The engine in a process of its own: builds what the client asks for, then runs requests and reports every step.

The process talks to the client over one end of a socket pair, whose other end only the client has; when that is
closed, the process ends. One thread reads, another writes what does not fit at once, and the loop of the engine runs in
the main thread: neither a slow client nor a long message makes a step wait. Requests with a grammar, which may take
long to compile, are taken in by threads beside the reader, so that nobody waits for them.
"""

from __future__ import annotations

import dataclasses
import gc
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from weft.backends import registry
from weft.engine import wire
from weft.engine.outbox import Outbox
from weft.engine.serving import ServingEngine
from weft.errors import WeftError
from weft.request import GenerationResult, RequestId, TokenOutput

_READ_BYTES = 1 << 18
_COMPILERS = 2
_PROMPT_LOGPROBS = 64
"""Tokens of a prompt in one message."""

Order = Callable[[RequestId], object]


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
        self._compilers = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="weft-compiler")
        self._lock = threading.Lock()
        """Held where a request goes from being compiled to being taken in."""
        self._token_ids: list[int] = []
        self._tokens: list[int] = []
        self._outputs: list[wire.Output] = []
        self._ended: list[GenerationResult] = []

    def run(self) -> int:
        """Until the client is gone or says stop; the exit code."""
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
        scheduler = self._engine.scheduler
        self._outbox.send(wire.Ready(scheduler.info, scheduler.max_sequence_length))
        gc.freeze()  # what is here stays, and need not be looked through
        gc.enable()
        reader = threading.Thread(target=self._read, name="weft-reader", daemon=True)
        reader.start()
        try:
            self._engine.run()
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
                self._obey(wire.to_engine.decode(content))
        except (OSError, ValueError, msgspec.MsgspecError):
            pass  # gone, or no longer to be understood: either way there is nobody to work for
        self._engine.stop()

    def _obey(self, message: wire.ToEngine) -> None:
        if isinstance(message, wire.Submit):
            if message.request.params.grammar is None:
                self._submit(message)
            else:
                with self._lock:
                    self._compiling.update((name, []) for name in message.ids)
                self._compilers.submit(self._compile_and_submit, message)
        elif isinstance(message, wire.Cancel):
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

    def _compile_and_submit(self, message: wire.Submit) -> None:
        """In one of the threads for that."""
        try:
            self._submit(message)
        except BaseException as error:  # a panic in a library too; here nobody else would hear of it
            text = f"the grammar failed ({type(error).__name__}: {error})"
            self._outbox.send(wire.Refused(message.ids, WeftError.__name__, text))
        with self._lock:
            orders = [(name, order) for name in message.ids for order in self._compiling.pop(name)]
        for name, order in orders:
            self._do(name, order)

    def _submit(self, message: wire.Submit) -> None:
        try:
            ids = self._engine.submit_choices(message.request, self._take)
        except WeftError as error:
            field, code = getattr(error, "field", ""), getattr(error, "code", "")
            self._outbox.send(wire.Refused(message.ids, type(error).__name__, str(error), field, code))
            return
        self._ids.update(zip(message.ids, ids, strict=True))
        with self._named:
            self._names.update(zip(ids, message.ids, strict=True))
            self._named.notify_all()

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
            self._outbox.send(wire.Step(ids, tokens, tuple(self._outputs), tuple(self._ended)))
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
    connection = socket.socket(fileno=int(sys.argv[1]))
    exit_code = EngineProcess(connection).run()
    gc.unfreeze()  # what the kernels hold is given back in order, or they complain
    raise SystemExit(exit_code)


if __name__ == "__main__":
    main()
