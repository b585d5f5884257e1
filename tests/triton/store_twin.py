"""The format of quantised vectors in numpy: what the kernels of the store are held to."""

from __future__ import annotations

import numpy as np
import torch

from weft.ops.triton.store import Store

FIRST_SCALE = (127 - 18) << 23


def quantised(vectors: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of vectors [..., head size]: codes, scale bytes and offsets, as whole numbers."""
    x = vectors.astype(np.float32)
    is_number = np.isfinite(x).all(-1)
    x = np.where(is_number[..., None], x, np.float32(0))
    low, high = np.minimum(x.min(-1), 0), np.maximum(x.max(-1), 0)
    exact = (high - low) / np.float32(255 if bits == 8 else 15)
    scale_code = ((exact.view(np.int32) + (1 << 20) - 1) >> 20) - (FIRST_SCALE >> 20)
    scale_code = np.clip(scale_code, 0, 254)
    scale = scale_value(scale_code)[..., None]
    if bits == 8:
        offset = np.clip(np.rint(-low[..., None] / scale), 0, 255)
        codes = np.clip(np.rint(x / scale) + offset, 0, 255)
    else:
        offset = np.clip(np.rint(-low[..., None] / scale * np.float32(16)), 0, 255)
        codes = np.clip(np.rint(x / scale + offset / np.float32(16)), 0, 15)
    return (
        codes.astype(np.int64),
        np.where(is_number, scale_code, 255).astype(np.int64),
        offset[..., 0].astype(np.int64),
    )


def scale_value(code: np.ndarray) -> np.ndarray:
    values = ((code.astype(np.int64) << 20) + FIRST_SCALE).astype(np.int32).view(np.float32)
    return np.where(code == 255, np.float32(np.nan), values)


def restored(vectors: np.ndarray, bits: int) -> np.ndarray:
    """What vectors are once they were quantised: float64."""
    codes, scale_code, offset = quantised(vectors, bits)
    step = offset / (1 if bits == 8 else 16)
    return scale_value(scale_code)[..., None].astype(np.float64) * (codes - step[..., None])


def kept(store: Store, block_size: int, head_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All that a store holds: codes [blocks, layers, kv heads, 2, block size, head size], scale bytes and offsets."""
    parts = store.codes.cpu().numpy().view(np.uint8)
    code_bytes = head_size * store.format.bits // 8
    length = block_size * code_bytes
    keys = parts[..., :length].reshape(*parts.shape[:-1], block_size, code_bytes)
    values = parts[..., length : 2 * length].reshape(*parts.shape[:-1], code_bytes, block_size)
    packed = np.stack([keys, values.swapaxes(-1, -2)], axis=-3)
    if store.format.bits == 8:
        codes = packed ^ 128
    else:
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], head_size)
    words = parts[..., 2 * length :].reshape(*parts.shape[:-1], block_size, 2, 2).swapaxes(-2, -3)
    return codes.astype(np.int64), words[..., 0].astype(np.int64), (words[..., 1] ^ 128).astype(np.int64)


def put_away(store: Store, cache: torch.Tensor, pairs: list[tuple[int, int]], layer: int | None = None) -> None:
    """Moves full blocks to blocks of the store: (from, to)."""
    from weft.ops.triton.store import Moves

    parcel = torch.tensor([source for source, _ in pairs] + [target for _, target in pairs])
    store.move(cache, Moves(parcel.to(cache.device, torch.int32), len(pairs)), layer)
