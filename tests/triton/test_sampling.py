"""Compares the device sampler with the numpy sampler that defines it: the same noise, tokens and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from sampling_steps import OnDevice, Step, assert_same, random_step, rounded_to_bfloat16  # noqa: E402

from sampling_cases import ANY_JSON  # noqa: E402
from weft.backends.grammar import Masks  # noqa: E402
from weft.ops.triton.sampling_noise import gumbel_double, noise_bits, noise_key, noise_steps, race_single  # noqa: E402
from weft.request import SamplingParams  # noqa: E402
from weft.sampling.noise import as_seed, gumbel, noise_keys, uniform  # noqa: E402
from weft.sampling.noise import noise_bits as bits_of_numpy  # noqa: E402
from weft.sampling.reference import FORBIDDEN, NOT_A_NUMBER, OVERFLOW  # noqa: E402

if TYPE_CHECKING:
    from weft.ops.triton.device import Device

# The interpreter computes with numpy, which warns about NaN and overflow; a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


# --- the noise --------------------------------------------------------------------------------------------------


@triton.jit
def bits_kernel(seeds_ptr, indices_ptr, tokens_ptr, bits_ptr, TOKENS: tl.constexpr):
    pair = tl.program_id(0)
    key = noise_key(tl.load(seeds_ptr + pair), tl.load(indices_ptr + pair))
    lanes = tl.arange(0, TOKENS)
    bits = noise_bits(key, noise_steps(tl.load(tokens_ptr + lanes)))
    tl.store(bits_ptr + pair * TOKENS + lanes, bits.to(tl.int64))


@triton.jit
def gumbel_kernel(bits_ptr, single_ptr, double_ptr, COUNT: tl.constexpr):
    lanes = tl.arange(0, COUNT)
    bits = tl.load(bits_ptr + lanes).to(tl.uint32)
    tl.store(single_ptr + lanes, race_single(bits))
    tl.store(double_ptr + lanes, gumbel_double(bits))


def test_the_bits_of_the_noise_equal_the_definition(device: Device) -> None:
    pairs = [(s, i) for s in (0, 1, -1, 42, 2**63 - 1, -(2**63)) for i in (0, 1, 7, 4095)]
    tokens = np.array([0, 1, 2, 3, 49_151, 151_935, 200_000, 2**31 - 2])
    place = device.torch_device
    found = device.zeros(len(pairs), len(tokens), dtype=torch.int64)
    bits_kernel[(len(pairs),)](
        torch.tensor([seed for seed, _ in pairs], dtype=torch.int64, device=place),
        torch.tensor([index for _, index in pairs], dtype=torch.int32, device=place),
        torch.tensor(tokens, dtype=torch.int32, device=place),
        found,
        TOKENS=len(tokens),
    )
    seeds = np.array([as_seed(seed) for seed, _ in pairs], np.uint64)
    keys = noise_keys(seeds, np.array([index for _, index in pairs]))
    expected = bits_of_numpy(keys[:, None], tokens[None, :])
    assert found.tolist() == expected.astype(np.int64).tolist()


def test_the_noise_is_exact_at_both_ends_of_its_range(device: Device) -> None:
    random = np.random.default_rng(0)
    edges = [0, 1, 2, 2**24 - 1, 2**24, 2**26 - 1, 2**26, 2**26 + 1, 2**31, 2**32 - 2, 2**32 - 1]
    bits = np.concatenate([edges, random.integers(2**32, size=4096 - len(edges))]).astype(np.uint64)
    single, double = device.zeros(4096, dtype=torch.float32), device.zeros(4096, dtype=torch.float64)
    gumbel_kernel[(1,)](
        torch.from_numpy(bits.astype(np.int64)).to(device.torch_device), single, double, COUNT=4096
    )
    expected = gumbel(uniform(bits))
    np.testing.assert_allclose(double.cpu().numpy(), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(single.cpu().numpy(), np.exp(-expected), rtol=2e-5)


# --- all at once ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [1, 2, 17, 33, 1000, 2600])
def test_all_parameters_together_give_the_tokens_errors_and_logprobs_of_numpy(
    vocabulary: int, device: Device
) -> None:
    random = np.random.default_rng(vocabulary)
    on_device = OnDevice(device, vocabulary)
    for turn in range(2):
        step, logits, masks = random_step(random, 9, vocabulary)
        if turn % 2:
            logits = rounded_to_bfloat16(logits)
        found = on_device.sample(
            step, logits, masks, dtype=torch.bfloat16 if turn % 2 else torch.float32, padding=turn
        )
        assert_same(found, step.expected(logits, masks))


def test_a_row_has_the_same_result_alone_and_in_a_batch(device: Device) -> None:
    random = np.random.default_rng(11)
    step, logits, masks = random_step(random, 10, 700)
    on_device = OnDevice(device, 700)
    together = on_device.sample(step, logits, masks)
    for entry in range(0, 10, 3):
        own = masks.bits[masks.entries == entry]
        one = on_device.sample(
            step.only(entry), logits[entry : entry + 1], Masks(np.zeros(len(own), np.int64), own)
        )
        assert one.errors.get(0) == together.errors.get(entry)
        assert one.tokens[0] == together.tokens[entry]
        expected = None if together.logprobs is None else together.logprobs[entry]
        assert (one.logprobs[0] if one.logprobs else None) == expected


# --- choosing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1e-300])
def test_at_a_tie_greedy_takes_the_lowest_token_at_any_position(temperature: float, device: Device) -> None:
    on_device = OnDevice(device, 5000)
    logits = np.zeros((3, 5000), np.float32)
    logits[0, [4100, 3, 2050]] = 2.0
    logits[1, [4999, 2047]] = 1e-30
    logits[2] = -1.0
    logits[2, [900, 901]] = [-0.0, 0.0]  # the same number
    step = Step([SamplingParams(temperature=temperature)] * 3)
    found = on_device.sample(step, logits)
    assert_same(found, step.expected(logits))
    if temperature == 0.0:
        assert found.tokens.tolist() == [3, 2047, 900]


def test_two_sums_too_close_for_single_precision_are_distinguished(device: Device) -> None:
    """The logit of token 1500 offsets its noise up to rounding: it wins or loses by less than 1e-7."""
    seeds = list(range(32))  # so many that a program has more than one tile
    keys = noise_keys(np.array(seeds, np.uint64), np.zeros(len(seeds), np.int64))
    noise = gumbel(uniform(bits_of_numpy(keys[:, None], np.array([7, 476, 1500])[None, :])))
    on_device = OnDevice(device, 2000)
    drawn = set()
    for index, rival in enumerate((7, 476)):  # 476 shares a lane with 1500
        logits = np.full((len(seeds), 2000), -50.0, np.float32)
        logits[:, rival] = 0.0
        logits[:, 1500] = noise[:, index] - noise[:, 2]
        step = Step([SamplingParams()] * len(seeds), seeds=seeds)
        found = on_device.sample(step, logits)
        assert_same(found, step.expected(logits))
        drawn |= set(found.tokens.tolist())
    assert drawn == {7, 476, 1500}


def test_a_token_far_below_the_best_wins_if_its_noise_is_large_enough(device: Device) -> None:
    """Seed 1322 gives token 1684 a noise of 18.5, which is one in a hundred million."""
    step = Step([SamplingParams(), SamplingParams(top_k=1990)], seeds=[1322, 1322])
    on_device = OnDevice(device, 2000)
    for below, expected in ((15.0, [1684, 1684]), (25.0, [7, 7])):
        logits = np.full((2, 2000), -30.0, np.float32)
        logits[:, [7, 1684]] = [0.0, -below]
        assert on_device.sample(step, logits).tokens.tolist() == expected


@pytest.mark.parametrize("beginning", [-np.inf, -20.0, 0.0, 30.0])
def test_tokens_are_drawn_correctly_even_if_the_first_ones_of_a_piece_are_poor(
    beginning: float, device: Device
) -> None:
    """The first tokens decide which of the others are computed: none, few, or all."""
    logits = np.random.default_rng(3).normal(size=(32, 3000)).astype(np.float32)
    logits[:, :1024] += np.float32(beginning)
    step = Step([SamplingParams(), SamplingParams(temperature=0.01)] * 16)
    assert_same(OnDevice(device, 3000).sample(step, logits), step.expected(logits))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nan_fails_alone_at_any_position(temperature: float, device: Device) -> None:
    on_device = OnDevice(device, 2100)
    params = [
        SamplingParams(temperature=temperature),
        SamplingParams(temperature=temperature, top_p=0.9),
        SamplingParams(temperature=temperature, logit_bias={2: 1.0}),
        SamplingParams(temperature=temperature),
    ]
    step = Step(params)
    for position, bad in ((0, np.nan), (1030, np.inf), (2099, -np.nan)):
        logits = np.random.default_rng(0).normal(size=(4, 2100)).astype(np.float32)
        logits[1:3, position] = bad
        found = on_device.sample(step, logits)
        assert found.errors == {1: NOT_A_NUMBER, 2: NOT_A_NUMBER}
        assert_same(found, step.expected(logits))
        assert found.tokens[[1, 2]].tolist() == [0, 0], (
            "the next step may use the token before the host sees the error"
        )
    logits[:] = -np.inf
    assert on_device.sample(step, logits).errors == dict.fromkeys(range(4), NOT_A_NUMBER)


def test_a_request_with_parameters_that_forbid_every_token_fails_alone(device: Device) -> None:
    logits = np.full((4, 8), -np.inf, np.float32)
    logits[:, 3] = 1.0  # an end token
    step = Step(
        [
            SamplingParams(temperature=0.0),
            SamplingParams(min_tokens=1),
            SamplingParams(min_tokens=1, grammar=ANY_JSON),
            SamplingParams(repetition_penalty=1e-300),
        ]
    )
    found = OnDevice(device, 8).sample(step, logits)
    assert found.errors == {1: FORBIDDEN, 3: OVERFLOW}
    assert found.tokens[[0, 2]].tolist() == [3, 3]
    assert_same(found, step.expected(logits))
