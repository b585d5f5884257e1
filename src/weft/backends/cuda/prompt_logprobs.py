"""Prompts whose tokens' logprobs are wanted: which rows have one, and which tokens of a step score what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from weft.backends.cuda.sampler import Pending
from weft.plan import IterationPlan, RowStart
from weft.request import RequestId


@dataclass(frozen=True)
class PromptPiece:
    """The part of a prompt that a step computes."""

    request_id: RequestId
    first: int  # the position of the first token to score: the one after the piece's first
    indices: range  # into the step's tokens: each one's logits score the token after it
    tokens: tuple[int, ...]  # those to score
    top_count: int
    scores: list[Pending] = field(default_factory=list)
    """Of the tokens, in order; filled when they are computed."""


class ScoredPrompts:
    """The prompts of the rows that want it. The host keeps their tokens: it must name those to score."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[tuple[int, ...], int]] = {}

    def start(self, starts: Sequence[RowStart]) -> None:
        for start in starts:
            wanted = start.params.prompt_logprobs
            if wanted is None:
                self._prompts.pop(start.row, None)
            else:
                self._prompts[start.row] = (start.tokens[: start.prompt_length], wanted)

    def pieces(self, plan: IterationPlan) -> list[PromptPiece]:
        """Those that a plan computes."""
        pieces: list[PromptPiece] = []
        if not self._prompts:
            return pieces
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
                pieces.append(PromptPiece(request_id, start + 1, indices, tokens, top_count))
        return pieces


def indices_of(pieces: Sequence[PromptPiece]) -> np.ndarray | None:
    """Of the tokens after which logits are wanted to score prompts."""
    if not pieces:
        return None
    return np.concatenate([np.arange(piece.indices.start, piece.indices.stop) for piece in pieces])
