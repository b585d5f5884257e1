"""Large steps, in which row blocks pass through the layers without waiting for each other (steps in flow).

Every request must get the same bits as alone on one thread, whatever the order of the threads. Small layers, and more
threads than processors, make the order vary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import test_two_tier_program as two_tier
from native_decoder import NativeDecoder
from small_models import build_model, logits_in_a_batch, save
from test_architectures import CASES
from test_requests_in_blocks import random_texts, step_of

from resident_pages import PAGE, needs_pagemap, pages_between, present_pages, untouched
from spoilt_cache import spoil


def decoder_of(name: str, folder: Path, threads: int, quantize: str | None = None) -> NativeDecoder:
    checkpoint = save(build_model(CASES[name]), folder)
    return NativeDecoder(
        "huggingface", checkpoint.config, checkpoint.sources, threads=threads, quantize=quantize
    )


def logits_alone(alone: NativeDecoder, text: list[int], block_size: int = 16) -> np.ndarray:
    """In steps of so few tokens that none is in flow."""
    plan = [[min(30, len(text) - first)] for first in range(0, len(text), 30)]
    (logits,) = logits_in_a_batch(alone, [text], plan, block_size)
    return logits


def assert_as_alone(
    together: NativeDecoder, alone: NativeDecoder, plan: list[list[int]], block_size: int
) -> None:
    """`plan` has the number of tokens of each request in each step."""
    texts = random_texts(np.sum(plan, axis=0).tolist())
    for text, ours in zip(texts, logits_in_a_batch(together, texts, plan, block_size), strict=True):
        assert np.array_equal(ours, logits_alone(alone, text, block_size))


@pytest.mark.parametrize("quantize", [None, "int4"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3, longrope, part of the head", "mixtral", "olmo2"])
def test_long_and_short_prompts_with_decodes_get_the_same_bits_as_alone(
    name: str, quantize: str | None, tmp_path: Path
) -> None:
    alone = decoder_of(name, tmp_path, 1, quantize)
    together = decoder_of(name, tmp_path, 3, quantize)
    # First chunks that end inside a KV block; then the rest of the prompts with decodes, one of them longer than a
    # row block.
    plan = [
        [90, 37, 1, 64, 5, 40, 1],
        [1, 130, 1, 1, 100, 16, 31],
        [1, 1, 250, 1, 1, 1, 1],
        [1, 1, 1, 33, 1, 1, 199],
    ]
    assert_as_alone(together, alone, plan, 16)


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("block_size", [1, 7, 16, 32, 96, 256])
def test_a_prompt_gets_the_same_bits_with_kv_blocks_of_any_size(
    threads: int, block_size: int, tmp_path: Path
) -> None:
    alone, together = decoder_of("llama", tmp_path, 1), decoder_of("llama", tmp_path, threads)
    assert_as_alone(together, alone, [[400, 10, 1], [1, 100, 300]], block_size)


def test_no_row_block_reads_cells_before_they_are_written(tmp_path: Path) -> None:
    """Every row block of a long prompt reads what all earlier row blocks write. The cache starts with NaN each time."""
    alone, together = decoder_of("llama", tmp_path, 1), decoder_of("llama", tmp_path, 5)
    (text,) = random_texts([480])
    expected = logits_alone(alone, text)
    step = step_of([(text, 0, list(range(30)))], 16)
    for _ in range(40):
        cache = together.new_cache(30, 16)
        spoil(cache)
        assert np.array_equal(together.logits(together.forward(step, cache)), expected)


def test_a_prompt_waits_for_kv_blocks_that_another_prompt_fills_in_the_same_step(tmp_path: Path) -> None:
    """The second prompt shares the first two KV blocks of the first, which fills them in this step."""
    alone, together = decoder_of("llama", tmp_path, 1), decoder_of("llama", tmp_path, 4)
    texts = random_texts([300, 200])
    texts[1][:32] = texts[0][:32]
    expected = [logits_alone(alone, text) for text in texts]
    blocks = list(range(19))
    requests = [(texts[1][32:], 32, [0, 1, *range(19, 30)]), (texts[0], 0, blocks)]
    for order in (requests, requests[::-1]):
        for _ in range(10):
            cache = together.new_cache(30, 16)
            spoil(cache)
            rows = together.logits(together.forward(step_of(order, 16), cache))
            first, second = np.split(rows, [len(order[0][0])])
            late, early = (first, second) if order is requests else (second, first)
            assert np.array_equal(late, expected[1][32:])
            assert np.array_equal(early, expected[0])


@pytest.mark.parametrize("bits", [8, 4])
def test_prompts_of_a_two_tier_cache_get_the_same_bits_as_alone(bits: int, tmp_path: Path) -> None:
    alone, together = decoder_of("llama", tmp_path, 1), decoder_of("llama", tmp_path, 3)
    texts = random_texts([260, 9, 90, 33])
    plan = [[100, 3, 40, 1], [150, 1, 49, 1], [1, 1, 1, 30], [9, 4, 0, 1]]
    for text, ours in zip(texts, two_tier.logits_in_a_batch(together, texts, plan, bits), strict=True):
        (expected,) = two_tier.logits_in_a_batch(alone, [text], [[len(text)]], bits)
        assert np.array_equal(ours, expected)


@needs_pagemap
@pytest.mark.parametrize("threads", [1, 3])
def test_offered_pages_are_prefaulted_during_a_step_in_flow_and_during_no_other(
    threads: int, tmp_path: Path
) -> None:
    decoder = decoder_of("llama", tmp_path, threads)
    (text,) = random_texts([480])
    cache = decoder.new_cache(30, 16)
    flowing = step_of([(text, 0, list(range(30)))], 16)
    others = [
        step_of([(text[:8], 0, [0])], 16),
        step_of([(text[:10], 0, [number]) for number in range(6)], 16),  # each thread computes whole requests
    ]
    expected = decoder.logits(decoder.forward(flowing, cache))
    memory = untouched(300 * PAGE)
    first, end = 7 * PAGE + 100, 290 * PAGE - 5

    for other in others:
        decoder.pool.offer_pages(memory[first:end])
        decoder.forward(other, cache)
        assert decoder.pool.withdraw_pages(), "no thread prefaults during such a step"
    decoder.forward(flowing, cache)
    assert not any(present_pages(memory)), "the offer was withdrawn"

    decoder.pool.offer_pages(memory[first:end])
    logits = decoder.logits(decoder.forward(flowing, cache))
    assert not decoder.pool.withdraw_pages(), "a thread prefaulted the pages"
    assert present_pages(memory) == pages_between(first, end, memory.size)
    assert np.array_equal(logits, expected)
    assert not memory.any()
