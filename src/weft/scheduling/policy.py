"""Decides the order of admission, and learns what a step costs. That cost orders prompts. Under ADAPTIVE it
also sizes their chunks.

A policy is a sort key per sequence that never changes while the sequence waits, so the queue is a plain heap. This is
also true of ageing: priority + rate * (now - arrival) grows equally fast for all sequences. So the key can be rate *
arrival - priority, the smallest first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.config import PriorityPolicy, SchedulerConfig
from weft.learned_costs import LearnedCosts
from weft.request import Priority, RequestState
from weft.scheduling.sequence import Sequence

SortKey = tuple[float, ...]

OVERTAKING_FACTOR = 3.0
"""A request is overtaken only by shorter ones that arrive within this many times its predicted duration. This holds with
SHORTEST_JOB_FIRST, and with ADAPTIVE if the request has an expected length and no `ttft_target`.

A smaller factor is nearer to the order of arrival, a larger one lets long requests wait longer. Short and long answers on
the cost model of a CPU at load 1, four seeds (`python -m benchmarks lengths`), relative to the order of arrival:

    factor                              1.5    2      2.5    3
    mean latency, learned lengths       0.82   0.76   0.72   0.68
    p99 of long answers                 1.13   1.17   1.20   1.26
"""
DEFAULT_TTFT_TARGET = 30.0
"""Target in seconds from arrival to the first token, for a request without a target of its own."""


def _first_come(sequence: Sequence, config: SchedulerConfig) -> SortKey:
    return (sequence.order,)


def _shortest_job(sequence: Sequence, config: SchedulerConfig) -> SortKey:
    if sequence.state is RequestState.PREEMPTED:
        return (0, sequence.order)
    # Arrival is in the key, so that later requests overtake this one for a limited time only.
    overtaken_until = sequence.arrival + OVERTAKING_FACTOR * sequence.cost
    return (1, overtaken_until, sequence.prompt_length + sequence.expected_tokens, sequence.order)


def _aged_priority(sequence: Sequence, config: SchedulerConfig) -> SortKey:
    return _aged(sequence, config, sequence.arrival)


def _aged_urgency(sequence: Sequence, config: SchedulerConfig) -> SortKey:
    """Priority with ageing. Age counts from the target time of the first token; for a preempted sequence, from
    arrival."""
    since = sequence.arrival
    if sequence.state is not RequestState.PREEMPTED:
        target = sequence.request.ttft_target
        if target is None:
            target = DEFAULT_TTFT_TARGET + OVERTAKING_FACTOR * sequence.cost
        since += target
    return _aged(sequence, config, since)


def _aged(sequence: Sequence, config: SchedulerConfig, since: float) -> SortKey:
    # CRITICAL is always first, whatever the age of other sequences.
    if sequence.priority == Priority.CRITICAL:
        return (0, sequence.order)
    if config.ageing_rate == 0:
        return (1, -sequence.priority, since, sequence.order)
    return (1, config.ageing_rate * since - sequence.priority, sequence.order)


class AdmissionPolicy:
    """Which waiting sequence is admitted next, and whether it may preempt running ones of lower priority."""

    def __init__(self, config: SchedulerConfig, cost_model: StepCostModel | None = None) -> None:
        self._config = config
        self._cost_model = cost_model
        self._sort_key: Callable[[Sequence, SchedulerConfig], SortKey] = {
            PriorityPolicy.FCFS: _first_come,
            PriorityPolicy.SHORTEST_JOB_FIRST: _shortest_job,
            PriorityPolicy.PRIORITY: _aged_priority,
            PriorityPolicy.ADAPTIVE: _aged_urgency,
        }[config.policy]
        self.preempts = config.policy in (PriorityPolicy.PRIORITY, PriorityPolicy.ADAPTIVE)
        self._uses_ttft_targets = config.policy is PriorityPolicy.ADAPTIVE

    def set_cost(self, sequence: Sequence, rows: int) -> None:
        """Sets the cost of a new sequence, if its sort key depends on it. `rows` sequences are running."""
        model, is_adaptive = self._cost_model, self._config.policy is PriorityPolicy.ADAPTIVE
        if is_adaptive and sequence.request.expected is None:
            return
        if model is None or not model.is_ready:
            return
        if is_adaptive or self._config.policy is PriorityPolicy.SHORTEST_JOB_FIRST:
            sequence.cost = model.request_seconds(sequence.prompt_length, sequence.expected_tokens, rows)

    def sort_key(self, sequence: Sequence) -> SortKey:
        """The key that orders waiting sequences. It never changes while the sequence waits."""
        return self._sort_key(sequence, self._config)

    def prefill_sort_key(self, sequence: Sequence, ttft: float) -> SortKey:
        """Orders prompts by the target of their first token: `ttft` seconds after arrival or, with ADAPTIVE, the
        request's own target if that is sooner. Under policies with priorities, age offsets priority as in the queue."""
        target = sequence.request.ttft_target
        if self._uses_ttft_targets and target is not None:
            ttft = min(ttft, target)
        target_time = sequence.arrival + ttft
        return _aged(sequence, self._config, target_time) if self.preempts else (target_time, sequence.order)

    def promoted_sort_key(self, sequence: Sequence) -> SortKey:
        """A sort key that is smaller than all others. Under policies with priorities, only CRITICAL sequences have a smaller
        one."""
        return (0.5,) if self.preempts and sequence.priority != Priority.CRITICAL else (-1.0,)


