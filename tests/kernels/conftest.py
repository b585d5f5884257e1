"""`make test-sanitize` runs these tests over a build of its own: that one, and not the usual one or none, has to be what is tested."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

try:
    from weft import _kernels
except ImportError:  # tests of kernels skip themselves
    SETS = []
else:
    SETS = _kernels.available()


@pytest.fixture(params=SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every one that this machine has, one after the other."""
    before = _kernels.in_use()
    _kernels.use(request.param)
    yield request.param
    _kernels.use(before)


def pytest_sessionstart() -> None:
    if sanitized := os.environ.get("WEFT_SANITIZED"):
        where = Path(_kernels.__file__)
        assert where.is_relative_to(sanitized), (
            f"the kernels that would be tested are {where}, not the sanitized ones"
        )
