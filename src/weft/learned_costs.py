"""What a scheduler has learned, as plain values: costs of steps, and finished answers. The server keeps it between two
starts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

NUM_FEATURES = 4
_MAX = 1e15


@dataclass(frozen=True)
class LearnedCosts:
    """Sums of `StepCostModel` and means of `DecodeCosts`. They are a hint: a scheduler that restores them gives them little
    weight and continues to measure. The default has no measurements."""

    steps: float = 0.0
    moments: tuple[tuple[float, ...], ...] = ((0.0,) * NUM_FEATURES,) * NUM_FEATURES
    products: tuple[float, ...] = (0.0,) * NUM_FEATURES
    fixed_rows: float = 0.0
    mean_rows: float = 0.0
    mean_seconds: float = 0.0
    mean_gap: float = 0.0

    def __post_init__(self) -> None:
        if {len(self.moments), len(self.products), *map(len, self.moments)} != {NUM_FEATURES}:
            raise ValueError(f"the costs do not have {NUM_FEATURES} features")
        times = (self.steps, self.fixed_rows, self.mean_rows, self.mean_seconds, self.mean_gap)
        for number in (*times, *self.products, *(one for line in self.moments for one in line)):
            if not 0 <= number <= _MAX:  # also NaN
                raise ValueError(f"the costs hold {number}; allowed: 0 to {_MAX:g}")

    @classmethod
    def of(
        cls, moments: Iterable[Iterable[float]], products: Iterable[float], **others: float
    ) -> LearnedCosts:
        return cls(moments=tuple(map(tuple, moments)), products=tuple(products), **others)


class LearnedText(NamedTuple):
    """A finished answer from which draft tokens are taken."""

    cache_salt: str
    tokens: tuple[int, ...]
    num_prompt_tokens: int
    """No draft tokens are taken from these first tokens. 0: the prompt was learned too."""
