"""Steps over a paged cache for the tests of the attention and RoPE kernels, and the expected results from numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weft.ops.base import AttentionPattern, AttentionShape, QkNorm, Rope, StepIndices
from weft.ops.reference import ReferenceOps
from weft.ops.triton.device import Device
from weft.ops.triton.device_batch import DeviceBatch

LAYERS, LAYER = 2, 1
NO_ROPE = Rope((), interleaved=False)

# The data type of the cache, and the allowed distance from float64: queries, weights and results are rounded to the
# type. The interpreter rounds by truncation.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Part:
    """A request with `cached` tokens in the cache and `count` new ones."""

    cached: int
    count: int

    @property
    def context(self) -> int:
        return self.cached + self.count


@dataclass(frozen=True)
class Case:
    """One step. The first `decodes` parts are computed by the decode kernel."""

    parts: Sequence[Part]
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    window: int | None = None
    cap: float | None = None
    decodes: int = 0
    padding: int = 0

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.heads, self.kv_heads, self.head_size, self.head_size**-0.5, self.cap)

    @property
    def tokens(self) -> int:
        return sum(part.count for part in self.parts)

    @property
    def longest_context(self) -> int:
        return max(part.context for part in self.parts)


class Step:
    """A case with its blocks in random order; cells of no request are NaN."""

    def __init__(self, case: Case, device: Device, dtype: torch.dtype = torch.float32) -> None:
        self.case, self.device, self.dtype = case, device, dtype
        rng = np.random.default_rng(1)
        counts = [-(-part.context // case.block_size) for part in case.parts]
        self.blocks = sum(counts) + 3
        free = rng.permutation(self.blocks).astype(np.int64)
        self.block_tables = np.zeros((len(case.parts), max(counts)), np.int64)
        for request, count in enumerate(counts):
            self.block_tables[request, :count], free = free[:count], free[count:]
        self.content = rng.standard_normal(
            (len(case.parts), case.longest_context, 2, case.kv_heads, case.head_size)
        )
        width = (case.heads + 2 * case.kv_heads) * case.head_size
        self.qkv = self._rounded(2.0 * rng.standard_normal((case.tokens, width)))
        positions = [np.arange(part.cached, part.context) for part in case.parts]
        starts = np.cumsum([0, *(part.count for part in case.parts)])
        cells = [
            self.block_tables[request, places // case.block_size] * case.block_size + places % case.block_size
            for request, places in enumerate(positions)
        ]
        self.indices = StepIndices(
            token_ids=np.zeros(case.tokens, np.int64),
            positions=np.concatenate(positions),
            cells=np.concatenate(cells),
            query_starts=starts,
            context_lengths=np.array([part.context for part in case.parts]),
            block_tables=self.block_tables,
            logit_indices=starts[1:] - 1,
        )

    def _rounded(self, values: np.ndarray) -> np.ndarray:
        """Rounds to the type under test, so that both sides start with the same numbers."""
        return torch.from_numpy(values).to(self.dtype).to(torch.float64).numpy()

    def tensor(self, values: np.ndarray, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.from_numpy(values).to(dtype or self.dtype).to(self.device.torch_device)

    def cache(self, filled: bool) -> np.ndarray:
        """The cache in the layout of the reference, filled with the contexts or empty."""
        case = self.case
        cache = np.full(
            (self.blocks, LAYERS, 2, case.block_size, case.kv_heads, case.head_size), np.nan, np.float64
        )
        for request, part in enumerate(case.parts):
            places = np.arange(part.context if filled else 0)
            blocks = self.block_tables[request, places // case.block_size]
            content = self.content[request, : len(places)]
            cache[blocks, LAYER, :, places % case.block_size] = self._rounded(content)
        return cache

    def device_cache(self, cache: np.ndarray) -> torch.Tensor:
        return self.tensor(np.ascontiguousarray(cache.transpose(0, 1, 2, 4, 3, 5)))

    def batch(self) -> DeviceBatch:
        """The table rows are not in the order of the requests; padded requests come last."""
        case, step = self.case, self.indices
        requests = len(case.parts) + case.padding
        row_of = np.arange(requests)[::-1] + 1
        tables = np.full((requests + 2, self.block_tables.shape[1] + 1), 1 << 30, np.int64)
        for request, part in enumerate(case.parts):
            used = -(-part.context // case.block_size)
            tables[row_of[request], :used] = self.block_tables[request, :used]

        def padded(values: np.ndarray, filler: int) -> np.ndarray:
            return np.concatenate([values, np.full(case.padding, filler, np.int64)])

        def integers(values: np.ndarray) -> torch.Tensor:
            return self.tensor(np.ascontiguousarray(values), torch.int32)

        return DeviceBatch(
            tokens=case.tokens + case.padding,
            requests=requests,
            sampled=requests,
            longest_query=max(part.count for part in case.parts),
            longest_context=case.longest_context,
            token_ids=integers(padded(step.token_ids, 0)),
            positions=integers(padded(step.positions, 0)),
            cells=self.tensor(padded(step.cells, -1), torch.int64),
            rows=integers(row_of),
            query_starts=integers(
                np.concatenate([step.query_starts, case.tokens + 1 + np.arange(case.padding)])
            ),
            context_lengths=integers(padded(step.context_lengths, 0)),
            tables=integers(tables),
            logit_indices=integers(padded(step.logit_indices, 0)),
            decodes=case.decodes,
        )

    def device_qkv(self) -> torch.Tensor:
        padding = np.full((self.case.padding, self.qkv.shape[1]), 5.0)
        return self.tensor(np.concatenate([self.qkv, padding]))

    def expected_attention(self) -> np.ndarray:
        """float64 [tokens, heads * head size]"""
        ops, shape, cache = ReferenceOps(np.float64), self.case.shape, self.cache(filled=True)
        prepared = ops.prepare(self.indices, cache, shape, [AttentionPattern(NO_ROPE, self.case.window)])
        queries = self.qkv[:, : shape.heads * shape.head_size].reshape(-1, shape.heads, shape.head_size)
        with np.errstate(invalid="ignore"):
            return ops.paged_attention(prepared, queries, cache, LAYER, 0)

    def expected_rope(self, rope: Rope, norm: QkNorm | None) -> tuple[np.ndarray, np.ndarray]:
        """Returns the queries, float64 [tokens, heads * head size], and the cache."""
        ops, cache = ReferenceOps(np.float64), self.cache(filled=False)
        prepared = ops.prepare(self.indices, cache, self.case.shape, [AttentionPattern(rope)])
        queries = ops.rope_and_write(prepared, self.qkv, cache, LAYER, 0, norm)
        return queries.reshape(len(self.qkv), -1), cache
