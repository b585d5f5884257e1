"""Prefix sharing between requests: finds blocks by content, and knows which ones are about to be computed by whom."""

from __future__ import annotations

from weft.scheduling.cache.block_pool import BlockKey
from weft.scheduling.cache.manager import KvCacheManager
from weft.scheduling.preemption import is_below
from weft.scheduling.sequence import Sequence


class PrefixSharing:
    """Owns the promises: blocks that a running sequence is going to compute, so that others may wait for them.

    A block is found as soon as the step that fills it is planned. Until then it may be promised.
    """

    def __init__(self, kv_cache: KvCacheManager, block_size: int, tail_blocks: int, enabled: bool) -> None:
        self._kv_cache = kv_cache
        self._pool, self._store = kv_cache.pool, kv_cache.store
        self._block_size = block_size
        self._tail_blocks = tail_blocks
        self._enabled = enabled
        self._promises: dict[BlockKey, Sequence] = {}

    def extend_keys(self, sequence: Sequence) -> None:
        if self._enabled:
            sequence.extend_keys(self._block_size)

    def hits(self, sequence: Sequence) -> list[int]:
        """The leading blocks of a waiting sequence that are in the cache."""
        if self._store.num_blocks:
            return self._hits_in_tiers(sequence)
        blocks = []
        for key in sequence.keys[: self.max_hits(sequence)]:
            block = self._pool.lookup(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _hits_in_tiers(self, sequence: Sequence) -> list[int]:
        """The same from both tiers. What the next position reads in full must be there in full; what lies before is taken
        from the store as far as it goes, and from there on also in full: the first step moves it.

        Where all is known but the end of the prefix in full, that end is noted as wanted: when it is computed again it is
        kept for the next."""
        keys = sequence.keys[: self.max_hits(sequence)]
        stored: list[int] = []
        for key in keys:
            block = self._store.lookup(key)
            if block is None:
                break
            stored.append(block)
        full: list[int | None] = []
        num_hits = num_stored = first_full = 0
        # `tiers.stored_blocks` of the first position behind so many blocks; there may be ten thousand to look at.
        first_ends_a_block = int(self._block_size == 1)
        for index, key in enumerate(keys):
            block = self._pool.lookup(key)
            full.append(block)
            if block is None:
                if index >= len(stored):
                    break
                first_full = index + 1  # what is in full before it is of no use to those that come after
            length = index + 1
            border = min(max(0, length + first_ends_a_block - self._tail_blocks), len(stored))
            # One full block must be left to go on with, were this sequence alone.
            if first_full <= border and length - border < self._pool.num_blocks:
                num_hits, num_stored = length, border
        known = max(len(stored), num_hits)
        if num_hits < known:
            self._pool.want(keys[max(0, known - self._tail_blocks) : known])
        return [*stored[:num_stored], *[block for block in full[num_stored:num_hits] if block is not None]]

    def next_hit(self, sequence: Sequence, index: int) -> int | None:
        """The full block that holds what table entry `index` of a running sequence would hold."""
        if index >= self.max_hits(sequence):
            return None
        allocation = sequence.allocation
        assert allocation is not None
        if index - allocation.stored >= self._pool.num_blocks - 1:
            return None  # all that it adopts is held until it moves: one must be left to go on with
        return self._pool.lookup(sequence.keys[index])

    def max_hits(self, sequence: Sequence) -> int:
        """At least one token is left to compute: it gives the logits. Prompt logprobs need them all computed."""
        if not self._enabled or sequence.request.params.prompt_logprobs is not None:
            return 0
        return min(len(sequence.keys), (len(sequence.tokens) - 1) // self._block_size)

    def awaited(self, sequence: Sequence, index: int) -> Sequence | None:
        """The running sequence that this one gives way to, where it has promised table entry `index`, next to compute.

        Only one it gives way to: the other can then always push it out, so the two never wait for each other.
        """
        if index >= self.max_hits(sequence):
            return None
        owner = self._promises.get(sequence.keys[index])
        return owner if owner is not None and owner is not sequence and is_below(sequence, owner) else None

    def register(self, sequence: Sequence, start: int, end: int) -> list[tuple[int, BlockKey]]:
        """Makes the blocks findable that are full once start..end is computed, and promises the later ones.

        Returns those that are new to the cache.
        """
        if not self._enabled:
            return []
        allocation = sequence.allocation
        assert allocation is not None
        blocks, keys, block_size = allocation.blocks, sequence.keys, self._block_size
        registered = []
        for index in range(start // block_size, min(end // block_size, len(keys))):
            # What is on its way to the store in a step that may fail is found there later or not at all.
            is_moving = index in allocation.leaving
            if not is_moving and self._kv_cache.pool_of(blocks[index]).register(blocks[index], keys[index]):
                registered.append((blocks[index], keys[index]))
            if self._promises.get(keys[index]) is sequence:
                del self._promises[keys[index]]
        if not sequence.has_promised:
            sequence.has_promised = True
            for key in keys[end // block_size :]:
                self._promises.setdefault(key, sequence)
        return registered

    def register_generated(self, sequence: Sequence) -> None:
        """A block that decoding filled is found by its content from now on: its tokens are known at last."""
        if self._enabled:
            self.extend_keys(sequence)
            self.register(sequence, sequence.computed - self._block_size, sequence.computed)

    def withdraw(self, sequence: Sequence) -> None:
        """Takes back what a sequence promised and will not compute, or not soon."""
        if sequence.has_promised:
            sequence.has_promised = False
            for key in sequence.keys:
                if self._promises.get(key) is sequence:
                    del self._promises[key]

    def check_integrity(self, running: list[Sequence]) -> None:
        owners = {id(sequence) for sequence in self._promises.values()}
        assert owners <= {id(s) for s in running}, "a promise of a sequence that does not run"
