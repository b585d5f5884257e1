"""The ops interface as a recorder: every operation of a forward pass is noted, none is carried out.

A decoder is run once with it. What it passes around are `Buffer`s, of which only the width is known: how many rows there
are is a matter of the step.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from weft.ops.base import AttentionPattern, AttentionShape, LinearRole, QkNorm, WeightSource
from weft.ops.cpu.weights import Experts, Linear, Packing

NO_STEP: Any = None
"""For the forward pass that is recorded: nothing of a step is looked at."""


@dataclass(eq=False)
class Buffer:
    """A row of so many floats for every token of a step, or for every token after which logits are wanted."""

    columns: int


@dataclass(frozen=True, eq=False)
class Embed:
    table: Linear
    scale: float
    output: Buffer


@dataclass(frozen=True, eq=False)
class Norm:
    input: Buffer
    weight: np.ndarray
    epsilon: float
    output: Buffer


@dataclass(frozen=True, eq=False)
class Gate:
    kind: Literal["silu_mul", "gelu_tanh_mul"]
    input: Buffer
    output: Buffer


@dataclass(frozen=True, eq=False)
class Product:
    input: Buffer
    layer: Linear
    output: Buffer


@dataclass(frozen=True, eq=False)
class RopeAndWrite:
    """In place: the queries are what stands first in the rows."""

    rows: Buffer
    layer: int
    pattern: int
    norm: QkNorm | None


@dataclass(frozen=True, eq=False)
class Attention:
    queries: Buffer
    layer: int
    pattern: int
    output: Buffer


@dataclass(frozen=True, eq=False)
class Mixture:
    input: Buffer
    router: Linear
    experts: Experts
    per_token: int
    normalise: bool
    output: Buffer


@dataclass(frozen=True, eq=False)
class Add:
    """left += right * scale"""

    left: Buffer
    right: Buffer
    scale: float


@dataclass(frozen=True, eq=False)
class SelectRows:
    input: Buffer
    output: Buffer


@dataclass(frozen=True, eq=False)
class ScaleAndCap:
    """In place."""

    values: Buffer
    scale: float
    cap: float | None


Operation = (
    Embed | Norm | Gate | Product | RopeAndWrite | Attention | Mixture | Add | SelectRows | ScaleAndCap
)


@dataclass
class Recording:
    """One forward pass."""

    shape: AttentionShape
    patterns: Sequence[AttentionPattern]
    operations: list[Operation] = field(default_factory=list)


class CpuOps:
    """`Ops` that records. Weights are collected in `packing`; `recording` is the forward pass under way."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing
        self.recording: Recording | None = None

    # --- once, at load ------------------------------------------------------------------------------------------

    def load_vector(self, source: WeightSource, offset: float = 0.0) -> np.ndarray:
        return source.to_float32() + np.float32(offset)

    def load_linear(
        self,
        sources: Sequence[WeightSource],
        biases: Sequence[WeightSource] = (),
        role: LinearRole = "layer",
    ) -> Linear:
        return self.packing.linear(sources, biases, role)

    def load_experts(
        self, gate: Sequence[WeightSource], up: Sequence[WeightSource], down: Sequence[WeightSource]
    ) -> Experts:
        return Experts(*(self.packing.experts(sources) for sources in (gate, up, down)))

    def load_embedding(self, source: WeightSource) -> Linear:
        return self.packing.linear([source], role="words")

    def nbytes(self, weight: np.ndarray | Linear | Experts) -> int:
        return weight.nbytes

    def new_cache(self, blocks: int, layers: int, block_size: int, shape: AttentionShape) -> np.ndarray:
        """Unlike in numpy, what one kv head reads of a block lies together; in large pages, where the system has some:
        the blocks of a request are all over the memory."""
        places = (blocks, layers, 2, shape.kv_heads, block_size, shape.head_size)
        try:
            memory = mmap.mmap(-1, max(1, math.prod(places) * 2))
        except (OSError, OverflowError) as error:
            raise MemoryError(str(error)) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(memory, np.float16, math.prod(places)).reshape(places)

    # --- recorded -----------------------------------------------------------------------------------------------

    def prepare(
        self, step: Any, cache: Any, shape: AttentionShape, patterns: Sequence[AttentionPattern]
    ) -> Recording:
        self.recording = Recording(shape, patterns)
        return self.recording

    def embedding(self, prepared: Recording, table: Linear, scale: float = 1.0) -> Buffer:
        output = Buffer(table.inputs)
        self._note(Embed(table, scale, output))
        return output

    def select_logit_rows(self, prepared: Recording, hidden: Buffer) -> Buffer:
        output = Buffer(hidden.columns)
        self._note(SelectRows(hidden, output))
        return output

    def scale_and_cap(self, logits: Buffer, scale: float, cap: float | None) -> Buffer:
        self._note(ScaleAndCap(logits, scale, cap))
        return logits

    def linear(self, inputs: Buffer, weight: Linear) -> Buffer:
        output = Buffer(weight.outputs)
        self._note(Product(inputs, weight, output))
        return output

    def rms_norm(self, inputs: Buffer, weight: np.ndarray, epsilon: float) -> Buffer:
        output = Buffer(inputs.columns)
        self._note(Norm(inputs, weight, epsilon, output))
        return output

    def rope_and_write(
        self,
        prepared: Recording,
        qkv: Buffer,
        cache: Any,
        layer: int,
        pattern: int,
        norm: QkNorm | None = None,
    ) -> Buffer:
        self._note(RopeAndWrite(qkv, layer, pattern, norm))
        return qkv

    def paged_attention(
        self, prepared: Recording, queries: Buffer, cache: Any, layer: int, pattern: int
    ) -> Buffer:
        output = Buffer(prepared.shape.heads * prepared.shape.head_size)
        self._note(Attention(queries, layer, pattern, output))
        return output

    def silu_mul(self, gate_up: Buffer) -> Buffer:
        return self._gate("silu_mul", gate_up)

    def gelu_tanh_mul(self, gate_up: Buffer) -> Buffer:
        return self._gate("gelu_tanh_mul", gate_up)

    def mixture(
        self, inputs: Buffer, router: Linear, experts: Experts, per_token: int, normalise: bool
    ) -> Buffer:
        output = Buffer(inputs.columns)
        self._note(Mixture(inputs, router, experts, per_token, normalise, output))
        return output

    def add(self, left: Buffer, right: Buffer, scale: float = 1.0) -> Buffer:
        self._note(Add(left, right, scale))
        return left

    def _gate(self, kind: Literal["silu_mul", "gelu_tanh_mul"], gate_up: Buffer) -> Buffer:
        output = Buffer(gate_up.columns // 2)
        self._note(Gate(kind, gate_up, output))
        return output

    def _note(self, operation: Operation) -> None:
        assert self.recording is not None, "a forward pass begins with `prepare`"
        self.recording.operations.append(operation)
