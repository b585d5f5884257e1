"""Conversations are kept hot: what is cached of them is evicted last, for a time, and never at a request's cost."""

from __future__ import annotations

import pytest

from weft.backends.noop import NoopBackend
from weft.clock import VirtualClock
from weft.config import KvCachePoolConfig, SchedulerConfig, ServingEngineConfig
from weft.engine.serving import ServingEngine
from weft.errors import InvalidRequestError
from weft.request import GenerationResult, InferenceRequest, RequestState, SamplingParams
from weft.scheduling.cache.block_pool import BlockPool
from weft.scheduling.cache.sessions import MAX_SESSIONS, Sessions

BLOCK = 4


class Conversation:
    """A small engine that turns are sent to one after the other, with strangers in between."""

    def __init__(self, num_blocks: int = 16, lifetime: float = 60.0) -> None:
        self.clock = VirtualClock()
        self.engine = ServingEngine(
            NoopBackend(),
            ServingEngineConfig(
                SchedulerConfig(max_running=4, session_lifetime=lifetime),
                KvCachePoolConfig(num_blocks, BLOCK, swap_blocks=0),
            ),
            clock=self.clock,
        )
        self.strangers = 1000

    def ask(self, prompt: list[int], session: str | None = None, salt: str = "") -> GenerationResult:
        params = SamplingParams(max_tokens=4, seed=1)
        request_id = self.engine.submit(
            InferenceRequest(tuple(prompt), params, session_id=session, cache_salt=salt)
        )
        while self.engine.has_work:
            self.engine.run_iteration()
            self.engine.scheduler.check_integrity()
        result = self.engine.get_result(request_id)
        assert result is not None and result.state is RequestState.COMPLETED
        return result

    def fill_with_strangers(self, count: int = 8) -> None:
        """More different prompts than the pool holds: whatever can be evicted is."""
        for _ in range(count):
            self.strangers += 100
            self.ask(list(range(self.strangers, self.strangers + 20)))


TURN = list(range(10, 34))  # six full blocks


def test_a_conversation_is_found_again_after_strangers_filled_the_pool() -> None:
    talk = Conversation()
    first = talk.ask(TURN, "talk")
    talk.fill_with_strangers()
    second = talk.ask([*TURN, *first.tokens, 1, 2, 3], "talk")
    assert second.cached_token_count >= len(TURN)


def test_without_a_session_it_would_be_gone() -> None:
    talk = Conversation()
    first = talk.ask(TURN)
    talk.fill_with_strangers()
    assert talk.ask([*TURN, *first.tokens, 1, 2, 3]).cached_token_count == 0


def test_a_session_ends_with_its_lifetime() -> None:
    talk = Conversation(lifetime=5.0)
    first = talk.ask(TURN, "talk")
    talk.clock.advance(6.0)
    talk.fill_with_strangers()
    assert talk.ask([*TURN, *first.tokens, 1, 2, 3], "talk").cached_token_count == 0


def test_every_turn_begins_the_lifetime_anew() -> None:
    talk = Conversation(lifetime=5.0)
    prompt = TURN
    for _ in range(3):
        prompt = [*prompt, *talk.ask(prompt, "talk").tokens]
        talk.clock.advance(4.0)
    talk.fill_with_strangers()
    assert talk.ask([*prompt, 1], "talk").cached_token_count >= len(TURN)


def test_a_session_gives_way_to_a_request_that_needs_all_the_memory() -> None:
    talk = Conversation(num_blocks=16)
    talk.ask(TURN, "talk")
    needy = talk.ask(list(range(500, 500 + 58)))  # all sixteen blocks
    assert needy.preemptions == 0
    assert talk.ask([*TURN, 1], "talk").cached_token_count == 0


def test_a_session_never_reaches_over_cache_salts() -> None:
    talk = Conversation(num_blocks=32)
    talk.ask(TURN, "talk", salt="a")
    talk.ask(list(range(60, 70)), "talk", salt="b")
    talk.fill_with_strangers(12)
    assert talk.ask([*TURN, 1], "talk", salt="b").cached_token_count == 0
    assert talk.ask([*TURN, 1], "talk", salt="a").cached_token_count == len(TURN)


def test_a_flood_of_sessions_keeps_no_more_keys_than_there_are_blocks() -> None:
    pool = BlockPool(10)
    sessions = Sessions(pool, lifetime=60.0)
    for number in range(50):
        sessions.keep(("", str(number)), [b"%d:%d" % (number, i) for i in range(4)], now=0.0)
        sessions.check_integrity()
    assert len(sessions) == 2
    sessions.expire(now=61.0)
    sessions.check_integrity()
    assert len(sessions) == 0 and pool.hot_counts == {}


def test_what_a_turn_no_longer_uses_cools() -> None:
    pool = BlockPool(10)
    sessions = Sessions(pool, lifetime=60.0)
    sessions.keep(("", "talk"), [b"a", b"b", b"c"], now=0.0)
    sessions.keep(("", "other"), [b"a"], now=0.0)
    sessions.keep(("", "talk"), [b"a", b"x"], now=1.0)
    assert pool.hot_counts == {b"a": 2, b"x": 1}
    sessions.check_integrity()


def test_the_memory_of_sessions_is_bounded_whatever_they_are_called() -> None:
    pool = BlockPool(4 * MAX_SESSIONS)
    sessions = Sessions(pool, lifetime=60.0)
    for number in range(3 * MAX_SESSIONS):
        sessions.keep(("", str(number)), [b"%d" % number], now=0.0)
    sessions.check_integrity()
    assert len(sessions) == len(pool.hot_counts) == MAX_SESSIONS
    sessions.keep(("", str(2 * MAX_SESSIONS)), [b"again"], now=1.0)  # the oldest: it is the newest now
    sessions.keep(("", "new"), [b"new"], now=1.0)
    sessions.expire(now=60.5)
    assert len(sessions) == 2, "what was kept last stays"
    for field in ("session_id", "cache_salt"):
        with pytest.raises(InvalidRequestError, match=f"{field} is '257 characters'; allowed: at most 256"):
            InferenceRequest((1,), **{field: "x" * 257})  # type: ignore[arg-type]
        InferenceRequest((1,), **{field: "é" * 256})  # type: ignore[arg-type]
