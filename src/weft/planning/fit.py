"""Fits the costs of steps to measured steps: least squares of the relative error, with no coefficient below 0."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from weft.errors import InvalidRequestError
from weft.planning.costs import KNOTS, MeasuredCosts, StepShape

LEAST_STEPS = 200
"""Fewer measured steps say too little about a machine."""
_NOISE_QUANTILES = 32
_NOISE_BANDS = 4
"""Parts of the range of predicted seconds, each with quantiles of its own. They are equally wide on a logarithmic scale."""
_LEAST_IN_BAND = 30
_OUTLIER = 4.0
"""Steps that took longer than this many times their prediction are left out of the next fit: the machine stalled."""
_ROUNDS = 6
_MOST_STEPS = 200_000


class Fit(NamedTuple):
    costs: MeasuredCosts
    num_steps: int
    mean_error: float
    """The mean of |measured / predicted - 1|."""
    bias: float
    """Sum of measured seconds by sum of predicted seconds. 1: the sums agree."""


def fit(steps: Sequence[tuple[StepShape, float]], swap_per_block: float = 1e-4) -> Fit:
    """The costs of steps that were measured: their shapes and seconds."""
    steps = [(shape, seconds) for shape, seconds in steps if seconds > 0 and shape.tokens][-_MOST_STEPS:]
    if len(steps) < LEAST_STEPS:
        raise InvalidRequestError(
            f"{len(steps)} steps were measured; a profile needs at least {LEAST_STEPS}: record more load"
        )
    largest = max(shape.tokens for shape, _ in steps)
    ends = [knot for knot in KNOTS if knot < largest]
    knots = [*ends, max(largest, 2)]
    has_shared = any(shape.shared > shape.context // 2 for shape, _ in steps)
    features = _features([shape for shape, _ in steps], knots)
    seconds = np.array([seconds for _, seconds in steps])
    # The error is relative to the predicted seconds. Relative to the measured ones, the few steps that seem short would
    # count most: a late reading of the clock makes one step longer, and the next shorter.
    predicted = np.full(len(seconds), seconds.mean())
    for _ in range(_ROUNDS):
        is_usual = seconds < _OUTLIER * predicted
        solution = _solve(features[is_usual], seconds[is_usual], predicted[is_usual])
        predicted = np.maximum(features @ solution, 1e-9)
    ratios = seconds / predicted
    base, per_sample, per_context, per_pair, per_shared, *slopes = map(float, solution)
    table, height = [(0, 0.0)], 0.0
    for (low, high), slope in zip(pairwise(knots), slopes, strict=True):
        height += slope * (high - low)
        table.append((high, height))
    costs = MeasuredCosts(
        base,
        tuple(table),
        per_sample,
        per_context,
        per_pair,
        per_shared if has_shared else per_context,
        _noise(predicted, ratios),
        swap_per_block,
    )
    return Fit(costs, len(steps), float(np.mean(np.abs(ratios - 1))), float(seconds.sum() / predicted.sum()))


def _noise(predicted: np.ndarray, ratios: np.ndarray) -> tuple[tuple[float, tuple[float, ...]], ...]:
    """Quantiles of the ratios, by predicted seconds. Their mean is 1, so that they do not change the sum of many steps."""
    begins = np.geomspace(predicted.min(), predicted.max() * 1.001, _NOISE_BANDS + 1)
    shares = (np.arange(_NOISE_QUANTILES) + 0.5) / _NOISE_QUANTILES
    found: list[tuple[float, tuple[float, ...]]] = []
    for begin, end in pairwise(begins):
        of_band = ratios[(predicted >= begin) & (predicted < end)]
        if len(of_band) >= _LEAST_IN_BAND:
            quantiles = np.quantile(np.clip(of_band, 0.05, 20.0), shares)
            quantiles /= quantiles.mean()
            found.append((float(begin) if found else 0.0, tuple(round(float(one), 4) for one in quantiles)))
    return tuple(found) or ((0.0, (1.0,)),)


def _features(shapes: Sequence[StepShape], knots: Sequence[int]) -> np.ndarray:
    tokens, samples, context, pairs, shared = np.array(shapes, float).T
    ramps = [np.clip(tokens - low, 0, high - low) for low, high in pairwise(knots)]
    return np.stack([np.ones(len(tokens)), samples, context - shared, pairs, shared, *ramps], axis=1)


def _solve(features: np.ndarray, seconds: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """Coefficients of at least 0 with the least sum of squared errors, each error in units of `unit`. Coordinate descent
    on the normal equations needs no start and always ends."""
    weighted = features / unit[:, None]
    scale = np.maximum(np.sqrt((weighted**2).sum(axis=0)), 1e-30)
    weighted /= scale
    moments = weighted.T @ weighted + 1e-9 * np.eye(len(scale))
    products = weighted.T @ (seconds / unit)
    found = np.zeros(len(scale))
    for _ in range(20_000):
        before = found.copy()
        for index in range(len(found)):
            rest = products[index] - moments[index] @ found + moments[index, index] * found[index]
            found[index] = max(0.0, rest / moments[index, index])
        if np.abs(found - before).max() <= 1e-8 * max(1e-30, found.max()):
            break
    return found / scale
