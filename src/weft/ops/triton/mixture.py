"""A mixture of experts: every token passes through the few experts that its router chose.

    route      the experts of each token, by ascending expert number, and their routing weights ("shares")
    group      for each expert the list of its pairs. A pair is a token and one of its experts. The number of a
               pair is token * experts per token + i, for the i-th expert of the token
    products   two for each pair: gate and up (with the gate applied), then down
    combine    for each token the weighted sum over its pairs

The host does not need to know the router's choice: an expert that no token chose has an empty list, and its programs
end at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, float32, int32

from weft.ops.triton.device import Device, ceil_divide, dot, let_next_begin, power_of_two, wait_for_previous
from weft.ops.triton.linear import Product
from weft.ops.triton.linear_tiles import Tile, small_tile
from weft.ops.triton.rows import GATE_CODES, gated
from weft.ops.triton.weights import Experts, Linear

_ELEMENTS = 1024
_SILU = GATE_CODES["silu_mul"]


@triton.jit
def _route(
    logits,
    chosen,
    shares,
    experts,
    PER_TOKEN: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Chooses for each token the PER_TOKEN experts with the highest logits [tokens, experts]. Writes them by ascending
    expert number, with their routing weights (softmax). One program per token."""
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    token = tl.program_id(0)
    expert = tl.arange(0, BLOCK)
    values = tl.load(logits + token * experts + expert, mask=expert < experts, other=-float("inf"))
    share = tl.exp(values - tl.max(values, 0))
    share = share / tl.sum(share, 0)
    left = tl.where(expert < experts, share, -1.0)
    is_chosen = tl.zeros((BLOCK,), tl.int32)
    for _ in range(PER_TOKEN):
        best = tl.argmax(left, 0)
        is_chosen = tl.where(expert == best, 1, is_chosen)
        left = tl.where(expert == best, -1.0, left)
    if NORMALISE:
        share = share / tl.sum(tl.where(is_chosen == 1, share, 0.0), 0)
    place = token * PER_TOKEN + tl.cumsum(is_chosen, 0) - 1
    tl.store(chosen + place, expert, mask=is_chosen == 1)
    tl.store(shares + place, share, mask=is_chosen == 1)


