"""The change of a figure between two variants that were measured in turn, with its 95% interval."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean, stdev

_T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Student's t for 95% with 1, 2, ... degrees of freedom. With more than this table has, t is taken as 2.1."""


def t_95(degrees: int) -> float:
    """Student's t for a 95% interval with `degrees` degrees of freedom, at least 1."""
    return _T_95[degrees - 1] if degrees <= len(_T_95) else 2.1


@dataclass
class Ratios:
    """The measurements of one figure: a value of each variant for every round."""

    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    def change(self) -> tuple[float, float, float]:
        """The mean change of `after` over `before`, and the ends of its 95% interval, as fractions."""
        logs = [math.log(after / before) for before, after in zip(self.before, self.after, strict=True)]
        mean = fmean(logs)
        if len(logs) == 1:
            return math.expm1(mean), -1.0, math.inf
        margin = t_95(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
        return math.expm1(mean), math.expm1(mean - margin), math.expm1(mean + margin)
