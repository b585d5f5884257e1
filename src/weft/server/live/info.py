"""The description of a live engine or of a replay. The page reads it before the first frame."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from weft.live import BLOCK_STATES, FINISH_REASONS, LiveInfo
from weft.metrics import Histogram
from weft.request import Priority

REPLICA = 0
"""Each frame names its model and its replica. A server has one model with one replica."""


def live_info(
    mode: Literal["live", "replay"], model: str, info: LiveInfo, *, show_prompts: bool = False
) -> dict[str, Any]:
    """The content of `/live/info`."""
    return {
        "mode": mode,
        "model": model,
        "replica": REPLICA,
        "show_prompts": show_prompts,
        "reasons": [reason.value for reason in FINISH_REASONS],
        "block_states": BLOCK_STATES,
        "priorities": [priority.name.lower() for priority in Priority],
        "buckets": [Histogram.FIRST, Histogram.GROWTH],
        **msgspec.to_builtins(info),
    }
