"""Which kernels compute here: whether the C++ ones were built and are wanted, and what to call them before a person."""

from __future__ import annotations

import os
from importlib.util import find_spec

from weft.backends.cpu.threads import thread_count
from weft.errors import InvalidRequestError

NUMPY = "numpy"
"""What WEFT_KERNELS is set to where numpy shall compute although there are kernels."""


def has_kernels() -> bool:
    """Whether the C++ kernels were built, and nobody asks for numpy instead (WEFT_KERNELS=numpy)."""
    return _wanted() != NUMPY and find_spec("weft._kernels") is not None


def instruction_set() -> str | None:
    """The one whose kernels a backend opened now would use; None where numpy computes."""
    if not has_kernels():
        return None
    from weft import _kernels

    wanted = _wanted()
    if wanted is not None and wanted not in _kernels.available():
        raise InvalidRequestError(
            f"WEFT_KERNELS is {wanted!r}; this processor has {', '.join(_kernels.available())}, and there is {NUMPY}"
        )
    return wanted or _kernels.in_use()


def describe(threads: int | None = None) -> str:
    """One line for people: "zen4, 2 threads", or why there are none and what to do."""
    if (name := instruction_set()) is not None:
        count = thread_count(threads)
        return f"{name}, {count} thread{'' if count == 1 else 's'}"
    if _wanted() == NUMPY:
        return "none (numpy), as WEFT_KERNELS asks"
    return (
        "none (numpy, many times slower): weft was installed without them; "
        "with a C++ compiler here, pip install --force-reinstall --no-deps weft builds them"
    )


def _wanted() -> str | None:
    return os.environ.get("WEFT_KERNELS") or None
