"""The rows of a backend on the card (tokens and block tables by row), and the index arrays of a step made there.

The host never reads them: a token that a step samples is written into its row on the card, where the next step finds it.

    row r:  tokens[r, p]        the token at position p, known or sampled here
            tables[r, b]        the block that holds positions b * block size ...
            tables[r, N + b]    with two tiers, the block of the store that holds them quantised; N is half of a row
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch

from weft.backends.cuda.mailbox import SLOTS, Mailbox, Slot
from weft.backends.cuda.prepare import HEADER, apply_changes, prepare_decodes, prepare_tokens
from weft.ops.triton.device import Device
from weft.ops.triton.device_batch import DeviceBatch
from weft.ops.triton.store import Moves
from weft.plan import IterationPlan

_WIDTH = 256
"""Tokens or words that one program handles."""

_MOST_MOVES = 4096
"""Words about blocks to quantise that there is always room for."""


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
        two_tier: bool = False,
    ) -> None:
        self._device = device
        self._mailbox = mailbox
        self._num_rows = num_rows
        self.block_size = block_size
        self._full_blocks: int | None = None
        self._context_blocks = -(-max_context // block_size)
        # One place more than the context: the last token is sampled, never computed.
        self.tokens = device.zeros(num_rows, max_context + 1, dtype=torch.int32)
        tiers = 2 if two_tier else 1
        self.tables = device.zeros(num_rows, tiers * self._context_blocks, dtype=torch.int32)
        self._moved = device.zeros(_MOST_MOVES, dtype=torch.int32)
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

    def number_store_from(self, full_blocks: int) -> None:
        """With two tiers, blocks of this number and up are those of the store."""
        self._full_blocks = full_blocks

    # --- what a plan changes ------------------------------------------------------------------------------------------

    def change(self, plan: IterationPlan, slot: Slot) -> None:
        """Launches what writes the plan's changes of rows. The table entries of a decode step, mostly few, are part of
        its letter instead, and written where that is read."""
        updates = self._updates(plan)
        if is_decode(plan):
            capacity = self._mailbox.capacity
            in_letter = updates if len(updates) <= capacity else {}
            _write_letter(slot.inbox, capacity, plan, in_letter)
            if in_letter:
                updates = {}
        if plan.row_starts or updates:
            self._apply(plan, updates, slot)

    def _apply(self, plan: IterationPlan, updates: dict[tuple[int, int], int], slot: Slot) -> None:
        pieces: list[tuple[int, int, int, Sequence[int]]] = [
            (0, start.row, 0, start.tokens) for start in plan.row_starts
        ]
        for start in plan.row_starts:
            pieces += [(1, start.row, first, blocks) for first, blocks in self._table_parts(start.blocks)]
        lengths = [len(words) for *_, words in pieces]
        words_before = 5 * len(pieces) + 3 * len(updates)
        parcel = slot.pack(
            [
                [part for part, *_ in pieces],
                [row for _, row, *_ in pieces],
                [first for _, _, first, _ in pieces],
                lengths,
                list(accumulate(lengths[:-1], initial=words_before)) if pieces else [],
                [row for row, _ in updates],
                [index for _, index in updates],
                list(updates.values()),
                *(words for *_, words in pieces),
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

    def _table_parts(self, blocks: tuple[int, ...]) -> Iterator[tuple[int, Sequence[int]]]:
        """A block table as a plan has it, in parts that follow each other in a row: where one begins, and what it says."""
        if self._full_blocks is None:
            stored: list[int] = []
        else:
            stored = [block - self._full_blocks for block in blocks if block >= self._full_blocks]
        if len(stored) < len(blocks):
            yield len(stored), blocks[len(stored) :]
        if stored:
            yield self._context_blocks, stored

    def _updates(self, plan: IterationPlan) -> dict[tuple[int, int], int]:
        """New entries of block tables by row and index; of an entry that is named twice the last one counts."""
        places = zip(plan.table_rows, plan.table_indices, strict=True)
        updates = dict(zip(places, plan.table_blocks, strict=True))
        if plan.moved_rows:
            assert self._full_blocks is not None, "only blocks of a two-tier cache move"
            for row, index, block in zip(plan.moved_rows, plan.moved_indices, plan.moved_to, strict=True):
                updates[row, self._context_blocks + index] = block - self._full_blocks
        return updates

    def moves(self, plan: IterationPlan, slot: Slot) -> Moves | None:
        """The blocks that a plan quantises, told to the card; None where there are none."""
        pairs = [
            (source, target)
            for source, target in zip(plan.moved_from, plan.moved_to, strict=True)
            if source >= 0
        ]
        if not pairs:
            return None
        assert self._full_blocks is not None, "only blocks of a two-tier cache move"
        words = slot.pack(
            [[source for source, _ in pairs], [target - self._full_blocks for _, target in pairs]]
        )
        # Every program of a move reads it: not from the host's memory.
        parcel = self._moved[: len(words)]
        if len(words) > len(parcel):
            parcel = self._device.empty(len(words), dtype=torch.int32)
        parcel.copy_(words, non_blocking=True)
        return Moves(parcel, len(pairs))

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
        moves = self.moves(plan, slot)
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
        batch = self._batch(firsts[-1], entries, sampled, longest, contexts, wanted, plan.num_decodes)
        batch.moves = moves
        return batch

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
