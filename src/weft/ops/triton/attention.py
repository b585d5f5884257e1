"""Attention over the paged cache: which kernel takes which requests of a step, in which tiles, and their workspace.

In the invariant mode a token's result is the same bits alone, in a batch, in a chunk and decoded: every context is cut
at the same positions, both kernels use the same tiles, and splits are joined in their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from weft.ops.base import AttentionShape, QkNorm
from weft.ops.triton.attention_decode import decode_attention
from weft.ops.triton.attention_prefill import prefill_attention
from weft.ops.triton.attention_turned import turned_attention
from weft.ops.triton.batch import DeviceBatch
from weft.ops.triton.device import Device
from weft.ops.triton.rope import RopeTables, rope_and_write

# The least number of rows that the tensor cores multiply.
_LEAST_ROWS = 16

# So many programs for each processor of the card keep its memory busy also where requests differ in length.
_PROGRAMS_PER_PROCESSOR = 8
_LEAST_SPLITS, _MOST_SPLITS = 4, 64

# Splits that a context is cut into need a second look at each; a large batch cuts only what is longer than this.
_LARGEST_SMALLEST_SPLIT = 1024

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
        self.decode_tiles = Tiles(max(_LEAST_ROWS, self.joined_rows), 64 if self.width <= 128 else 32, 4, 3)
        self.fixed_split = 0
        if invariant:
            even = triton.next_power_of_2(triton.cdiv(max_context, _MOST_FIXED_SPLITS))
            self.fixed_split = max(_LEAST_FIXED_SPLIT, even)
            self.prefill_tiles = self.decode_tiles
        elif self.width <= 128:
            self.prefill_tiles = Tiles(max(128, self.joined_rows), 64, 8, 3)
        else:
            self.prefill_tiles = Tiles(max(64, self.joined_rows), 32, 4, 2)

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
        wanted = triton.cdiv(_PROGRAMS_PER_PROCESSOR * self.device.processors, programs)
        tile = self.decode_tiles.positions
        smallest = triton.next_power_of_2(triton.cdiv(tile * programs, self.device.processors))
        return (
            min(max(wanted, _LEAST_SPLITS), _MOST_SPLITS),
            min(max(smallest, tile), _LARGEST_SMALLEST_SPLIT),
        )

    def run(self, batch: DeviceBatch, queries: Tensor, cache: Tensor, layer: int, output: Tensor) -> None:
        """Each token over what it sees of its request's context, read from the cache, this step's tokens too.

        queries [tokens, heads * head size] may be a part of wider rows; output [tokens, heads * head size] may not.
        """
        decodes = batch.requests if batch.longest_query == 1 else batch.decodes
        if decodes:
            self._decode(batch, decodes, queries, cache, layer, output)
        if decodes < batch.requests:
            self._prefill(batch, decodes, queries, cache, layer, output)

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
            self.run(batch, qkv[:, : self.shape.heads * self.shape.head_size], cache, layer, output)

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
            **self._constants(qkv, cache, self._fitting(self.decode_tiles, cache)),
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
        self, batch: DeviceBatch, decodes: int, queries: Tensor, cache: Tensor, layer: int, output: Tensor
    ) -> None:
        tiles = self._fitting(self.prefill_tiles, cache)
        tokens_at_once = tiles.rows // (self.shape.heads // self.shape.kv_heads)
        pieces = triton.cdiv(batch.longest_query, tokens_at_once)
        prefill_attention[(self.shape.kv_heads, batch.requests - decodes, pieces)](
            queries,
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
