"""Chooses which sequences to preempt, and whether by swap or recompute. Pure functions: nothing is changed here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import Enum

from weft.config import PreemptionMode
from weft.plan import BackendInfo
from weft.scheduling.cache.block_pool import BlockCounts
from weft.scheduling.cache.manager import KvCacheManager
from weft.scheduling.sequence import Sequence
from weft.tiers import stored_blocks


class PreemptionCause(Enum):
    """Why a sequence was preempted: see the totals of `SchedulerStats`."""

    MEMORY = "memory"
    PRIORITY = "priority"
    INTERACTIVE = "interactive"


def is_below(sequence: Sequence, other: Sequence) -> bool:
    """Whether `sequence` may be preempted for `other`: it has a lower priority, or the same and arrived later."""
    if sequence.priority != other.priority:
        return sequence.priority < other.priority
    return sequence.order > other.order


def choose_victims(
    candidates: Iterable[Sequence],
    beneficiary: Sequence,
    shortage: BlockCounts,
    kv_cache: KvCacheManager,
    info: BackendInfo,
) -> list[Sequence] | None:
    """The sequences to preempt so that `shortage` blocks become free. None: preempting all candidates is not enough.

    The beneficiary is the sequence that needs the blocks. The lowest priority is preempted first. Within a priority
    below the beneficiary's, the least lost work is first, and no sequence is preempted needlessly. Within the
    beneficiary's own priority, the newest is first. A sequence without blocks in a tier that is short is never a
    victim.
    """
    order = sorted(
        candidates,
        key=lambda s: (
            s.priority,
            -s.order if s.priority == beneficiary.priority else work_lost(s, info),
            -s.order,
        ),
    )
    victims: list[Sequence] = []
    released: Counter[int] = Counter()
    freed = BlockCounts(0)
    for victim in order:
        if _holds_some(victim, shortage - freed):
            victims.append(victim)
            freed += _freed_by(victim, released, kv_cache)
    if not freed.covers(shortage):
        return None
    return _without_unneeded(victims, beneficiary, shortage, kv_cache)


def work_lost(sequence: Sequence, info: BackendInfo) -> float:
    """Seconds that preempting this sequence costs, by swap or recompute, whichever is cheaper."""
    return min(recompute_seconds(sequence, info), swap_seconds(sequence, info))


def recompute_seconds(sequence: Sequence, info: BackendInfo) -> float:
    return sequence.scheduled * info.recompute_seconds_per_token


def swap_seconds(sequence: Sequence, info: BackendInfo) -> float:
    """Seconds to swap the sequence out and in again. Store blocks have fewer bytes to copy."""
    num_blocks: float = -(-sequence.scheduled // info.block_size)
    if info.store_blocks and info.bytes_per_block:
        stored = stored_blocks(sequence.scheduled - 1, info.block_size, info.tail_blocks)
        num_blocks -= stored * (1 - info.bytes_per_store_block / info.bytes_per_block)
    return 2 * num_blocks * info.swap_seconds_per_block


def prefers_swap(
    sequence: Sequence, mode: PreemptionMode, kv_cache: KvCacheManager, info: BackendInfo
) -> bool:
    """Whether to swap this victim out. False means recompute, also if the swap slots do not suffice."""
    can_swap = sequence.allocation is not None and kv_cache.can_swap_out(sequence.allocation)
    return can_swap and is_swap_cheaper(sequence, mode, info)


def is_swap_cheaper(sequence: Sequence, mode: PreemptionMode, info: BackendInfo) -> bool:
    """Whether a swap costs less than a recompute, if there are swap slots."""
    if mode is PreemptionMode.RECOMPUTE or sequence.scheduled == 0:
        return False
    return mode is PreemptionMode.SWAP or swap_seconds(sequence, info) < recompute_seconds(sequence, info)


def _holds_some(sequence: Sequence, shortage: BlockCounts) -> bool:
    """Whether the sequence holds blocks in a tier that is short. Every running sequence holds full blocks."""
    assert sequence.allocation is not None
    return shortage.full > 0 or (shortage.store > 0 and sequence.allocation.stored > 0)


def _freed_by(victim: Sequence, released: Counter[int], kv_cache: KvCacheManager) -> BlockCounts:
    """The blocks that have no reference left after `victim` is preempted. `released`: references dropped so far, by
    block."""
    allocation = victim.allocation
    assert allocation is not None
    held = (*allocation.blocks, *allocation.leaving.values())
    released.update(held)
    freed = [kv_cache.pool_of(block).references(block) == released[block] for block in held]
    return BlockCounts(sum(freed[allocation.stored :]), sum(freed[: allocation.stored]))


def _without_unneeded(
    victims: list[Sequence], beneficiary: Sequence, shortage: BlockCounts, kv_cache: KvCacheManager
) -> list[Sequence]:
    """Removes victims of the last victim's priority that are no longer needed, because later victims free enough."""
    if not victims or victims[-1].priority == beneficiary.priority:
        return victims
    kept = list(victims)
    for victim in reversed(victims[:-1]):
        if victim.priority != victims[-1].priority:
            break
        without = [other for other in kept if other is not victim]
        released: Counter[int] = Counter()
        if sum((_freed_by(other, released, kv_cache) for other in without), BlockCounts(0)).covers(shortage):
            kept = without
    return kept
