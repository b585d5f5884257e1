"""Orders prompts, and sizes the chunks that a step computes."""

from __future__ import annotations

from weft.config import PriorityPolicy, SchedulerConfig
from weft.plan import BackendInfo
from weft.scheduling.budget import NO_LIMIT
from weft.scheduling.plan_builder import PlanBuilder
from weft.scheduling.policy import AdmissionPolicy, SortKey, StepCostModel
from weft.scheduling.sequence import Sequence

TTFT_FACTOR = 4.0
"""A prompt's target for its first token: this many times the seconds of its prefill alone. The earliest target goes
first.

0 is the order of arrival: short prompts wait for long ones. A large factor is shortest first: long prompts wait for all
later short ones. Bursts of 64 prompts of 16 to 512 tokens (cost model, twelve seeds):

    factor              0     2     4     6
    mean TTFT (s)    1.84  1.76  1.68  1.60
    last TTFT (s)    3.87  3.95  4.04  4.16
"""

SHARE_OF_TARGET = 0.875
"""ADAPTIVE plans a step for this fraction of its time target. Nearly all steps must meet the target, not only the mean:
on a shared machine one step in a hundred takes 1/8 longer than predicted."""


class StepSize:
    """Sizes chunks: by the configuration and, with ADAPTIVE, by the time target of a step."""

    def __init__(self, config: SchedulerConfig, info: BackendInfo, cost_model: StepCostModel) -> None:
        self._config = config
        self._block_size = info.block_size
        self._cost_model = cost_model
        self._is_adaptive = config.policy is PriorityPolicy.ADAPTIVE

    def begin_prompts(self, builder: PlanBuilder) -> None:
        """Limits the prompts of the step: to the seconds that its decodes leave or, before the cost model is ready, to a
        few blocks of tokens. Only ADAPTIVE with chunked prefill has these limits."""
        if not self._is_adaptive or not self._config.chunked_prefill:
            return
        budget = builder.budget
        if self._cost_model.is_ready:
            budget.prefill_seconds = max(0.0, self.spare_seconds(builder.decodes, budget.seconds))
        else:
            # Varies the size: from steps of equal size the cost model learns nothing about the effect of size.
            affordable = self._block_size * (1 + 2 * (builder.step % 3))
            budget.prefill_tokens = min(budget.prefill_tokens, affordable)

    def chunk(self, builder: PlanBuilder, start: int, remaining: int) -> int:
        """How many of the `remaining` tokens from `start` on go into this step. 0: the prompt waits."""
        room = builder.budget.for_prefill
        if self._config.chunked_prefill:
            affordable = self._affordable(builder, start, remaining)
            return min(remaining, room, self._config.max_chunk_tokens, affordable)
        if remaining > room and remaining <= self._config.longest_whole_prompt:
            return 0
        # A recompute after preemption may be longer than a step. Then it is split.
        return min(remaining, room)

    def take_chunk(self, builder: PlanBuilder, start: int, count: int) -> None:
        """Subtracts a chunk from the budget: its tokens and its predicted seconds."""
        seconds = self._cost_model.chunk_seconds(start, count) if self._is_timed(builder) else 0.0
        builder.budget.take_prefill(count, seconds)

    def seconds_alone(self, start: int, count: int) -> float:
        """Predicted seconds for `count` tokens of a prompt from `start` on, in steps without other entries."""
        per_step = min(self._config.max_chunk_tokens, self._config.max_prefill_tokens)
        if self._is_adaptive:
            affordable = self._cost_model.affordable_tokens(start, self.spare_seconds([]))
            per_step = min(per_step, max(affordable, self._block_size))
        steps = count / per_step if self._config.chunked_prefill else 1.0
        return self._cost_model.base_seconds * steps + self._cost_model.chunk_seconds(start, count)

    def room_for_drafts(self, decodes: list[Sequence], room: int, limit: float = NO_LIMIT) -> int:
        """How many of `room` draft tokens fit into a step with these decodes and at most `limit` seconds."""
        if self._is_adaptive and self._cost_model.is_ready:
            longest = max((s.scheduled for s in decodes), default=0)
            room = min(room, self._cost_model.affordable_tokens(longest, self.spare_seconds(decodes, limit)))
        return max(0, room)

    def _affordable(self, builder: PlanBuilder, start: int, remaining: int) -> int:
        """How many tokens the time target allows. The first prompt of a step gets at least a KV block, so that prompts
        always progress. Later prompts, and idle work beside interactive sequences, get at least a block or all that
        remains. Otherwise they get nothing."""
        if not self._is_timed(builder):
            return builder.budget.for_prefill
        tokens = self._cost_model.affordable_tokens(start, builder.budget.prefill_seconds)
        if not builder.prefills and builder.reserved is None:
            return max(tokens, self._block_size)
        return tokens if tokens >= min(remaining, self._block_size) else 0

    def _is_timed(self, builder: PlanBuilder) -> bool:
        return builder.budget.prefill_seconds < NO_LIMIT

    def spare_seconds(self, decodes: list[Sequence], limit: float = NO_LIMIT) -> float:
        """Seconds of the time target, or of `limit` if that is less, that the decodes leave. Negative if the decodes alone
        take longer."""
        context = sum([s.scheduled for s in decodes])
        target = min(limit, SHARE_OF_TARGET * self._config.target_inter_token_latency)
        return target - self._cost_model.decode_seconds(len(decodes), context)


class PromptOrder:
    """Orders prompts, waiting or in progress, by the target of their first token.

    Prompts mostly finish in order of arrival; a short one overtakes a long one that arrived shortly before. A later
    arrival has a later target, so no prompt is overtaken forever.
    """

    def __init__(self, policy: AdmissionPolicy, size: StepSize) -> None:
        self._policy = policy
        self._size = size

    def sort_key(self, sequence: Sequence, cached: int) -> SortKey:
        """The prompt with the smallest key goes first. `cached` tokens need no prefill. While the cost model is empty,
        the target of a prompt is its arrival time."""
        alone = self._size.seconds_alone(cached, sequence.target - cached)
        return self._policy.prefill_sort_key(sequence, TTFT_FACTOR * alone)
