"""Steps with draft tokens: their index arrays, and to which request an error of the sampler belongs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from test_batch import plan, start

from weft.backends.cpu.runner import CpuBackend, open_cpu_backend
from weft.backends.step_arrays import PreparedStep, Rows
from weft.config import KvCachePoolConfig
from weft.loading.random_checkpoint import random_checkpoint
from weft.plan import StepResult
from weft.request import Failure, FailureKind
from weft.sampling import reference as numpy_sampler
from weft.sampling.reference import Sampled

BLOCK_SIZE = 4
PREFILL_ROW = 8


@pytest.mark.parametrize("full_blocks", [None, 16], ids=["plain", "two tiers"])
@pytest.mark.parametrize("seed", range(8))
def test_decodes_with_drafts_have_the_same_arrays_with_and_without_a_prompt_in_the_step(
    seed: int, full_blocks: int | None
) -> None:
    random = np.random.default_rng(seed)
    rows, twin = (
        Rows(PREFILL_ROW + 1, 64, BLOCK_SIZE, full_blocks=full_blocks, tail_blocks=2) for _ in range(2)
    )
    lengths = [*random.integers(3, 50, size=PREFILL_ROW).tolist(), 5]
    shapes: list[dict[str, Any]] = [{}, {"temperature": 0.5, "logprobs": 2}, {"top_k": 3, "seed": 7}]
    begun = tuple(
        start(
            row,
            tuple(random.integers(99, size=n).tolist()),
            tuple(random.permutation(16 if full_blocks is None else 32)[:16].tolist()),
            **shapes[row % 3],
        )
        for row, n in enumerate(lengths)
    )
    chosen = random.permutation(PREFILL_ROW)[: random.integers(1, PREFILL_ROW + 1)].tolist()
    num_decodes = int(random.integers(len(chosen)))
    drafts = tuple(
        tuple(random.integers(99, size=random.integers(1, 12)).tolist()) for _ in chosen[num_decodes:]
    )
    counts = [1] * num_decodes + [1 + len(one) for one in drafts]
    entries = [(row, lengths[row] - 1, count, True) for row, count in zip(chosen, counts, strict=True)]
    moved: dict[str, Any] = {}
    if full_blocks is not None:
        moved = {"moved_rows": (chosen[0],), "moved_indices": (0,), "moved_from": (3,), "moved_to": (20,)}
    alone = plan(entries, num_decodes, drafts=drafts, row_starts=begun, **moved)
    with_prompt = plan(
        [*entries, (PREFILL_ROW, 0, 2, True)], num_decodes, drafts=drafts, row_starts=begun, **moved
    )
    found, general = (_prepared(state, one) for state, one in ((rows, alone), (twin, with_prompt)))

    num_tokens, num_entries = sum(counts), len(entries)
    for name, values in vars(found.indices).items():
        expected = getattr(general.indices, name)
        if name == "store":
            assert (values is None) is (full_blocks is None)
            for part in vars(values) if values is not None else ():
                one, other = getattr(values, part), getattr(expected, part)
                other = other[:num_entries] if part == "tables" else other
                assert one.dtype == other.dtype and one.tolist() == other.tolist(), part
            continue
        size = {"query_starts": num_entries + 1, "context_lengths": num_entries, "block_tables": num_entries}
        expected = expected[: size.get(name, num_tokens)]
        assert values.dtype == expected.dtype and values.tolist() == expected.tolist(), name
    for name, values in vars(found.entries).items():
        expected = getattr(general.entries, name)[:num_tokens]
        assert np.array_equal(values, expected), name
        assert isinstance(values, list) or values.dtype == expected.dtype, name
    assert found.input_places.tolist() == general.input_places[:num_tokens].tolist()
    assert found.sampled_places.tolist() == general.sampled_places[:num_tokens].tolist()
    assert (found.drafts, found.first_draft) == (general.drafts, general.first_draft) == (drafts, num_decodes)
    # The tokens of an entry are its last known token and its drafts. Each of them samples.
    flat = [t for (row, first, _, _), extra in zip(entries, ((),) * num_decodes + drafts, strict=True)
            for t in (begun[row].tokens[first], *extra)]  # fmt: skip
    assert found.indices.token_ids.tolist() == flat
    assert found.entries.positions.tolist() == [
        position + 1 for _, first, count, _ in entries for position in range(first, first + count)
    ]


def _prepared(rows: Rows, step_plan: Any) -> PreparedStep:
    rows.update(step_plan)
    step = rows.prepare(step_plan)
    rows.read_tokens(step)
    return step


def test_the_next_step_continues_after_the_accepted_drafts_and_the_sampled_token() -> None:
    for num_accepted in range(4):
        rows = Rows(num_rows=2, max_context=32, block_size=BLOCK_SIZE)
        first = plan(
            [(1, 4, 4, True)], drafts=((50, 51, 52),), row_starts=(start(1, (1, 2, 3, 4, 5), (3, 4, 5)),)
        )
        step = _prepared(rows, first)
        sampled = [(50, 51, 52)[n] if n < num_accepted else 90 + n for n in range(4)]
        rows.record(step, np.array(sampled))
        following = _prepared(rows, plan([(1, 5 + num_accepted, 1, True)], decodes=1))
        assert following.indices.token_ids.tolist() == [90 + num_accepted]
        assert rows.tokens[1, : 6 + num_accepted].tolist() == [1, 2, 3, 4, 5, *sampled[: num_accepted + 1]]


def test_new_drafts_overwrite_rejected_ones() -> None:
    rows = Rows(num_rows=1, max_context=32, block_size=BLOCK_SIZE)
    begun = (start(0, (1, 2, 3), (3, 4)),)
    rows.record(
        _prepared(rows, plan([(0, 2, 4, True)], drafts=((7, 8, 9),), row_starts=begun)),
        np.array([60, 61, 62, 63]),
    )
    step = _prepared(rows, plan([(0, 3, 3, True)], drafts=((10, 11),)))
    assert step.indices.token_ids.tolist() == [60, 10, 11]


def test_decodes_continue_correctly_after_a_step_with_drafts() -> None:
    """Consecutive decode steps reuse their arrays, but not across a step with drafts."""
    rows = Rows(num_rows=2, max_context=64, block_size=16)
    begun = (start(0, (1, 2, 3), (3, 4)), start(1, (4, 5, 6), (5, 6)))
    _prepared(rows, plan([(0, 2, 1, True), (1, 2, 1, True)], decodes=2, row_starts=begun))
    _prepared(rows, plan([(1, 3, 1, True), (0, 3, 3, True)], decodes=1, drafts=((7, 8),)))
    step = _prepared(rows, plan([(0, 5, 1, True), (1, 4, 1, True)], decodes=2))
    assert step.indices.positions.tolist() == [5, 4]
    assert step.indices.cells.tolist() == [3 * 16 + 5, 5 * 16 + 4]
    assert step.entries.output_indices.tolist() == [4, 3]


def test_a_sample_is_valid_if_all_drafts_before_it_were_accepted() -> None:
    rows = Rows(num_rows=4, max_context=32, block_size=BLOCK_SIZE)
    begun = tuple(start(row, (1, 2, 3), (row, 4 + row)) for row in range(4))
    step = _prepared(
        rows,
        plan(
            [(0, 2, 1, True), (1, 2, 3, True), (2, 2, 2, True), (3, 0, 2, True)],
            decodes=1,
            drafts=((70, 71), (80,)),
            row_starts=begun,
        ),
    )

    def valid(*tokens: int) -> list[bool]:
        return [step.is_valid_sample(sample, np.array(tokens)) for sample in range(len(tokens))]

    # One sample of a decode, three with the drafts 70 and 71, two with the draft 80, one of the prompt.
    assert valid(5, 70, 71, 6, 80, 7, 8) == [True] * 7
    assert valid(5, 70, 0, 6, 80, 7, 8) == [True, True, True, False, True, True, True]
    assert valid(5, 0, 71, 6, 80, 7, 8) == [True, True, False, False, True, True, True]
    assert valid(0, 70, 71, 6, 0, 7, 8) == [True, True, True, True, True, False, True]


# ---------------------------------------------------------------------- errors


SHAPE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


NO_NUMBER = Failure(FailureKind.STEP, "no number")


class FailingSampler:
    """The numpy sampler with given tokens and an error for one of the samples."""

    def __init__(self, tokens: list[int], failing: int) -> None:
        self.tokens, self.failing = tokens, failing

    def sample(self, *arguments: Any) -> Sampled:
        sampled = numpy_sampler.sample(*arguments)
        assert len(sampled.tokens) == len(self.tokens)
        return Sampled(np.array(self.tokens), sampled.logprobs, {self.failing: NO_NUMBER})

    score = staticmethod(numpy_sampler.score)


@pytest.fixture
def backend() -> Iterator[CpuBackend]:
    backend = open_cpu_backend(random_checkpoint(SHAPE), dtype=np.float32)
    backend.allocate(KvCachePoolConfig(num_blocks=8, block_size=16), 2)
    yield backend
    backend.close()


@pytest.mark.parametrize(("failing", "is_reported"), [(0, True), (1, True), (2, True), (3, False)])
def test_an_error_after_a_rejected_draft_is_ignored(
    backend: CpuBackend, failing: int, is_reported: bool
) -> None:
    """The samples are: of a decode, after a known token, after an accepted draft, after a rejected draft."""
    begun = (start(0, (1, 2, 3), (0,)), start(1, (4, 5, 6), (1,)))
    drafted = plan([(0, 2, 1, True), (1, 2, 3, True)], decodes=1, drafts=((70, 71),), row_starts=begun)
    backend._sampler = FailingSampler([9, 70, 0, 5], failing)  # type: ignore[assignment]
    result: StepResult = backend.submit(drafted).result()
    assert list(result.tokens) == [9, 70, 0, 5]
    request_id = drafted.request_ids[min(failing, 1)]
    assert result.errors == ({request_id: NO_NUMBER} if is_reported else {})
