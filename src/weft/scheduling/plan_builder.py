"""A plan while it is made: what enters the step, until it is frozen."""

from __future__ import annotations

from weft.plan import IterationPlan, RowStart, SwapTask
from weft.request import RequestId, RequestState
from weft.scheduling.budget import TokenBudget
from weft.scheduling.cache.allocation import Move
from weft.scheduling.cache.block_pool import BlockKey
from weft.scheduling.cache.manager import KvCacheManager
from weft.scheduling.sequence import Sequence


class PlanBuilder:
    """Mutable, short-lived. Decodes may still leave (preemption) until `freeze`; prefills are final once added."""

    __slots__ = (
        "budget",
        "decodes",
        "guesses",
        "moving",
        "preempted",
        "prefills",
        "registered",
        "step",
        "swap_in",
        "swap_out",
        "tables",
    )

    def __init__(self, step: int, budget: TokenBudget, tables: list[tuple[Sequence, int, int]]) -> None:
        self.step = step
        self.budget = budget
        self.decodes: list[Sequence] = []
        self.prefills: list[tuple[Sequence, int, int, bool]] = []
        """Sequence, start, count, samples."""
        self.guesses: dict[Sequence, tuple[int, ...]] = {}
        """Of decodes: what is guessed to follow."""
        self.tables = tables
        """Sequence, index in its block table, block."""
        self.moving: list[Sequence] = []
        """Those that hold store blocks for moves in this step."""
        self.registered: list[tuple[int, BlockKey]] = []
        self.swap_out: list[SwapTask] = []
        self.swap_in: list[SwapTask] = []
        self.preempted: list[RequestId] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing for the backend to do."""
        return not (self.decodes or self.prefills or self.swap_out or self.swap_in)

    def note_tables(self, sequence: Sequence, first: int) -> None:
        """Records that the block table of `sequence` is new from index `first` on."""
        if sequence.row_known:
            assert sequence.allocation is not None
            blocks = sequence.allocation.blocks
            self.tables += [(sequence, index, blocks[index]) for index in range(first, len(blocks))]

    def drop(self, sequence: Sequence) -> None:
        """Takes a sequence out that is preempted while the plan is made."""
        if sequence in self.decodes:
            self.decodes.remove(sequence)
            self.budget.give_back_decode()
        if sequence in self.moving:
            self.moving.remove(sequence)

    def freeze(self, kv_cache: KvCacheManager) -> tuple[IterationPlan, list[Sequence]]:
        """The plan and the sequences of its entries. Advances every sequence in it to after this step."""
        step, decodes, prefills, drafts = self.step, self.decodes, self.prefills, self.guesses
        if drafts:
            decodes = [s for s in decodes if s not in drafts]
        sequences = [*decodes, *drafts, *[entry[0] for entry in prefills]] if prefills or drafts else decodes
        row_starts = [_row_start(s) for s in sequences if not s.row_known]
        moves = self._move(kv_cache) if self.moving else ()  # after the row starts, which do not show them
        tables = self._known_tables() if self.tables else ()
        starts = []
        counts = [1] * len(decodes)
        samples = [True] * len(decodes)
        for sequence in decodes:
            start = sequence.scheduled
            starts.append(start)
            sequence.scheduled = start + 1
            sequence.target = start + 2
            sequence.last_step = step
        for sequence in decodes if row_starts else ():
            sequence.row_known = True
        for sequence, guessed in drafts.items():
            start, count = sequence.scheduled, 1 + len(guessed)
            starts.append(start)
            counts.append(count)
            samples.append(True)
            sequence.scheduled = start + count
            sequence.target = start + count + 1
            sequence.last_step = step
            sequence.row_known = True
        for sequence, start, count, sampling in prefills:
            starts.append(start)
            counts.append(count)
            samples.append(sampling)
            sequence.row_known = True
        plan = IterationPlan(
            step=step,
            num_decodes=len(decodes),
            request_ids=tuple([s.request_id for s in sequences]),
            rows=tuple([s.allocation.row for s in sequences]),  # type: ignore[union-attr, misc]
            starts=tuple(starts),
            counts=tuple(counts),
            samples=tuple(samples),
            drafts=tuple(drafts.values()),
            row_starts=tuple(row_starts),
            # Mostly there are none, and this is made for every step.
            table_rows=tuple([row for row, _, _ in tables]) if tables else (),
            table_indices=tuple([index for _, index, _ in tables]) if tables else (),
            table_blocks=tuple([block for _, _, block in tables]) if tables else (),
            moved_rows=tuple([row for row, _ in moves]) if moves else (),
            moved_indices=tuple([move.entry for _, move in moves]) if moves else (),
            moved_from=tuple([move.origin for _, move in moves]) if moves else (),
            moved_to=tuple([move.block for _, move in moves]) if moves else (),
            swap_out=tuple(self.swap_out),
            swap_in=tuple(self.swap_in),
            after_swaps=kv_cache.take_dependencies(),
            preempted=tuple(self.preempted),
            freed=kv_cache.take_dead(),
        )
        return plan, sequences

    def _known_tables(self) -> list[tuple[int, int, int]]:
        """Row, index and block of each new table entry, of rows that the backend knows and that go on."""
        return [
            (s.allocation.row, index, block)
            for s, index, block in self.tables
            if s.row_known
            and s.state is RequestState.RUNNING
            and s.allocation is not None
            and s.allocation.row is not None
        ]

    def _move(self, kv_cache: KvCacheManager) -> list[tuple[int, Move]]:
        """The moves of this step with their rows. Only now are they final, so that what one of them brings into the store
        is there for the others."""
        moves: list[tuple[int, Move]] = []
        for sequence in self.moving:
            allocation = sequence.allocation
            assert allocation is not None and allocation.row is not None
            made, registered = kv_cache.move(allocation, sequence.keys, self.step)
            self.registered += registered
            moves += [(allocation.row, move) for move in made]
        return moves


def _row_start(sequence: Sequence) -> RowStart:
    allocation = sequence.allocation
    assert allocation is not None and allocation.row is not None
    return RowStart(
        row=allocation.row,
        request_id=sequence.request_id,
        tokens=tuple(sequence.tokens),
        prompt_length=sequence.prompt_length,
        params=sequence.request.params,
        seed=sequence.seed,
        blocks=tuple(allocation.blocks),
    )
