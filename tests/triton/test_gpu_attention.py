"""Attention over the paged cache in many kinds of batches, compared with numpy in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import LAYER, TOLERANCES, Case, Part, Step

from weft.ops.triton import attention as attention_module
from weft.ops.triton.attention import Attention, Splits
from weft.ops.triton.device import Device

MAX_REQUESTS, MAX_CONTEXT = 8, 2048


def attention_of(case: Case, device: Device, invariant: bool = False) -> Attention:
    return Attention(case.shape, case.window, MAX_REQUESTS, MAX_CONTEXT, device, invariant)


def attended(step: Step, attention: Attention) -> torch.Tensor:
    case = step.case
    columns = case.heads * case.head_size
    queries = step.device_qkv()[:, :columns]
    output = torch.full((len(queries), columns), 7.0, dtype=step.dtype, device=step.device.torch_device)
    attention.run(step.batch(), queries, step.device_cache(step.cache(filled=True)), LAYER, output)
    return output


def check(step: Step, attention: Attention) -> None:
    output = attended(step, attention)[: step.case.tokens].to("cpu", torch.float64).numpy()
    np.testing.assert_allclose(output, step.expected_attention(), rtol=0, atol=TOLERANCES[step.dtype])


def decodes(*contexts: int) -> Sequence[Part]:
    return [Part(context - 1, 1) for context in contexts]


DECODES = {
    "the first token": Case(decodes(1)),
    "several requests": Case(decodes(5, 64, 65, 1, 300)),
    "many splits": Case(decodes(1100)),
    "blocks of 32": Case(decodes(70, 33), block_size=32),
    "one KV head for each query head": Case(decodes(90, 3), heads=2),
    "three heads to one": Case(decodes(90, 3), heads=6),
    "seven heads to one": Case(decodes(200, 3), heads=7, kv_heads=1),
    "eight heads to one": Case(decodes(200), heads=16),
    "twenty heads to one": Case(decodes(150), heads=20, kv_heads=1),
    "heads of 80": Case(decodes(200, 40), head_size=80),
    "heads of 96": Case(decodes(200, 40), head_size=96),
    "heads of 128": Case(decodes(200, 40), head_size=128),
    "heads of 256": Case(decodes(200, 40), head_size=256),
    "a window": Case(decodes(300, 20, 70), window=50),
    "a window over several splits": Case(decodes(900, 20, 601), window=600),
    "a window of one": Case(decodes(100), window=1),
    "a cap": Case(decodes(150, 20), cap=2.0),
    "a cap and a window": Case(decodes(500, 20), cap=30.0, window=280),
    "padding": Case(decodes(130, 20), padding=3),
}

CHUNKS = {
    "a prompt": Case([Part(0, 150)]),
    "prompts": Case([Part(0, 3), Part(0, 100), Part(0, 64)]),
    "chunks of prompts": Case([Part(64, 40), Part(63, 41), Part(100, 3)]),
    "a late chunk": Case([Part(520, 70)]),
    "blocks of 32": Case([Part(40, 40), Part(0, 20)], block_size=32),
    "one KV head for each query head": Case([Part(10, 150)], heads=2),
    "three heads to one": Case([Part(50, 60), Part(0, 30)], heads=6),
    "seven heads to one": Case([Part(50, 30)], heads=7, kv_heads=1),
    "eight heads to one": Case([Part(50, 30)], heads=16),
    "heads of 80": Case([Part(50, 70)], head_size=80),
    "heads of 96": Case([Part(50, 70)], head_size=96),
    "heads of 128": Case([Part(50, 70)], head_size=128),
    "heads of 256": Case([Part(50, 70)], head_size=256),
    "a window": Case([Part(300, 60), Part(0, 100)], window=40),
    "a window larger than a tile": Case([Part(300, 70), Part(90, 30)], window=150),
    "a window of one": Case([Part(100, 20)], window=1),
    "a cap": Case([Part(100, 20)], cap=2.0),
    "a cap and a window": Case([Part(300, 30)], cap=30.0, window=280),
    "one token among prompts": Case([Part(0, 30), Part(70, 1), Part(5, 2)]),
    "decodes, then prompts": Case([Part(70, 1), Part(300, 1), Part(0, 30), Part(65, 40)], decodes=2),
    "all decodes but one": Case([*decodes(70, 300), Part(20, 1), Part(0, 30)], decodes=2),
}


@pytest.mark.parametrize("case", DECODES.values(), ids=DECODES.keys())
def test_a_decoded_token_attends_to_its_context(case: Case, device: Device) -> None:
    check(Step(case, device), attention_of(case, device))


@pytest.mark.parametrize("case", CHUNKS.values(), ids=CHUNKS.keys())
def test_each_token_of_a_chunk_attends_to_all_positions_up_to_its_own(case: Case, device: Device) -> None:
    check(Step(case, device), attention_of(case, device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "case",
    [DECODES["heads of 128"], DECODES["several requests"], CHUNKS["heads of 128"], CHUNKS["a window"]],
    ids=["decodes", "short heads decoded", "chunk", "short heads, a window"],
)
def test_a_cache_in_half_precision_works(case: Case, dtype: torch.dtype, device: Device) -> None:
    check(Step(case, device, dtype), attention_of(case, device))


def test_a_padded_request_gets_zeros(device: Device) -> None:
    case = DECODES["padding"]
    output = attended(Step(case, device), attention_of(case, device))
    assert not output[case.tokens :].any()


def test_a_step_resets_the_counts_of_splits(device: Device) -> None:
    """Otherwise the next step would join its splits before all of them are finished."""
    case = DECODES["many splits"]
    attention = attention_of(case, device)
    attended(Step(case, device), attention)
    assert not attention.arrivals.any()


def test_few_requests_have_their_own_splits_and_many_share_programs(device: Device) -> None:
    attention = attention_of(DECODES["several requests"], device)
    few, many = (attention.splits(requests, 100) for requests in (1, 2 * device.processors))
    assert few.most > 1 and not few.shared
    assert many.shared


SHARED = {
    "one long context": Case(decodes(20, 3, 5, 64, 900, 1, 17, 30)),
    "long ones everywhere": Case(decodes(300, 20, 700, 129, 5, 128, 900, 64)),
    "the last is long": Case(decodes(1, 2, 3, 4, 5, 500), padding=2),
    "only a long one": Case(decodes(1000)),
    "a window": Case(decodes(300, 20, 700, 129, 5, 90, 900, 64), window=140),
    "none is long": Case(decodes(5, 64, 65, 1, 128)),
    "less than a tile for each program": Case(decodes(5, 140)),
    "blocks of 32, heads of 80": Case(decodes(500, 40, 300), block_size=32, head_size=80),
    "three heads to one": Case(decodes(90, 400, 3), heads=6),
    "long ones in a row": Case(decodes(300, 700, 900)),
    "short ones at the cuts": Case(decodes(128, 120, 100, 128, 70, 65, 128)),
    "a full batch": Case(decodes(130, 200, 70, 260, 64, 333, 190, 129)),
    "about even": Case(decodes(400, 380, 410, 400, 390, 400), padding=2),
    "about equal, a window": Case(decodes(300, 310, 290, 305, 300), window=140),
}


def share_tiles(monkeypatch: pytest.MonkeyPatch, leeway: int) -> None:
    """Every batch fills the GPU, and a context of more than 128 tokens is long."""
    splits = Splits(5, 128, shared=True, leeway=leeway)
    monkeypatch.setattr(Attention, "splits", lambda self, *sizes: splits)


@pytest.fixture(params=[0, 3], ids="leeway {}".format)
def shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    share_tiles(monkeypatch, request.param)


@pytest.mark.parametrize("case", SHARED.values(), ids=SHARED.keys())
def test_a_batch_that_fills_the_gpu_shares_all_its_tiles(case: Case, device: Device, shared: None) -> None:
    attention = attention_of(case, device)
    step = Step(case, device)
    check(step, attention)
    assert not attention.arrivals.any()


@pytest.mark.parametrize(
    ("name", "splits"),
    [
        # 22 tiles, five programs with four or five each: the long context is in four parts.
        ("one long context", 4),
        # Tiles 5 to 15 and 16 to 30, cut at 6, 12, 18 and 24; each split has its own workspace entry.
        ("long ones in a row", 3 + 3),
        ("short ones at the cuts", 0),
    ],
)
def test_only_long_contexts_are_cut_if_a_batch_shares_its_tiles(
    name: str, splits: int, device: Device, shared: None
) -> None:
    assert splits_written(SHARED[name], device) == splits


@pytest.mark.parametrize(("leeway", "splits"), [(0, 4 * 2), (3, 0)])
def test_long_contexts_are_not_cut_if_they_are_about_equal(
    leeway: int, splits: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four contexts of eleven tiles, five programs: a share is nine tiles, and eleven is not three more."""
    share_tiles(monkeypatch, leeway)
    case = Case(decodes(700, 700, 700, 700))
    assert splits_written(case, device) == splits
    check(Step(case, device), attention_of(case, device))


