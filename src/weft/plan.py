"""The plan of one step, what comes back from it, and what a backend is: all that scheduler and backend tell each other.

A plan is complete, frozen and cheap. Block tables, tokens and sampling parameters live in the backend's rows;
a plan carries only what changes, always by absolute index, so that planning a step again after a failure
overwrites whatever the failed one left behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.request import RequestId, SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class BackendInfo:
    """What a backend has, told once after it took its memory."""

    vocabulary_size: int
    max_context: int
    num_blocks: int
    block_size: int
    swap_blocks: int
    bytes_per_block: int
    eos_token_ids: frozenset[int] = frozenset()
    recompute_seconds_per_token: float = 1e-4
    swap_seconds_per_block: float = 1e-4
    """One direction. With the line above: which way of preempting is the cheaper one."""
    weight_bytes: int = 0
    device: str = ""
    """What computes, by its own name, where that is not the host's processor."""
    eager_blocks: int | None = None
    """Where a block takes memory only once it is used: how many may be used for cached content alone. None: all."""
    grammars_may_overlap: bool = False
    """Whether a row with a grammar may be in a step while the one that samples its last token is still in flight: the
    backend knows that token in time for the next mask. Else such a row sits out one step."""
    fixed_cost_rows: float = 0.0
    """How many rows cost as much as what a step costs whatever it computes: mostly reading the weights. It says how many
    drafts are worth their rows. A first value: the scheduler learns the true one (`DecodeCosts`). 0: the backend checks no drafts."""
    store_blocks: int = 0
    """Quantised blocks of a two-tier cache: their ids follow those of the full blocks. 0: a plain cache."""
    store_swap_blocks: int = 0
    """Host memory for quantised blocks: these slots follow the `swap_blocks` for full ones."""
    bytes_per_store_block: int = 0
    tail_blocks: int = 0
    """Complete blocks that a query still reads in full (`weft.tiers`)."""

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
    """The whole content of a row, sent when a request enters it and again after a failed step."""

    row: int
    request_id: RequestId
    tokens: tuple[int, ...]
    """All tokens known so far; tokens[:prompt_length] is the prompt."""
    prompt_length: int
    params: SamplingParams
    seed: int
    blocks: tuple[int, ...]
    """The block table, this step's new blocks included.

    With two tiers an entry is a store block where the content moved there before this step, and no query from here on
    reads it in full; otherwise a full block. This step's moves come on top.
    """


class SwapTask(NamedTuple):
    """Copies blocks[i] to swap_slots[i] (out) or back (in), after the stated step and swaps are over.

    A full block goes with a slot below `swap_blocks`, a store block with one from there on.

    These dependencies are the only order a swap has: nothing else may be assumed.
    """

    swap_id: int
    request_id: RequestId
    blocks: tuple[int, ...]
    swap_slots: tuple[int, ...]
    after_step: int
    after_swaps: tuple[int, ...]


class PrefillTask(NamedTuple):
    """A view of a plan entry, for people: part of a prompt (or of a replay after preemption)."""

    request_id: RequestId
    row: int
    start: int
    num_tokens: int
    samples: bool


class DecodeTask(NamedTuple):
    """A view of a plan entry, for people: one token of a running sequence, and what is guessed to follow it."""

    request_id: RequestId
    row: int
    position: int
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """One step. Entry i computes positions starts[i] .. starts[i]+counts[i]-1 of rows[i].

    The first `num_decodes` entries compute one token each and sample; their input may be the token that the step
    before samples, which only the device knows yet: the backend takes it from its own row. Then come decodes with
    drafts, one for each of `drafts`. The others are prefills and sample where samples[i] says so, from their last position.
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
    """New block-table entries of rows already known: table[table_rows[i]][table_indices[i]] = table_blocks[i]."""
    table_indices: tuple[int, ...] = ()
    table_blocks: tuple[int, ...] = ()
    """Always full blocks: what comes into the store comes by a move."""
    moved_rows: tuple[int, ...] = ()
    """Moves of a two-tier cache: in this step full block moved_from[i] is quantised into store block moved_to[i], which is
    from this step on entry moved_indices[i] of the store side of the table of row moved_rows[i].

    moved_from -1: the content is in the store already (or another move of this step or one in flight brings it there), only
    the entry is new. A step of decodes alone moves only what was complete before it; in any other, K and V of a moved
    block may be written by the step itself. The full block stays valid until the step is over.
    """
    moved_indices: tuple[int, ...] = ()
    moved_from: tuple[int, ...] = ()
    moved_to: tuple[int, ...] = ()
    swap_out: tuple[SwapTask, ...] = ()
    swap_in: tuple[SwapTask, ...] = ()
    after_swaps: tuple[int, ...] = ()
    """Swaps that must be over before this step may write: it reuses their blocks."""
    preempted: tuple[RequestId, ...] = ()
    freed: tuple[int, ...] = ()
    """Blocks whose content is dead from this step on. A backend that looks for mistakes poisons them."""
    drafts: tuple[tuple[int, ...], ...] = ()
    """Tokens guessed to follow the first of their entry, which every token before is known of: the entry computes that one
    and these, and samples behind each. A sample stands for nothing unless all drafts before it were sampled too; the
    backend need not care, since whatever comes next is told by absolute index. No other step holds such a row before
    this one is over."""

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + sum(self.counts[self.num_decodes :])

    @property
    def num_samples(self) -> int:
        return self.num_decodes + sum(self.samples[self.num_decodes :]) + sum(map(len, self.drafts))

    @property
    def first_prefill(self) -> int:
        """The number of entries that decode, with or without drafts: prefills come behind them."""
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
    """What a step gave. Swaps report here too, each exactly once, in whatever step's result comes next."""

    tokens: Sequence[int] = ()
    """One for every entry that samples, in the order of the entries; of one with drafts, one for each of its positions."""
    logprobs: Sequence[TokenLogprobs | None] | None = None
    """One for each of the tokens, None where its request asked for none; None for all where nobody asked."""
    prompt_logprobs: Mapping[RequestId, tuple[int, Sequence[TokenLogprobs]]] = field(default_factory=dict)
    """Of prompt tokens, from the stated position on; a prompt in chunks is told piece by piece."""
    errors: Mapping[RequestId, str] = field(default_factory=dict)
    """Errors that belong to one request; the rest of the step is planned again without it."""
    error: str | None = None
    """An error that belongs to nobody; the step is tried once more in halves."""
    finished_swaps: tuple[int, ...] = ()
    failed_swaps: Mapping[int, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return self.error is not None or bool(self.errors)
