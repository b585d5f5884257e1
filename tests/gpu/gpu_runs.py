"""Helpers of the GPU tests: a small random model, an LLM on the GPU, and requests of many kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from weft.llm import LLM
from weft.loading.checkpoint import Checkpoint
from weft.loading.random_checkpoint import random_checkpoint
from weft.request import GenerationResult, RequestState, SamplingParams

VOCABULARY = 5003
SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
# Around the ends of KV blocks (16) and of context splits.
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 64, 100, 127, 128, 129, 255, 256, 257, 300, 511, 513, 700, 1025)
NEW_TOKENS = 24
# Greedy requests, and requests with every sampling parameter.
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 0.0, "repetition_penalty": 1.3, "min_tokens": 4},
    {"temperature": 1.0, "typical_p": 0.7},
    {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.1},
    {"temperature": 0.8, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"temperature": 1.0, "logit_bias": {28: 2.0, 30: -100.0}},
)

Request = tuple[list[int], SamplingParams]
"""A prompt and its parameters."""


def small_checkpoint() -> Checkpoint:
    return random_checkpoint(SHAPE, seed=3, fill_on_device=False)


def open_on_gpu(checkpoint: Checkpoint, **options: Any) -> LLM:
    return LLM(checkpoint, device="cuda", **options)


def mixed_requests() -> list[Request]:
    """Two requests of each length, of different kinds. Their prompts have a common prefix."""
    rng = np.random.default_rng(5)
    requests: list[Request] = []
    for number, length in enumerate(LENGTHS):
        prompt = rng.integers(0, VOCABULARY, length).tolist()
        for part, kind in ((prompt, number), (prompt[: length // 2] + prompt[::-1], number + 3)):
            params = SamplingParams(
                max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=3, seed=number, **KINDS[kind % len(KINDS)]
            )
            requests.append((part, params))
    return requests


def answers(llm: LLM, requests: Sequence[Request]) -> list[GenerationResult]:
    """Runs all requests in one call, and checks that each is complete."""
    prompts, params = zip(*requests, strict=True)
    results = llm.generate(prompts, params, show_progress=False)
    for result in results:
        assert result.state is RequestState.COMPLETED, result.error
    llm.engine.scheduler.check_integrity()
    return results


def assert_same(results: Sequence[GenerationResult], expected: Sequence[GenerationResult]) -> None:
    """Tokens and logprobs are equal, bit for bit."""
    for number, (result, other) in enumerate(zip(results, expected, strict=True)):
        assert result.tokens == other.tokens, f"request {number}: the tokens differ"
        assert result.logprobs == other.logprobs, f"request {number}: equal tokens, but the logprobs differ"
