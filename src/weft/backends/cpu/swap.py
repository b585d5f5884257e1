"""Copies of blocks between the KV cache and swap space: which may run, which failed, which were reported.

Steps and swaps share the backend's thread, so by the time a plan is looked at, every earlier step is over. A swap
runs as soon as the step and the swaps it states are over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.plan import IterationPlan, SwapTask

# Outcomes kept for swaps that build on them. The scheduler names only swaps whose end it has not heard of.
_MOST_OUTCOMES = 65_536


@dataclass(frozen=True)
class _Tier:
    """Blocks of one kind and as many slots as there are for them, numbered from these on."""

    cache: np.ndarray
    space: np.ndarray
    first_block: int = 0
    first_slot: int = 0

    def copy(self, blocks: np.ndarray, slots: np.ndarray, is_out: bool) -> None:
        blocks, slots = blocks - self.first_block, slots - self.first_slot
        if is_out:
            self.space[slots] = self.cache[blocks]
        else:
            self.cache[blocks] = self.space[slots]


class HostSwap:
    """Host memory for blocks that left the cache, and the swaps under way. The blocks of a store come behind those of the
    cache, and so do their slots."""

    def __init__(
        self, cache: np.ndarray, slots: int, store: np.ndarray | None = None, store_slots: int = 0
    ) -> None:
        self._full = _Tier(cache, np.zeros((slots, *cache.shape[1:]), cache.dtype))
        self._store: _Tier | None = None
        if store is not None:
            space = np.zeros((store_slots, *store.shape[1:]), store.dtype)
            self._store = _Tier(store, space, len(cache), slots)
        self._waiting: dict[int, tuple[SwapTask, bool]] = {}
        self._outcomes: dict[int, str | None] = {}  # None: it went well
        self._unreported: list[int] = []

    @property
    def is_idle(self) -> bool:
        """Whether no swap waits and none has to be reported: mostly, and asked between any two steps."""
        return not self._waiting and not self._unreported

    def accept(self, plan: IterationPlan) -> None:
        """Take over the swaps of a plan."""
        for task in plan.swap_out:
            self._waiting[task.swap_id] = (task, True)
        for task in plan.swap_in:
            self._waiting[task.swap_id] = (task, False)

    def run_ready(self, last_step_over: int) -> None:
        """Run every swap whose step and swaps are over, and those that become ready by that."""
        while ready := [
            swap_id
            for swap_id, (task, _) in self._waiting.items()
            if task.after_step <= last_step_over and self._waiting.keys().isdisjoint(task.after_swaps)
        ]:
            for swap_id in ready:
                self._run(*self._waiting.pop(swap_id))

    def check_over(self, swap_ids: tuple[int, ...]) -> None:
        """Refuses a step that would write to blocks a swap has still to read."""
        if not self._waiting.keys().isdisjoint(swap_ids):
            raise RuntimeError(f"the step waits for swaps {swap_ids}, of which some wait for a step after it")

    def take_reports(self) -> tuple[tuple[int, ...], dict[int, str]]:
        """Swaps that finished and failed since the last call; each is told once."""
        if not self._unreported:
            return (), {}
        over, self._unreported = self._unreported, []
        failed = {swap_id: error for swap_id in over if (error := self._outcomes[swap_id]) is not None}
        while len(self._outcomes) > _MOST_OUTCOMES:
            del self._outcomes[next(iter(self._outcomes))]
        return tuple(swap_id for swap_id in over if swap_id not in failed), failed

    def _run(self, task: SwapTask, is_out: bool) -> None:
        self._outcomes[task.swap_id] = self._copy(task, is_out)
        self._unreported.append(task.swap_id)

    def _copy(self, task: SwapTask, is_out: bool) -> str | None:
        for earlier in task.after_swaps:
            if self._outcomes.get(earlier, "never accepted") is not None:
                return f"swap {earlier}, which it builds on, failed or was never accepted"
        blocks, slots = np.array(task.blocks, np.int64), np.array(task.swap_slots, np.int64)
        try:
            if self._store is None:
                self._full.copy(blocks, slots, is_out)
            else:
                is_stored = blocks >= self._store.first_block
                if not np.array_equal(is_stored, slots >= self._store.first_slot):
                    return "a block and its slot are of different tiers"
                self._full.copy(blocks[~is_stored], slots[~is_stored], is_out)
                self._store.copy(blocks[is_stored], slots[is_stored], is_out)
        except Exception as error:  # out of memory, most likely: the request is computed again
            return f"{type(error).__name__}: {error}"
        return None
