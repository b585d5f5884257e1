"""Random requests, logits and masks for tests of samplers, and a comparison of two samplers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.backends.grammar import Masks
from weft.request import Grammar, SamplingParams
from weft.sampling.reference import Sampled

CONTEXT = 64
EOS = frozenset({0, 3})
ANY_JSON = Grammar("json_schema", "{}")

WAYS_OF_CHOOSING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.6},
    {"temperature": 3.0},
    {"top_k": 40},
    {"top_k": 2000},
    {"top_p": 0.95},
    {"top_p": 0.3, "temperature": 0.7},
    {"min_p": 0.02},
    {"typical_p": 0.8},
    {"xtc_probability": 1.0, "xtc_threshold": 0.001},
    {"xtc_probability": 0.5, "xtc_threshold": 0.02, "min_p": 0.01},
    {"xtc_probability": 1.0, "xtc_threshold": 0.05, "top_k": 20, "typical_p": 0.9, "temperature": 0.7},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95, "repetition_penalty": 1.2},
]


@dataclass(frozen=True)
class Requests:
    params: list[SamplingParams]
    histories: list[tuple[int, ...]]
    prompt_lengths: list[int]
    seeds: list[int]


def random_requests(random: np.random.Generator, count: int, vocabulary: int) -> Requests:
    lengths = random.integers(1, CONTEXT, size=count).tolist()
    # Half of the histories use only five tokens, so that tokens repeat.
    histories = [
        tuple(random.integers(min(vocabulary, 5) if length % 2 else vocabulary, size=length).tolist())
        for length in lengths
    ]
    prompt_lengths = [int(random.integers(1, length + 1)) for length in lengths]
    params = [random_params(random, vocabulary) for _ in range(count)]
    return Requests(
        params, histories, prompt_lengths, random.integers(-(2**63), 2**63 - 1, size=count).tolist()
    )


def random_logits(random: np.random.Generator, count: int, vocabulary: int) -> np.ndarray:
    kind = random.integers(7)
    logits = random.normal(size=(count, vocabulary)) * random.choice([0.01, 1.0, 3.0, 10.0])
    if kind == 0:
        logits = np.round(logits)  # many ties
    elif kind == 1:
        logits[random.random(logits.shape) < 0.7] = -np.inf
    elif kind == 2:
        logits = logits * 1e30
    elif kind == 3:
        logits[:] = 0.0
    elif kind == 4:
        logits += 1e4  # leaves few bits for the differences
    return logits.astype(np.float32)


def random_params(random: np.random.Generator, vocabulary: int) -> SamplingParams:
    def sometimes(chance: float, value: Any, otherwise: Any) -> Any:
        return value if random.random() < chance else otherwise

    def pick(*values: Any) -> Any:
        return values[random.integers(len(values))]

    biased = random.integers(vocabulary, size=random.integers(1, 4)).tolist()
    return SamplingParams(
        temperature=pick(0.0, 1.0, 1.0, 0.7, 2.5, 100.0, 0.01, 1e-30, 1e-300, 5e-324),
        top_k=sometimes(0.3, int(random.integers(-1, 60)), 0),
        top_p=sometimes(0.3, pick(0.95, 0.5, 0.1, 1e-9, 0.999999), 1.0),
        min_p=sometimes(0.2, pick(0.05, 0.5, 1e-6, 1.0), 0.0),
        typical_p=sometimes(0.2, pick(0.9, 0.2, 0.99), 1.0),
        xtc_probability=sometimes(0.3, pick(0.5, 1.0), 0.0),
        xtc_threshold=pick(0.1, 0.5, 0.01, 1e-6, 1e-300),
        repetition_penalty=sometimes(0.2, pick(1.3, 0.5, 100.0), 1.0),
        frequency_penalty=sometimes(0.2, float(random.uniform(-2, 2)), 0.0),
        presence_penalty=sometimes(0.2, float(random.uniform(-2, 2)), 0.0),
        logit_bias=sometimes(0.2, {token: float(random.uniform(-100, 100)) for token in biased}, {}),
        min_tokens=sometimes(0.2, int(random.integers(9)), 0),
        stop_token_ids=sometimes(0.3, (int(random.integers(2 * vocabulary)),), ()),
        grammar=sometimes(0.2, ANY_JSON, None),
        logprobs=sometimes(0.2, int(random.integers(21)), None),
    )


def random_masks(
    random: np.random.Generator,
    params: Sequence[SamplingParams],
    vocabulary: int,
    *,
    with_errors: bool = False,
) -> Masks:
    masked = [entry for entry, each in enumerate(params) if each.grammar is not None]
    allowed = random.random((len(masked), -(-vocabulary // 32) * 32)) < random.choice([0.01, 0.5])
    bits = np.packbits(allowed, axis=1, bitorder="little")
    failed = with_errors and masked and random.random() < 0.1
    return Masks(
        np.array(masked, np.int64), bits, {masked[0]: "the grammar cannot be followed"} if failed else {}
    )


def assert_agree(found: Sampled, expected: Sampled, *, relative: float, absolute: float) -> None:
    """Tokens, errors and top tokens are equal. Logprobs are equal within the tolerances."""
    assert found.errors == expected.errors
    good = [entry for entry in range(len(expected.tokens)) if entry not in expected.errors]
    assert found.tokens[good].tolist() == expected.tokens[good].tolist()
    assert (found.logprobs is None) == (expected.logprobs is None)
    for one, other in zip(found.logprobs or (), expected.logprobs or (), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            np.testing.assert_allclose(one.logprob, other.logprob, rtol=relative, atol=absolute)
            values = [[value for _, value in each.top] for each in (one, other)]
            np.testing.assert_allclose(values[0], values[1], rtol=relative, atol=absolute)
