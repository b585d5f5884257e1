"""Owns swap slots and the copies under way: which slots are free, and which copy last touches a block or slot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.plan import SwapTask
from weft.request import RequestId
from weft.scheduling.cache.block_pool import Blocks


class SwapSlots:
    """Slots of each tier, those of full blocks first, and guards.

    Guards: a swap copies beside the steps, so a block or swap slot that it touches may be given to someone else
    while the copy is under way. The guard of a block or slot is the swap that touches it last; whoever takes it
    next states that swap as a dependency.
    """

    def __init__(self, slots: Blocks) -> None:
        self.slots = slots
        self._free_full = list(range(slots.full - 1, -1, -1))
        self._free_store = list(range(slots.full + slots.store - 1, slots.full - 1, -1))
        self._next_swap_id = 0
        self._swaps: dict[int, list[tuple[dict[int, int], dict[int, int | None]]]] = {}
        """Swaps that are not over: which guards each is, and whose guard it replaced there."""
        self._block_guards: dict[int, int] = {}
        self._slot_guards: dict[int, int] = {}
        self._dependencies: set[int] = set()

    @property
    def free(self) -> Blocks:
        return Blocks(len(self._free_full), len(self._free_store))

    @property
    def free_slots(self) -> list[int]:
        return self._free_full + self._free_store

    @property
    def under_way(self) -> list[int]:
        return list(self._swaps)

    def take(self, count: Blocks) -> list[int]:
        """Slots for a block table: first for what is in the store, then for full blocks. They must be there."""
        store = [self._free_store.pop() for _ in range(count.store)]
        return store + [self._free_full.pop() for _ in range(count.full)]

    def give_back(self, slots: Iterable[int]) -> None:
        for slot in slots:
            (self._free_full if slot < self.slots.full else self._free_store).append(slot)

    def copy(
        self, request_id: RequestId, blocks: Sequence[int], slots: Sequence[int], after_step: int
    ) -> SwapTask:
        """A new copy between blocks and slots, behind those that touch them now."""
        guards = {self._block_guards.get(b) for b in blocks} | {self._slot_guards.get(s) for s in slots}
        after = tuple(sorted(guard for guard in guards if guard is not None))
        task = SwapTask(self._next_swap_id, request_id, tuple(blocks), tuple(slots), after_step, after)
        self._next_swap_id += 1
        self._swaps[task.swap_id] = [
            (self._block_guards, {block: self._block_guards.get(block) for block in blocks}),
            (self._slot_guards, {slot: self._slot_guards.get(slot) for slot in slots}),
        ]
        self._block_guards.update(dict.fromkeys(blocks, task.swap_id))
        self._slot_guards.update(dict.fromkeys(slots, task.swap_id))
        return task

    def finish(self, swap_id: int) -> bool:
        """The copy is over, well or not: what it touched is no longer guarded by it. False: it was over already."""
        if swap_id not in self._swaps:
            return False
        for guards, replaced in self._swaps.pop(swap_id):
            for index, earlier in replaced.items():
                if guards.get(index) == swap_id:
                    del guards[index]
                    # A swap that never began may be over before those it was to wait for.
                    if earlier in self._swaps:
                        guards[index] = earlier
        self._dependencies.discard(swap_id)
        return True

    def note_taken(self, blocks: Iterable[int]) -> None:
        """The step being planned writes to these blocks: it waits for the copies that touch them."""
        if self._block_guards:
            self._dependencies.update(self._block_guards[b] for b in blocks if b in self._block_guards)

    def take_dependencies(self) -> tuple[int, ...]:
        """The swaps that the step being planned must wait for, because it writes to blocks they touch."""
        if not self._dependencies:
            return ()
        taken = tuple(sorted(self._dependencies))
        self._dependencies.clear()
        return taken

    def is_guarded(self, block: int) -> bool:
        return block in self._block_guards
