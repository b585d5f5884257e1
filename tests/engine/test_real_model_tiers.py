"""The default model with a two-tier cache through the real engine.

The length of a request alone decides which blocks it reads quantised. So its tokens and logprobs are bit-identical in
any batch, with any chunks, after a preemption and with a prefix hit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from test_real_model import SHARED, TEXTS, Model, assert_equal, logprobs, run

from weft.backends.cpu.runner import CpuBackend, open_native
from weft.config import (
    KvCacheKind,
    KvCachePoolConfig,
    PreemptionMode,
    SchedulerConfig,
    ServingEngineConfig,
)
from weft.engine.serving import ServingEngine
from weft.loading.checkpoint import open_checkpoint
from weft.loading.gguf import GgufFile
from weft.loading.pull import pull
from weft.models.registry import build_decoder
from weft.ops.reference import ReferenceOps
from weft.request import GenerationResult, InferenceRequest, SamplingParams
from weft.text.grammar import GrammarCompiler
from weft.text.model_text import open_tokenizer
from weft.text.tokenizer import Tokenizer

NEW_TOKENS = 12
BLOCK_SIZE = 8
TAIL = 16


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(*open_native(open_checkpoint(pull("default")), None, 2, None))


@pytest.fixture(scope="module")
def requests(default_tokenizer: Tokenizer) -> list[InferenceRequest]:
    """Prompts from one token to five tails. Some share a prefix that is much longer than the tail."""
    shared = " ".join([SHARED] * 3)
    texts = [TEXTS[1], TEXTS[0], SHARED, *(shared + text[len(SHARED) :] for text in TEXTS if SHARED in text)]
    texts += [" ".join(TEXTS[:10])]
    common = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 1}
    return [
        InferenceRequest(
            tuple(default_tokenizer.encode(text)),
            SamplingParams(temperature=0.8 * (index % 2), seed=index, **common),  # type: ignore[arg-type]
        )
        for index, text in enumerate(texts)
    ]


def make_engine(
    model: Model,
    bits: int | None,
    *,
    blocks: int = 96,
    store_blocks: int = 96,
    swap_blocks: int = 0,
    block_size: int = BLOCK_SIZE,
    **scheduler: object,
) -> ServingEngine:
    """`bits` None: a full cache."""
    tiers = {}
    if bits is not None:
        tiers = {
            "kv_cache": KvCacheKind.TWO_TIER,
            "tail_length": TAIL,
            "store_bits": bits,
            "store_blocks": store_blocks,
        }
    config = ServingEngineConfig(
        scheduler=SchedulerConfig(**{"max_running": 16, "prefix_caching": False, **scheduler}),  # type: ignore[arg-type]
        cache=KvCachePoolConfig(num_blocks=blocks, block_size=block_size, swap_blocks=swap_blocks, **tiers),  # type: ignore[arg-type]
        overlap=True,
    )
    ends = frozenset({2})
    compiler = GrammarCompiler(
        lambda: open_tokenizer(open_checkpoint(pull("default"))), ends, model.decoder.config.vocabulary_size
    )
    return ServingEngine(CpuBackend(model.decoder, ends, compiler, model.native), config)


@dataclasses.dataclass(frozen=True)
class Alone:
    """The result of each request when it runs alone."""

    bits: int
    results: Sequence[GenerationResult]


@pytest.fixture(scope="module", params=[8, 4], ids=["8 bits", "4 bits"])
def alone(request: pytest.FixtureRequest, model: Model, requests: list[InferenceRequest]) -> Iterator[Alone]:
    engine = make_engine(model, request.param)
    yield Alone(request.param, [run(engine, [one])[0] for one in requests])
    engine.stop()


def test_tokens_before_the_tail_are_read_quantised_and_change_the_result_little(
    model: Model, requests: list[InferenceRequest], alone: Alone
) -> None:
    engine = make_engine(model, None)
    plain = run(engine, requests)
    engine.stop()
    assert_equal(alone.results[:2], plain[:2])  # never longer than the tail
    distances = []
    for ours, theirs in zip(alone.results[3:], plain[3:], strict=True):
        first, full = logprobs(ours)[0], logprobs(theirs)[0]
        assert first != full, "the store was not read"
        distances.append(abs(first - full))
    # The mean over several requests: rounding of int8 activations alone can move a single logprob by 0.1.
    assert (
        np.mean(distances) < {8: 0.1, 4: 1.0}[alone.bits] and max(distances) < {8: 0.25, 4: 1.0}[alone.bits]
    )


def test_numpy_reads_the_same_from_both_tiers(
    default_model_file: GgufFile, requests: list[InferenceRequest], alone: Alone
) -> None:
    decoder = build_decoder(
        "gguf", default_model_file.metadata, default_model_file.tensors, ReferenceOps(np.float32)
    )
    engine = make_engine(Model(decoder, None), alone.bits, max_chunk_tokens=20)
    one = dataclasses.replace(requests[3], params=dataclasses.replace(requests[3].params, max_tokens=3))
    (result,) = run(engine, [one])
    engine.stop()
    # The kernels round activations to 8 bits, which changes some codes. Larger differences are errors.
    assert abs(logprobs(result)[0] - logprobs(alone.results[3])[0]) < {8: 0.15, 4: 0.5}[alone.bits]


def test_tokens_are_the_same_in_a_batch(model: Model, requests: list[InferenceRequest], alone: Alone) -> None:
    engine = make_engine(model, alone.bits)
    assert_equal(run(engine, requests), alone.results)
    engine.stop()


def test_tokens_are_the_same_with_prompts_in_chunks(
    model: Model, requests: list[InferenceRequest], alone: Alone
) -> None:
    """With chunks smaller than a block and chunks of two tails."""
    for chunk in (7, 32):
        engine = make_engine(
            model, alone.bits, max_chunk_tokens=chunk, max_prefill_tokens=40, max_tokens_per_step=72
        )
        assert_equal(run(engine, requests), alone.results)
        engine.stop()


def test_tokens_are_the_same_with_a_prefix_hit_in_the_store(
    model: Model, requests: list[InferenceRequest], alone: Alone
) -> None:
    engine = make_engine(model, alone.bits, prefix_caching=True)
    assert_equal(run(engine, requests[3:5]), alone.results[3:5])
    again = run(engine, requests)
    assert_equal(again, alone.results)
    assert again[3].cached_token_count >= TAIL + 2 * BLOCK_SIZE
    engine.stop()


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
@pytest.mark.parametrize("short", ["full blocks", "store blocks"])
def test_tokens_are_the_same_after_preemption(
    model: Model, requests: list[InferenceRequest], alone: Alone, mode: PreemptionMode, short: str
) -> None:
    blocks, store_blocks = (10, 96) if short == "full blocks" else (96, 26)
    engine = make_engine(
        model,
        alone.bits,
        blocks=blocks,
        store_blocks=store_blocks,
        swap_blocks=96,
        max_chunk_tokens=16,
        preemption=mode,
    )
    assert_equal(run(engine, requests * 2), [*alone.results, *alone.results])
    stats = engine.stats()[0]
    by_swap, by_recompute = stats.preemptions_by_swap, stats.preemptions_by_recompute
    assert by_swap > 0 if mode is PreemptionMode.SWAP else by_recompute > 0 and by_swap == 0
    assert stats.swaps_failed == 0 and stats.steps_failed == 0
    engine.stop()


def test_blocks_of_sixteen_also_give_the_same_bits_in_any_batch(
    model: Model, requests: list[InferenceRequest]
) -> None:
    """Blocks of this size are read directly; smaller ones are converted first."""
    for bits in (8, 4):
        engine = make_engine(model, bits, block_size=16)
        apart = [run(engine, [one])[0] for one in requests]
        engine.stop()
        engine = make_engine(model, bits, block_size=16, max_chunk_tokens=40)
        assert_equal(run(engine, requests), apart)
        engine.stop()


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_cached_blocks_alone_may_touch_as_much_memory_in_two_tiers_as_in_one(
    model: Model, bits: int | None
) -> None:
    tiers = {} if bits is None else {"kv_cache": KvCacheKind.TWO_TIER, "store_bits": bits}
    compiler = GrammarCompiler(_no_tokenizer, frozenset(), model.decoder.config.vocabulary_size)
    backend = CpuBackend(model.decoder, frozenset(), compiler, model.native)
    info = backend.allocate(KvCachePoolConfig(memory=1 << 30, swap_blocks=0, **tiers), 4)  # type: ignore[arg-type]
    backend.close()
    assert info.eager_blocks is not None
    eager_store = info.eager_blocks * info.store_blocks // info.num_blocks
    touched = info.eager_blocks * info.bytes_per_block + eager_store * info.bytes_per_store_block
    assert 250 << 20 < touched <= 256 << 20


def _no_tokenizer() -> Tokenizer:
    raise AssertionError("nothing here has a grammar")
