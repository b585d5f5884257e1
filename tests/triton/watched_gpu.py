"""A device that tracks every allocation, and can fail them."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from weft.ops.triton.device import Device


class WatchedGpu(Device):
    """Tracks which of its tensors are alive. From allocation number `refuse_from` on, it is out of memory."""

    def __init__(self, name: str, refuse_from: int | None = None) -> None:
        super().__init__(name)
        self.refuse_from = refuse_from
        self.taken: list[weakref.ref[torch.Tensor]] = []
        self.num_released = 0

    @property
    def alive(self) -> int:
        return sum(tensor() is not None for tensor in self.taken)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return self._watched(super().empty(*shape, dtype=dtype))

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return self._watched(super().zeros(*shape, dtype=dtype))

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return self._watched(super().pinned(*shape, dtype=dtype))

    def release(self) -> None:
        self.num_released += 1
        super().release()

    def _watched(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.refuse_from is not None and len(self.taken) >= self.refuse_from:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        self.taken.append(weakref.ref(tensor))
        return tensor


SHAPE: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 60,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
