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
    Gate,
    Instruction,
    MeanRows,
    Mixture,
    Norm,
    Recording,
    Rope,
    RopeAndWrite,
    ScaleAndCap,
    SelectRows,
    TextActivation,
    TextAttention,
    assigned_slots,
    fused,
)
from weft.ops.texts import Pooling, TextIndices

# Must equal the numbers of `Prologue` in csrc/kernels/kernels.h.
_BEFORE = {
    "nothing": 0,
    "rms_norm": 1,
    "silu_mul": 2,
    "gelu_tanh_mul": 3,
    "layer_norm": 4,
    "gelu": 5,
    "gelu_tanh": 6,
    "gelu_mul": 7,
    "tanh": 8,
}
_INDICES = {"tokens": 0, "positions": 1, "types": 2}


def assemble(
    recording: Recording, rows: Buffer, logits: Buffer, logits_from: int, pool: _kernels.Pool
) -> _kernels.Program:
    """Builds the program of a recording. The operations from index `logits_from` on compute `logits` from `rows`."""
    program = _new_program(recording, pool)
    # The two parts are fused separately, because `NativeForward.logits` runs the second part alone, on other rows.
    instructions = fused(recording.operations[:logits_from], {rows})
    first_of_logits = len(instructions)
    instructions += fused(recording.operations[logits_from:], {logits})
    slots = assigned_slots(instructions, {rows, logits}, program.buffer)
    for index, instruction in enumerate(instructions):
        if index == first_of_logits:
            program.begin_logits(slots[rows])
        _append(program, instruction, slots, recording)
    program.end_logits(slots[logits])
    return program


def assemble_texts(recording: Recording, rows: Buffer, pool: _kernels.Pool) -> _kernels.Program:
    """Builds the program of a text model, which computes `rows`: one for each text."""
    program = _new_program(recording, pool)
    instructions = fused(recording.operations, {rows})
    slots = assigned_slots(instructions, {rows}, program.buffer)
    for instruction in instructions:
        _append(program, instruction, slots, recording)
    program.end_texts(slots[rows])
    return program


def _new_program(recording: Recording, pool: _kernels.Pool) -> _kernels.Program:
    shape = recording.shape
    ropes = list(dict.fromkeys(pattern.rope for pattern in recording.patterns))
    return _kernels.Program(
        pool,
        (shape.heads, shape.kv_heads, shape.head_size, shape.scale, shape.score_cap or 0.0),
        [(rope.frequencies, rope.interleaved, rope.scale) for rope in ropes],
        [(ropes.index(pattern.rope), pattern.window or 0) for pattern in recording.patterns],
    )


def _append(
    program: _kernels.Program, instruction: Instruction, slots: dict[Buffer, int], recording: Recording
) -> None:
    """Appends one recorded instruction to the C++ program."""
    match instruction:
        case Embed():
            [part] = instruction.table.parts
            program.embed(
                _weight(part),
                slots[instruction.output],
                instruction.scale,
                _INDICES[instruction.index],
                instruction.first,
            )
        case Norm() | Gate() | TextActivation():
            program.norm(slots[instruction.input], *_prologue(instruction), slots[instruction.output])
        case FusedProduct():
            _append_product(program, instruction, slots)
        case RopeAndWrite(norm=norm) | Rope(norm=norm):
            program.rope_and_write(
                slots[instruction.rows],
                instruction.layer if isinstance(instruction, RopeAndWrite) else -1,
                instruction.pattern,
                None if norm is None else norm.query,
                None if norm is None else norm.key,
                0.0 if norm is None else norm.epsilon,
            )
        case Attention():
            program.attention(
                slots[instruction.queries], instruction.layer, instruction.pattern, slots[instruction.output]
            )
        case TextAttention(pattern=pattern):
            causal = recording.patterns[pattern].causal
            program.text_attention(slots[instruction.input], pattern, causal, slots[instruction.output])
        case MeanRows():
            program.mean_rows(slots[instruction.input], slots[instruction.output])
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
    """Appends a product: one C++ instruction for each part of its layer. The parts write neighbouring columns."""
    column = 0
    # How the previous part has prepared the input: True: quantised, False: as floats, None: there is no previous part.
    # If this part needs the same form, it reuses the prepared input (`again`).
    prepared_quantised: bool | None = None
    for part in instruction.product.layer.parts:
        program.linear(
            slots[instruction.input],
            *_prologue(instruction.before),
            _weight(part),
            slots[instruction.output],
            column,
            again=prepared_quantised == part.is_quantised,
            add=instruction.added_to is not None,
            scale=instruction.scale,
        )
        column += part.outputs
        prepared_quantised = part.is_quantised


def _prologue(
    before: Norm | Gate | TextActivation | None,
) -> tuple[int, np.ndarray | None, np.ndarray | None, float]:
    """The operation on rows before a product: its kind, and the weight, bias and epsilon of a norm."""
    if not isinstance(before, Norm):
        return _BEFORE["nothing" if before is None else before.kind], None, None, 0.0
    kind = "layer_norm" if before.is_centred else "rms_norm"
    return _BEFORE[kind], before.weight, before.bias, before.epsilon


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
        """Returns the logits of the first `sampled` of `logit_indices`, and the hidden rows of the others. The next
        call overwrites the logits."""
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


def record_texts(
    forward: Callable[[], Buffer], ops: CpuOps, keep: Keep, pool: _kernels.Pool, pooling: Pooling
) -> NativeTexts:
    """Records the `forward` of a text model, packs its weights, and builds its program."""
    rows = forward()
    recording = ops.recording
    assert recording is not None, "the forward pass was not recorded by these ops"
    ops.packing.pack(keep)
    return NativeTexts(assemble_texts(recording, rows, pool), pooling)


class NativeTexts:
    """Runs the program of a text model."""

    def __init__(self, program: _kernels.Program, pooling: Pooling) -> None:
        self.program = program
        self._pooling = pooling

    def forward(self, step: TextIndices) -> np.ndarray:
        """Returns one row for each text. The next call overwrites the rows."""
        selected = step.starts[1:] - 1 if self._pooling == "last" else step.starts[:-1].copy()
        return self.program.run_texts(step.token_ids, step.positions, step.types, step.starts, selected)
