"""Chooses the device of the tests: Triton's interpreter, or the GPU with WEFT_TEST_DEVICE=cuda (`make test-gpu`)."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Small models of embedders.
sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

if TYPE_CHECKING:
    from weft.ops.triton.device import Device

TEST_DEVICE = os.environ.get("WEFT_TEST_DEVICE", "cpu")

# Set before triton is imported: triton reads it once.
if TEST_DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

# This folder is called triton too, so look for a module that only the package has.
if find_spec("torch") is None or find_spec("triton.language") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> Device:
    from weft.ops.triton.device import Device

    return Device(TEST_DEVICE)
