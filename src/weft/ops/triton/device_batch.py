"""What one step is to the kernels: index arrays on the device, and the sizes of a launch, which the host knows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weft.ops.triton.store import Moves


@dataclass
class DeviceBatch:
    """One step on the device. Sizes are those of the launch (a graph's are padded): a padded token has cell -1 and is
    not written; a padded request has context length 0."""

    tokens: int
    requests: int
    sampled: int
    longest_query: int  # most tokens of one request; 1: every request has one token, token i is request i's
    longest_context: int  # no request's context is longer: bounds the grid of attention
    token_ids: Tensor  # int32 [tokens]
    positions: Tensor  # int32 [tokens]
    cells: Tensor  # int64 [tokens]: block id * block size + offset, or -1
    rows: Tensor  # int32 [requests]: the row of `tables` that is a request's
    query_starts: Tensor  # int32 [requests + 1]
    context_lengths: Tensor  # int32 [requests], this step's tokens included
    tables: Tensor  # int32 [rows of the backend, blocks of a context]; of two tiers: full blocks, then those of the store
    logit_indices: Tensor  # int32 [selected], into the tokens; the sampled ones come first
    decodes: int = 0
    """At least the first so many requests have one token each, token i being request i's; all of them where
    `longest_query` is 1."""
    moves: Moves | None = None
    """Blocks that every layer quantises between writing and reading."""
