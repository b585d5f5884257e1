"""The content of a store on the device in the format of `weft.ops.store_format`, and moves of blocks to it."""

from __future__ import annotations

import numpy as np
import torch

from weft.ops.base import TwoTierCache
from weft.ops.store_format import dequantise, quantise, rotate, rotates_keys
from weft.ops.triton.device import Device
from weft.ops.triton.store import Moves, move_to_store


def stored_vectors(cache: TwoTierCache) -> np.ndarray:
    """uint8 [blocks, layers, 2, kv heads, block size, bytes of a vector]"""
    _, _, _, _, block_size, head_size = cache.full.shape
    parts = cache.store.cpu().numpy().view(np.uint8)
    code_bytes = head_size * cache.bits // 8
    length = block_size * code_bytes
    keys = parts[..., :length].reshape(*parts.shape[:-1], block_size, code_bytes)
    values = parts[..., length : 2 * length].reshape(*parts.shape[:-1], code_bytes, block_size)
    codes = np.stack([keys, values.swapaxes(-1, -2)], axis=2)
    ends = parts[..., 2 * length :].reshape(*parts.shape[:-1], block_size, 2, 2)
    ends = np.moveaxis(ends, -2, 2) ^ np.array([0, 128], np.uint8)
    return np.concatenate([codes ^ np.uint8(128) if cache.bits == 8 else codes, ends], axis=-1)


def laid_out(vectors: np.ndarray, bits: int) -> np.ndarray:
    """The inverse: int8 [..., kv heads, bytes] of quantised vectors [..., 2, kv heads, block size, bytes]."""
    codes, ends = vectors[..., :-2], vectors[..., -2:] ^ np.array([0, 128], np.uint8)
    if bits == 8:
        codes = codes ^ np.uint8(128)
    keys, values = np.moveaxis(codes, -4, 0)
    words = np.moveaxis(ends, -4, -2)
    parts = [keys, values.swapaxes(-1, -2), words]
    return np.concatenate([part.reshape(*keys.shape[:-2], -1) for part in parts], axis=-1).view(np.int8)


def quantised(vectors: np.ndarray, bits: int) -> np.ndarray:
    """Quantises vectors [..., 2, kv heads, block size, head size] like the store; with 4 bits the keys are rotated."""
    keys, values = vectors[..., :1, :, :, :], vectors[..., 1:, :, :, :]
    if rotates_keys(bits):
        with np.errstate(invalid="ignore", over="ignore"):
            keys = rotate(keys.astype(np.float32))
    return np.concatenate([quantise(keys, bits), quantise(values, bits)], axis=-4)


def restored(vectors: np.ndarray, bits: int) -> np.ndarray:
    """Vectors [..., 2, kv heads, head size] after quantisation and dequantisation: float64."""
    stored = dequantise(quantised(vectors[..., None, :], bits), bits, np.float64)[..., 0, :]
    if rotates_keys(bits):
        stored[..., 0, :, :] = rotate(stored[..., 0, :, :])
    return stored


def put_away(
    cache: TwoTierCache, pairs: list[tuple[int, int]], device: Device, layer: int | None = None
) -> None:
    """Moves full blocks to blocks of the store: (from, to)."""
    parcel = torch.tensor([source for source, _ in pairs] + [target for _, target in pairs])
    move_to_store(cache, Moves(parcel.to(device.torch_device, torch.int32), len(pairs)), device, layer)
