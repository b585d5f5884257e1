"""The ops that record a decoder for the C++ kernels. They define the layout of weights and KV cache."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import numpy as np

from weft import _kernels
from weft.ops.base import AttentionShape, LinearRole, WeightSource
from weft.ops.cpu.weights import Experts, Linear, Packing
from weft.ops.recording import RecordingOps
from weft.tiers import store_vector_bytes


class CpuOps(RecordingOps):
    """`Ops` that records the forward pass and collects the weights in `packing`."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing

    def load_vector(self, source: WeightSource, offset: float = 0.0) -> np.ndarray:
        return source.to_float32() + np.float32(offset)

    def load_linear(
        self,
        sources: Sequence[WeightSource],
        biases: Sequence[WeightSource] = (),
        role: LinearRole = "layer",
    ) -> Linear:
        return self.packing.linear(sources, biases, role)

    def load_experts(
        self, gate: Sequence[WeightSource], up: Sequence[WeightSource], down: Sequence[WeightSource]
    ) -> Experts:
        return Experts(*(self.packing.experts(sources) for sources in (gate, up, down)))

    def load_embedding(self, source: WeightSource) -> Linear:
        return self.packing.linear([source], role="vocabulary")

    def nbytes(self, weight: np.ndarray | Linear | Experts) -> int:
        return weight.nbytes

    def new_cache(self, blocks: int, layers: int, block_size: int, shape: AttentionShape) -> np.ndarray:
        """Unlike in the numpy cache, K and V of one KV head in a block are contiguous. They are integers with scales
        (`CachedHead` in csrc/kernels/kernels.h)."""
        words = _kernels.cache_room(block_size, shape.head_size)
        return _in_large_pages((blocks, layers, shape.kv_heads, block_size, words), np.uint16)

    def new_store(
        self, blocks: int, layers: int, block_size: int, shape: AttentionShape, bits: int
    ) -> np.ndarray:
        """One KV head of a block is contiguous here too (`StoredHead` in csrc/kernels/kernels.h)."""
        head_bytes = 2 * block_size * store_vector_bytes(shape.head_size, bits)
        return _in_large_pages((blocks, layers, shape.kv_heads, head_bytes), np.uint8)


def _in_large_pages(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Returns zeros, in large pages if the system has them: the blocks of a sequence are scattered, so small pages
    would cause many TLB misses."""
    count = math.prod(shape)
    # MAP_PRIVATE: Linux uses large pages for shared memory (the default of mmap) only if an administrator allows it.
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    try:
        memory = mmap.mmap(-1, max(1, count * np.dtype(dtype).itemsize), **private)
    except (OSError, OverflowError) as error:
        raise MemoryError(str(error)) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype, count).reshape(shape)
