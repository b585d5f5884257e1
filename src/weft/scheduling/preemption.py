"""Who gives way when memory or rows run out, and how: pure decisions, nothing is changed here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from weft.config import PreemptionMode
from weft.plan import BackendInfo
from weft.scheduling.cache.block_pool import Blocks
from weft.scheduling.cache.manager import KvCacheManager
from weft.scheduling.sequence import Sequence
from weft.tiers import stored_blocks


def is_below(sequence: Sequence, other: Sequence) -> bool:
    """Whether `sequence` gives way to `other`: a lower base priority, or the same and newer."""
    if sequence.priority != other.priority:
        return sequence.priority < other.priority
    return sequence.order > other.order


def choose_victims(
    candidates: Iterable[Sequence],
    beneficiary: Sequence,
    shortage: Blocks,
    kv_cache: KvCacheManager,
    info: BackendInfo,
) -> list[Sequence] | None:
    """The sequences to preempt so that `shortage` blocks come free, or None where all of them do not suffice.

    Lowest priority first. Among those strictly below the beneficiary the one that loses the least work goes
    first, and none goes in vain; inside the beneficiary's own priority it is the newest. Who holds nothing of what is
    short stays.
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
    given_up: Counter[int] = Counter()
    freed = Blocks(0)
    for victim in order:
        if _holds_some(victim, shortage - freed):
            victims.append(victim)
            freed += _freed_by(victim, given_up, kv_cache)
    if not freed.covers(shortage):
        return None
    return _without_needless(victims, beneficiary, shortage, kv_cache)


def work_lost(sequence: Sequence, info: BackendInfo) -> float:
    """Seconds that preempting this sequence costs, by the cheaper way."""
    return min(recompute_seconds(sequence, info), swap_seconds(sequence, info))


def recompute_seconds(sequence: Sequence, info: BackendInfo) -> float:
    return sequence.scheduled * info.recompute_seconds_per_token


def swap_seconds(sequence: Sequence, info: BackendInfo) -> float:
    """Out and in again. What is in the store has fewer bytes to copy."""
    num_blocks: float = -(-sequence.scheduled // info.block_size)
    if info.store_blocks and info.bytes_per_block:
        stored = stored_blocks(sequence.scheduled - 1, info.block_size, info.tail_blocks)
        num_blocks -= stored * (1 - info.bytes_per_store_block / info.bytes_per_block)
    return 2 * num_blocks * info.swap_seconds_per_block


def prefers_swap(
    sequence: Sequence, mode: PreemptionMode, kv_cache: KvCacheManager, info: BackendInfo
) -> bool:
    """Whether to swap this victim out. Falls back to recompute where swap space is full."""
    if mode is PreemptionMode.RECOMPUTE or sequence.allocation is None or sequence.scheduled == 0:
        return False
    if not kv_cache.can_swap_out(sequence.allocation):
        return False
    return mode is PreemptionMode.SWAP or swap_seconds(sequence, info) < recompute_seconds(sequence, info)


def _holds_some(sequence: Sequence, shortage: Blocks) -> bool:
    """Whether it has anything in a tier that is short. In the full tier everyone has."""
    assert sequence.allocation is not None
    return shortage.full > 0 or (shortage.store > 0 and sequence.allocation.stored > 0)


def _freed_by(victim: Sequence, given_up: Counter[int], kv_cache: KvCacheManager) -> Blocks:
    """Blocks that nobody refers to any more once `victim` and those before it are gone."""
    allocation = victim.allocation
    assert allocation is not None
    held = (*allocation.blocks, *allocation.leaving.values())
    given_up.update(held)
    freed = [kv_cache.pool_of(block).references(block) == given_up[block] for block in held]
    return Blocks(sum(freed[allocation.stored :]), sum(freed[: allocation.stored]))


def _without_needless(
    victims: list[Sequence], beneficiary: Sequence, shortage: Blocks, kv_cache: KvCacheManager
) -> list[Sequence]:
    """Spares those of the last victim's priority whose blocks turned out not to be needed."""
    if not victims or victims[-1].priority == beneficiary.priority:
        return victims
    kept = list(victims)
    for victim in reversed(victims[:-1]):
        if victim.priority != victims[-1].priority:
            break
        without = [other for other in kept if other is not victim]
        given_up: Counter[int] = Counter()
        if sum((_freed_by(other, given_up, kv_cache) for other in without), Blocks(0)).covers(shortage):
            kept = without
    return kept
