"""Compares the C++ sampler with the numpy sampler that defines it: the same tokens, errors and logprobs, on every
instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from sampling_cases import (
    ANY_JSON,
    CONTEXT,
    EOS,
    WAYS_OF_CHOOSING,
    assert_agree,
    random_logits,
    random_masks,
    random_requests,
)
from weft.backends.grammar import NO_MASKS, Masks
from weft.backends.step_arrays import Rows, SampledEntries
from weft.plan import IterationPlan, RowStart
from weft.request import RequestId, SamplingParams
from weft.sampling import reference as plain
from weft.sampling.reference import FORBIDDEN, NOT_A_NUMBER, OVERFLOW, Sampled
from weft.sampling.words import sampler_words

_kernels = pytest.importorskip("weft._kernels", reason="weft was installed without kernels")
from weft.backends.cpu.native_sampler import NativeSampler  # noqa: E402

assert_same = partial(assert_agree, relative=1e-13, absolute=1e-12)


@pytest.fixture(params=_kernels.available())
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _kernels.in_use()
    _kernels.use(request.param)
    yield request.param
    _kernels.use(before)


class Step:
    """Entries that sample in one step, each with its own row and history."""

    def __init__(
        self,
        params: list[SamplingParams],
        histories: list[tuple[int, ...]] | None = None,
        prompt_lengths: list[int] | None = None,
        seeds: list[int] | None = None,
    ) -> None:
        count = len(params)
        self.params = params
        self.histories = histories or [(1, 2, 3)] * count
        self.prompt_lengths = prompt_lengths or [len(history) for history in self.histories]
        self.seeds = seeds or list(range(count))
        starts = tuple(
            RowStart(row, RequestId(str(row)), history, prompt_length, params, seed, (0,))
            for row, (history, prompt_length, params, seed) in enumerate(
                zip(self.histories, self.prompt_lengths, self.params, self.seeds, strict=True)
            )
        )
        plan = IterationPlan(
            step=0,
            num_decodes=count,
            request_ids=tuple(RequestId(str(row)) for row in range(count)),
            rows=tuple(range(count)),
            starts=tuple(len(history) - 1 for history in self.histories),
            counts=(1,) * count,
            samples=(True,) * count,
            row_starts=starts,
        )
        self.rows = Rows(count, CONTEXT, 16)
        self.rows.update(plan)
        self.entries: SampledEntries = self.rows.prepare(plan).entries

    def only(self, entry: int) -> Step:
        one = slice(entry, entry + 1)
        return Step(self.params[one], self.histories[one], self.prompt_lengths[one], self.seeds[one])

    def plain(self, logits: np.ndarray, masks: Masks = NO_MASKS) -> Sampled:
        with np.errstate(all="ignore"):
            return plain.sample(logits, self.entries, self.rows, EOS, masks)

    def native(self, sampler: NativeSampler, logits: np.ndarray, masks: Masks = NO_MASKS) -> Sampled:
        return sampler.sample(logits, self.entries, self.rows, EOS, masks)


def random_step(random: np.random.Generator, count: int, vocabulary: int) -> tuple[Step, np.ndarray, Masks]:
    requests = random_requests(random, count, vocabulary)
    step = Step(requests.params, requests.histories, requests.prompt_lengths, requests.seeds)
    logits = random_logits(random, count, vocabulary)
    return step, logits, random_masks(random, step.params, vocabulary, with_errors=True)


@pytest.mark.parametrize("vocabulary", [1, 2, 5, 15, 16, 17, 33, 1000, 1023, 1025, 3000])
def test_all_parameters_together_give_the_tokens_errors_and_logprobs_of_numpy(
    vocabulary: int, instructions: str
) -> None:
    random = np.random.default_rng(vocabulary)
    sampler = NativeSampler(_kernels.Pool(2))
    for _ in range(16):
        step, logits, masks = random_step(random, 24, vocabulary)
        before = logits.copy()
        assert_same(step.native(sampler, logits, masks), step.plain(logits, masks))
        assert np.array_equal(logits, before), "the sampler must not change the logits"


@pytest.mark.parametrize(
    "options",
    WAYS_OF_CHOOSING,
    ids=str,
)
def test_each_way_of_choosing_gives_numpys_tokens_over_a_large_vocabulary(options: dict[str, Any]) -> None:
    random = np.random.default_rng(5)
    step = Step([SamplingParams(**options)] * 24, seeds=random.integers(2**62, size=24).tolist())
    sampler = NativeSampler(_kernels.Pool(2))
    for scale in (0.2, 2.0, 6.0):
        logits = (random.normal(size=(24, 49_152)) * scale).astype(np.float32)
        assert_same(step.native(sampler, logits), step.plain(logits))


def test_a_token_far_below_the_best_wins_if_its_noise_is_large_enough(instructions: str) -> None:
    """Seed 1322 gives token 1684 a noise of 18.5, which is one in a hundred million."""
    step = Step([SamplingParams(), SamplingParams(top_k=1990)], seeds=[1322, 1322])
    sampler = NativeSampler(_kernels.Pool(1))
    for below, expected in ((15.0, [1684, 1684]), (25.0, [7, 7])):
        logits = np.full((2, 2000), -30.0, np.float32)
        logits[:, [7, 1684]] = [0.0, -below]
        assert step.native(sampler, logits).tokens.tolist() == expected
        assert_same(step.native(sampler, logits), step.plain(logits))


@pytest.mark.parametrize("nudge", [1e-10, -1e-10])
def test_a_nucleus_that_differs_by_a_billionth_is_correct(nudge: float, instructions: str) -> None:
    random = np.random.default_rng(8)
    logits = random.uniform(-15, -10, size=20_000).astype(np.float32)
    logits[[4000, 500, 9000]] = np.log([0.5, 0.3, 0.2])
    chances = np.exp((logits - logits.max()).astype(np.float64))
    top_p = float(chances[[4000, 500]].sum() / chances.sum() * (1 + nudge))
    step = Step([SamplingParams(top_p=top_p)] * 48)
    sampled = step.native(NativeSampler(_kernels.Pool(1)), np.tile(logits, (48, 1)))
    third = {9000} if nudge > 0 else set()
    assert set(sampled.tokens.tolist()) == {4000, 500} | third


def test_a_row_has_the_same_bits_alone_and_in_a_batch(instructions: str) -> None:
    random = np.random.default_rng(11)
    for vocabulary in (17, 2500):
        step, logits, masks = random_step(random, 20, vocabulary)
        results = [step.native(NativeSampler(_kernels.Pool(threads)), logits, masks) for threads in (1, 2, 5)]
        alone = NativeSampler(_kernels.Pool(1))
        for entry in range(20):
            own = masks.bits[masks.entries == entry]
            own_mask = Masks(np.zeros(len(own), np.int64), own)
            one = step.only(entry).native(alone, logits[entry : entry + 1], own_mask)
            for together in results:
                if entry in together.errors:
                    assert 0 in one.errors or entry in masks.errors
                    continue
                assert one.tokens[0] == together.tokens[entry]
                expected = None if together.logprobs is None else together.logprobs[entry]
                assert (one.logprobs[0] if one.logprobs else None) == expected


def test_all_instruction_sets_give_the_same_logprobs_bit_by_bit() -> None:
    logits = (np.random.default_rng(2).normal(size=(6, 5003)) * 4).astype(np.float32)
    tokens = np.arange(6) * 800
    before, found = _kernels.in_use(), []
    for name in _kernels.available():
        _kernels.use(name)
        found.append(NativeSampler(_kernels.Pool(2)).score(logits, tokens, 7))
    _kernels.use(before)
    assert all(one == found[0] for one in found)


def test_scores_of_given_tokens_equal_those_of_numpy(instructions: str) -> None:
    random = np.random.default_rng(4)
    sampler = NativeSampler(_kernels.Pool(2))
    for vocabulary, top_count in ((1, 3), (40, 0), (1025, 20), (5000, 5)):
        logits = random_logits(random, 9, vocabulary)
        logits[0, 1:] = -np.inf
        tokens = random.integers(vocabulary, size=9)
        tokens[0] = 0
        found, expected = sampler.score(logits, tokens, top_count), plain.score(logits, tokens, top_count)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one.logprob, other.logprob, rtol=1e-13, atol=1e-12)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
    logits[3, 7] = np.nan
    assert not np.isfinite(sampler.score(logits, tokens, 2)[3].logprob)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nan_fails_alone_at_any_position(temperature: float, instructions: str) -> None:
    params = [SamplingParams(temperature=temperature), SamplingParams(temperature=temperature, top_p=0.9)]
    step = Step(params * 2)
    for position in (0, 15, 16, 1023, 1024, 1029):
        for bad in (np.nan, -np.nan, np.inf):
            logits = np.random.default_rng(0).normal(size=(4, 1030)).astype(np.float32)
            logits[1, position] = bad
            assert_same(step.native(sampler := NativeSampler(_kernels.Pool(1)), logits), step.plain(logits))
            assert step.native(sampler, logits).errors == {1: NOT_A_NUMBER}
    logits[2] = -np.inf
    assert step.native(sampler, logits).errors == {1: NOT_A_NUMBER, 2: NOT_A_NUMBER}


def test_a_request_with_parameters_that_forbid_every_token_fails_alone(instructions: str) -> None:
    logits = np.full((4, 8), -np.inf, np.float32)
    logits[:, 3] = 1.0  # one of EOS
    step = Step(
        [
            SamplingParams(temperature=0.0),
            SamplingParams(min_tokens=1),
            SamplingParams(min_tokens=1, grammar=ANY_JSON),
            SamplingParams(repetition_penalty=1e-300),
        ]
    )
    sampled = step.native(NativeSampler(_kernels.Pool(1)), logits)
    assert sampled.errors == {1: FORBIDDEN, 3: OVERFLOW}
    assert sampled.tokens[[0, 2]].tolist() == [3, 3]
    assert_same(sampled, step.plain(logits))


def test_a_row_reused_by_another_request_follows_the_new_parameters() -> None:
    logits = np.zeros((1, 32), np.float32)
    sampler = NativeSampler(_kernels.Pool(1))
    for favoured in (5, 9, 5):
        step = Step([SamplingParams(temperature=0.0, logit_bias={favoured: 3.0})])
        assert step.native(sampler, logits).tokens.tolist() == [favoured]
    ends = Step([SamplingParams(temperature=0.0, min_tokens=1)])
    for eos, expected in (({0}, 1), ({0, 1}, 2), (set(), 0)):
        sampled = sampler.sample(logits, ends.entries, ends.rows, frozenset(eos))
        assert sampled.tokens.tolist() == [expected]


def test_arrays_of_different_sizes_are_rejected() -> None:
    step = Step([SamplingParams(logit_bias={30: 1.0})] * 2)
    sampler = NativeSampler(_kernels.Pool(1))
    with pytest.raises(ValueError, match="logit_bias lies past the vocabulary"):
        step.native(sampler, np.zeros((2, 16), np.float32))
    with pytest.raises(ValueError, match="one value for each entry"):
        step.native(sampler, np.zeros((3, 64), np.float32))
    with pytest.raises(ValueError, match="a mask must have one bit for each token"):
        step.native(
            sampler, np.zeros((2, 64), np.float32), Masks(np.zeros(1, np.int64), np.zeros((1, 7), np.uint8))
        )
    with pytest.raises(TypeError):
        step.native(sampler, np.zeros((2, 64), np.float64))
    with pytest.raises(ValueError, match="past the vocabulary"):
        sampler.score(np.zeros((1, 8), np.float32), np.array([8]), 0)
    with pytest.raises(ValueError, match="threads is 0; allowed: 1 to 1024"):
        _kernels.Pool(0)


def test_the_kernel_refuses_another_number_of_parameters_than_it_has() -> None:
    """The table in Python and the struct in C++ must not drift apart."""
    sampler = _kernels.Sampler(_kernels.Pool(1))
    words = sampler_words(SamplingParams())
    sampler.set_row(0, words, [], [], 0, [], False)
    for wrong in (words[:-1], [*words, 0.0]):
        with pytest.raises(ValueError, match="one number for each"):
            sampler.set_row(0, wrong, [], [], 0, [], False)
