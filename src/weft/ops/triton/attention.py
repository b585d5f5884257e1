"""Attention over the paged cache: chooses the kernel and the tile sizes for each request of a step, and owns the
workspace.

In the batch-invariant mode the result of a token has the same bits alone, in a batch, in a chunk, and in decode. For
that, every context is cut at the same positions, both kernels use the same tiles, and splits are joined in order.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.ops.base import AttentionShape, QkNorm, TwoTierCache
from weft.ops.triton.attention_decode import decode_attention
from weft.ops.triton.attention_dense import dense_attention, is_dense, supports_dense_attention
from weft.ops.triton.attention_prefill import prefill_attention
from weft.ops.triton.device import Device, ceil_divide, power_of_two
from weft.ops.triton.device_batch import DeviceBatch
from weft.ops.triton.rope import RopeTables, rope_and_write
from weft.ops.triton.store import move_to_store
from weft.tiers import stored_blocks

# The smallest number of rows that tensor cores multiply.
_LEAST_ROWS = 16

# Programs (thread blocks) of decode attention that run on one multiprocessor at the same time, limited by registers. A
# program that reads the store for few requests is small: it needs fewer registers, so more of them run.
_PROGRAMS_AT_ONCE = 4
_SMALL_PROGRAMS_AT_ONCE = 8
_MOST_SPLITS = 16
_LEAST_LONG_SPLIT = 512
_LEAST_SHARED_SPLIT = 256

# In the invariant mode the context length alone decides the number of splits. The maximum keeps the workspace small.
_LEAST_FIXED_SPLIT, _MOST_FIXED_SPLITS = 512, 32


class Tiles(NamedTuple):
    """Tile sizes of a kernel (query rows and context positions), its warps and its pipeline stages."""

    rows: int
    positions: int
    warps: int
    stages: int


class StoreTiles(NamedTuple):
    """Tile sizes of the same kernel for the positions that it reads from the store."""

    positions: int
    stages: int
    registers: int | None = None
    """Maximum registers of a thread: a lower one lets more programs run at the same time."""


_NO_STORE = StoreTiles(0, 0)


class Splits(NamedTuple):
    """How the contexts of decoding requests are split."""

    most: int  # maximum splits of a request; with `shared`: maximum programs of a KV head
    smallest: int
    shared: bool = False
    """All requests are divided among `most` programs. A context of up to `smallest` positions is not split."""
    leeway: int = 3
    """How much imbalance is allowed, in tiles. Contexts are not split if, without splits, no program reads more than this
    many tiles above the mean. Reading a request in two parts and joining them costs about as much as two or three tiles."""


class _Tiers(NamedTuple):
    """The cache tensors that kernels get. `full` has full precision; `codes` and `words` are the store. Without a
    store, `bits` is 0."""

    full: Tensor
    codes: Tensor
    words: Tensor
    bits: int = 0
    tail_blocks: int = 0

    @property
    def kind(self) -> Hashable:
        """The values that decide how kernels are compiled."""
        return self.full.shape[1], self.full.shape[4], self.bits, self.tail_blocks


def _tiers_of(cache: Tensor | TwoTierCache) -> _Tiers:
    """The tensors of a cache. With one tier, the cache stands for the store too: kernels need an address, and do not read."""
    if isinstance(cache, TwoTierCache):
        words = cache.store.view(torch.int32)
        return _Tiers(cache.full, cache.store, words, cache.bits, cache.tail_blocks)
    return _Tiers(cache, cache, cache)


class Attention:
    """Attention of all layers with one shape and window. It runs one step at a time."""

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
        self.width = power_of_two(shape.head_size)
        self.joined_rows = power_of_two(group)
        rows = max(_LEAST_ROWS, self.joined_rows)
        self.decode_tiles = Tiles(rows, 64, 2, 3) if self.width <= 128 else Tiles(rows, 32, 4, 3)
        # For the store, query rows are the columns of a product. A product needs at least 16 rows, but only 8 columns.
        # The invariant mode uses as many rows as prefill does.
        self.store_rows = rows if invariant else max(8, self.joined_rows)
        self.fixed_split = 0
        if invariant:
            even = power_of_two(ceil_divide(max_context, _MOST_FIXED_SPLITS))
            self.fixed_split = max(_LEAST_FIXED_SPLIT, even)
            self.prefill_tiles = self.decode_tiles
        elif self.width <= 128:
            self.prefill_tiles = Tiles(max(128, self.joined_rows), 64, 8, 3)
        else:
            self.prefill_tiles = Tiles(max(64, self.joined_rows), 32, 4, 2)

        self.prefill_store_tiles = StoreTiles(self.prefill_tiles.positions, self.prefill_tiles.stages)
        # Tiles with two tiers, by `Splits.shared`: index 0 for few requests, index 1 for shared programs.
        # Measured on an H200.
        plain = (self.decode_tiles, StoreTiles(self.decode_tiles.positions, self.decode_tiles.stages))
        self.tiered_tiles = (plain, plain)
        if not invariant and self.width <= 128:
            self.tiered_tiles = (
                (Tiles(rows, 32, 2, 3), StoreTiles(64, 4, registers=128)),
                (Tiles(rows, 64, 4, 3), StoreTiles(128, 3, registers=128)),
            )

        self._most_requests = power_of_two(max_requests)
        # The values that decide how kernels are compiled.
        sizes = (shape.heads, shape.kv_heads, shape.head_size, self._most_requests)
        self._kind = (*sizes, shape.score_cap is not None, window, self.fixed_split)

        self.can_read_rows = not invariant and self.width == shape.head_size and device.dependent_launches
        """True if new prompts may read K and V from the rows of the step. That needs TMA copies (Hopper or newer) and a
        head size that is a power of two. Always False in the invariant mode."""
        self._described_rows: tuple[int, int, Tiles] | None = None
        self.by_cudnn = not invariant and supports_dense_attention(shape, device)
        # The invariant mode joins one split at a time, as prefill does. If several were joined at once, the summation
        # order would depend on which split is the first in the window.
        self.joined_at_once = 1 if invariant else max(1, min(8, 4096 // (self.joined_rows * self.width)))
        # The workspace has room for the splits of any step.
        cuts = [
            (requests, self.splits(requests, max_context, tiered))
            for requests in range(1, max_requests + 1)
            for tiered in (False, True)
        ]
        splits = max(requests + cut.most if cut.shared else requests * cut.most for requests, cut in cuts)
        pairs = splits * shape.kv_heads
        self._split_mixed = device.empty(pairs * group * shape.head_size, dtype=torch.float32)
        self._split_peaks = device.empty(pairs * group, dtype=torch.float32)
        self.split_totals = device.empty(pairs * group, dtype=torch.float32)
        self.arrivals = device.zeros(max_requests * shape.kv_heads, dtype=torch.int32)
        """Finished splits of each request and KV head; 0 between two launches."""

    def splits(self, requests: int, longest_context: int, tiered: bool = False) -> Splits:
        """The splits for `requests` decoding requests with contexts of up to `longest_context`. `tiered`: the cache
        has two tiers."""
        if self.fixed_split:
            seen = longest_context if self.window is None else min(longest_context, self.window)
            # A window that begins inside a split needs one more split.
            return Splits(ceil_divide(seen, self.fixed_split) + (self.window is not None), self.fixed_split)
        at_once = _PROGRAMS_AT_ONCE * self.device.processors
        if tiered:
            fitting = _SMALL_PROGRAMS_AT_ONCE * self.device.processors // (requests * self.shape.kv_heads)
            if 4 <= fitting <= _MOST_SPLITS:
                return Splits(fitting, _LEAST_SHARED_SPLIT)
        else:
            fitting = at_once // (requests * self.shape.kv_heads)
        # Measured on an H200: for few requests, half of the programs that fit are fastest, because more splits take
        # longer to join.
        if fitting >= 8:
            return Splits(min(fitting // 2, _MOST_SPLITS), self.decode_tiles.positions)
        if fitting >= 4:
            return Splits(4, _LEAST_LONG_SPLIT)
        return Splits(max(1, at_once // self.shape.kv_heads), _LEAST_SHARED_SPLIT, shared=True)

    def rope_and_attend(
        self,
        batch: DeviceBatch,
        qkv: Tensor,
        cache: Tensor | TwoTierCache,
        layer: int,
        tables: RopeTables,
        norm: QkNorm | None,
        output: Tensor,
    ) -> Tensor:
        """Runs `rope_and_write`, then `run`. Returns the result: `output`, or a tensor of the same shape from cuDNN."""
        is_read_in_full = True
        if isinstance(cache, TwoTierCache):
            rope_and_write(batch, qkv, cache.full, layer, tables, self.shape, norm)
            if batch.moves is not None:
                # Blocks move to the store after all tokens are written: a block may become complete and leave the tail
                # in the same step.
                move_to_store(cache, batch.moves, self.device, layer)
            last, block_size = batch.longest_context - 1, cache.full.shape[4]
            is_read_in_full = stored_blocks(last, block_size, cache.tail_blocks) == 0
        else:
            rope_and_write(batch, qkv, cache, layer, tables, self.shape, norm)
        is_half = qkv.dtype != torch.float32
        if self.by_cudnn and is_half and is_read_in_full and is_dense(batch, self.window):
            return dense_attention(batch, qkv, self.shape)
        self.run(batch, qkv, cache, layer, output, self.can_read_rows and is_half)
        return output

    def run(
        self,
        batch: DeviceBatch,
        queries: Tensor,
        cache: Tensor | TwoTierCache,
        layer: int,
        output: Tensor,
        from_rows: bool = False,
    ) -> None:
        """Computes attention of each token over its visible context, read from the cache, including the tokens of
        this step.

        Rows of `queries` begin with heads * head size columns of queries; rows of `output` have only these
        columns. With `from_rows`, rows of `queries` are [Q | K | V] after RoPE, and requests that begin in this
        step read K and V from there.
        """
        decodes = batch.requests if batch.longest_query == 1 else batch.decodes
        if decodes:
            self._decode(batch, decodes, queries, cache, layer, output)
        if decodes < batch.requests:
            self._prefill(batch, decodes, queries, cache, layer, output, from_rows)

    def _decode(
        self,
        batch: DeviceBatch,
        requests: int,
        queries: Tensor,
        cache: Tensor | TwoTierCache,
        layer: int,
        output: Tensor,
    ) -> None:
        """Launches attention for the first `requests` requests, which have one token each."""
        tiers = _tiers_of(cache)
        most, smallest, shared, leeway = self.splits(requests, batch.longest_context, tiers.bits > 0)
        kv_heads = self.shape.kv_heads
        tiles, store_tiles = self.decode_tiles, _NO_STORE
        if tiers.bits:
            tiles, store_tiles = self.tiered_tiles[shared]
        tiles, store_tiles = self._fitting(tiles, store_tiles, tiers)
        self.device.launch(
            decode_attention,
            (kv_heads, max(most, requests), 1) if shared else (kv_heads, most, requests),
            (
                queries,
                output,
                tiers.full,
                tiers.codes,
                tiers.words,
                batch.tables,
                batch.rows,
                batch.context_lengths,
                self._split_mixed,
                self._split_peaks,
                self.split_totals,
                self.arrivals,
                layer,
                batch.tables.stride(0),
                requests,
                most,
                smallest,
                leeway,
                self.shape.scale,
                self.shape.score_cap or 0.0,
            ),
            (self._kind, tiles, store_tiles, queries.stride(0), queries.dtype, tiers.kind, shared),
            lambda: {
                "SHARED": shared,
                "STORE_ROWS": self.store_rows,
                "MOST_REQUESTS": self._most_requests,
                "JOINED_ROWS": self.joined_rows,
                "JOINED_AT_ONCE": self.joined_at_once,
                **self._constants(queries, tiers, tiles, store_tiles),
            },
        )

    def _prefill(
        self,
        batch: DeviceBatch,
        decodes: int,
        queries: Tensor,
        cache: Tensor | TwoTierCache,
        layer: int,
        output: Tensor,
        from_rows: bool,
    ) -> None:
        """Launches attention for the requests after the first `decodes`."""
        tiers = _tiers_of(cache)
        from_rows = from_rows and self._width(tiers) == self.width
        store_tiles = self.prefill_store_tiles if tiers.bits else _NO_STORE
        tiles, store_tiles = self._fitting(self.prefill_tiles, store_tiles, tiers)
        tokens_at_once = tiles.rows // (self.shape.heads // self.shape.kv_heads)
        self.device.launch(
            prefill_attention,
            (self.shape.kv_heads, batch.requests - decodes, ceil_divide(batch.longest_query, tokens_at_once)),
            (
                queries,
                self._descriptor_of(queries, tiles) if from_rows else queries,
                output,
                tiers.full,
                tiers.codes,
                tiers.words,
                batch.tables,
                batch.rows,
                batch.query_starts,
                batch.context_lengths,
                layer,
                batch.tables.stride(0),
                decodes,
                self.shape.scale,
                self.shape.score_cap or 0.0,
            ),
            (self._kind, tiles, store_tiles, queries.stride(0), queries.dtype, tiers.kind, from_rows),
            lambda: {"FROM_ROWS": from_rows, **self._constants(queries, tiers, tiles, store_tiles)},
        )

    def _width(self, tiers: _Tiers) -> int:
        """The padded head size. With 4 bits a product covers half a head, and that half must be at least 16 wide."""
        return max(32, self.width) if tiers.bits == 4 else self.width

    def _descriptor_of(self, rows: Tensor, tiles: Tiles) -> TensorDescriptor:
        """The tensor descriptor of the step's rows. All layers use the same buffer, so the descriptor is made once per
        step: making it takes as long as a launch."""
        key = (rows.data_ptr(), rows.shape[0], tiles)
        if key != self._described_rows:
            self._descriptor = TensorDescriptor.from_tensor(rows, [tiles.positions, self.width])
            self._described_rows = key
        return self._descriptor

    def _fitting(self, tiles: Tiles, store_tiles: StoreTiles, tiers: _Tiers) -> tuple[Tiles, StoreTiles]:
        """Returns the given tiles, or smaller ones for float32 on a GPU. There products are unrolled, because they run
        without tensor cores, and large products take a minute to compile."""
        if tiers.full.dtype == torch.float32 and self.device.is_gpu:
            return Tiles(self.decode_tiles.rows, 32, 4, 1), StoreTiles(32, 1)
        return tiles, store_tiles

    def _constants(
        self, queries: Tensor, tiers: _Tiers, tiles: Tiles, store_tiles: StoreTiles
    ) -> dict[str, Any]:
        limit = {} if store_tiles.registers is None or not tiers.bits else {"maxnreg": store_tiles.registers}
        return limit | {
            "FIXED_SPLIT": self.fixed_split,
            "HEADS": self.shape.heads,
            "KV_HEADS": self.shape.kv_heads,
            "HEAD_SIZE": self.shape.head_size,
            "WIDTH": self._width(tiers),
            "ROWS": tiles.rows,
            "QUERY_STRIDE": queries.stride(0),
            "LAYERS": tiers.full.shape[1],
            "BLOCK_SIZE": tiers.full.shape[4],
            "WINDOW": self.window or 0,
            "CAPPED": self.shape.score_cap is not None,
            "TILE": tiles.positions,
            "STAGES": tiles.stages,
            "BITS": tiers.bits,
            "TAIL_BLOCKS": tiers.tail_blocks,
            "STORE_TILE": store_tiles.positions,
            "STORE_STAGES": store_tiles.stages,
            "num_warps": tiles.warps,
        }
