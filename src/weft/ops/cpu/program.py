"""Builds a C++ program from a recorded forward pass, and runs it."""

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
    Instruction,
    Mixture,
    Norm,
    Recording,
    RopeAndWrite,
    ScaleAndCap,
    SelectRows,
    assigned_slots,
    fused,
)

_BEFORE = {"nothing": 0, "rms_norm": 1, "silu_mul": 2, "gelu_tanh_mul": 3}


def assemble(
    recording: Recording, rows: Buffer, logits: Buffer, logits_from: int, pool: _kernels.Pool
) -> _kernels.Program:
    """Builds the program of a recording. The operations from index `logits_from` on compute `logits` from `rows`."""
    shape = recording.shape
    ropes = list(dict.fromkeys(pattern.rope for pattern in recording.patterns))
    program = _kernels.Program(
        pool,
        (shape.heads, shape.kv_heads, shape.head_size, shape.scale, shape.score_cap or 0.0),
        [(rope.frequencies, rope.interleaved, rope.scale) for rope in ropes],
        [(ropes.index(pattern.rope), pattern.window or 0) for pattern in recording.patterns],
    )
    # The two parts are fused separately, because `NativeForward.logits` runs the second part alone, on other rows.
    instructions = fused(recording.operations[:logits_from], {rows})
    first_of_logits = len(instructions)
    instructions += fused(recording.operations[logits_from:], {logits})
    slots = assigned_slots(instructions, {rows, logits}, program.buffer)
    for index, instruction in enumerate(instructions):
        if index == first_of_logits:
            program.begin_logits(slots[rows])
        _append(program, instruction, slots)
    program.end_logits(slots[logits])
    return program


def _append(program: _kernels.Program, instruction: Instruction, slots: dict[Buffer, int]) -> None:
    match instruction:
        case Embed():
            [part] = instruction.table.parts
            program.embed(_weight(part), slots[instruction.output], instruction.scale)
        case Norm(weight=weight, epsilon=epsilon):
            program.norm(slots[instruction.input], weight, epsilon, slots[instruction.output])
        case FusedProduct():
            _append_product(program, instruction, slots)
        case RopeAndWrite(norm=norm):
            program.rope_and_write(
                slots[instruction.rows],
                instruction.layer,
                instruction.pattern,
                None if norm is None else norm.query,
                None if norm is None else norm.key,
                0.0 if norm is None else norm.epsilon,
            )
        case Attention():
            program.attention(
                slots[instruction.queries], instruction.layer, instruction.pattern, slots[instruction.output]
            )
        case Mixture(experts=experts):
            [router] = instruction.router.parts
            program.mixture(
                slots[instruction.input],
                _weight(router),
                [_weight(part) for part in experts.gate],
                [_weight(part) for part in experts.up],
                [_weight(part) for part in experts.down],
                instruction.per_token,
                instruction.normalise,
                slots[instruction.output],
            )
        case Add():
            program.add(slots[instruction.left], slots[instruction.right], instruction.scale)
        case SelectRows():
            program.select_rows(slots[instruction.input], slots[instruction.output])
        case ScaleAndCap():
            program.scale_and_cap(slots[instruction.values], instruction.scale, instruction.cap or 0.0)
        case _:
            raise AssertionError(f"{type(instruction).__name__} is always part of a product")


def _append_product(program: _kernels.Program, instruction: FusedProduct, slots: dict[Buffer, int]) -> None:
    before = instruction.before
    kind = "nothing" if before is None else "rms_norm" if isinstance(before, Norm) else before.kind
    column = 0
    # How the previous part has prepared the input: True: quantised, False: as floats, None: there is no previous part.
    # If this part needs the same form, it reuses the prepared input (`again`).
    prepared_quantised: bool | None = None
    for part in instruction.product.layer.parts:
        program.linear(
            slots[instruction.input],
            _BEFORE[kind],
            before.weight if isinstance(before, Norm) else None,
            before.epsilon if isinstance(before, Norm) else 0.0,
            _weight(part),
            slots[instruction.output],
            column,
            again=prepared_quantised == part.is_quantised,
            add=instruction.added_to is not None,
            scale=instruction.scale,
        )
        column += part.outputs
        prepared_quantised = part.is_quantised


def _weight(part: Part) -> _kernels.LinearWeight:
    assert part.weight is not None, "weights are packed before the program is built"
    return part.weight


def record(
    forward: Callable[[], Buffer],
    logits: Callable[[Buffer], Buffer],
    ops: CpuOps,
    keep: Keep,
    pool: _kernels.Pool,
) -> NativeForward:
    """Records the `forward` and `logits` of a decoder, packs its weights, and builds its program."""
    rows = forward()
    recording = ops.recording
    assert recording is not None, "the forward pass was not recorded by these ops"
    logits_from = len(recording.operations)
    last = logits(rows)
    ops.packing.pack(keep)
    return NativeForward(assemble(recording, rows, last, logits_from, pool))


class NativeForward:
    """Runs a program. The cache is from `CpuOps.new_cache`, the store from `CpuOps.new_store`."""

    def __init__(self, program: _kernels.Program) -> None:
        self._program = program

    def step(
        self, step: StepIndices, cache: np.ndarray | TwoTierCache, sampled: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The logits of the first `sampled` of `logit_indices`, and the hidden rows of the others. The next call
        overwrites the logits."""
        two_tier = None
        if isinstance(cache, TwoTierCache):
            assert step.store is not None, "a step over a two-tier cache has StoreIndices"
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
