"""How many blocks the card's memory is cut into, of one tier or of two, and how many slots there are to swap them to."""

from __future__ import annotations

from dataclasses import dataclass

from weft.config import KvCachePoolConfig
from weft.models.decoder import Decoder
from weft.ops.triton.device import Device
from weft.tiers import PoolSizes, choose_sizes, longest_context

_DEFAULT_SWAP_BYTES = 8 << 30
# Of the free memory: for what launched steps allocate, graphs, and the libraries.
_SPARE_SHARE = 0.04
_SPARE_BYTES = 1 << 30


def free_bytes(device: Device) -> int:
    """What blocks may take beside all that has its memory already."""
    free = device.free_memory()
    return max(0, int(free - max(_SPARE_BYTES, free * _SPARE_SHARE)))


@dataclass(frozen=True)
class BlockMemory:
    """What the blocks of a model take, and how many there are to be."""

    pool: KvCachePoolConfig
    model_context: int
    step_tokens: int
    block_bytes: int
    store_block_bytes: int  # 0: there is one tier

    @classmethod
    def of(cls, pool: KvCachePoolConfig, decoder: Decoder, step_tokens: int) -> BlockMemory:
        block_bytes = decoder.new_cache(1, pool.block_size).nbytes
        store_block_bytes = 0
        if pool.is_two_tier:
            store_block_bytes = decoder.new_store(1, pool.block_size, pool.store_bits).nbytes
        return cls(pool, decoder.config.max_context, step_tokens, block_bytes, store_block_bytes)

    def asked(self) -> PoolSizes | None:
        """As many as somebody wants; None: it depends on what is free."""
        if self.pool.num_blocks is None and self.pool.memory is None:
            return None
        return self.sizes(0)

    def sizes(self, free: int) -> PoolSizes:
        """As many as somebody wants, or as fit into so many bytes."""
        if self.pool.is_two_tier:
            return choose_sizes(
                self.pool,
                block_bytes=self.block_bytes,
                store_block_bytes=self.store_block_bytes,
                free_memory=free,
                model_context=self.model_context,
                step_tokens=self.step_tokens,
            )
        asked = self.pool.blocks_in_memory(self.block_bytes)
        return PoolSizes(max(1, free // self.block_bytes) if asked is None else asked, 0)

    def longest_context(self, sizes: PoolSizes) -> int:
        if self.pool.is_two_tier:
            return longest_context(self.model_context, sizes, self.pool.block_size, self.pool.tail_blocks)
        return min(self.model_context, sizes.full * self.pool.block_size)

    def swap_slots(self, sizes: PoolSizes) -> PoolSizes:
        """In host memory; as many for the store as its blocks go with the full ones."""
        full = self.pool.swap_blocks
        if full is None:
            each = self.block_bytes + self.store_block_bytes * sizes.store / sizes.full
            full = min(sizes.full // 2, int(_DEFAULT_SWAP_BYTES / each))
        return PoolSizes(full, -(-full * sizes.store // sizes.full))

    def described(self, sizes: PoolSizes | None) -> str:
        """For a person who asked for too many."""
        full, store = ("the", "those") if sizes is None else sizes
        text = f"{full} blocks of {self.block_bytes} bytes"
        if self.pool.is_two_tier:
            text += f" and {store} of the store, of {self.store_block_bytes} bytes,"
        return text
