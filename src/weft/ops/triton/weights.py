"""Loads tensors of model files to the device, as linear layers and experts of one floating-point type.

Values pass through two alternating page-locked buffers: one is filled from the file while the other is copied to the
device. Floating-point formats are converted on the device, quantised formats on the host.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.ops.base import WeightSource
from weft.ops.triton.device import Device, Event

_STAGING_BYTES = 64 << 20

_PLAIN = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"""The file formats that torch can read as a tensor."""


@dataclass(eq=False)
class Linear:
    """A linear layer or an embedding table."""

    weight: Tensor  # [outputs, inputs]
    bias: Tensor | None = None  # [outputs]
    is_gated: bool = False
    """True: rows of gate and up are interleaved (gate 0, up 0, gate 1, ...), so that a tile of a product holds both
    factors of a gate."""

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]

    @property
    def inputs(self) -> int:
        return self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def interleave_gate(self) -> None:
        if not self.is_gated:
            interleave_halves(self.weight)
            if self.bias is not None:
                interleave_halves(self.bias)
            self.is_gated = True


@dataclass(eq=False)
class Experts:
    """The feed-forward layers of a mixture; gate and up are interleaved, as in a gated `Linear`."""

    gate_up: Tensor  # [experts, 2 * inner features, features]
    down: Tensor  # [experts, features, inner features]

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes


def interleave_halves(rows: Tensor) -> None:
    """Interleaves the first and the second half of the rows, in place: 0, n, 1, n + 1, ..."""
    half = len(rows) // 2
    first, second = rows[:half].clone(), rows[half:].clone()
    rows[0::2] = first
    rows[1::2] = second


class Loader:
    """Reads tensors into device memory."""

    def __init__(self, device: Device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._staging: list[tuple[Tensor, Event]] = []
        self._staging_index = 0

    def vector(self, source: WeightSource, offset: float) -> Tensor:
        """Loads a vector in the data type of the weights if that loses nothing, else in float32."""
        stored = _PLAIN.get(source.format_name)
        dtype = self._dtype if offset == 0.0 and stored == self._dtype else torch.float32
        values = self._device.empty(*source.shape, dtype=dtype)
        self._read(source, values)
        return values if offset == 0.0 else values.add_(offset)

    def stacked(self, sources: Sequence[WeightSource]) -> Tensor:
        """The tensors, concatenated along their rows."""
        rows = sum(source.shape[0] for source in sources)
        stacked = self._device.empty(rows, *sources[0].shape[1:], dtype=self._dtype)
        start = 0
        for source in sources:
            self._read(source, stacked[start : start + source.shape[0]])
            start += source.shape[0]
        return stacked

    def linear(self, sources: Sequence[WeightSource], biases: Sequence[WeightSource]) -> Linear:
        return Linear(self.stacked(sources), self.stacked(biases) if biases else None)

    def experts(
        self, gate: Sequence[WeightSource], up: Sequence[WeightSource], down: Sequence[WeightSource]
    ) -> Experts:
        *_, inner, features = gate[0].shape
        count = sum(source.shape[0] if len(source.shape) == 3 else 1 for source in gate)
        gate_up = self._device.empty(count, inner, 2, features, dtype=self._dtype)
        out = self._device.empty(count, features, inner, dtype=self._dtype)
        for target, sources in ((gate_up[:, :, 0], gate), (gate_up[:, :, 1], up), (out, down)):
            first = 0
            for source in sources:
                number = source.shape[0] if len(source.shape) == 3 else 1
                place = target[first : first + number]
                self._read(source, place if len(source.shape) == 3 else place[0])
                first += number
        return Experts(gate_up.view(count, 2 * inner, features), out)

    def _read(self, source: WeightSource, target: Tensor) -> None:
        """Fills `target` with the values of a tensor. Random weights (`weft.loading.random_checkpoint`) may be made on
        the device."""
        if getattr(source, "fill_on_device", False):
            _fill_random(source, target)
        elif (stored := _PLAIN.get(source.format_name)) is not None:
            self._copy_through_staging(_as_torch(source.raw, stored, source.shape), target)
        else:
            self._decode(source, target)

    def _copy_through_staging(self, values: Tensor, target: Tensor) -> None:
        """Copies as many rows at a time as the staging buffer holds."""
        if values.ndim > 2:
            values, target = values.view(-1, values.shape[-1]), target.view(-1, target.shape[-1])
        if not self._device.is_gpu:
            target.copy_(values)
            return
        step = max(1, _STAGING_BYTES // (values.nbytes // len(values)))
        for start in range(0, len(values), step):
            piece, place = values[start : start + step], target[start : start + step]
            staging, copied = self._next_staging()
            buffer = staging[: piece.nbytes].view(piece.dtype).view(piece.shape)
            buffer.copy_(piece)
            # Values are converted on the device: torch would convert on the host, and copy a second time if the target
            # is not contiguous.
            direct = place.dtype == buffer.dtype and place.is_contiguous()
            arrived = place if direct else torch.empty_like(buffer, device=place.device)
            arrived.copy_(buffer, non_blocking=True)
            copied.record()
            if not direct:
                place.copy_(arrived)

    def _decode(self, source: WeightSource, target: Tensor) -> None:
        """Decodes a quantised tensor on the host, as many rows at a time as the staging buffer holds."""
        if len(source.shape) != 2:
            self._copy_through_staging(torch.from_numpy(source.to_float32()), target)
            return
        step = max(1, _STAGING_BYTES // (4 * source.shape[1]))
        for start in range(0, source.shape[0], step):
            indices = np.arange(start, min(start + step, source.shape[0]))
            self._copy_through_staging(
                torch.from_numpy(source.rows(indices)), target[start : start + len(indices)]
            )

    def _next_staging(self) -> tuple[Tensor, Event]:
        """Returns the least recently used buffer, after its last copy is done."""
        if len(self._staging) < 2:
            buffer = self._device.pinned(_STAGING_BYTES, dtype=torch.uint8)
            self._staging.append((buffer, self._device.event()))
            return self._staging[-1]
        self._staging_index = 1 - self._staging_index
        staging, copied = self._staging[self._staging_index]
        copied.synchronize()
        return staging, copied


def _fill_random(source: Any, target: Tensor) -> None:
    """Fills the target with random numbers of the source's distribution, generated on the device."""
    generator = torch.Generator(target.device).manual_seed(source.seed)
    target.normal_(source.mean, source.deviation, generator=generator)


def _as_torch(raw: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The stored bytes as a tensor, without a copy."""
    with warnings.catch_warnings():
        # torch warns that a mapped file is not writable; nothing here writes to it.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(raw.reshape(-1)).view(dtype).view(shape)
