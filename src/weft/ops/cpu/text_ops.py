"""The ops that record a text encoder for the C++ kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from weft.ops.base import AttentionPattern, AttentionShape, QkNorm, WeightSource
from weft.ops.cpu.recording_ops import CpuOps
from weft.ops.cpu.weights import Linear
from weft.ops.recording import (
    Buffer,
    Embed,
    MeanRows,
    Norm,
    Recording,
    Rope,
    SelectRows,
    TextActivation,
    TextAttention,
)
from weft.ops.reference_texts import SourceOfRows
from weft.ops.texts import Activation, Pooling


class CpuTextOps(CpuOps):
    """`TextOps` that records the forward pass and collects the weights in `packing`."""

    def load_embedding(self, source: WeightSource) -> Linear:
        """Keeps the precision of the file: the vector of a short text depends on few rows."""
        return self.packing.linear([source], role="router")

    def rows_of(self, source: WeightSource, rows: Sequence[int]) -> WeightSource:
        return SourceOfRows(source, tuple(rows))

    def prepare_texts(
        self, step: Any, shape: AttentionShape, patterns: Sequence[AttentionPattern]
    ) -> Recording:
        self.recording = Recording(shape, patterns)
        return self.recording

    def embedding_of(
        self, prepared: Recording, table: Any, index: Literal["positions", "types"], first: int
    ) -> Buffer:
        output = Buffer(table.inputs)
        self.record(Embed(table, 1.0, output, index, first))
        return output

    def layer_norm(self, inputs: Buffer, weight: Any, bias: Any | None, epsilon: float) -> Buffer:
        output = Buffer(inputs.columns)
        self.record(Norm(inputs, weight, epsilon, output, bias, is_centred=True))
        return output

    def self_attention(
        self, prepared: Recording, qkv: Buffer, pattern: int, norm: QkNorm | None = None
    ) -> Buffer:
        if norm is not None or prepared.patterns[pattern].rope.frequencies:
            self.record(Rope(qkv, pattern, norm))
        output = Buffer(prepared.shape.heads * prepared.shape.head_size)
        self.record(TextAttention(qkv, pattern, output))
        return output

    def activation(self, inputs: Buffer, kind: Activation) -> Buffer:
        output = Buffer(inputs.columns)
        self.record(TextActivation(kind, inputs, output))
        return output

    def gelu_mul(self, gate_up: Buffer) -> Buffer:
        output = Buffer(gate_up.columns // 2)
        self.record(TextActivation("gelu_mul", gate_up, output))
        return output

    def pool(self, prepared: Recording, rows: Buffer, pooling: Pooling) -> Buffer:
        output = Buffer(rows.columns)
        self.record(MeanRows(rows, output) if pooling == "mean" else SelectRows(rows, output))
        return output
