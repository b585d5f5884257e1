"""The router of requests to replicas: prefix hits, load, sessions, and what its sketch remembers."""

from __future__ import annotations

import pytest

from weft import routing
from weft.routing import NO_LOAD, PrefixSketch, ReplicaLoad, Router, key_of

BLOCK = 16


def load(waiting: int = 0, running: int = 0, step: float = 0.0, token: float = 0.001) -> ReplicaLoad:
    return ReplicaLoad(waiting, running, step, 0.0005, token)


def router(*loads: ReplicaLoad, by_prefix: bool = True) -> Router:
    found = Router(BLOCK, by_prefix=by_prefix)
    for number, one in enumerate(loads):
        found.add(number)
        found.report(number, one)
    return found


def test_the_sketch_counts_the_leading_blocks_of_each_replica() -> None:
    sketch = PrefixSketch()
    sketch.update(0, [1, 2, 3], [])
    sketch.update(1, [1, 3], [])
    sketch.update(2, [2], [])
    assert sketch.hits([1, 2, 3, 4], 0b111) == {0: 3, 1: 1}
    assert sketch.hits([1, 2, 3], 0b110) == {1: 1}, "a replica that does not count has no hits"
    assert sketch.hits([], 0b111) == {}


def test_removed_keys_and_replicas_leave_the_sketch() -> None:
    sketch = PrefixSketch()
    sketch.update(0, [1, 2], [])
    sketch.update(1, [1], [])
    sketch.update(0, [], [1])
    assert sketch.hits([1, 2], 0b11) == {1: 1}
    sketch.drop(1)
    assert sketch.hits([1, 2], 0b11) == {}
    assert len(sketch) == 1, "the sketch keeps keys that no replica has"


def test_a_removed_key_is_no_longer_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_ASSUMED", 2)
    sketch = PrefixSketch()
    sketch.assume(0, [1, 2, 3])
    sketch.assume(0, [4])
    sketch.assume(1, [1, 4])
    sketch.update(0, [1, 4], [])
    sketch.update(0, [], [1, 4])
    assert sketch.hits([1], 0b11) == sketch.hits([4], 0b11) == {1: 1}
    assert sketch.hits([2], 0b11) == {0: 1}


def test_keys_of_assigned_requests_count_until_newer_ones_replace_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routing, "MAX_ASSUMED", 4)
    sketch = PrefixSketch()
    sketch.assume(3, [1, 2])
    assert sketch.hits([1, 2], 1 << 3) == {3: 2}
    sketch.assume(3, range(10, 20))
    assert sketch.hits([1, 2], 1 << 3) == {3: 2}, "the older generation was dropped too early"
    sketch.assume(3, range(20, 30))
    assert sketch.hits([1, 2], 1 << 3) == {}


def test_a_request_goes_to_the_replica_with_its_prefix() -> None:
    found = router(load(), load(), load())
    found.report(2, load(), added=[7, 8, 9])
    assert found.choose([7, 8, 9, 10], 64) == 2


def test_a_queue_that_costs_more_than_the_recomputation_outweighs_a_prefix_hit() -> None:
    keys = list(range(10))  # 160 tokens: they delay this request, and take time from others
    for waiting, chosen in ((100, 1), (310, 1), (330, 0)):
        found = router(load(), load(waiting))
        found.report(1, load(waiting), added=keys)
        assert found.choose(keys, 10 * BLOCK + 5) == chosen, f"with {waiting} waiting tokens"


def test_requests_between_two_reports_are_spread_by_what_was_assigned() -> None:
    found = router(load(), load(), load())
    chosen = [found.choose([], 100) for _ in range(6)]
    assert sorted(chosen) == [0, 0, 1, 1, 2, 2]
    found.report(chosen[0], load(waiting=500))
    assert chosen[0] not in [found.choose([], 1) for _ in range(2)]


def test_a_report_replaces_what_was_assigned_before_it() -> None:
    found = router(load(), load(waiting=500))
    assert {found.choose([], 100) for _ in range(4)} == {0}
    found.report(0, load())
    assert found.first_token_seconds(0, 100) == pytest.approx(0.1)
    assert found.choose([], 400) == 0


def test_replicas_that_know_no_costs_yet_share_the_requests() -> None:
    found = router(NO_LOAD, NO_LOAD)
    assert sorted(found.choose([], 50) for _ in range(4)) == [0, 0, 1, 1]


def test_requests_with_a_common_prefix_in_one_window_stay_together_until_the_queue_is_too_long() -> None:
    found = router(load(), load())
    keys = list(range(32))  # 512 tokens
    chosen = [found.choose([*keys, 1000 + number], 33 * BLOCK) for number in range(8)]
    assert set(chosen) == {0}, (
        "the second request recomputes a prefix that the first one brings into the cache"
    )
    assert found.choose([*range(5000, 5033)], 33 * BLOCK) == 1


def test_a_session_stays_with_its_replica_while_that_accepts_requests() -> None:
    found = router(load(), load())
    first = found.choose([], 10, "chat")
    found.report(first, load(waiting=100_000))
    assert found.choose([], 10, "chat") == first
    found.drain(first)
    other = found.choose([], 10, "chat")
    assert other == 1 - first
    found.remove(first)
    assert found.choose([], 10, "chat") == other


def test_a_new_replica_with_the_number_of_a_removed_one_gets_none_of_its_sessions() -> None:
    found = router(load(), load())
    first = found.choose([], 10, "chat")
    found.remove(first)
    found.add(first)
    found.report(first, load(waiting=100_000))
    assert found.choose([], 10, "chat") == 1 - first


def test_the_router_forgets_the_oldest_session_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_SESSIONS", 2)
    found = router(load(), load())
    first = found.choose([], 10, "a")
    found.choose([], 10, "b")
    found.choose([], 10, "c")
    found.report(first, load(waiting=100_000))
    assert found.choose([], 10, "a") == 1 - first


def test_without_prefixes_the_least_load_decides() -> None:
    found = router(load(waiting=10), load(), by_prefix=False)
    found.report(0, load(waiting=10), added=[1, 2, 3])
    assert found.choose([1, 2, 3], 48) == 1


def test_without_a_replica_that_accepts_requests_there_is_an_error() -> None:
    found = router(load())
    found.drain(0)
    with pytest.raises(LookupError, match="no replica"):
        found.choose([], 10)


def test_a_key_is_a_part_of_the_block_hash() -> None:
    assert key_of(bytes(range(32))) == int.from_bytes(bytes(range(8)), "little")
