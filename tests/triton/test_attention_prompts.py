"""RoPE, then attention, compared with numpy in float64. Prompts that begin in a step are read from the step's rows."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from attention_cases import LAYER, TOLERANCES, Case, Part, Step

from weft.ops.base import AttentionPattern, QkNorm, Rope
from weft.ops.reference import ReferenceOps
from weft.ops.triton.attention import Attention
from weft.ops.triton.attention_dense import is_dense
from weft.ops.triton.device import Device
from weft.ops.triton.rope import RopeTables

MAX_CONTEXT = 1024
TEST_DEVICE = os.environ.get("WEFT_TEST_DEVICE", "cpu")


def rope_of(pairs: int, interleaved: bool = False) -> Rope:
    return Rope(tuple(1e4 ** (-i / pairs) for i in range(pairs)), interleaved, 1.1)


def decodes(*contexts: int) -> list[Part]:
    return [Part(context - 1, 1) for context in contexts]


def norm_of(case: Case, rows: bool = False) -> QkNorm:
    rng = np.random.default_rng(3)
    sizes = [heads * case.head_size if rows else case.head_size for heads in (case.heads, case.kv_heads)]
    query, key = (rng.uniform(0.5, 1.5, size).astype(np.float32) for size in sizes)
    return QkNorm(query, key, 1e-5)


def check(
    case: Case,
    device: Device,
    rope: Rope,
    norm: QkNorm | None,
    dtype: torch.dtype,
    read_rows: bool = False,
) -> None:
    """Checks the output and every cell of the cache."""
    step = Step(case, device, dtype)
    before = step.cache(filled=True)
    cells = step.indices.cells
    before[cells // case.block_size, LAYER, :, cells % case.block_size] = np.nan
    cache = step.device_cache(before)
    output = torch.full((case.tokens + case.padding, case.heads * case.head_size), 7.0, dtype=dtype)
    output = output.to(device.torch_device)
    device_norm = None
    if norm is not None:
        device_norm = QkNorm(step.tensor(norm.query), step.tensor(norm.key), norm.epsilon)
    attention = Attention(case.shape, case.window, 8, MAX_CONTEXT, device)
    attention.can_read_rows |= read_rows
    tables = RopeTables(rope, MAX_CONTEXT, device)
    output = attention.rope_and_attend(
        step.batch(), step.device_qkv(), cache, LAYER, tables, device_norm, output
    )

    ops = ReferenceOps(np.float64)
    prepared = ops.prepare(step.indices, before, case.shape, [AttentionPattern(rope, case.window)])
    queries = ops.rope_and_write(prepared, step.qkv, before, LAYER, 0, norm)
    with np.errstate(invalid="ignore"):
        expected = ops.paged_attention(prepared, queries, before, LAYER, 0)
    tolerance = TOLERANCES[dtype]
    result = output.to("cpu", torch.float64).numpy()
    np.testing.assert_allclose(result[: case.tokens], expected, rtol=tolerance, atol=tolerance)
    assert not result[case.tokens :].any()
    after = cache.to("cpu", torch.float64).numpy().transpose(0, 1, 2, 4, 3, 5)
    np.testing.assert_allclose(after, before, rtol=tolerance, atol=tolerance)


STEPS = {
    "decodes": Case(decodes(90, 3)),
    "padded decodes": Case(decodes(130, 20), padding=3),
    "a chunk and a decode": Case([Part(30, 5), Part(64, 1)]),
}


@pytest.mark.parametrize("norm_rows", [False, True], ids=["heads normalised", "rows normalised"])
@pytest.mark.parametrize("case", STEPS.values(), ids=STEPS.keys())
def test_tokens_attend_to_what_rope_wrote(case: Case, norm_rows: bool, device: Device) -> None:
    check(case, device, rope_of(32), norm_of(case, norm_rows), torch.float32)


PROMPTS = {
    "a prompt": Case([Part(0, 150)], head_size=128),
    "prompts of several requests": Case([Part(0, 3), Part(0, 100), Part(0, 64)]),
    "prompts, chunks and decodes": Case([Part(70, 1), Part(30, 40), Part(0, 70), Part(0, 2)], decodes=1),
    "seven heads to one": Case([Part(0, 40)], heads=7, kv_heads=1),
    "a window": Case([Part(0, 150), Part(0, 20)], window=40),
    "a window larger than a tile": Case([Part(0, 200)], window=150),
    "a cap": Case([Part(0, 90)], cap=2.0),
    "a head size that is no power of two": Case([Part(0, 90)], head_size=80),
}


@pytest.mark.parametrize("case", PROMPTS.values(), ids=PROMPTS.keys())
def test_a_prompt_that_begins_in_the_step_is_read_from_its_rows(case: Case, device: Device) -> None:
    read_rows = case.head_size != 80
    check(case, device, rope_of(case.head_size // 2), norm_of(case), torch.bfloat16, read_rows)


def test_only_steps_of_new_prompts_of_one_long_and_round_length_are_dense(device: Device) -> None:
    def dense(parts: list[Part], window: int | None = None) -> bool:
        return is_dense(Step(Case(parts, heads=1, kv_heads=1, head_size=16), device).batch(), window)

    assert dense([Part(0, 1024), Part(0, 1024)])
    assert dense([Part(0, 1280)], window=1280)
    assert not dense([Part(0, 1280)], window=1279)
    assert not dense([Part(0, 768)])
    assert not dense([Part(0, 1030)])
    assert not dense([Part(0, 1024), Part(0, 1023)])
    assert not dense([Part(0, 1024), Part(1024, 1024)])
    assert not dense([Part(4, 1), Part(0, 1024)])


@pytest.mark.skipif(TEST_DEVICE == "cpu", reason="cuDNN needs a GPU")
def test_dense_prompts_give_the_same_attention(device: Device) -> None:
    case = Case([Part(0, 1024), Part(0, 1024)], heads=8, head_size=128)
    assert Attention(case.shape, None, 8, MAX_CONTEXT, device).by_cudnn
    check(case, device, rope_of(64), norm_of(case), torch.bfloat16)
