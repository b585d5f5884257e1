"""Prompts that must be scored (`prompt_logprobs`): which rows have one, and which tokens of a step score which prompt
tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from weft.backends.cuda.sampler import PendingLogprobs
from weft.plan import IterationPlan, RowStart
from weft.request import RequestId


@dataclass(frozen=True)
class ScoredChunk:
    """The prompt chunk that a step computes and scores. The logits of a token score the token after it."""

    request_id: RequestId
    first: int  # the position of the first token to score: one after the first token of the chunk
    indices: range  # the tokens of the step that give the logits
    tokens: tuple[int, ...]  # the tokens to score
    top_count: int
    scores: list[PendingLogprobs] = field(default_factory=list)
    """The logprobs of `tokens`, in order. Filled when their kernels are launched."""


class ScoredPrompts:
    """The prompts of rows with `prompt_logprobs`. The host keeps their tokens: it sends those to score to the GPU."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[tuple[int, ...], int]] = {}

    def start(self, starts: Sequence[RowStart]) -> None:
        for start in starts:
            top_count = start.params.prompt_logprobs
            if top_count is None:
                self._prompts.pop(start.row, None)
            else:
                self._prompts[start.row] = (start.tokens[: start.prompt_length], top_count)

    def scored_chunks(self, plan: IterationPlan) -> list[ScoredChunk]:
        """The prompt chunks of a plan that must be scored."""
        scored_chunks: list[ScoredChunk] = []
        if not self._prompts:
            return scored_chunks
        firsts = accumulate(plan.counts, initial=0)
        columns = zip(plan.request_ids, plan.rows, plan.starts, plan.counts, firsts, strict=False)
        for request_id, row, start, count, first in columns:
            if row not in self._prompts:
                continue
            prompt, top_count = self._prompts[row]
            end = min(start + count, len(prompt) - 1)
            if start < end:
                indices = range(first, first + end - start)
                tokens = prompt[start + 1 : end + 1]
                scored_chunks.append(ScoredChunk(request_id, start + 1, indices, tokens, top_count))
        return scored_chunks


def indices_of(scored_chunks: Sequence[ScoredChunk]) -> np.ndarray | None:
    """The tokens of the step whose logits score prompts."""
    if not scored_chunks:
        return None
    return np.concatenate([np.arange(chunk.indices.start, chunk.indices.stop) for chunk in scored_chunks])
