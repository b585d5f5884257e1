"""The form of measured step costs: which features of a plan take time, and the seconds that follow from them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from weft.errors import InvalidRequestError

KNOTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Token counts between which the cost of the linear layers is a straight line. Kernels compute rows in tiles, so it is no
straight line in all."""


class Plan(Protocol):
    """The part of an `IterationPlan` that its cost depends on."""

    @property
    def num_decodes(self) -> int: ...
    @property
    def starts(self) -> Sequence[int]: ...
    @property
    def counts(self) -> Sequence[int]: ...
    @property
    def samples(self) -> Sequence[bool]: ...
    @property
    def drafts(self) -> Sequence[Sequence[int]]: ...


class StepShape(NamedTuple):
    """The features of a step."""

    tokens: int
    samples: int
    """Tokens that are sampled: only these need logits."""
    context: int
    """Positions whose K and V are read, over all entries."""
    pairs: int
    """Pairs of a prompt token and a position up to it, over all chunks."""
    shared: int = 0
    """Of the context, positions that another entry of the step reads too: they are in the caches of the processor."""


def shape_of(plan: Plan, num_blocks: int | None = None, block_size: int = 1) -> StepShape:
    """`num_blocks`: the different KV blocks that the step reads. None: no block is shared."""
    first = plan.num_decodes
    tokens = samples = first
    context = first + sum(plan.starts[:first])
    pairs = 0
    for index in range(first, len(plan.starts)):
        start, count = plan.starts[index], plan.counts[index]
        tokens += count
        samples += plan.samples[index]
        context += start + count
        pairs += count * start + count * (count + 1) // 2
    shared = 0
    if num_blocks is not None:
        # The last block of an entry is half full on average.
        shared = max(0, context - num_blocks * block_size + len(plan.starts) * block_size // 2)
    return StepShape(tokens, samples + sum(map(len, plan.drafts)), context, pairs, shared)


@dataclass(frozen=True)
class MeasuredCosts:
    """Seconds of a step: base + table(tokens) + per_sample * samples + per_context * (context - shared) + per_shared *
    shared + per_pair * pairs."""

    base: float
    table: tuple[tuple[int, float], ...]
    """(tokens, seconds), linear in between, beyond the last as between the last two. It begins at (0, 0)."""
    per_sample: float
    per_context: float
    per_pair: float
    per_shared: float
    noise: tuple[tuple[float, tuple[float, ...]], ...] = ((0.0, (1.0,)),)
    """(seconds, quantiles), for predicted seconds from there on: equally distant quantiles of measured by predicted
    seconds. A simulation draws one for each step. Short steps vary more than long ones."""
    swap_per_block: float = 1e-4

    def __post_init__(self) -> None:
        knots, seconds = [knot for knot, _ in self.table], [value for _, value in self.table]
        if len(knots) < 2 or self.table[0] != (0, 0.0) or sorted(set(knots)) != knots:
            raise InvalidRequestError("the table of step costs does not begin at 0 tokens, or does not rise")
        numbers = (
            self.base,
            self.per_sample,
            self.per_context,
            self.per_pair,
            self.per_shared,
            self.swap_per_block,
        )
        if sorted(seconds) != seconds or not all(0 <= one < 1e6 for one in (*numbers, *seconds)):
            raise InvalidRequestError(
                "the step costs hold a number below 0, or seconds that fall with more tokens"
            )
        ratios = [one for _, quantiles in self.noise for one in quantiles]
        begins = [begin for begin, _ in self.noise]
        if (
            begins[:1] != [0]
            or sorted(begins) != begins
            or not all(0 <= one < 1e6 for one in begins)
            or not all(quantiles for _, quantiles in self.noise)
            or not all(0 < one < 1e3 for one in ratios)
        ):
            raise InvalidRequestError("the noise of the step costs holds a ratio or seconds out of range")
        if self.of(StepShape(1, 1, 1, 0)) <= 0:
            raise InvalidRequestError("a step with one token takes no time by these step costs")

    def of(self, shape: StepShape) -> float:
        tokens, samples, context, pairs, shared = shape
        return (
            self.base
            + self.linear_seconds(tokens)
            + self.per_sample * samples
            + self.per_context * (context - shared)
            + self.per_shared * shared
            + self.per_pair * pairs
        )

    def noisy(self, seconds: float, chance: float) -> float:
        """The seconds of a step with the ratio that `chance`, from 0 to 1, selects."""
        quantiles = self.noise[0][1]
        for begin, others in self.noise:
            if seconds < begin:
                break
            quantiles = others
        return seconds * quantiles[int(chance * len(quantiles))]

    def linear_seconds(self, tokens: int) -> float:
        """The table at this number of tokens."""
        table = self.table
        index = min(max(1, bisect_right(table, (tokens, float("inf")))), len(table) - 1)
        (x0, y0), (x1, y1) = table[index - 1], table[index]
        return y0 + (tokens - x0) * (y1 - y0) / (x1 - x0)

    @property
    def per_token(self) -> float:
        """Seconds of one token of a long prompt."""
        (x0, y0), (x1, y1) = self.table[-2:]
        return (y1 - y0) / (x1 - x0)
