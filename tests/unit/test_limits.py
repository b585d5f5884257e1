"""Rate limits of keys and Retry-After, on a virtual clock."""

from __future__ import annotations

from typing import Any

import pytest

from weft.clock import VirtualClock
from weft.server.admission.keys import ApiKey
from weft.server.admission.limits import Bucket, KeyLimits, places_needed
from weft.server.errors import ApiError


def limits(clock: VirtualClock, **fields: Any) -> KeyLimits:
    return KeyLimits(ApiKey("alice", "0" * 64, **fields), clock)


def refusal(call: Any, *arguments: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(*arguments)
    assert caught.value.status == 429 and caught.value.code == "rate_limit_exceeded"
    return caught.value


def test_a_bucket_starts_full_and_refills_steadily_up_to_its_limit() -> None:
    clock = VirtualClock()
    bucket = Bucket(60, clock)
    bucket.take(60)
    assert bucket.level == 0 and bucket.seconds_until(1) == 1
    clock.advance(2.5)
    assert bucket.level == 2.5 and bucket.seconds_until(2) == 0
    clock.advance(1000)
    assert bucket.level == 60
    bucket.take(-5)
    assert bucket.level == 60


def test_requests_beyond_the_rate_limit_wait_for_the_bucket() -> None:
    clock = VirtualClock()
    key = limits(clock, requests_per_minute=2)
    key.take_request()
    key.take_request()
    error = refusal(key.take_request)
    assert error.retry_after == 30
    assert "'alice'" in error.message and "0 of its 2 requests" in error.message
    refusal(key.take_request)  # a refused request costs nothing
    clock.advance(30)
    key.take_request()


def test_requests_beyond_the_concurrency_limit_wait_until_one_ends() -> None:
    key = limits(VirtualClock(), concurrent=2, requests_per_minute=10)
    key.num_open = 2
    error = refusal(key.take_request)
    assert error.retry_after is None and "2 active requests" in error.message
    key.num_open = 1
    key.take_request()
    assert key.headers()["x-ratelimit-remaining-requests"] == "9"


def test_tokens_are_reserved_and_then_corrected_to_what_was_used() -> None:
    clock = VirtualClock()
    key = limits(clock, tokens_per_minute=600)
    reserved = key.reserve(400)
    error = refusal(key.reserve, 400)
    assert error.retry_after == 20 and "200 of its 600 tokens" in error.message
    key.correct(reserved, 100)
    assert key.headers()["x-ratelimit-remaining-tokens"] == "500"
    key.correct(key.reserve(400), 0)
    assert key.headers()["x-ratelimit-remaining-tokens"] == "500"


def test_tokens_beyond_the_reservation_are_charged_later() -> None:
    clock = VirtualClock()
    key = limits(clock, tokens_per_minute=600)
    key.correct(key.reserve(100), 1200)
    assert key.headers()["x-ratelimit-remaining-tokens"] == "0"
    assert refusal(key.reserve, 10).retry_after == 61
    clock.advance(61)
    key.reserve(10)


def test_a_request_larger_than_the_bucket_is_accepted_when_the_bucket_is_full() -> None:
    clock = VirtualClock()
    key = limits(clock, tokens_per_minute=600)
    assert key.reserve(5000) == 600
    assert refusal(key.reserve, 5000).retry_after == 60


def test_headers_have_the_format_of_openai() -> None:
    clock = VirtualClock()
    key = limits(clock, requests_per_minute=60, tokens_per_minute=60_000)
    key.take_request()
    key.reserve(30_000)
    assert key.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "60000",
        "x-ratelimit-remaining-tokens": "30000",
        "x-ratelimit-reset-tokens": "30s",
    }
    clock.advance(0.75)
    assert key.headers()["x-ratelimit-reset-requests"] == "250ms"
    key.correct(0, 60_000)
    assert key.headers()["x-ratelimit-reset-tokens"] == "1m29s"
    assert limits(clock).headers() == {}


def test_a_key_needs_one_free_place_and_with_other_keys_a_quarter_of_its_own() -> None:
    assert [places_needed(own, free, 1) for own, free in ((0, 0), (50, 0), (50, 1))] == [1, 1, 0]
    assert [places_needed(own, free, 2) for own, free in ((0, 0), (3, 1), (4, 1), (40, 5), (40, 11))] == [
        *(1, 0, 1, 6, 0)
    ]
