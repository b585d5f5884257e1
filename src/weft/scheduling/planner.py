"""Plans one step: which sequences it computes, and in which order they get its tokens.

| file | what it decides |
|---|---|
| `planner.py` | the shape of the step: decodes, prompts, idle work |
| `prompt_planner.py` | chunks of prompts, and which sequences are admitted |
| `memory_planner.py` | blocks, and which sequences are preempted for them |
| `idle_work.py` | what idle work may use |
"""

from __future__ import annotations

from weft.clock import Clock
from weft.config import SchedulerConfig
from weft.plan import BackendInfo
from weft.request import RequestState
from weft.scheduling.cache.block_pool import BlockCounts
from weft.scheduling.draft_tokens import Speculation
from weft.scheduling.idle_work import IdlePlanner
from weft.scheduling.memory_planner import MemoryPlanner
from weft.scheduling.plan_builder import PlanBuilder
from weft.scheduling.policy import AdmissionPolicy, StepCostModel
from weft.scheduling.preemption import PreemptionCause
from weft.scheduling.prompt_order import StepSize
from weft.scheduling.prompt_planner import PromptPlanner
from weft.scheduling.sequence import Sequence
from weft.scheduling.sequence_table import SequenceTable

_ONE_BLOCK = BlockCounts(1)


