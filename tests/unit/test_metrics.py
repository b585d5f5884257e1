"""Compares histograms with exact quantiles. Checks the declared series of the engine."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.metrics import (
    ENGINE_SERIES,
    BlockStates,
    Evictions,
    Histogram,
    SchedulerStats,
    ServingMetrics,
    StepSeconds,
    TwoTierKvCache,
)

TOLERANCE = 0.05
"""The documented error of `Histogram`."""


def exact(values: list[float], share: float) -> float:
    """The smallest value that a `share` of the values does not exceed."""
    return sorted(values)[max(1, math.ceil(share * len(values))) - 1]


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.floats(1e-6, 86_000.0), min_size=1, max_size=60),
    share=st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]),
)
def test_quantiles_are_those_of_the_values_within_five_percent(values: list[float], share: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    assert histogram.quantile(share) == pytest.approx(exact(values, share), rel=TOLERANCE)


def test_a_summary_of_many_values_equals_the_exact_figures_within_five_percent() -> None:
    source = random.Random(1)
    values = [source.lognormvariate(-3, 1.5) for _ in range(5000)]
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    summary = histogram.summary()
    assert summary.count == 5000
    assert summary.mean == pytest.approx(sum(values) / 5000)
    assert summary.largest == max(values)
    for figure, share in ((summary.p50, 0.5), (summary.p90, 0.9), (summary.p99, 0.99)):
        assert figure == pytest.approx(exact(values, share), rel=TOLERANCE)
    assert summary.p50 <= summary.p90 <= summary.p99 <= summary.largest


def test_recording_a_value_many_times_equals_recording_it_that_often() -> None:
    at_once, one_by_one = Histogram(), Histogram()
    at_once.record(0.25, times=7)
    at_once.record(0.5)
    for value in [0.25] * 7 + [0.5]:
        one_by_one.record(value)
    assert at_once.counts == one_by_one.counts and at_once.summary() == one_by_one.summary()


def test_a_summary_of_an_empty_histogram_is_zero() -> None:
    summary = Histogram().summary()
    assert (summary.count, summary.mean, summary.p50, summary.p99, summary.largest) == (0, 0.0, 0.0, 0.0, 0.0)


def test_no_quantile_exceeds_the_largest_value() -> None:
    histogram = Histogram()
    histogram.record(0.0, times=10)
    assert histogram.quantile(0.5) == histogram.quantile(0.99) == 0.0


def test_a_value_above_the_last_bucket_is_reported_exactly() -> None:
    histogram = Histogram()
    histogram.record(1_000_000.0)
    assert histogram.quantile(0.99) == pytest.approx(1_000_000.0, rel=TOLERANCE)
    assert histogram.count == 1 and histogram.largest == 1_000_000.0


def test_every_series_of_the_engine_shows_a_figure_that_exists() -> None:
    owners = {
        "": ServingMetrics,
        "totals": SchedulerStats,
        "step_seconds": StepSeconds,
        "blocks": BlockStates,
        "evictions": Evictions,
        "two_tier": TwoTierKvCache,
        "store_blocks": BlockStates,
        "store_evictions": Evictions,
    }
    for series in ENGINE_SERIES:
        owner, _, name = series.figure.rpartition(".")
        assert hasattr(owners[owner], name), series.figure
