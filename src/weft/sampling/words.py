"""The numeric sampling parameters of a request as samplers get them: a list of numbers, and flags."""

from __future__ import annotations

import math

from weft.request import PARAMETERS, SamplingParams, values_of

# For each parameter, the values with which it has no effect. A parameter without such values has no flag.
_OFF_VALUES = [(each.default,) if each.off is None else each.off for each in PARAMETERS.values()]
_FLAGS = [1 << place if off else 0 for place, off in enumerate(_OFF_VALUES)]


def sampler_words(params: SamplingParams) -> list[float]:
    """The numbers that samplers get, in the order of `PARAMETERS`."""
    return [
        (math.log(value) if value > 0.0 else -math.inf) if each.is_logarithm else value
        for value, each in zip(values_of(params), PARAMETERS.values(), strict=True)
    ]


def sampler_flags(params: SamplingParams) -> int:
    """The parameters that have an effect: one bit for each, in the order of `PARAMETERS`, the first is the lowest."""
    rows = zip(values_of(params), _FLAGS, _OFF_VALUES, strict=True)
    return sum(flag for value, flag, off in rows if value not in off)


def flags_of(*names: str) -> int:
    """The bits of these parameters in `sampler_flags`."""
    return sum(flag for name, flag in zip(PARAMETERS, _FLAGS, strict=True) if name in names)
