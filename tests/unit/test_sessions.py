"""Sessions: cached blocks of a conversation are evicted last, for a limited time, and never block a request."""

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
    """A small engine that serves the requests of a conversation, with other requests in between."""

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
        self.next_token = 1000

    def send(self, prompt: list[int], session: str | None = None, salt: str = "") -> GenerationResult:
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

    def fill_with_other_requests(self, count: int = 8) -> None:
        """Sends more different prompts than the pool holds, so that all other cached blocks are evicted."""
        for _ in range(count):
            self.next_token += 100
            self.send(list(range(self.next_token, self.next_token + 20)))


PROMPT = list(range(10, 34))  # six full blocks


def test_a_session_stays_cached_after_other_requests_filled_the_pool() -> None:
    talk = Conversation()
    first = talk.send(PROMPT, "talk")
    talk.fill_with_other_requests()
    second = talk.send([*PROMPT, *first.tokens, 1, 2, 3], "talk")
    assert second.cached_token_count >= len(PROMPT)


def test_without_a_session_the_conversation_is_evicted() -> None:
    talk = Conversation()
    first = talk.send(PROMPT)
    talk.fill_with_other_requests()
    assert talk.send([*PROMPT, *first.tokens, 1, 2, 3]).cached_token_count == 0


def test_a_session_expires_after_its_lifetime() -> None:
    talk = Conversation(lifetime=5.0)
    first = talk.send(PROMPT, "talk")
    talk.clock.advance(6.0)
    talk.fill_with_other_requests()
    assert talk.send([*PROMPT, *first.tokens, 1, 2, 3], "talk").cached_token_count == 0


def test_every_request_of_a_session_restarts_its_lifetime() -> None:
    talk = Conversation(lifetime=5.0)
    prompt = PROMPT
    for _ in range(3):
        prompt = [*prompt, *talk.send(prompt, "talk").tokens]
        talk.clock.advance(4.0)
    talk.fill_with_other_requests()
    assert talk.send([*prompt, 1], "talk").cached_token_count >= len(PROMPT)


def test_a_session_is_evicted_for_a_request_that_needs_all_the_memory() -> None:
    talk = Conversation(num_blocks=16)
    talk.send(PROMPT, "talk")
    large = talk.send(list(range(500, 500 + 58)))  # all sixteen blocks
    assert large.preemptions == 0
    assert talk.send([*PROMPT, 1], "talk").cached_token_count == 0


def test_equal_session_ids_under_different_cache_salts_are_different_sessions() -> None:
    talk = Conversation(num_blocks=32)
    talk.send(PROMPT, "talk", salt="a")
    talk.send(list(range(60, 70)), "talk", salt="b")
    talk.fill_with_other_requests(12)
    assert talk.send([*PROMPT, 1], "talk", salt="b").cached_token_count == 0
    assert talk.send([*PROMPT, 1], "talk", salt="a").cached_token_count == len(PROMPT)


def test_sessions_keep_at_most_as_many_hashes_as_there_are_blocks() -> None:
    pool = BlockPool(10)
    sessions = Sessions(pool, lifetime=60.0)
    for number in range(50):
        sessions.keep(("", str(number)), [b"%d:%d" % (number, i) for i in range(4)], now=0.0)
        sessions.check_integrity()
    assert len(sessions) == 2
    sessions.expire(now=61.0)
    sessions.check_integrity()
    assert len(sessions) == 0 and pool.hot_counts == {}


def test_blocks_that_the_latest_request_does_not_use_are_no_longer_hot() -> None:
    pool = BlockPool(10)
    sessions = Sessions(pool, lifetime=60.0)
    sessions.keep(("", "talk"), [b"a", b"b", b"c"], now=0.0)
    sessions.keep(("", "other"), [b"a"], now=0.0)
    sessions.keep(("", "talk"), [b"a", b"x"], now=1.0)
    assert pool.hot_counts == {b"a": 2, b"x": 1}
    sessions.check_integrity()


def test_the_number_of_sessions_and_the_length_of_their_ids_are_limited() -> None:
    pool = BlockPool(4 * MAX_SESSIONS)
    sessions = Sessions(pool, lifetime=60.0)
    for number in range(3 * MAX_SESSIONS):
        sessions.keep(("", str(number)), [b"%d" % number], now=0.0)
    sessions.check_integrity()
    assert len(sessions) == len(pool.hot_counts) == MAX_SESSIONS
    sessions.keep(("", str(2 * MAX_SESSIONS)), [b"again"], now=1.0)  # was the oldest, and is the newest now
    sessions.keep(("", "new"), [b"new"], now=1.0)
    sessions.expire(now=60.5)
    assert len(sessions) == 2, "the latest two are kept"
    for field in ("session_id", "cache_salt"):
        with pytest.raises(InvalidRequestError, match=f"{field} is '257 characters'; allowed: at most 256"):
            InferenceRequest((1,), **{field: "x" * 257})  # type: ignore[arg-type]
        InferenceRequest((1,), **{field: "é" * 256})  # type: ignore[arg-type]
