"""A forward pass as a list: the ops interface notes every operation and carries out none; what can be done in one go is
put together, and buffers are used again.

norm or gate, then product        the rows are normalised on their way into the product
product, then add                 the product is added where it is made

A decoder is run once with it. What it passes around are `Buffer`s, of which only the width is known: how many rows there
are is a matter of the step. Weights are whatever the ops that load them make of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from weft.ops.base import AttentionPattern, AttentionShape, QkNorm

NO_STEP: Any = None
"""For the forward pass that is recorded: nothing of a step is looked at."""


@dataclass(eq=False)
class Buffer:
    """A row of so many floats for every token of a step, or for every token after which logits are wanted."""

    columns: int


@dataclass(frozen=True, eq=False)
class Embed:
    table: Any
    scale: float
    output: Buffer


@dataclass(frozen=True, eq=False)
class Norm:
    input: Buffer
    weight: Any
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
    layer: Any
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


class RecordingOps:
    """The half of `Ops` that is called in a forward pass. A linear layer has `inputs` and `outputs`."""

    recording: Recording | None = None
    """The forward pass under way."""

    def prepare(
        self, step: Any, cache: Any, shape: AttentionShape, patterns: Sequence[AttentionPattern]
    ) -> Recording:
        self.recording = Recording(shape, patterns)
        return self.recording

    def embedding(self, prepared: Recording, table: Any, scale: float = 1.0) -> Buffer:
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

    def linear(self, inputs: Buffer, weight: Any) -> Buffer:
        output = Buffer(weight.outputs)
        self._note(Product(inputs, weight, output))
        return output

    def rms_norm(self, inputs: Buffer, weight: Any, epsilon: float) -> Buffer:
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

    def mixture(self, inputs: Buffer, router: Any, experts: Any, per_token: int, normalise: bool) -> Buffer:
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


@dataclass(frozen=True, eq=False)
class FusedProduct:
    """A product with what comes before it and, where it is added, the buffer it is added to."""

    product: Product
    before: Norm | Gate | None
    added_to: Buffer | None = None
    scale: float = 1.0

    @property
    def input(self) -> Buffer:
        return self.product.input if self.before is None else self.before.input

    @property
    def output(self) -> Buffer:
        return self.product.output if self.added_to is None else self.added_to


Step = Operation | FusedProduct


def fused(operations: Sequence[Operation], kept: set[Buffer]) -> list[Step]:
    readers: dict[Buffer, list[Operation]] = defaultdict(list)
    for operation in operations:
        for buffer in read_by(operation):
            readers[buffer].append(operation)

    def has_one_reader(buffer: Buffer) -> bool:
        return len(readers[buffer]) == 1 and buffer not in kept

    makers: dict[Buffer, Operation] = {}
    steps: list[Step] = []
    for operation in operations:
        if isinstance(operation, Norm | Gate):
            makers[operation.output] = operation
            taken_in = has_one_reader(operation.output) and isinstance(readers[operation.output][0], Product)
            if not taken_in:
                assert isinstance(operation, Norm), "a gate is always followed by one product"
                steps.append(operation)
        elif isinstance(operation, Product):
            before = makers.get(operation.input)
            if not (isinstance(before, Norm | Gate) and has_one_reader(operation.input)):
                before = None
            steps.append(FusedProduct(operation, before))
        elif (
            isinstance(operation, Add)
            and isinstance(last := steps[-1], FusedProduct)
            and last.output is operation.right
            and has_one_reader(operation.right)
        ):
            steps[-1] = replace(last, added_to=operation.left, scale=operation.scale)
        else:
            steps.append(operation)
    return steps


def read_by(step: Step) -> Iterator[Buffer]:
    """What a step reads; what it changes in place counts too."""
    match step:
        case Embed():
            pass
        case RopeAndWrite(rows=buffer) | Attention(queries=buffer) | ScaleAndCap(values=buffer):
            yield buffer
        case Add(left=left, right=right):
            yield left
            yield right
        case FusedProduct(added_to=target):
            yield step.input
            if target is not None:
                yield target
        case _:
            yield step.input


def assigned_slots(
    steps: Sequence[Step], kept: set[Buffer], new_slot: Callable[[int], int]
) -> dict[Buffer, int]:
    """A slot for every buffer, made by `new_slot` with a number of columns; one is used again, by a buffer of the same width, when its content is no
    longer read."""
    last_read = {buffer: index for index, step in enumerate(steps) for buffer in read_by(step)}
    slots: dict[Buffer, int] = {}
    free: dict[int, list[int]] = defaultdict(list)
    for index, step in enumerate(steps):
        output = getattr(step, "output", None)
        if output is not None and output not in slots:
            unused = free[output.columns]
            slots[output] = unused.pop() if unused else new_slot(output.columns)
        for buffer in set(read_by(step)):
            if last_read[buffer] == index and buffer not in kept:
                free[buffer.columns].append(slots[buffer])
    return slots
