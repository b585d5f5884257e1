"""Compares sampling on the CUDA backend with the reference: drawn tokens, logprobs, grammars, and NaN output."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from small_backends import END, alone, cuda_backend, engine_of, request, run, tokens_of, with_params

from weft.backends.cuda.runner import CudaBackend
from weft.backends.cuda.step import DeviceStep
from weft.ops.triton.device import Device
from weft.plan import IterationPlan
from weft.request import FinishReason, Grammar, InferenceRequest, RequestId, RequestState


def test_drawn_tokens_equal_those_of_the_reference(device: Device) -> None:
    requests = [
        request(9, 1, temperature=0.8),
        request(9, 2, temperature=1.3, top_k=7),
        request(9, 3, temperature=1.0, top_p=0.7, repetition_penalty=1.3),
        request(9, 4, temperature=0.6, min_p=0.05, frequency_penalty=0.4, presence_penalty=0.2),
        request(9, 5, logit_bias={7: 4.0}, min_tokens=3, ignore_eos=False),
        request(9, 6),
    ]
    assert tokens_of(run(engine_of(cuda_backend(device)), requests)) == tokens_of(alone(requests))


def test_logprobs_of_answers_and_prompts_equal_those_of_the_reference(device: Device) -> None:
    requests = [
        request(9, 1, logprobs=3),
        request(20, 2, prompt_logprobs=2),
        request(12, 3),
        request(5, 4, logprobs=0, prompt_logprobs=0, temperature=0.9),
    ]
    results = run(engine_of(cuda_backend(device), max_chunk_tokens=16), requests)
    expected = alone(requests)
    assert tokens_of(results) == tokens_of(expected)
    for result, reference in zip(results, expected, strict=True):
        for ours, theirs in (
            (result.logprobs, reference.logprobs),
            (result.prompt_logprobs, reference.prompt_logprobs),
        ):
            assert (ours is None) == (theirs is None)
            for one, other in zip(ours or (), theirs or (), strict=True):
                assert (one is None) == (other is None)
                if one is not None and other is not None:
                    assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
                    assert [token for token, _ in one.top] == [token for token, _ in other.top]
                    assert [value for _, value in one.top] == pytest.approx(
                        [value for _, value in other.top], abs=1e-3
                    )
    assert results[0].logprobs is not None and results[2].logprobs is None


class Watched(CudaBackend):
    """Records the requests of each step."""

    steps: tuple[set[RequestId], ...] = ()

    def submit(self, plan: IterationPlan) -> DeviceStep:
        self.steps += (set(plan.request_ids),)
        return super().submit(plan)


def test_answers_obey_their_grammars_and_other_requests_do_not_wait(device: Device) -> None:
    pytest.importorskip("llguidance", reason="grammars need llguidance, which is not installed")
    pattern = r"[0-3]{2}[4-9]{2}"
    requests = [
        request(9, 1, max_tokens=8, ignore_eos=False, grammar=Grammar("regex", pattern)),
        request(9, 2, max_tokens=9),
        request(9, 3, max_tokens=8, ignore_eos=False, temperature=1.0, grammar=Grammar("regex", pattern)),
        request(9, 4, max_tokens=9),
    ]
    backend = cuda_backend(device, kind=Watched)
    assert isinstance(backend, Watched)
    results = run(engine_of(backend), requests)
    assert tokens_of(results) == tokens_of(alone(requests))
    for number in (0, 2):
        text = bytes(token for token in results[number].tokens if token != END).decode()
        assert re.fullmatch(pattern, text) and results[number].finish_reason is FinishReason.END_OF_SEQUENCE
        assert not any(number in before and number in after for before, after in pairwise(backend.steps[1:]))
    together = [{RequestId("1"), RequestId("3")} <= step for step in backend.steps]
    assert sum(before and after for before, after in pairwise(together)) >= 6


def test_nan_logits_fail_their_own_request_only(device: Device) -> None:
    backend = cuda_backend(device)
    poisoned = 33
    with torch.no_grad():
        backend._decoder._embedding.weight[poisoned] = float("nan")
    requests = [
        request(9, 1),
        InferenceRequest((5, poisoned, 6), request(1, 0).params),
        with_params(request(9, 2), temperature=0.7),
    ]
    assert poisoned not in {*requests[0].prompt, *requests[2].prompt}
    results = run(engine_of(backend), requests)
    assert results[1].state is RequestState.FAILED and "not a number" in (results[1].error or "")
    expected = tokens_of(alone([requests[0], requests[2]]))
    assert [tuple(results[number].tokens) for number in (0, 2)] == expected
