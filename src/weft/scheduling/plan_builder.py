"""Builds the plan of one step, and freezes it."""

from __future__ import annotations

from weft.plan import IterationPlan, RowStart, SwapTask
from weft.request import RequestId, RequestState
from weft.scheduling.budget import TokenBudget
from weft.scheduling.cache.allocation import Move
from weft.scheduling.cache.block_pool import BlockCounts, BlockHash
from weft.scheduling.cache.manager import KvCacheManager
from weft.scheduling.preemption import PreemptionCause
from weft.scheduling.sequence import Sequence


class PlanBuilder:
    """Exists while one step is planned. A decode is removed again if it is preempted; prefills are final once added."""

    __slots__ = (
        "budget",
        "decodes",
        "draft_tokens",
        "moving",
        "preempted",
        "preemption_causes",
        "prefills",
        "registered",
        "reserved",
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
        """(sequence, start, count, whether it samples)."""
        self.draft_tokens: dict[Sequence, tuple[int, ...]] = {}
        """The draft tokens of each decode that has some."""
        self.tables = tables
        """New block-table entries: (sequence, index, block)."""
        self.moving: list[Sequence] = []
        """Sequences with blocks that move to the store in this step."""
        self.registered: list[tuple[int, BlockHash]] = []
        """Blocks that this step fills and that prefix lookups can find from now on."""
        self.reserved: BlockCounts | None = None
        """Blocks that idle work leaves for interactive sequences. Set while idle work is added beside them."""
        self.swap_out: list[SwapTask] = []
        self.swap_in: list[SwapTask] = []
        self.preempted: list[RequestId] = []
        self.preemption_causes: list[PreemptionCause] = []
        """The cause of each preemption in `preempted`."""

    @property
    def is_empty(self) -> bool:
        """Whether the backend has nothing to do."""
        return not (self.decodes or self.prefills or self.swap_out or self.swap_in)

    def note_tables(self, sequence: Sequence, first: int) -> None:
        """Records the table entries from index `first` on as new, if the backend has the row already."""
        if sequence.row_sent:
            assert sequence.allocation is not None
            blocks = sequence.allocation.blocks
            self.tables += [(sequence, index, blocks[index]) for index in range(first, len(blocks))]

    def drop(self, sequence: Sequence) -> None:
        """Removes a decode that is preempted, or that skips this step."""
        if sequence in self.decodes:
            self.decodes.remove(sequence)
            self.budget.give_back_decode()
        if sequence in self.moving:
            self.moving.remove(sequence)

    def freeze(self, kv_cache: KvCacheManager) -> tuple[IterationPlan, list[Sequence]]:
        """Returns the plan and the sequences of its entries. Updates these sequences as if the step had succeeded."""
        step, decodes, prefills, drafts = self.step, self.decodes, self.prefills, self.draft_tokens
        if drafts:
            decodes = [s for s in decodes if s not in drafts]
        sequences = [*decodes, *drafts, *[entry[0] for entry in prefills]] if prefills or drafts else decodes
        row_starts = [_row_start(s) for s in sequences if not s.row_sent]
        # The moves are made after the row starts, which list the blocks as they were before the moves.
        moves = self._move(kv_cache) if self.moving else ()
        tables = self._sent_tables() if self.tables else ()
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
            sequence.row_sent = True
        for sequence, proposed in drafts.items():
            start, count = sequence.scheduled, 1 + len(proposed)
            starts.append(start)
            counts.append(count)
            samples.append(True)
            sequence.scheduled = start + count
            sequence.target = start + count + 1
            sequence.last_step = step
            sequence.row_sent = True
        for sequence, start, count, sampling in prefills:
            starts.append(start)
            counts.append(count)
            samples.append(sampling)
            sequence.row_sent = True
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
            # `if tables` and `if moves` save time: usually both are empty, and this code runs for every step.
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
            freed=kv_cache.take_freed(),
        )
        return plan, sequences

    def _sent_tables(self) -> list[tuple[int, int, int]]:
        """(row, index, block) of each new block table entry of a running sequence. A new row sends its whole table
        instead."""
        return [
            (s.allocation.row, index, block)
            for s, index, block in self.tables
            if s.row_sent
            and s.state is RequestState.RUNNING
            and s.allocation is not None
            and s.allocation.row is not None
        ]

    def _move(self, kv_cache: KvCacheManager) -> list[tuple[int, Move]]:
        """(row, move) for each move of this step. Made when the plan is final, so that two sequences that move the same
        content share one store block."""
        moves: list[tuple[int, Move]] = []
        for sequence in self.moving:
            allocation = sequence.allocation
            assert allocation is not None and allocation.row is not None
            made, registered = kv_cache.move(allocation, sequence.block_hashes, self.step)
            if sequence.is_idle_work:
                kv_cache.store.note_idle_content(block for block, _ in registered)
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
