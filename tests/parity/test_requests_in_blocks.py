"""Steps in which each thread computes whole requests through all layers, and steps in which it must not.

Every request must get the same bits as alone on one thread."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import test_two_tier_program as two_tier
from native_decoder import NativeDecoder
from small_models import VOCABULARY, build_model, logits_in_a_batch, next_step, save
from test_architectures import CASES

from spoilt_cache import spoil
from weft.ops.base import StepIndices

REQUESTS = 32
# A step is split by requests if it has 4 to 72 rows for each thread.
THREADS = [2, 1]


def random_texts(lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(11)
    return [rng.integers(1, VOCABULARY, length).tolist() for length in lengths]


def decoders(name: str, folder: Path, quantize: str | None = None) -> list[NativeDecoder]:
    """A decoder with two threads for batches, and one with one thread for single requests."""
    checkpoint = save(build_model(CASES[name]), folder)
    return [
        NativeDecoder(
            "huggingface", checkpoint.config, checkpoint.sources, threads=threads, quantize=quantize
        )
        for threads in THREADS
    ]


@pytest.mark.parametrize("quantize", [None, "int4"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3, longrope, part of the head", "mixtral", "olmo2"])
def test_many_requests_with_one_token_or_several_get_the_same_bits_as_alone(
    name: str, quantize: str | None, tmp_path: Path
) -> None:
    """Models with windows, grouped heads, and query and key norms. A mixture of experts is never split by requests."""
    together, alone = decoders(name, tmp_path, quantize)
    rng = np.random.default_rng(12)
    before = rng.integers(1, 60, REQUESTS)
    steps = [rng.choice([1, 1, 1, 2, 5], REQUESTS) for _ in range(4)] + [np.ones(REQUESTS, np.int64)] * 4
    texts = random_texts((before + sum(steps)).tolist())
    ours = logits_in_a_batch(together, texts, [before.tolist(), *(step.tolist() for step in steps)], 16)
    for text, logits in zip(texts, ours, strict=True):
        (expected,) = logits_in_a_batch(alone, [text], [[len(text)]], 16)
        assert np.array_equal(logits, expected)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral"])
@pytest.mark.parametrize("counts", [[1] * 20, [30, 1, 1, 1, 9], [100, 40, 7]])
def test_selected_rows_have_the_same_bits_as_without_selection(
    name: str, counts: list[int], tmp_path: Path
) -> None:
    """The last layer computes only selected rows: some, in another order, some twice, none, all."""
    together, _ = decoders(name, tmp_path, "int4")
    texts = random_texts(counts)
    tables = np.arange(7 * len(texts)).reshape(len(texts), 7)
    _, step = next_step(texts, counts, np.zeros(len(texts), np.int64), tables, 16)
    total = sum(counts)

    def rows_of(selected: np.ndarray) -> np.ndarray:
        cache = together.new_cache(tables.size, 16)
        return together.forward(replace(step, logit_indices=selected), cache)

    whole = rows_of(np.arange(total))
    assert whole.shape[0] == total
    for selected in ([total - 1], range(0, total, 3), reversed(range(total)), [5, 2, 5], []):
        chosen = np.array(list(selected), np.int64)
        assert np.array_equal(rows_of(chosen), whole[chosen])


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_logits_have_the_same_bits_if_threads_start_them_before_other_threads_end_the_layers(
    name: str, quantize: str | None, tmp_path: Path
) -> None:
    """Every row of the step samples. The vocabulary is large, so logits are computed in pieces. There are more
    threads than processors, so some pieces start early. Cases: with and without a cap of logits, and with experts,
    where a step is split by rows."""
    case = CASES[name]
    case = replace(case, options={**case.options, "vocab_size": 9000})
    checkpoint = save(build_model(case), tmp_path)
    decoder = NativeDecoder(
        "huggingface", checkpoint.config, checkpoint.sources, threads=5, quantize=quantize
    )
    rng = np.random.default_rng(14)
    for trial in range(30):
        count = int(rng.integers(50, 60))
        texts = rng.integers(1, 9000, (count, 1)).tolist()
        _, step = next_step(texts, [1] * count, np.zeros(count, np.int64), np.arange(count)[:, None], 16)
        cache = decoder.new_cache(count, 16)
        logits, rest = decoder.step(step, cache, count)
        assert logits.shape == (count, 9000) and not len(rest)
        if trial % 3 == 0:  # no state of this step may affect logits of other rows
            rows = decoder.forward(step, cache).copy()
            assert np.array_equal(decoder.logits(rows[::-1]), logits[::-1])
        some, others = decoder.step(step, cache, 7)
        assert np.array_equal(some, logits[:7]) and len(others) == count - 7
        assert np.array_equal(logits, decoder.logits(decoder.forward(step, cache)))


def test_steps_with_about_as_many_requests_as_threads_get_the_same_bits_as_alone(tmp_path: Path) -> None:
    """Seven requests on eight threads leave one thread without a request. Steps of other sizes run in between, so
    that a thread without work could mistake their old state for work."""
    checkpoint = save(build_model(CASES["llama"]), tmp_path)
    together, alone = (
        NativeDecoder("huggingface", checkpoint.config, checkpoint.sources, threads=threads)
        for threads in (8, 1)
    )
    for count in (12, 7, 16, 7, 9, 7, 8, 7):
        texts = random_texts([14] * count)
        ours = logits_in_a_batch(together, texts, [[14] * count], 16)
        for text, logits in zip(texts, ours, strict=True):
            (expected,) = logits_in_a_batch(alone, [text], [[14]], 16)
            assert np.array_equal(logits, expected)


@pytest.mark.parametrize("readers_first", [True, False])
def test_a_request_waits_for_a_kv_block_that_another_request_fills_in_the_same_step(
    readers_first: bool, tmp_path: Path
) -> None:
    """A prefix hit in a block that another request fills in the same step. The cache starts with NaN. The pool is
    idle before each step, so that one thread wakes up late."""
    together, alone = decoders("llama", tmp_path)
    size, pairs = 4, 8
    texts = random_texts([size + 2] * pairs)
    writers = [(text[:size], 0, [number]) for number, text in enumerate(texts)]
    readers = [(text[size:], size, [number, pairs + number]) for number, text in enumerate(texts)]
    requests = readers + writers if readers_first else writers + readers
    expected = [logits_in_a_batch(alone, [text], [[len(text)]], size)[0] for text in texts]
    for _ in range(20):
        cache = together.new_cache(2 * pairs, size)
        spoil(cache)
        time.sleep(0.002)
        rows = together.forward(step_of(requests, size), cache)
        logits = iter(np.split(together.logits(rows), np.cumsum([len(tokens) for tokens, *_ in requests])))
        for tokens, first, table in requests:
            assert np.array_equal(next(logits), expected[table[0]][first : first + len(tokens)])


def step_of(requests: list[tuple[list[int], int, list[int]]], block_size: int) -> StepIndices:
    """A step of requests, each given as its tokens, the position of the first token, and its block table."""
    counts = [len(tokens) for tokens, *_ in requests]
    positions = [np.arange(first, first + len(tokens)) for tokens, first, _ in requests]
    tables = np.zeros((len(requests), max(len(table) for *_, table in requests)), np.int64)
    for row, (*_, table) in enumerate(requests):
        tables[row, : len(table)] = table
    pairs = zip(tables, positions, strict=True)
    return StepIndices(
        token_ids=np.concatenate([tokens for tokens, *_ in requests]),
        positions=np.concatenate(positions),
        cells=np.concatenate([table[at // block_size] * block_size + at % block_size for table, at in pairs]),
        query_starts=np.concatenate([[0], np.cumsum(counts)]),
        context_lengths=np.array([at[-1] + 1 for at in positions]),
        block_tables=tables,
        logit_indices=np.arange(sum(counts)),
    )


def test_a_long_context_in_a_batch_with_many_short_ones_changes_no_bits(tmp_path: Path) -> None:
    together, alone = decoders("llama", tmp_path)
    texts = random_texts([1500, *[6] * (REQUESTS - 1)])
    plan = [[1495, *[1] * (REQUESTS - 1)], *[[1] * REQUESTS] * 5]
    for text, ours in zip(texts, logits_in_a_batch(together, texts, plan, 16), strict=True):
        (expected,) = logits_in_a_batch(alone, [text], [[len(text)]], 16)
        assert np.array_equal(ours, expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_requests_of_a_two_tier_cache_get_the_same_bits_as_alone_whether_or_not_a_step_moves_blocks(
    bits: int, tmp_path: Path
) -> None:
    together, alone = decoders("llama", tmp_path)
    before = np.random.default_rng(13).permutation(np.arange(REQUESTS) // 8 * 8 + 9)
    texts = random_texts((before + 12).tolist())
    # Blocks become full, and move to the store, in one step of eight.
    plan = [before.tolist(), *[[1] * REQUESTS] * 12]
    for text, ours in zip(texts, two_tier.logits_in_a_batch(together, texts, plan, bits), strict=True):
        (expected,) = two_tier.logits_in_a_batch(alone, [text], [[len(text)]], bits)
        assert np.array_equal(ours, expected)
