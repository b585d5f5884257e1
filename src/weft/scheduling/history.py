"""Owns the newest steps and events of a scheduler, while they are recorded for the live page. No plan depends on them."""

from __future__ import annotations

import math
from collections import deque

from weft.live import FINISH_REASONS, MAX_EVENTS, MAX_STEPS, LiveEvent, LiveStep
from weft.plan import IterationPlan
from weft.request import FinishReason, RequestId

_Step = tuple[int, float | None, int, tuple[tuple[int, ...], ...], tuple[int, ...]]
"""Step, seconds, decodes without draft tokens, draft tokens, tokens of each entry."""


class History:
    """Records only while `now < until`. The caller checks that, so that without a viewer a step costs one comparison."""

    __slots__ = ("_events", "_num_events", "_steps", "until")

    def __init__(self) -> None:
        self.until = -math.inf
        """On the clock of the scheduler."""
        self._steps: deque[_Step] = deque(maxlen=MAX_STEPS)
        self._events: deque[LiveEvent] = deque(maxlen=MAX_EVENTS)
        self._num_events = 0
        """Events since they were last taken, also those that `_events` has dropped."""

    def add_step(self, plan: IterationPlan, seconds: float | None) -> None:
        """Records a step that ended. Keeps no plan: its row starts may hold long prompts."""
        self._steps.append((plan.step, seconds, plan.num_decodes, plan.drafts, plan.counts))

    def add_event(
        self, at: float, step: int, kind: str, request_id: RequestId, first: int = 0, second: int = 0
    ) -> None:
        self._num_events += 1
        self._events.append(LiveEvent(at, step, kind, request_id, first, second))

    def add_end(self, at: float, step: int, request_id: RequestId, reason: FinishReason) -> None:
        if reason is FinishReason.ERROR:
            self.add_event(at, step, "failed", request_id)
        else:
            self.add_event(at, step, "finished", request_id, FINISH_REASONS.index(reason))

    def take_steps(self) -> tuple[LiveStep, ...]:
        """The newest steps since the last call."""
        taken = tuple(map(_live_step, self._steps))
        self._steps.clear()
        return taken

    def take_events(self) -> tuple[tuple[LiveEvent, ...], int]:
        """The newest events since the last call, and how many older ones were dropped."""
        taken = tuple(self._events)
        num_dropped = self._num_events - len(taken)
        self._events.clear()
        self._num_events = 0
        return taken, num_dropped


def _live_step(entry: _Step) -> LiveStep:
    step, seconds, num_plain, drafts, counts = entry
    first_prefill = num_plain + len(drafts)
    return LiveStep(
        step=step,
        seconds=seconds or 0.0,
        num_decodes=first_prefill,
        num_drafts=sum(map(len, drafts)),
        num_prefills=len(counts) - first_prefill,
        prefill_tokens=sum(counts[first_prefill:]),
    )
