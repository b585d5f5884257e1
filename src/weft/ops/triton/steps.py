"""A recorded forward pass as the steps that a device carries out, and the buffers they work in.

The gate is taken into the product in front of it and the norm into the one behind it, an add into the product or the
norm that makes what is added, and attention turns its queries itself.
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
    """gate(norm(input) @ layer), stored in `output`, or added to it times `scale`."""

    input: Buffer
    layer: Any
    output: Buffer
    norm: Norm | None = None
    gate: Gate | None = None
    added: bool = False
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class NormStep:
    """The norm of the rows, stored in `output`, or added to it times `scale`."""

    input: Buffer
    weight: Any
    epsilon: float
    output: Buffer
    added: bool = False
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class AttentionStep:
    """Of packed [Q | K | V] rows: queries and keys turned, keys and values written, and attention over all of it."""

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
                assert isinstance(previous, RopeAndWrite), "queries are turned before they are used"
                steps.append(AttentionStep(queries, layer, pattern, previous.norm, output))
            case _:
                steps.append(operation)
        previous = operation
    return steps


def stretches(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """The steps in turn, those together whose launches depend on the number of rows alone."""
    stretch: list[Step] = []
    for step in steps:
        if isinstance(step, ProductStep | Add | NormStep):
            stretch.append(step)
        else:
            if stretch:
                yield stretch
            stretch = []
            yield [step]
    if stretch:
        yield stretch


def buffers_read(step: Step) -> Iterator[Buffer]:
    """What a step changes in place counts too."""
    if isinstance(step, ProductStep | NormStep | AttentionStep):
        yield step.input
        if not isinstance(step, AttentionStep) and step.added:
            yield step.output
    else:
        yield from read_by(step)


def buffers_made(step: Step) -> Iterator[Buffer]:
    """The output, and what is needed on the way to it where norm and gate are kernels of their own."""
    if isinstance(step, ProductStep):
        if step.norm is not None:
            yield step.norm.output
        if step.gate is not None:
            yield step.gate.input
    if (output := getattr(step, "output", None)) is not None:
        yield output


@dataclass(frozen=True)
class Slots:
    """Where buffers lie: those of one width share a place when their times do not meet."""

    places: dict[Buffer, int]
    columns: list[int]


def assigned_slots(steps: Sequence[Step], kept: set[Buffer]) -> Slots:
    last_used: dict[Buffer, int] = {}
    for index, step in enumerate(steps):
        for buffer in (*buffers_read(step), *buffers_made(step)):
            last_used[buffer] = index
    for step in steps:
        if isinstance(step, SelectRows):  # where all rows are selected, they are not copied
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
