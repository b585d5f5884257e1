"""Swaps of the CUDA backend: copies KV blocks between the GPU and pinned host memory, on a separate stream.

Everything that a swap depends on was launched before it: the steps up to `after_step`, and earlier swaps on the same
stream. So a swap is launched at once, and the GPU keeps the order. A step waits on the GPU for the swaps whose blocks
it reuses. The host waits only in the result of a step without rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from torch import Tensor

from weft.ops.triton.device import Device, Event
from weft.plan import IterationPlan, SwapTask

_log = logging.getLogger(__name__)

# Swap slots are pinned in regions, each at its first use: pinning all slots at once would delay the start by seconds.
_REGION_BYTES = 256 << 20
# How many outcomes of swaps are kept, because later swaps may depend on them. A new swap depends only on swaps whose
# outcome the scheduler does not know yet, so old outcomes can be dropped.
_MOST_OUTCOMES = 65_536


class _Tier:
    """The KV blocks of one tier and their swap slots in pinned memory. Ids start at `first_block` and `first_slot`."""

    def __init__(
        self, device: Device, cache: Tensor, slots: int, first_block: int = 0, first_slot: int = 0
    ) -> None:
        self._device = device
        self._cache = cache
        self.first_block, self.first_slot = first_block, first_slot
        block_bytes = cache[0].numel() * cache.element_size()
        self._region_slots = max(1, min(slots, _REGION_BYTES // block_bytes))
        self.regions: list[Tensor | None] = [None] * -(-slots // self._region_slots)

    def copy(self, pairs: Iterable[tuple[int, int]], is_out: bool) -> None:
        """Launches the copies of (block, slot) pairs."""
        for block, slot, count in self.runs(pairs):
            region, first = divmod(slot, self._region_slots)
            host = self._region(region)[first : first + count]
            device = self._cache[block : block + count]
            if is_out:
                host.copy_(device, non_blocking=True)
            else:
                device.copy_(host, non_blocking=True)

    def runs(self, pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
        """Joins pairs that are contiguous in the cache and in one region. Yields first block, first slot and count."""
        first = None
        count = 0
        for pair in pairs:
            block, slot = pair[0] - self.first_block, pair[1] - self.first_slot
            if (
                first is not None
                and (block, slot) == (first[0] + count, first[1] + count)
                and slot % self._region_slots
            ):
                count += 1
                continue
            if first is not None:
                yield *first, count
            first, count = (block, slot), 1
        if first is not None:
            yield *first, count

    def _region(self, index: int) -> Tensor:
        region = self.regions[index]
        if region is None:
            region = self._device.pinned(self._region_slots, *self._cache.shape[1:], dtype=self._cache.dtype)
            self.regions[index] = region
        return region


class GpuSwap:
    """Swap slots in pinned memory, and the swaps in flight. The ids of store blocks come after the ids of full blocks,
    and likewise the ids of their swap slots."""

    def __init__(
        self, device: Device, cache: Tensor, slots: int, store: Tensor | None = None, store_slots: int = 0
    ) -> None:
        self._device = device
        self._stream = device.stream()
        self.full = _Tier(device, cache, slots)
        self.store = None if store is None else _Tier(device, store, store_slots, len(cache), slots)
        self._in_flight: dict[int, Event] = {}
        self._outcomes: dict[int, str | None] = {}  # swap id -> error; None: success
        self._unreported: list[int] = []
        self._has_warned = False

    def launch(self, plan: IterationPlan, last_step: Event | None) -> None:
        """Launches the swaps of a plan. They run after `last_step`."""
        if not plan.swap_out and not plan.swap_in:
            return
        # A swap-in waits for the last step too: that step may still use the target blocks for another sequence.
        if last_step is not None:
            self._stream.wait_event(last_step)
        with self._device.using(self._stream):
            for task in plan.swap_out:
                self._launch(task, is_out=True)
            for task in plan.swap_in:
                self._launch(task, is_out=False)

    def block_stream(self, stream: object, swap_ids: Iterable[int]) -> None:
        """Makes all later launches on `stream` wait for these swaps."""
        for swap_id in swap_ids:
            if (event := self._in_flight.get(swap_id)) is not None:
                event.wait(stream)

    def take_reports(self, must_wait: bool = False) -> tuple[tuple[int, ...], dict[int, str]]:
        """Swaps that finished, and swaps that failed, since the last call. Each is reported once.

        With `must_wait`, waits until at least one swap ends, if any is in flight."""
        if must_wait and self._in_flight and not self._unreported:
            next(iter(self._in_flight.values())).synchronize()
        for swap_id in [swap_id for swap_id, event in self._in_flight.items() if event.query()]:
            del self._in_flight[swap_id]
            self._unreported.append(swap_id)
        if not self._unreported:
            return (), {}
        ended, self._unreported = self._unreported, []
        failed = {swap_id: error for swap_id in ended if (error := self._outcomes[swap_id]) is not None}
        while len(self._outcomes) > _MOST_OUTCOMES:
            del self._outcomes[next(iter(self._outcomes))]
        return tuple(swap_id for swap_id in ended if swap_id not in failed), failed

    def abandon(self) -> None:
        """Drops all swaps without a report after a GPU error, and waits until no copy runs."""
        self._in_flight.clear()
        self._unreported.clear()
        self._stream.synchronize()

    def _launch(self, task: SwapTask, is_out: bool) -> None:
        error = self._copy(task, is_out)
        self._outcomes[task.swap_id] = error
        # A failed swap gets an event too: some of its copies may be launched, and it ends after them.
        event = self._device.event()
        event.record(self._stream)
        self._in_flight[task.swap_id] = event

    def _copy(self, task: SwapTask, is_out: bool) -> str | None:
        for earlier in task.after_swaps:
            if self._outcomes.get(earlier, "never accepted") is not None:
                return f"swap {earlier}, which it depends on, failed or was never accepted"
        pairs = list(zip(task.blocks, task.swap_slots, strict=True))
        try:
            if self.store is None:
                self.full.copy(pairs, is_out)
            else:
                stored = [pair for pair in pairs if pair[0] >= self.store.first_block]
                if stored != [pair for pair in pairs if pair[1] >= self.store.first_slot]:
                    return "a block and its slot are of different tiers"
                self.full.copy([pair for pair in pairs if pair[0] < self.store.first_block], is_out)
                self.store.copy(stored, is_out)
        except Exception as error:  # probably no memory to pin; the sequence is recomputed instead
            if not self._has_warned:
                _log.warning(
                    "a swap failed, and its request is recomputed (%s); swap_blocks may be too large",
                    error,
                )
                self._has_warned = True
            return f"{type(error).__name__}: {error}"
        return None
