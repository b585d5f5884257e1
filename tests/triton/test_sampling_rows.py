"""Sampling parameters of device rows, the path chosen from them, padding, graphs, and logprobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sampling_steps import OnDevice, Step, assert_same  # noqa: E402

from sampling_cases import CONTEXT, random_logits  # noqa: E402
from weft.request import SamplingParams  # noqa: E402
from weft.sampling import reference as twin  # noqa: E402

if TYPE_CHECKING:
    from weft.ops.triton.device import Device

# The interpreter computes with numpy, which warns about NaN and overflow; a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"temperature": 0.0}, "greedy"),
        ({"temperature": 0.0, "top_p": 0.5, "top_k": 3}, "greedy"),  # filters never remove the best
        ({"temperature": 0.5}, "plain"),
        ({"temperature": 0.5, "top_k": 1000}, "plain"),  # the whole vocabulary
        ({"top_p": 0.9}, "full"),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, "full"),
        ({"temperature": 0.0, "presence_penalty": 0.1}, "full"),
        ({"temperature": 0.0, "logit_bias": {3: 1.0}}, "full"),
        ({"temperature": 0.0, "min_tokens": 1}, "full"),
        ({"temperature": 0.0, "logprobs": 0}, "full"),
    ],
    ids=str,
)
def test_the_path_is_the_shortest_that_works_for_all_rows(
    options: dict[str, Any], kind: str, device: Device
) -> None:
    sampler = OnDevice(device, 1000).sampler
    sampler.start(Step([SamplingParams(temperature=0.0), SamplingParams(**options)]).starts)
    assert sampler.path([0]).kind == "greedy"
    assert sampler.path([1]).kind == kind
    assert sampler.path([0, 1]).kind == kind
    assert sampler.path([0], masked=True).kind == "full"
    sampler.start(Step([SamplingParams(temperature=0.0)], rows=[1]).starts)
    assert sampler.path([0, 1]).kind == "greedy", "the parameters of the row's last request must not remain"


def test_a_row_reused_by_another_request_follows_the_new_parameters(device: Device) -> None:
    logits = np.zeros((1, 32), np.float32)
    on_device = OnDevice(device, 32)
    for favoured in (5, 9, 5):
        step = Step([SamplingParams(temperature=0.0, logit_bias={favoured: 3.0})])
        assert on_device.sample(step, logits).tokens.tolist() == [favoured]
    assert on_device.sample(Step([SamplingParams(temperature=0.0, min_tokens=1)]), logits).tokens[0] == 1
    assert on_device.sample(Step([SamplingParams(temperature=0.0)]), logits).tokens[0] == 0


def test_rows_with_the_most_allowed_biases_and_stop_tokens_work(device: Device) -> None:
    stops = tuple(range(1500, 2500))
    biases = {token: 0.001 * token for token in range(1000, 2024)}
    step = Step([SamplingParams(temperature=0.0, logit_bias=biases, min_tokens=5, stop_token_ids=stops)] * 5)
    logits = np.random.default_rng(0).normal(size=(5, 2600)).astype(np.float32)
    assert_same(OnDevice(device, 2600).sample(step, logits), step.expected(logits))


def test_more_stop_tokens_than_a_row_holds_are_rejected_with_a_message(device: Device) -> None:
    sampler = OnDevice(device, 3000).sampler
    stops = tuple(range(100, 1124))  # the most that a request may have, plus the two end tokens of the model
    sampler.start(Step([SamplingParams(min_tokens=2, stop_token_ids=stops), SamplingParams()]).starts)
    assert list(sampler.refused) == [0]
    assert "1026 stop tokens" in sampler.refused[0].message and "1024" in sampler.refused[0].message
    sampler.start(Step([SamplingParams(stop_token_ids=stops)]).starts)
    assert not sampler.refused, "without min_tokens the stop tokens need no room in the row"


def test_padded_entries_and_other_rows_are_not_changed(device: Device) -> None:
    on_device = OnDevice(device, 100)
    on_device.row_tokens.fill_(77)
    on_device.sampler.tokens.fill_(55)
    step = Step([SamplingParams(temperature=0.0), SamplingParams(top_p=0.5)], rows=[4, 2])
    on_device.sample(step, random_logits(np.random.default_rng(1), 2, 100), padding=3)
    assert on_device.sampler.tokens[2:].unique().tolist() == [55]
    tokens = on_device.row_tokens.cpu()
    assert tokens[[row for row in range(32) if row not in (2, 4)]].unique().tolist() == [77]
    assert tokens[[2, 4], 4:].unique().tolist() == [77] and tokens.shape[1] == CONTEXT + 1


def test_penalties_count_what_earlier_steps_sampled_on_the_device(device: Device) -> None:
    """The host gets these tokens later: the sampler must count them without it."""
    on_device = OnDevice(device, 50)
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0, repetition_penalty=1.1)
    step = Step([params], histories=[(1, 2, 3)])
    on_device.sample(step, np.zeros((1, 50), np.float32))
    logits = np.random.default_rng(3).normal(size=(1, 50)).astype(np.float32)
    history: tuple[int, ...] = (1, 2, 3)
    path = on_device.sampler.path([0])
    lines = torch.from_numpy(logits).to(device.torch_device)
    rows = torch.zeros(1, dtype=torch.int32, device=device.torch_device)
    for _ in range(8):
        expected = int(Step([params], [history], [3]).expected(logits).tokens[0])
        on_device.sampler.sample(lines, rows, rows + len(history), path)
        history += (expected,)
    assert on_device.row_tokens[0, : len(history)].tolist() == list(history)
    assert len(set(history[3:])) > 2


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=9, top_p=0.8, logprobs=2)],
    ids=["greedy", "plain", "full"],
)
def test_every_path_can_be_captured_and_replayed(params: SamplingParams, device: Device) -> None:
    on_device = OnDevice(device, 300)
    step = Step([params] * 3, seeds=[4, 5, 6])
    random = np.random.default_rng(6)
    logits = random.normal(size=(3, 300)).astype(np.float32)
    on_device.sample(step, logits)  # compiles
    lines = torch.from_numpy(logits).to(device.torch_device)
    rows = torch.arange(3, dtype=torch.int32, device=device.torch_device)
    positions = torch.full((3,), 3, dtype=torch.int32, device=device.torch_device)
    path = on_device.sampler.path([0, 1, 2])
    graph = device.capture(lambda: on_device.sampler.sample(lines, rows, positions, path))
    for _ in range(3):
        logits = (random.normal(size=(3, 300)) * 3).astype(np.float32)
        lines.copy_(torch.from_numpy(logits))
        graph.replay()
        device.synchronize()
        expected = step.expected(logits)
        assert on_device.sampler.tokens[:3].tolist() == expected.tokens.tolist()


# --- logprobs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_requests_get_logprobs_and_top_tokens_as_requested(dtype: Any, device: Device) -> None:
    logits = (np.random.default_rng(2).normal(size=(5, 9000)) * 2).astype(np.float32)
    logits = torch.from_numpy(logits).to(dtype).to(torch.float32).numpy()  # bfloat16: many ties
    counts = [None, 3, 0, 20, None]
    step = Step([SamplingParams(temperature=0.7, logprobs=count) for count in counts])
    found = OnDevice(device, 9000).sample(step, logits, dtype=dtype)
    assert_same(found, step.expected(logits))
    assert found.logprobs is not None
    counted = [None if one is None else len(one.top) for one in found.logprobs]
    assert counted == counts


def test_scores_of_given_tokens_equal_those_of_numpy(device: Device) -> None:
    random = np.random.default_rng(4)
    for vocabulary, top_count in ((1, 3), (40, 0), (1025, 20), (5000, 5)):
        sampler = OnDevice(device, vocabulary).sampler
        logits = random_logits(random, 9, vocabulary)
        logits[0, 1:] = -np.inf
        logits[0, 0] = 1.0
        tokens = random.integers(vocabulary, size=9)
        tokens[0] = 0
        with np.errstate(all="ignore"):
            expected = twin.score(logits, tokens, top_count)
        place = device.torch_device
        pending = sampler.score(
            torch.from_numpy(logits).to(place),
            torch.tensor(tokens, dtype=torch.int32, device=place),
            top_count,
        )
        device.synchronize()
        for one, other in zip(pending.read(), expected, strict=True):
            assert one is not None
            np.testing.assert_allclose(one.logprob, other.logprob, rtol=1e-6, atol=2e-6)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scores_from_nan_logits_are_nan(bad: float, device: Device) -> None:
    logits = np.zeros((2, 60), np.float32)
    logits[1, 7] = bad
    place = device.torch_device
    tokens = torch.tensor([3, 3], dtype=torch.int32, device=place)
    pending = OnDevice(device, 60).sampler.score(torch.from_numpy(logits).to(place), tokens, 2)
    device.synchronize()
    logprobs = pending.read()
    assert logprobs[0] is not None and np.isfinite(logprobs[0].logprob)
    assert logprobs[1] is not None and not np.isfinite(logprobs[1].logprob)
