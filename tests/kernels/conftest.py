"""Fixtures of the kernel tests. `make test-sanitize` runs them on its own build; pytest_sessionstart checks that this
build is the one under test."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

try:
    from weft import _kernels
except ImportError:  # the kernel tests skip themselves
    SETS = []
else:
    SETS = _kernels.available()


@pytest.fixture(params=SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set of this machine, one after the other."""
    before = _kernels.in_use()
    _kernels.use(request.param)
    yield request.param
    _kernels.use(before)


def pytest_sessionstart() -> None:
    if sanitized := os.environ.get("WEFT_SANITIZED"):
        where = Path(_kernels.__file__)
        assert where.is_relative_to(sanitized), f"the kernels under test are {where}, not the sanitized build"