@triton.jit(do_not_specialize=["pairs"])
def _group(chosen, lists, counts, pairs, capacity, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Lists the pairs (token * experts per token + i) of each expert in ascending order, and counts them. One program
    per expert, so that no atomics are needed and the order is fixed."""
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    expert = tl.program_id(0)
    count = 0
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        is_chosen = (tl.load(chosen + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
        place = count + tl.cumsum(is_chosen, 0) - 1
        tl.store(lists + expert * capacity + place, pair, mask=is_chosen == 1)
        count += tl.sum(is_chosen, 0)
    tl.store(counts + expert, count)


@triton.jit
def _expert_product(
    input,
    weight,
    output,
    lists,
    counts,
    capacity,
    outputs,
    INPUTS: tl.constexpr,
    PAIRS_OF_INPUT: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    GATE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """output [pairs, outputs] = input @ weight [experts, outputs, INPUTS]^T for the pairs of each expert, with an
    optional gate. Pair p reads input row p // PAIRS_OF_INPUT. Grid (experts, tiles of outputs); a program loops over
    the pairs."""
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    expert = tl.program_id(0)
    program = tl.program_id(1)
    row = program * ROWS + tl.arange(0, ROWS)
    is_row = row[:, None] < outputs
    column = tl.arange(0, STEP)
    places = weight + (expert.to(tl.int64) * outputs + row[:, None]) * INPUTS + column[None, :]
    count = tl.load(counts + expert)
    for first in range(0, count, TOKENS):
        entry = first + tl.arange(0, TOKENS)
        pair = tl.load(lists + expert * capacity + entry, mask=entry < count, other=0)
        is_pair = entry[None, :] < count
        inputs = input + (pair // PAIRS_OF_INPUT)[None, :].to(tl.int64) * INPUTS + column[:, None]
        sums = tl.zeros((ROWS, TOKENS), tl.float32)
        for start in tl.range(0, INPUTS, STEP, num_stages=STAGES):
            place = start + column
            weights = tl.load(places + start, mask=is_row & (place[None, :] < INPUTS), other=0.0)
            values = tl.load(inputs + start, mask=is_pair & (place[:, None] < INPUTS), other=0.0)
            sums = dot(weights, values, sums)
        if GATE:
            halves = tl.permute(tl.reshape(sums, (ROWS // 2, 2, TOKENS)), (0, 2, 1))
            gate, up = tl.split(halves)
            inner = program * (ROWS // 2) + tl.arange(0, ROWS // 2)[:, None]
            out = output + pair[None, :].to(tl.int64) * (outputs // 2) + inner
            values_out = gated(gate, up, GATE).to(output.dtype.element_ty)
            tl.store(out, values_out, mask=(inner < outputs // 2) & is_pair)
        else:
            out = output + pair[None, :].to(tl.int64) * outputs + row[:, None]
            tl.store(out, sums.to(output.dtype.element_ty), mask=is_row & is_pair)


@triton.jit
def _combine(
    parts,
    shares,
    output,
    columns,
    output_stride,
    PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Writes output [tokens, columns]: for each token the sum of parts [pairs, columns] * shares [pairs] over its
    pairs, in order, in float32."""
    wait_for_previous(DEPENDENT)
    let_next_begin(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    sums = tl.zeros((BLOCK,), tl.float32)
    for place in range(PER_TOKEN):
        pair = token * PER_TOKEN + place
        part = tl.load(parts + pair * columns + column, mask=mask, other=0.0).to(tl.float32)
        sums += part * tl.load(shares + pair)
    tl.store(output + token * output_stride + column, sums.to(output.dtype.element_ty), mask=mask)


class MixtureSpace:
    """Buffers for the intermediate results of a mixture; all layers of a model share them."""

    def __init__(self, experts: Experts, per_token: int, max_tokens: int, device: Device) -> None:
        count, features, inner = experts.down.shape
        pairs, dtype = max_tokens * per_token, experts.down.dtype
        self.sizes = (count, features, inner, per_token, max_tokens)
        self.logits = device.empty(max_tokens, count, dtype=float32)
        self.chosen = device.zeros(pairs, dtype=int32)
        self.shares = device.zeros(pairs, dtype=float32)
        self.lists = device.empty(count, max_tokens, dtype=int32)
        self.counts = device.empty(count, dtype=int32)
        self.inner = device.empty(pairs, inner, dtype=dtype)
        self.parts = device.empty(pairs, features, dtype=dtype)


class MixtureProduct:
    """The mixture of experts of one layer."""

    def __init__(
        self, router: Linear, experts: Experts, normalise: bool, space: MixtureSpace, device: Device
    ) -> None:
        # Uses the batch-invariant mode: the router's choice depends on small differences, so its logits must have the
        # same bits in any batch.
        self._router = Product(router, device, invariant=True)
        self._experts = experts
        self._normalise = normalise
        self._space = space
        self._device = device

    def run(self, input: Tensor, output: Tensor) -> None:
        space, launch, tokens = self._space, self._device.launch, len(input)
        count, features, _, per_token, capacity = space.sizes
        self._router.run(input, space.logits[:tokens])
        launch(
            _route,
            (tokens, 1, 1),
            (space.logits, space.chosen, space.shares, count),
            (count, per_token, self._normalise),
            lambda: {
                "PER_TOKEN": per_token,
                "NORMALISE": self._normalise,
                "BLOCK": power_of_two(count),
                "num_warps": 4,
            },
        )
        launch(
            _group,
            (count, 1, 1),
            (space.chosen, space.lists, space.counts, tokens * per_token, capacity),
            capacity,
            lambda: {"BLOCK": _ELEMENTS, "num_warps": 4},
        )
        self._multiply(input, self._experts.gate_up, space.inner, per_token, _SILU, tokens)
        self._multiply(space.inner, self._experts.down, space.parts, 1, 0, tokens)
        stride = output.stride(0)
        launch(
            _combine,
            (tokens, ceil_divide(features, _ELEMENTS), 1),
            (space.parts, space.shares, output, features, stride),
            (features, stride, output.dtype, per_token),
            lambda: {"PER_TOKEN": per_token, "BLOCK": _ELEMENTS, "num_warps": 4},
        )

    def _multiply(
        self, input: Tensor, weight: Tensor, output: Tensor, pairs_of_input: int, gate: int, tokens: int
    ) -> None:
        space, capacity = self._space, self._space.sizes[-1]
        experts, outputs, inputs = weight.shape
        tile = self._tile(tokens, inputs)
        self._device.launch(
            _expert_product,
            (experts, ceil_divide(outputs, tile.outputs), 1),
            (input, weight, output, space.lists, space.counts, capacity, outputs),
            (outputs, inputs, capacity, pairs_of_input, tile, gate, weight.dtype),
            lambda: {
                "INPUTS": inputs,
                "PAIRS_OF_INPUT": pairs_of_input,
                "TOKENS": tile.tokens,
                "ROWS": tile.outputs,
                "STEP": tile.inputs,
                "STAGES": tile.stages,
                "GATE": gate,
                "num_warps": tile.warps,
            },
        )

    def _tile(self, tokens: int, inputs: int) -> Tile:
        """The tile for the average number of tokens per expert. The choice does not change results: every tile
        gives the same sums."""
        count, _, _, per_token, _ = self._space.sizes
        return small_tile(min(64, ceil_divide(tokens * per_token, count)), inputs)
