"""Tests of the CUDA backend on a GPU. `make test-gpu` collects them; without a GPU they are skipped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

HERE = Path(__file__).parent


def what_is_missing() -> str | None:
    """Why these tests cannot run on this machine; None if they can."""
    try:
        import torch
        import triton.language  # noqa: F401
    except ImportError as error:
        return f"needs torch and Triton: {error}"
    return None if torch.cuda.is_available() else "needs an NVIDIA GPU that torch can use"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    if ours and (reason := what_is_missing()):
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=reason))
