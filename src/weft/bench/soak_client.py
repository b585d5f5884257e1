"""The clients of a soak test: each sends one request after another, behaves well or badly, and checks every answer."""

from __future__ import annotations

import asyncio
import json
import random
import select
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from weft.bench.serve_stream import EventReader, JunkError, ResponseReader
from weft.bench.soak_plan import Behaviour, Conduct, Question, WrongQuestion

TIMEOUT_SECONDS = 120.0
"""A request that takes longer is a violation."""
_READ_BYTES = 64 << 10
_SLOW_BYTES = 4 << 10
_SLOW_PAUSE_SECONDS = 0.05
_ERRORS_OF_A_KILL = ("engine_died", "engine_not_ready")
_TICK_SECONDS = 0.1
LATE_CLIENT = "the clients were late"
"""The outcome of a request that timed out while this process was too busy to read or write in time."""
_decode = msgspec.json.Decoder().decode


class Violation(Exception):
    """The server did something that must never happen. The message says what."""


class Lost(Violation):
    """The connection was closed before the end of the answer."""


@dataclass(frozen=True)
class Excused:
    """An error that is allowed only if the engine was down at some time between `began` and `ended`."""

    began: float
    ended: float
    code: str


@dataclass
class Lateness:
    """How late the event loop of the clients is. All clients share one process. On a small machine, the server and the
    engine leave little CPU time for it."""

    ticks: list[tuple[float, float]] = field(default_factory=list)
    """When the loop was late, and by how many seconds."""

    async def watch(self) -> None:
        while True:
            due = time.monotonic() + _TICK_SECONDS
            await asyncio.sleep(_TICK_SECONDS)
            now = time.monotonic()
            if now - due > _TICK_SECONDS:
                self.ticks.append((now, now - due))

    @property
    def longest(self) -> float:
        return max((late for _, late in self.ticks), default=0.0)

    def explains(self, began: float) -> bool:
        """Whether the loop was late for more than half of the time since `began`."""
        now = time.monotonic()
        late = sum(late for ended, late in self.ticks if ended > began)
        return 2 * late > now - began


@dataclass
class Ledger:
    """The results of all clients."""

    outcomes: Counter[tuple[Conduct, str]] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    excused: list[Excused] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    num_tokens: int = 0
    first_tokens: list[float] = field(default_factory=list)
    lateness: Lateness = field(default_factory=Lateness)

    def add_id(self, answer_id: str) -> None:
        if answer_id in self.ids:
            raise Violation(f"the id {answer_id} was given to two answers")
        self.ids.add(answer_id)


