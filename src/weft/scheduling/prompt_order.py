"""Which prompt goes first, and how much of it a step has time for."""

from __future__ import annotations

from weft.config import PriorityPolicy, SchedulerConfig
from weft.plan import BackendInfo
from weft.scheduling.budget import NO_LIMIT
from weft.scheduling.plan_builder import PlanBuilder
from weft.scheduling.policy import AdmissionPolicy, PolicyKey, StepCostModel
from weft.scheduling.sequence import Sequence

PATIENCE = 4.0
"""A prompt is due this many times as long after its arrival as it takes alone. With none all would go in the order in which
they came, and short ones wait for all of a long one; with much of it long ones wait for all that come meanwhile. Of rushes of 64
prompts of 16 to 512 tokens (cost model, twelve seeds) the mean first token comes after 1.84, 1.76, 1.68, 1.60 s with 0, 2, 4, 6 of it,
the last after 3.87, 3.95, 4.04, 4.16 s."""

SHARE_OF_TARGET = 0.875
"""ADAPTIVE plans a step to take this share of its target, which is meant for nearly all steps, not for their mean: on a shared
machine one in a hundred takes an eighth longer than predicted."""


class StepSize:
    """How many tokens come into a step: as the configuration says and, with ADAPTIVE, as its time allows."""

    def __init__(self, config: SchedulerConfig, info: BackendInfo, cost_model: StepCostModel) -> None:
        self._config = config
        self._block_size = info.block_size
        self._cost_model = cost_model
        self._is_adaptive = config.policy is PriorityPolicy.ADAPTIVE

    def begin_prompts(self, draft: PlanBuilder) -> None:
        """Sets the time that prompts have beside the decodes of the step."""
        if not self._is_adaptive or not self._config.chunked_prefill:
            return
        budget = draft.budget
        if self._cost_model.is_ready:
            budget.prefill_seconds = max(0.0, self._spare_seconds(draft.decodes))
        else:
            # Not two alike: from steps of one size nothing can be learned about size.
            affordable = self._block_size * (1 + 2 * (draft.step % 3))
            budget.prefill_tokens = min(budget.prefill_tokens, affordable)

    def chunk(self, draft: PlanBuilder, start: int, remaining: int) -> int:
        """How many of a prompt's remaining tokens, from `start` on, go into this step. 0: wait for a step with more room."""
        room = draft.budget.for_prefill
        if self._config.chunked_prefill:
            affordable = self._affordable(draft, start, remaining)
            return min(remaining, room, self._config.max_chunk_tokens, affordable)
        if remaining > room and remaining <= self._config.longest_whole_prompt:
            return 0
        return min(remaining, room)  # a replay after preemption may be longer than a step: then it is split

    def take_chunk(self, draft: PlanBuilder, start: int, count: int) -> None:
        """Takes a chunk from what is left of the step: its tokens, and the time for them."""
        seconds = self._cost_model.chunk_seconds(start, count) if self._is_timed(draft) else 0.0
        draft.budget.take_prefill(count, seconds)

    def seconds_alone(self, start: int, count: int) -> float:
        """What `count` tokens of a prompt, from `start` on, take in steps that hold nothing else."""
        most = min(self._config.max_chunk_tokens, self._config.max_prefill_tokens)
        if self._is_adaptive:
            affordable = self._cost_model.affordable_tokens(start, self._spare_seconds([]))
            most = min(most, max(affordable, self._block_size))
        steps = count / most if self._config.chunked_prefill else 1.0
        return self._cost_model.base_seconds * steps + self._cost_model.chunk_seconds(start, count)

    def room_for_drafts(self, decodes: list[Sequence], room: int) -> int:
        """How many of `room` tokens may come into a step beside these decodes."""
        if self._is_adaptive and self._cost_model.is_ready:
            longest = max((s.scheduled for s in decodes), default=0)
            room = min(room, self._cost_model.affordable_tokens(longest, self._spare_seconds(decodes)))
        return max(0, room)

    def _affordable(self, draft: PlanBuilder, start: int, remaining: int) -> int:
        """How many tokens there is time for. The first prompt of a step gets a block in any case: prompts must go on. Others get
        nothing where it would be less than that: not worth a row and a place."""
        if not self._is_timed(draft):
            return draft.budget.for_prefill
        tokens = self._cost_model.affordable_tokens(start, draft.budget.prefill_seconds)
        if not draft.prefills:
            return max(tokens, self._block_size)
        return tokens if tokens >= min(remaining, self._block_size) else 0

    def _is_timed(self, draft: PlanBuilder) -> bool:
        return draft.budget.prefill_seconds < NO_LIMIT

    def _spare_seconds(self, decodes: list[Sequence]) -> float:
        """What the decodes leave of the time a step may take; less than nothing where they alone take longer."""
        context = sum([s.scheduled for s in decodes])
        target = SHARE_OF_TARGET * self._config.target_inter_token_latency
        return target - self._cost_model.decode_seconds(len(decodes), context)


class PromptOrder:
    """The prompt that is due first goes first, whether it waits or is under way.

    So prompts end in the order in which they came, mostly, instead of all being under way and late together. A short one passes a
    long one that came shortly before. Whoever comes later is due later: nobody is passed for good.
    """

    def __init__(self, policy: AdmissionPolicy, size: StepSize) -> None:
        self._policy = policy
        self._size = size

    def key(self, sequence: Sequence, cached: int) -> PolicyKey:
        """The smallest goes first; so many of its tokens need not be computed. Until the cost of a step is known, prompts are due
        when they come."""
        alone = self._size.seconds_alone(cached, sequence.target - cached)
        return self._policy.key_when_due(sequence, PATIENCE * alone)
