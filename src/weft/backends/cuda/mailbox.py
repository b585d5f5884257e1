"""Where host and card leave words for each other: slots of pinned memory, one for each step that may be in flight.

A slot is written by the host before a step is launched and by the card at the step's end. It is used again when the
result of its last step was taken, so nothing in it is overwritten while somebody may still read it.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from weft.backends.cuda.prepare import HEADER, INBOX_COLUMNS, publish
from weft.ops.triton.device import Device, power_of_two

SLOTS = 4
"""The engine has two steps in flight; whoever has more waits for the oldest."""

_LEAST_PARCEL = 1 << 14
_ALIGNED = 4
"""Words: where 16 bytes begin, kernels may read them at once; else they are compiled once more."""


class MailboxStep(Protocol):
    """The handle of a step that uses a slot."""

    def collect(self) -> None:
        """Waits for the step and takes what the slot holds of it."""
        ...


class Slot:
    """The words of one step: a letter of fixed size, and a parcel that grows with what it has to hold."""

    def __init__(self, device: Device, inbox: np.ndarray, outbox: np.ndarray, parcel_words: int) -> None:
        self._device = device
        self.inbox = inbox  # int32, as `prepare_decodes` reads it
        self.outbox = outbox  # int32 [2, rows]: tokens and errors
        self.event = device.event()
        """The end of the slot's last step."""
        self.step: MailboxStep | None = None
        """The step whose result was not taken yet."""
        self._parcel = device.pinned(parcel_words, dtype=torch.int32)
        self._words = self._parcel.numpy()
        self._used = 0
        self._outgrown: list[torch.Tensor] = []
        """Parcels that kernels of the step may still read."""

    def empty(self) -> None:
        self._used = 0
        self._outgrown.clear()

    def pack(self, parts: list[Any]) -> torch.Tensor:
        """The words of all parts (tuples or arrays of whole numbers), one behind the other, for kernels to read."""
        words = np.concatenate([np.asarray(part, np.int32) for part in parts])
        first, end = self._used, self._used + len(words)
        if end > len(self._words):
            self._outgrown.append(self._parcel)
            self._parcel = self._device.pinned(max(2 * end, 2 * len(self._words)), dtype=torch.int32)
            self._words = self._parcel.numpy()
        self._words[first:end] = words
        self._used = -(-end // _ALIGNED) * _ALIGNED
        return self._parcel[first:end]


class Mailbox:
    """All slots, and the counter on the device that says whose turn it is."""

    def __init__(self, device: Device, num_rows: int, max_tokens: int) -> None:
        self._device = device
        self.capacity = num_rows
        self.width = power_of_two(num_rows)
        self.inbox = device.pinned(SLOTS, HEADER + INBOX_COLUMNS * num_rows, dtype=torch.int32)
        self.outbox = device.pinned(SLOTS, 2, num_rows, dtype=torch.int32)
        self.turn = device.zeros(1, dtype=torch.int32)
        self._turns = 0
        inboxes, outboxes = self.inbox.numpy(), self.outbox.numpy()
        # The tokens of prompts that begin in a step, whose last one may go on behind it, and all that is told of its rows:
        # to pin more memory in the middle of the work takes milliseconds.
        words = max(_LEAST_PARCEL, 4 * max_tokens)
        self._slots = [Slot(device, inboxes[index], outboxes[index], words) for index in range(SLOTS)]

    def take(self) -> Slot:
        """The slot whose turn it is, emptied for the next step."""
        slot = self._slots[self._turns % SLOTS]
        if slot.step is not None:
            slot.step.collect()
        slot.empty()
        return slot

    def publish(self, tokens: torch.Tensor, errors: torch.Tensor, sampled: int) -> None:
        """Launches the end of a step: what was sampled goes to the slot whose turn it is."""
        self._device.launch(
            publish,
            (1, 1, 1),
            (self.turn, self.outbox, tokens, errors, sampled),
            self.capacity,
            lambda: {"SLOTS": SLOTS, "CAPACITY": self.capacity, "WIDTH": self.width, "num_warps": 4},
        )

    def send(self, slot: Slot, step: MailboxStep) -> None:
        """The step is launched up to its end; the next one has the next slot."""
        slot.event.record()
        slot.step = step
        self._turns += 1

    def restore(self) -> None:
        """After launches that failed half way: the card is asked to be done, and told whose turn it is."""
        self._device.synchronize()
        self.turn.fill_(self._turns)

    def close(self) -> None:
        """Drops the steps whose results were not taken: they and their slots refer to each other."""
        for slot in self._slots:
            slot.step = None
