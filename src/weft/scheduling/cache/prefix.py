"""Prefix sharing: finds KV blocks by content, and records which running sequence will compute which block."""

from __future__ import annotations

from weft.scheduling.cache.block_pool import BlockHash
from weft.scheduling.cache.manager import KvCacheManager
from weft.scheduling.preemption import is_below
from weft.scheduling.sequence import Sequence


class PrefixSharing:
    """Owns the announced blocks: those that a running sequence will compute, so that other sequences may wait for them.

    A block is in the prefix cache as soon as the step that fills it is planned. Before that it may be announced.
    """

    def __init__(self, kv_cache: KvCacheManager, block_size: int, tail_blocks: int, enabled: bool) -> None:
        self._kv_cache = kv_cache
        self._pool, self._store = kv_cache.pool, kv_cache.store
        self._block_size = block_size
        self._tail_blocks = tail_blocks
        self._enabled = enabled
        self._announced: dict[BlockHash, Sequence] = {}
        """Hash of an announced block -> the sequence that will compute it."""

    def extend_block_hashes(self, sequence: Sequence) -> None:
        if self._enabled:
            sequence.extend_block_hashes(self._block_size)

    def hits(self, sequence: Sequence) -> list[int]:
        """The leading blocks of a waiting sequence that are cached."""
        if self._store.num_blocks:
            return self._hits_in_tiers(sequence)
        blocks = []
        for block_hash in sequence.block_hashes[: self.max_hits(sequence)]:
            block = self._pool.lookup(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _hits_in_tiers(self, sequence: Sequence) -> list[int]:
        """`hits` for two tiers: store blocks, then full blocks.

            0 ........... border ............ length
            [ store blocks  )[ full blocks          ]

        The first position after the hit reads its tail from full blocks. So at most `tiers.stored_blocks` of that
        position can come from the store: that is the border. If the store holds fewer blocks, the border is earlier,
        and the first step moves the missing blocks to the store.

        If the hit is shorter only because full blocks are missing, their hashes are noted. Once computed again, they
        stay cached for the next lookup.
        """
        hashes = sequence.block_hashes[: self.max_hits(sequence)]
        stored: list[int] = []
        for block_hash in hashes:
            block = self._store.lookup(block_hash)
            if block is None:
                break
            stored.append(block)
        full: list[int | None] = []
        num_hits = num_stored = first_full = 0
        # `tiers.stored_blocks` of the position after `length` blocks, inlined: there may be 10,000 blocks to check.
        first_ends_a_block = int(self._block_size == 1)
        for index, block_hash in enumerate(hashes):
            block = self._pool.lookup(block_hash)
            full.append(block)
            if block is None:
                if index >= len(stored):
                    break
                first_full = index + 1  # full blocks before a missing one cannot be used
            length = index + 1
            border = min(max(0, length + first_ends_a_block - self._tail_blocks), len(stored))
            # The sequence needs one more full block to continue, even if it runs alone.
            if first_full <= border and length - border < self._pool.num_blocks:
                num_hits, num_stored = length, border
        known = max(len(stored), num_hits)
        if num_hits < known:
            self._pool.note_missed(hashes[max(0, known - self._tail_blocks) : known])
        return [*stored[:num_stored], *[block for block in full[num_stored:num_hits] if block is not None]]

    def next_hit(self, sequence: Sequence, index: int) -> int | None:
        """The cached full block with the content of table entry `index` of a running sequence."""
        if index >= self.max_hits(sequence):
            return None
        allocation = sequence.allocation
        assert allocation is not None
        if index - allocation.stored >= self._pool.num_blocks - 1:
            # The sequence would hold the block until it moves to the store, and needs another full block to continue.
            return None
        return self._pool.lookup(sequence.block_hashes[index])

    def max_hits(self, sequence: Sequence) -> int:
        """How many leading blocks may be hits. At least one token must be computed for its logits. With prompt logprobs
        all tokens must be computed."""
        if not self._enabled or sequence.request.params.prompt_logprobs is not None:
            return 0
        return min(len(sequence.block_hashes), (len(sequence.tokens) - 1) // self._block_size)

    def producer(self, sequence: Sequence, index: int) -> Sequence | None:
        """The running sequence that announced table entry `index`, the next one that `sequence` needs.

        Returns only a producer that ranks above `sequence`. It can preempt `sequence`, so the two never wait for each
        other.
        """
        if index >= self.max_hits(sequence):
            return None
        owner = self._announced.get(sequence.block_hashes[index])
        return owner if owner is not None and owner is not sequence and is_below(sequence, owner) else None

    def register(self, sequence: Sequence, start: int, end: int) -> list[tuple[int, BlockHash]]:
        """Puts the blocks of tokens start..end that are complete into the prefix cache. If the sequence has announced nothing
        yet, also announces its blocks after `end`: other sequences may wait for them.

        Returns the blocks that are new in the cache, with their hashes.
        """
        if not self._enabled:
            return []
        allocation = sequence.allocation
        assert allocation is not None
        blocks, hashes, block_size = allocation.blocks, sequence.block_hashes, self._block_size
        registered = []
        for index in range(start // block_size, min(end // block_size, len(hashes))):
            # Skips a block that is moving to the store: the step that moves it may still fail.
            is_moving = index in allocation.leaving
            if not is_moving and self._kv_cache.pool_of(blocks[index]).register(blocks[index], hashes[index]):
                registered.append((blocks[index], hashes[index]))
                if sequence.is_idle_work:
                    self._kv_cache.pool_of(blocks[index]).note_idle_content((blocks[index],))
            if self._announced.get(hashes[index]) is sequence:
                del self._announced[hashes[index]]
        if not sequence.has_announced:
            sequence.has_announced = True
            for block_hash in hashes[end // block_size :]:
                self._announced.setdefault(block_hash, sequence)
        return registered

    def register_generated(self, sequence: Sequence) -> None:
        """Caches a block that decoding has filled: now all its tokens are known."""
        if self._enabled:
            self.extend_block_hashes(sequence)
            self.register(sequence, sequence.computed - self._block_size, sequence.computed)

    def withdraw(self, sequence: Sequence) -> None:
        """Removes the announcements of a sequence that will not compute its blocks, or not soon."""
        if sequence.has_announced:
            sequence.has_announced = False
            for block_hash in sequence.block_hashes:
                if self._announced.get(block_hash) is sequence:
                    del self._announced[block_hash]

    def check_integrity(self, running: list[Sequence]) -> None:
        owners = {id(sequence) for sequence in self._announced.values()}
        assert owners <= {id(s) for s in running}, "a sequence that does not run has announced blocks"
