"""Lines of batches are sent again: while there is no place, while the engine starts, and alone after it died."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from weft.engine.ipc.client import EngineState
from weft.server.batches import sending
from weft.server.batches.sending import LineSender
from weft.server.internal import InternalReply, InternalRequest


class FakeServices:
    """The line "poison" kills the engine. All requests in flight then get a 503."""

    def __init__(self) -> None:
        self.engine = SimpleNamespace(state=EngineState.READY)
        self.models = SimpleNamespace(engine_of_route=lambda _: self.engine)
        self.deaths = 0
        self.in_flight: set[bytes] = set()
        self._died = asyncio.Event()
        self.num_full = 0
        self.most_in_flight_again = 0
        """After the engine died."""

    async def send_internal(self, path: str, body: bytes, request: InternalRequest) -> InternalReply:
        assert request.is_idle_work
        if self.num_full:
            self.num_full -= 1
            return InternalReply(429, {}, b"")
        self.in_flight.add(body)
        if self.deaths:
            self.most_in_flight_again = max(self.most_in_flight_again, len(self.in_flight))
        try:
            died = self._died
            if body == b"poison":
                await asyncio.sleep(0.002)
                self._die()
            try:
                async with asyncio.timeout(0.005):
                    await died.wait()
            except TimeoutError:
                return InternalReply(200, {}, body)
            return InternalReply(503, {}, b"")
        finally:
            self.in_flight.discard(body)

    def _die(self) -> None:
        self.deaths += 1
        self.engine.state = EngineState.STARTING
        self._died.set()
        self._died = asyncio.Event()
        asyncio.get_running_loop().call_later(0.005, setattr, self.engine, "state", EngineState.READY)


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_FIRST_DELAY", "_LONGEST_DELAY", "_LOOK_SECONDS"):
        monkeypatch.setattr(sending, name, 0.001)


def test_a_line_that_kills_the_engine_ends_with_an_error_and_the_lines_beside_it_do_not() -> None:
    async def work() -> None:
        services: Any = FakeServices()
        sender = LineSender(services, lambda: False)
        bodies = [b"poison", *(b"line %d" % index for index in range(40))]
        replies = await asyncio.gather(*(sender.send("/v1/completions", body, None) for body in bodies))
        assert [reply.status for reply in replies] == [503, *[200] * 40]
        assert services.deaths == 3

    asyncio.run(work())


def test_lines_run_together_again_after_the_engine_died_once() -> None:
    """An engine may also die for reasons other than a line. Sent one by one, the lines of a large step would take hundreds of
    times as long."""

    async def work() -> None:
        services: Any = FakeServices()
        sender = LineSender(services, lambda: False)
        sent = asyncio.gather(*(sender.send("/v1/completions", b"%d" % index, None) for index in range(40)))
        await asyncio.sleep(0)
        async with asyncio.timeout(10):  # without it, a mistake here would hang the tests
            while len(services.in_flight) < 40:
                await asyncio.sleep(0)
        services._die()
        assert [reply.status for reply in await sent] == [200] * 40
        assert services.most_in_flight_again > 1

    asyncio.run(work())


def test_a_line_does_not_fail_because_the_server_stops_the_engine() -> None:
    async def work() -> None:
        services: Any = FakeServices()
        is_draining = False
        sending = asyncio.create_task(
            LineSender(services, lambda: is_draining).send("/v1/completions", b"poison", None)
        )
        async with asyncio.timeout(10):
            while services.deaths < 2 or not services.in_flight:
                await asyncio.sleep(0)
        is_draining = True
        await asyncio.sleep(0.1)
        assert services.deaths == 3 and not sending.done()
        sending.cancel()

    asyncio.run(work())


def test_a_line_that_finds_no_place_is_sent_until_it_does() -> None:
    async def work() -> None:
        services: Any = FakeServices()
        services.num_full = 20
        assert (await LineSender(services, lambda: False).send("/v1/completions", b"a", None)).status == 200

    asyncio.run(work())
