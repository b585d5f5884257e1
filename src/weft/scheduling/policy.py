"""The order of admission, and the learned cost of a step, from which prompts are ordered and ADAPTIVE sizes them.

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
        self._keeps_targets = config.policy is PriorityPolicy.ADAPTIVE

    def key(self, sequence: Sequence) -> PolicyKey:
        return self._key(sequence, self._config)

    def key_when_due(self, sequence: Sequence, patience: float) -> PolicyKey:
        """The order of prompts that are due so many seconds after they came, or with ADAPTIVE when their first token is hoped for, if
        that is sooner. As in the queue, age makes up for priority where priorities rank."""
        target = sequence.request.ttft_target
        if self._keeps_targets and target is not None:
            patience = min(patience, target)
        due = sequence.arrival + patience
        return _aged(sequence, self._config, due) if self.preempts else (due, sequence.order)

    def key_of_promoted(self, sequence: Sequence) -> PolicyKey:
        """Before all others; where priorities rank, behind CRITICAL ones unless it is one itself."""
        return (0.5,) if self.preempts and sequence.priority != Priority.CRITICAL else (-1.0,)


class StepCostModel:
    """Learns seconds = base + per_token * tokens + per_context * context + per_pair * pairs from the steps as they come.

    Context is what decodes read; pairs (a token and each position before it) are what attention computes, so that
    the end of a long prompt is known to cost more than its beginning.
    Least squares over sums that fade. They fade only with steps that hold prompts: a long stretch of steps that
    are all alike says nothing new about what a prompt token costs, and must not wash out what was known.
    """

    FADE = 0.98
    LONG = 0.5
    LONGEST = 4.0
    """A step counts for at most so many seconds or so many times what was predicted of it, whichever is more: a laptop that slept has not
    become slower, and one that has is believed after some dozens of steps."""
    SCALES = (1.0, 256.0, 4096.0, 262_144.0)
    """Features are divided by these: equations of like size are solved more exactly."""

    def __init__(self) -> None:
        size = len(self.SCALES)
        self._steps = 0.0
        self._moments = [[0.0] * size for _ in range(size)]
        self._products = [0.0] * size
        self._coefficients: tuple[float, ...] | None = (0.0,) * size

    @property
    def is_ready(self) -> bool:
        return self._steps >= 3

    def learn(self, prefill_tokens: int, tokens: int, context: int, pairs: int, seconds: float) -> None:
        weight = 1.0 if prefill_tokens else 0.05
        values = (1, tokens, context, pairs)
        features = [value / scale for value, scale in zip(values, self.SCALES, strict=True)]
        if seconds > self.LONG and self.is_ready:
            seconds = min(seconds, max(self.LONG, self.LONGEST * self.predict(tokens, context, pairs)))
        if prefill_tokens:
            self._steps += 1
            self._moments = [[cell * self.FADE for cell in line] for line in self._moments]
            self._products = [cell * self.FADE for cell in self._products]
        for i, feature in enumerate(features):
            self._products[i] += weight * feature * seconds
            for j, other in enumerate(features):
                self._moments[i][j] += weight * feature * other
        self._coefficients = None

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds a step, a token, a context token, a pair; solved for when asked, which is when a prompt is planned."""
        if self._coefficients is None:
            solved = zip(self._solve_above_zero(), self.SCALES, strict=True)
            self._coefficients = tuple(value / scale for value, scale in solved)
        return self._coefficients

    def predict(self, tokens: int, context: int, pairs: int) -> float:
        base, per_token, per_context, per_pair = self.coefficients
        return base + per_token * tokens + per_context * context + per_pair * pairs

    @property
    def base_seconds(self) -> float:
        """What a step takes whatever it computes."""
        return self.coefficients[0]

    def decode_seconds(self, count: int, context: int) -> float:
        """A step of so many decodes, which have `context` tokens behind them in all."""
        return self.predict(count, context + count, context + count)

    def chunk_seconds(self, start: int, count: int) -> float:
        """What `count` tokens of one sequence, from `start` on, add to a step."""
        _, per_token, per_context, per_pair = self.coefficients
        pairs = count * start + count * (count + 1) / 2
        return per_token * count + per_context * (start + count) + per_pair * pairs

    def affordable_tokens(self, start: int, seconds: float) -> int:
        """How many tokens of one sequence, from `start` on, may be added to a step for so many seconds."""
        _, per_token, per_context, per_pair = self.coefficients
        spare = seconds - per_context * start
        if spare <= 0:
            return 0
        each = per_token + per_context + per_pair * (start + 0.5)
        if each <= 0:
            return 1 << 30
        # The root of each * n + per_pair / 2 * n**2 = spare, in the form that allows per_pair = 0.
        return int(2 * spare / (each + (each**2 + 2 * per_pair * spare) ** 0.5))

    def _solve_above_zero(self) -> list[float]:
        """The best costs of which none is below zero. What comes out below counts for nothing and the others are solved for
        anew: kept as they were, they would make up for something that is gone, and every step seem to take longer."""
        used = list(range(len(self._products)))
        while True:
            solution = self._solve(used)
            lowest = min(range(len(used)), key=solution.__getitem__)
            if solution[lowest] >= 0:
                break
            del used[lowest]
        values = [0.0] * len(self._products)
        for index, value in zip(used, solution, strict=True):
            values[index] = value
        return values

    def _solve(self, used: list[int]) -> list[float]:
        """Gauss elimination of the normal equations of these features, kept regular by a small ridge."""
        size = len(used)
        lines = [[*[self._moments[i][j] for j in used], self._products[i]] for i in used]
        for i in range(size):
            lines[i][i] += 1e-6 * (lines[i][i] + 1.0)
        for i in range(size):
            pivot = max(range(i, size), key=lambda row: abs(lines[row][i]))
            lines[i], lines[pivot] = lines[pivot], lines[i]
            for below in range(i + 1, size):
                factor = lines[below][i] / lines[i][i]
                lines[below] = [a - factor * b for a, b in zip(lines[below], lines[i], strict=True)]
        solution = [0.0] * size
        for i in reversed(range(size)):
            known = sum(lines[i][j] * solution[j] for j in range(i + 1, size))
            solution[i] = (lines[i][size] - known) / lines[i][i]
        return solution
