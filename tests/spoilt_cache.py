"""Fills caches with NaN, so that a read of unwritten cells gives NaN."""

from __future__ import annotations

from typing import Any

import numpy as np


def spoil(cache: np.ndarray, blocks: Any = ...) -> None:
    """`cache` has floats, or the codes and scales of the C++ kernels. A scale of 0xFFFF is NaN."""
    cache[blocks] = 0xFFFF if cache.dtype == np.uint16 else np.nan
