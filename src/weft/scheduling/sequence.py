"""The state of one answer: its tokens, how far they are computed, the memory it holds, and the time spent per phase."""

from __future__ import annotations

from copy import copy
from enum import Enum, IntEnum
from typing import TYPE_CHECKING

from weft.request import (
    MAX_TOKENS,
    Failure,
    FinishReason,
    GenerationResult,
    InferenceRequest,
    PreemptedTime,
    Priority,
    RequestState,
    TokenLogprobs,
)
from weft.scheduling.cache.allocation import KvCacheAllocation
from weft.scheduling.cache.block_pool import BlockHash, extend_block_hashes, root_hash

if TYPE_CHECKING:
    from weft.scheduling.draft_tokens import DraftProposer

NEVER = 1 << 62
"""`admitted_step` of a sequence without a row. It is later than every step."""


class Phase(IntEnum):
    WAITING = 0
    PREFILL = 1
    DECODE = 2


class SeqState(Enum):
    """State and phase as one word, for display."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Sequence:
    """The state of one answer. Only the scheduler writes to it.

        tokens    [ prompt ........... | generated .... ]         known to the host
        computed  ---------------------->                         K and V are in the cache
        scheduled ---------------------------->                   ... or will be, after the steps in flight
        target    ---------------------------------------->       known tokens, and those being sampled in flight

    Prefill and decode are one case: steps compute tokens until `scheduled` reaches `target`, and the step that reaches
    it samples one more.
    """

    __slots__ = (
        "admitted_at",
        "admitted_step",
        "allocation",
        "arrival",
        "block_hashes",
        "cached_tokens",
        "computed",
        "cost",
        "deadline_at",
        "draft_proposer",
        "failure",
        "finish_reason",
        "first_token_at",
        "has_announced",
        "is_idle_work",
        "is_prepared",
        "last_step",
        "last_token_at",
        "limit",
        "logprobs",
        "min_length",
        "needs_last_token",
        "order",
        "phase",
        "phase_since",
        "phase_times",
        "preempted_times",
        "preemptions",
        "priority",
        "prompt_length",
        "prompt_logprobs",
        "queue_item",
        "request",
        "request_id",
        "root_hash",
        "row_sent",
        "scheduled",
        "seed",
        "state",
        "stop_ids",
        "swap_id",
        "target",
        "tokens",
        "vector",
    )

    def __init__(self, request: InferenceRequest, seed: int) -> None:
        self.request = request
        self.request_id = request.request_id
        self.seed = seed
        self.is_idle_work = request.is_idle_work
        self.priority = int(request.priority) - (len(Priority) if request.is_idle_work else 0)
        """Base priority. That of idle work is negative: below all others."""
        self.tokens = list(request.prompt)
        self.prompt_length = len(self.tokens)
        self.min_length = self.prompt_length + request.params.min_tokens
        self.limit = self.prompt_length + (request.params.max_tokens or MAX_TOKENS)
        """The sequence ends at this many tokens, prompt included."""
        self.cost = 0.0
        """Predicted seconds of the whole request, as set by the policy when it arrives. 0: not predicted."""
        self.computed = self.scheduled = 0
        self.target = self.prompt_length
        self.block_hashes: list[BlockHash] = []
        self.root_hash = root_hash(request.cache_salt, request.adapter_id)
        self.has_announced = False
        """Whether `PrefixSharing` has announced the blocks that this sequence will compute."""
        self.is_prepared = False
        self.state = RequestState.PENDING
        self.allocation: KvCacheAllocation | None = None
        self.row_sent = False
        """Whether the backend has this row. If not, the next plan sends all of it (`RowStart`)."""
        self.needs_last_token = False
        """Whether the host must know its last token before the next one is sampled, for the grammar mask."""
        self.draft_proposer: DraftProposer | None = None
        """None: the sequence gets no draft tokens."""
        self.swap_id: int | None = None
        self.admitted_step = NEVER
        """The first step that it may take part in since it was last admitted."""
        self.last_step = -1
        """The last step that it was planned in."""
        self.queue_item: object = None
        self.order = -1
        """Its number in order of arrival."""
        self.arrival = self.phase_since = 0.0
        self.deadline_at: float | None = None
        self.stop_ids: frozenset[int] = frozenset(request.params.stop_token_ids)
        self.finish_reason: FinishReason | None = None
        self.failure: Failure | None = None
        self.phase = Phase.WAITING
        self.phase_times = [0.0, 0.0, 0.0]
        self.admitted_at: float | None = None
        """The time of its first admission."""
        self.first_token_at: float | None = None
        self.last_token_at = 0.0
        self.cached_tokens: int | None = None
        """Tokens of the prefix hit at its first admission. None: not admitted yet."""
        self.preemptions = 0
        self.preempted_times: tuple[PreemptedTime, ...] = ()
        """The times for which it was preempted. The end of the last one is not set while the sequence is preempted."""
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: dict[int, TokenLogprobs] = {}
        """Logprobs by position: a prompt that is recomputed writes the same values again."""
        self.vector: bytes | None = None

    def sibling(self, request: InferenceRequest, seed: int) -> Sequence:
        """Another answer to the same prompt, for a sequence that is prepared but not queued. Copies the block hashes
        and stop ids instead of computing them again."""
        other = copy(self)
        other.request, other.request_id, other.seed = request, request.request_id, seed
        other.tokens, other.block_hashes = self.tokens.copy(), self.block_hashes.copy()
        other.phase_times, other.logprobs, other.prompt_logprobs = [0.0, 0.0, 0.0], [], {}
        if self.draft_proposer is not None:
            other.draft_proposer = self.draft_proposer.sibling(other.tokens)
        return other

    @property
    def is_decode(self) -> bool:
        """Whether exactly one position is left to schedule, and it comes after the prompt."""
        return self.target - self.scheduled == 1 and self.scheduled >= self.prompt_length

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def expected_tokens(self) -> float:
        """The expected number of tokens of the answer. Without an expected length: as many as it may have."""
        most, expected = self.limit - self.prompt_length, self.request.expected
        return most if expected is None else min(most, expected.mean)

    @property
    def decode_steps(self) -> int:
        """Generated tokens after the first one."""
        return max(0, len(self.tokens) - self.prompt_length - 1)

    @property
    def seq_state(self) -> SeqState:
        if self.state.is_over:
            return SeqState.FINISHED
        if self.state is RequestState.PREEMPTED:
            return SeqState.PREEMPTED
        if self.state is RequestState.PENDING:
            return SeqState.WAITING
        return SeqState.DECODING if self.phase is Phase.DECODE else SeqState.PREFILLING

    @property
    def is_finishing(self) -> bool:
        """Whether a step in flight samples its last token."""
        return self.target >= self.limit

    def extend_block_hashes(self, block_size: int) -> None:
        """Computes the hashes of all complete blocks of the known tokens."""
        extend_block_hashes(self.block_hashes, self.root_hash, self.tokens, block_size)

    def update_proposer(self) -> None:
        """Updates the draft proposer with new tokens."""
        if self.draft_proposer is not None:
            self.draft_proposer.update()

    def enter(self, phase: Phase, now: float) -> None:
        """Starts a phase, and adds the time since the last change to the phase that ends."""
        self.phase_times[self.phase] += now - self.phase_since
        self.phase, self.phase_since = phase, now

    def enter_preemption(self, by_swap: bool, now: float) -> None:
        began = now - self.arrival
        self.preempted_times += (PreemptedTime(began, began, by_swap),)
        self.preemptions += 1
        self.enter(Phase.WAITING, now)

    def end_preemption(self, now: float) -> None:
        """Sets the end of the last preemption."""
        *earlier, last = self.preempted_times
        self.preempted_times = (*earlier, last._replace(ended=now - self.arrival))

    def result(self) -> GenerationResult:
        assert self.finish_reason is not None
        waiting, prefill, decode = self.phase_times
        generated, proposer = tuple(self.generated), self.draft_proposer
        return GenerationResult(
            request_id=self.request_id,
            tokens=generated,
            text="",
            state=self.state,
            finish_reason=self.finish_reason,
            error=None if self.failure is None else self.failure.message or None,
            failure=None if self.failure is None else self.failure.kind,
            waiting_time=waiting,
            prefill_time=prefill,
            decode_time=decode,
            time_to_first_token=None if self.first_token_at is None else self.first_token_at - self.arrival,
            decode_steps=self.decode_steps,
            prompt_token_count=self.prompt_length,
            cached_token_count=self.cached_tokens or 0,
            preemptions=self.preemptions,
            preempted_times=self.preempted_times,
            logprobs=tuple(self.logprobs) if self.request.params.logprobs is not None else None,
            prompt_logprobs=self._all_prompt_logprobs(),
            metadata=self.request.metadata,
            # A stop string in the text may have removed accepted tokens.
            accepted_prediction_count=0
            if proposer is None
            else min(proposer.num_predicted_accepted, len(generated)),
            rejected_prediction_count=0 if proposer is None else proposer.num_predicted_rejected,
            vector=self.vector,
        )

    def _all_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        if self.request.params.prompt_logprobs is None:
            return None
        return tuple(self.prompt_logprobs.get(position) for position in range(self.prompt_length))
