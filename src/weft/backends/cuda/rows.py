"""The rows of the backend in GPU memory (tokens and block tables), and the index arrays that kernels make from them.

The host never reads the rows: a step writes its sampled tokens into them, and the next step reads the tokens there.

    row r:  tokens[r, p]        the token at position p
            tables[r, b]        the KV block of positions b * block size to (b + 1) * block size - 1
            tables[r, N + b]    with two tiers, the block of the store for the same positions; N is half of the row
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch

from weft.backends.cuda.mailbox import SLOTS, Mailbox, MailboxSlot
from weft.backends.cuda.prepare import HEADER, apply_changes, prepare_decodes, prepare_tokens
from weft.ops.triton.device import Device
from weft.ops.triton.device_batch import DeviceBatch
from weft.ops.triton.store import Moves
from weft.plan import IterationPlan

_WIDTH = 256
"""Tokens or words that one program handles."""

_MOVE_WORDS = 4096
"""The size of the buffer for moves to the store; two words for each move."""


class DeviceRows:
    """Tokens and block tables of all rows, and the static buffers for the index arrays of a step."""

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
        # One position more than the context: the last token is sampled, but never computed.
        self.tokens = device.zeros(num_rows, max_context + 1, dtype=torch.int32)
        tiers = 2 if two_tier else 1
        self.tables = device.zeros(num_rows, tiers * self._context_blocks, dtype=torch.int32)
        self._moves = device.zeros(_MOVE_WORDS, dtype=torch.int32)
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
        """The launch key: kernels are compiled once per key."""
        self._index_arrays = (
            *(self.token_ids, self.positions, self.cells, self.rows, self.query_starts),
            *(self.context_lengths, self.logit_indices, self.sampled_rows, self.sampled_positions),
        )

    def number_store_from(self, full_blocks: int) -> None:
        """With two tiers, block ids from `full_blocks` on are store blocks."""
        self._full_blocks = full_blocks

    # --- changes of a plan --------------------------------------------------------------------------------------------

    def change(self, plan: IterationPlan, slot: MailboxSlot) -> None:
        """Launches the kernel that applies the row changes of a plan. For a decode step, table entries are written to
        the inbox instead if they fit: `prepare_decodes` applies them."""
        updates = self._updates(plan)
        if is_decode(plan):
            capacity = self._mailbox.capacity
            in_inbox = updates if len(updates) <= capacity else {}
            _write_inbox(slot.inbox, capacity, plan, in_inbox)
            if in_inbox:
                updates = {}
        if plan.row_starts or updates:
            self._apply(plan, updates, slot)

    def _apply(self, plan: IterationPlan, updates: dict[tuple[int, int], int], slot: MailboxSlot) -> None:
        """Launches the kernel that writes tokens and block tables of new rows, and the table entries in `updates`."""
        # (0: tokens or 1: block table, row, first index, words), as `apply_changes` reads them.
        segments: list[tuple[int, int, int, Sequence[int]]] = [
            (0, start.row, 0, start.tokens) for start in plan.row_starts
        ]
        for start in plan.row_starts:
            segments += [(1, start.row, first, blocks) for first, blocks in self._table_parts(start.blocks)]
        lengths = [len(words) for *_, words in segments]
        words_before = 5 * len(segments) + 3 * len(updates)
        staged = slot.pack(
            [
                [part for part, *_ in segments],
                [row for _, row, *_ in segments],
                [first for _, _, first, _ in segments],
                lengths,
                list(accumulate(lengths[:-1], initial=words_before)) if segments else [],
                [row for row, _ in updates],
                [index for _, index in updates],
                list(updates.values()),
                *(words for *_, words in segments),
            ]
        )
        longest = max(lengths, default=1)
        self._device.launch(
            apply_changes,
            (len(segments) + -(-len(updates) // _WIDTH), -(-longest // _WIDTH), 1),
            (staged, len(segments), len(updates), self.tokens, self.tables),
            self._kind,
            lambda: {**self._sizes, "WIDTH": _WIDTH, "num_warps": 4},
        )

    def _table_parts(self, blocks: tuple[int, ...]) -> Iterator[tuple[int, Sequence[int]]]:
        """Divides a block table, in which store blocks come first, into at most two runs: full blocks and store blocks.
        Yields the first index and the blocks of each run."""
        if self._full_blocks is None:
            stored: list[int] = []
        else:
            stored = [block - self._full_blocks for block in blocks if block >= self._full_blocks]
        if len(stored) < len(blocks):
            yield len(stored), blocks[len(stored) :]
        if stored:
            yield self._context_blocks, stored

    def _updates(self, plan: IterationPlan) -> dict[tuple[int, int], int]:
        """New block-table entries by (row, index). If a plan sets an entry twice, the last one counts."""
        keys = zip(plan.table_rows, plan.table_indices, strict=True)
        updates = dict(zip(keys, plan.table_blocks, strict=True))
        if plan.moved_rows:
            assert self._full_blocks is not None, "only blocks of a two-tier cache move"
            for row, index, block in zip(plan.moved_rows, plan.moved_indices, plan.moved_to, strict=True):
                updates[row, self._context_blocks + index] = block - self._full_blocks
        return updates

    def moves(self, plan: IterationPlan, slot: MailboxSlot) -> Moves | None:
        """Copies the moves of a plan to the GPU: pairs of full-precision block and store block. None: the plan has no
        moves."""
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
        # The pairs are copied to GPU memory, because every program of the kernel reads one.
        copied = self._moves[: len(words)]
        if len(words) > len(copied):
            copied = self._device.empty(len(words), dtype=torch.int32)
        copied.copy_(words, non_blocking=True)
        return Moves(copied, len(pairs))

    # --- a step of decodes --------------------------------------------------------------------------------------------

    def prepare_decodes(self, size: int) -> None:
        """Launches the kernel that reads the inbox of the current slot. It pads the batch to `size` entries."""
        mailbox = self._mailbox
        self._device.launch(
            prepare_decodes,
            (1, 1, 1),
            (mailbox.step_count, mailbox.inbox, size, self.tokens, self.tables, *self._index_arrays),
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
        """Rows (-1: padding) and token positions of the first `count` samples."""
        return self.sampled_rows[:count], self.sampled_positions[:count]

    # --- any other step -----------------------------------------------------------------------------------------------

    def prepare_tokens(
        self, plan: IterationPlan, slot: MailboxSlot, scored: np.ndarray | None
    ) -> DeviceBatch:
        """The batch of any step. `scored` lists the tokens whose logits score prompts."""
        moves = self.moves(plan, slot)
        entries, counts = len(plan.rows), plan.counts
        firsts = list(accumulate(counts, initial=0))
        numbers = np.cumsum(plan.samples) - 1
        staged = slot.pack([plan.rows, plan.starts, firsts[:-1], counts, np.where(plan.samples, numbers, -1)])
        longest = max(counts)
        self._device.launch(
            prepare_tokens,
            (entries, -(-longest // _WIDTH), 1),
            (staged, entries, self.tokens, self.tables, *self._index_arrays),
            self._kind,
            lambda: {**self._sizes, "BLOCK_SIZE": self.block_size, "WIDTH": _WIDTH, "num_warps": 4},
        )
        sampled = plan.num_samples
        num_logits = sampled
        if scored is not None:
            num_logits += len(scored)
            self.logit_indices[sampled:num_logits].copy_(slot.pack([scored]), non_blocking=True)
        context = max(start + count for start, count in zip(plan.starts, counts, strict=True))
        batch = self._batch(firsts[-1], entries, sampled, longest, context, num_logits, plan.num_decodes)
        batch.moves = moves
        return batch

    def _batch(
        self,
        tokens: int,
        requests: int,
        sampled: int,
        longest: int,
        context: int,
        num_logits: int,
        decodes: int,
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
            logit_indices=self.logit_indices[:num_logits],
            decodes=decodes,
        )


def is_decode(plan: IterationPlan) -> bool:
    """Whether every entry is one token that samples."""
    return plan.num_decodes == len(plan.rows) > 0


def _write_inbox(
    inbox: np.ndarray, capacity: int, plan: IterationPlan, updates: dict[tuple[int, int], int]
) -> None:
    """Writes a decode step into an inbox, in the layout that `prepare_decodes` reads."""
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
