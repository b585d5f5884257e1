"""Fills caches with what is not a number, so that what is read without having been written shows."""

from __future__ import annotations

from typing import Any

import numpy as np


def spoil(cache: np.ndarray, blocks: Any = ...) -> None:
    """A cache of floats, or one of the C++ kernels: codes and scales, of which the latter are floats' upper halves."""
    cache[blocks] = 0xFFFF if cache.dtype == np.uint16 else np.nan
