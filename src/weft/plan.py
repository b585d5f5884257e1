"""The interface between scheduler and backend: the plan of a step, its result, and the properties of a backend.

A plan is complete, frozen and small. Block tables, tokens and sampling parameters live in the backend's rows; a plan
carries only changes to them. The changes use absolute indices. So if a step is planned again after a failure, it
overwrites what the failed one wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.request import Failure, RequestId, SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class BackendInfo:
    """Properties of a backend, fixed once it has allocated its memory."""

    vocabulary_size: int
    max_context: int
    num_blocks: int
    block_size: int
    swap_blocks: int
    bytes_per_block: int
    eos_token_ids: frozenset[int] = frozenset()
    recompute_seconds_per_token: float = 1e-4
    swap_seconds_per_block: float = 1e-4
    """Seconds to copy a block in one direction. This number and the one above decide between preemption by swap and by
    recompute."""
    weight_bytes: int = 0
    device: str = ""
    """The name of the device that computes, if it is not the host's processor."""
    eager_blocks: int | None = None
    """For backends whose blocks take memory on first use. Up to this many blocks, an untouched block is used before a
    cached one is evicted. Beyond that, see `BlockPool`. None: all blocks."""
    grammars_may_overlap: bool = False
    """Whether a row with a grammar may be in the next step while the step that samples its last token is in flight.
    True if the backend gets that token in time for the next mask. If False, the row waits until that step ends."""
    fixed_cost_rows: float = 0.0
    """The fixed cost of a step, expressed as a number of rows. Most of it is reading the weights. It decides how many
    draft tokens a step checks. The scheduler starts with this value and learns the true one (`DecodeCosts`). 0: no
    draft tokens."""
    extra_rows_are_cheap: bool = False
    """Whether a step with few rows takes about as long as one with more. Then idle work may share steps with
    interactive requests. If False, every row costs time, and idle work pauses."""
    store_blocks: int = 0
    """Quantised blocks of a two-tier cache. Their ids follow those of the full blocks. 0: the cache has one tier."""
    store_swap_blocks: int = 0
    """Swap slots for quantised blocks. Their ids follow those of the `swap_blocks` for full blocks."""
    bytes_per_store_block: int = 0
    tail_blocks: int = 0
    """How many complete blocks a query reads in full precision (`weft.tiers`)."""
    vector_size: int = 0
    """Above 0: the model makes a vector of each prompt, with this many numbers, and its tokens mean nothing. The engine
    gives it whole prompts, and one block for each (`EmbeddingSpec.engine_config`)."""
    room_tokens: int = 0
    """For such a model: how many tokens may be in the engine, so that steps have full speed and a text that arrives
    waits for few others. 0: as many as suit a CPU."""
    answers_are_exact: bool = False
    """Whether an answer has the same tokens alone and in any batch (contract 7). Then identical requests may share one
    sequence."""

    @property
    def cache_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block + self.store_blocks * self.bytes_per_store_block

    @property
    def cache_tokens(self) -> int:
        return (self.num_blocks + self.store_blocks) * self.block_size

    @property
    def swap_bytes(self) -> int:
        return self.swap_blocks * self.bytes_per_block + self.store_swap_blocks * self.bytes_per_store_block


class RowStart(NamedTuple):
    """The whole content of a row. Sent when a sequence gets the row, and again after a failed step."""

    row: int
    request_id: RequestId
    tokens: tuple[int, ...]
    """All tokens known so far; tokens[:prompt_length] is the prompt."""
    prompt_length: int
    params: SamplingParams
    seed: int
    blocks: tuple[int, ...]
    """The block table, with the new blocks of this step, but without the moves of this step.

    With two tiers, an entry is a store block if its content moved there before this step and no later query reads it in
    full precision. All others are full blocks.
    """


class SwapTask(NamedTuple):
    """Copies blocks[i] to swap_slots[i] (out) or back (in), after step `after_step` and swaps `after_swaps` have ended.

    A swap is ordered only by these dependencies: a backend may run it at any time after them.

    Full blocks use the swap slots below `BackendInfo.swap_blocks`. Store blocks use the swap slots from there on.
    """

    swap_id: int
    request_id: RequestId
    blocks: tuple[int, ...]
    swap_slots: tuple[int, ...]
    after_step: int
    after_swaps: tuple[int, ...]


class PrefillTask(NamedTuple):
    """A plan entry as an object, for display: a chunk of a prompt, or of a recompute after preemption."""

    request_id: RequestId
    row: int
    start: int
    num_tokens: int
    samples: bool


