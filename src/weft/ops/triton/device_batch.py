"""One step in the form that kernels need: index arrays on the device, and the launch sizes, which the host knows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weft.ops.triton.store import Moves


@dataclass
class DeviceBatch:
    """One step on the device. Sizes are launch sizes (padded for a graph). A padded token has cell -1 and is not
    written; a padded request has context length 0."""

    tokens: int
    requests: int
    sampled: int
    longest_query: int  # the maximum tokens of one request; 1: token i belongs to request i
    longest_context: int  # upper bound of all context lengths; decides the grid size of attention
    token_ids: Tensor  # int32 [tokens]
    positions: Tensor  # int32 [tokens]
    cells: Tensor  # int64 [tokens]: block id * block size + offset, or -1
    rows: Tensor  # int32 [requests]: row of `tables` of each request
    query_starts: Tensor  # int32 [requests + 1]
    context_lengths: Tensor  # int32 [requests], including the tokens of this step
    tables: Tensor
    """int32 [rows of the backend, blocks of a context]. With two tiers a row is twice as long: the KV blocks in full
    precision, then the blocks of the store for the same positions."""
    logit_indices: Tensor  # int32 [selected], token indices; sampled tokens come first
    decodes: int = 0
    """The first `decodes` requests have one token each: token i belongs to request i. If `longest_query` is 1, this
    holds for all requests."""
    moves: Moves | None = None
    """Blocks that each layer quantises into the store, after it writes K and V and before attention reads them."""
