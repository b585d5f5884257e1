"""Declares the sampling parameters that are numbers, and checks values of requests.

A field of `SamplingParams` declares a parameter. These are made from it: the check of values, the field of the HTTP API
and its description, the default from model files, and the input of samplers (`weft.request.PARAMETERS`).
"""

from __future__ import annotations

import dataclasses
import math
import operator
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from weft.errors import InvalidRequestError

_METADATA_KEY = "parameter"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A sampling parameter that is a number: an integer if its default is one."""

    default: float
    low: float
    high: float
    stage: Literal["draw", "filter", "penalty"]
    """The operation of the sampler that uses it. Filters have no effect on greedy requests."""
    above: bool = False
    """Whether values must be above `low`. Otherwise `low` itself is valid."""
    off: tuple[float, ...] | None = None
    """Values without effect. None: only the default has no effect. Empty: the parameter modifies another one and has no
    effect of its own."""
    is_logarithm: bool = False
    """Whether samplers get the natural logarithm of the value."""
    in_generation_config: bool = False
    """Whether generation_config.json may suggest a value."""
    gguf: str = ""
    """Its name in GGUF files, after "general.sampling."; empty: none."""
    words: str = ""
    """The description of the parameter for users."""

    @property
    def kind(self) -> type[int] | type[float]:
        return int if isinstance(self.default, int) else float

    def check(self, name: str, value: object) -> None:
        if self.kind is int:
            check_integer(name, value, int(self.low), int(self.high))
        else:
            check_number(name, value, self.low, self.high, above=self.above)


def declare(words: str, parameter: Parameter) -> Any:
    """The field of a dataclass that declares a parameter."""
    metadata = {_METADATA_KEY: dataclasses.replace(parameter, words=words)}
    return dataclasses.field(default=parameter.default, metadata=metadata)


def declared_in(kind: type) -> dict[str, Parameter]:
    """The parameters that the fields of a dataclass declare, by name."""
    fields = dataclasses.fields(kind)
    return {each.name: each.metadata[_METADATA_KEY] for each in fields if _METADATA_KEY in each.metadata}


def refuse(name: str, value: object, allowed: str) -> NoReturn:
    try:
        shown = repr(value)
    except ValueError:  # Python cannot print integers of thousands of digits
        shown = "a huge number"
    if len(shown) > 80:
        shown = shown[:77] + "..."
    raise InvalidRequestError(f"{name} is {shown}; allowed: {allowed}", field=name)


def check_number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    """Refuses everything but a finite number from `low` to `high`; with `above`, `low` itself is refused too."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf
    if not good or not (low < value if above else low <= value) or not value <= high:  # type: ignore[operator]
        refuse(name, value, f"{'above' if above else 'from'} {low:g}, up to {high:g}")


def check_integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        refuse(name, value, f"a whole number from {low} to {high}")


def check_instance(name: str, value: object, kind: type, allowed: str) -> None:
    if not isinstance(value, kind):
        refuse(name, value, allowed)


def check_text(name: str, value: object, max_length: int | None = None) -> None:
    """Refuses a value that is no text, cannot be encoded (half a surrogate pair), or is longer than `max_length`."""
    try:
        assert isinstance(value, str)
        value.encode()
    except (AssertionError, UnicodeEncodeError):
        refuse(name, value, "a string of Unicode text")
    if max_length is not None and len(value) > max_length:
        refuse(name, f"{len(value)} characters", f"at most {max_length}")


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Refuses a value that is not a list of token ids."""
    try:
        ids = tuple(value)
        kinds = set(map(type, ids))
        if bool in kinds:
            raise TypeError
        # The fast path: prompts are long, and nearly always plain integers.
        return ids if kinds <= {int} else tuple(map(operator.index, ids))
    except TypeError:
        refuse(name, value, "a list of token ids (whole numbers)")