class DecodeTask(NamedTuple):
    """A plan entry as an object, for display: one token of a running sequence, and its draft tokens."""

    request_id: RequestId
    row: int
    position: int
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """One step. Entry i computes positions starts[i] .. starts[i]+counts[i]-1 of rows[i].

        entries  [ decodes ......... | decodes with draft tokens | prefills ............. ]
                   num_decodes         len(drafts)                 num_prefills

    A decode computes one token and samples the next. Its input may be a token that the previous step samples, which
    only the device knows yet: the backend reads it from its own row. A prefill with samples[i] set samples from its
    last position.
    """

    step: int
    num_decodes: int
    request_ids: tuple[RequestId, ...]
    rows: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    samples: tuple[bool, ...]
    row_starts: tuple[RowStart, ...] = ()
    table_rows: tuple[int, ...] = ()
    """New block-table entries of existing rows: table[table_rows[i]][table_indices[i]] = table_blocks[i]."""
    table_indices: tuple[int, ...] = ()
    table_blocks: tuple[int, ...] = ()
    """Always full blocks: store blocks enter a table only by a move."""
    moved_rows: tuple[int, ...] = ()
    """Moves of a two-tier cache. This step quantises full block moved_from[i] into store block moved_to[i], which
    becomes entry moved_indices[i] of the table of row moved_rows[i].

    moved_from -1: only the table entry is new. The content is in the store already, or another move of this step or of
    a step in flight brings it there.

    A step without prefills moves only blocks that were complete before it. In other steps, the step itself may write K
    and V of a block that it moves. The full block stays valid until the step ends.
    """
    moved_indices: tuple[int, ...] = ()
    moved_from: tuple[int, ...] = ()
    moved_to: tuple[int, ...] = ()
    swap_out: tuple[SwapTask, ...] = ()
    swap_in: tuple[SwapTask, ...] = ()
    after_swaps: tuple[int, ...] = ()
    """Swaps that must end before this step writes: it reuses their blocks."""
    preempted: tuple[RequestId, ...] = ()
    freed: tuple[int, ...] = ()
    """Blocks whose content is no longer used from this step on. A backend for tests overwrites them, to detect errors."""
    drafts: tuple[tuple[int, ...], ...] = ()
    """Draft tokens by entry. They follow the last known token of the entry. The entry computes that token and its draft
    tokens, and samples after each of them.

    A sample is valid only if all draft tokens before it were accepted. The backend need not check that: the next plan
    gives the absolute index at which the row continues. No other step holds the row until this step ends.
    """

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + sum(self.counts[self.num_decodes :])

    @property
    def num_samples(self) -> int:
        return self.num_decodes + sum(self.samples[self.num_decodes :]) + sum(map(len, self.drafts))

    @property
    def first_prefill(self) -> int:
        """The index of the first prefill: the number of decodes, with or without draft tokens."""
        return self.num_decodes + len(self.drafts)

    @property
    def num_prefills(self) -> int:
        return len(self.rows) - self.first_prefill

    @property
    def prefill_tasks(self) -> list[PrefillTask]:
        first = self.first_prefill
        columns = (self.request_ids, self.rows, self.starts, self.counts, self.samples)
        return [PrefillTask(*entry) for entry in zip(*(c[first:] for c in columns), strict=True)]

    @property
    def decode_tasks(self) -> list[DecodeTask]:
        columns = (self.request_ids, self.rows, self.starts, ((),) * self.num_decodes + self.drafts)
        return [DecodeTask(*entry) for entry in zip(*(c[: self.first_prefill] for c in columns), strict=True)]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step. Each swap is reported exactly once, in the next result after it ends."""

    tokens: Sequence[int] = ()
    """One per entry that samples, in entry order. An entry with draft tokens has one per position."""
    logprobs: Sequence[TokenLogprobs | None] | None = None
    """One per token. An element is None if its request wants no logprobs. The field is None if no request wants any."""
    prompt_logprobs: Mapping[RequestId, tuple[int, Sequence[TokenLogprobs]]] = field(default_factory=dict)
    """Logprobs of prompt tokens: (position of the first token, values). If a prompt is computed in chunks, each chunk
    is reported when it is computed."""
    errors: Mapping[RequestId, Failure] = field(default_factory=dict)
    """Errors of single requests. These requests end; the others are planned again."""
    error: str | None = None
    """An error of the whole step. The step is retried in halves."""
    finished_swaps: tuple[int, ...] = ()
    failed_swaps: Mapping[int, str] = field(default_factory=dict)
    vectors: Mapping[RequestId, bytes] = field(default_factory=dict)
    """The vectors of prompts, if the model makes any: float32, little-endian."""
    forced: Mapping[RequestId, tuple[int, ...]] = field(default_factory=dict)
    """Tokens that the grammar of a request forces after those of this step: at each of these places, it allows no other.
    Not all of them need to be reported. The scheduler makes draft tokens of them."""
    waited: float = 0.0
    """Seconds for which the step waited for an engine on the same cores. They are no part of its cost."""

    @property
    def failed(self) -> bool:
        return self.error is not None or bool(self.errors)
