"""Who gives way when memory or rows run out, and how: pure decisions, nothing is changed here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from weft.config import PreemptionMode
from weft.plan import BackendInfo
from weft.scheduling.blocks import BlockPool
from weft.scheduling.kv_cache import KvCacheManager
from weft.scheduling.sequence import Sequence


def is_below(sequence: Sequence, other: Sequence) -> bool:
    """Whether `sequence` gives way to `other`: a lower base priority, or the same and newer."""
    if sequence.priority != other.priority:
        return sequence.priority < other.priority
    return sequence.order > other.order


def choose_victims(
    candidates: Iterable[Sequence], beneficiary: Sequence, shortage: int, pool: BlockPool, info: BackendInfo
) -> list[Sequence] | None:
    """The sequences to preempt so that `shortage` blocks come free, or None where all of them do not suffice.

    Lowest priority first. Among those strictly below the beneficiary the one that loses the least work goes
    first, and none goes in vain; inside the beneficiary's own priority it is the newest.
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
    freed = 0
    for victim in order:
        if freed >= shortage:
            break
        victims.append(victim)
        freed += _freed_by(victim, given_up, pool)
    if freed < shortage:
        return None
    return _without_needless(victims, beneficiary, shortage, pool)


def work_lost(sequence: Sequence, info: BackendInfo) -> float:
    """Seconds that preempting this sequence costs, by the cheaper way."""
    return min(recompute_seconds(sequence, info), swap_seconds(sequence, info))


def recompute_seconds(sequence: Sequence, info: BackendInfo) -> float:
    return sequence.scheduled * info.recompute_seconds_per_token


def swap_seconds(sequence: Sequence, info: BackendInfo) -> float:
    """Out and in again."""
    return 2 * -(-sequence.scheduled // info.block_size) * info.swap_seconds_per_block


def prefers_swap(
    sequence: Sequence, mode: PreemptionMode, kv_cache: KvCacheManager, info: BackendInfo
) -> bool:
    """Whether to swap this victim out. Falls back to recompute where swap space is full."""
    if mode is PreemptionMode.RECOMPUTE or sequence.allocation is None or sequence.scheduled == 0:
        return False
    if not kv_cache.can_swap_out(sequence.allocation):
        return False
    return mode is PreemptionMode.SWAP or swap_seconds(sequence, info) < recompute_seconds(sequence, info)


def _freed_by(victim: Sequence, given_up: Counter[int], pool: BlockPool) -> int:
    """Blocks that nobody refers to any more once `victim` and those before it are gone."""
    assert victim.allocation is not None
    given_up.update(victim.allocation.blocks)
    return sum(pool.references(block) == given_up[block] for block in victim.allocation.blocks)


def _without_needless(
    victims: list[Sequence], beneficiary: Sequence, shortage: int, pool: BlockPool
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
        if sum(_freed_by(other, given_up, pool) for other in without) >= shortage:
            kept = without
    return kept
