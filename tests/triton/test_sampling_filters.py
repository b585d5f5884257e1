"""Compares the filters of the device, which find floors without sorting, with numpy's, which sort."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sampling_steps import OnDevice, Step, assert_same, rounded_to_bfloat16  # noqa: E402

from sampling_cases import WAYS_OF_CHOOSING  # noqa: E402
from weft.request import SamplingParams  # noqa: E402

if TYPE_CHECKING:
    from weft.ops.triton.device import Device

# The interpreter computes with numpy, which warns about NaN and overflow; a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    WAYS_OF_CHOOSING,
    ids=str,
)
def test_each_way_of_choosing_gives_the_tokens_of_numpy_over_several_pieces(
    options: dict[str, Any], dtype: Any, device: Device
) -> None:
    random = np.random.default_rng(5)
    on_device = OnDevice(device, 4_500)
    step = Step([SamplingParams(**options)] * 2, seeds=random.integers(2**62, size=2).tolist())
    for scale in (0.2, 5.0) if dtype == torch.float32 else (2.0,):
        logits = (random.normal(size=(2, 4_500)) * scale).astype(np.float32)
        if dtype == torch.bfloat16:
            logits = rounded_to_bfloat16(logits)
        assert_same(on_device.sample(step, logits, dtype=dtype), step.expected(logits))


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"top_k": 3}, 3),
        ({"top_k": 1}, 1),
        ({"top_p": 0.69}, 2),
        ({"top_p": 0.71}, 3),  # 0.4 + 0.3 is not enough
        ({"top_p": 1e-9}, 1),
        ({"min_p": 0.5}, 2),  # half of 0.4
        ({"min_p": 1.0}, 1),
        ({"top_k": 4, "top_p": 0.72}, 2),  # of what top-k kept: 0.42, 0.32, 0.16, 0.11
    ],
    ids=str,
)
def test_filters_keep_the_most_likely(options: dict[str, Any], allowed: int, device: Device) -> None:
    """Without a filter, the noise of these seeds makes the fifth, third and first of the likely tokens win."""
    logits = np.full((1, 64), -80.0, np.float32)
    logits[0, 10:15] = np.log([0.4, 0.3, 0.15, 0.1, 0.05])
    on_device = OnDevice(device, 64)
    for seed in winning_seeds(logits):
        step = Step([SamplingParams(**options)], seeds=[seed])
        token = int(on_device.sample(step, logits).tokens[0])
        assert token == step.expected(logits).tokens[0]
        assert token < 10 + allowed


def winning_seeds(logits: np.ndarray) -> list[int]:
    """For each likely token, a seed that draws it without filters."""
    step = Step([SamplingParams()] * 200, rows=list(range(200)))
    tokens = step.expected(np.repeat(logits, 200, axis=0)).tokens.tolist()
    return [tokens.index(token) for token in (14, 13, 12, 11, 10)]


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"xtc_threshold": 0.1}, {12, 13, 14}),
        ({"xtc_threshold": 0.35}, {10, 11, 12, 13, 14}),  # only one token is likely
        ({"xtc_threshold": 0.1, "min_p": 0.2}, {13}),  # of what min-p keeps: 0.42, 0.32, 0.16, 0.1
        ({"xtc_threshold": 0.25, "typical_p": 0.9}, {11, 12, 13}),
    ],
    ids=str,
)
def test_xtc_removes_the_likely_tokens_except_the_least_likely_of_them(
    options: dict[str, Any], allowed: set[int], device: Device
) -> None:
    logits = np.full((32, 64), -80.0, np.float32)
    logits[:, 10:15] = np.log([0.4, 0.3, 0.15, 0.1, 0.05])
    on_device, drawn = OnDevice(device, 64), set()
    for first in (0, 32):
        seeds = list(range(first, first + 32))
        step = Step([SamplingParams(**options, xtc_probability=1.0)] * 32, seeds=seeds)
        found = on_device.sample(step, logits)
        assert_same(found, step.expected(logits))
        drawn |= set(found.tokens.tolist())
    assert drawn == allowed


def test_tokens_that_tie_with_the_last_one_kept_are_kept(device: Device) -> None:
    logits = np.full((1, 40), -50.0, np.float32)
    logits[0, [3, 9, 20, 31]] = [1.0, 0.5, 0.5, 0.5]
    drawn = set()
    on_device = OnDevice(device, 40)
    for options in ({"top_k": 2}, {"top_p": 0.5}):
        for seed in range(12):
            step = Step([SamplingParams(**options)], seeds=[seed])
            found = on_device.sample(step, logits)
            assert_same(found, step.expected(logits))
            drawn.add(int(found.tokens[0]))
    assert drawn == {3, 9, 20, 31}


def test_typical_p_cuts_exactly_even_with_coarse_logits(device: Device) -> None:
    """Surprise is a difference, with bits that bfloat16 logits lack: here 2.638 and 2.630; the larger one is removed."""
    logits = np.full((12, 212), -2.0, np.float32)
    logits[:, :2] = [1.9921875, 1.984375]
    step = Step([SamplingParams(typical_p=0.7)] * 12)
    found = OnDevice(device, 212).sample(step, logits, dtype=torch.bfloat16)
    assert_same(found, step.expected(logits))
    assert 1 in found.tokens and 0 not in found.tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_filters_work_with_short_lists_and_with_distributions_too_flat_for_a_list(
    dtype: Any, device: Device
) -> None:
    """The cases differ only in the scale of the logits: a list is enough for the first and not for the last; both
    equal numpy."""
    options: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"typical_p": 0.9},
        {"top_k": 30, "typical_p": 0.5},
        {},
    ]
    vocabulary = 150_000 if device.is_gpu else 4_000  # lists are long on a GPU and short in the interpreter
    on_device = OnDevice(device, vocabulary)
    settled = []
    for scale in (10.0, 1.5, 0.01):
        logits = (np.random.default_rng(9).normal(size=(len(options), vocabulary)) * scale).astype(np.float32)
        logits = rounded_to_bfloat16(logits)
        step = Step([SamplingParams(**each) for each in options], seeds=[1, 2, 3, 4, 5])
        assert_same(on_device.sample(step, logits, dtype=dtype), step.expected(logits))
        settled.append(on_device.sampler._settled[:5].tolist())
    assert settled[0] == [1, 1, 1, 1, 0], "without a filter there is no list"
    assert settled[2] == [0, 0, 0, 1, 0], "thirty tokens fit into a list at any position"
