"""The rows of a backend on the card (tokens and block tables by row), and the index arrays of a step made there.

The host never reads them: a token that a step samples is written into its row on the card, where the next step finds it.

    row r:  tokens[r, p]    the token at position p, known or sampled here
            tables[r, b]    the block that holds positions b * block size ...
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch

from weft.backends.cuda.mailbox import SLOTS, Mailbox, Slot
from weft.backends.cuda.prepare import HEADER, apply_changes, prepare_decodes, prepare_tokens
from weft.ops.triton.batch import DeviceBatch
from weft.ops.triton.device import Device
from weft.plan import IterationPlan

_WIDTH = 256
"""Tokens or words that one program handles."""


class DeviceRows:
    """Tokens and block tables of all rows, and the static buffers that a step's index arrays are made in."""

    def __init__(
        self,
        device: Device,
        mailbox: Mailbox,
        num_rows: int,
        max_context: int,
        block_size: int,
        max_tokens: int,
    ) -> None:
        self._device = device
        self._mailbox = mailbox
        self._num_rows = num_rows
        self.block_size = block_size
        # One place more than the context: the last token is sampled, never computed.
        self.tokens = device.zeros(num_rows, max_context + 1, dtype=torch.int32)
        self.tables = device.zeros(num_rows, -(-max_context // block_size), dtype=torch.int32)
        max_tokens = max(max_tokens, num_rows)
        self.token_ids = device.zeros(max_tokens, dtype=torch.int32)
        self.positions = device.zeros(max_tokens, dtype=torch.int32)
        self.cells = device.zeros(max_tokens, dtype=torch.int64)
        self.rows = device.zeros(num_rows, dtype=torch.int32)
        self.query_starts = device.zeros(num_rows + 1, dtype=torch.int32)
        self.context_lengths = device.zeros(num_rows, dtype=torch.int32)
        self.logit_indices = device.zeros(num_rows + max_tokens, dtype=torch.int32)
        self.sampled_rows = device.zeros(num_rows, dtype=torch.int32)
        self.sampled_positions = device.zeros(num_rows, dtype=torch.int32)
        self._sizes = {
            "ROW_TOKENS": self.tokens.shape[1],
            "ROW_BLOCKS": self.tables.shape[1],
        }
        self._kind = (*self._sizes.values(), block_size, mailbox.capacity)
        """What decides how the kernels here are compiled."""
        self._made = (
            *(self.token_ids, self.positions, self.cells, self.rows, self.query_starts),
            *(self.context_lengths, self.logit_indices, self.sampled_rows, self.sampled_positions),
        )

    # --- what a plan changes ------------------------------------------------------------------------------------------

    def change(self, plan: IterationPlan, slot: Slot) -> None:
        """Launches what writes the plan's changes of rows. The table entries of a decode step, mostly few, are part of
        its letter instead, and written where that is read."""
        updates = _updates(plan)
        if is_decode(plan):
            capacity = self._mailbox.capacity
            in_letter = updates if len(updates) <= capacity else {}
            _write_letter(slot.inbox, capacity, plan, in_letter)
            if in_letter:
                updates = {}
        if plan.row_starts or updates:
            self._apply(plan, updates, slot)

    def _apply(self, plan: IterationPlan, updates: dict[tuple[int, int], int], slot: Slot) -> None:
        pieces = [(0, start.row, start.tokens) for start in plan.row_starts]
        pieces += [(1, start.row, start.blocks) for start in plan.row_starts if start.blocks]
        lengths = [len(words) for _, _, words in pieces]
        words_before = 4 * len(pieces) + 3 * len(updates)
        parcel = slot.pack(
            [
                [part for part, _, _ in pieces],
                [row for _, row, _ in pieces],
                lengths,
                list(accumulate(lengths[:-1], initial=words_before)) if pieces else [],
                [row for row, _ in updates],
                [index for _, index in updates],
                list(updates.values()),
                *(words for _, _, words in pieces),
            ]
        )
        longest = max(lengths, default=1)
        self._device.launch(
            apply_changes,
            (len(pieces) + -(-len(updates) // _WIDTH), -(-longest // _WIDTH), 1),
            (parcel, len(pieces), len(updates), self.tokens, self.tables),
            self._kind,
            lambda: {**self._sizes, "WIDTH": _WIDTH, "num_warps": 4},
        )

    # --- a step of decodes --------------------------------------------------------------------------------------------

    def prepare_decodes(self, size: int) -> None:
        """Launches the kernel that reads the letter whose turn it is; there is room for `size` entries in the batch."""
        mailbox = self._mailbox
        self._device.launch(
            prepare_decodes,
            (1, 1, 1),
            (mailbox.turn, mailbox.inbox, size, self.tokens, self.tables, *self._made),
            self._kind,
            lambda: {
                "SLOTS": SLOTS,
                "CAPACITY": mailbox.capacity,
                **self._sizes,
                "BLOCK_SIZE": self.block_size,
                "WIDTH": mailbox.width,
                "num_warps": 4,
            },
        )

    def decode_batch(self, size: int, longest_context: int) -> DeviceBatch:
        """The batch that `prepare_decodes` fills."""
        return self._batch(size, size, size, 1, longest_context, size, size)

    def sampled(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the first so many entries that sample: their rows (-1: padding), and where the token will stand."""
        return self.sampled_rows[:count], self.sampled_positions[:count]

    # --- any other step -----------------------------------------------------------------------------------------------

    def prepare_tokens(self, plan: IterationPlan, slot: Slot, scored: np.ndarray | None) -> DeviceBatch:
        """The batch of a step; `scored` are indices of tokens after which logits are wanted besides."""
        entries, counts = len(plan.rows), plan.counts
        firsts = list(accumulate(counts, initial=0))
        numbers = np.cumsum(plan.samples) - 1
        parcel = slot.pack([plan.rows, plan.starts, firsts[:-1], counts, np.where(plan.samples, numbers, -1)])
        longest = max(counts)
        self._device.launch(
            prepare_tokens,
            (entries, -(-longest // _WIDTH), 1),
            (parcel, entries, self.tokens, self.tables, *self._made),
            self._kind,
            lambda: {**self._sizes, "BLOCK_SIZE": self.block_size, "WIDTH": _WIDTH, "num_warps": 4},
        )
        sampled = plan.num_samples
        wanted = sampled
        if scored is not None:
            wanted += len(scored)
            self.logit_indices[sampled:wanted].copy_(slot.pack([scored]), non_blocking=True)
        contexts = max(start + count for start, count in zip(plan.starts, counts, strict=True))
        return self._batch(firsts[-1], entries, sampled, longest, contexts, wanted, plan.num_decodes)

    def _batch(
        self, tokens: int, requests: int, sampled: int, longest: int, context: int, wanted: int, decodes: int
    ) -> DeviceBatch:
        return DeviceBatch(
            tokens=tokens,
            requests=requests,
            sampled=sampled,
            longest_query=longest,
            longest_context=context,
            token_ids=self.token_ids[:tokens],
            positions=self.positions[:tokens],
            cells=self.cells[:tokens],
            rows=self.rows[:requests],
            query_starts=self.query_starts[: requests + 1],
            context_lengths=self.context_lengths[:requests],
            tables=self.tables,
            logit_indices=self.logit_indices[:wanted],
            decodes=decodes,
        )


def is_decode(plan: IterationPlan) -> bool:
    """Whether every entry is one token that samples."""
    return plan.num_decodes == len(plan.rows) > 0


def _updates(plan: IterationPlan) -> dict[tuple[int, int], int]:
    """New entries of block tables by row and index; of an entry that is named twice the last one counts."""
    places = zip(plan.table_rows, plan.table_indices, strict=True)
    return dict(zip(places, plan.table_blocks, strict=True))


def _write_letter(
    inbox: np.ndarray, capacity: int, plan: IterationPlan, updates: dict[tuple[int, int], int]
) -> None:
    entries = len(plan.rows)
    inbox[0] = entries
    inbox[1] = len(updates)
    columns = inbox[HEADER:].reshape(-1, capacity)
    columns[0, :entries] = plan.rows
    columns[1, :entries] = plan.starts
    if updates:
        columns[2, : len(updates)] = [row for row, _ in updates]
        columns[3, : len(updates)] = [index for _, index in updates]
        columns[4, : len(updates)] = list(updates.values())
