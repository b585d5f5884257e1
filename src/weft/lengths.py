"""Predicts how long an answer will be, from the lengths of earlier answers. Pure: no clock, no randomness, no I/O.

Earlier answers are counted in four contexts, from special to general: equal template, tools and sizes; equal template and
tools; the same owner; all requests. A context may have few answers, so its lengths are mixed with those of the next one.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import neg
from typing import NamedTuple

from weft.parameters import check_number

NUM_BUCKETS = 48
HALF_LIFE = 500
"""After this many later answers in the same context, an answer has half the weight of a new one."""
_PARENT_WEIGHT = 4.0
"""In the mix, the next more general context counts as this many answers."""
MAX_CONTEXTS = 4096
"""Maximum number of contexts. Each takes about 1 KiB. Beyond it, the owner without an answer for the longest time loses
its oldest context."""
_MAX_OF_ONE_OWNER = MAX_CONTEXTS // 4
_GROWTH = 2 ** (1 / HALF_LIFE)
_LARGEST_WEIGHT = 1e9
"""Above this weight of the newest answer, all counts of a context are divided by it, so that they stay finite."""


def _edges() -> tuple[int, ...]:
    edges = [1]
    while len(edges) < NUM_BUCKETS:
        edges.append(max(edges[-1] + 1, round(1.25 * edges[-1])))
    return tuple(edges)


EDGES = _edges()
"""Bucket b has the lengths from EDGES[b] to EDGES[b + 1] - 1. The last one has no end."""
_WIDTHS = (*(after - before for before, after in pairwise(EDGES)), EDGES[-1] // 4)
_LOG_UNIFORM = tuple(math.log2((edge + width) / edge) for edge, width in zip(EDGES, _WIDTHS, strict=True))
_PRIOR = tuple(value / sum(_LOG_UNIFORM) for value in _LOG_UNIFORM)
"""The distribution before the first answer: every order of magnitude is equally likely."""


@dataclass(frozen=True, slots=True)
class ExpectedLength:
    """The expected number of tokens of an answer. It orders work, and never changes an answer."""

    mean: float
    p50: float
    """Half of the answers are at most this long."""
    p90: float

    def __post_init__(self) -> None:
        for name in ("mean", "p50", "p90"):
            check_number(f"expected.{name}", getattr(self, name), 0.0, 2.0**31)


class LengthFeatures(NamedTuple):
    """What is known about a request when it arrives."""

    owner: str
    """Its API key. The contexts of one owner are never used for another."""
    template: int
    """A hash of what requests of the same kind have in common."""
    tools: int
    """A hash of the names of its tools."""
    prompt_tokens: int
    max_tokens: int
    """The most tokens that its answer may have."""


class LengthDistribution:
    """The lengths that an answer may have, and how likely each is."""

    __slots__ = ("_reached", "max_tokens")

    def __init__(self, reached: tuple[float, ...], max_tokens: int) -> None:
        """`reached[b]`: the probability that the answer has at least EDGES[b] tokens, without its limit."""
        self._reached = reached
        self.max_tokens = max_tokens

    @property
    def mean(self) -> float:
        """The mean length. Lengths above `max_tokens` count as `max_tokens`."""
        total, reached = 0.0, self._reached
        for bucket, edge in enumerate(EDGES):
            if edge > self.max_tokens:
                break
            count = min(_WIDTHS[bucket], self.max_tokens + 1 - edge)
            # The sum of P(length >= n) over the first `count` lengths n of the bucket. P falls linearly in the bucket.
            fall = self._fall(bucket) / _WIDTHS[bucket]
            total += count * reached[bucket] - fall * count * (count - 1) / 2
        return max(1.0, total)

    def quantile(self, share: float, beyond: int = 0) -> int:
        """The quantile `share` (0 to 1) of the length of an answer that has more than `beyond` tokens."""
        reached = self._reached
        wanted = (1 - share) * self._reached_at(beyond + 1)
        if wanted <= 0:
            return self.max_tokens
        # `reached` falls, so the search is over its negation.
        bucket = max(0, bisect_right(reached, -wanted, key=neg) - 1)
        fall = self._fall(bucket)
        within = (reached[bucket] - wanted) / fall if fall > 0 else 1.0
        length = math.ceil(EDGES[bucket] + min(1.0, within) * _WIDTHS[bucket]) - 1
        return min(self.max_tokens, max(length, beyond + 1))

    def expected(self) -> ExpectedLength:
        return ExpectedLength(self.mean, self.quantile(0.5), self.quantile(0.9))

    def _reached_at(self, length: int) -> float:
        """The probability that the answer has at least `length` tokens, without its limit."""
        if length <= 1:
            return 1.0
        bucket = bisect_right(EDGES, length) - 1
        within = min(1.0, (length - EDGES[bucket]) / _WIDTHS[bucket])
        return self._reached[bucket] - within * self._fall(bucket)

    def _fall(self, bucket: int) -> float:
        """The probability that the length is in a bucket."""
        after = self._reached[bucket + 1] if bucket + 1 < NUM_BUCKETS else 0.0
        return self._reached[bucket] - after


class _Context:
    """How many answers ended, and how many were cut, by the bucket of their length. Newer answers weigh more."""

    __slots__ = ("cut", "ended", "weight")

    def __init__(self) -> None:
        self.ended = array("d", bytes(8 * NUM_BUCKETS))
        self.cut = array("d", bytes(8 * NUM_BUCKETS))
        self.weight = 1.0
        """The weight of the newest answer. It grows with each answer, and counts are divided by it: older ones fade."""

    def add(self, bucket: int, was_cut: bool) -> None:
        self.weight *= _GROWTH
        (self.cut if was_cut else self.ended)[bucket] += self.weight
        if self.weight > _LARGEST_WEIGHT:
            for counts in (self.ended, self.cut):
                counts[:] = array("d", (count / self.weight for count in counts))
            self.weight = 1.0

    def mixed_with(self, parent: tuple[float, ...]) -> tuple[float, ...]:
        """`reached` of this context (see `LengthDistribution`), mixed with `parent`, the `reached` of the next context.

        A cut answer would have been longer than it is. So it counts among the answers that did not end before its own
        length, and is left out beyond that length (the estimator of Kaplan and Meier)."""
        scale = 1 / self.weight
        after = (*parent[1:], 0.0)
        ends = [
            scale * ended + _PARENT_WEIGHT * (before - later)
            for ended, before, later in zip(self.ended, parent, after, strict=True)
        ]
        leaves = [end + scale * cut for end, cut in zip(ends, self.cut, strict=True)]
        at_risk = list(accumulate(reversed(leaves)))[::-1]
        reached, share = [], 1.0
        for end, count, cut in zip(ends, at_risk, self.cut, strict=True):
            reached.append(share)
            # An answer that was cut in this bucket counts half, since it may have been cut anywhere in the bucket.
            risk = count - scale * cut / 2
            share = max(0.0, share * (1 - end / risk)) if risk > 0 else 0.0
        return tuple(reached)


_ContextKey = tuple[int, ...]


class LengthPredictor:
    """Owns the counts of the lengths of earlier answers, by context."""

    def __init__(self) -> None:
        self._all = _Context()
        self._owners: OrderedDict[str, OrderedDict[_ContextKey, _Context]] = OrderedDict()
        """Owner -> its contexts. Owners and contexts are in order of their newest answers, the oldest first."""
        self.num_contexts = 0

    def predict(self, features: LengthFeatures) -> LengthDistribution:
        reached = self._all.mixed_with(_PRIOR_REACHED)
        owned = self._owners.get(features.owner)
        if owned is not None:
            for key in reversed(_keys(features)):
                context = owned.get(key)
                if context is None:
                    break
                reached = context.mixed_with(reached)
        return LengthDistribution(reached, features.max_tokens)

    def learn(self, features: LengthFeatures, num_tokens: int, *, was_cut: bool) -> None:
        """Adds an answer. `was_cut`: its limit, a cancel or a deadline ended it, so it would have been longer."""
        if num_tokens < 1:
            return
        bucket = bisect_right(EDGES, num_tokens) - 1
        self._all.add(bucket, was_cut)
        owned = self._owners.setdefault(features.owner, OrderedDict())
        self._owners.move_to_end(features.owner)
        for key in _keys(features):
            context = owned.get(key)
            if context is None:
                context = owned[key] = _Context()
                self.num_contexts += 1
            owned.move_to_end(key)
            context.add(bucket, was_cut)
        while len(owned) > _MAX_OF_ONE_OWNER:
            self._drop_oldest(features.owner)
        while self.num_contexts > MAX_CONTEXTS:
            self._drop_oldest(next(iter(self._owners)))

    def _drop_oldest(self, owner: str) -> None:
        owned = self._owners[owner]
        owned.popitem(last=False)
        self.num_contexts -= 1
        if not owned:
            del self._owners[owner]


def _keys(features: LengthFeatures) -> tuple[_ContextKey, ...]:
    """The contexts of a request within its owner, from special to general."""
    kind = (features.template, features.tools)
    sizes = (features.prompt_tokens.bit_length(), features.max_tokens.bit_length())
    return (*kind, *sizes), kind, ()


_PRIOR_REACHED = tuple(accumulate((-share for share in _PRIOR[:-1]), initial=1.0))
