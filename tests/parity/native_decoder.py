"""A decoder that runs the C++ program recorded from it, for tests that run decoders directly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from weft import _kernels
from weft.models.registry import build_decoder
from weft.ops.base import StepIndices, TwoTierCache, WeightSource
from weft.ops.cpu.program import record
from weft.ops.cpu.recording_ops import CpuOps
from weft.ops.cpu.weights import Packing, Quantize, in_memory
from weft.ops.recording import NO_STEP


class NativeDecoder:
    """The methods of `Decoder` that tests use. Returned arrays are copies."""

    def __init__(
        self,
        layout: Any,
        metadata: Mapping[str, Any],
        tensors: Mapping[str, WeightSource],
        max_context: int | None = None,
        threads: int = 2,
        quantize: Quantize | None = None,
    ) -> None:
        ops = CpuOps(Packing(quantize))
        decoder = build_decoder(layout, metadata, tensors, ops, max_context)
        self.config = decoder.config
        self.new_cache, self.new_store = decoder.new_cache, decoder.new_store
        self.pool = _kernels.Pool(threads)
        self._native = record(
            lambda: decoder.forward(NO_STEP, None), decoder.logits, ops, in_memory, self.pool
        )

    def forward(self, step: StepIndices, cache: np.ndarray | TwoTierCache) -> np.ndarray:
        return self._native.step(step, cache, 0)[1]

    def step(
        self, step: StepIndices, cache: np.ndarray | TwoTierCache, sampled: int
    ) -> tuple[np.ndarray, np.ndarray]:
        logits, rows = self._native.step(step, cache, sampled)
        return logits.copy(), rows

    def logits(self, rows: np.ndarray) -> np.ndarray:
        return self._native.logits(rows).copy()
