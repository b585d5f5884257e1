"""The contract between the engine and a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from weft.config import KvCachePoolConfig
from weft.plan import BackendInfo, IterationPlan, StepResult
from weft.request import GenerationResult, Grammar, SamplingParams, TokenOutput

__all__ = ["AnswerText", "Backend", "BackendInfo", "OpenedModel", "StepHandle", "Tokenizer"]


class StepHandle(Protocol):
    def result(self) -> StepResult:
        """Waits for the step to end. For a step without rows, waits until at least one swap in flight has ended.

        If `result` raises, the step has failed, and so have all accepted swaps that were not reported. None of these
        swaps may still be copying.
        """
        ...


class Backend(Protocol):
    """Runs plans in the order in which they are submitted.

    - `submit` applies row starts and block-table entries at once. The scheduler therefore never gives a row of a step
      in flight to another request. If `submit` raises, nothing of the plan was accepted.
    - In a step, a layer writes all K and V before it reads any: a row may read a block that another row fills in the
      same step (a prefix hit).
    - Swaps run in parallel with steps, ordered only by the dependencies of their tasks. A failed step counts as ended.
      A swap fails if a swap that it depends on failed or was never accepted.
    - Errors of one request are reported in `StepResult.errors`, not raised.
    - The backend derives the grammar state of a row from its tokens: a row start contains the tokens generated so far.
    """

    def allocate(self, pool: KvCachePoolConfig, num_rows: int, max_tokens: int = 0) -> BackendInfo:
        """Allocates the memory for the KV blocks and the rows. Called once, before the first plan.

        No step has more than `max_tokens` tokens. 0 means unknown: a backend that needs a limit uses its default."""
        ...

    def check_grammar(self, grammar: Grammar) -> None:
        """Raises InvalidRequestError if the grammar cannot be compiled. Called by any thread before the request is
        queued, so that slow compilation does not delay a step."""
        ...

    def submit(self, plan: IterationPlan) -> StepHandle: ...

    def close(self) -> None: ...


class Tokenizer(Protocol):
    """The part of `weft.text.tokenizer.Tokenizer` that the engine needs."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class AnswerText(Protocol):
    """Turns the tokens of one answer into text as they arrive. `weft.text.answer_text.AnswerText` implements it."""

    is_cut: bool
    num_tokens: int

    def add(self, output: TokenOutput) -> str: ...

    def result(self, result: GenerationResult) -> GenerationResult: ...


@dataclass(frozen=True)
class OpenedModel:
    """A backend with its model loaded. `tokenizer` and `text_of` are None for a model without a tokenizer."""

    backend: Backend
    tokenizer: Tokenizer | None
    text_of: Callable[[SamplingParams], AnswerText] | None
