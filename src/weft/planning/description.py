"""Makes a load from a description: rates, lengths, shared prefixes, conversations. All of it follows from the seed."""

from __future__ import annotations

import heapq
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from weft.errors import InvalidRequestError
from weft.planning.replica import PlannedRequest, Segment, answer_segment
from weft.planning.traces import unique_segment

_PREFIX_BASE = 1 << 36
"""Token ids of shared prefixes begin here."""
_PREFIX_ROOM = 1 << 20
_Z99 = 2.326
"""The 99th percentile of the normal distribution."""


@dataclass(frozen=True)
class LengthRange:
    """Token counts: uniform from `low` to `high`, or log-normal with the median `low` and the 99th percentile `high`."""

    low: int
    high: int
    is_log_normal: bool = False

    def draw(self, source: random.Random) -> int:
        if not self.is_log_normal:
            return source.randint(self.low, self.high)
        spread = math.log(self.high / self.low) / _Z99
        return max(1, round(self.low * math.exp(spread * source.gauss(0.0, 1.0))))


def parse_lengths(text: str, name: str) -> LengthRange:
    """Parses '128', '16-512' (uniform), or '400~4000' (log-normal: the median and the 99th percentile)."""
    found = re.fullmatch(r"(\d{1,9})(?:([-~])(\d{1,9}))?", str(text).strip())
    if not found or not 1 <= int(found[1]) <= int(found[3] or found[1]):
        raise InvalidRequestError(
            f"{name} is {text!r}; write a count such as 128, a range such as 16-512, or median and 99th percentile such as "
            "400~4000",
            field=name,
        )
    return LengthRange(int(found[1]), int(found[3] or found[1]), found[2] == "~")


@dataclass(frozen=True)
class Description:
    """A load. Times are in seconds."""

    rate: float
    """Requests per second; with conversations, their first requests."""
    requests: int
    prompt: LengthRange = LengthRange(128, 128)
    """New tokens of a prompt, after its shared prefix and the earlier turns."""
    answer: LengthRange = LengthRange(128, 128)
    burst: int = 1
    """This many requests arrive at once. 1: arrivals are independent (Poisson)."""
    prefix: int = 0
    """Tokens of a shared prefix."""
    prefixes: int = 1
    """How many different prefixes there are. All are equally frequent."""
    turns: LengthRange = LengthRange(1, 1)
    """Requests of a conversation."""
    pause: float = 30.0
    """Seconds between the requests of a conversation, on average."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("requests", 1), ("burst", 1), ("prefixes", 1), ("prefix", 0)):
            if getattr(self, name) < low:
                raise InvalidRequestError(
                    f"{name} is {getattr(self, name)}; allowed: at least {low}", field=name
                )
        for name in ("rate", "pause"):
            if not 0 < getattr(self, name) < 1e9:
                raise InvalidRequestError(f"{name} is {getattr(self, name)}; allowed: above 0", field=name)
        if self.turns.is_log_normal:
            raise InvalidRequestError("turns has a '~'; write a range such as 1-6", field="turns")


def described(load: Description, *, context: int, speed: float = 1.0) -> Iterator[PlannedRequest]:
    """The requests of a description in order of arrival. A conversation ends before it would exceed the context."""
    longest = load.prefix + load.prompt.low + load.answer.low
    if longest > context:
        raise InvalidRequestError(
            f"prefix, prompt and answer have at least {longest} tokens; the context of the profile is {context}; make them "
            "shorter",
            code="context_length_exceeded",
        )
    source = random.Random(f"load {load.seed}")
    later: list[tuple[float, int, int, PlannedRequest]] = []
    """The next turns of conversations: (time, order, turns that follow, the turn before)."""
    begins = _begins(load, random.Random(f"arrivals {load.seed}"))
    begin, conversations = next(begins), 0
    for number in range(load.requests):
        if later and later[0][0] <= begin:
            at, _, turns, before = heapq.heappop(later)
            history = (*before.segments, answer_segment(before))
            session = before.session
        else:
            at, turns = begin, load.turns.draw(source)
            begin = next(begins)
            history = _prefix(load, source)
            session = None if load.turns.high == 1 else f"session-{conversations}"
            conversations += 1
        room = context - sum(count for _, count in history)
        prompt, answer = load.prompt.draw(source), load.answer.draw(source)
        is_cut = prompt + answer > room
        answer = max(1, min(answer, room - 1))
        prompt = max(1, min(prompt, room - answer))
        segments = (*history, unique_segment(number, prompt))
        request = PlannedRequest(number, at / speed, segments, answer, session, is_cut=is_cut)
        needs = load.prompt.low + load.answer.low
        if turns > 1 and room - prompt - answer > needs:
            heapq.heappush(later, (at + source.expovariate(1 / load.pause), number, turns - 1, request))
        yield request


def _begins(load: Description, source: random.Random) -> Iterator[float]:
    """The times of first requests. Bursts come at equal distances."""
    now, number = 0.0, 0
    while True:
        if load.burst > 1:
            yield load.burst / load.rate * (number // load.burst)
        else:
            yield now
            now += source.expovariate(load.rate)
        number += 1


def _prefix(load: Description, source: random.Random) -> tuple[Segment, ...]:
    if not load.prefix:
        return ()
    return ((_PREFIX_BASE + source.randrange(load.prefixes) * _PREFIX_ROOM, load.prefix),)
