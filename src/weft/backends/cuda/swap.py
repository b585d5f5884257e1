"""Copies of blocks between the card and pinned memory of the host, on a stream of their own.

All that a swap waits for was given to the card before it: the steps up to `after_step`, and the swaps it names, which are
in front of it on the same stream. So a swap is launched at once, and the card sees to the order. A step waits on the card
for the swaps whose blocks it uses again. Nobody waits on the host, but for a step that has nothing else to do.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from torch import Tensor

from weft.ops.triton.device import Device, Event
from weft.plan import IterationPlan, SwapTask

_log = logging.getLogger(__name__)

# Memory is pinned in pieces when it is first used: to pin all of it would take seconds of the start.
_PIECE_BYTES = 256 << 20
# Outcomes kept for swaps that build on them. The scheduler names only swaps whose end it has not heard of.
_MOST_OUTCOMES = 65_536


class _Tier:
    """Blocks of one kind on the card, and pinned memory with slots for them; both are numbered from some number on."""

    def __init__(
        self, device: Device, cache: Tensor, slots: int, first_block: int = 0, first_slot: int = 0
    ) -> None:
        self._device = device
        self._cache = cache
        self.first_block, self.first_slot = first_block, first_slot
        block_bytes = cache[0].numel() * cache.element_size()
        self._piece_slots = max(1, min(slots, _PIECE_BYTES // block_bytes))
        self.pieces: list[Tensor | None] = [None] * -(-slots // self._piece_slots)

    def copy(self, pairs: Iterable[tuple[int, int]], is_out: bool) -> None:
        """Of blocks and their slots."""
        for block, slot, count in self.runs(pairs):
            piece, first = divmod(slot, self._piece_slots)
            host = self._piece(piece)[first : first + count]
            device = self._cache[block : block + count]
            if is_out:
                host.copy_(device, non_blocking=True)
            else:
                device.copy_(host, non_blocking=True)

    def runs(self, pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
        """Block, slot and number of blocks that lie one behind the other in both places, as they are numbered here."""
        first = None
        count = 0
        for pair in pairs:
            block, slot = pair[0] - self.first_block, pair[1] - self.first_slot
            if (
                first is not None
                and (block, slot) == (first[0] + count, first[1] + count)
                and slot % self._piece_slots
            ):
                count += 1
                continue
            if first is not None:
                yield *first, count
            first, count = (block, slot), 1
        if first is not None:
            yield *first, count

    def _piece(self, index: int) -> Tensor:
        piece = self.pieces[index]
        if piece is None:
            piece = self._device.pinned(self._piece_slots, *self._cache.shape[1:], dtype=self._cache.dtype)
            self.pieces[index] = piece
        return piece


class CardSwap:
    """Pinned memory for blocks that left the cache, and the copies under way. The blocks of a store come behind those of
    the cache, and so do their slots."""

    def __init__(
        self, device: Device, cache: Tensor, slots: int, store: Tensor | None = None, store_slots: int = 0
    ) -> None:
        self._device = device
        self._stream = device.stream()
        self.full = _Tier(device, cache, slots)
        self.store = None if store is None else _Tier(device, store, store_slots, len(cache), slots)
        self._under_way: dict[int, Event] = {}
        self._outcomes: dict[int, str | None] = {}  # None: it went well
        self._unreported: list[int] = []
        self._has_warned = False

    def launch(self, plan: IterationPlan, last_step: Event | None) -> None:
        """Launches the swaps of a plan, behind the end of the steps before it."""
        if not plan.swap_out and not plan.swap_in:
            return
        # A swap in, too: its blocks may have been another's until the last step.
        if last_step is not None:
            self._stream.wait_event(last_step)
        with self._device.using(self._stream):
            for task in plan.swap_out:
                self._launch(task, is_out=True)
            for task in plan.swap_in:
                self._launch(task, is_out=False)

    def hold(self, stream: object, swap_ids: Iterable[int]) -> None:
        """What is launched on `stream` from now on waits for these swaps."""
        for swap_id in swap_ids:
            if (event := self._under_way.get(swap_id)) is not None:
                event.wait(stream)

    def take_reports(self, must_wait: bool = False) -> tuple[tuple[int, ...], dict[int, str]]:
        """Swaps that finished and failed since the last call; each is told once. `must_wait`: not before one is over,
        where any is under way."""
        if must_wait and self._under_way and not self._unreported:
            next(iter(self._under_way.values())).synchronize()
        for swap_id in [swap_id for swap_id, event in self._under_way.items() if event.query()]:
            del self._under_way[swap_id]
            self._unreported.append(swap_id)
        if not self._unreported:
            return (), {}
        over, self._unreported = self._unreported, []
        failed = {swap_id: error for swap_id in over if (error := self._outcomes[swap_id]) is not None}
        while len(self._outcomes) > _MOST_OUTCOMES:
            del self._outcomes[next(iter(self._outcomes))]
        return tuple(swap_id for swap_id in over if swap_id not in failed), failed

    def abandon(self) -> None:
        """After an error of the card: nothing is copying any more, and nothing of it will be reported."""
        self._under_way.clear()
        self._unreported.clear()
        self._stream.synchronize()

    def _launch(self, task: SwapTask, is_out: bool) -> None:
        error = self._copy(task, is_out)
        self._outcomes[task.swap_id] = error
        # One that failed may have begun: it is over when what was launched of it is.
        event = self._device.event()
        event.record(self._stream)
        self._under_way[task.swap_id] = event

    def _copy(self, task: SwapTask, is_out: bool) -> str | None:
        for earlier in task.after_swaps:
            if self._outcomes.get(earlier, "never accepted") is not None:
                return f"swap {earlier}, which it builds on, failed or was never accepted"
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
        except Exception as error:  # no memory to pin, most likely: the request is computed again
            if not self._has_warned:
                _log.warning(
                    "a swap failed, and its request is computed again (%s); swap_blocks may be too many",
                    error,
                )
                self._has_warned = True
            return f"{type(error).__name__}: {error}"
        return None
