"""`python -m benchmarks perplexity`: quality loss of the kernels, or of a GPU, against numpy in f32.

Text is cut into windows. In each, the tokens of the second half are scored, given all tokens before them, as in
llama.cpp's tool. Both sides run in weft's engine with the same weights, and score the same tokens. So their
difference is more accurate than either perplexity.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.backends import registry
from weft.backends.cpu.kernels import instruction_set
from weft.bench.report import Check, machine, print_checks, print_json, print_line, print_table
from weft.bench.serve_load import Text
from weft.config import KvCachePoolConfig, ServingEngineConfig
from weft.engine.serving import ServingEngine
from weft.errors import InvalidRequestError, WeftError
from weft.loading.checkpoint import Checkpoint, open_checkpoint
from weft.loading.pull import pull
from weft.request import InferenceRequest, SamplingParams
from weft.text.model_text import open_tokenizer

if TYPE_CHECKING:
    from weft.text.tokenizer import Tokenizer

LARGEST_RISE = 0.005
"""The largest accepted rise of the perplexity over the reference, as a fraction."""
TOKENS = 4096
"""Tokens of text if the number of windows is not given."""
REFERENCE = "numpy, f32"


@dataclass(frozen=True)
class Scores:
    """One backend, and its logprob of each scored token."""

    name: str
    logprobs: tuple[float, ...]
    seconds: float

    @property
    def perplexity(self) -> float:
        return math.exp(-statistics.fmean(self.logprobs))


@dataclass(frozen=True)
class Difference:
    """The rise of the perplexity over the reference, as a fraction, and its standard error."""

    share: float
    error: float
    of_a_token: float
    """Mean absolute difference of the logprob of a token."""

    @property
    def is_small(self) -> bool:
        return self.share < LARGEST_RISE


def main(
    model: str, *, text: Path | None, context: int, windows: int | None, quantize: str | None, json: bool
) -> None:
    checkpoint = open_checkpoint(pull(model))
    pieces = make_windows(open_tokenizer(checkpoint), text, context, windows or max(1, TOKENS // context))
    kernels = instruction_set()
    scores = [score(checkpoint, pieces, REFERENCE, dtype=np.float32)]
    if kernels is not None:
        scores.append(score(checkpoint, pieces, f"kernels, {kernels}", quantize=quantize))
    if registry.why_no_gpu() is None:
        scores.append(score(checkpoint, pieces, "GPU, bf16", "cuda"))
    differences = [compare(one, scores[0]) for one in scores[1:]]
    checks = [
        Check(
            f"{one.name}: perplexity above that of {REFERENCE}",
            f"{100 * found.share:+.2f}% (± {100 * found.error:.2f})",
            f"less than {100 * LARGEST_RISE:g}%",
            found.is_small,
        )
        for one, found in zip(scores[1:], differences, strict=True)
    ]
    if json:
        figures = [{"name": one.name, "perplexity": one.perplexity, "seconds": one.seconds} for one in scores]
        counts = {"context": context, "windows": len(pieces), "scored_tokens": len(scores[0].logprobs)}
        print_json(
            {
                **counts,
                "scores": figures,
                "differences": differences,
                "checks": checks,
                "machine": machine(),
            }
        )
        return
    print_line(f"{machine()}; {checkpoint.path.name}, {checkpoint.stored_as}")
    print_table(
        f"Perplexity of {len(pieces)} windows of {context} tokens, the second half of each scored",
        ("", "perplexity", "scored tokens", "seconds"),
        [
            (one.name, f"{one.perplexity:.4f}", f"{len(one.logprobs):,}", f"{one.seconds:.1f}")
            for one in scores
        ],
    )
    if not checks:
        print_line(
            "Nothing to compare: this machine has no GPU, and the kernels are missing or disabled (WEFT_KERNELS=numpy)."
        )
    else:
        print_checks(checks)


def make_windows(
    tokenizer: Tokenizer, text: Path | None, context: int, windows: int
) -> list[tuple[int, ...]]:
    """Consecutive windows of text. Each begins with the BOS token if the model uses one."""
    first = tuple(tokenizer.encode(""))
    length = context - len(first)
    if text is None:
        source = Text(lambda words: tokenizer.encode(words, add_bos=False))
        return [first + source.take(length) for _ in range(windows)]
    try:
        ids = tokenizer.encode(text.read_text(encoding="utf-8"), add_bos=False)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{text}: {error}", field="text") from error
    if len(ids) < length:
        raise InvalidRequestError(
            f"{text} has {len(ids)} tokens, and one window needs {length}; use a longer text, or a smaller --context",
            field="text",
        )
    starts = range(0, len(ids) - length + 1, length)[:windows]
    return [first + tuple(ids[start : start + length]) for start in starts]


def score(
    checkpoint: Checkpoint,
    windows: Sequence[tuple[int, ...]],
    name: str,
    device: str = "cpu",
    pool: KvCachePoolConfig | None = None,
    **options: Any,
) -> Scores:
    """Scores every window through the engine. `pool` None: a full cache for all windows at once."""
    context = len(windows[0])
    backend = registry.build(device, checkpoint=checkpoint, max_context=context + 1, **options)
    if pool is None:
        blocks = len(windows) * (-(-(context + 1) // KvCachePoolConfig().block_size) + 1)
        pool = KvCachePoolConfig(num_blocks=blocks, swap_blocks=0)
    config = ServingEngineConfig(cache=pool)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    logprobs: list[float] = []
    with ServingEngine(backend, config) as engine:
        began = time.perf_counter()
        request_ids = [engine.submit(InferenceRequest(window, params)) for window in windows]
        for request_id in request_ids:
            result = engine.get_result(request_id, wait=math.inf)
            if result is None or result.prompt_logprobs is None or result.error:
                raise WeftError(f"{name}: a window was not scored: {result and result.error}")
            scored = result.prompt_logprobs[context // 2 :]
            logprobs += [one.logprob for one in scored if one is not None]
        seconds = time.perf_counter() - began
    return Scores(name, tuple(logprobs), seconds)


def compare(one: Scores, reference: Scores) -> Difference:
    """Compares token by token: both sides score the same text, so its difficulty cancels out."""
    losses = [before - after for after, before in zip(one.logprobs, reference.logprobs, strict=True)]
    error = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else 0.0
    of_a_token = statistics.fmean(abs(difference) for difference in losses)
    return Difference(math.expm1(statistics.fmean(losses)), error, of_a_token)
