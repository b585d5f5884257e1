"""Packs the tensors of model files into the layouts of the C++ kernels, and chooses the layout for each format.

While a decoder is built, `Packing` only collects tensors. Then all packed bytes are made at once, or read from a packed
file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

import numpy as np

from weft import _kernels
from weft.ops.base import LinearRole, WeightSource

PACKING_VERSION = 5
"""Increase it when the format of packed bytes or of packed files changes."""

Quantize = Literal["int8", "int4"]


class Layout(IntEnum):
    """Must equal the numbers in csrc/kernels/kernels.h."""

    W4 = 0
    W8 = 1
    F32 = 2
    F16 = 3
    BF16 = 4


_FLOATS = (Layout.F32, Layout.F16, Layout.BF16)


def layout_of(format_name: str, quantize: Quantize | None) -> Layout:
    """The layout for a tensor of this format. `quantize` applies only to formats that are not quantised."""
    layout = Layout(_kernels.layout_of(format_name))
    if quantize is None or layout not in _FLOATS:
        return layout
    return Layout.W8 if quantize == "int8" else Layout.W4


@dataclass(frozen=True)
class Tensor:
    """An [outputs, inputs] matrix in the format of the file: a tensor, or the part of one expert."""

    name: str
    format_name: str
    outputs: int
    inputs: int
    raw: np.ndarray


def matrices(source: WeightSource) -> list[Tensor]:
    """The matrix of a 2D tensor, or all matrices of a 3D tensor."""
    *stack, outputs, inputs = source.shape
    count = stack[0] if stack else 1
    raw = source.raw.reshape(count, -1)
    return [Tensor(f"{source.name}[{i}]", source.format_name, outputs, inputs, raw[i]) for i in range(count)]


def resident_bytes(sources: Iterable[WeightSource]) -> int:
    """The memory of these tensors after packing without `quantize`. Norms and biases are float32."""
    total = 0
    for source in sources:
        if len(source.shape) < 2:
            total += 4 * math.prod(source.shape)
            continue
        *stack, outputs, inputs = source.shape
        layout = layout_of(source.format_name, None)
        total += math.prod(stack) * _kernels.packed_bytes(layout, outputs, inputs)
    return total


@dataclass(eq=False)
class Part:
    """Tensors of one layout, stacked by outputs into one matrix. `Packing.pack` sets `weight`."""

    layout: Layout
    tensors: list[Tensor]
    bias: np.ndarray | None = None
    weight: _kernels.LinearWeight | None = None

    @property
    def outputs(self) -> int:
        return sum(tensor.outputs for tensor in self.tensors)

    @property
    def inputs(self) -> int:
        return self.tensors[0].inputs

    @property
    def is_quantised(self) -> bool:
        return self.layout not in _FLOATS

    @property
    def packed_bytes(self) -> int:
        return _kernels.packed_bytes(self.layout, self.outputs, self.inputs)

    @property
    def description(self) -> str:
        """Describes the packed bytes: for one model file, equal descriptions mean equal bytes."""
        stored = "+".join(f"{tensor.name}:{tensor.format_name}:{tensor.outputs}" for tensor in self.tensors)
        return f"{stored}x{self.inputs} {self.layout.name}"

    def pack_into(self, out: np.ndarray) -> None:
        first = 0
        for tensor in self.tensors:
            _kernels.pack(
                tensor.format_name, tensor.raw, tensor.inputs, self.layout, first, self.outputs, out
            )
            first += tensor.outputs


@dataclass(eq=False)
class Linear:
    """A linear layer: one part, or several if its tensors have different layouts."""

    parts: list[Part]

    @property
    def outputs(self) -> int:
        return sum(part.outputs for part in self.parts)

    @property
    def inputs(self) -> int:
        return self.parts[0].inputs

    @property
    def nbytes(self) -> int:
        return sum(part.packed_bytes + (0 if part.bias is None else part.bias.nbytes) for part in self.parts)


@dataclass(eq=False)
class Experts:
    """The feed-forward layers of a mixture: one part of each kind per expert."""

    gate: list[Part]
    up: list[Part]
    down: list[Part]

    @property
    def nbytes(self) -> int:
        return sum(part.packed_bytes for part in (*self.gate, *self.up, *self.down))


Sizes = Mapping[str, int]
Fill = Callable[[str, np.ndarray], None]
Keep = Callable[[Sizes, Fill], Mapping[str, np.ndarray]]
"""Takes the size of each array by name, and a function that fills an array. Returns the arrays."""


def in_memory(sizes: Sizes, fill: Fill) -> dict[str, np.ndarray]:
    """Packs into memory at every start, for models without a packed file."""
    pieces = {name: np.empty(size, np.uint8) for name, size in sizes.items()}
    for name, piece in pieces.items():
        fill(name, piece)
    return pieces


@dataclass
class Packing:
    """Collects the parts of all linear layers of a model."""

    quantize: Quantize | None = None
    parts: list[Part] = field(default_factory=list)

    def linear(
        self,
        sources: Sequence[WeightSource],
        biases: Sequence[WeightSource] = (),
        role: LinearRole = "layer",
    ) -> Linear:
        """A linear layer. With quantize="int4", output layer and embedding get 8 bits. A router keeps the format of the
        file, because its choice depends on small differences."""
        quantize = self.quantize if role == "layer" or self.quantize is None else "int8"
        parts: list[Part] = []
        for index, source in enumerate(sources):
            [tensor] = matrices(source)
            layout = layout_of(source.format_name, None if role == "router" else quantize)
            if not parts or parts[-1].layout != layout:
                parts.append(self._part(layout))
            parts[-1].tensors.append(tensor)
            if biases:
                bias = biases[index].to_float32()
                before = parts[-1].bias
                parts[-1].bias = bias if before is None else np.concatenate([before, bias])
        return Linear(parts)

    def experts(self, sources: Sequence[WeightSource]) -> list[Part]:
        """One part for each expert, because the tokens of each expert are multiplied separately."""
        parts = []
        for source in sources:
            for tensor in matrices(source):
                part = self._part(layout_of(source.format_name, self.quantize))
                part.tensors.append(tensor)
                parts.append(part)
        return parts

    def pack(self, keep: Keep) -> None:
        """Sets the packed weight of every part."""
        by_name = {f"{index} {part.description}": part for index, part in enumerate(self.parts)}
        pieces = keep(
            {name: part.packed_bytes for name, part in by_name.items()},
            lambda name, out: by_name[name].pack_into(out),
        )
        for name, part in by_name.items():
            part.weight = _kernels.LinearWeight(
                part.layout, part.outputs, part.inputs, pieces[name], part.bias
            )

    def _part(self, layout: Layout) -> Part:
        part = Part(layout, [])
        self.parts.append(part)
        return part
