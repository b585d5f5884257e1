"""Records the forward pass of a decoder as a list of operations, fuses some of them, and assigns buffers to memory.

    norm or gate, then product        fused: the product normalises or gates its input rows itself
    product, then add                 fused: the product is added directly to the target

A decoder runs once with `RecordingOps`, which executes nothing. Instead of arrays it passes `Buffer`s, whose width is
known and whose number of rows depends on the step. Weights are opaque here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from weft.ops.base import AttentionPattern, AttentionShape, QkNorm

NO_STEP: Any = None
"""Stands for the step of a recorded forward pass. Recording reads nothing of it."""


@dataclass(eq=False)
class Buffer:
    """An array with one row per token of the step, or one row per token with logits."""

    columns: int


@dataclass(frozen=True, eq=False)
class Embed:
    table: Any
    scale: float
    output: Buffer
    index: Literal["tokens", "positions", "types"] = "tokens"
    first: int = 0
    """The row of `table` that index 0 selects. Index i selects row first + i."""


@dataclass(frozen=True, eq=False)
class Norm:
    """An RMS norm; a layer norm if `is_centred`."""

    input: Buffer
    weight: Any
    epsilon: float
    output: Buffer
    bias: Any | None = None
    is_centred: bool = False


@dataclass(frozen=True, eq=False)
class Gate:
    kind: Literal["silu_mul", "gelu_tanh_mul"]
    input: Buffer
    output: Buffer


@dataclass(frozen=True, eq=False)
class TextActivation:
    """An activation that only text models have. The kind with "mul" takes rows of [gate | up]."""

    kind: Literal["gelu_mul", "gelu", "gelu_tanh", "tanh"]
    input: Buffer
    output: Buffer


@dataclass(frozen=True, eq=False)
class Product:
    input: Buffer
    layer: Any
    output: Buffer


@dataclass(frozen=True, eq=False)
class RopeAndWrite:
    """Changes the rows in place. The queries are the first columns of the rows."""

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
class Rope:
    """Changes Q and K of the rows in place. Nothing is written to a cache."""

    rows: Buffer
    pattern: int
    norm: QkNorm | None


@dataclass(frozen=True, eq=False)
class TextAttention:
    """Attention of each text of the step over itself, without a cache."""

    input: Buffer
    pattern: int
    output: Buffer


@dataclass(frozen=True, eq=False)
class MeanRows:
    input: Buffer
    output: Buffer


@dataclass(frozen=True, eq=False)
class Mixture:
    input: Buffer
    router: Any
    experts: Any
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
    """Changes values in place: values * scale, then limited to (-cap, cap) by tanh unless `cap` is None."""

    values: Buffer
    scale: float
    cap: float | None


Operation = (
    Embed
    | Norm
    | Gate
    | TextActivation
    | Product
    | RopeAndWrite
    | Attention
    | Rope
    | TextAttention
    | MeanRows
    | Mixture
    | Add
    | SelectRows
    | ScaleAndCap
)


@dataclass
class Recording:
    """The operations of one forward pass."""

    shape: AttentionShape
    patterns: Sequence[AttentionPattern]
    operations: list[Operation] = field(default_factory=list)


class RecordingOps:
    """The half of `Ops` that a forward pass calls. Linear layers must have `inputs` and `outputs`."""

    recording: Recording | None = None
    """The last recorded forward pass."""

    def prepare(
        self, step: Any, cache: Any, shape: AttentionShape, patterns: Sequence[AttentionPattern]
    ) -> Recording:
        self.recording = Recording(shape, patterns)
        return self.recording

    def embedding(self, prepared: Recording, table: Any, scale: float = 1.0) -> Buffer:
        output = Buffer(table.inputs)
        self.record(Embed(table, scale, output))
        return output

    def select_logit_rows(self, prepared: Recording, hidden: Buffer) -> Buffer:
        output = Buffer(hidden.columns)
        self.record(SelectRows(hidden, output))
        return output

    def scale_and_cap(self, logits: Buffer, scale: float, cap: float | None) -> Buffer:
        self.record(ScaleAndCap(logits, scale, cap))
        return logits

    def linear(self, inputs: Buffer, weight: Any) -> Buffer:
        output = Buffer(weight.outputs)
        self.record(Product(inputs, weight, output))
        return output

    def rms_norm(self, inputs: Buffer, weight: Any, epsilon: float) -> Buffer:
        output = Buffer(inputs.columns)
        self.record(Norm(inputs, weight, epsilon, output))
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
        self.record(RopeAndWrite(qkv, layer, pattern, norm))
        return qkv

    def paged_attention(
        self, prepared: Recording, queries: Buffer, cache: Any, layer: int, pattern: int
    ) -> Buffer:
        output = Buffer(prepared.shape.heads * prepared.shape.head_size)
        self.record(Attention(queries, layer, pattern, output))
        return output

    def silu_mul(self, gate_up: Buffer) -> Buffer:
        return self._gate("silu_mul", gate_up)

    def gelu_tanh_mul(self, gate_up: Buffer) -> Buffer:
        return self._gate("gelu_tanh_mul", gate_up)

    def mixture(self, inputs: Buffer, router: Any, experts: Any, per_token: int, normalise: bool) -> Buffer:
        output = Buffer(inputs.columns)
        self.record(Mixture(inputs, router, experts, per_token, normalise, output))
        return output

    def add(self, left: Buffer, right: Buffer, scale: float = 1.0) -> Buffer:
        self.record(Add(left, right, scale))
        return left

    def _gate(self, kind: Literal["silu_mul", "gelu_tanh_mul"], gate_up: Buffer) -> Buffer:
        output = Buffer(gate_up.columns // 2)
        self.record(Gate(kind, gate_up, output))
        return output

    def record(self, operation: Operation) -> None:
        assert self.recording is not None, "a forward pass begins with `prepare`"
        self.recording.operations.append(operation)


@dataclass(frozen=True, eq=False)
class FusedProduct:
    """A product, fused with the norm or gate before it, and with the add after it. `added_to`: the buffer that the
    product is added to, if any."""

    product: Product
    before: Norm | Gate | TextActivation | None
    added_to: Buffer | None = None
    scale: float = 1.0

    @property
    def input(self) -> Buffer:
        return self.product.input if self.before is None else self.before.input

    @property
    def output(self) -> Buffer:
        return self.product.output if self.added_to is None else self.added_to


Instruction = Operation | FusedProduct


def fused(operations: Sequence[Operation], kept: set[Buffer]) -> list[Instruction]:
    """Fuses operations. Buffers in `kept` are read later, so the operations that write them are not removed."""
    readers: dict[Buffer, list[Operation]] = defaultdict(list)
    for operation in operations:
        for buffer in read_by(operation):
            readers[buffer].append(operation)

    def has_one_reader(buffer: Buffer) -> bool:
        return len(readers[buffer]) == 1 and buffer not in kept

    writers: dict[Buffer, Operation] = {}
    instructions: list[Instruction] = []
    for operation in operations:
        if isinstance(operation, Norm | Gate | TextActivation):
            writers[operation.output] = operation
            is_fused = has_one_reader(operation.output) and isinstance(readers[operation.output][0], Product)
            if not is_fused:
                instructions.append(operation)
        elif isinstance(operation, Product):
            before = writers.get(operation.input)
            if not (isinstance(before, Norm | Gate | TextActivation) and has_one_reader(operation.input)):
                before = None
            instructions.append(FusedProduct(operation, before))
        elif (
            isinstance(operation, Add)
            and isinstance(last := instructions[-1], FusedProduct)
            and last.output is operation.right
            and has_one_reader(operation.right)
        ):
            instructions[-1] = replace(last, added_to=operation.left, scale=operation.scale)
        else:
            instructions.append(operation)
    return instructions


def read_by(instruction: Instruction) -> Iterator[Buffer]:
    """The buffers that an instruction reads or changes in place."""
    match instruction:
        case Embed():
            pass
        case (
            RopeAndWrite(rows=buffer)
            | Rope(rows=buffer)
            | Attention(queries=buffer)
            | ScaleAndCap(values=buffer)
        ):
            yield buffer
        case Add(left=left, right=right):
            yield left
            yield right
        case FusedProduct(added_to=target):
            yield instruction.input
            if target is not None:
                yield target
        case _:
            yield instruction.input


def assigned_slots(
    instructions: Sequence[Instruction], kept: set[Buffer], new_slot: Callable[[int], int]
) -> dict[Buffer, int]:
    """Assigns a buffer slot (memory) to every buffer. `new_slot(columns)` makes a slot and returns its number. A slot
    is used again for a buffer of the same width after the last read of its content."""
    last_read = {
        buffer: index for index, instruction in enumerate(instructions) for buffer in read_by(instruction)
    }
    slots: dict[Buffer, int] = {}
    free: dict[int, list[int]] = defaultdict(list)
    for index, instruction in enumerate(instructions):
        output = getattr(instruction, "output", None)
        if output is not None and output not in slots:
            unused = free[output.columns]
            slots[output] = unused.pop() if unused else new_slot(output.columns)
        for buffer in set(read_by(instruction)):
            if last_read[buffer] == index and buffer not in kept:
                free[buffer.columns].append(slots[buffer])
    return slots
