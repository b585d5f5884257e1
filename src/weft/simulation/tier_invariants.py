"""What must hold of a two-tier cache in every plan: who reads what from where, and what moves. Counts in tokens, by itself."""

from __future__ import annotations

from collections import defaultdict

from weft.plan import BackendInfo, IterationPlan
from weft.scheduling.scheduler import ContinuousBatchScheduler
from weft.simulation.require import require


def check_tiers(plan: IterationPlan, scheduler: ContinuousBatchScheduler) -> None:
    """Looks at a plan in the moment it is submitted."""
    info = scheduler.info
    moves: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    columns = (plan.moved_rows, plan.moved_indices, plan.moved_from, plan.moved_to)
    for row, index, origin, block in zip(*columns, strict=True):
        moves[row].append((index, origin, block))
    copied = [block for origin, block in zip(plan.moved_from, plan.moved_to, strict=True) if origin != -1]
    require(len(set(copied)) == len(copied), "two blocks are moved into one")
    require(set(moves) <= set(plan.rows), "a row moves blocks in a step that it is not in")
    require(
        all(block < info.num_blocks for block in plan.table_blocks), "a store block is told as a full one"
    )
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
            f"request {request_id} has {sum(in_store)} blocks in the store and must have {border} before position {end}",
        )
        held = [leaving.get(index, block) for index, block in enumerate(blocks)]
        read_in_full = held[_read_from_store(start, info) : -(-end // info.block_size)]
        require(
            all(0 <= block < info.num_blocks for block in read_in_full),
            f"request {request_id} does not hold in full what position {start} reads in full",
        )
        for index, origin, block in moves[row]:
            require(block == blocks[index], "a move leads to a block that is not in the table")
            require(origin in (-1, leaving.get(index)), "a move begins at a block that is not held for it")
    for row_start in plan.row_starts:
        moved = {index for index, _, _ in moves[row_start.row]}
        told = [block >= info.num_blocks for block in row_start.blocks]
        must = _read_from_store(plan.starts[plan.rows.index(row_start.row)], info)
        require(
            all(index in moved or is_stored for index, is_stored in enumerate(told[:must])),
            "a row begins with a block in full that it reads from the store",
        )
        require(not any(told[index] for index in moved), "a block moves that a row start has in the store")


def _read_from_store(position: int, info: BackendInfo) -> int:
    """Blocks that end a tail or more before the query at `position` does."""
    return max(0, (position + 1 - info.tail_blocks * info.block_size) // info.block_size)
