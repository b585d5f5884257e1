"""`make test-sanitize` runs these tests over a build of its own: that one, and not the usual one or none, has to be what is tested."""

import os
from pathlib import Path


def pytest_sessionstart() -> None:
    if sanitized := os.environ.get("WEFT_SANITIZED"):
        from weft import _kernels

        where = Path(_kernels.__file__)
        assert where.is_relative_to(sanitized), (
            f"the kernels that would be tested are {where}, not the sanitized ones"
        )
