"""The client's end of the engine's connection: messages handled in several turns, and errors."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from weft.engine.ipc import wire
from weft.engine.ipc.connection import Connection

WAIT = 30.0


def step(token: int) -> bytes:
    return wire.framed(wire.StepReport((1,), (token,), (), ()))


def token_of(message: wire.FromEngine) -> int:
    assert isinstance(message, wire.StepReport)
    return message.tokens[0]


def run(
    take: Callable[[int], object], test: Callable[[Connection, socket.socket], Awaitable[None]]
) -> list[dict[str, object]]:
    """Runs `test` on a connection with one token per turn. Returns the errors that the event loop reported."""
    errors: list[dict[str, object]] = []

    async def with_connection() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            connection = Connection(lambda message: take(token_of(message)), tokens_per_turn=1)
            await connection.open(ours)
            await test(connection, theirs)
            connection.close()
            await asyncio.wait_for(connection.closed.wait(), WAIT)

    asyncio.run(with_connection())
    return errors


def test_messages_that_arrive_together_are_handled_in_order() -> None:
    seen: list[int] = []
    done = asyncio.Event()

    def take(token: int) -> None:
        seen.append(token)
        if token == 5:
            done.set()

    async def test(connection: Connection, engine: socket.socket) -> None:
        sent = b"".join(step(token) for token in range(6))
        engine.sendall(sent[:-3])
        await asyncio.sleep(0.01)
        engine.sendall(sent[-3:])
        await asyncio.wait_for(done.wait(), WAIT)

    assert run(take, test) == []
    assert seen == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("broken", [0, 2])
def test_after_an_error_no_message_is_handled_twice_and_the_connection_is_closed(broken: int) -> None:
    seen: list[int] = []

    def take(token: int) -> None:
        seen.append(token)
        if token == broken:
            raise KeyError("no such answer")

    async def test(connection: Connection, engine: socket.socket) -> None:
        engine.sendall(b"".join(step(token) for token in range(5)))
        await asyncio.wait_for(connection.closed.wait(), WAIT)

    assert len(run(take, test)) == 1, "the event loop did not report the error"
    assert seen == list(range(broken + 1))


def test_after_closing_no_message_is_handled() -> None:
    seen: list[int] = []

    async def test(connection: Connection, engine: socket.socket) -> None:
        engine.sendall(b"".join(step(token) for token in range(1000)))
        await asyncio.wait_for(connection.first_message.wait(), WAIT)
        connection.close()
        num_seen = len(seen)
        await asyncio.wait_for(connection.closed.wait(), WAIT)
        assert len(seen) == num_seen < 1000

    assert run(seen.append, test) == []


def test_invalid_data_closes_the_connection() -> None:
    async def test(connection: Connection, engine: socket.socket) -> None:
        engine.sendall((4).to_bytes(4, "little") + b"\xff\xff\xff\xff")
        await asyncio.wait_for(connection.closed.wait(), WAIT)

    assert run(lambda token: None, test) == []
