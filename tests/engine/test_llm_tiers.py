"""`LLM` with a two-tier KV cache: options, sizes, and answers that do not depend on the batch."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from weft.bench.gpu_work import open_shape
from weft.config import KvCacheKind, PriorityPolicy
from weft.llm import LLM
from weft.request import SamplingParams

MEMORY = 1 << 20
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(params=[8, 4])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(
        open_shape("tiny"),
        device="cpu",
        kv_cache="two-tier",
        tail_length=32,
        store_bits=request.param,
        memory=MEMORY,
        policy="fcfs",
    ) as llm:
        yield llm


def prompts() -> list[list[int]]:
    source = random.Random(3)
    return [source.choices(range(512), k=length) for length in (40, 170, 300, 90)]


def test_options_may_be_strings_and_the_memory_is_split_between_the_tiers(llm: LLM) -> None:
    config = llm.engine.config
    assert config.cache.kv_cache is KvCacheKind.TWO_TIER and config.scheduler.policy is PriorityPolicy.FCFS
    memory, tiers = llm.memory, llm.memory.tiers
    assert tiers is not None and tiers.store_bits == config.cache.store_bits and tiers.tail_length == 32
    assert tiers.tail_bytes + tiers.store_bytes == memory.kv_cache <= MEMORY
    assert tiers.tail_tokens + tiers.store_tokens == memory.kv_tokens
    # In full precision a token of this model takes 2 layers x 2 x 2 heads x 16 codes of 12 bits and a scale of 2 bytes.
    assert tiers.ratio == pytest.approx(memory.kv_tokens * 208 / memory.kv_cache) and tiers.ratio > 1.4


def test_an_answer_is_the_same_alone_and_in_a_batch_and_its_old_blocks_move_to_the_store(llm: LLM) -> None:
    alone = [llm.generate(prompt, GREEDY)[0].tokens for prompt in prompts()]
    together = [result.tokens for result in llm.generate(prompts(), GREEDY, show_progress=False)]
    assert together == alone
    metrics = llm.engine.metrics().two_tier
    assert metrics is not None and metrics.migrations > 0
    assert (metrics.tail_tokens, metrics.store_tokens) == (0, 0), "ended requests hold no tokens"


def test_a_full_cache_has_no_tiers() -> None:
    with LLM(open_shape("tiny"), device="cpu", memory=MEMORY) as llm:
        assert llm.memory.tiers is None and llm.engine.metrics().two_tier is None
