"""The arithmetic of rotary embedding: from what a file says about it to one frequency per pair, in float64.

default     pair i of n turns by base ** (-i / n) at every position
linear      every frequency divided by the factor
llama3      slow pairs divided by the factor, fast ones kept, a ramp in between
yarn        the same with another ramp, and cosine and sine multiplied by an attention factor
longrope    every frequency divided by a factor of its own, of which there are two sets, and an attention factor
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.ops.base import Rope

KINDS = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class RopeParameters:
    """What a file says; `kind`, one of `KINDS`, decides which of the rest count."""

    kind: str
    base: float
    rotated_size: int
    """How many features of a head turn."""
    factor: float = 1.0
    """How many times the context was stretched."""
    original_context: int = 1
    """The context before it was stretched."""
    attention_factor: float | None = None
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all: float | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    frequency_factors: tuple[float, ...] = ()
    """Divide the frequencies one by one: how GGUF files carry llama3 scaling."""

    @property
    def pairs(self) -> int:
        return self.rotated_size // 2


def resolve(parameters: RopeParameters, interleaved: bool, max_context: int) -> Rope:
    """The rope of a model that is run with contexts of up to `max_context`.

    longrope has factors for contexts up to the original one and others for longer ones. Which of them is decided
    here, once: if it depended on how long a request has become, keys in the cache would have turned by other
    frequencies than the queries that meet them, and a prefix could not be shared.
    """
    frequencies = [
        parameters.base ** (-2 * pair / parameters.rotated_size) for pair in range(parameters.pairs)
    ]
    if parameters.frequency_factors:
        frequencies = _divided(frequencies, parameters.frequency_factors)
    scale = 1.0
    if parameters.kind == "linear":
        frequencies = [frequency / parameters.factor for frequency in frequencies]
    elif parameters.kind == "llama3":
        frequencies = [_llama3(frequency, parameters) for frequency in frequencies]
    elif parameters.kind == "yarn":
        frequencies, scale = _yarn(frequencies, parameters), _yarn_scale(parameters)
    elif parameters.kind == "longrope":
        is_long = max_context > parameters.original_context
        factors = parameters.long_factors if is_long else parameters.short_factors
        frequencies, scale = _divided(frequencies, factors), _longrope_scale(parameters)
    return Rope(tuple(frequencies), interleaved, scale)


def _divided(frequencies: list[float], factors: tuple[float, ...]) -> list[float]:
    return [frequency / factor for frequency, factor in zip(frequencies, factors, strict=True)]


def _llama3(frequency: float, parameters: RopeParameters) -> float:
    """Kept if it turns often in the original context, stretched if it turns seldom."""
    turns = parameters.original_context * frequency / (2 * math.pi)
    low, high = parameters.low_frequency_factor, parameters.high_frequency_factor
    if turns > high:
        return frequency
    if turns < low:
        return frequency / parameters.factor
    kept = (turns - low) / (high - low)
    return (1 - kept) * frequency / parameters.factor + kept * frequency


def _yarn(frequencies: list[float], parameters: RopeParameters) -> list[float]:
    """Pairs before `low` are kept, pairs after `high` stretched."""
    size = parameters.rotated_size

    def pair_that_turns(times: float) -> float:
        turns_per_radian = parameters.original_context / (times * 2 * math.pi)
        return size * math.log(turns_per_radian) / (2 * math.log(parameters.base))

    low, high = pair_that_turns(parameters.beta_fast), pair_that_turns(parameters.beta_slow)
    if parameters.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without a division by zero
    result = []
    for pair, frequency in enumerate(frequencies):
        stretched = min(max((pair - low) / (high - low), 0.0), 1.0)
        result.append(frequency / parameters.factor * stretched + frequency * (1 - stretched))
    return result


def _yarn_scale(parameters: RopeParameters) -> float:
    if parameters.attention_factor is not None:
        return parameters.attention_factor

    def magnitude(multiplier: float) -> float:
        return 1.0 if parameters.factor <= 1 else 0.1 * multiplier * math.log(parameters.factor) + 1.0

    if parameters.mscale and parameters.mscale_all:
        return magnitude(parameters.mscale) / magnitude(parameters.mscale_all)
    return magnitude(1.0)


def _longrope_scale(parameters: RopeParameters) -> float:
    if parameters.attention_factor is not None:
        return parameters.attention_factor
    if parameters.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(parameters.factor) / math.log(parameters.original_context))
