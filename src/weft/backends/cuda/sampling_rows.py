"""The sampling parameters of a backend's rows: words on the device for the kernels, flags on the host for the choice of path."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weft.ops.triton import sampling as kernels
from weft.ops.triton.device import Device, Event
from weft.ops.triton.sampling_scores import start_rows_kernel
from weft.plan import RowStart
from weft.request import MAX_LOGIT_BIAS, SamplingParams
from weft.sampling.noise import as_seed

# Stop tokens that a row has room for, beside the model's own ends; they are on the device for min_tokens alone.
MAX_ENDS = 1024

_HEADER = kernels.HEADER.value
ROW_WORDS = _HEADER + 3 * MAX_LOGIT_BIAS + MAX_ENDS

# Steps in flight, and one more: a staging buffer is written anew when the device has surely read it.
_STAGINGS = 4

_TOP_K, _TOP_P = kernels.HAS_TOP_K.value, kernels.HAS_TOP_P.value
_MIN_P, _TYPICAL_P = kernels.HAS_MIN_P.value, kernels.HAS_TYPICAL_P.value
_REPETITION, _COUNTS, _LISTS = (
    kernels.HAS_REPETITION.value,
    kernels.HAS_COUNTS.value,
    kernels.HAS_LISTS.value,
)
_DRAWS = 128  # known to the host alone: temperature says it to the device


@dataclass(frozen=True)
class SamplingPath:
    """What the sampler has to do for a step, by what its rows ask for; equal paths are the same launches."""

    flags: int
    """All that some row asks for, as bits."""
    widest: int
    """The most of the likeliest tokens that a row wants told beside its own; -1: nobody wants logprobs."""
    is_masked: bool
    """Some row has a grammar."""

    @property
    def kind(self) -> str:
        """ "greedy", "plain" (temperature at most) or "full"."""
        if self.is_masked or self.widest >= 0 or self.flags & ~_DRAWS:
            return "full"
        return "plain" if self.flags else "greedy"

    @property
    def draws(self) -> bool:
        return self.flags & _DRAWS != 0

    @property
    def is_touched(self) -> bool:
        """Some row's scores differ from its logits."""
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
    def has_top_k(self) -> bool:
        return self.flags & _TOP_K != 0

    @property
    def has_top_p(self) -> bool:
        return self.flags & _TOP_P != 0

    @property
    def has_typical_p(self) -> bool:
        return self.flags & _TYPICAL_P != 0

    @property
    def is_filtered(self) -> bool:
        return self.flags & (_TOP_K | _TOP_P | _MIN_P | _TYPICAL_P) != 0

    @property
    def needs_best(self) -> bool:
        return self.flags & (_TOP_P | _MIN_P | _TYPICAL_P) != 0


class SamplingRows:
    """Written when rows begin; read by every step. One thread calls it."""

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
        self.refused: dict[int, str] = {}
        """Row -> why it can have no token: its parameters do not fit into a row."""
        # Where there is nothing but greedy rows, no step needs to look at them one by one.
        self._special: set[int] = set()
        # All rows at once, without lists.
        words = num_rows * (3 + _HEADER)
        self._stagings = [device.pinned(words, dtype=torch.int32) for _ in range(_STAGINGS)]
        self._read: list[Event] = [device.event() for _ in range(_STAGINGS)]
        self._turn = 0

    def start(self, row_starts: Iterable[RowStart]) -> None:
        """Rows begin: their words are on the way to the device, behind what was launched before."""
        packed = [(start.row, self._pack(start)) for start in row_starts]
        if not packed:
            return
        heads, offset = np.zeros((len(packed), 3), np.int32), 3 * len(packed)
        for head, (row, words) in zip(heads, packed, strict=True):
            head[:] = row, offset, len(words)
            offset += len(words)
        turn = self._turn = (self._turn + 1) % _STAGINGS
        self._read[turn].synchronize()
        if len(self._stagings[turn]) < offset:
            self._stagings[turn] = self._device.pinned(2 * offset, dtype=torch.int32)
        staged = self._stagings[turn]
        np.concatenate([heads.reshape(-1), *(words for _, words in packed)], out=staged.numpy()[:offset])
        self._device.launch(
            start_rows_kernel,
            (len(packed), 1, 1),
            (staged, self.words, ROW_WORDS),
            None,
            lambda: {"TILE": 128, "num_warps": 1},
        )
        self._read[turn].record()

    def path(self, rows: Sequence[int], masked: bool) -> SamplingPath:
        """`masked`: some of the rows has a grammar."""
        flags, widest = 0, -1
        if self._special:
            for row in self._special.intersection(rows):
                flags |= self._flags[row]
                widest = max(widest, self.top_counts[row])
        return SamplingPath(flags, min(widest, self._vocabulary_size), masked)

    def _pack(self, start: RowStart) -> np.ndarray:
        """The words of one row, as `weft.ops.triton.sampling` lays them out."""
        row, params = start.row, start.params
        ends = self._ends(params)
        self.refused.pop(row, None)
        if len(ends) > MAX_ENDS:
            self.refused[row] = (
                f"min_tokens beside {len(ends)} stop tokens: on this device at most {MAX_ENDS} can be held back"
            )
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
        words[2:16].view(np.float64)[:] = (
            params.temperature,
            params.top_p,
            np.log(params.min_p) if params.min_p > 0.0 else -np.inf,
            params.typical_p,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        top_k = params.top_k if flags & _TOP_K else 0
        words[16:_HEADER] = (
            start.prompt_length,
            top_k,
            min(params.min_tokens, 2**31 - 1),
            len(biases),
            len(ends),
            params.grammar is not None,
            flags & ~_DRAWS,
            top_count,
        )
        if biases:
            lists = _HEADER + 2 * len(biases)
            words[_HEADER:lists].view(np.float64)[:] = list(biases.values())
            words[lists : lists + len(biases)] = list(biases)
        words[_HEADER + 3 * len(biases) :] = ends
        return words

    def _ends(self, params: SamplingParams) -> list[int]:
        """The tokens that min_tokens holds back."""
        if params.min_tokens == 0:
            return []
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}
        return sorted(token for token in ends if token < self._vocabulary_size)


def _flags_of(params: SamplingParams, vocabulary_size: int) -> int:
    flags = 0
    if params.temperature > 0.0:
        flags |= _DRAWS
        flags |= _TOP_K if 0 < params.top_k < vocabulary_size else 0
        flags |= _TOP_P if params.top_p < 1.0 else 0
        flags |= _MIN_P if params.min_p > 0.0 else 0
        flags |= _TYPICAL_P if params.typical_p < 1.0 else 0
    flags |= _REPETITION if params.repetition_penalty != 1.0 else 0
    flags |= _COUNTS if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0 else 0
    flags |= _LISTS if params.logit_bias or params.min_tokens > 0 else 0
    return flags