def splits_written(case: Case, device: Device) -> int:
    """The number of splits that a step joins, for each query head."""
    attention = attention_of(case, device)
    attention.split_totals.fill_(-1.0)
    # Not in float32, which has other tiles on a GPU.
    attended(Step(case, device, torch.bfloat16), attention)
    return int((attention.split_totals >= 0.0).sum()) // case.heads


# --- the invariant mode ---------------------------------------------------------------------------------------------


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short splits, so that a context of some hundred tokens has several, each of several tiles."""
    monkeypatch.setattr(attention_module, "_LEAST_FIXED_SPLIT", 128)


INVARIANT = {
    "one split": Case([Part(20, 30)]),
    "several splits": Case([Part(250, 25)]),
    "a window": Case([Part(250, 25)], window=40),
    "a window over splits": Case([Part(390, 20)], window=170),
    "three heads to one, capped": Case([Part(185, 12)], heads=6, cap=4.0),
    "heads of 128": Case([Part(125, 12)], head_size=128),
}


@pytest.mark.parametrize("case", INVARIANT.values(), ids=INVARIANT.keys())
def test_the_invariant_mode_attends_to_the_context(case: Case, device: Device, short_splits: None) -> None:
    check(Step(case, device), attention_of(case, device, invariant=True))


@pytest.mark.parametrize("case", INVARIANT.values(), ids=INVARIANT.keys())
def test_in_the_invariant_mode_a_token_has_the_same_bits_in_a_chunk_and_in_decode(
    case: Case, device: Device, short_splits: None
) -> None:
    dtype = torch.bfloat16 if device.is_gpu else torch.float32
    attention, step = attention_of(case, device, invariant=True), Step(case, device, dtype)
    together = attended(step, attention)
    columns = case.heads * case.head_size
    (part,) = case.parts
    cache, queries = step.device_cache(step.cache(filled=True)), step.device_qkv()[:, :columns]
    whole = step.batch()
    for query in sorted({0, part.count // 2, part.count - 1}):
        alone = replace(
            whole,
            tokens=1,
            longest_query=1,
            longest_context=part.cached + query + 1,
            context_lengths=whole.context_lengths - (part.count - 1 - query),
        )
        output = torch.empty_like(together[:1])
        attention.run(alone, queries[query : query + 1], cache, LAYER, output)
        assert torch.equal(output[0], together[query])
