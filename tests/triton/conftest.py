"""Where the kernels are tested: in Triton's interpreter, or on the card with WEFT_TEST_DEVICE=cuda (`make test-gpu`)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

TEST_DEVICE = os.environ.get("WEFT_TEST_DEVICE", "cpu")

# Before triton is imported: it looks once.
if TEST_DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

if TYPE_CHECKING:
    from weft.ops.triton.device import Device


@pytest.fixture(scope="session")
def device() -> Device:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from weft.ops.triton.device import Device

    return Device(TEST_DEVICE)
