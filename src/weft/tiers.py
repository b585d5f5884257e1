"""Arithmetic of the two-tier KV cache: which blocks a position reads from which tier, and the sizes of the tiers.

    blocks   0 .................. q(p) ............... p // B
             [ store: quantised  )[ tail: full precision   ]       read by the query at position p

The border q(p) depends on the position alone, so batching, chunking, preemption, swapping and prefix hits cannot change
results. The scheduler and the backends both use these functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from weft.config import KvCachePoolConfig
from weft.errors import InvalidRequestError
from weft.plan import BackendInfo

DEFAULT_EXPECTED_CONTEXT = 4096


class PoolSizes(NamedTuple):
    """The number of blocks of each tier. They share one id space: full blocks first, then store blocks."""

    full: int
    store: int


@dataclass(frozen=True)
class TierSizes:
    """The capacity of both tiers, for display. Full blocks hold tails and prompts in progress, store blocks hold the
    rest."""

    tail_tokens: int
    tail_bytes: int
    store_tokens: int
    store_bytes: int
    tail_length: int
    store_bits: int
    ratio: float
    """Capacity in tokens, relative to a one-tier cache of the same memory."""


def tier_sizes(info: BackendInfo, pool: KvCachePoolConfig) -> TierSizes | None:
    """The capacity of both tiers. None: the cache has one tier."""
    if not info.store_blocks:
        return None
    return TierSizes(
        tail_tokens=info.num_blocks * info.block_size,
        tail_bytes=info.num_blocks * info.bytes_per_block,
        store_tokens=info.store_blocks * info.block_size,
        store_bytes=info.store_blocks * info.bytes_per_store_block,
        tail_length=info.tail_blocks * info.block_size,
        store_bits=pool.store_bits,
        ratio=(info.num_blocks + info.store_blocks) * info.bytes_per_block / info.cache_bytes,
    )


def stored_blocks(position: int, block_size: int, tail_blocks: int) -> int:
    """How many leading blocks the query at `position` reads from the store: q(p)."""
    stored = (position + 1) // block_size - tail_blocks
    return stored if stored > 0 else 0


def store_vector_bytes(head_size: int, bits: int) -> int:
    """Bytes of one key or value vector of one KV head in the store: packed codes, one-byte scale, one-byte offset."""
    if bits == 4 and head_size % 2:
        raise InvalidRequestError(
            f"store_bits is 4 and the model's heads have {head_size} values; one byte holds two, so their number must be "
            "even; use 8 bits",
            field="store_bits",
        )
    return head_size * bits // 8 + 2


def longest_context(model_context: int, sizes: PoolSizes, block_size: int, tail_blocks: int) -> int:
    """Tokens of the longest sequence that the model and the tiers allow."""
    return min(model_context, (sizes.store + tail_blocks) * block_size)


def longest_sequence(info: BackendInfo) -> int:
    """Tokens of the longest sequence that a backend's cache can hold alone, with one tier or two."""
    if not info.store_blocks:
        return min(info.max_context, info.num_blocks * info.block_size)
    # A sequence needs its tail, the block it writes, and one that is moving to the store.
    if info.num_blocks < info.tail_blocks + 2:
        raise InvalidRequestError(
            f"the cache has {info.num_blocks} full blocks; a tail of {info.tail_blocks} needs at least "
            f"{info.tail_blocks + 2}; allow more memory, or a shorter tail_length",
            field="num_blocks",
        )
    sizes = PoolSizes(info.num_blocks, info.store_blocks)
    return longest_context(info.max_context, sizes, info.block_size, info.tail_blocks)


def choose_sizes(
    pool: KvCachePoolConfig,
    *,
    block_bytes: int,
    store_block_bytes: int,
    free_memory: int,
    model_context: int,
    step_tokens: int,
) -> PoolSizes:
    """The sizes of both tiers: as configured, or from the configured memory, or from `free_memory`."""
    if pool.num_blocks is not None and pool.store_blocks is not None:
        return PoolSizes(pool.num_blocks, pool.store_blocks)
    expected = pool.expected_context or min(DEFAULT_EXPECTED_CONTEXT, model_context)
    return split_memory(
        free_memory if pool.memory is None else pool.memory,
        block_bytes=block_bytes,
        store_block_bytes=store_block_bytes,
        block_size=pool.block_size,
        tail_blocks=pool.tail_blocks,
        expected_context=expected,
        step_tokens=step_tokens,
    )


def split_memory(
    memory: int,
    *,
    block_bytes: int,
    store_block_bytes: int,
    block_size: int,
    tail_blocks: int,
    expected_context: int,
    step_tokens: int,
) -> PoolSizes:
    """Splits memory so that sequences of the expected length fill both tiers at the same time.

    A sequence needs full blocks for its tail and the block it writes, and store blocks for the rest. Prompts in
    progress need more full blocks for a short time, up to the tokens of a step. With little memory they get fewer, and
    are computed in smaller chunks.
    """
    smallest = PoolSizes(tail_blocks + 2, 2)
    smallest_bytes = smallest.full * block_bytes + smallest.store * store_block_bytes
    if memory < smallest_bytes:
        raise InvalidRequestError(
            f"memory is {memory} bytes, and a tail of {tail_blocks * block_size} tokens with two blocks of {block_size} in "
            f"the store takes {smallest_bytes}; allow more, or a shorter tail_length",
            field="memory",
        )
    full_each = tail_blocks + 1
    store_each = max(1, -(-expected_context // block_size) - tail_blocks)
    for_prompts = min(-(-step_tokens // block_size), memory // block_bytes // 256)
    sequences = (memory - for_prompts * block_bytes) / (
        full_each * block_bytes + store_each * store_block_bytes
    )
    full = max(smallest.full, for_prompts + int(sequences * full_each))
    full = min(full, (memory - smallest.store * store_block_bytes) // block_bytes)
    return PoolSizes(full, (memory - full * block_bytes) // store_block_bytes)
