"""Computes the frequencies of rotary embedding (rope), one per rotated pair of features, in float64.

default     frequency of pair i of n: base ** (-i / n) radians per position
linear      every frequency divided by `factor`
llama3      low frequencies divided by `factor`, high frequencies kept, a ramp in between
yarn        like llama3 with another ramp; cosine and sine are multiplied by an attention factor
longrope    every frequency divided by its own factor, from a short or a long list; and an attention factor
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.ops.base import Rope

KINDS = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class RopeParameters:
    """The rope parameters of a file. `kind`, one of `KINDS`, decides which of the others are used."""

    kind: str
    base: float
    rotated_size: int
    """The number of rotated features of a head."""
    factor: float = 1.0
    """The extended context, divided by `original_context`."""
    original_context: int = 1
    """The context length for which the model was trained before its context was extended."""
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
    """A divisor for each frequency. GGUF files express llama3 scaling this way."""

    @property
    def pairs(self) -> int:
        return self.rotated_size // 2


def resolve(parameters: RopeParameters, interleaved: bool, max_context: int) -> Rope:
    """The rope of a model with contexts of up to `max_context`.

    longrope has short factors for the original context, and long factors for longer ones. `max_context` selects them,
    once for all requests. If the length of a request selected them, keys in the KV cache and later queries would
    have different frequencies, and prefixes could not be shared.
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
    """Keeps a frequency with many rotations in the original context, and divides one with few by the factor."""
    rotations = parameters.original_context * frequency / (2 * math.pi)
    low, high = parameters.low_frequency_factor, parameters.high_frequency_factor
    if rotations > high:
        return frequency
    if rotations < low:
        return frequency / parameters.factor
    kept = (rotations - low) / (high - low)
    return (1 - kept) * frequency / parameters.factor + kept * frequency


def _yarn(frequencies: list[float], parameters: RopeParameters) -> list[float]:
    """Keeps the frequencies of pairs before `low`, and divides the frequencies of pairs after `high` by the factor."""
    size = parameters.rotated_size

    def pair_with_rotations(rotations: float) -> float:
        """The (fractional) pair that rotates this many times in the original context."""
        wavelength_ratio = parameters.original_context / (rotations * 2 * math.pi)
        return size * math.log(wavelength_ratio) / (2 * math.log(parameters.base))

    low, high = pair_with_rotations(parameters.beta_fast), pair_with_rotations(parameters.beta_slow)
    if parameters.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001  # avoids a division by zero; the ramp becomes a jump
    result = []
    for pair, frequency in enumerate(frequencies):
        ramp = min(max((pair - low) / (high - low), 0.0), 1.0)
        result.append(frequency / parameters.factor * ramp + frequency * (1 - ramp))
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
