"""The two-tier cache of `reference`: which blocks queries read from which tier, and moves to the store."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.ops.base import StepIndices, TwoTierCache
from weft.ops.store_format import dequantise, dequantise_keys, quantise, quantise_keys


@dataclass(frozen=True)
class ReadBlocks:
    """The blocks that queries read, in token order."""

    tables: np.ndarray  # [..., blocks]
    is_stored: np.ndarray | None = None  # bool [..., blocks]: read from the store; None: there is no store
    store_tables: np.ndarray | None = None  # [..., blocks]


def read_blocks(
    step: StepIndices,
    requests: np.ndarray,
    columns: np.ndarray,
    positions: np.ndarray,
    block_size: int,
    tail_blocks: int,
) -> ReadBlocks:
    """The blocks that queries at `positions` read from these columns of the block tables. All arguments broadcast."""
    if step.store is None:
        return ReadBlocks(step.block_tables[requests, columns])
    is_stored = columns < (positions + 1) // block_size - tail_blocks  # as `weft.tiers.stored_blocks`
    # The table of the store has no columns for the tail.
    valid = np.where(is_stored, columns, 0)
    store_tables = step.store.tables[requests, valid] if step.store.tables.size else np.zeros_like(valid)
    return ReadBlocks(step.block_tables[requests, columns], is_stored, store_tables)


def move_blocks(cache: TwoTierCache, layer: int, step: StepIndices) -> None:
    """Quantises one layer of the blocks that the step moves to the store."""
    assert step.store is not None, "a step over a two-tier cache has StoreIndices"
    blocks, targets = cache.full[step.store.moved_from, layer], (step.store.moved_to, layer)
    cache.store[*targets, 0] = quantise_keys(blocks[:, 0], cache.bits)
    cache.store[*targets, 1] = quantise(blocks[:, 1], cache.bits)


def gather(cache: np.ndarray | TwoTierCache, layer: int, blocks: ReadBlocks) -> tuple[np.ndarray, np.ndarray]:
    """Copies of keys and values, each [..., blocks, block size, kv heads, head size]."""
    if not isinstance(cache, TwoTierCache):
        return cache[blocks.tables, layer, 0], cache[blocks.tables, layer, 1]
    assert blocks.is_stored is not None and blocks.store_tables is not None
    keys, values = cache.full[blocks.tables, layer, 0], cache.full[blocks.tables, layer, 1]
    stored = cache.store[blocks.store_tables[blocks.is_stored], layer]
    keys[blocks.is_stored] = dequantise_keys(stored[:, 0], cache.bits, keys.dtype)
    values[blocks.is_stored] = dequantise(stored[:, 1], cache.bits, keys.dtype)
    return keys, values