@dataclass(frozen=True)
class Target:
    """The server, and the requests that clients send."""

    host: str
    port: int
    questions: Sequence[Question]
    slow_questions: Sequence[Question]
    wrong_questions: Sequence[WrongQuestion]
    api_key: str | None = None

    def message(self, method: str, path: str, body: bytes) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {host}:{self.port}\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class Received:
    """An answer that is being received. Raises a Violation as soon as it differs from the expected answer."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.id: str | None = None
        self.error: dict[str, Any] | None = None
        self.is_done = False
        self._texts = [""] * question.num_choices
        self._finished = [False] * question.num_choices
        self._usage: dict[str, Any] | None = None

    @property
    def has_text(self) -> bool:
        return any(self._texts)

    def event(self, payload: bytes) -> None:
        """Takes the payload of one event of a stream."""
        if self.is_done or self.error:
            raise Violation(f"an event after the end: {payload[:80]!r}")
        if payload == b"[DONE]":
            self.is_done = True
            return
        chunk = _decode(payload)
        if "error" in chunk:
            self.error = chunk["error"]
            return
        self._take_id(chunk)
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content", "") if self.question.is_chat else choice["text"]
            self._take_choice(choice, piece or "")
        self._usage = chunk.get("usage") or self._usage

    def whole(self, body: bytes) -> None:
        """Takes the body of an answer that is not streamed."""
        answer = _decode(body)
        self._take_id(answer)
        for choice in answer["choices"]:
            self._take_choice(
                choice, choice["message"]["content"] if self.question.is_chat else choice["text"]
            )
        self._usage = answer["usage"]
        self.is_done = True

    def check_complete(self) -> None:
        """Checks a finished answer: every text is complete, and the number of tokens is right."""
        if tuple(self._texts) != self.question.texts or not all(self._finished):
            raise Violation(
                f"an answer is incomplete: {self._texts!r:.200}; expected {self.question.texts!r:.200}"
            )
        expected = self.question.num_tokens
        counted = self._usage and self._usage["completion_tokens"]
        if expected is not None and counted != expected:
            raise Violation(f"usage reports {counted} tokens; expected {expected}")

    def _take_id(self, chunk: dict[str, Any]) -> None:
        if self.id not in (None, chunk["id"]):
            raise Violation(f"an answer has two ids: {self.id} and {chunk['id']}")
        self.id = chunk["id"]

    def _take_choice(self, choice: dict[str, Any], piece: str) -> None:
        index = choice["index"]
        if self._finished[index]:
            raise Violation(f"choice {index} continues after its end")
        text = self._texts[index] + piece
        if not self.question.texts[index].startswith(text):
            at = len(self._texts[index])
            raise Violation(
                f"wrong text: {piece!r:.80} at character {at}; expected {self.question.texts[index][at : at + 80]!r}"
            )
        self._texts[index] = text
        reason = choice["finish_reason"]
        if reason is not None:
            self._finished[index] = True
            if reason != "length":
                raise Violation(f"an answer ended with {reason!r}; expected 'length'")


class SoakClient:
    """One client. It owns its connection, and may keep it from one complete answer to the next."""

    def __init__(self, target: Target, behaviour: Behaviour, ledger: Ledger) -> None:
        self._target = target
        self._behaviour = behaviour
        self._ledger = ledger
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    async def run(self, until: float) -> None:
        while time.monotonic() < until:
            conduct = self._behaviour.conduct()
            began = time.monotonic()
            try:
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    outcome = await self._run_request(conduct)
            except TimeoutError:
                if self._ledger.lateness.explains(began):
                    self._drop()
                    self._ledger.outcomes[conduct, LATE_CLIENT] += 1
                else:
                    self._add_violation(conduct, f"no end after {TIMEOUT_SECONDS:g} s")
            except (
                *(Violation, JunkError, LookupError, TypeError, ValueError),
                msgspec.MsgspecError,
            ) as error:
                self._add_violation(conduct, f"{type(error).__name__}: {error}")
            except OSError as error:
                self._add_violation(conduct, f"Lost: {error}")
            else:
                self._ledger.outcomes[conduct, outcome] += 1
                if outcome in _ERRORS_OF_A_KILL:
                    self._ledger.excused.append(Excused(began, time.monotonic(), outcome))
                    # Waits about as long as Retry-After says. The time is random, so that the clients do not return
                    # together.
                    await asyncio.sleep(random.uniform(0.5, 1.5))
        self._drop()

    def _add_violation(self, conduct: Conduct, message: str) -> None:
        self._drop()
        self._ledger.outcomes[conduct, "violation"] += 1
        self._ledger.violations.append(f"{conduct.value}: {message}")

    async def _run_request(self, conduct: Conduct) -> str:
        behaviour, target = self._behaviour, self._target
        if conduct is Conduct.WRONG:
            return await self._run_wrong_request(behaviour.pick(len(target.wrong_questions)))
        questions = target.slow_questions if conduct is Conduct.SLOW else target.questions
        question = questions[behaviour.pick(len(questions))]
        is_streamed = conduct is not Conduct.WHOLE and (
            conduct is not Conduct.VANISH or behaviour.chance(0.5)
        )
        message = target.message("POST", question.path, question.body(is_streamed))
        if conduct is Conduct.HALF:
            message = message[: 1 + behaviour.pick(len(message) - 1)]
        if conduct is Conduct.SLOW:
            self._drop()  # a slow read needs a new connection, with a small receive buffer
        writer = await self._send(message, is_slow=conduct is Conduct.SLOW)
        if conduct in (Conduct.HALF, Conduct.VANISH):
            await asyncio.sleep(behaviour.up_to(0.2))
            writer.transport.abort()
            self._drop()
            return "left"
        return await self._receive(Received(question), conduct, is_streamed)

    async def _run_wrong_request(self, number: int) -> str:
        wrong, began = self._target.wrong_questions[number], time.monotonic()
        await self._send(self._target.message(wrong.method, wrong.path, wrong.body))
        response, body = await self._read_whole(ResponseReader())
        self._keep(response)
        error = json.loads(body)["error"]
        if response.status == 503:
            return str(error["code"])
        if response.status == 408 and self._ledger.lateness.explains(began):
            return LATE_CLIENT
        if response.status != wrong.status:
            raise Violation(f"status {response.status} for {wrong.body[:60]!r}; expected {wrong.status}")
        return "refused"

    async def _receive(self, received: Received, conduct: Conduct, is_streamed: bool) -> str:
        began = time.monotonic()
        leaves_after = self._behaviour.pick(8) if conduct is Conduct.LEAVE else None
        response, events = ResponseReader(), EventReader()
        num_reads = 0
        while not response.is_complete:
            if conduct is Conduct.SLOW:
                await asyncio.sleep(self._behaviour.up_to(_SLOW_PAUSE_SECONDS))
            data = await self._reader.read(_SLOW_BYTES if conduct is Conduct.SLOW else _READ_BYTES)
            if not data:
                raise Lost(f"closed after {num_reads} reads, status {response.status}")
            had_text = received.has_text
            body = response.feed(data)
            if response.status and (response.status != 200 or not is_streamed):
                return await self._receive_whole(received, response, body, began)
            for payload in events.feed(body):
                received.event(payload)
            if received.has_text and not had_text:
                self._ledger.first_tokens.append(time.monotonic() - began)
            num_reads += 1
            if leaves_after is not None and num_reads > leaves_after and not received.is_done:
                self._drop()
                return "left"
        self._keep(response)
        if received.id is not None:
            self._ledger.add_id(received.id)
        if received.error is not None:
            return self._check_error(received.error, began)
        if not received.is_done:
            raise Lost("the stream ended without [DONE] and without an error")
        return self._finish(received)

    async def _receive_whole(
        self, received: Received, response: ResponseReader, first: bytes, began: float
    ) -> str:
        _, body = await self._read_whole(response, first)
        self._keep(response)
        if response.status != 200:
            error = json.loads(body)["error"]
            if response.status in (429, 503) and not int(response.headers.get("retry-after", "0")):
                raise Violation(f"a {response.status} without Retry-After")
            return self._check_error(error, began)
        received.whole(body)
        assert received.id is not None
        self._ledger.add_id(received.id)
        return self._finish(received)

    def _finish(self, received: Received) -> str:
        received.check_complete()
        self._ledger.num_tokens += received.question.num_tokens or 0
        return "answered"

    def _check_error(self, error: dict[str, Any], began: float) -> str:
        code = str(error["code"])
        if code == "timeout" and self._ledger.lateness.explains(began):
            return LATE_CLIENT
        if code in (*_ERRORS_OF_A_KILL, "slow_reader", "queue_full"):
            return code
        raise Violation(f"an error: {error!r:.200}")

    # ------------------------------------------------------------------ the connection

    async def _send(self, message: bytes, is_slow: bool = False) -> asyncio.StreamWriter:
        if self._writer is None or self._writer.is_closing() or self._is_closed_by_server(self._writer):
            self._drop()
            connection = socket.socket(
                socket.AF_INET6 if ":" in self._target.host else socket.AF_INET, socket.SOCK_STREAM
            )
            if is_slow:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_BYTES)
            connection.setblocking(False)
            try:
                address = (self._target.host, self._target.port)
                await asyncio.get_running_loop().sock_connect(connection, address)
            except BaseException:
                connection.close()
                raise
            self._reader, self._writer = await asyncio.open_connection(
                sock=connection, limit=_SLOW_BYTES if is_slow else _READ_BYTES
            )
        self._writer.write(message)
        return self._writer

    def _is_closed_by_server(self, writer: asyncio.StreamWriter) -> bool:
        """Whether the server has closed an idle connection: then the socket has something to read. Servers close
        connections that are idle for long, so HTTP clients check this before they use one again."""
        poll = select.poll()
        poll.register(writer.get_extra_info("socket"), select.POLLIN)
        return self._reader.at_eof() or bool(poll.poll(0))

    async def _read_whole(self, response: ResponseReader, body: bytes = b"") -> tuple[ResponseReader, bytes]:
        while not response.is_complete:
            data = await self._reader.read(_READ_BYTES)
            if not data:
                raise Lost(f"closed in the middle of an answer, status {response.status}")
            body += response.feed(data)
        return response, body

    def _keep(self, response: ResponseReader) -> None:
        """Keeps the connection for the next request if the server allows it, but not always: clients differ."""
        if not response.keeps_connection or self._behaviour.chance(0.3):
            self._drop()

    def _drop(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
