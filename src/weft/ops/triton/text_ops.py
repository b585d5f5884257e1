"""The operations of a text encoder on a CUDA device. They launch kernels one by one, without CUDA graphs: a step has
whole texts, so its matrix products take much longer than a launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from weft.ops.base import AttentionPattern, AttentionShape, LinearRole, QkNorm, Rope, WeightSource
from weft.ops.reference_texts import SourceOfRows
from weft.ops.texts import Activation, Pooling, TextIndices
from weft.ops.triton import rows, text_kernels
from weft.ops.triton.device import Device
from weft.ops.triton.linear import padded_rows
from weft.ops.triton.rope import RopeTables, rope_and_write
from weft.ops.triton.weights import Linear, Loader


@dataclass(frozen=True)
class PreparedTexts:
    """The index arrays of a step on the device. Arrays by token have `padded_rows` entries; padded tokens belong to no
    text."""

    shape: AttentionShape
    patterns: tuple[AttentionPattern, ...]
    texts: int
    token_ids: Tensor  # int32 [tokens]
    positions: Tensor  # int32 [tokens]
    types: Tensor  # int32 [tokens]
    cells: Tensor  # int64 [tokens], all -1: no K and V are written to a cache
    starts: Tensor  # int32 [texts + 1]
    tiles: Tensor  # int32 [tiles, 3]: see `text_kernels.attend_to_texts`

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


class TritonTextOps:
    """`TextOps` on a GPU, or in Triton's interpreter. Weights and activations have one data type.

    Activations have `padded_rows` rows, so that cuBLAS does not search for a kernel in every step. The content of the
    rows past the tokens or texts of the step is undefined.
    """

    def __init__(self, device: Device, dtype: torch.dtype, max_tokens: int) -> None:
        """`max_tokens` is the length of the longest text."""
        self.device = device
        self.dtype = dtype
        self._max_tokens = max_tokens
        self._loader = Loader(device, dtype)
        self._ropes: dict[Rope, RopeTables] = {}

    # --- once, at load ------------------------------------------------------------------------------------------

    def load_vector(self, source: WeightSource, offset: float = 0.0) -> Tensor:
        return self._loader.vector(source, offset)

    def load_linear(
        self,
        sources: Sequence[WeightSource],
        biases: Sequence[WeightSource] = (),
        role: LinearRole = "layer",
    ) -> Linear:
        return self._loader.linear(sources, biases)

    def load_embedding(self, source: WeightSource) -> Linear:
        return self._loader.linear([source], [])

    def rows_of(self, source: WeightSource, rows: Sequence[int]) -> WeightSource:
        return SourceOfRows(source, tuple(rows))

    def nbytes(self, weight: Tensor | Linear) -> int:
        return weight.nbytes

    # --- once per step ------------------------------------------------------------------------------------------

    def prepare_texts(
        self, step: TextIndices, shape: AttentionShape, patterns: Sequence[AttentionPattern]
    ) -> PreparedTexts:
        count, texts = len(step.token_ids), len(step.starts) - 1
        padded = padded_rows(count)
        tiles = _tiles(step.starts)
        # One copy to the device for all arrays.
        arrays = np.zeros(3 * padded + texts + 1 + tiles.size, np.int32)
        for index, values in enumerate((step.token_ids, step.positions, step.types)):
            arrays[index * padded : index * padded + count] = values
        arrays[3 * padded :] = np.concatenate([step.starts, tiles.ravel()])
        there = torch.from_numpy(arrays).to(self.device.torch_device)
        token_ids, positions, types, starts, tile_list = there.split([padded] * 3 + [texts + 1, tiles.size])
        cells = torch.full((padded,), -1, dtype=torch.int64, device=self.device.torch_device)
        return PreparedTexts(
            shape, tuple(patterns), texts, token_ids, positions, types, cells, starts, tile_list.view(-1, 3)
        )

    def embedding(self, prepared: PreparedTexts, table: Linear, scale: float = 1.0) -> Tensor:
        return self._looked_up(table.weight, prepared.token_ids, scale)

    def embedding_of(
        self, prepared: PreparedTexts, table: Linear, index: Literal["positions", "types"], first: int
    ) -> Tensor:
        return self._looked_up(table.weight[first:], getattr(prepared, index))

    def pool(self, prepared: PreparedTexts, hidden: Tensor, pooling: Pooling) -> Tensor:
        output = self._empty(padded_rows(prepared.texts), hidden.shape[1])
        if pooling == "mean":
            text_kernels.mean_rows(hidden, prepared.starts, output[: prepared.texts], self.device)
        else:
            indices = prepared.starts[:-1] if pooling == "cls" else prepared.starts[1:] - 1
            rows.look_up(hidden, indices, output[: prepared.texts], self.device)
        return output

    # --- in every layer -----------------------------------------------------------------------------------------

    def linear(self, inputs: Tensor, weight: Linear) -> Tensor:
        return linear(inputs, weight.weight, weight.bias)

    def rms_norm(self, inputs: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        output = self._empty(*inputs.shape)
        rows.rms_norm(inputs, weight, epsilon, output, self.device)
        return output

    def layer_norm(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
        output = self._empty(*inputs.shape)
        text_kernels.layer_norm(inputs, weight, bias, epsilon, output, self.device)
        return output

    def self_attention(
        self, prepared: PreparedTexts, qkv: Tensor, pattern: int, norm: QkNorm | None = None
    ) -> Tensor:
        shape, kind = prepared.shape, prepared.patterns[pattern]
        if norm is not None or kind.rope.frequencies:
            # No token has a position in a KV cache. The kernel takes a cache anyway, and writes nothing to it.
            no_cache = self._empty(1, 1, 2, shape.kv_heads, 1, shape.head_size)
            rope_and_write(prepared, qkv, no_cache, 0, self._tables(kind.rope), shape, norm)
        output = self._empty(len(qkv), shape.heads * shape.head_size)
        text_kernels.attend_to_texts(qkv, prepared.tiles, shape, kind, output, self.device)
        return output

    def activation(self, inputs: Tensor, kind: Activation) -> Tensor:
        return self._activated(inputs, kind)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._activated(gate_up, "silu", is_gated=True)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self._activated(gate_up, "gelu", is_gated=True)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        return self._activated(gate_up, "gelu_tanh", is_gated=True)

    def add(self, left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
        rows.add(left, right, scale, self.device)
        return left

    def _activated(self, inputs: Tensor, kind: text_kernels.Kind, is_gated: bool = False) -> Tensor:
        output = self._empty(len(inputs), inputs.shape[1] // 2 if is_gated else inputs.shape[1])
        text_kernels.activate(inputs, kind, is_gated, output, self.device)
        return output

    def _looked_up(self, table: Tensor, indices: Tensor, scale: float = 1.0) -> Tensor:
        output = self._empty(len(indices), table.shape[1])
        rows.look_up(table, indices, output, self.device, scale)
        return output

    def _tables(self, rope: Rope) -> RopeTables:
        if rope not in self._ropes:
            self._ropes[rope] = RopeTables(rope, self._max_tokens, self.device)
        return self._ropes[rope]

    def _empty(self, *shape: int) -> Tensor:
        return self.device.empty(*shape, dtype=self.dtype)


def _tiles(starts: np.ndarray) -> np.ndarray:
    """The tiles of attention, int [tiles, 3]: start and end of the text, and the first token of the tile."""
    counts = -(-np.diff(starts) // text_kernels.QUERIES)
    text = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(text)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([starts[text], starts[text + 1], starts[text] + number * text_kernels.QUERIES], axis=1)
