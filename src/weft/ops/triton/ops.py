"""The ops that record a decoder for a CUDA device, and the format of its weights and cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.ops.base import AttentionShape, LinearRole, WeightSource
from weft.ops.recording import RecordingOps
from weft.ops.triton.device import Device
from weft.ops.triton.store import new_store
from weft.ops.triton.weights import Experts, Linear, Loader


class TritonOps(RecordingOps):
    """`Ops` that records the forward pass. Weights, activations and cache have one data type."""

    def __init__(self, device: Device, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device = device
        self.dtype = dtype
        self._loader = Loader(device, dtype)

    def load_vector(self, source: WeightSource, offset: float = 0.0) -> Tensor:
        return self._loader.vector(source, offset)

    def load_linear(
        self,
        sources: Sequence[WeightSource],
        biases: Sequence[WeightSource] = (),
        role: LinearRole = "layer",
    ) -> Linear:
        return self._loader.linear(sources, biases)

    def load_experts(
        self, gate: Sequence[WeightSource], up: Sequence[WeightSource], down: Sequence[WeightSource]
    ) -> Experts:
        return self._loader.experts(gate, up, down)

    def load_embedding(self, source: WeightSource) -> Linear:
        return self._loader.linear([source], [])

    def nbytes(self, weight: Tensor | Linear | Experts) -> int:
        return weight.nbytes

    def new_cache(self, blocks: int, layers: int, block_size: int, shape: AttentionShape) -> Tensor:
        """Unlike in the numpy cache, K of one KV head in a block is contiguous, and so is V."""
        return self.device.zeros(
            blocks, layers, 2, shape.kv_heads, block_size, shape.head_size, dtype=self.dtype
        )

    def new_store(
        self, blocks: int, layers: int, block_size: int, shape: AttentionShape, bits: int
    ) -> Tensor:
        return new_store(blocks, layers, block_size, shape, bits, self.device)
