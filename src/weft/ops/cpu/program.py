"""From a recorded forward pass to a native program: what can be done in one go is, and buffers are used again.

norm or gate, then product        the rows are normalised on their way into the product
product, then add                 the product is added where it is made
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft import _kernels
from weft.ops.base import StepIndices
from weft.ops.cpu.recorder import (
    Add,
    Attention,
    Buffer,
    CpuOps,
    Embed,
    Gate,
    Mixture,
    Norm,
    Operation,
    Product,
    Recording,
    RopeAndWrite,
    ScaleAndCap,
    SelectRows,
)
from weft.ops.cpu.weights import Keep, Part

_BEFORE = {"nothing": 0, "rms_norm": 1, "silu_mul": 2, "gelu_tanh_mul": 3}


@dataclass(frozen=True, eq=False)
class _FusedProduct:
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


_Step = Operation | _FusedProduct


def assemble(
    recording: Recording, rows: Buffer, logits: Buffer, logits_from: int, pool: _kernels.Pool
) -> _kernels.Program:
    """The program of a recording, in which `rows` are what the operations from `logits_from` on make `logits` of."""
    shape = recording.shape
    ropes = list(dict.fromkeys(pattern.rope for pattern in recording.patterns))
    program = _kernels.Program(
        pool,
        (shape.heads, shape.kv_heads, shape.head_size, shape.scale, shape.score_cap or 0.0),
        [(rope.frequencies, rope.interleaved, rope.scale) for rope in ropes],
        [(ropes.index(pattern.rope), pattern.window or 0) for pattern in recording.patterns],
    )
    # Logits may be made of other rows than these: nothing of one part is taken into the other.
    steps = _fused(recording.operations[:logits_from], {rows})
    first_of_logits = len(steps)
    steps += _fused(recording.operations[logits_from:], {logits})
    slots = _slots(steps, {rows, logits}, program)
    for index, step in enumerate(steps):
        if index == first_of_logits:
            program.begin_logits(slots[rows])
        _append(program, step, slots)
    program.end_logits(slots[logits])
    return program


def _fused(operations: Sequence[Operation], kept: set[Buffer]) -> list[_Step]:
    readers: dict[Buffer, list[Operation]] = defaultdict(list)
    for operation in operations:
        for buffer in _read(operation):
            readers[buffer].append(operation)

    def has_one_reader(buffer: Buffer) -> bool:
        return len(readers[buffer]) == 1 and buffer not in kept

    makers: dict[Buffer, Operation] = {}
    steps: list[_Step] = []
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
            steps.append(_FusedProduct(operation, before))
        elif (
            isinstance(operation, Add)
            and isinstance(last := steps[-1], _FusedProduct)
            and last.output is operation.right
            and has_one_reader(operation.right)
        ):
            steps[-1] = replace(last, added_to=operation.left, scale=operation.scale)
        else:
            steps.append(operation)
    return steps


def _read(step: _Step) -> Iterator[Buffer]:
    """What a step reads; what it changes in place counts too."""
    match step:
        case Embed():
            pass
        case RopeAndWrite(rows=buffer) | Attention(queries=buffer) | ScaleAndCap(values=buffer):
            yield buffer
        case Add(left=left, right=right):
            yield left
            yield right
        case _FusedProduct(added_to=target):
            yield step.input
            if target is not None:
                yield target
        case _:
            yield step.input


def _slots(steps: Sequence[_Step], kept: set[Buffer], program: _kernels.Program) -> dict[Buffer, int]:
    """A slot of the program for every buffer; one is used again, by a buffer of the same width, when its content is no
    longer read."""
    last_read = {buffer: index for index, step in enumerate(steps) for buffer in _read(step)}
    slots: dict[Buffer, int] = {}
    free: dict[int, list[int]] = defaultdict(list)
    for index, step in enumerate(steps):
        output = getattr(step, "output", None)
        if output is not None and output not in slots:
            unused = free[output.columns]
            slots[output] = unused.pop() if unused else program.buffer(output.columns)
        for buffer in set(_read(step)):
            if last_read[buffer] == index and buffer not in kept:
                free[buffer.columns].append(slots[buffer])
    return slots


def _append(program: _kernels.Program, step: _Step, slots: dict[Buffer, int]) -> None:
    match step:
        case Embed():
            [part] = step.table.parts
            program.embed(_weight(part), slots[step.output], step.scale)
        case Norm():
            program.norm(slots[step.input], step.weight, step.epsilon, slots[step.output])
        case _FusedProduct():
            _append_product(program, step, slots)
        case RopeAndWrite(norm=norm):
            program.rope_and_write(
                slots[step.rows],
                step.layer,
                step.pattern,
                None if norm is None else norm.query,
                None if norm is None else norm.key,
                0.0 if norm is None else norm.epsilon,
            )
        case Attention():
            program.attention(slots[step.queries], step.layer, step.pattern, slots[step.output])
        case Mixture(experts=experts):
            [router] = step.router.parts
            program.mixture(
                slots[step.input],
                _weight(router),
                [_weight(part) for part in experts.gate],
                [_weight(part) for part in experts.up],
                [_weight(part) for part in experts.down],
                step.per_token,
                step.normalise,
                slots[step.output],
            )
        case Add():
            program.add(slots[step.left], slots[step.right], step.scale)
        case SelectRows():
            program.select_rows(slots[step.input], slots[step.output])
        case ScaleAndCap():
            program.scale_and_cap(slots[step.values], step.scale, step.cap or 0.0)
        case _:
            raise AssertionError(f"{type(step).__name__} is always part of a product")


def _append_product(program: _kernels.Program, step: _FusedProduct, slots: dict[Buffer, int]) -> None:
    before = step.before
    kind = "nothing" if before is None else "rms_norm" if isinstance(before, Norm) else before.kind
    column = 0
    ready: bool | None = None
    for part in step.product.layer.parts:
        program.linear(
            slots[step.input],
            _BEFORE[kind],
            before.weight if isinstance(before, Norm) else None,
            before.epsilon if isinstance(before, Norm) else 0.0,
            _weight(part),
            slots[step.output],
            column,
            again=ready == part.is_quantised,
            add=step.added_to is not None,
            scale=step.scale,
        )
        column += part.outputs
        ready = part.is_quantised


def _weight(part: Part) -> _kernels.LinearWeight:
    assert part.weight is not None, "weights are packed before a program is made of them"
    return part.weight


def record(
    forward: Callable[[], Buffer],
    logits: Callable[[Buffer], Buffer],
    ops: CpuOps,
    keep: Keep,
    pool: _kernels.Pool,
) -> NativeForward:
    """The program of a decoder whose `forward` and `logits` these are, its weights packed."""
    rows = forward()
    recording = ops.recording
    assert recording is not None, "the forward pass was not recorded by these ops"
    logits_from = len(recording.operations)
    last = logits(rows)
    ops.packing.pack(keep)
    return NativeForward(assemble(recording, rows, last, logits_from, pool))


class NativeForward:
    """Runs a program; the shape of the cache is that of `CpuOps.new_cache`."""

    def __init__(self, program: _kernels.Program) -> None:
        self._program = program

    def step(self, step: StepIndices, cache: np.ndarray, sampled: int) -> tuple[np.ndarray, np.ndarray]:
        """The logits of the first `sampled` of the rows after which they are wanted, and the other rows. The logits
        are there until the next call."""
        logits, rows = self._program.run(
            step.token_ids,
            step.positions,
            step.cells,
            step.query_starts,
            step.context_lengths,
            step.block_tables,
            step.logit_indices,
            cache.view(np.uint16),
            sampled,
        )
        return logits, rows.copy()

    def logits(self, rows: np.ndarray) -> np.ndarray:
        return self._program.logits(np.ascontiguousarray(rows))