class StepCostModel:
    """Learns seconds = base + per_token * tokens + per_context * context + per_pair * pairs from measured steps.

    Context: positions whose K and V are read. Pairs: (token, earlier position) pairs that attention computes; they make
    the end of a long prompt cost more than its beginning.

    Least squares over decaying sums. Only steps with prompts decay them: many equal decode steps say nothing about
    prompt tokens, and must not erase what was learned.
    """

    DECAY = 0.98
    TRUSTED_SECONDS = 0.5
    MAX_PREDICTED_RATIO = 4.0
    """A step counts for at most TRUSTED_SECONDS, or MAX_PREDICTED_RATIO times its prediction if that is more. So a
    step during which a laptop slept does little harm. If the machine has become slower, predictions follow within some
    dozens of steps."""
    RESTORED_STEPS = 8.0
    """What an earlier run learned counts as at most this many steps with prompts, since the machine may have changed."""
    SCALES = (1.0, 256.0, 4096.0, 262_144.0)
    """Features are divided by these numbers, for numerical accuracy."""

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
        """Adds a measured step to the sums. Outliers are limited, and steps without prompts count little."""
        # Steps without prompts decay nothing, so the many of them must count little.
        weight = 1.0 if prefill_tokens else 0.05
        values = (1, tokens, context, pairs)
        features = [value / scale for value, scale in zip(values, self.SCALES, strict=True)]
        if seconds > self.TRUSTED_SECONDS and self.is_ready:
            predicted = self.predict(tokens, context, pairs)
            seconds = min(seconds, max(self.TRUSTED_SECONDS, self.MAX_PREDICTED_RATIO * predicted))
        if prefill_tokens:
            self._steps += 1
            self._moments = [[cell * self.DECAY for cell in line] for line in self._moments]
            self._products = [cell * self.DECAY for cell in self._products]
        for i, feature in enumerate(features):
            self._products[i] += weight * feature * seconds
            for j, other in enumerate(features):
                self._moments[i][j] += weight * feature * other
        self._coefficients = None

    def restore(self, costs: LearnedCosts) -> None:
        """Replaces the sums by those of an earlier run."""
        weight = costs.moments[0][0]
        share = min(1.0, self.RESTORED_STEPS / weight) if weight else 0.0
        self._steps = min(costs.steps, self.RESTORED_STEPS)
        self._moments = [[cell * share for cell in line] for line in costs.moments]
        self._products = [cell * share for cell in costs.products]
        self._coefficients = None

    @property
    def sums(self) -> dict[str, Any]:
        """The sums over the measured steps, as fields of `LearnedCosts`."""
        return {"steps": self._steps, "moments": self._moments, "products": self._products}

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds per step, token, context position and pair. Solved on demand: only planning a prompt needs them."""
        if self._coefficients is None:
            solved = zip(self._solve_above_zero(), self.SCALES, strict=True)
            self._coefficients = tuple(value / scale for value, scale in solved)
        return self._coefficients

    def predict(self, tokens: int, context: int, pairs: int) -> float:
        base, per_token, per_context, per_pair = self.coefficients
        return base + per_token * tokens + per_context * context + per_pair * pairs

    @property
    def base_seconds(self) -> float:
        """Seconds of a step that do not depend on its tokens."""
        return self.coefficients[0]

    def decode_seconds(self, count: int, context: int) -> float:
        """Seconds of a step with `count` decodes whose contexts add up to `context` tokens."""
        return self.predict(count, context + count, context + count)

    def chunk_seconds(self, start: int, count: int) -> float:
        """Seconds that `count` tokens of one sequence, from `start` on, add to a step."""
        _, per_token, per_context, per_pair = self.coefficients
        pairs = count * start + count * (count + 1) / 2
        return per_token * count + per_context * (start + count) + per_pair * pairs

    def request_seconds(self, prompt_tokens: int, answer_tokens: float, rows: int) -> float:
        """Seconds that a request takes from its admission to its end, in full steps of `rows` sequences like it."""
        context = int(rows * (prompt_tokens + answer_tokens / 2))
        prefill = rows * self.chunk_seconds(0, prompt_tokens)
        return prefill + answer_tokens * self.decode_seconds(rows, context)

    def affordable_tokens(self, start: int, seconds: float) -> int:
        """How many tokens of one sequence, from `start` on, fit into `seconds` of a step."""
        _, per_token, per_context, per_pair = self.coefficients
        spare = seconds - per_context * start
        if spare <= 0:
            return 0
        each = per_token + per_context + per_pair * (start + 0.5)
        if each <= 0:
            return 1 << 30
        # Solves `each * n + per_pair / 2 * n**2 = spare` for n, in a form that also works for per_pair = 0.
        return int(2 * spare / (each + (each**2 + 2 * per_pair * spare) ** 0.5))

    def _solve_above_zero(self) -> list[float]:
        """The best coefficients that are not negative. Sets a negative one to zero and solves the others again. Without
        the second solution the others would still compensate for it: every prediction would be too high."""
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
        """Gaussian elimination of the normal equations of the `used` features, with a small ridge for stability."""
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
