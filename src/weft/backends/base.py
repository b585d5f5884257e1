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
        """Waits for the step. One without rows waits until at least one outstanding swap is over.

        Where it raises, the step has failed, and so have all swaps accepted so far whose end was not reported: none
        of them may still be copying.
        """
        ...


class Backend(Protocol):
    """Runs plans in the order they are submitted.

    - `submit` takes the row starts and block-table entries over at once, so a row in a step in flight is never
      given to another request; the scheduler sees to that. It may raise: then nothing of the plan was accepted.
    - In a step, all K and V writes of a layer come before its reads: a row may read a block that another row
      fills in the same step (a prefix hit).
    - Swaps run beside the steps, ordered only by what their tasks state. A step that failed counts as over; a
      swap fails when a swap it waits for failed or was never accepted.
    - Errors of one request are reported in `StepResult.errors`, not raised.
    - A row's grammar is followed from its tokens: a row start brings those it has generated so far.
    """

    def allocate(self, pool: KvCachePoolConfig, num_rows: int, max_tokens: int = 0) -> BackendInfo:
        """Takes the memory for the pool and the rows. Called once, before the first plan. No step has more than
        `max_tokens` tokens; 0: nobody knows, and a backend that needs to takes a number of its own."""
        ...

    def check_grammar(self, grammar: Grammar) -> None:
        """Raises InvalidRequestError for one that no answer can follow. Called by any thread, before the request is
        taken in: what takes long is done here and not in a step."""
        ...

    def submit(self, plan: IterationPlan) -> StepHandle: ...

    def close(self) -> None: ...


class Tokenizer(Protocol):
    """As `weft.text.tokenizer.Tokenizer`."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class AnswerText(Protocol):
    """The text of one answer while it comes, as `weft.text.answer_text.AnswerText`."""

    is_cut: bool
    num_tokens: int

    def add(self, output: TokenOutput) -> str: ...

    def result(self, result: GenerationResult) -> GenerationResult: ...


@dataclass(frozen=True)
class OpenedModel:
    """A model and what computes it. Where it has no text, there is no tokenizer."""

    backend: Backend
    tokenizer: Tokenizer | None
    text_of: Callable[[SamplingParams], AnswerText] | None
