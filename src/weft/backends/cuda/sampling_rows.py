"""The sampling parameters of all rows: on the GPU for the kernels, and as flags on the host to choose kernels."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weft.ops.triton import sampling as kernels
from weft.ops.triton.device import Device, Event
from weft.ops.triton.sampling_scores import start_rows_kernel
from weft.plan import RowStart
from weft.request import MAX_LOGIT_BIAS, Failure, FailureKind, SamplingParams
from weft.sampling.noise import as_seed
from weft.sampling.words import sampler_flags, sampler_words

# How many end tokens (stop tokens and the model's own) a row can hold. The kernels need end tokens for min_tokens only.
MAX_ENDS = 1024

_HEADER = kernels.HEADER.value
_DOUBLES = slice(2, kernels.PROMPT_LENGTH.value)
_INTEGERS = slice(kernels.PROMPT_LENGTH.value, _HEADER - 1)
ROW_WORDS = _HEADER + 3 * MAX_LOGIT_BIAS + MAX_ENDS

# The number of staging buffers. There are more than steps in flight: when a buffer is written again, the GPU has nearly
# always read it already.
_STAGINGS = 4

_DRAWS, _FILTERS, _TOP_K = kernels.DRAWS.value, kernels.FILTERS.value, kernels.HAS_TOP_K.value
_REPETITION, _COUNTS, _LISTS = (
    kernels.HAS_REPETITION.value,
    kernels.HAS_COUNTS.value,
    kernels.HAS_LISTS.value,
)


@dataclass(frozen=True)
class SamplingPath:
    """Which kernels sample a step. Steps with equal paths launch the same kernels."""

    flags: int
    """The union of the flags of all rows."""
    widest: int
    """The largest number of top logprobs that a row needs; -1: no row needs logprobs."""
    is_masked: bool
    """Whether a row has a grammar."""

    @property
    def kind(self) -> str:
        """ "greedy", "plain" (no parameter but temperature) or "full"."""
        if self.is_masked or self.widest >= 0 or self.flags & ~_DRAWS:
            return "full"
        return "plain" if self.flags else "greedy"

    @property
    def draws(self) -> bool:
        return self.flags & _DRAWS != 0

    @property
    def is_touched(self) -> bool:
        """Whether the scores of a row differ from its logits."""
        return self.is_masked or self.flags & (_REPETITION | _COUNTS | _LISTS) != 0

    @property
    def is_penalised(self) -> bool:
        return self.flags & (_REPETITION | _COUNTS) != 0

    @property
    def is_counted(self) -> bool:
        return self.flags & _COUNTS != 0

    @property
    def has_lists(self) -> bool:
        return self.flags & _LISTS != 0

    @property
    def is_filtered(self) -> bool:
        return self.flags & _FILTERS != 0

    @property
    def compiled_filters(self) -> int:
        return self.flags & kernels.COMPILED_FILTERS.value

    @property
    def needs_masses(self) -> bool:
        return self.flags & kernels.NEED_MASSES.value != 0


class SamplingRows:
    """The parameters of all rows: written at row starts, and read by every step. Only one thread may call the methods."""

    def __init__(
        self, num_rows: int, vocabulary_size: int, eos_token_ids: Collection[int], device: Device
    ) -> None:
        self._device = device
        self._vocabulary_size = vocabulary_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self.words = device.zeros(num_rows, ROW_WORDS, dtype=torch.int32)
        self.integers = self.words.view(torch.int64)
        self.doubles = self.words.view(torch.float64)
        self._flags = [0] * num_rows
        self.top_counts = [-1] * num_rows
        self.refused: dict[int, Failure] = {}
        """Row -> why it cannot sample: its parameters do not fit into a row."""
        # Rows that are not purely greedy. `path` examines only these.
        self._special: set[int] = set()
        # The size of a staging buffer: enough to start all rows at once, if none has logit_bias or end tokens.
        words = num_rows * (3 + _HEADER)
        self._stagings = [device.pinned(words, dtype=torch.int32) for _ in range(_STAGINGS)]
        self._read: list[Event] = [device.event() for _ in range(_STAGINGS)]
        self._staging = 0

    def start(self, row_starts: Iterable[RowStart]) -> None:
        """Launches the copy of the parameters of new rows to the GPU."""
        packed = [(start.row, self._pack(start)) for start in row_starts]
        if not packed:
            return
        heads, offset = np.zeros((len(packed), 3), np.int32), 3 * len(packed)
        for head, (row, words) in zip(heads, packed, strict=True):
            head[:] = row, offset, len(words)
            offset += len(words)
        index = self._staging = (self._staging + 1) % _STAGINGS
        self._read[index].synchronize()
        if len(self._stagings[index]) < offset:
            self._stagings[index] = self._device.pinned(2 * offset, dtype=torch.int32)
        staged = self._stagings[index]
        np.concatenate([heads.reshape(-1), *(words for _, words in packed)], out=staged.numpy()[:offset])
        self._device.launch(
            start_rows_kernel,
            (len(packed), 1, 1),
            (staged, self.words, ROW_WORDS),
            None,
            lambda: {"TILE": 128, "num_warps": 1},
        )
        self._read[index].record()

    def path(self, rows: Sequence[int], masked: bool) -> SamplingPath:
        """The path of a step that samples these rows. `masked`: one of the rows has a grammar."""
        flags, widest = 0, -1
        if self._special:
            for row in self._special.intersection(rows):
                flags |= self._flags[row]
                widest = max(widest, self.top_counts[row])
        return SamplingPath(flags, min(widest, self._vocabulary_size), masked)

    def _pack(self, start: RowStart) -> np.ndarray:
        """The words of one row, in the layout of `weft.ops.triton.sampling`."""
        row, params = start.row, start.params
        ends = self._ends(params)
        self.refused.pop(row, None)
        if len(ends) > MAX_ENDS:
            message = (
                f"min_tokens is set with {len(ends)} stop tokens; on this device at most {MAX_ENDS} are allowed; "
                "use fewer stop tokens"
            )
            self.refused[row] = Failure(FailureKind.STEP, message)
            ends = []
        flags = self._flags[row] = _flags_of(params, self._vocabulary_size)
        top_count = self.top_counts[row] = -1 if params.logprobs is None else params.logprobs
        if flags or top_count >= 0:
            self._special.add(row)
        else:
            self._special.discard(row)
        biases = params.logit_bias
        words = np.zeros(_HEADER + 3 * len(biases) + len(ends), np.int32)
        words[:2].view(np.uint64)[0] = as_seed(start.seed)
        words[_DOUBLES].view(np.float64)[:] = sampler_words(params)
        words[_INTEGERS] = (
            start.prompt_length,
            min(params.min_tokens, 2**31 - 1),
            len(biases),
            len(ends),
            params.grammar is not None,
            flags,
            top_count,
        )
        if biases:
            lists = _HEADER + 2 * len(biases)
            words[_HEADER:lists].view(np.float64)[:] = list(biases.values())
            words[lists : lists + len(biases)] = list(biases)
        words[_HEADER + 3 * len(biases) :] = ends
        return words

    def _ends(self, params: SamplingParams) -> list[int]:
        """The tokens that must not be sampled before `min_tokens`."""
        if params.min_tokens == 0:
            return []
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}
        return sorted(token for token in ends if token < self._vocabulary_size)


def _flags_of(params: SamplingParams, vocabulary_size: int) -> int:
    """The flags of a row. Parameters without effect have none: filters of a greedy row, a top_k above the vocabulary."""
    flags = sampler_flags(params)
    if not flags & _DRAWS:
        flags &= ~_FILTERS
    if params.top_k >= vocabulary_size:
        flags &= ~_TOP_K
    return flags | _LISTS if params.logit_bias or params.min_tokens > 0 else flags
