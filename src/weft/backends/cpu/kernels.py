"""Says which kernels the CPU backend uses: the C++ kernels of one instruction set, or numpy."""

from __future__ import annotations

import os
from importlib.util import find_spec

from weft.backends.cpu.threads import thread_count
from weft.errors import InvalidRequestError

NUMPY = "numpy"
"""The value of WEFT_KERNELS that selects numpy although the C++ kernels were built."""


def has_kernels() -> bool:
    """Whether the C++ kernels were built and WEFT_KERNELS does not select numpy."""
    return _setting() != NUMPY and find_spec("weft._kernels") is not None


def instruction_set() -> str | None:
    """The instruction set that a newly opened backend would use. None: numpy."""
    if not has_kernels():
        return None
    from weft import _kernels

    setting = _setting()
    if setting is not None and setting not in _kernels.available():
        allowed = ", ".join((*_kernels.available(), NUMPY))
        raise InvalidRequestError(f"WEFT_KERNELS is {setting!r}; allowed on this processor: {allowed}")
    return setting or _kernels.in_use()


def describe(threads: int | None = None) -> str:
    """One line for the user: "zen4, 2 threads", or why numpy is used and what to do."""
    if (name := instruction_set()) is not None:
        count = thread_count(threads)
        return f"{name}, {count} thread{'' if count == 1 else 's'}"
    if _setting() == NUMPY:
        return "none (numpy), as WEFT_KERNELS asks"
    return (
        "none (numpy, many times slower): weft was installed without them; "
        "with a C++ compiler here, pip install --force-reinstall --no-deps weft builds them"
    )


def _setting() -> str | None:
    return os.environ.get("WEFT_KERNELS") or None
