"""Turns a recorded forward pass into the steps that a device runs, and assigns their buffers.

Operations are fused: a gate into the product before it, a norm into the product after it, an add into the product
or norm that computes its operand, and RoPE into attention.
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
    Mixture,
    Norm,
    Operation,
    Product,
    RopeAndWrite,
    ScaleAndCap,
    SelectRows,
    read_by,
)


@dataclass(frozen=True, eq=False)
class ProductStep:
    """gate(norm(input) @ layer), stored in `output`, or multiplied by `scale` and added to it."""

    input: Buffer
    layer: Any
    output: Buffer
    norm: Norm | None = None
    gate: Gate | None = None
    added: bool = False
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class NormStep:
    """The norm of the rows, stored in `output`, or multiplied by `scale` and added to it."""

    input: Buffer
    weight: Any
    epsilon: float
    output: Buffer
    added: bool = False
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class AttentionStep:
    """For packed [Q | K | V] rows: applies RoPE to queries and keys, writes keys and values to the cache, then runs
    attention."""

    input: Buffer
    layer: int
    pattern: int
    norm: QkNorm | None
    output: Buffer


Step = Embed | ProductStep | NormStep | AttentionStep | Mixture | Add | SelectRows | ScaleAndCap


def steps_of(operations: Sequence[Operation], kept: set[Buffer]) -> list[Step]:
    """The steps of a part of a recording; `kept` buffers are read after it."""
    readers = Counter(buffer for operation in operations for buffer in read_by(operation))
    norms = {operation.output: operation for operation in operations if isinstance(operation, Norm)}

    def only_for_next(buffer: Buffer) -> bool:
        return readers[buffer] == 1 and buffer not in kept

    steps: list[Step] = []
    previous: Operation | None = None
    for operation, following in zip(operations, [*operations[1:], None], strict=True):
        last = steps[-1] if steps else None
        match operation:
            case Norm() if (
                isinstance(following, Product)
                and following.input is operation.output
                and only_for_next(operation.output)
            ):
                pass
            case Norm(input, weight, epsilon, output):
                steps.append(NormStep(input, weight, epsilon, output))
            case Product(input, layer, output):
                norm = norms.get(input)
                if norm is not None and only_for_next(input):
                    steps.append(ProductStep(norm.input, layer, output, norm))
                else:
                    steps.append(ProductStep(input, layer, output))
            case Gate():
                assert isinstance(last, ProductStep) and last.output is operation.input
                steps[-1] = replace(last, output=operation.output, gate=operation)
            case Add(left, right, scale) if (
                isinstance(last, ProductStep | NormStep)
                and last.output is right
                and only_for_next(right)
                and not (isinstance(last, ProductStep) and last.gate)
            ):
                steps[-1] = replace(last, output=left, added=True, scale=scale)
            case RopeAndWrite():
                assert isinstance(following, Attention) and following.queries is operation.rows
            case Attention(queries, layer, pattern, output):
                assert isinstance(previous, RopeAndWrite), "RoPE must come before attention"
                steps.append(AttentionStep(queries, layer, pattern, previous.norm, output))
            case _:
                steps.append(operation)
        previous = operation
    return steps


def graph_segments(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Groups steps into piecewise graph segments: consecutive steps with launches that depend only on the number of
    rows. Every other step is a group of its own."""
    segment: list[Step] = []
    for step in steps:
        if isinstance(step, ProductStep | Add | NormStep):
            segment.append(step)
        else:
            if segment:
                yield segment
            segment = []
            yield [step]
    if segment:
        yield segment


def buffers_read(step: Step) -> Iterator[Buffer]:
    """The buffers that a step reads, including those that it changes in place."""
    if isinstance(step, ProductStep | NormStep | AttentionStep):
        yield step.input
        if not isinstance(step, AttentionStep) and step.added:
            yield step.output
    else:
        yield from read_by(step)


def buffers_made(step: Step) -> Iterator[Buffer]:
    """The output, and the intermediate buffers that are needed if norm and gate are separate kernels."""
    if isinstance(step, ProductStep):
        if step.norm is not None:
            yield step.norm.output
        if step.gate is not None:
            yield step.gate.input
    if (output := getattr(step, "output", None)) is not None:
        yield output


@dataclass(frozen=True)
class Slots:
    """The slot of each buffer. Buffers of one width share a slot if they are not live at the same time."""

    places: dict[Buffer, int]
    columns: list[int]


def assigned_slots(steps: Sequence[Step], kept: set[Buffer]) -> Slots:
    last_used: dict[Buffer, int] = {}
    for index, step in enumerate(steps):
        for buffer in (*buffers_read(step), *buffers_made(step)):
            last_used[buffer] = index
    for step in steps:
        if isinstance(step, SelectRows):  # if all rows are selected, they are not copied
            last_used[step.input] = max(last_used[step.input], last_used[step.output])
    slots = Slots({}, [])
    free: dict[int, list[int]] = defaultdict(list)
    for index, step in enumerate(steps):
        for buffer in buffers_made(step):
            if buffer not in slots.places:
                if not free[buffer.columns]:
                    slots.columns.append(buffer.columns)
                    free[buffer.columns].append(len(slots.columns) - 1)
                slots.places[buffer] = free[buffer.columns].pop()
        for buffer in [buffer for buffer, last in last_used.items() if last == index and buffer not in kept]:
            free[buffer.columns].append(slots.places[buffer])
    return slots
