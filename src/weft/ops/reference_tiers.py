"""What queries read of either tier of a cache, and moves to the store, in numpy: a part of `weft.ops.reference`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.ops.base import StepIndices, TwoTierCache
from weft.ops.store_format import dequantise, dequantise_keys, quantise, quantise_keys


@dataclass(frozen=True)
class Blocks:
    """Blocks that are read, in the order of their content."""

    tables: np.ndarray  # [..., blocks]
    is_stored: np.ndarray | None = None  # bool [..., blocks]: read from the store; None: there is none
    store_tables: np.ndarray | None = None  # [..., blocks]


def read_blocks(
    step: StepIndices,
    requests: np.ndarray,
    columns: np.ndarray,
    positions: np.ndarray,
    block_size: int,
    tail_blocks: int,
) -> Blocks:
    """These columns of the requests' tables, as queries at these positions read them; all broadcast together."""
    if step.store is None:
        return Blocks(step.block_tables[requests, columns])
    # `weft.tiers.stored_blocks`, of many at once
    is_stored = columns < (positions + 1) // block_size - tail_blocks
    # The table of the store ends before the tail.
    there = np.where(is_stored, columns, 0)
    store_tables = step.store.tables[requests, there] if step.store.tables.size else np.zeros_like(there)
    return Blocks(step.block_tables[requests, columns], is_stored, store_tables)


def move_blocks(cache: TwoTierCache, layer: int, step: StepIndices) -> None:
    """A layer's part of the blocks that a step moves."""
    assert step.store is not None, "a step over a two-tier cache says what it reads from the store"
    blocks, places = cache.full[step.store.moved_from, layer], (step.store.moved_to, layer)
    cache.store[*places, 0] = quantise_keys(blocks[:, 0], cache.bits)
    cache.store[*places, 1] = quantise(blocks[:, 1], cache.bits)


def gather(cache: np.ndarray | TwoTierCache, layer: int, blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """Fresh keys and values of blocks: [..., blocks, block size, kv heads, head size]."""
    if not isinstance(cache, TwoTierCache):
        return cache[blocks.tables, layer, 0], cache[blocks.tables, layer, 1]
    assert blocks.is_stored is not None and blocks.store_tables is not None
    keys, values = cache.full[blocks.tables, layer, 0], cache.full[blocks.tables, layer, 1]
    stored = cache.store[blocks.store_tables[blocks.is_stored], layer]
    keys[blocks.is_stored] = dequantise_keys(stored[:, 0], cache.bits, keys.dtype)
    values[blocks.is_stored] = dequantise(stored[:, 1], cache.bits, keys.dtype)
    return keys, values
