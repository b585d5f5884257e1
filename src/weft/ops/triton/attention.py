"""Attention over the paged cache: which kernel takes which requests of a step, in which tiles, and their workspace.

In the invariant mode a token's result is the same bits alone, in a batch, in a chunk and decoded: every context is cut
at the same positions, both kernels use the same tiles, and splits are joined in their order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.ops.base import AttentionShape, QkNorm
from weft.ops.triton.attention_decode import decode_attention
from weft.ops.triton.attention_dense import dense_attention, dense_attention_serves, is_dense
from weft.ops.triton.attention_prefill import prefill_attention
from weft.ops.triton.attention_turned import turned_attention
from weft.ops.triton.batch import DeviceBatch
from weft.ops.triton.device import Device
from weft.ops.triton.rope import RopeTables, rope_and_write

# The least number of rows that the tensor cores multiply.
_LEAST_ROWS = 16

# Measured on an H200: more programs than this for each processor cost more to join than they read faster.
_PROGRAMS_PER_PROCESSOR = 4
_MOST_SPLITS = 16

# A batch that fills the card cuts only what is longer than this, so that one long context does not hold up the others.
_LONG_CONTEXT = 1024

# Up to so many requests, rope and attention are one launch: beyond, memory is what costs, and early reads hold registers.
_MOST_TURNED_REQUESTS = 32

# In the invariant mode, where the number of splits is given by the context, it bounds the workspace.
_LEAST_FIXED_SPLIT, _MOST_FIXED_SPLITS = 512, 32


@dataclass(frozen=True)
class Tiles:
    """How a kernel cuts its work: rows of queries, positions of the context, and what works on them."""

    rows: int
    positions: int
    warps: int
    stages: int


class Attention:
    """Attention of one shape and window, for every layer that has it; one step at a time."""

    def __init__(
        self,
        shape: AttentionShape,
        window: int | None,
        max_requests: int,
        max_context: int,
        device: Device,
        invariant: bool = False,
    ) -> None:
        self.shape = shape
        self.window = window
        self.device = device
        group = shape.heads // shape.kv_heads
        self.width = triton.next_power_of_2(shape.head_size)
        self.joined_rows = triton.next_power_of_2(group)
        rows = max(_LEAST_ROWS, self.joined_rows)
        self.decode_tiles = Tiles(rows, 64, 2, 3) if self.width <= 128 else Tiles(rows, 32, 4, 3)
        # A tile that is read early stands in registers: more threads hold it.
        self.turned_tiles = replace(self.decode_tiles, warps=4)
        self.fixed_split = 0
        if invariant:
            even = triton.next_power_of_2(triton.cdiv(max_context, _MOST_FIXED_SPLITS))
            self.fixed_split = max(_LEAST_FIXED_SPLIT, even)
            self.prefill_tiles = self.decode_tiles
        elif self.width <= 128:
            self.prefill_tiles = Tiles(max(128, self.joined_rows), 64, 8, 3)
        else:
            self.prefill_tiles = Tiles(max(64, self.joined_rows), 32, 4, 2)

        self.can_read_rows = not invariant and self.width == shape.head_size and device.dependent_launches
        """Whether the card copies tiles of rows by itself (a Hopper does), and heads make such tiles."""
        self.by_cudnn = not invariant and dense_attention_serves(shape, device)
        # One at a time in the invariant mode: a sum over several depends on where the first of them stands.
        self.joined_at_once = 1 if invariant else max(1, min(8, 4096 // (self.joined_rows * self.width)))
        pairs = max(
            requests * shape.kv_heads * self.splits(requests, max_context)[0]
            for requests in range(1, max_requests + 1)
        )
        self._split_mixed = device.empty(pairs * group * shape.head_size, dtype=torch.float32)
        self._split_peaks = device.empty(pairs * group, dtype=torch.float32)
        self._split_totals = device.empty(pairs * group, dtype=torch.float32)
        self.arrivals = device.zeros(max_requests * shape.kv_heads, dtype=torch.int32)
        """How many splits of a request and KV head are done; 0 between two launches."""

    def splits(self, requests: int, longest_context: int) -> tuple[int, int]:
        """The most splits of a request when so many are decoded, and how long one is at least.

        Without the invariant mode the context has no part in it: one graph serves any.
        """
        if self.fixed_split:
            seen = longest_context if self.window is None else min(longest_context, self.window)
            # A window that begins in the middle of a split needs one more.
            return triton.cdiv(seen, self.fixed_split) + (self.window is not None), self.fixed_split
        programs = requests * self.shape.kv_heads
        wanted = min(_PROGRAMS_PER_PROCESSOR * self.device.processors // programs, _MOST_SPLITS)
        if wanted >= 4:
            return wanted, self.decode_tiles.positions
        # Each program that finds nothing to do costs a little too.
        return (4 if wanted else 2), _LONG_CONTEXT // max(wanted, 1)

    def run(self, batch: DeviceBatch, queries: Tensor, cache: Tensor, layer: int, output: Tensor) -> None:
        """Each token over what it sees of its request's context, read from the cache, this step's tokens too.

        queries [tokens, heads * head size] may be a part of wider rows; output [tokens, heads * head size] may not.
        """
        decodes = batch.requests if batch.longest_query == 1 else batch.decodes
        if decodes:
            self._decode(batch, decodes, queries, cache, layer, output)
        if decodes < batch.requests:
            self._prefill(batch, decodes, queries, None, cache, layer, output)

    def turn_and_run(
        self,
        batch: DeviceBatch,
        qkv: Tensor,
        cache: Tensor,
        layer: int,
        tables: RopeTables,
        norm: QkNorm | None,
        output: Tensor,
    ) -> None:
        """`rope_and_write` and `run`, in one launch where that serves. The queries in `qkv` may then stay unturned."""
        if (
            batch.settled
            and batch.longest_query == 1
            and batch.requests <= _MOST_TURNED_REQUESTS
            and not self.fixed_split
            and (norm is None or len(norm.query) == self.shape.head_size)
        ):
            self._turn_and_decode(batch, qkv, cache, layer, tables, norm, output)
        else:
            rope_and_write(batch, qkv, cache, layer, tables, self.shape, norm)
            if self.by_cudnn and qkv.dtype != torch.float32 and is_dense(batch, self.window):
                dense_attention(batch, qkv, self.shape, output)
                return
            decodes = batch.requests if batch.longest_query == 1 else batch.decodes
            if decodes:
                self._decode(batch, decodes, qkv, cache, layer, output)
            if decodes < batch.requests:
                self._prefill(batch, decodes, qkv, qkv, cache, layer, output)

    def _turn_and_decode(
        self,
        batch: DeviceBatch,
        qkv: Tensor,
        cache: Tensor,
        layer: int,
        tables: RopeTables,
        norm: QkNorm | None,
        output: Tensor,
    ) -> None:
        most_splits, smallest_split = self.splits(batch.requests, batch.longest_context)
        turned_attention[(self.shape.kv_heads, most_splits, batch.requests)](
            qkv,
            output,
            cache,
            batch.tables,
            batch.rows,
            batch.context_lengths,
            batch.cells,
            tables.values,
            qkv if norm is None else norm.query,
            qkv if norm is None else norm.key,
            self._split_mixed,
            self._split_peaks,
            self._split_totals,
            self.arrivals,
            layer,
            batch.tables.stride(0),
            smallest_split,
            self.shape.scale,
            self.shape.score_cap or 0.0,
            0.0 if norm is None else norm.epsilon,
            PAIRS=tables.pairs,
            INTERLEAVED=tables.interleaved,
            NORMED=norm is not None,
            JOINED_ROWS=self.joined_rows,
            JOINED_AT_ONCE=self.joined_at_once,
            **self._constants(qkv, cache, self._fitting(self.turned_tiles, cache)),
        )

    def _decode(
        self, batch: DeviceBatch, requests: int, queries: Tensor, cache: Tensor, layer: int, output: Tensor
    ) -> None:
        most_splits, smallest_split = self.splits(requests, batch.longest_context)
        decode_attention[(self.shape.kv_heads, most_splits, requests)](
            queries,
            output,
            cache,
            batch.tables,
            batch.rows,
            batch.context_lengths,
            self._split_mixed,
            self._split_peaks,
            self._split_totals,
            self.arrivals,
            layer,
            batch.tables.stride(0),
            smallest_split,
            self.shape.scale,
            self.shape.score_cap or 0.0,
            FIXED_SPLIT=self.fixed_split,
            JOINED_ROWS=self.joined_rows,
            JOINED_AT_ONCE=self.joined_at_once,
            **self._constants(queries, cache, self._fitting(self.decode_tiles, cache)),
        )

    def _prefill(
        self,
        batch: DeviceBatch,
        decodes: int,
        queries: Tensor,
        qkv: Tensor | None,
        cache: Tensor,
        layer: int,
        output: Tensor,
    ) -> None:
        """With `qkv`, rows as rope leaves them, K and V of new requests are read from there and not from the cache."""
        tiles = self._fitting(self.prefill_tiles, cache)
        tokens_at_once = tiles.rows // (self.shape.heads // self.shape.kv_heads)
        pieces = triton.cdiv(batch.longest_query, tokens_at_once)
        from_rows = qkv is not None and self.can_read_rows and cache.dtype != torch.float32
        prefill_attention[(self.shape.kv_heads, batch.requests - decodes, pieces)](
            queries,
            TensorDescriptor.from_tensor(qkv, [tiles.positions, self.width]) if from_rows else queries,
            output,
            cache,
            batch.tables,
            batch.rows,
            batch.query_starts,
            batch.context_lengths,
            layer,
            batch.tables.stride(0),
            decodes,
            self.shape.scale,
            self.shape.score_cap or 0.0,
            FIXED_SPLIT=self.fixed_split,
            FROM_ROWS=from_rows,
            **self._constants(queries, cache, tiles),
        )

    def _fitting(self, tiles: Tiles, cache: Tensor) -> Tiles:
        """A card has no tensor cores for float32: its products are unrolled, and large ones take a minute to compile."""
        if cache.dtype == torch.float32 and self.device.is_card:
            return Tiles(self.decode_tiles.rows, 32, 4, 1)
        return tiles

    def _constants(self, queries: Tensor, cache: Tensor, tiles: Tiles) -> dict[str, Any]:
        return {
            "HEADS": self.shape.heads,
            "KV_HEADS": self.shape.kv_heads,
            "HEAD_SIZE": self.shape.head_size,
            "WIDTH": self.width,
            "ROWS": tiles.rows,
            "QUERY_STRIDE": queries.stride(0),
            "LAYERS": cache.shape[1],
            "BLOCK_SIZE": cache.shape[4],
            "WINDOW": self.window or 0,
            "CAPPED": self.shape.score_cap is not None,
            "TILE": tiles.positions,
            "STAGES": tiles.stages,
            "num_warps": tiles.warps,
            **self.device.launch_options(),
        }
