"""The order of admission, and the learned cost of a step from which ADAPTIVE sizes its prompts.

A policy is a key per sequence that does not change while it waits, so the queue is a plain heap. Ageing is no
exception: base + rate * (now - arrival) grows equally fast for everyone, so the order is that of
rate * arrival - base, whenever it is looked at.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.config import PriorityPolicy, SchedulerConfig
from weft.request import Priority, RequestState
from weft.scheduling.sequence import Sequence

PolicyKey = tuple[float, ...]

DEFAULT_TTFT_TARGET = 30.0
"""Seconds to the first token assumed of a request that names no target."""


def _first_come(sequence: Sequence, config: SchedulerConfig) -> PolicyKey:
    return (sequence.order,)


def _shortest_job(sequence: Sequence, config: SchedulerConfig) -> PolicyKey:
    if sequence.state is RequestState.PREEMPTED:
        return (0, sequence.order)
    return (1, sequence.limit, sequence.order)


def _aged_priority(sequence: Sequence, config: SchedulerConfig) -> PolicyKey:
    return _aged(sequence, config, sequence.arrival)


def _aged_urgency(sequence: Sequence, config: SchedulerConfig) -> PolicyKey:
    """As priority with ageing, counted from the moment the first token is due. A victim is due at once."""
    due = sequence.arrival
    if sequence.state is not RequestState.PREEMPTED:
        target = sequence.request.ttft_target
        due += DEFAULT_TTFT_TARGET if target is None else target
    return _aged(sequence, config, due)


def _aged(sequence: Sequence, config: SchedulerConfig, since: float) -> PolicyKey:
    # CRITICAL stands before everyone: age must never reach it.
    if sequence.priority == Priority.CRITICAL:
        return (0, sequence.order)
    if config.ageing_rate == 0:
        return (1, -sequence.priority, since, sequence.order)
    return (1, config.ageing_rate * since - sequence.priority, sequence.order)


class AdmissionPolicy:
    """Who is admitted next, and whether a more important request may push a running one out to get in."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._key: Callable[[Sequence, SchedulerConfig], PolicyKey] = {
            PriorityPolicy.FCFS: _first_come,
            PriorityPolicy.SHORTEST_JOB_FIRST: _shortest_job,
            PriorityPolicy.PRIORITY: _aged_priority,
            PriorityPolicy.ADAPTIVE: _aged_urgency,
        }[config.policy]
        self.preempts = config.policy in (PriorityPolicy.PRIORITY, PriorityPolicy.ADAPTIVE)

    def key(self, sequence: Sequence) -> PolicyKey:
        return self._key(sequence, self._config)

    def key_of_promoted(self, sequence: Sequence) -> PolicyKey:
        """Before all others; where priorities rank, behind CRITICAL ones unless it is one itself."""
        return (0.5,) if self.preempts and sequence.priority != Priority.CRITICAL else (-1.0,)


class StepCostModel:
    """Learns seconds = base + per_token * tokens + per_context * context from the steps as they come.

    Least squares over sums that fade. They fade only with steps that hold prompts: a long stretch of steps that
    are all alike says nothing new about what a prompt token costs, and must not wash out what was known.
    """

    FADE = 0.98

    def __init__(self) -> None:
        self._steps = 0.0
        self._moments = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3
        self.coefficients = (0.0, 0.0, 0.0)

    @property
    def is_ready(self) -> bool:
        return self._steps >= 3

    def learn(self, prefill_tokens: int, tokens: int, context: int, seconds: float) -> None:
        weight = 1.0 if prefill_tokens else 0.05
        features = (1.0, tokens / 256, context / 4096)
        if prefill_tokens:
            self._steps += 1
            self._moments = [[cell * self.FADE for cell in line] for line in self._moments]
            self._products = [cell * self.FADE for cell in self._products]
        for i in range(3):
            self._products[i] += weight * features[i] * seconds
            for j in range(3):
                self._moments[i][j] += weight * features[i] * features[j]
        base, per_token, per_context = self._solve()
        self.coefficients = (max(base, 0.0), max(per_token, 0.0) / 256, max(per_context, 0.0) / 4096)

    def predict(self, tokens: int, context: int) -> float:
        base, per_token, per_context = self.coefficients
        return base + per_token * tokens + per_context * context

    def affordable_tokens(self, decodes: int, context: int, seconds: float) -> int:
        """How many prompt tokens fit beside the decodes into a step of `seconds`.

        `context` is what all sequences of the step have behind them; each new token adds itself to it.
        """
        each = self.coefficients[1] + self.coefficients[2]
        spare = seconds - self.predict(decodes, context)
        if each <= 0:
            return 1 << 30 if spare > 0 else 0
        return max(0, int(spare / each))

    def _solve(self) -> list[float]:
        """Gauss elimination of the 3 x 3 normal equations, kept regular by a small ridge."""
        lines = [[*self._moments[i], self._products[i]] for i in range(3)]
        for i in range(3):
            lines[i][i] += 1e-6 * (lines[i][i] + 1.0)
        for i in range(3):
            pivot = max(range(i, 3), key=lambda row: abs(lines[row][i]))
            lines[i], lines[pivot] = lines[pivot], lines[i]
            for below in range(i + 1, 3):
                factor = lines[below][i] / lines[i][i]
                lines[below] = [a - factor * b for a, b in zip(lines[below], lines[i], strict=True)]
        solution = [0.0] * 3
        for i in (2, 1, 0):
            known = sum(lines[i][j] * solution[j] for j in range(i + 1, 3))
            solution[i] = (lines[i][3] - known) / lines[i][i]
        return solution
