"""Swaps of the CPU backend: copies KV blocks between the cache and swap slots, and reports finished and failed swaps.

Steps and swaps run in the same thread, so all earlier steps have ended when a plan runs. A swap runs as soon as the
step and the swaps that it depends on have ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.plan import IterationPlan, SwapTask

# How many outcomes of swaps are kept, because later swaps may depend on them. A new swap depends only on swaps whose
# outcome the scheduler does not know yet, so old outcomes can be dropped.
_MOST_OUTCOMES = 65_536


@dataclass(frozen=True)
class _Tier:
    """The KV blocks of one tier and their swap slots. Ids start at `first_block` and `first_slot`."""

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
    """Swap slots in host memory, and the swaps in flight. The ids of store blocks come after the ids of full blocks, and
    likewise the ids of their swap slots."""

    def __init__(
        self, cache: np.ndarray, slots: int, store: np.ndarray | None = None, store_slots: int = 0
    ) -> None:
        self._full = _Tier(cache, np.zeros((slots, *cache.shape[1:]), cache.dtype))
        self._store: _Tier | None = None
        if store is not None:
            space = np.zeros((store_slots, *store.shape[1:]), store.dtype)
            self._store = _Tier(store, space, len(cache), slots)
        self._waiting: dict[int, tuple[SwapTask, bool]] = {}
        self._outcomes: dict[int, str | None] = {}  # swap id -> error; None: success
        self._unreported: list[int] = []

    @property
    def is_idle(self) -> bool:
        """True if every swap was run and reported. Checked before every step."""
        return not self._waiting and not self._unreported

    def accept(self, plan: IterationPlan) -> None:
        """Queues the swaps of a plan."""
        for task in plan.swap_out:
            self._waiting[task.swap_id] = (task, True)
        for task in plan.swap_in:
            self._waiting[task.swap_id] = (task, False)

    def run_ready(self, last_ended_step: int) -> None:
        """Runs all swaps whose dependencies are met, including those that become ready when another one ends."""
        while ready := [
            swap_id
            for swap_id, (task, _) in self._waiting.items()
            if task.after_step <= last_ended_step and self._waiting.keys().isdisjoint(task.after_swaps)
        ]:
            for swap_id in ready:
                self._run(*self._waiting.pop(swap_id))

    def check_ended(self, swap_ids: tuple[int, ...]) -> None:
        """Raises an error if a step would overwrite blocks that a swap has not yet read."""
        if not self._waiting.keys().isdisjoint(swap_ids):
            raise RuntimeError(
                f"the step depends on swaps {swap_ids}, and some of them wait for a later step"
            )

    def take_reports(self) -> tuple[tuple[int, ...], dict[int, str]]:
        """Swaps that finished, and swaps that failed, since the last call. Each is reported once."""
        if not self._unreported:
            return (), {}
        ended, self._unreported = self._unreported, []
        failed = {swap_id: error for swap_id in ended if (error := self._outcomes[swap_id]) is not None}
        while len(self._outcomes) > _MOST_OUTCOMES:
            del self._outcomes[next(iter(self._outcomes))]
        return tuple(swap_id for swap_id in ended if swap_id not in failed), failed

    def _run(self, task: SwapTask, is_out: bool) -> None:
        self._outcomes[task.swap_id] = self._copy(task, is_out)
        self._unreported.append(task.swap_id)

    def _copy(self, task: SwapTask, is_out: bool) -> str | None:
        for earlier in task.after_swaps:
            if self._outcomes.get(earlier, "never accepted") is not None:
                return f"swap {earlier}, which it depends on, failed or was never accepted"
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
        except Exception as error:  # probably out of memory; the sequence is recomputed instead
            return f"{type(error).__name__}: {error}"
        return None
