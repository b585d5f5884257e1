"""The arithmetic of the two-tier KV cache: which blocks a position reads from which tier, and how large the pools are.

    blocks   0 .................. q(p) ............... p // B
             [ store: quantised  )[ tail: full precision   ]       what the query at position p reads

The border q(p) follows from the position alone, so batching, chunking, preemption, swapping and prefix hits cannot move
it. Scheduler and backends both count with these functions.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.config import KvCachePoolConfig
from weft.errors import InvalidRequestError
from weft.plan import BackendInfo

DEFAULT_EXPECTED_CONTEXT = 4096


class PoolSizes(NamedTuple):
    """How many blocks of each tier. They share one id space: full blocks come first, store blocks after them."""

    full: int
    store: int


def stored_blocks(position: int, block_size: int, tail_blocks: int) -> int:
    """How many leading blocks the query at `position` reads from the store: q(p)."""
    stored = (position + 1) // block_size - tail_blocks
    return stored if stored > 0 else 0


def store_vector_bytes(head_size: int, bits: int) -> int:
    """What the store keeps of one key or value vector of one KV head: packed codes, a scale of one byte and an offset of
    one byte."""
    if bits == 4 and head_size % 2:
        raise InvalidRequestError(
            f"store_bits is 4 and the model's heads have {head_size} values; two go into a byte, so their number must be "
            "even; use 8 bits",
            field="store_bits",
        )
    return head_size * bits // 8 + 2


def longest_context(model_context: int, sizes: PoolSizes, block_size: int, tail_blocks: int) -> int:
    """Tokens of the longest sequence that the pools can hold, and the model too."""
    return min(model_context, (sizes.store + tail_blocks) * block_size)


def longest_sequence(info: BackendInfo) -> int:
    """Tokens of the longest sequence that a backend's cache can hold, alone, whatever its kind."""
    if not info.store_blocks:
        return min(info.max_context, info.num_blocks * info.block_size)
    # Its tail, the block it writes, and one that is leaving for the store.
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
    """The pools of a two-tier cache: as asked for, or from its memory, or from the `free_memory` that there is."""
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
    """Splits bytes so that sequences of the expected length use both pools up together.

    A sequence takes its tail and the block it writes in full, and the rest in the store. Prompts under way need more
    full blocks for a moment, up to a step's tokens; with little memory they get a smaller part of it and are computed
    in smaller chunks.
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
