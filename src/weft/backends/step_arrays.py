"""Keeps the rows of a backend in host memory, and makes the index arrays of a step from a plan and the rows.

A step is prepared while the previous step computes. Only its input tokens are read later: the previous step may still
sample them.

A request keeps its row while it runs. All writes use absolute indices. So if a plan is built again after a failure, it
overwrites what the failed plan wrote.

    row r:  tokens[r, p]          the token at position p: prompt, then generated tokens
            tables[r, b]          the KV block of positions b * block size to (b + 1) * block size - 1
            store_tables[r, b]    the block of the store for the same positions, if they were moved there

In a plan, the ids of store blocks come after the ids of full-precision blocks. `store_tables` counts store blocks
from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weft.ops.base import StepIndices, StoreIndices
from weft.plan import IterationPlan, RowStart
from weft.request import RequestId, SamplingParams
from weft.sampling.noise import as_seed
from weft.sampling.words import flags_of, sampler_flags

_DRAWS = flags_of("temperature")


@dataclass(frozen=True)
class SampledEntries:
    """What a sampler needs to know about the S samples of a step, in plan order."""

    request_ids: list[RequestId]
    rows: np.ndarray  # int64 [S]
    positions: np.ndarray  # int64 [S]: the position of the sampled token
    output_indices: np.ndarray  # int64 [S]: the number of tokens generated before it
    seeds: np.ndarray  # uint64 [S]
    temperatures: np.ndarray  # float64 [S]
    is_plain: np.ndarray  # bool [S]: only temperature has an effect, apart from a grammar
    top_counts: np.ndarray  # int64 [S]: how many top logprobs to report; -1: no logprobs at all


@dataclass(frozen=True)
class ScoredPrompt:
    """A prompt chunk of a request with `prompt_logprobs`. The logits of a token score the token after it."""

    request_id: RequestId
    first: int  # the position of the first token to score: one after the first token of the chunk
    indices: np.ndarray  # int64 [N]: the tokens of the step that give the logits
    tokens: np.ndarray  # int64 [N]: the tokens to score
    top_count: int


class PreparedStep(NamedTuple):
    """The arrays of a step. `Rows.read_tokens` fills in its input tokens."""

    indices: StepIndices
    input_places: np.ndarray  # int64 [T]: the input tokens, as indices into the flattened `Rows.tokens`
    entries: SampledEntries
    sampled_places: np.ndarray  # int64 [S]: indices into the same array where the sampled tokens are written
    scored: Sequence[ScoredPrompt] = ()
    drafts: tuple[tuple[int, ...], ...] = ()
    first_draft: int = 0  # the first sample of the first entry with draft tokens

    def is_valid_sample(self, sample: int, tokens: np.ndarray) -> bool:
        """Whether all draft tokens before this sample were accepted. Other samples are discarded."""
        first = self.first_draft
        for drafts in self.drafts:
            if first <= sample <= first + len(drafts):
                return tuple(tokens[first:sample].tolist()) == drafts[: sample - first]
            first += 1 + len(drafts)
        return True


class _Selection:
    """The parameters of the rows of a step. Cached, because the next step usually has the same rows."""

    def __init__(self, rows: tuple[int, ...], state: Rows) -> None:
        self.key = rows
        self.rows = np.array(rows, np.int64)
        self.token_offsets = self.rows * state.tokens.shape[1]
        self.table_offsets = self.rows * state.tables.shape[1]
        numbers = state.numbers.take(self.rows, axis=1)  # each of the four arrays is contiguous
        self.prompt_lengths = numbers[0]
        self.seeds = numbers[1].view(np.uint64)
        self.temperatures = numbers[2].view(np.float64)
        self.top_counts = numbers[3]
        self.is_plain = state.is_plain[self.rows]


class _DecodeStep(NamedTuple):
    """The last step, if it had decodes only. If the next step has the same rows and starts at `next_starts`, its arrays
    are these, with every position one higher."""

    step: PreparedStep
    rows: tuple[int, ...]
    next_starts: tuple[int, ...]
    num_next: int  # steps until the first row reaches the end of its KV block


class Rows:
    """Tokens, block tables and sampling parameters of the running sequences."""

    def __init__(
        self,
        num_rows: int,
        max_context: int,
        block_size: int,
        full_blocks: int | None = None,
        tail_blocks: int = 0,
    ) -> None:
        """With two tiers, block ids from `full_blocks` on are store blocks."""
        self.block_size = block_size
        self._full_blocks, self._tail_blocks = full_blocks, tail_blocks
        # One position more than the context: the last token is sampled, but never computed.
        self.tokens = np.zeros((num_rows, max_context + 1), np.int32)
        self.tables = np.zeros((num_rows, -(-max_context // block_size)), np.int64)
        self.store_tables = np.zeros_like(self.tables if full_blocks is not None else self.tables[:, :0])
        # The next four arrays are views of this one, so that a step gathers all four with one numpy call.
        self.numbers = np.zeros((4, num_rows), np.int64)
        self.prompt_lengths = self.numbers[0]
        self.seeds = self.numbers[1].view(np.uint64)
        self.temperatures = self.numbers[2].view(np.float64)
        self.top_counts = self.numbers[3]
        self.top_counts[:] = -1
        self.is_plain = np.ones(num_rows, np.bool_)
        self.prompt_top_counts = np.full(num_rows, -1, np.int64)
        self.params: list[SamplingParams | None] = [None] * num_rows
        # Rows by feature of their last request. While a set is empty, steps skip the work for that feature.
        self.not_plain: set[int] = set()
        self.with_logprobs: set[int] = set()
        self.with_prompt_logprobs: set[int] = set()
        self._counting = np.arange(num_rows + 1)
        self._flat_tokens = self.tokens.reshape(-1)
        self._flat_tables = self.tables.reshape(-1)
        self._selected: _Selection | None = None
        self._last: _DecodeStep | None = None  # the last step; None after a change to rows or tables

    def update(self, plan: IterationPlan) -> None:
        """Applies the changes of the plan to the rows."""
        for start in plan.row_starts:
            self._start(start)
        if plan.table_rows:
            self._last = None
            self.tables[list(plan.table_rows), list(plan.table_indices)] = plan.table_blocks
        for entry, drafts in enumerate(plan.drafts, plan.num_decodes):
            first = plan.starts[entry] + 1
            self.tokens[plan.rows[entry], first : first + len(drafts)] = drafts
        if plan.moved_rows:
            assert self._full_blocks is not None, "only blocks of a two-tier cache move"
            moved_to = np.array(plan.moved_to, np.int64) - self._full_blocks
            self.store_tables[list(plan.moved_rows), list(plan.moved_indices)] = moved_to

    def _start(self, start: RowStart) -> None:
        row, params = start.row, start.params
        self._selected = self._last = None
        self.tokens[row, : len(start.tokens)] = start.tokens
        if self._full_blocks is None:
            self.tables[row, : len(start.blocks)] = start.blocks
        else:
            blocks = np.array(start.blocks, np.int64)
            is_stored = blocks >= self._full_blocks
            self.tables[row, : len(blocks)][~is_stored] = blocks[~is_stored]
            self.store_tables[row, : len(blocks)][is_stored] = blocks[is_stored] - self._full_blocks
        self.prompt_lengths[row] = start.prompt_length
        self.seeds[row] = as_seed(start.seed)
        self.temperatures[row] = params.temperature
        self.is_plain[row] = _is_plain(params)
        self.top_counts[row] = -1 if params.logprobs is None else params.logprobs
        self.prompt_top_counts[row] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        self.params[row] = params
        _include(self.not_plain, row, not self.is_plain[row])
        _include(self.with_logprobs, row, params.logprobs is not None)
        _include(self.with_prompt_logprobs, row, params.prompt_logprobs is not None)

    def prepare(self, plan: IterationPlan) -> PreparedStep:
        """Makes the arrays of one step. `logit_indices` lists the tokens whose logits are sampled, then those whose
        logits score prompts.

        Example with three rows a, b, c:

        counts      2        1   3
        tokens      a4 a5    b9  c0 c1 c2        query_starts 0 2 3 6, positions 4 5 9 0 1 2
        """
        scored = self.scored_prompts(plan)
        if plan.first_prefill == len(plan.rows) and not scored:
            return self._gather_drafts(plan) if plan.drafts else self._prepare_decodes(plan)
        rows, starts, counts = (
            np.array(column, np.int64) for column in (plan.rows, plan.starts, plan.counts)
        )
        query_starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(counts, out=query_starts[1:])
        token_rows = np.repeat(rows, counts)
        positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], counts)
        context_lengths = starts + counts
        blocks = int(-(-context_lengths.max(initial=0) // self.block_size))
        token_blocks = self.tables[token_rows, positions // self.block_size]
        sampled = self._sampled_indices(plan, query_starts)
        selected = self._select(tuple(token_rows[sampled].tolist()))
        indices = StepIndices(
            token_ids=np.empty(len(positions), np.int64),
            positions=positions,
            cells=token_blocks * self.block_size + positions % self.block_size,
            query_starts=query_starts,
            context_lengths=context_lengths,
            block_tables=self.tables[rows, :blocks],
            logit_indices=np.concatenate([sampled, *(chunk.indices for chunk in scored)]),
            store=self._store_indices(plan, rows, blocks),
        )
        sampling = np.searchsorted(query_starts, sampled, side="right") - 1
        request_ids = [plan.request_ids[entry] for entry in sampling.tolist()]
        entries = _entries(request_ids, positions[sampled] + 1, selected)
        input_places = token_rows * self.tokens.shape[1] + positions
        sampled_places = selected.token_offsets + entries.positions
        return PreparedStep(
            indices, input_places, entries, sampled_places, scored, plan.drafts, plan.num_decodes
        )

    def _sampled_indices(self, plan: IterationPlan, query_starts: np.ndarray) -> np.ndarray:
        """The tokens of the step whose logits are sampled from."""
        last = query_starts[1:][np.array(plan.samples, np.bool_)] - 1
        if not plan.drafts:
            return last
        decodes, drafted = plan.num_decodes, slice(plan.num_decodes, plan.first_prefill + 1)
        first, end = query_starts[drafted][[0, -1]].tolist()
        return np.concatenate([last[:decodes], np.arange(first, end), last[plan.first_prefill :]])

    def _prepare_decodes(self, plan: IterationPlan) -> PreparedStep:
        """`prepare` for a step of decodes without draft tokens. Nearly all steps are of this kind, so this method makes
        few numpy calls."""
        last = self._last
        if last is not None and last.num_next and plan.starts == last.next_starts and plan.rows == last.rows:
            step, num_next = _one_position_further(last.step), last.num_next - 1
        else:
            step, num_next = self._gather_decodes(plan), 0
            # With two tiers, moves change the tables between steps, so each step gets new arrays (`num_next` stays 0).
            if self._full_blocks is None:
                num_next = self.block_size - 1 - max([start % self.block_size for start in plan.starts])
        self._last = _DecodeStep(step, plan.rows, tuple([start + 1 for start in plan.starts]), num_next)
        return step

    def _gather_decodes(self, plan: IterationPlan) -> PreparedStep:
        """`_prepare_decodes` if the arrays of the last step cannot be used."""
        selected, block_size = self._select(plan.rows), self.block_size
        positions = np.array(plan.starts, np.int64)
        context_lengths = positions + 1
        blocks = self._flat_tables.take(selected.table_offsets + positions // block_size)
        longest = max(plan.starts) // block_size + 1
        counting = self._counting[: len(plan.rows) + 1]
        indices = StepIndices(
            token_ids=np.empty(len(plan.rows), np.int64),
            positions=positions,
            cells=blocks * block_size + positions % block_size,
            query_starts=counting,
            context_lengths=context_lengths,
            block_tables=self.tables[selected.rows, :longest],
            logit_indices=counting[:-1],
            store=self._store_indices(plan, selected.rows, longest),
        )
        entries = _entries(list(plan.request_ids), context_lengths, selected)
        input_places = selected.token_offsets + positions
        return PreparedStep(indices, input_places, entries, input_places + 1)

    def _gather_drafts(self, plan: IterationPlan) -> PreparedStep:
        """`prepare` for a step of decodes, some with draft tokens: every token samples.

        Such a step is planned late, so its preparation does not overlap with the previous step and must be fast. Arrays
        are first built as Python lists: for so few numbers a numpy call costs more than a list."""
        block_size, columns = self.block_size, (plan.request_ids, plan.rows, plan.starts, plan.counts)
        request_ids: list[RequestId] = []
        rows: list[int] = []
        positions: list[int] = []
        query_starts = [0]
        for request_id, row, start, count in zip(*columns, strict=True):
            request_ids += [request_id] * count
            rows += [row] * count
            positions += range(start, start + count)
            query_starts.append(len(positions))
        selected, at = self._select(tuple(rows)), np.array(positions, np.int64)
        ends = [start + count for start, count in zip(plan.starts, plan.counts, strict=True)]
        longest = -(-max(ends) // block_size)
        blocks = self._flat_tables.take(selected.table_offsets + at // block_size)
        entry_rows = np.array(plan.rows, np.int64)
        indices = StepIndices(
            token_ids=np.empty(len(positions), np.int64),
            positions=at,
            cells=blocks * block_size + at % block_size,
            query_starts=np.array(query_starts, np.int64),
            context_lengths=np.array(ends, np.int64),
            block_tables=self.tables[entry_rows, :longest],
            logit_indices=np.arange(len(positions)),
            store=self._store_indices(plan, entry_rows, longest),
        )
        entries = _entries(request_ids, at + 1, selected)
        input_places = selected.token_offsets + at
        return PreparedStep(
            indices, input_places, entries, input_places + 1, (), plan.drafts, plan.num_decodes
        )

    def read_tokens(self, step: PreparedStep) -> None:
        """Fills in the input tokens of a step. Called after the previous step has sampled."""
        step.indices.token_ids[:] = self._flat_tokens[step.input_places]

    def _store_indices(self, plan: IterationPlan, rows: np.ndarray, longest: int) -> StoreIndices | None:
        """What a step reads from the store and moves there. No row has more than `longest` blocks."""
        if self._full_blocks is None:
            return None
        moved_from = np.array(plan.moved_from, np.int64)
        moved_to = np.array(plan.moved_to, np.int64) - self._full_blocks
        is_copied = moved_from >= 0  # -1: the store already has the content, or another move brings it
        return StoreIndices(
            tables=self.store_tables[rows, : max(0, longest - self._tail_blocks)],
            moved_from=moved_from[is_copied],
            moved_to=moved_to[is_copied],
        )

    def _select(self, rows: tuple[int, ...]) -> _Selection:
        if self._selected is None or self._selected.key != rows:
            self._selected = _Selection(rows, self)
        return self._selected

    def scored_prompts(self, plan: IterationPlan) -> list[ScoredPrompt]:
        """The prompt chunks of a plan that must be scored."""
        scored: list[ScoredPrompt] = []
        if not self.with_prompt_logprobs:
            return scored
        rows = np.array(plan.rows, np.int64)
        token_starts = np.cumsum([0, *plan.counts])
        for entry in np.flatnonzero(self.prompt_top_counts[rows] >= 0).tolist():
            row, start = plan.rows[entry], plan.starts[entry]
            end = min(start + plan.counts[entry], int(self.prompt_lengths[row]) - 1)
            if start < end:
                scored.append(
                    ScoredPrompt(
                        request_id=plan.request_ids[entry],
                        first=start + 1,
                        indices=token_starts[entry] + np.arange(end - start),
                        tokens=self.tokens[row, start + 1 : end + 1].astype(np.int64),
                        top_count=int(self.prompt_top_counts[row]),
                    )
                )
        return scored

    def record(self, step: PreparedStep, tokens: np.ndarray) -> None:
        """Writes sampled tokens to the positions where the next step reads them."""
        self._flat_tokens[step.sampled_places] = tokens


def _one_position_further(step: PreparedStep) -> PreparedStep:
    """Returns the same decodes, one position further in each row, in the same KV blocks. Reuses unchanged arrays."""
    indices, entries = step.indices, step.entries
    context_lengths = indices.context_lengths + 1
    next_indices = StepIndices(
        token_ids=np.empty(len(context_lengths), np.int64),
        positions=indices.context_lengths,
        cells=indices.cells + 1,
        query_starts=indices.query_starts,
        context_lengths=context_lengths,
        block_tables=indices.block_tables,
        logit_indices=indices.logit_indices,
    )
    next_entries = SampledEntries(
        request_ids=entries.request_ids,
        rows=entries.rows,
        positions=context_lengths,
        output_indices=entries.output_indices + 1,
        seeds=entries.seeds,
        temperatures=entries.temperatures,
        is_plain=entries.is_plain,
        top_counts=entries.top_counts,
    )
    return PreparedStep(next_indices, step.sampled_places, next_entries, step.sampled_places + 1)


def _entries(request_ids: list[RequestId], positions: np.ndarray, selected: _Selection) -> SampledEntries:
    return SampledEntries(
        request_ids=request_ids,
        rows=selected.rows,
        positions=positions,
        output_indices=positions - selected.prompt_lengths,
        seeds=selected.seeds,
        temperatures=selected.temperatures,
        is_plain=selected.is_plain,
        top_counts=selected.top_counts,
    )


def _include(rows: set[int], row: int, belongs: bool) -> None:
    if belongs:
        rows.add(row)
    else:
        rows.discard(row)


def _is_plain(params: SamplingParams) -> bool:
    """Whether only temperature has an effect, apart from a grammar."""
    return not (sampler_flags(params) & ~_DRAWS or params.logit_bias or params.min_tokens)
