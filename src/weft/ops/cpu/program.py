"""From a recorded forward pass to a native program."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weft import _kernels
from weft.ops.base import StepIndices, TwoTierCache
from weft.ops.cpu.recording_ops import CpuOps
from weft.ops.cpu.weights import Keep, Part
from weft.ops.recording import (
    Add,
    Attention,
    Buffer,
    Embed,
    FusedProduct,
    Mixture,
    Norm,
    Recording,
    RopeAndWrite,
    ScaleAndCap,
    SelectRows,
    Step,
    assigned_slots,
    fused,
)

_BEFORE = {"nothing": 0, "rms_norm": 1, "silu_mul": 2, "gelu_tanh_mul": 3}


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
    steps = fused(recording.operations[:logits_from], {rows})
    first_of_logits = len(steps)
    steps += fused(recording.operations[logits_from:], {logits})
    slots = assigned_slots(steps, {rows, logits}, program.buffer)
    for index, step in enumerate(steps):
        if index == first_of_logits:
            program.begin_logits(slots[rows])
        _append(program, step, slots)
    program.end_logits(slots[logits])
    return program


def _append(program: _kernels.Program, step: Step, slots: dict[Buffer, int]) -> None:
    match step:
        case Embed():
            [part] = step.table.parts
            program.embed(_weight(part), slots[step.output], step.scale)
        case Norm():
            program.norm(slots[step.input], step.weight, step.epsilon, slots[step.output])
        case FusedProduct():
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


def _append_product(program: _kernels.Program, step: FusedProduct, slots: dict[Buffer, int]) -> None:
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
    """Runs a program; the cache is one of `CpuOps.new_cache`, in two tiers with a store of `CpuOps.new_store`."""

    def __init__(self, program: _kernels.Program) -> None:
        self._program = program

    def step(
        self, step: StepIndices, cache: np.ndarray | TwoTierCache, sampled: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The logits of the first `sampled` of the rows after which they are wanted, and the other rows. The logits
        are there until the next call."""
        two_tier = None
        if isinstance(cache, TwoTierCache):
            assert step.store is not None, "a step over a two-tier cache says what it reads from the store"
            store = step.store
            two_tier = (
                *(cache.store, cache.bits, cache.tail_blocks),
                *(store.tables, store.moved_from, store.moved_to),
            )
        logits, rows = self._program.run(
            step.token_ids,
            step.positions,
            step.cells,
            step.query_starts,
            step.context_lengths,
            step.block_tables,
            step.logit_indices,
            cache.full if isinstance(cache, TwoTierCache) else cache,
            sampled,
            two_tier,
        )
        return logits, rows.copy()

    def logits(self, rows: np.ndarray) -> np.ndarray:
        return self._program.logits(np.ascontiguousarray(rows))
