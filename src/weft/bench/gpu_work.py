"""Model shapes and workloads of `weft bench gpu`, and the upper bound of their speed on an H200.

The workloads are those of the figures in `RECORDED`: the same lengths, drawn in the same order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.errors import InvalidRequestError
from weft.loading.checkpoint import Checkpoint
from weft.loading.random_checkpoint import random_checkpoint
from weft.models.config import ModelConfig
from weft.models.registry import build_config

MAX_RUNNING = 256
MAX_CONTEXT = 4096
START = "start"
"""A workload without requests of its own: it measures the time of a new process to its first token."""

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": MAX_CONTEXT,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
}
"""The shapes of Qwen3-0.6B and Llama-3.1-8B, and a tiny one to test the command."""

RECORDED: Mapping[str, Mapping[str, float]] = {
    "0.6b": {
        START: 93.8,
        "single": 465,
        "batch8": 3452,
        "batch64": 22_677,
        "batch256": 46_836,
        "offline256": 23_914,
        "prefill32x2048": 362_000,
        "long16x3500": 3691,
    },
    "8b": {
        START: 96.7,
        "single": 201,
        "batch8": 1548,
        "batch64": 9242,
        "batch256": 17_847,
        "offline256": 9858,
        "prefill32x2048": 42_400,
        "long16x3500": 926,
    },
}
"""vLLM 0.24.0 on an H200 with bf16 and random weights: torch 2.11, FlashAttention 3, CUDA graphs, asynchronous
scheduling, torch.compile, 256 sequences, no prefix cache. Tokens per second; for the start, seconds until ready."""

BYTES_PER_SECOND = 4.38e12
OPERATIONS_PER_SECOND = 785e12
"""Measured on the H200 of `RECORDED`: memory bandwidth, and bf16 operations per second with matrices of 8192 x 8192."""
_BYTES_PER_VALUE = 2

_TOKEN_IDS = (10, 10_000)


@dataclass(frozen=True)
class Work:
    """Requests that arrive together: a prompt and a number of new tokens for each."""

    name: str
    prompts: tuple[list[int], ...]
    new_tokens: tuple[int, ...]
    counts_prompts: bool = False
    """Whether the speed is in prompt tokens, not in generated tokens."""

    @property
    def tokens(self) -> int:
        return sum(map(len, self.prompts)) if self.counts_prompts else sum(self.new_tokens)

    def shortened(self, longest: int) -> Work:
        """Returns the same prompts with answers of at most `longest` tokens, shortened in proportion.

        Requests end in the same order, so that steps have the same batch sizes.
        """
        most = max(self.new_tokens)
        scaled = (-(-count * min(longest, most) // most) for count in self.new_tokens)
        return Work(self.name, self.prompts, tuple(scaled), self.counts_prompts)


def _uniform(
    name: str, count: int, prompt: int, new: int, counts_prompts: bool = False
) -> Callable[[int], Work]:
    """A function that makes `count` requests of equal lengths for a vocabulary of the given size."""

    def make(vocabulary: int) -> Work:
        rng = random.Random(1)
        prompts = tuple(_prompt(rng, prompt, vocabulary) for _ in range(count))
        return Work(name, prompts, (new,) * count, counts_prompts)

    return make


def _offline(vocabulary: int) -> Work:
    rng = random.Random(0)
    prompts, new_tokens = [], []
    for _ in range(256):
        prompts.append(_prompt(rng, rng.randint(100, 1024), vocabulary))
        new_tokens.append(rng.randint(100, 1024))
    return Work("offline256", tuple(prompts), tuple(new_tokens))


def _prompt(rng: random.Random, length: int, vocabulary: int) -> list[int]:
    low, high = _TOKEN_IDS
    return [rng.randrange(low, min(high, vocabulary)) for _ in range(length)]


_MAKERS: dict[str, Callable[[int], Work]] = {
    "single": _uniform("single", 1, 128, 256),
    "batch8": _uniform("batch8", 8, 128, 256),
    "batch64": _uniform("batch64", 64, 128, 256),
    "batch256": _uniform("batch256", 256, 128, 256),
    "offline256": _offline,
    "prefill32x2048": _uniform("prefill32x2048", 32, 2048, 1, counts_prompts=True),
    "long16x3500": _uniform("long16x3500", 16, 3500, 128),
}
WORK = (START, *_MAKERS)


def make_work(name: str, shape: str) -> Work:
    return _MAKERS[name](SHAPES[shape]["vocab_size"])


def chosen(
    names: list[str], known: tuple[str, ...], option: str, default: tuple[str, ...]
) -> tuple[str, ...]:
    """The names given to an option, in the order of `known`. A value may contain several, separated by commas."""
    given = {name for value in names for name in value.split(",") if name}
    if unknown := given - set(known):
        raise InvalidRequestError(f"{option} is {min(unknown)!r}; allowed: {', '.join(known)}")
    return tuple(name for name in known if name in (given or default))


def open_shape(shape: str) -> Checkpoint:
    return random_checkpoint(SHAPES[shape], name=f"random-{shape}")


def least_seconds(work: Work, shape: str) -> float:
    """Lower bound of the time of a workload on the H200 of `RECORDED`.

    All prompts are computed in one step. Then every step gives each running request a token. The time of a step is that
    of its memory reads or of its arithmetic, whichever is longer. Activations, sampling and the host cost nothing.
    """
    checkpoint = open_shape(shape)
    config = build_config(checkpoint.layout, checkpoint.metadata, checkpoint.tensors)
    lengths = [len(prompt) for prompt in work.prompts]
    # Position p attends to p + 1 positions.
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    seconds = _step_seconds(config, sum(lengths), len(lengths), pairs, sum(lengths))
    answers = sorted(zip(work.new_tokens, lengths, strict=True))
    running, context = len(answers), sum(lengths)
    ended = 0
    for number in range(1, answers[-1][0]):
        # Step 0, the prefill, samples the first token of every answer. Each later step adds one token to the context of
        # every running request. Requests whose answer is complete before this step are removed first.
        while answers[ended][0] <= number:
            running -= 1
            context -= answers[ended][1] + number - 1
            ended += 1
        context += running
        seconds += _step_seconds(config, running, running, context, context)
    return seconds


def _step_seconds(config: ModelConfig, tokens: int, sampled: int, pairs: int, cached: int) -> float:
    """Time of a step over `tokens` tokens with `pairs` query-key pairs that reads K and V of `cached` tokens once."""
    layers, head = config.multiplications_per_token, config.vocabulary_size * config.hidden_size
    per_cached = 2 * config.layers * config.kv_size
    read = _BYTES_PER_VALUE * (layers + head + per_cached * cached)
    products = layers * tokens + head * sampled + 2 * config.layers * config.query_size * pairs
    return max(read / BYTES_PER_SECOND, 2 * products / OPERATIONS_PER_SECOND)
