"""`python -m benchmarks revisions`: the interval, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks import revisions
from benchmarks.revisions import Ratios, choose_work
from weft.errors import InvalidRequestError


def test_the_change_is_the_geometric_mean_of_the_rounds_with_a_t_interval() -> None:
    mean, low, high = Ratios([100.0, 100.0, 100.0], [110.0, 100.0, 110.0 * 1.1]).change()
    logs = [math.log(1.1), 0.0, math.log(1.21)]
    assert mean == pytest.approx(math.exp(sum(logs) / 3) - 1)
    # Three rounds: t = 4.30 with two degrees of freedom, standard deviation log(1.1).
    margin = 4.30 * math.log(1.1) / math.sqrt(3)
    assert (low, high) == pytest.approx(
        (math.expm1(sum(logs) / 3 - margin), math.expm1(sum(logs) / 3 + margin))
    )


def test_equal_rounds_have_an_interval_without_width() -> None:
    assert Ratios([50.0] * 30, [49.0] * 30).change() == pytest.approx((-0.02, -0.02, -0.02))


def test_a_checkout_without_an_environment_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="run `make kernels` there"):
        revisions.main(tmp_path, tmp_path, work=("W1",), rounds=2)


def test_an_unknown_workload_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequestError, match=r"W9.*W32"):
        choose_work("W1,W9")
    assert choose_work(None) == ("W1", "W8", "W32", "Wmix")
