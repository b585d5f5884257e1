"""The reference sampler: greedy, noise, filters, penalties, logprobs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.backends.step_arrays import Rows
from weft.plan import IterationPlan, RowStart
from weft.request import RequestId, SamplingParams
from weft.sampling.noise import GUMBEL_MAX, GUMBEL_MIN, as_seed, gumbel, noise_bits, noise_keys, uniform
from weft.sampling.reference import Sampled, _filter, sample, score

VOCABULARY = 1000


def draw(
    logits: np.ndarray,
    params: list[SamplingParams],
    *,
    seeds: list[int] | None = None,
    history: tuple[int, ...] = (1, 2, 3),
    prompt_length: int = 3,
    eos: frozenset[int] = frozenset(),
    rows: list[int] | None = None,
) -> Sampled:
    """Samples one token for each row of logits, as in a step of decodes."""
    count = len(params)
    seeds = seeds or list(range(count))
    rows = rows or list(range(count))
    starts = tuple(
        RowStart(row, RequestId(str(100 + i)), history, prompt_length, params[i], seeds[i], (0,))
        for i, row in enumerate(rows)
    )
    plan = IterationPlan(
        step=0,
        num_decodes=count,
        request_ids=tuple(RequestId(str(100 + i)) for i in range(count)),
        rows=tuple(rows),
        starts=(len(history) - 1,) * count,
        counts=(1,) * count,
        samples=(True,) * count,
        row_starts=starts,
    )
    state = Rows(max(rows) + 1, 64, 16)
    state.update(plan)
    return sample(logits, state.prepare(plan).entries, state, eos)


def random_logits(count: int, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, VOCABULARY), scale=scale).astype(np.float32)


def one(logits: np.ndarray, **options: Any) -> int:
    names = ("seeds", "history", "prompt_length", "eos")
    extra = {name: options.pop(name) for name in names if name in options}
    sampled = draw(logits[None].astype(np.float32), [SamplingParams(**options)], **extra)
    assert not sampled.errors
    return int(sampled.tokens[0])


# --- the noise --------------------------------------------------------------------------------------------------


def plain_bits(seed: int, output_index: int, token_id: int) -> int:
    """The definition of the noise in plain integers."""
    mask, gamma = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    key = mix((mix((seed + gamma) & mask) + output_index * gamma) & mask)
    return mix((key + (token_id + 1) * gamma) & mask) >> 32


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 123456789])
def test_the_bits_follow_the_documented_definition(seed: int) -> None:
    for output_index in (0, 1, 4095):
        keys = noise_keys(np.array([as_seed(seed)], np.uint64), np.array([output_index]))
        ids = np.array([0, 1, 49_151, 200_000])
        assert noise_bits(keys, ids).tolist() == [plain_bits(seed, output_index, int(i)) for i in ids]


def test_the_bits_never_change() -> None:
    """Other implementations and old event logs depend on these numbers."""
    keys = noise_keys(np.array([42], np.uint64), np.array([7]))
    assert noise_bits(keys, np.arange(4)).tolist() == [1900771414, 4050710447, 2710496789, 1432047985]


def test_the_noise_is_gumbel_and_independent_in_all_three_arguments() -> None:
    seeds, indices = np.meshgrid(np.arange(40, dtype=np.uint64), np.arange(40))
    keys = noise_keys(seeds.ravel(), indices.ravel())
    noise = gumbel(uniform(noise_bits(keys[:, None], np.arange(200)[None, :])))
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.01)
    assert noise.std() == pytest.approx(np.pi / np.sqrt(6), abs=0.01)
    assert noise.min() >= GUMBEL_MIN and noise.max() <= GUMBEL_MAX
    by_argument = noise.reshape(40, 40, 200)
    for axis in range(3):
        moved = np.moveaxis(by_argument, axis, 0)
        assert abs(np.corrcoef(moved[:-1].ravel(), moved[1:].ravel())[0, 1]) < 0.01
    assert len(np.unique(noise)) > 0.999 * noise.size


# --- sampling ---------------------------------------------------------------------------------------------------


def test_greedy_takes_the_best_and_the_lowest_id_at_a_tie() -> None:
    logits = random_logits(5)
    logits[2, [7, 3]] = 50.0
    sampled = draw(logits, [SamplingParams(temperature=0.0)] * 5)
    assert sampled.tokens.tolist() == logits.argmax(axis=1).tolist()
    assert sampled.tokens[2] == 3


def test_a_sample_depends_on_seed_and_index_and_not_on_the_batch() -> None:
    logits = random_logits(1)
    params = SamplingParams(temperature=1.0)
    alone = [int(draw(logits, [params], seeds=[s]).tokens[0]) for s in range(8)]
    together = draw(
        np.repeat(logits, 8, axis=0), [params] * 8, seeds=list(range(8)), rows=[5, 3, 9, 0, 1, 8, 2, 7]
    )
    assert together.tokens.tolist() == alone
    assert len(set(alone)) > 4
    by_index = {
        one(logits[0], seeds=[0], history=tuple(range(3, 3 + n)), prompt_length=3) for n in range(3, 13)
    }
    assert len(by_index) > 4


def test_samples_follow_the_softmax() -> None:
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])
    logits = np.full((4000, 20), -60.0, np.float32)
    logits[:, :4] = np.log(probabilities)
    tokens = draw(logits, [SamplingParams(temperature=1.0)] * 4000).tokens
    found = np.bincount(tokens, minlength=4)[:4] / 4000
    np.testing.assert_allclose(found, probabilities, atol=0.03)
    cold = draw(logits, [SamplingParams(temperature=0.5)] * 4000).tokens
    np.testing.assert_allclose(
        np.bincount(cold)[:4] / 4000, probabilities**2 / (probabilities**2).sum(), atol=0.03
    )


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 12.0])
def test_skipping_tokens_that_cannot_win_changes_nothing(scale: float) -> None:
    logits = random_logits(50, scale=scale)
    tokens = draw(logits, [SamplingParams(temperature=1.0)] * 50).tokens
    keys = noise_keys(np.arange(50, dtype=np.uint64), np.zeros(50, np.int64))
    full = (logits - logits.max(axis=1, keepdims=True)).astype(np.float64) + gumbel(
        uniform(noise_bits(keys[:, None], np.arange(VOCABULARY)))
    )
    assert tokens.tolist() == full.argmax(axis=1).tolist()


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-3])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    logits = random_logits(4)
    tokens = draw(logits, [SamplingParams(temperature=temperature)] * 4).tokens
    assert tokens.tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"top_k": 3}, 3),
        ({"top_k": 1}, 1),
        ({"top_p": 0.69}, 2),
        ({"top_p": 0.71}, 3),  # 0.4 + 0.3 is not enough yet
        ({"top_p": 1e-9}, 1),
        ({"min_p": 0.5}, 2),  # half of 0.4
        ({"min_p": 1.0}, 1),
        ({"top_k": 4, "top_p": 0.72}, 2),  # after top_k: 0.42, 0.32, 0.16, 0.11
    ],
)
def test_filters_keep_the_most_likely_tokens(options: dict[str, Any], allowed: int) -> None:
    probabilities = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    logits = np.full(64, -80.0)
    logits[10:15] = np.log(probabilities)
    drawn = {one(logits, temperature=1.0, seeds=[s], **options) for s in range(300)}
    assert drawn == set(range(10, 10 + allowed))


def test_typical_p_keeps_the_tokens_closest_to_the_expected_surprise() -> None:
    # The entropy is 1.14. The surprise of the second token (1.20) is closest to it.
    logits = np.full(64, -80.0)
    logits[:4] = np.log([0.5, 0.3, 0.15, 0.05])
    drawn = {one(logits, temperature=1.0, seeds=[s], typical_p=0.2) for s in range(200)}
    assert drawn == {1}


def test_xtc_removes_the_likely_tokens_except_the_least_likely_of_them() -> None:
    probabilities = np.array([0.5, 0.25, 0.15, 0.06, 0.04])
    logits = np.full((3000, 20), -60.0, np.float32)
    logits[:, 5:10] = np.log(probabilities)
    options = {"temperature": 1.0, "xtc_threshold": 0.1}
    tokens = draw(logits, [SamplingParams(**options, xtc_probability=1.0)] * 3000).tokens
    found = np.bincount(tokens, minlength=20)[5:10] / 3000
    kept = np.array([0.0, 0.0, 0.15, 0.06, 0.04])
    assert found[:2].tolist() == [0.0, 0.0]
    np.testing.assert_allclose(found, kept / kept.sum(), atol=0.03)
    tokens = draw(logits, [SamplingParams(**options, xtc_probability=0.3)] * 3000).tokens
    found = np.bincount(tokens, minlength=20)[5:10] / 3000
    np.testing.assert_allclose(found, 0.3 * kept / kept.sum() + 0.7 * probabilities, atol=0.03)


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"xtc_threshold": 0.3}, {10, 11, 12, 13}),  # only one token is likely
        ({"xtc_threshold": 0.6}, {10, 11, 12, 13}),
        ({"xtc_threshold": 0.25}, {11, 12, 13}),
        ({"xtc_threshold": 0.1}, {11, 12, 13}),  # two tokens are the least likely
        ({"xtc_threshold": 0.01}, {13}),
        ({"xtc_threshold": 0.45, "top_k": 1}, {10}),
        ({"xtc_threshold": 0.25, "min_p": 0.3}, {11, 12}),  # of the tokens that min_p keeps
        ({"xtc_threshold": 0.01, "temperature": 0.0}, {10}),
        ({"xtc_threshold": 0.01, "xtc_probability": 0.0}, {10, 11, 12, 13}),
    ],
)
def test_xtc_comes_after_the_other_filters_and_keeps_ties(options: dict[str, Any], allowed: set[int]) -> None:
    logits = np.full(64, -80.0)
    logits[10:14] = [np.log(0.4), np.log(0.28), np.log(0.28), np.log(0.04)]
    options = {"temperature": 1.0, "xtc_probability": 1.0, **options}
    assert {one(logits, seeds=[s], **options) for s in range(300)} == allowed


def test_whether_xtc_applies_depends_on_seed_and_index_and_not_on_the_batch() -> None:
    logits = np.full((40, 8), -60.0, np.float32)
    logits[:, :2] = np.log([0.6, 0.4])
    params = SamplingParams(temperature=1.0, xtc_probability=0.5, xtc_threshold=0.3)
    together = draw(logits, [params] * 40).tokens.tolist()
    assert together == [one(logits[0], seeds=[s], xtc_probability=0.5, xtc_threshold=0.3) for s in range(40)]
    by_index = {
        one(
            logits[0], xtc_probability=0.5, xtc_threshold=0.3, history=tuple(range(3, 3 + n)), prompt_length=3
        )
        for n in range(3, 33)
    }
    assert by_index == {0, 1}


def test_min_tokens_forbids_end_and_stop_tokens_until_enough_tokens_are_generated() -> None:
    logits = np.zeros(32)
    logits[[5, 6, 7]] = [30.0, 20.0, 10.0]
    early = {
        "temperature": 0.0,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop_token_ids": (6,),
        "eos": frozenset({5}),
    }
    assert one(logits, **early, history=(1, 2, 3, 4), prompt_length=3) == 7
    assert one(logits, **early, history=(1, 2, 3, 4, 8), prompt_length=3) == 5
    assert one(logits, **early, ignore_eos=True, history=(1, 2, 3), prompt_length=3) == 5


def test_penalties_and_bias_change_the_sampled_token() -> None:
    logits = np.zeros(32)
    logits[[5, 6]] = [4.0, 3.0]
    seen = {"history": (5, 9, 9), "prompt_length": 1, "temperature": 0.0}
    assert one(logits, **seen) == 5
    assert one(logits, **seen, repetition_penalty=2.0) == 6  # prompt tokens count
    assert one(logits, **seen, presence_penalty=2.0) == 5  # prompt tokens do not count
    logits[9] = 5.0
    assert one(logits, **seen) == 9
    assert one(logits, **seen, presence_penalty=0.9) == 9
    assert one(logits, **seen, frequency_penalty=0.9) == 5  # the token occurs twice
    assert one(logits, **seen, logit_bias={20: 50.0}) == 20


def test_a_row_with_nan_or_infinity_fails_alone() -> None:
    logits = random_logits(4)
    expected = draw(logits, [SamplingParams(temperature=0.0)] * 4).tokens
    for bad in (np.nan, np.inf):
        broken = logits.copy()
        broken[1, 500] = bad
        for temperature in (0.0, 1.0):
            sampled = draw(broken, [SamplingParams(temperature=temperature)] * 4)
            assert list(sampled.errors) == [1]
            if temperature == 0.0:
                assert np.delete(sampled.tokens, 1).tolist() == np.delete(expected, 1).tolist()


def test_a_request_that_forbids_every_token_fails_alone() -> None:
    logits = np.full((2, 8), -np.inf, np.float32)
    logits[:, 3] = 1.0
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, min_tokens=1, stop_token_ids=(3,)),
    ]
    sampled = draw(logits, params)
    assert sampled.tokens[0] == 3
    assert list(sampled.errors) == [1]
    assert "every token is forbidden" in sampled.errors[1].message


def test_logprobs_ignore_the_sampling_parameters() -> None:
    logits = random_logits(2)
    params = [
        SamplingParams(temperature=0.0, logprobs=0),
        SamplingParams(temperature=0.3, top_k=5, logprobs=0),
    ]
    sampled = draw(logits, params)
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    assert sampled.logprobs is not None
    for entry, logprobs in enumerate(sampled.logprobs):
        assert logprobs is not None and logprobs.top == ()
        np.testing.assert_allclose(logprobs.logprob, expected[entry, sampled.tokens[entry]], atol=1e-5)
    assert draw(logits, [SamplingParams()] * 2).logprobs is None


def test_each_entry_gets_the_number_of_top_logprobs_that_it_requests() -> None:
    logits = random_logits(4)
    counts = [None, 3, 0, 20]
    sampled = draw(logits, [SamplingParams(temperature=0.0, logprobs=count) for count in counts])
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    assert sampled.logprobs is not None and sampled.logprobs[0] is None
    for entry, count in enumerate(counts[1:], 1):
        logprobs = sampled.logprobs[entry]
        assert logprobs is not None and count is not None
        best = np.argsort(-logits[entry], kind="stable")[:count]
        assert [token for token, _ in logprobs.top] == best.tolist()
        np.testing.assert_allclose([value for _, value in logprobs.top], expected[entry, best], atol=1e-5)
        if count:
            assert logprobs.top[0] == (int(sampled.tokens[entry]), logprobs.logprob), (
                "a greedy token has the highest logprob"
            )


def test_of_equally_likely_tokens_the_lowest_ids_are_in_the_top_logprobs() -> None:
    logits = np.zeros((1, 50), np.float32)
    logits[0, 40] = 1.0
    logprobs = score(logits, np.array([7]), 4)[0]
    assert [token for token, _ in logprobs.top] == [40, 0, 1, 2]
    assert score(logits, np.array([7]), 4)[0].logprob == logprobs.top[1][1]


def test_an_entry_with_an_error_has_no_logprobs_and_does_not_affect_the_others() -> None:
    logits = random_logits(3)
    logits[1, 5] = np.nan
    sampled = draw(logits, [SamplingParams(temperature=0.0, logprobs=2)] * 3)
    assert sampled.logprobs is not None and sampled.logprobs[1] is None
    assert sampled.logprobs[0] is not None and len(sampled.logprobs[2].top) == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999999])
def test_top_p_keeps_the_same_tokens_as_a_full_sort(scale: float, top_p: float) -> None:
    generator = np.random.default_rng(3)
    scores = generator.standard_normal(5000) * scale
    ranked = np.sort(scores)[::-1]
    probabilities = np.exp(ranked) / np.exp(ranked).sum()
    expected = ranked[np.flatnonzero(np.cumsum(probabilities) - probabilities < top_p)[-1]]
    _filter(filtered := scores - scores.max(), SamplingParams(top_p=top_p))
    assert scores[filtered > -np.inf].min() == expected
