"""The forward pass of one model as a list of launches over buffers that are allocated once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from weft.ops.base import TwoTierCache
from weft.ops.recording import (
    NO_STEP,
    Add,
    Buffer,
    Embed,
    Mixture,
    Recording,
    ScaleAndCap,
    SelectRows,
)
from weft.ops.triton import rows
from weft.ops.triton.attention import Attention
from weft.ops.triton.device import Device
from weft.ops.triton.device_batch import DeviceBatch
from weft.ops.triton.fusion import (
    FusedAttention,
    FusedLinear,
    FusedNorm,
    FusedOperation,
    assigned_slots,
    buffers_made,
    fuse,
    graph_segments,
)
from weft.ops.triton.linear import Places, Product, padded_rows
from weft.ops.triton.mixture import MixtureProduct, MixtureSpace
from weft.ops.triton.ops import TritonOps
from weft.ops.triton.piecewise_graphs import PiecewiseGraphs
from weft.ops.triton.rope import RopeTables


@dataclass
class _Run:
    """A running step. `buffers` are the buffers of the program, cut to the rows of the step. `padded` are the same
    buffers, cut to padded numbers of rows: matrix products use those."""

    batch: DeviceBatch
    cache: Tensor | TwoTierCache
    buffers: list[Tensor]
    padded: list[Tensor]
    padded_tokens: int = 0
    from_graphs: bool = False
    """True: segments between attentions run from graphs, with padded rows."""


Launch = Callable[[_Run], None]


class CudaProgram:
    """Runs the steps of a recorded decoder. The launches of a step depend only on the sizes of its batch, and nothing
    waits for the GPU. So steps of one batch size can be captured as a graph.

    No launch refers to the program: a reference cycle would keep its weights and buffers until the garbage collector
    runs.
    """

    def __init__(
        self,
        recording: Recording,
        rows: Buffer,
        logits: Buffer,
        logits_from: int,
        *,
        max_tokens: int,
        max_sampled: int,
        max_context: int,
        device: Device,
        invariant: bool = False,
    ) -> None:
        """Operations from `logits_from` on compute `logits` from `rows`. A step has at most `max_tokens` tokens, and at
        most `max_sampled` requests and sampled tokens."""
        self._device = device
        self._invariant = invariant
        self._max_tokens = max_tokens
        self._shape = recording.shape
        self._patterns = recording.patterns
        self._ropes = {
            pattern.rope: RopeTables(pattern.rope, max_context, device) for pattern in recording.patterns
        }
        self._attentions = {
            window: Attention(recording.shape, window, max_sampled, max_context, device, invariant)
            for window in {pattern.window for pattern in recording.patterns}
        }
        self._mixture_spaces: dict[tuple[int, ...], MixtureSpace] = {}

        # Logits may be computed from other rows too, so operations are not fused across the two parts.
        first_part = fuse(recording.operations[:logits_from], {rows})
        second_part = fuse(recording.operations[logits_from:], {logits})
        operations = [*first_part, *second_part]
        for operation in operations:
            if isinstance(operation, FusedLinear) and operation.gate is not None:
                operation.layer.interleave_gate()
        slots = assigned_slots(operations, {rows, logits})

        # A buffer is a view of the first rows of a slot: as many as the step has tokens, selected rows or sampled rows.
        # Buffers with the same slot and row count share a view. Only the output of a selection has a view of its own:
        # if all rows are selected, the view of the input replaces it.
        self._cuts: dict[tuple[int, str, Buffer | None], int] = {}
        selection = next(at for at, operation in enumerate(first_part) if isinstance(operation, SelectRows))
        kinds = {
            buffer: "tokens" for operation in first_part[:selection] for buffer in buffers_made(operation)
        }
        for operation in first_part[selection:]:
            kinds |= {buffer: "selected" for buffer in buffers_made(operation) if buffer not in kinds}
        kinds |= {buffer: "sampled" for operation in second_part for buffer in buffers_made(operation)}
        alone = {
            operation.output: operation.output
            for operation in operations
            if isinstance(operation, SelectRows)
        }
        self._places = {
            buffer: self._cuts.setdefault((slot, kinds[buffer], alone.get(buffer)), len(self._cuts))
            for buffer, slot in slots.places.items()
        }
        self._sampled_rows = self._cuts.setdefault((slots.places[rows], "sampled", None), len(self._cuts))
        self._selected_rows = self._places[rows]
        self._logits = self._places[logits]
        height = {"tokens": max_tokens, "selected": max_tokens, "sampled": max_sampled}
        heights = [0] * len(slots.columns)
        for slot, kind, _ in self._cuts:
            heights[slot] = max(heights[slot], height[kind])
        embedding = next(operation for operation in operations if isinstance(operation, Embed))
        dtype = embedding.table.weight.dtype
        self._slots = [
            device.zeros(padded_rows(height), columns, dtype=dtype)
            for height, columns in zip(heights, slots.columns, strict=True)
        ]
        self._piecewise_graphs = PiecewiseGraphs(device)
        self._forward = [
            self._launch_segment(number, operations)
            for number, operations in enumerate(graph_segments(first_part[:selection]))
        ]
        self._finish = [self._launch(operation) for operation in first_part[selection:]]
        # The second part reads only the sampled rows of the first.
        self._places[rows] = self._sampled_rows
        self._make_logits = [self._launch(operation) for operation in second_part]

    def run(self, batch: DeviceBatch, cache: Tensor | TwoTierCache) -> tuple[Tensor, Tensor | None]:
        """Launches one step. Returns the logits of the sampled tokens, and a copy of the hidden rows of the other
        selected tokens (None if there are none). The next call overwrites the logits."""
        selected = len(batch.logit_indices)
        counts = (batch.tokens, selected, batch.sampled)
        padded = tuple(map(padded_rows, counts))
        run = _Run(batch, cache, self._cut(*counts), self._cut(*padded), padded[0])
        # Piecewise graphs are only for steps with prompts: decode-only steps are captured as a whole.
        run.from_graphs = batch.longest_query > 1 and self._piecewise_graphs.begin_step(run.padded_tokens)
        for launch in self._forward:
            launch(run)
        if selected:
            for launch in self._finish:
                launch(run)
        if batch.sampled:
            for launch in self._make_logits:
                launch(run)
        others = (
            run.buffers[self._selected_rows][batch.sampled :].clone() if selected > batch.sampled else None
        )
        return run.buffers[self._logits], others

    def logits(self, rows: Tensor) -> Tensor:
        """Logits of at most `max_sampled` rows that belong to no step. The next `logits` or `run` overwrites them."""
        buffers = self._cut(0, 0, len(rows))
        buffers[self._sampled_rows] = rows
        run = _Run(NO_STEP, NO_STEP, buffers, buffers)
        for launch in self._make_logits:
            launch(run)
        return buffers[self._logits]

    def _cut(self, tokens: int, selected: int, sampled: int) -> list[Tensor]:
        """The buffers of the program, cut to these numbers of rows."""
        counts = {"tokens": tokens, "selected": selected, "sampled": sampled}
        return [self._slots[slot][: counts[kind]] for slot, kind, _ in self._cuts]

    def _launch_segment(self, number: int, operations: Sequence[FusedOperation]) -> Launch:
        """Returns a function that launches one group of `graph_segments`. If the step uses graphs, a group of several
        operations runs from its piecewise graph."""
        launches = [self._launch(operation) for operation in operations]
        if len(launches) == 1:
            return launches[0]
        graphs = self._piecewise_graphs

        def launch(run: _Run) -> None:
            if run.from_graphs:
                graphs.run(number, run.padded_tokens, lambda: launch_all(replace(run, buffers=run.padded)))
            else:
                launch_all(run)

        def launch_all(run: _Run) -> None:
            for each in launches:
                each(run)

        return launch

    def _launch(self, operation: FusedOperation) -> Launch:
        device = self._device
        match operation:
            case FusedLinear():
                return self._launch_product(operation)
            case FusedNorm():
                return self._launch_norm(operation)
            case Embed(table, scale, output):
                place = self._places[output]
                return lambda run: rows.look_up(
                    table.weight, run.batch.token_ids, run.buffers[place], device, scale
                )
            case FusedAttention():
                return self._launch_attention(operation)
            case Mixture():
                return self._launch_mixture(operation)
            case Add(left, right, scale):
                to, what = self._places[left], self._places[right]
                return lambda run: rows.add(run.buffers[to], run.buffers[what], scale, device)
            case ScaleAndCap(values, scale, cap):
                place = self._places[values]
                return lambda run: rows.scale_and_cap(run.buffers[place], scale, cap, device)
            case SelectRows(input, output):
                return self._launch_select(self._places[input], self._places[output])

    def _launch_product(self, operation: FusedLinear) -> Launch:
        product = Product(
            operation.layer,
            self._device,
            None if operation.norm is None else (operation.norm.weight, operation.norm.epsilon),
            None if operation.gate is None else operation.gate.kind,
            operation.added,
            operation.scale,
            self._invariant,
        )
        source, target = self._places[operation.input], self._places[operation.output]
        normed = None if operation.norm is None else self._places[operation.norm.output]
        ungated = None if operation.gate is None else self._places[operation.gate.input]

        def places(buffers: list[Tensor]) -> Places:
            return (
                buffers[source],
                buffers[target],
                None if normed is None else buffers[normed],
                None if ungated is None else buffers[ungated],
            )

        return lambda run: product.run(*places(run.buffers), places(run.padded))

    def _launch_norm(self, operation: FusedNorm) -> Launch:
        source, target, device = self._places[operation.input], self._places[operation.output], self._device

        return lambda run: rows.rms_norm(
            run.buffers[source],
            operation.weight,
            operation.epsilon,
            run.buffers[target],
            device,
            operation.added,
            operation.scale,
        )

    def _launch_select(self, source: int, target: int) -> Launch:
        device = self._device

        def launch(run: _Run) -> None:
            batch = run.batch
            if batch.sampled == batch.tokens == len(batch.logit_indices):  # all tokens, in order
                run.buffers[target], run.padded[target] = run.buffers[source], run.padded[source]
            else:
                rows.look_up(run.buffers[source], batch.logit_indices, run.buffers[target], device)

        return launch

    def _launch_attention(self, operation: FusedAttention) -> Launch:
        pattern = self._patterns[operation.pattern]
        attend, tables = self._attentions[pattern.window], self._ropes[pattern.rope]
        source, target = self._places[operation.input], self._places[operation.output]

        def launch(run: _Run) -> None:
            output = run.buffers[target]
            attended = attend.rope_and_attend(
                run.batch, run.buffers[source], run.cache, operation.layer, tables, operation.norm, output
            )
            if attended is not output:
                # The result of cuDNN replaces the buffer for the rest of the step. Piecewise graphs read the old buffer,
                # so they are not used from here on. The result has no padded rows and needs none: cuDNN is used only
                # for prompt lengths that are already a multiple of the padding.
                assert attended.shape == run.padded[target].shape
                run.buffers[target] = run.padded[target] = attended
                run.from_graphs = False

        return launch

    def _launch_mixture(self, operation: Mixture) -> Launch:
        sizes = (*operation.experts.down.shape, operation.per_token)
        if sizes not in self._mixture_spaces:
            self._mixture_spaces[sizes] = MixtureSpace(
                operation.experts, operation.per_token, self._max_tokens, self._device
            )
        space = self._mixture_spaces[sizes]
        mixture = MixtureProduct(
            operation.router, operation.experts, operation.normalise, space, self._device
        )
        source, target = self._places[operation.input], self._places[operation.output]
        return lambda run: mixture.run(run.buffers[source], run.buffers[target])


class Recordable(Protocol):
    """The part of `weft.models.decoder.Decoder` that is used here."""

    @property
    def config(self) -> Any: ...

    def forward(self, step: Any, cache: Any) -> Any: ...

    def logits(self, rows: Any) -> Any: ...


def record(
    decoder: Recordable, ops: TritonOps, *, max_tokens: int, max_sampled: int, invariant: bool = False
) -> CudaProgram:
    """Records the forward pass of a decoder that was built with these ops, and makes its program."""
    selected = decoder.forward(NO_STEP, None)
    recording = ops.recording
    assert recording is not None, "the forward pass was not recorded by these ops"
    logits_from = len(recording.operations)
    return CudaProgram(
        recording,
        selected,
        decoder.logits(selected),
        logits_from,
        max_tokens=max_tokens,
        max_sampled=max_sampled,
        max_context=decoder.config.max_context,
        device=ops.device,
        invariant=invariant,
    )
