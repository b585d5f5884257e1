"""Owns the newest steps and events of a scheduler, while they are recorded for the live page. No plan depends on them."""

from __future__ import annotations

import math
from collections import deque

from weft.live import FINISH_REASONS, MAX_EVENTS, MAX_STEPS, LiveEvent, LiveStep
from weft.plan import IterationPlan
from weft.request import FinishReason, RequestId

_Step = tuple[int, float | None, int, tuple[tuple[int, ...], ...], tuple[int, ...]]
"""Step, seconds, decodes without draft tokens, draft tokens, tokens of each entry."""


Event = tuple[float, int, str, RequestId, int | FinishReason, int]
"""The fields of `LiveEvent`. If the event is the end of a request, `first` is its finish reason."""


class History:
    """Records only while `now < until`. The caller checks that, so that without a viewer a step costs one comparison.

    The engine loop only appends tuples. The thread that takes them converts them to `LiveStep` and `LiveEvent`.
    """

    __slots__ = ("_num_dropped", "_steps", "events", "until")

    def __init__(self) -> None:
        self.until = -math.inf
        """Steps and events are recorded until this time on the clock of the scheduler."""
        self._steps: deque[_Step] = deque(maxlen=MAX_STEPS)
        self.events: list[Event] = []
        """The callers append events. For ends they call `add_end`, which also drops old events beyond a limit."""
        self._num_dropped = 0
        """Events that were dropped since `take_events` was last called."""

    def add_step(self, plan: IterationPlan, seconds: float | None) -> None:
        """Records a step that ended. Keeps no plan: its row starts may hold long prompts."""
        self._steps.append((plan.step, seconds, plan.num_decodes, plan.drafts, plan.counts))

    def add_end(self, at: float, step: int, request_id: RequestId, reason: FinishReason) -> None:
        self.events.append((at, step, "end", request_id, reason, 0))
        if len(self.events) > 2 * MAX_EVENTS:
            self._drop_events()

    def take_steps(self) -> tuple[LiveStep, ...]:
        """The newest steps since the last call."""
        taken = tuple(map(_live_step, self._steps))
        self._steps.clear()
        return taken

    def take_events(self) -> tuple[tuple[LiveEvent, ...], int]:
        """The newest events since the last call, and how many older ones were dropped."""
        self._drop_events()
        taken, num_dropped = tuple(map(_live_event, self.events)), self._num_dropped
        self.events.clear()
        self._num_dropped = 0
        return taken, num_dropped

    def _drop_events(self) -> None:
        num_too_many = max(0, len(self.events) - MAX_EVENTS)
        del self.events[:num_too_many]
        self._num_dropped += num_too_many


def _live_event(entry: Event) -> LiveEvent:
    at, step, kind, request_id, first, second = entry
    if not isinstance(first, FinishReason):
        return LiveEvent(at, step, kind, request_id, first, second)
    if first is FinishReason.ERROR:
        return LiveEvent(at, step, "failed", request_id)
    return LiveEvent(at, step, "finished", request_id, FINISH_REASONS.index(first))


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
