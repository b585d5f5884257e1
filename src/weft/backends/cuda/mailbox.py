"""Mailbox slots: pinned memory through which host and GPU exchange the inputs and results of steps. Each step in flight
has one slot.

The host writes a slot before it launches a step; the GPU writes it at the end of the step. A slot is used again only
after the result of its last step was read, so nothing is overwritten while it may still be read.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from weft.backends.cuda.prepare import HEADER, INBOX_COLUMNS, publish
from weft.ops.triton.device import Device, power_of_two

SLOTS = 4
"""The number of slots. The engine has two steps in flight. If more are submitted than there are slots, `submit` waits
for the oldest."""

_LEAST_STAGING_WORDS = 1 << 14
_ALIGNED = 4
"""Alignment in words: Triton compiles a kernel again for a pointer that is not aligned to 16 bytes."""


class MailboxStep(Protocol):
    """What a mailbox slot uses of the handle of its step."""

    def collect(self) -> None:
        """Waits for the step and reads its result from the slot."""
        ...


class MailboxSlot:
    """Pinned memory of one step: an inbox and an outbox of fixed size, and a staging buffer that grows on demand."""

    def __init__(self, device: Device, inbox: np.ndarray, outbox: np.ndarray, staging_words: int) -> None:
        self._device = device
        self.inbox = inbox  # int32, as `prepare_decodes` reads it
        self.outbox = outbox  # int32 [2, rows]: tokens and errors
        self.event = device.event()
        """Marks the end of the last step that used the slot."""
        self.step: MailboxStep | None = None
        """The step whose result was not read yet."""
        self._staging = device.pinned(staging_words, dtype=torch.int32)
        self._words = self._staging.numpy()
        self._used = 0
        self._outgrown: list[torch.Tensor] = []
        """Smaller staging buffers that kernels of the step may still read."""

    def empty(self) -> None:
        self._used = 0
        self._outgrown.clear()

    def pack(self, parts: list[Any]) -> torch.Tensor:
        """Concatenates the parts (tuples or arrays of integers) in the staging buffer, for kernels to read."""
        words = np.concatenate([np.asarray(part, np.int32) for part in parts])
        first, end = self._used, self._used + len(words)
        if end > len(self._words):
            self._outgrown.append(self._staging)
            self._staging = self._device.pinned(max(2 * end, 2 * len(self._words)), dtype=torch.int32)
            self._words = self._staging.numpy()
        self._words[first:end] = words
        self._used = -(-end // _ALIGNED) * _ALIGNED
        return self._staging[first:end]


class Mailbox:
    """All slots, and a counter on the GPU that says which slot the current step uses."""

    def __init__(self, device: Device, num_rows: int, max_tokens: int) -> None:
        self._device = device
        self.capacity = num_rows
        self.width = power_of_two(num_rows)
        self.inbox = device.pinned(SLOTS, HEADER + INBOX_COLUMNS * num_rows, dtype=torch.int32)
        self.outbox = device.pinned(SLOTS, 2, num_rows, dtype=torch.int32)
        self.step_count = device.zeros(1, dtype=torch.int32)
        self._num_sent = 0
        inboxes, outboxes = self.inbox.numpy(), self.outbox.numpy()
        # The size of a staging buffer, for the prompts that start in a step and the other row changes of the step. It
        # is large, because pinning more memory later takes milliseconds.
        words = max(_LEAST_STAGING_WORDS, 4 * max_tokens)
        self._slots = [MailboxSlot(device, inboxes[index], outboxes[index], words) for index in range(SLOTS)]

    def take(self) -> MailboxSlot:
        """The slot for the next step, emptied. Waits for the last step of the slot if its result was not read."""
        slot = self._slots[self._num_sent % SLOTS]
        if slot.step is not None:
            slot.step.collect()
        slot.empty()
        return slot

    def publish(self, tokens: torch.Tensor, errors: torch.Tensor, sampled: int) -> None:
        """Launches the end of a step: sampled tokens and errors go to the outbox of the current slot."""
        self._device.launch(
            publish,
            (1, 1, 1),
            (self.step_count, self.outbox, tokens, errors, sampled),
            self.capacity,
            lambda: {"SLOTS": SLOTS, "CAPACITY": self.capacity, "WIDTH": self.width, "num_warps": 4},
        )

    def send(self, slot: MailboxSlot, step: MailboxStep) -> None:
        """Called when all kernels of the step are launched. The next step uses the next slot."""
        slot.event.record()
        slot.step = step
        self._num_sent += 1

    def restore(self) -> None:
        """Resets the counter on the GPU after a step that was launched only in part."""
        self._device.synchronize()
        self.step_count.fill_(self._num_sent)

    def close(self) -> None:
        """Drops the steps whose results were not read. They and their slots are reference cycles, which would keep
        memory."""
        for slot in self._slots:
            slot.step = None
