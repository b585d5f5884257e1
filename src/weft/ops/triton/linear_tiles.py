"""Tile sizes of products, by number of tokens and size of the weight.

They were measured on an H200, with the shapes of models with 0.6 and 8 billion weights, in chains of dependent launches
as in a forward pass. A kernel that is measured alone may be fastest with another tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from weft.ops.triton.device import INTERPRETED, ceil_divide, power_of_two

MOST_SKINNY = 64
"""With more tokens than this, cuBLAS multiplies, except in the batch-invariant mode."""
_MANY_OUTPUTS = 32768
_SMALL_WEIGHT = 4 << 20
_LARGE_WEIGHT = 64 << 20
_MANY_TILES = 200
"""More programs than any GPU has multiprocessors."""


@dataclass(frozen=True)
class Tile:
    """The part of a product that one program computes at a time."""

    tokens: int
    outputs: int
    inputs: int
    warps: int
    stages: int = 1
    early: bool = True
    """True: the first weights are loaded before the previous kernel has ended."""
    ahead: int = 0
    """Number of weights of each output that are prefetched into the L2 cache before the previous kernel has ended. They
    follow the weights that are loaded early."""
    release: int = -1
    """The next kernel may begin when this kernel has this many loop iterations left; -1: at once. A next kernel that
    begins late prefetches its weights at the end of this kernel, when memory is idle."""
    together: int = 1
    """Number of token tiles that use a weight tile one after the other while it is in the L2 cache."""
    norm_inside: bool = True
    """True: every program computes the norm itself; False: a separate kernel computes it once."""


@cache
def gemv_tile(tokens: int, outputs: int, inputs: int, has_norm: bool) -> Tile | None:
    """The tile of `_gemv` for one token, and for two to four tokens if the weight is small and tensor cores are not
    faster. None: use `skinny_tile`.

    Each program loads 4 to 16 KiB of bfloat16 weights at a time. With a norm, more work is done per loaded value.
    Then programs with few rows are faster: more of them run at the same time.
    """
    if tokens > 1:
        return _few_tokens_tile(tokens, outputs, inputs, has_norm)
    if inputs <= 1024:
        if outputs <= 4096:
            tile = Tile(1, 8, 1024, 8)
        else:
            tile = Tile(1, 8, 512, 4) if outputs > _MANY_OUTPUTS else Tile(1, 4, 512, 2)
    elif inputs == 2048:
        tile = Tile(1, 4, 2048, 8) if has_norm or outputs > 2048 else Tile(1, 8, 1024, 8)
    elif has_norm:
        tile = Tile(1, 2, 4096, 4) if outputs > 8192 else Tile(1, 2, 1024, 4, release=0)
    elif inputs > 8192:
        tile = Tile(1, 2, 1024, 4)
    elif outputs > _MANY_OUTPUTS:
        tile = Tile(1, 2, 4096, 4)
    elif outputs > 2048:
        tile = Tile(1, 2, 1024, 4, release=0)
    else:
        tile = Tile(1, 4, 1024, 8, ahead=inputs)
    return _fitted(tile, inputs, 256)


def _few_tokens_tile(tokens: int, outputs: int, inputs: int, has_norm: bool) -> Tile | None:
    """The tile for two to four tokens; None if tensor cores are faster."""
    if tokens > 4 or outputs * inputs > _SMALL_WEIGHT or (has_norm and tokens > 2):
        return None
    if has_norm:
        tile = Tile(2, 4, 512, 2, release=0)
    elif inputs <= 2048:
        tile = Tile(2, 8, 1024, 8)
    else:
        tile = Tile(2, 4, 1024, 4) if tokens == 2 else Tile(4, 2, 1024, 2)
    return _fitted(replace(tile, tokens=power_of_two(tokens), ahead=inputs), inputs, 256)


@cache
def skinny_tile(tokens: int, outputs: int, inputs: int, has_norm: bool) -> Tile | None:
    """The tile of `_tile` for a few tokens. None: cuBLAS is faster, even with norm and gate as separate kernels.
    Measured with 2, 4, 8, 16, 32 and 64 tokens."""
    is_large = outputs * inputs > _LARGE_WEIGHT
    if tokens <= 16:
        few = 8 if tokens <= 8 else 16
        if has_norm:
            if is_large:
                tile = Tile(16, 64, 128, 4, 4, early=False, ahead=256, release=2, norm_inside=False)
            else:
                tile = Tile(16, 64, 256, 4, 4, early=False, ahead=512, release=2, norm_inside=inputs <= 2048)
        elif outputs <= 2048:
            if inputs <= 2048:
                tile = Tile(few, 64, 256, 4, 4, early=False, ahead=512, release=4)
            else:
                tile = Tile(few, 32, 512, 4, 3, early=False, ahead=inputs)
        elif outputs <= _MANY_OUTPUTS:
            tile = Tile(few, 32, 512, 4, 4, early=False, ahead=512, release=2)
        else:
            tile = Tile(16, 64, 128, 4, 4, early=inputs > 1024)
        return _fitted(tile, inputs)
    if tokens <= 32:
        if has_norm:
            return _fitted(Tile(32, 64, 256, 4, 3), inputs) if inputs <= 2048 else None
        if outputs <= 2048:
            return _fitted(Tile(32, 16, 512, 4, 3), inputs)
        if outputs <= _MANY_OUTPUTS and inputs > 8192:
            return None
        return _fitted(Tile(32, 64, 128, 4, 4), inputs)
    if outputs > _MANY_OUTPUTS and is_large and not has_norm:
        return Tile(64, 128, 64, 4, 4)
    return None


@cache
def small_tile(tokens: int, inputs: int) -> Tile:
    """A tile whose numbers of outputs and inputs are the same for any number of tokens. An instruction computes each token
    in a column of its own. So the sums of a token do not depend on the number of tokens."""
    token_tile = max(16, min(128, power_of_two(tokens)))
    return _fitted(Tile(token_tile, 64, 64, 4, 4, early=False, norm_inside=False), inputs)


@cache
def invariant_tile(tokens: int, outputs: int, inputs: int, dtype: torch.dtype) -> Tile:
    """The tile for the batch-invariant mode. In bfloat16 on a GPU, all tiles below give bitwise equal outputs: each output
    adds its products in input order, 16 with each tensor-core instruction."""
    if INTERPRETED.value or dtype == torch.float32:
        # In float32 and in the interpreter, the summation order depends on the tile sizes, so there is only one tile.
        return small_tile(tokens, inputs)
    if tokens <= 16:
        tile = Tile(16, 64, 256 if inputs > 8192 or outputs <= 2048 else 128, 4, 4)
    elif tokens <= 64:
        tile = Tile(power_of_two(tokens), 64, 128, 4, 3 if outputs * inputs > _LARGE_WEIGHT else 4)
    elif ceil_divide(tokens, 256) * ceil_divide(outputs, 128) >= _MANY_TILES:
        tile = Tile(256, 128, 64, 8, 4, together=8)
    elif outputs <= 2048:
        tile = Tile(64, 64, 128, 4, 4)
    elif outputs <= 4096:
        tile = Tile(64, 128, 128, 4, 3)
    else:
        tile = Tile(128, 128, 64, 8, 4, together=16)
    return _fitted(replace(tile, early=False, norm_inside=False), inputs)


def _fitted(tile: Tile, inputs: int, least: int = 64) -> Tile:
    """Reduces the tile's `inputs` to a power of two that divides the row length, so that no masks are needed. If that
    would be below `least`, the tile has masks instead."""
    step = min(tile.inputs, inputs & -inputs)
    if step < least:
        step = max(16, min(tile.inputs, power_of_two(inputs)))
    return replace(tile, inputs=step)
