"""Samples tokens from logits on the GPU. `weft.sampling.reference` defines the results; this module launches the kernels.

Nothing here waits for the GPU. The launches depend only on the `SamplingPath`, and all arrays have fixed addresses. So
the launches of every path can be part of a CUDA graph.

    copy -> count -> penalise -> clear -> lists     makes the scores, if parameters or grammars change logits
    survey -> shortlist                             filters: samples if few tokens are kept, else finds their floors
    choose                                          samples all other entries, from tokens above their floors
    logprobs

A floor is the lowest score that a filter (top-k, top-p, ...) keeps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.backends.cuda.sampling_rows import MAX_ENDS, ROW_WORDS, SamplingPath, SamplingRows
from weft.ops.triton import sampling as kernels
from weft.ops.triton.device import INTERPRETED, Device, ceil_divide, power_of_two
from weft.ops.triton.sampling import choose_kernel
from weft.ops.triton.sampling_filters import shortlist_kernel, survey_kernel
from weft.ops.triton.sampling_logprobs import logprobs_kernel
from weft.ops.triton.sampling_scores import copy_kernel, count_kernel, lists_kernel, penalise_kernel
from weft.plan import RowStart
from weft.request import MAX_LOGPROBS, Failure, TokenLogprobs
from weft.sampling.reference import FORBIDDEN, NOT_A_NUMBER, OVERFLOW

Masks = tuple[Tensor, Tensor]
"""int32 [M, words]: one bit per token of the vocabulary; int32 [S]: the mask of each entry, or -1."""

# Random sampling has a smaller tile than greedy sampling, because it keeps more values in registers.
_GREEDY_TILE, _DRAW_TILE = 2048, 1024
_PROGRAMS_PER_PROCESSOR = 8
_COPY_TILE = 4096
_LOGPROBS_TILE = 4096
_HISTORY_TILE, _HISTORY_PROGRAMS = 512, 8
_WIDTH = power_of_two(MAX_LOGPROBS)


@dataclass(frozen=True)
class _Sizes:
    """How the vocabulary is divided. Most tokens are never examined one by one, because the best score of their group
    is too low."""

    head: int  # tiles that a program reads first; most tokens of later tiles cannot beat the best token of these
    group: int  # tokens per group; the survey finds the best of each group
    groups_of_piece: int  # groups that one program surveys
    few: int  # groups in the short list
    gathered: int  # groups gathered at a time
    most: int  # the most tokens that a list can hold
    tile: int


_ON_GPU = _Sizes(head=4, group=64, groups_of_piece=64, few=512, gathered=32, most=16384, tile=512)
# Small sizes, so that even the small vocabularies of the tests overflow the lists.
_INTERPRETED = _Sizes(head=1, group=8, groups_of_piece=512, few=16, gathered=128, most=512, tile=2048)

_ERRORS = {
    kernels.NOT_A_NUMBER.value: NOT_A_NUMBER,
    kernels.FORBIDDEN.value: FORBIDDEN,
    kernels.OVERFLOW.value: OVERFLOW,
}


class PendingLogprobs:
    """Logprobs that are being copied to the host. `read` them after the event of the step."""

    def __init__(self, arrays: _LogprobArrays, count: int, top_counts: Sequence[int], device: Device) -> None:
        self._top_counts = list(top_counts)
        width = max(0, *self._top_counts) if self._top_counts else 0
        self._logprobs = _to_host(arrays.logprobs[:count], device)
        self._top_tokens = _to_host(arrays.top_tokens[:count], device) if width else None
        self._top_logprobs = _to_host(arrays.top_logprobs[:count], device) if width else None

    def read(self, without: Collection[int] = ()) -> list[TokenLogprobs | None]:
        """Returns the logprobs of each entry. None if the request needs no logprobs, or if the entry is in `without` (the
        entries that have no token)."""
        values = self._logprobs.tolist()
        tokens = self._top_tokens.tolist() if self._top_tokens is not None else [[]] * len(values)
        tops = self._top_logprobs.tolist() if self._top_logprobs is not None else [[]] * len(values)
        return [
            TokenLogprobs(values[entry], tuple(zip(tokens[entry][:count], tops[entry][:count], strict=True)))
            if count >= 0 and entry not in without
            else None
            for entry, count in enumerate(self._top_counts)
        ]


class DeviceSampler:
    """The sampler of one backend. Only the thread that launches steps may call it."""

    def __init__(
        self,
        num_rows: int,
        vocabulary_size: int,
        eos_token_ids: Collection[int],
        row_tokens: Tensor,
        device: Device,
        max_sampled: int,
    ) -> None:
        """`row_tokens` int32 [rows, positions] has the tokens of all rows. The workspace takes `max_sampled` x
        vocabulary x 8 bytes."""
        self.rows = SamplingRows(num_rows, vocabulary_size, eos_token_ids, device)
        self.tokens = device.zeros(max_sampled, dtype=torch.int32)
        self.errors = device.zeros(max_sampled, dtype=torch.int32)
        self._vocabulary_size = vocabulary_size
        self._row_tokens = row_tokens
        self._device = device
        self._max_sampled = max_sampled
        self._scores = device.empty(max_sampled, vocabulary_size, dtype=torch.float32)
        self._counts = device.zeros(max_sampled, vocabulary_size, dtype=torch.int32)
        self._kept_ends = device.empty(max_sampled, MAX_ENDS, dtype=torch.float32)
        self._seen = device.zeros(max_sampled, dtype=torch.int32)
        self._floors = device.zeros(kernels.NUM_FLOORS, max_sampled, dtype=torch.int32)
        self._best = device.zeros(max_sampled, dtype=torch.float32)
        self._mean = device.zeros(max_sampled, dtype=torch.float64)
        self._settled = device.zeros(max_sampled, dtype=torch.int32)
        self._counters = device.zeros(max_sampled, dtype=torch.int32)
        sizes = self._cut = _INTERPRETED if INTERPRETED.value else _ON_GPU
        self._survey_pieces = ceil_divide(vocabulary_size, sizes.group * sizes.groups_of_piece)
        # If the first list lacks tokens, a second one is made. Its threshold is so low that the best token of at least this
        # many groups reaches it. The list has every token that reaches it. If likely tokens are spread evenly over groups
        # of 64, these are about 1/14 of all tokens: 1 - (1/128) ** (1/64).
        self._most_groups = vocabulary_size // sizes.group * 127 // 128
        self._groups = self._survey_pieces * sizes.groups_of_piece
        self._maxima = device.empty(max_sampled, self._groups, dtype=torch.float32)
        self._sums = device.empty(max_sampled, self._survey_pieces, 3, dtype=torch.float32)
        self._chosen_groups = device.empty(max_sampled, self._groups, dtype=torch.int32)
        self._list_scores = device.empty(max_sampled, sizes.most, dtype=torch.float32)
        self._list_tokens = device.empty(max_sampled, sizes.most, dtype=torch.int32)
        self._choice_pieces = _power_of_2(ceil_divide(vocabulary_size, _DRAW_TILE))
        self._choice_scores = device.empty(max_sampled, self._choice_pieces, dtype=torch.float32)
        self._choice_noise = device.empty(max_sampled, self._choice_pieces, dtype=torch.float64)
        self._choice_tokens = device.empty(max_sampled, self._choice_pieces, dtype=torch.int32)
        self._sizes = (vocabulary_size, row_tokens.stride(0), max_sampled)
        self._logprob_arrays = _LogprobArrays(max_sampled, vocabulary_size, device)
        nothing = device.zeros(1, dtype=torch.int32)
        self._no_masks: Masks = (nothing, nothing)

    @property
    def refused(self) -> dict[int, Failure]:
        """Row -> why it cannot sample. The backend fails such a row and ignores its token."""
        return self.rows.refused

    def start(self, row_starts: Iterable[RowStart]) -> None:
        self.rows.start(row_starts)

    def path(self, rows: Sequence[int], masked: bool = False) -> SamplingPath:
        return self.rows.path(rows, masked)

    def failure(self, code: int) -> Failure:
        return _ERRORS[code]

    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        path: SamplingPath,
        masks: Masks | None = None,
    ) -> None:
        """Samples a token for each of `logits` [S, vocabulary] into `tokens` and its row. Does not change `logits`.

        `rows` int32 [S] has -1 for padding; `positions` int32 [S] has the positions of the sampled tokens. An entry
        that fails has a code in `errors`, and token 0.
        """
        assert path.is_masked == (masks is not None), "a masked path needs masks, and only a masked path"
        entries = _Entries(logits, rows, positions, path, masks or self._no_masks)
        if path.is_touched:
            self._change_scores(entries)
        if path.is_filtered:
            self._filter(entries)
        self._choose(entries)
        if path.widest >= 0:
            self._launch_logprobs(self._logprob_arrays, logits, self.tokens, rows, path.widest)

    def collect(self, rows: Sequence[int], path: SamplingPath) -> PendingLogprobs | None:
        """The logprobs of the last sampled step. None: no row needs them."""
        if path.widest < 0:
            return None
        top_counts = [min(self.rows.top_counts[row], self._vocabulary_size) for row in rows]
        return PendingLogprobs(self._logprob_arrays, len(top_counts), top_counts, self._device)

    def score(self, logits: Tensor, tokens: Tensor, top_count: int) -> PendingLogprobs:
        """The logprobs of `tokens` [N] under `logits` [N, vocabulary]."""
        count = len(logits)
        top_count = min(top_count, self._vocabulary_size)
        arrays = _LogprobArrays(count, self._vocabulary_size, self._device)
        self._launch_logprobs(arrays, logits, tokens, None, top_count)
        return PendingLogprobs(arrays, count, [top_count] * count, self._device)

    def _change_scores(self, entries: _Entries) -> None:
        """Makes scores of the logits, with masks, penalties and lists of tokens applied."""
        count, path = entries.count, entries.path
        masks, mask_lines = entries.masks
        copy_kernel[(count, ceil_divide(self._vocabulary_size, _COPY_TILE))](
            entries.logits,
            self._scores,
            entries.rows,
            self.rows.words,
            masks,
            mask_lines,
            self._seen,
            self._vocabulary_size,
            entries.logits.stride(0),
            ROW_WORDS,
            masks.stride(0),
            MASKED=path.is_masked,
            TILE=_COPY_TILE,
            num_warps=8,
            **self._device.launch_options(),
        )
        if path.is_counted:
            self._count(entries, clears=False)
        if path.is_penalised:
            penalise_kernel[(count, _HISTORY_PROGRAMS)](
                entries.logits,
                self._scores,
                entries.rows,
                entries.positions,
                self.rows.words,
                self.rows.doubles,
                self._row_tokens,
                self._counts,
                masks,
                mask_lines,
                self._vocabulary_size,
                entries.logits.stride(0),
                ROW_WORDS,
                self._row_tokens.stride(0),
                masks.stride(0),
                MASKED=path.is_masked,
                TILE=_HISTORY_TILE,
                **self._device.launch_options(),
            )
        if path.is_counted:
            self._count(entries, clears=True)
        if path.has_lists:
            lists_kernel[(count,)](
                self._scores,
                entries.rows,
                entries.positions,
                self.rows.words,
                self.rows.doubles,
                self._kept_ends,
                self._vocabulary_size,
                ROW_WORDS,
                MAX_ENDS,
                TILE=1024,
                num_warps=8,
                **self._device.launch_options(),
            )

    def _count(self, entries: _Entries, clears: bool) -> None:
        """Counts the tokens of each entry for the penalties. With `clears`, sets these counts to 0 again."""
        count_kernel[(entries.count, _HISTORY_PROGRAMS)](
            entries.rows,
            entries.positions,
            self.rows.words,
            self._row_tokens,
            self._counts,
            self._vocabulary_size,
            ROW_WORDS,
            self._row_tokens.stride(0),
            CLEARS=clears,
            TILE=_HISTORY_TILE,
            **self._device.launch_options(),
        )

    def _filter(self, entries: _Entries) -> None:
        """Finds the floors of the filters. Samples entries for which the filters keep few tokens."""
        path, sizes, stride = entries.path, self._cut, entries.logits.stride(0)
        key = (path, entries.logits.dtype, stride, self._sizes)
        self._device.launch(
            survey_kernel,
            (entries.count, self._survey_pieces, 1),
            (
                entries.logits,
                self._scores,
                entries.rows,
                self.rows.words,
                self.rows.doubles,
                entries.masks[1],
                self._maxima,
                self._sums,
                self._vocabulary_size,
                stride,
                ROW_WORDS,
                self._groups,
                self._survey_pieces,
            ),
            key,
            lambda: {
                "TOUCHED": path.is_touched,
                "MASKED": path.is_masked,
                "MASSES": path.needs_masses,
                "GROUP": sizes.group,
                "GROUPS": sizes.groups_of_piece,
                "num_warps": 8,
            },
        )
        self._device.launch(
            shortlist_kernel,
            (entries.count, 1, 1),
            (
                entries.logits,
                self._scores,
                entries.rows,
                entries.positions,
                self.rows.words,
                self.rows.integers,
                self.rows.doubles,
                entries.masks[1],
                self._seen,
                self._maxima,
                self._sums,
                self._chosen_groups,
                self._list_scores,
                self._list_tokens,
                self._floors,
                self._best,
                self._mean,
                self._settled,
                self.tokens,
                self.errors,
                self._row_tokens,
                self._vocabulary_size,
                stride,
                ROW_WORDS,
                self._row_tokens.stride(0),
                self._max_sampled,
                self._groups,
                self._survey_pieces,
                sizes.few,
                self._most_groups,
            ),
            key,
            lambda: {
                "TOUCHED": path.is_touched,
                "MASKED": path.is_masked,
                "HALVES": entries.logits.dtype == torch.bfloat16,
                "USED": path.compiled_filters,
                "GROUP": sizes.group,
                "NUM_GROUPS": _power_of_2(self._groups),
                "PIECES": _power_of_2(self._survey_pieces),
                "GATHERED": sizes.gathered,
                "LIST": sizes.most,
                "TILE": sizes.tile,
                "num_warps": 8,
                "maxnreg": 128,  # two programs per multiprocessor, and nearly no register spills
            },
        )

    def _choose(self, entries: _Entries) -> None:
        """Samples all entries that `_filter` has not sampled."""
        path = entries.path
        tile = _DRAW_TILE if path.draws else _GREEDY_TILE
        # With few entries, the vocabulary of each is divided among many programs, so that every multiprocessor has
        # work.
        all_tiles = ceil_divide(self._vocabulary_size, tile)
        tiles = max(1, all_tiles * entries.count // (_PROGRAMS_PER_PROCESSOR * self._device.processors))
        num_pieces = ceil_divide(all_tiles, tiles)
        stride = entries.logits.stride(0)
        self._device.launch(
            choose_kernel,
            (entries.count, num_pieces, 1),
            (
                entries.logits,
                self._scores,
                entries.rows,
                entries.positions,
                self.rows.words,
                self.rows.integers,
                self.rows.doubles,
                entries.masks[1],
                self._floors,
                self._best,
                self._mean,
                self._seen,
                self._settled,
                self._choice_scores,
                self._choice_noise,
                self._choice_tokens,
                self._counters,
                self.tokens,
                self.errors,
                self._row_tokens,
                self._vocabulary_size,
                stride,
                ROW_WORDS,
                self._row_tokens.stride(0),
                self._max_sampled,
                num_pieces,
                tiles,
            ),
            (path, entries.logits.dtype, stride, self._sizes),
            lambda: {
                "DRAWS": path.draws,
                "TOUCHED": path.is_touched,
                "MASKED": path.is_masked,
                "FILTERED": path.is_filtered,
                "USED": path.compiled_filters,
                "TILE": tile,
                "HEAD": self._cut.head,
                "PIECES": self._choice_pieces,
                "num_warps": 8,
            },
        )

    def _launch_logprobs(
        self, arrays: _LogprobArrays, logits: Tensor, tokens: Tensor, rows: Tensor | None, width: int
    ) -> None:
        logprobs_kernel[(len(logits), arrays.pieces)](
            logits,
            tokens,
            self.tokens if rows is None else rows,
            self.rows.words,
            arrays.masses,
            arrays.best,
            arrays.ranked,
            arrays.counters,
            arrays.logprobs,
            arrays.top_tokens,
            arrays.top_logprobs,
            self._vocabulary_size,
            logits.stride(0),
            ROW_WORDS,
            arrays.pieces,
            width,
            BY_ROW=rows is not None,
            TILE=_LOGPROBS_TILE,
            PIECES=_power_of_2(arrays.pieces),
            WIDTH=_WIDTH,
            num_warps=8,
            **self._device.launch_options(),
        )


class _Entries:
    """The arguments that all launches of one step share."""

    def __init__(
        self, logits: Tensor, rows: Tensor, positions: Tensor, path: SamplingPath, masks: Masks
    ) -> None:
        assert logits.stride(1) == 1, "the logits of an entry are contiguous"
        self.count = len(logits)
        self.logits = logits
        self.rows = rows
        self.positions = positions
        self.path = path
        self.masks = masks


class _LogprobArrays:
    """Workspace and output of the logprobs kernel, for up to `count` entries."""

    def __init__(self, count: int, vocabulary_size: int, device: Device) -> None:
        self.pieces = ceil_divide(vocabulary_size, _LOGPROBS_TILE)
        padded = _power_of_2(self.pieces)
        self.masses = device.empty(count, padded, dtype=torch.float32)
        self.best = device.empty(count, padded, dtype=torch.float32)
        self.ranked = device.empty(count, padded, _WIDTH, dtype=torch.int64)
        self.counters = device.zeros(count, dtype=torch.int32)
        self.logprobs = device.zeros(count, dtype=torch.float64)
        self.top_tokens = device.zeros(count, _WIDTH, dtype=torch.int32)
        self.top_logprobs = device.zeros(count, _WIDTH, dtype=torch.float64)


def _power_of_2(count: int) -> int:
    return max(2, power_of_two(count))


def _to_host(array: Tensor, device: Device) -> Tensor:
    return device.pinned(*array.shape, dtype=array.dtype).copy_(array, non_blocking=True)