class Planner:
    """Fills a PlanBuilder."""

    def __init__(
        self,
        config: SchedulerConfig,
        info: BackendInfo,
        sequence_table: SequenceTable,
        policy: AdmissionPolicy,
        cost_model: StepCostModel,
        clock: Clock,
    ) -> None:
        self._config = config
        self._info = info
        self._sequences = sequence_table
        self._clock = clock
        self._size = StepSize(config, info, cost_model)
        self.speculation = Speculation(config, info)
        self._memory = MemoryPlanner(
            config,
            info,
            sequence_table,
            clock,
            preempts=policy.preempts,
            has_spare_blocks=self.speculation.is_on,
        )
        self._prompts = PromptPlanner(config, info, sequence_table, policy, self._size, self._memory, clock)
        self._idle = IdlePlanner(config, info, sequence_table, self._size, cost_model)
        self._last_prefill_step = -1

    def plan(self, builder: PlanBuilder) -> None:
        """Plans over all running and waiting sequences. Repeats if preemptions left the step empty."""
        if self._sequences.num_idle:
            self._divide(builder)
        while True:
            num_victims = len(builder.preempted)
            if self._config.prefer_pure_decode:
                self._plan_pure(builder)
            else:
                self._plan_mixed(builder, self._sequences.running, self._idle.may_admit(builder))
            if builder.decodes or builder.prefills or len(builder.preempted) == num_victims:
                break
        if self.speculation.may_have_drafts(builder):
            budget = builder.budget
            room = self._size.room_for_drafts(builder.decodes, budget.tokens, budget.seconds)
            self.speculation.add_draft_tokens(builder, self._sequences.kv_cache, room)
        if self._sequences.num_idle:
            self._fill(builder)

    def plan_only(self, builder: PlanBuilder, sequences: list[Sequence]) -> None:
        """Plans a step over `sequences` alone."""
        self._plan_mixed(builder, sequences, may_admit=False)

    # ------------------------------------------------------------------ idle work

    def _divide(self, builder: PlanBuilder) -> None:
        """Decides whether the plan is made from interactive sequences or from idle ones. Preempts idle ones if
        interactive ones need their memory."""
        now = self._clock()
        if not self._sequences.has_interactive_work:
            self._sequences.resume_idle(now)
            self._idle.shorten(builder, now)
            return
        self._sequences.pause_idle()
        self._sequences.interactive_at = now
        for victim in self._idle.victims():
            self._memory.preempt(builder, victim, PreemptionCause.INTERACTIVE)

    def _fill(self, builder: PlanBuilder) -> None:
        """Adds idle work to a step with interactive sequences."""
        if self._sequences.active_queue is self._sequences.idle_queue:
            return  # no interactive sequence is in the step
        sequences, may_admit = self._idle.fill(builder)
        if sequences or may_admit:
            self._sequences.active_queue = self._sequences.idle_queue
            self._plan_mixed(builder, sequences, may_admit)
            self._sequences.pause_idle()

    # ------------------------------------------------------------------ the shape of a step

    def _plan_mixed(self, builder: PlanBuilder, sequences: list[Sequence], may_admit: bool) -> None:
        """Adds decodes first, then prompts: those in progress and new ones."""
        may_admit = may_admit and bool(self._sequences.active_queue) and self._prompts.admission_is_open()
        places = builder.budget.sequences
        is_full = len(sequences) >= places
        if (
            may_admit
            and is_full
            and (self._sequences.kv_cache.free_rows or self._prompts.first_may_preempt())
        ):
            # Keeps one place in the step for new sequences: otherwise running sequences would block them forever. If
            # the step has one place only, it is kept for them in every second step.
            places = places - 1 if places > 1 else builder.step % 2
        decodes, prefills, others = self._split(sequences, places)
        self._take_decodes(builder, decodes)
        if prefills or others or may_admit:
            self._prompts.plan(builder, prefills, may_admit)
        # Gives the unused places to the remaining sequences, in rotation order.
        for sequence in others:
            if not builder.budget.sequences or not builder.budget.tokens:
                break
            if sequence.state is not RequestState.RUNNING:
                continue  # preempted while this plan was made
            if sequence.is_decode:
                self._take_decodes(builder, [sequence])
            elif builder.budget.for_prefill:
                self._prompts.continue_prefill(builder, sequence)

    def _plan_pure(self, builder: PlanBuilder) -> None:
        """Plans a step with prompts only, or with decodes only. After a step of prompts, every running sequence decodes
        before the next step of prompts."""
        decodes, prefills, _ = self._split(self._sequences.running, len(self._sequences.running))
        may_admit = bool(self._sequences.active_queue) and self._prompts.admission_is_open()
        all_decoded = all(
            s.last_step > self._last_prefill_step and self._memory.is_on_time(builder.step, s)
            for s in decodes
        )
        if all_decoded and (prefills or may_admit):
            self._prompts.plan(builder, prefills, may_admit)
        if builder.prefills:
            self._last_prefill_step = builder.step
        else:
            still_running = [s for s in decodes if s.state is RequestState.RUNNING]
            self._take_decodes(builder, still_running[: builder.budget.sequences])

    def _split(
        self, sequences: list[Sequence], places: int
    ) -> tuple[list[Sequence], list[Sequence], list[Sequence]]:
        """Splits the running sequences into decodes, prefills and others, in rotation order. The first two get `places`
        sequences in all."""
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        others: list[Sequence] = []
        for sequence in sequences:
            scheduled, target = sequence.scheduled, sequence.target
            if target >= sequence.limit:
                continue  # its last token is being sampled
            if sequence.needs_last_token and target > len(sequence.tokens):
                continue  # its grammar mask depends on a token that is being sampled
            if places <= 0:
                others.append(sequence)
            elif target - scheduled == 1 and scheduled >= sequence.prompt_length:
                decodes.append(sequence)
            else:
                prefills.append(sequence)
            places -= 1
        return decodes, prefills, others

    # ------------------------------------------------------------------ decodes

    def _take_decodes(self, builder: PlanBuilder, decodes: list[Sequence]) -> None:
        """Adds decodes to the step, and allocates the blocks that they need.

        All decodes are in the plan, and have their tokens of the budget, before the first block is allocated: an
        allocation may preempt a sequence that is in the plan. If there may be too few blocks, sequences that rank higher
        come first. For a sequence that gets no block:

        1. If blocks become free soon, or a later step can preempt a prompt for it, the sequence skips this step.
        2. Otherwise the sequence itself is preempted.
        """
        block_size = self._info.block_size
        builder.budget.take_decodes(len(decodes))
        builder.decodes += decodes
        if self._info.store_blocks:
            # The first position of a block needs a new full block; the last one moves an older block to the store.
            growing = [s for s in decodes if (s.scheduled + 1) % block_size < 2]
        else:
            growing = [s for s in decodes if s.scheduled % block_size == 0 and _is_full(s, block_size)]
        memory, kv_cache = self._memory, self._sequences.kv_cache
        if growing and len(growing) > kv_cache.min_available:
            growing.sort(key=lambda s: (-s.priority, s.order))
        for sequence in growing:
            if sequence.state is not RequestState.RUNNING:
                continue  # preempted for an earlier sequence of this loop
            needed = memory.needed(sequence, 1) if self._info.store_blocks else _ONE_BLOCK
            if memory.grow(builder, sequence, needed):
                continue
            if memory.may_skip_step(builder, sequence) or memory.victim_is_in_plan(builder, sequence):
                builder.drop(sequence)
            else:
                # preempting sequences of lower rank would not free enough blocks
                memory.preempt(builder, sequence, PreemptionCause.MEMORY)

    def should_wait_for_tokens(self) -> bool:
        """Whether the next step should wait for the tokens of the step in flight, so that it can have draft tokens.
        False if prompts come next, or if the step has no room for draft tokens."""
        queue, running = self._sequences.active_queue, self._sequences.running
        if queue and self._sequences.kv_cache.free_rows:
            return False
        return self.speculation.should_wait_for_tokens(running) and bool(
            self._size.room_for_drafts(running, self._config.max_tokens_per_step - len(running))
        )


def _is_full(sequence: Sequence, block_size: int) -> bool:
    assert sequence.allocation is not None
    return len(sequence.allocation.blocks) * block_size == sequence.scheduled
