"""Invariants of a two-tier cache in every plan: which tier each position reads, and what moves.

Computes the border between the tiers on its own, not with `weft.tiers`."""

from __future__ import annotations

from collections import defaultdict

from weft.plan import BackendInfo, IterationPlan
from weft.scheduling.scheduler import ContinuousBatchScheduler
from weft.simulation.require import require


def check_tiers(plan: IterationPlan, scheduler: ContinuousBatchScheduler) -> None:
    """Checks a plan when it is submitted."""
    info = scheduler.info
    moves: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    columns = (plan.moved_rows, plan.moved_indices, plan.moved_from, plan.moved_to)
    for row, index, origin, block in zip(*columns, strict=True):
        moves[row].append((index, origin, block))
    copied = [block for origin, block in zip(plan.moved_from, plan.moved_to, strict=True) if origin != -1]
    require(len(set(copied)) == len(copied), "two blocks move into one store block")
    require(set(moves) <= set(plan.rows), "a row that is not in the step moves blocks")
    require(all(block < info.num_blocks for block in plan.table_blocks), "a new table entry is a store block")
    for request_id, row, start, count in zip(
        plan.request_ids, plan.rows, plan.starts, plan.counts, strict=True
    ):
        allocation = scheduler.sequences[request_id].allocation
        assert allocation is not None
        blocks, leaving, end = allocation.blocks, allocation.leaving, start + count
        border = _read_from_store(end - 1, info)
        in_store = [block >= info.num_blocks for block in blocks]
        require(
            in_store == [index < border for index in range(len(blocks))],
            f"request {request_id} has {sum(in_store)} store blocks; before position {end} it must have {border}",
        )
        held = [leaving.get(index, block) for index, block in enumerate(blocks)]
        read_in_full = held[_read_from_store(start, info) : -(-end // info.block_size)]
        require(
            all(0 <= block < info.num_blocks for block in read_in_full),
            f"request {request_id} lacks full blocks that position {start} reads",
        )
        for index, origin, block in moves[row]:
            require(block == blocks[index], "a move ends at a block that is not in the table")
            require(origin in (-1, leaving.get(index)), "a move starts at a block that is not held for it")
    for row_start in plan.row_starts:
        moved = {index for index, _, _ in moves[row_start.row]}
        in_store_at_start = [block >= info.num_blocks for block in row_start.blocks]
        num_from_store = _read_from_store(plan.starts[plan.rows.index(row_start.row)], info)
        require(
            all(
                index in moved or is_stored
                for index, is_stored in enumerate(in_store_at_start[:num_from_store])
            ),
            "a row start has a full block that the row reads from the store",
        )
        require(
            not any(in_store_at_start[index] for index in moved),
            "a block moves that the row start has in the store already",
        )


def _read_from_store(position: int, info: BackendInfo) -> int:
    """The number of leading blocks that end at least a tail before the query at `position`."""
    return max(0, (position + 1 - info.tail_blocks * info.block_size) // info.block_size)
