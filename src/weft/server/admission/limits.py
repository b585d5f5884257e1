"""Rate limits of one API key: token buckets, the x-ratelimit headers, and the time until a retry can succeed."""

from __future__ import annotations

from weft.clock import Clock
from weft.server.admission.keys import ApiKey
from weft.server.errors import ApiError

_SECONDS = 60.0
_MAX_OWN_PER_FREE = 4
"""With several keys, a key may have at most this many requests per place that is still free. So a key that sends very many
requests leaves a fifth of all places to the other keys."""


def places_needed(num_own: int, num_free: int, num_keys: int) -> int:
    """How many more places must become free before a key that has `num_own` places may take another one."""
    least_free = 1 if num_keys < 2 else num_own // _MAX_OWN_PER_FREE + 1
    return max(0, least_free - num_free)


class Bucket:
    """A token bucket: holds at most `per_minute`, and refills at that rate. If a request used more than it
    reserved, the level falls below zero. Later requests are then refused until it is refilled."""

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._seen = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._seen) * self.per_minute / _SECONDS)
        self._seen = now
        return self._level

    def take(self, amount: float) -> None:
        """Removes `amount`; a negative amount is returned to the bucket."""
        self._level = min(self.per_minute, self.level - amount)

    def seconds_until(self, amount: float) -> float:
        """Seconds until the level reaches `amount`; 0 if it does now."""
        return max(0.0, (amount - self.level) * _SECONDS / self.per_minute)


class KeyLimits:
    """The current usage of one key against its limits. Belongs to one event loop."""

    def __init__(self, key: ApiKey, clock: Clock) -> None:
        self.key = key
        self.num_open = 0
        self._requests = _bucket(key.requests_per_minute, clock)
        self._tokens = _bucket(key.tokens_per_minute, clock)

    def take_request(self) -> None:
        """Counts a request, or raises a 429."""
        key = self.key
        if key.concurrent is not None and self.num_open >= key.concurrent:
            # This error has no retry time: the caller predicts when an active request of the key ends.
            raise self._refused(
                f"the key {key.name!r} has {self.num_open} active requests; allowed: {key.concurrent} at once; "
                "wait until one ends",
                None,
            )
        if self._requests is not None:
            self._check(self._requests, 1, "requests")
            self._requests.take(1)

    def reserve(self, num_tokens: int) -> int:
        """Takes the tokens that a request may need, or raises a 429. Returns the number taken, for `correct`. A request
        for more than the bucket can hold takes a full bucket; otherwise it could never run."""
        if self._tokens is None:
            return 0
        num_tokens = min(num_tokens, self._tokens.per_minute)
        self._check(self._tokens, num_tokens, "tokens")
        self._tokens.take(num_tokens)
        return num_tokens

    def correct(self, reserved: int, used: int) -> None:
        """Replaces a reservation by the tokens that were used."""
        if self._tokens is not None:
            self._tokens.take(used - reserved)

    def headers(self) -> dict[str, str]:
        """The x-ratelimit headers of the OpenAI API; none for a key without limits."""
        found = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                found[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                found[f"x-ratelimit-remaining-{name}"] = str(max(0, int(bucket.level)))
                found[f"x-ratelimit-reset-{name}"] = _duration(bucket.seconds_until(bucket.per_minute))
        return found

    def _check(self, bucket: Bucket, amount: int, name: str) -> None:
        seconds = bucket.seconds_until(amount)
        if seconds > 0:
            raise self._refused(
                f"the key {self.key.name!r} has {max(0, int(bucket.level))} of its {bucket.per_minute} {name} per minute "
                f"left, and this request needs {amount}; try again in {_duration(seconds)}",
                seconds,
            )

    def _refused(self, message: str, seconds: float | None) -> ApiError:
        return ApiError(429, message, code="rate_limit_exceeded", headers=self.headers(), retry_after=seconds)


def _bucket(per_minute: int | None, clock: Clock) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, clock)


def _duration(seconds: float) -> str:
    """A duration in OpenAI's format: 250ms, 6.5s, 1m3s."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    if seconds < 60:
        return f"{seconds:.3g}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s"
