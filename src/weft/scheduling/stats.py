"""Counters of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start."""

    steps: int = 0
    tokens_computed: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    tokens_generated: int = 0
    tokens_drafted: int = 0
    drafts_accepted: int = 0
    preemptions_by_recompute: int = 0
    preemptions_by_swap: int = 0
    steps_failed: int = 0
    swaps_failed: int = 0
    ttft_targets_missed: int = 0
