"""Owns the swap slots and the swaps in flight: which slots are free, and which swap last touches a block or slot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.plan import SwapTask
from weft.request import RequestId
from weft.scheduling.cache.block_pool import BlockCounts


class SwapSlots:
    """The swap slots of both tiers (those for full blocks first), and the guards.

    A swap copies in parallel with steps, so its blocks and slots may be allocated again before the copy ends. The guard
    of a block or slot is the last swap that copies from or to it. The next step or swap that uses it depends on the
    guard.
    """

    def __init__(self, slots: BlockCounts) -> None:
        self.slots = slots
        self._free_full = list(range(slots.full - 1, -1, -1))
        self._free_store = list(range(slots.full + slots.store - 1, slots.full - 1, -1))
        self._next_swap_id = 0
        self._swaps: dict[int, list[tuple[dict[int, int], dict[int, int | None]]]] = {}
        """Swap in flight -> [(`_block_guards`, replaced), (`_slot_guards`, replaced)]. `replaced` has the guard that
        each block or slot had before the swap (None: it had none), to restore it."""
        self._block_guards: dict[int, int] = {}
        self._slot_guards: dict[int, int] = {}
        self._dependencies: set[int] = set()

    @property
    def free(self) -> BlockCounts:
        return BlockCounts(len(self._free_full), len(self._free_store))

    @property
    def free_slots(self) -> list[int]:
        return self._free_full + self._free_store

    @property
    def in_flight(self) -> list[int]:
        return list(self._swaps)

    def take(self, count: BlockCounts) -> list[int]:
        """Allocates slots for a block table, store blocks first. The caller has checked that they are free."""
        store = [self._free_store.pop() for _ in range(count.store)]
        return store + [self._free_full.pop() for _ in range(count.full)]

    def give_back(self, slots: Iterable[int]) -> None:
        for slot in slots:
            (self._free_full if slot < self.slots.full else self._free_store).append(slot)

    def copy(
        self, request_id: RequestId, blocks: Sequence[int], slots: Sequence[int], after_step: int
    ) -> SwapTask:
        """Creates a swap between blocks and slots. It depends on the swaps that guard them now."""
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
        """Ends a swap, successful or not, and removes its guards. Returns False if the swap had ended before."""
        if swap_id not in self._swaps:
            return False
        for guards, replaced in self._swaps.pop(swap_id):
            for index, earlier in replaced.items():
                if guards.get(index) == swap_id:
                    del guards[index]
                    # Restores the earlier guard if its swap is still in flight: a swap that never started may end
                    # before the swaps that it depends on.
                    if earlier in self._swaps:
                        guards[index] = earlier
        self._dependencies.discard(swap_id)
        return True

    def note_writes(self, blocks: Iterable[int]) -> None:
        """The step being planned writes to these blocks. Makes it depend on the swaps that still read them."""
        if self._block_guards:
            self._dependencies.update(self._block_guards[b] for b in blocks if b in self._block_guards)

    def take_dependencies(self) -> tuple[int, ...]:
        """Returns the dependencies of the step being planned, and clears them for the next step."""
        if not self._dependencies:
            return ()
        taken = tuple(sorted(self._dependencies))
        self._dependencies.clear()
        return taken

    def is_guarded(self, block: int) -> bool:
        """Whether a swap in flight copies this block."""
        return block in self._block_guards
