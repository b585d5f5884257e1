"""The two-tier cache in the C++ program and in numpy: close logits, and the same bits from the program in any batch.
Blocks are moved in the step that fills them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from native_decoder import NativeDecoder
from small_models import VOCABULARY, build_model, next_step, save
from test_architectures import CASES, relative_error

from cache_codes import kept
from spoilt_cache import spoil
from weft import _kernels
from weft.models.decoder import Decoder
from weft.models.registry import build_decoder
from weft.ops.base import QkNorm, StepIndices, StoreIndices, TwoTierCache
from weft.ops.reference import ReferenceOps
from weft.ops.reference_tiers import move_blocks
from weft.tiers import stored_blocks

FUSED = [name for name in _kernels.available() if name != "portable"]
BITS = pytest.mark.parametrize("bits", [8, 4])


@pytest.fixture(params=_kernels.available())
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _kernels.in_use()
    _kernels.use(request.param)
    yield request.param
    _kernels.use(before)


def logits_in_a_batch(
    decoder: Decoder | NativeDecoder,
    texts: list[list[int]],
    plan: list[list[int]],
    bits: int,
    block_size: int = 8,
    tail: int = 2,
) -> list[np.ndarray]:
    """The logits of every token of each text. Each entry of `plan` is a step: the number of tokens of each text. A
    step moves all blocks that its last token reads from the store. Then the moved full blocks are filled with NaN."""
    needed = [-(-len(text) // block_size) for text in texts]
    order = np.random.default_rng(2).permutation(sum(needed) + 3)
    tables, store_tables = (np.zeros((len(texts), max(needed)), np.int64) for _ in range(2))
    for row, count in enumerate(needed):
        tables[row, :count], order = order[:count], order[count:]
        store_tables[row, :count] = tables[row, :count][::-1]
    full, store = (
        decoder.new_cache(sum(needed) + 3, block_size),
        decoder.new_store(sum(needed) + 3, block_size, bits),
    )
    spoil(full)
    store[...] = 255
    cache: Any = TwoTierCache(full, store, bits, tail)
    done, moved = np.zeros(len(texts), np.int64), np.zeros(len(texts), np.int64)
    pieces: list[list[np.ndarray]] = [[] for _ in texts]
    for counts in plan:
        rows, step = next_step(texts, counts, done, tables, block_size)
        starts = step.query_starts
        ends = [stored_blocks(int(done[row]) - 1, block_size, tail) for row in rows]
        moves = [
            (row, block) for row, end in zip(rows, ends, strict=True) for block in range(moved[row], end)
        ]
        moved[rows] = ends
        step = replace(
            step,
            store=StoreIndices(
                store_tables[rows, : max(ends)],
                np.array([tables[move] for move in moves], np.int64),
                np.array([store_tables[move] for move in moves], np.int64),
            ),
        )
        logits = decoder.logits(decoder.forward(step, cache))
        for index, row in enumerate(rows):
            pieces[row].append(logits[starts[index] : starts[index + 1]])
            spoil(full, tables[row, : moved[row]])
    return [np.concatenate(piece) for piece in pieces]


TEXTS = [np.random.default_rng(4).integers(1, VOCABULARY, length).tolist() for length in (100, 41, 9, 66)]
PLAN = [[50, 40, 0, 7], [0, 1, 8, 7], [49, 0, 0, 7], [1, 0, 1, 45]]


class CodedReferenceOps(ReferenceOps):
    """numpy with cache values rounded as in the kernels, so that the codes in the store are nearly always equal."""

    def rope_and_write(
        self, prepared: Any, qkv: np.ndarray, cache: Any, layer: int, pattern: int, norm: QkNorm | None = None
    ) -> np.ndarray:
        queries = super().rope_and_write(prepared, qkv, cache.full, layer, pattern, norm)
        for which in range(2):
            cells = (prepared.blocks, layer, which, prepared.offsets)
            cache.full[cells] = kept(cache.full[cells], of_values=which == 1)
        move_blocks(cache, layer, prepared.step)
        return queries


@BITS
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3, longrope, part of the head"])
def test_the_program_and_numpy_give_close_logits(name: str, bits: int, tmp_path: Path) -> None:
    checkpoint = save(build_model(CASES[name]), tmp_path)
    native = NativeDecoder("huggingface", checkpoint.config, checkpoint.sources)
    numpy = build_decoder("huggingface", checkpoint.config, checkpoint.sources, CodedReferenceOps(np.float32))
    ours, theirs = (logits_in_a_batch(decoder, TEXTS, PLAN, bits) for decoder in (native, numpy))
    # A few values get another code.
    for one, other in zip(ours, theirs, strict=True):
        assert relative_error(one, other) <= {8: 0.004, 4: 0.03}[bits]


@BITS
@pytest.mark.parametrize("block_size, tail", [(8, 1), (16, 2)])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_logits_are_the_same_bits_in_any_batch_and_in_any_chunks(
    name: str, block_size: int, tail: int, bits: int, instructions: str, tmp_path: Path
) -> None:
    checkpoint = save(build_model(CASES[name]), tmp_path)
    whole, alone = (
        NativeDecoder("huggingface", checkpoint.config, checkpoint.sources, threads=threads)
        for threads in (3, 1)
    )
    together = logits_in_a_batch(whole, TEXTS, PLAN, bits, block_size, tail)
    for text, ours in zip(TEXTS, together, strict=True):
        for plan in ([[len(text)]], [[1]] * len(text)):
            (expected,) = logits_in_a_batch(alone, [text], plan, bits, block_size, tail)
            assert np.array_equal(ours, expected)


@BITS
@pytest.mark.parametrize("instructions", FUSED[1:], indirect=True)
def test_logits_are_the_same_bits_on_every_instruction_set_with_fused_multiply_add(
    bits: int, instructions: str, tmp_path: Path
) -> None:
    checkpoint = save(build_model(CASES["llama"]), tmp_path)
    decoder = NativeDecoder("huggingface", checkpoint.config, checkpoint.sources)
    ours = logits_in_a_batch(decoder, TEXTS, PLAN, bits)
    _kernels.use(FUSED[0])
    for one, other in zip(ours, logits_in_a_batch(decoder, TEXTS, PLAN, bits), strict=True):
        assert np.array_equal(one, other)


def test_a_long_context_gives_the_same_bits_whether_or_not_threads_share_its_segments(
    instructions: str, tmp_path: Path
) -> None:
    checkpoint = save(build_model(CASES["llama"]), tmp_path)
    decoder = NativeDecoder("huggingface", checkpoint.config, checkpoint.sources, threads=3)
    rng = np.random.default_rng(5)
    long, *short = [rng.integers(1, VOCABULARY, length).tolist() for length in (1200, *[3] * 12)]
    (alone,) = logits_in_a_batch(decoder, [long], [[1195], *[[1]] * 5], 8, 16, 4)
    (whole,) = logits_in_a_batch(decoder, [long], [[1200]], 8, 16, 4)
    among, *_ = logits_in_a_batch(
        decoder, [long, *short], [[1198, *[1] * 12], *[[1, *[1] * 12]] * 2], 8, 16, 4
    )
    assert np.array_equal(alone, whole)
    assert np.array_equal(among, whole)


def test_a_step_that_would_read_or_write_outside_the_store_is_rejected(tmp_path: Path) -> None:
    checkpoint = save(build_model(CASES["llama"]), tmp_path)
    decoder = NativeDecoder("huggingface", checkpoint.config, checkpoint.sources)
    cache = TwoTierCache(decoder.new_cache(8, 4), decoder.new_store(3, 4, 8), 8, 1)

    def step(store: StoreIndices) -> StepIndices:
        tokens = np.arange(12)
        return StepIndices(
            tokens, tokens, tokens, np.array([0, 12]), np.array([12]), np.arange(3)[None], tokens[-1:], store
        )

    def moves(count: int) -> np.ndarray:
        return np.arange(count)

    decoder.forward(step(StoreIndices(np.array([[0, 2]]), moves(2), moves(2))), cache)
    with pytest.raises(ValueError, match="table of the store is too short"):
        decoder.forward(step(StoreIndices(np.array([[0]]), moves(1), moves(1))), cache)
    with pytest.raises(ValueError, match="a block is past the store"):
        decoder.forward(step(StoreIndices(np.array([[0, 3]]), moves(1), moves(1))), cache)
    with pytest.raises(ValueError, match="a moved block is past the store"):
        decoder.forward(step(StoreIndices(np.array([[0, 2]]), moves(4), moves(4))), cache)
    with pytest.raises(ValueError, match="a moved block is past the cache"):
        decoder.forward(step(StoreIndices(np.array([[0, 2]]), moves(1) + 8, moves(1))), cache)
