"""Attention over a two-tier cache in many kinds of batches, compared with numpy in float64: each token reads each
block only from the tier that its position requires."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from attention_cases import LAYER, LAYERS, TOLERANCES, Case, Part, Step
from store_twin import laid_out, quantised, restored

from weft.ops.base import TwoTierCache
from weft.ops.triton import attention as attention_module
from weft.ops.triton.attention import Attention, Splits
from weft.ops.triton.device import Device
from weft.ops.triton.device_batch import DeviceBatch
from weft.ops.triton.store import new_store
from weft.tiers import stored_blocks

MAX_REQUESTS, MAX_CONTEXT = 8, 2048
TAIL_BLOCKS = 3


@dataclass
class TieredStep:
    """A step of `attention_cases` with old blocks quantised. Full blocks that no token reads are NaN, and their table
    entries name blocks of other requests."""

    step: Step
    bits: int
    tail_blocks: int = TAIL_BLOCKS

    def __post_init__(self) -> None:
        step, case = self.step, self.step.case
        full = step.device_cache(step.cache(filled=True))
        chance = np.random.default_rng(4)
        self.tables = np.zeros_like(step.block_tables)
        counts = [self.borders(part)[1] for part in case.parts]
        free = chance.permutation(sum(counts) + 2)
        store = new_store(len(free), LAYERS, case.block_size, case.shape, self.bits, step.device)
        self.cache = TwoTierCache(full, store, self.bits, self.tail_blocks)
        for request, count in enumerate(counts):
            self.tables[request, :count], free = free[:count], free[count:]
            if not count:
                continue
            vectors = full[torch.from_numpy(step.block_tables[request, :count]), LAYER].float().cpu().numpy()
            parts = torch.from_numpy(laid_out(quantised(vectors, self.bits), self.bits))
            store[torch.from_numpy(self.tables[request, :count]), LAYER] = parts.to(store.device)
        store[torch.from_numpy(free)] = -1  # NaN scales
        for request, part in enumerate(case.parts):
            gone = step.block_tables[request, : self.borders(part)[0]]
            full[torch.from_numpy(gone)] = float("nan")

    def borders(self, part: Part) -> tuple[int, int]:
        """The number of blocks that the first and the last token of a part read from the store."""
        return (
            stored_blocks(part.cached, self.step.case.block_size, self.tail_blocks),
            stored_blocks(part.context - 1, self.step.case.block_size, self.tail_blocks),
        )

    def batch(self) -> DeviceBatch:
        step, batch = self.step, self.step.batch()
        tables = batch.tables.cpu().numpy()
        tables = np.concatenate([tables, np.full_like(tables, 1 << 30)], axis=1)
        half = tables.shape[1] // 2
        for request, row in enumerate(batch.rows.tolist()[: len(step.case.parts)]):
            first, last = self.borders(step.case.parts[request])
            tables[row, :first] = 0
            tables[row, half : half + last] = self.tables[request, :last]
        return replace(batch, tables=step.tensor(tables, torch.int32))

    def attended(self, attention: Attention) -> torch.Tensor:
        case = self.step.case
        columns = case.heads * case.head_size
        queries = self.step.device_qkv()[:, :columns]
        output = torch.full_like(queries, 7.0).contiguous()
        attention.run(self.batch(), queries, self.cache, LAYER, output)
        return output

    def expected(self) -> np.ndarray:
        """The expected result, token by token, from the vectors that each token reads."""
        step, case = self.step, self.step.case
        group = case.heads // case.kv_heads
        queries = step.qkv[:, : case.heads * case.head_size].reshape(-1, case.heads, case.head_size)
        outputs = []
        for request, part in enumerate(case.parts):
            full = step._rounded(step.content[request, : part.context])
            stored = restored(full, self.bits)
            for position in range(part.cached, part.context):
                border = stored_blocks(position, case.block_size, self.tail_blocks) * case.block_size
                seen = np.concatenate([stored[:border], full[border : position + 1]])
                first = 0 if case.window is None else max(0, position + 1 - case.window)
                keys, values = (np.repeat(seen[first:, part_], group, axis=1) for part_ in (0, 1))
                scores = np.einsum("hf,phf->hp", queries[len(outputs)], keys) * case.shape.scale
                if case.cap is not None:
                    scores = case.cap * np.tanh(scores / case.cap)
                weights = np.exp(scores - scores.max(1, keepdims=True))
                weights /= weights.sum(1, keepdims=True)
                outputs.append(np.einsum("hp,phf->hf", weights, values).reshape(-1))
        return np.array(outputs)


def attention_of(case: Case, device: Device, invariant: bool = False) -> Attention:
    return Attention(case.shape, case.window, MAX_REQUESTS, MAX_CONTEXT, device, invariant)


def check(case: Case, device: Device, bits: int, dtype: torch.dtype = torch.float32) -> None:
    tiered = TieredStep(Step(case, device, dtype), bits)
    attention = attention_of(case, device)
    output = tiered.attended(attention).to("cpu", torch.float64).numpy()
    np.testing.assert_allclose(output[: case.tokens], tiered.expected(), rtol=0, atol=TOLERANCES[dtype])
    assert not output[case.tokens :].any()
    assert not attention.arrivals.any()


def decodes(*contexts: int) -> Sequence[Part]:
    return [Part(context - 1, 1) for context in contexts]


def each_in_some_bits(cases: dict[str, Case]) -> pytest.MarkDecorator:
    """Alternates between 8 and 4 bits: the difference does not depend on the rest, and the interpreter is slow."""
    values = [(case, (8, 4)[number % 2]) for number, case in enumerate(cases.values())]
    ids = [f"{name}, {bits} bits" for name, (_, bits) in zip(cases, values, strict=True)]
    return pytest.mark.parametrize(("case", "bits"), values, ids=ids)


DECODES = {
    "nothing is stored": Case(decodes(1, 30, 63)),
    "the first block is stored": Case(decodes(64, 65)),
    "the border is inside a tile": Case(decodes(95, 96, 97, 112, 200)),
    "many splits": Case(decodes(700)),
    "blocks of 32": Case(decodes(170, 133, 127), block_size=32),
    "seven heads to one": Case(decodes(200, 3), heads=7, kv_heads=1),
    "twenty heads to one": Case(decodes(150), heads=20, kv_heads=1),
    "heads of 80": Case(decodes(150, 40), head_size=80),
    "heads of 16": Case(decodes(150), head_size=16),
    "heads of 128": Case(decodes(150, 40), head_size=128),
    "heads of 80 again": Case(decodes(150, 40), head_size=80),
    "heads of 256": Case(decodes(150), head_size=256),
    "a window over both tiers": Case(decodes(300, 20, 170), window=100),
    "a window within the tail": Case(decodes(300, 70), window=40),
    "a cap": Case(decodes(150, 20), cap=2.0),
    "padding": Case(decodes(230, 20), padding=3),
}

CHUNKS = {
    "a prompt within the tail": Case([Part(0, 60)]),
    "a prompt longer than the tail": Case([Part(0, 150)]),
    "prompts": Case([Part(0, 3), Part(0, 100), Part(0, 64)]),
    "chunks of prompts": Case([Part(64, 40), Part(63, 41), Part(100, 3)]),
    "a late chunk": Case([Part(320, 70)], heads=2, kv_heads=1),
    "a chunk longer than several tiles": Case([Part(20, 200)], heads=2, kv_heads=1),
    "blocks of 32": Case([Part(140, 40), Part(0, 20)], block_size=32),
    "three heads to one": Case([Part(50, 60), Part(0, 30)], heads=6),
    "eight heads to one": Case([Part(150, 30)], heads=16),
    "heads of 80": Case([Part(50, 70)], head_size=80),
    "heads of 128": Case([Part(50, 70)], head_size=128),
    "a window over both tiers": Case([Part(300, 60), Part(0, 100)], window=90),
    "a window within the tail": Case([Part(300, 70), Part(90, 30)], window=20),
    "a cap": Case([Part(100, 20)], cap=2.0),
    "decodes, then prompts": Case([Part(170, 1), Part(300, 1), Part(0, 130), Part(65, 40)], decodes=2),
}


@each_in_some_bits(DECODES)
def test_a_decoded_token_reads_old_blocks_from_the_store(case: Case, bits: int, device: Device) -> None:
    check(case, device, bits)


@each_in_some_bits(CHUNKS)
def test_each_token_of_a_chunk_reads_each_block_from_the_tier_of_its_position(
    case: Case, bits: int, device: Device
) -> None:
    check(case, device, bits)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "case",
    [DECODES["heads of 128"], DECODES["the border is inside a tile"], CHUNKS["heads of 128"]],
    ids=["decodes", "short heads decoded", "chunk"],
)
def test_both_tiers_work_in_half_precision(case: Case, bits: int, dtype: torch.dtype, device: Device) -> None:
    check(case, device, bits, dtype)


SHARED = {
    "one long context": Case(decodes(20, 3, 64, 500, 1, 30)),
    "long ones everywhere": Case(decodes(300, 20, 400, 129, 5, 128)),
    "the last is long": Case(decodes(1, 2, 3, 4, 5, 500), padding=2),
    "a window": Case(decodes(300, 20, 400, 129, 90), window=140),
    "less than a tile for each program": Case(decodes(5, 140)),
    "about even": Case(decodes(300, 280, 310, 300), padding=2),
}


@pytest.mark.parametrize("leeway", [0, 3])
@each_in_some_bits(SHARED)
def test_a_batch_that_fills_the_gpu_shares_the_tiles_of_both_tiers(
    case: Case, leeway: int, bits: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = Splits(5, 128, shared=True, leeway=leeway)
    monkeypatch.setattr(Attention, "splits", lambda self, *sizes: splits)
    check(case, device, bits)


# --- the invariant mode ---------------------------------------------------------------------------------------------

INVARIANT = {
    "one split": Case([Part(20, 80)]),
    "several splits": Case([Part(250, 25)]),
    "a window": Case([Part(250, 25)], window=90),
    "a window over splits": Case([Part(390, 20)], window=170),
    "three heads to one, capped": Case([Part(185, 12)], heads=6, cap=4.0),
    "heads of 128": Case([Part(125, 12)], head_size=128),
}


@each_in_some_bits(INVARIANT)
def test_in_the_invariant_mode_a_token_has_the_same_bits_in_a_chunk_and_in_decode(
    case: Case, bits: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_module, "_LEAST_FIXED_SPLIT", 128)
    dtype = torch.bfloat16 if device.is_gpu else torch.float32
    tiered = TieredStep(Step(case, device, dtype), bits)
    attention = attention_of(case, device, invariant=True)
    together = tiered.attended(attention)
    result = together.to("cpu", torch.float64).numpy()
    np.testing.assert_allclose(result, tiered.expected(), rtol=0, atol=TOLERANCES[dtype])
    queries = tiered.step.device_qkv()[:, : together.shape[1]]
    (part,) = case.parts
    whole = tiered.batch()
    for query in sorted({0, part.count // 2, part.count - 1}):
        alone = replace(
            whole,
            tokens=1,
            longest_query=1,
            longest_context=part.cached + query + 1,
            context_lengths=whole.context_lengths - (part.count - 1 - query),
        )
        output = torch.empty_like(together[:1])
        attention.run(alone, queries[query : query + 1], tiered.cache, LAYER, output)
        assert torch.equal(output[0], together[query])
