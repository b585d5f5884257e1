"""The fair gate: which answer is released next, tested with a fake engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from weft.request import Priority
from weft.server.admission.fairness import AnswerJob, FairGate, GateTicket
from weft.server.admission.keys import ApiKey

PROMPT, ANSWER = 10, 30


class FakeEngine:
    """A fake engine with `slots` slots. The test ends its answers, oldest first."""

    def __init__(self, *weights: float, slots: int = 4, max_tokens: int = 10**9) -> None:
        self.keys = [
            ApiKey(name, f"{index:064x}", weight=weight)
            for index, (name, weight) in enumerate(zip("abc", weights, strict=False))
        ]
        self.running: list[tuple[str, GateTicket]] = []
        self.waiting: list[tuple[str, GateTicket]] = []
        self.not_started = 0
        self.released: list[str] = []
        """The keys of released answers, in order."""
        self.ended_tokens: dict[GateTicket, int] = {}
        """Tokens of the answers of a request that have ended, while others go on."""
        self.gate = FairGate(
            self.keys,
            max_running=slots,
            max_tokens=max_tokens,
            count_answers=lambda: (len(self.running), self.not_started),
        )

    def ask(
        self,
        name: str,
        priority: Priority = Priority.NORMAL,
        prompt: int = PROMPT,
        expected: int = ANSWER,
        answers: int = 1,
    ) -> GateTicket:
        key = next(key for key in self.keys if key.name == name)
        ticket = self.gate.enter(key, AnswerJob(priority, prompt, answers, expected))
        assert ticket is not None
        self.waiting.append((name, ticket))
        self.submit_released()
        return ticket

    def submit_released(self) -> None:
        """Submits all released answers."""
        while ready := [one for one in self.waiting if one[1].num_to_submit]:
            for name, ticket in sorted(ready, key=lambda one: one[1].order[1]):
                if not ticket.num_waiting:
                    self.waiting.remove((name, ticket))
                count = ticket.num_to_submit
                self.running += [(name, ticket)] * count
                self.gate.submitted(ticket, count)
                self.released += [name] * count

    def end_one(self, tokens: int = ANSWER) -> str:
        """Ends the oldest answer, and its request if that was its last one."""
        name, ticket = self.running.pop(0)
        if ticket.num_waiting or any(other is ticket for _, other in self.running):
            self.gate.ended(ticket, tokens)
            self.ended_tokens[ticket] = self.ended_tokens.get(ticket, 0) + tokens
        else:
            self.gate.leave(ticket, self.ended_tokens.pop(ticket, 0) + tokens)
        self.submit_released()
        return name


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]


def test_a_flood_of_one_key_does_not_delay_another_key() -> None:
    async def scenario() -> None:
        engine = FakeEngine(1, 1)
        for _ in range(200):
            engine.ask("a")
        for _ in range(10):
            engine.end_one()
        for _ in range(5):  # sequentially
            before = engine.released.count("a")
            ticket = engine.ask("b")
            while ticket.num_waiting:
                engine.end_one()
            assert engine.released.count("a") - before <= 1
            while any(one is ticket for _, one in engine.running):
                engine.end_one()
        assert engine.released.count("b") == 5

    run(scenario)


def test_busy_keys_get_tokens_in_proportion_to_their_weights() -> None:
    async def scenario() -> None:
        engine = FakeEngine(1, 2, 5)
        for name in "abc":
            for _ in range(400):
                engine.ask(name)
        for _ in range(160):
            engine.end_one()
        shares = Counter(engine.released)
        # The first four slots were filled before other keys waited.
        assert abs(shares["a"] - 20) <= 4 and abs(shares["b"] - 40) <= 4 and abs(shares["c"] - 100) <= 4

    run(scenario)


def test_keys_share_tokens_and_not_requests() -> None:
    async def scenario() -> None:
        engine = FakeEngine(1, 1, slots=2)
        tokens = Counter[str]()
        for _ in range(800):
            engine.ask("a", expected=1000)
            engine.ask("b", expected=1000)
        while sum(tokens.values()) < 60_000:
            length = 300 if engine.running[0][0] == "a" else 30
            tokens[engine.end_one(length)] += PROMPT + length
        assert abs(tokens["a"] / tokens["b"] - 1) < 0.1

    run(scenario)


def test_an_idle_key_saves_up_nothing() -> None:
    async def scenario() -> None:
        engine = FakeEngine(1, 1, slots=1)
        for _ in range(100):
            engine.ask("a")
        for _ in range(50):
            engine.end_one()
        for _ in range(100):
            engine.ask("b")
        engine.released.clear()
        for _ in range(20):
            engine.end_one()
        assert abs(engine.released.count("a") - engine.released.count("b")) <= 2

    run(scenario)


def test_high_priorities_overtake_all_keys_and_others_only_their_own() -> None:
    async def scenario() -> None:
        engine = FakeEngine(1, 1, slots=1)
        engine.ask("a")
        low = engine.ask("a", Priority.LOW)
        normal = engine.ask("a")
        other_low = engine.ask("b", Priority.LOW)
        high = engine.ask("a", Priority.HIGH)
        critical = engine.ask("b", Priority.CRITICAL)
        order = []
        names = {low: "low", normal: "normal", other_low: "other low", high: "high", critical: "critical"}
        for _ in range(5):
            engine.end_one()
            order.append(names[engine.running[0][1]])
        assert order[:2] == ["critical", "high"]
        assert order.index("normal") < order.index("low")
        assert order.index("other low") < order.index("normal"), (
            "two answers of a were released, and one of b"
        )

    run(scenario)


def test_answers_are_released_at_once_while_the_engine_has_capacity() -> None:
    async def scenario() -> None:
        engine = FakeEngine(1, 1, slots=64)
        assert all(not engine.ask("a").num_waiting for _ in range(60))
        assert engine.ask("a").num_waiting, "a sixteenth of the slots is reserved for keys without answers"
        assert not engine.ask("b").num_waiting
        assert engine.ask("b").num_waiting, "b has an answer in the engine now"
        assert not engine.ask("a", Priority.HIGH).num_waiting

    run(scenario)


def test_a_request_for_a_thousand_answers_delays_another_key_by_at_most_one_of_them() -> None:
    async def scenario() -> None:
        engine = FakeEngine(1, 1, slots=4)
        big = engine.ask("a", answers=1000)
        assert len(engine.running) == 4 and engine.gate.num_waiting == 996
        for _ in range(10):
            ticket, before = engine.ask("b"), engine.released.count("a")
            while ticket.num_waiting:
                engine.end_one()
            assert engine.released.count("a") - before <= 1
            while any(one is ticket for _, one in engine.running):
                engine.end_one()
        while engine.running:
            engine.end_one()
        assert engine.released.count("a") == 1000 and big.is_over
        assert engine.gate.num_waiting == engine.gate._num_tokens == engine.gate._num_to_submit == 0

    run(scenario)


def test_keys_share_answers_and_not_requests() -> None:
    async def scenario() -> None:
        engine = FakeEngine(1, 1, slots=8)
        for _ in range(8):
            engine.ask("a", answers=100, prompt=100 * PROMPT)
        for _ in range(800):
            engine.ask("b")
        for _ in range(400):
            engine.end_one()
        shares = Counter(engine.released[-300:])
        assert abs(shares["a"] - shares["b"]) <= 20

    run(scenario)


def test_a_small_request_does_not_wait_for_a_large_one_of_the_same_key() -> None:
    async def scenario() -> None:
        engine = FakeEngine(1, 1, slots=4)
        engine.ask("a", answers=1000)
        small = engine.ask("a")
        for _ in range(2):
            engine.end_one()
        assert not small.num_waiting

    run(scenario)


def test_the_reserve_lets_another_key_start_at_once() -> None:
    async def scenario() -> None:
        engine = FakeEngine(1, 1, 1, slots=16)
        engine.ask("a", answers=1000)
        assert not engine.ask("b").num_waiting
        assert engine.ask("c").num_waiting, "one slot of sixteen is reserved"
        engine.end_one()
        assert engine.released[-1] == "c"

    run(scenario)


def test_the_final_charge_equals_the_tokens_used() -> None:
    async def scenario() -> None:
        engine = FakeEngine(1, 1, slots=8)
        ticket = engine.ask("a", answers=5, prompt=103, expected=500)
        for tokens in (7, 400, 3, 90):
            engine.end_one(tokens)
        engine.end_one(11)
        assert ticket.is_over and ticket.account.virtual_time == ticket.charged == 103 + 7 + 400 + 3 + 90 + 11
        cancelled = engine.ask("b", answers=200, prompt=100)
        before = cancelled.account.virtual_time - cancelled.charged
        engine.end_one(30)
        engine.gate.leave(cancelled, None)
        assert cancelled.account.virtual_time == before and engine.gate._num_tokens == 0
        assert cancelled.account.num_open == 0

    run(scenario)


def test_only_a_few_answers_are_released_if_memory_may_be_short() -> None:
    async def scenario() -> None:
        engine = FakeEngine(1, 1, slots=256, max_tokens=100)
        for _ in range(50):
            engine.not_started = len(engine.running)
            engine.ask("a")
        assert len(engine.running) == 8
        engine.not_started = 0  # all have started, so there was enough memory
        engine.gate.release_answers()
        engine.submit_released()
        assert len(engine.running) > 8

    run(scenario)


def test_a_request_that_leaves_while_it_waits_is_removed_and_charged_nothing() -> None:
    async def scenario() -> None:
        engine = FakeEngine(1, 1, slots=1)
        first = engine.ask("a")
        released = engine.ask("a")
        last = engine.ask("a")
        engine.waiting.remove(("a", released))
        engine.gate.leave(released, None)
        assert engine.gate.num_waiting == 1
        engine.end_one()
        assert not first.num_waiting and not last.num_waiting and released.num_waiting
        assert engine.gate.num_waiting == 0

    run(scenario)


def test_a_failed_request_is_charged_nothing() -> None:
    async def scenario() -> None:
        engine = FakeEngine(1, 1, slots=1)
        engine.ask("a")
        for _ in range(10):
            engine.ask("a")
            engine.ask("b")
        for _ in range(4):  # the requests of b fail
            name, ticket = engine.running.pop(0)
            engine.gate.leave(ticket, None if name == "b" else ANSWER)
            engine.submit_released()
        assert engine.released == ["a", "b", "b", "b", "b"]

    run(scenario)


def test_with_fewer_than_two_keys_the_gate_is_off() -> None:
    async def scenario() -> None:
        for keys in ([], [ApiKey("a", "0" * 64)]):
            gate = FairGate(keys, max_running=1, max_tokens=1, count_answers=lambda: (9, 9))
            job = AnswerJob(Priority.NORMAL, 1, 1, 1)
            assert gate.enter(keys[0] if keys else None, job) is None

    run(scenario)
