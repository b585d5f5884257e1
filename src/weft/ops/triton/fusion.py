"""Fuses the operations of a recorded forward pass, and assigns memory to their buffers.

A gate is fused into the product before it, and a norm into the product after it. An add is fused into the product or
norm that computes its operand. RoPE is fused into attention.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.ops.base import QkNorm
from weft.ops.recording import (
    Add,
    Attention,
    Buffer,
    Embed,
    Gate,
    MeanRows,
    Mixture,
    Norm,
    Operation,
    Product,
    Rope,
    RopeAndWrite,
    ScaleAndCap,
    SelectRows,
    TextActivation,
    TextAttention,
    read_by,
)


@dataclass(frozen=True, eq=False)
class FusedLinear:
    """gate(norm(input) @ layer), stored in `output`, or multiplied by `scale` and added to it."""

    input: Buffer
    layer: Any
    output: Buffer
    norm: Norm | None = None
    gate: Gate | None = None
    added: bool = False
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class FusedNorm:
    """The norm of the rows, stored in `output`, or multiplied by `scale` and added to it."""

    input: Buffer
    weight: Any
    epsilon: float
    output: Buffer
    added: bool = False
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class FusedAttention:
    """For packed [Q | K | V] rows: applies RoPE to queries and keys, writes keys and values to the cache, then runs
    attention."""

    input: Buffer
    layer: int
    pattern: int
    norm: QkNorm | None
    output: Buffer


FusedOperation = Embed | FusedLinear | FusedNorm | FusedAttention | Mixture | Add | SelectRows | ScaleAndCap


def fuse(operations: Sequence[Operation], kept: set[Buffer]) -> list[FusedOperation]:
    """Fuses the operations of a part of a recording. `kept` buffers are read after this part, so they must be written."""
    readers = Counter(buffer for operation in operations for buffer in read_by(operation))
    norms = {operation.output: operation for operation in operations if isinstance(operation, Norm)}

    def only_for_next(buffer: Buffer) -> bool:
        return readers[buffer] == 1 and buffer not in kept

    fused: list[FusedOperation] = []
    previous: Operation | None = None
    for operation, following in zip(operations, [*operations[1:], None], strict=True):
        last = fused[-1] if fused else None
        match operation:
            case Norm() if (
                isinstance(following, Product)
                and following.input is operation.output
                and only_for_next(operation.output)
            ):
                pass
            case Norm(input, weight, epsilon, output):
                fused.append(FusedNorm(input, weight, epsilon, output))
            case Product(input, layer, output):
                norm = norms.get(input)
                if norm is not None and only_for_next(input):
                    fused.append(FusedLinear(norm.input, layer, output, norm))
                else:
                    fused.append(FusedLinear(input, layer, output))
            case Gate():
                assert isinstance(last, FusedLinear) and last.output is operation.input
                fused[-1] = replace(last, output=operation.output, gate=operation)
            case Add(left, right, scale) if (
                isinstance(last, FusedLinear | FusedNorm)
                and last.output is right
                and only_for_next(right)
                and not (isinstance(last, FusedLinear) and last.gate)
            ):
                fused[-1] = replace(last, output=left, added=True, scale=scale)
            case RopeAndWrite():
                assert isinstance(following, Attention) and following.queries is operation.rows
            case Attention(queries, layer, pattern, output):
                assert isinstance(previous, RopeAndWrite), "RoPE must come before attention"
                fused.append(FusedAttention(queries, layer, pattern, previous.norm, output))
            case Rope() | TextAttention() | TextActivation() | MeanRows():
                raise AssertionError("the operations of text models are executed without fusion")
            case _:
                fused.append(operation)
        previous = operation
    return fused


def graph_segments(operations: Sequence[FusedOperation]) -> Iterator[list[FusedOperation]]:
    """Groups operations into segments for piecewise graphs: consecutive operations whose launches depend only on the
    number of rows. Every other operation is a group of its own."""
    segment: list[FusedOperation] = []
    for operation in operations:
        if isinstance(operation, FusedLinear | Add | FusedNorm):
            segment.append(operation)
        else:
            if segment:
                yield segment
            segment = []
            yield [operation]
    if segment:
        yield segment


def buffers_read(operation: FusedOperation) -> Iterator[Buffer]:
    """The buffers that an operation reads, including those that it changes in place."""
    if isinstance(operation, FusedLinear | FusedNorm | FusedAttention):
        yield operation.input
        if not isinstance(operation, FusedAttention) and operation.added:
            yield operation.output
    else:
        yield from read_by(operation)


def buffers_made(operation: FusedOperation) -> Iterator[Buffer]:
    """The output, and the intermediate buffers that are needed if norm and gate are separate kernels."""
    if isinstance(operation, FusedLinear):
        if operation.norm is not None:
            yield operation.norm.output
        if operation.gate is not None:
            yield operation.gate.input
    if (output := getattr(operation, "output", None)) is not None:
        yield output


@dataclass(frozen=True)
class Slots:
    """The buffer slot (memory) of each buffer. Buffers of one width share a slot unless both are live at the same time."""

    places: dict[Buffer, int]
    """Buffer -> the index of its slot."""
    columns: list[int]
    """columns[i] is the width of slot i."""


def assigned_slots(operations: Sequence[FusedOperation], kept: set[Buffer]) -> Slots:
    """Assigns a slot to each buffer. A slot is free for other buffers after the last operation that uses its buffer.
    Buffers in `kept` keep their slots."""
    last_used: dict[Buffer, int] = {}
    for index, operation in enumerate(operations):
        for buffer in (*buffers_read(operation), *buffers_made(operation)):
            last_used[buffer] = index
    # If all rows are selected, the output is the input itself. So the slot of the input is used as long as the output.
    for operation in operations:
        if isinstance(operation, SelectRows):
            last_used[operation.input] = max(last_used[operation.input], last_used[operation.output])
    slots = Slots({}, [])
    free: dict[int, list[int]] = defaultdict(list)
    for index, operation in enumerate(operations):
        for buffer in buffers_made(operation):
            if buffer not in slots.places:
                if not free[buffer.columns]:
                    slots.columns.append(buffer.columns)
                    free[buffer.columns].append(len(slots.columns) - 1)
                slots.places[buffer] = free[buffer.columns].pop()
        for buffer in [buffer for buffer, last in last_used.items() if last == index and buffer not in kept]:
            free[buffer.columns].append(slots.places[buffer])
    return slots
