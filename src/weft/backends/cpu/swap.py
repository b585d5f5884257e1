"""Copies of blocks between the KV cache and swap space: which may run, which failed, which were reported.

Steps and swaps share the backend's thread, so by the time a plan is looked at, every earlier step is over. A swap
runs as soon as the step and the swaps it states are over.
"""

from __future__ import annotations

import numpy as np

from weft.plan import IterationPlan, SwapTask


class SwapSpace:
    """Host memory for blocks that left the cache, and the swaps under way."""

    def __init__(self, cache: np.ndarray, slots: int) -> None:
        self._cache = cache
        self._space = np.zeros((slots, *cache.shape[1:]), cache.dtype)
        self._waiting: list[tuple[SwapTask, bool]] = []
        self._next_unseen = 0  # swap ids count up, so what is below, not waiting and not failed is done
        self._failed: dict[int, str] = {}
        self._finished_now: list[int] = []
        self._failed_now: dict[int, str] = {}

    def accept(self, plan: IterationPlan) -> None:
        """Take over the swaps of a plan."""
        self._waiting += [(task, True) for task in plan.swap_out]
        self._waiting += [(task, False) for task in plan.swap_in]

    def run_ready(self, last_step_over: int) -> None:
        """Run every swap whose step and swaps are over."""
        progress = True
        while progress:
            progress = False
            for entry in list(self._waiting):
                task, is_out = entry
                waiting = {other.swap_id for other, _ in self._waiting}
                if task.after_step <= last_step_over and waiting.isdisjoint(task.after_swaps):
                    self._waiting.remove(entry)
                    self._run(task, is_out)
                    progress = True

    def take_reports(self) -> tuple[tuple[int, ...], dict[int, str]]:
        """Swaps that finished and failed since the last call; each is told once."""
        reports = tuple(self._finished_now), self._failed_now
        self._finished_now, self._failed_now = [], {}
        return reports

    def _run(self, task: SwapTask, is_out: bool) -> None:
        broken = [earlier for earlier in task.after_swaps if earlier in self._failed or earlier >= self._next_unseen]
        self._next_unseen = max(self._next_unseen, task.swap_id + 1)
        if broken:
            self._fail(task.swap_id, f"swap {broken[0]}, which it builds on, failed or was never accepted")
            return
        blocks, slots = list(task.blocks), list(task.swap_slots)
        try:
            if is_out:
                self._space[slots] = self._cache[blocks]
            else:
                self._cache[blocks] = self._space[slots]
        except Exception as error:  # out of memory, most likely: the request is computed again
            self._fail(task.swap_id, f"{type(error).__name__}: {error}")
            return
        self._finished_now.append(task.swap_id)

    def _fail(self, swap_id: int, why: str) -> None:
        self._failed[swap_id] = why
        self._failed_now[swap_id] = why
