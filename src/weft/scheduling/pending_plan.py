"""A plan in flight, as the scheduler remembers it."""

from __future__ import annotations

from dataclasses import dataclass

from weft.plan import IterationPlan
from weft.scheduling.cache.block_pool import BlockHash
from weft.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PendingPlan:
    plan: IterationPlan
    sequences: list[Sequence]
    """sequences[i] is the sequence of entry i of the plan."""
    registered: list[tuple[int, BlockHash]]
    """Blocks that the step fills. They leave the prefix cache if the step fails."""
    is_retry: bool
    is_short: bool = False
    """Whether the step has idle work alone while an interactive request is expected. Then the next step waits for the end
    of this one, so that the request finds only one step in flight."""
