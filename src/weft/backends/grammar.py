"""The grammars of a backend's rows: how far each answer has come, and which tokens may be next.

A step's tokens are taken in, and the masks of the next step made, in a thread beside the one that runs steps, while that
computes the next logits. llguidance lets go of the interpreter and works on all rows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.errors import InvalidRequestError
from weft.plan import RowStart
from weft.request import Grammar
from weft.text.grammar import GrammarCompiler

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


@dataclass(frozen=True)
class Masks:
    """What the grammars of a step's sampling entries allow."""

    entries: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # int64 [M]
    bits: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.uint8))
    """uint8 [M, bytes]: a bit for each token, the first token in the lowest bit; set: it may be next."""
    errors: dict[int, str] = field(default_factory=dict)
    """Entry -> why its grammar cannot be followed any more."""


NO_MASKS = Masks()


class RowGrammars:
    """Called by the thread that runs steps; what it asks for is done in order by a thread of its own."""

    def __init__(self, compiler: GrammarCompiler, num_rows: int, vocabulary_size: int) -> None:
        self._compiler = compiler
        self._has_grammar = np.zeros(num_rows, np.bool_)
        self._bits = np.zeros((num_rows, -(-vocabulary_size // 32)), np.int32)
        self._matchers: dict[int, LLMatcher] = {}
        self._errors: dict[int, str] = {}
        self._executor: LLExecutor | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weft-grammar")
        self._last: Future[None] | None = None

    def start(self, starts: Iterable[RowStart]) -> None:
        """Rows begin anew: each grammar follows what its row has generated so far."""
        begun = []
        for start in starts:
            grammar = start.params.grammar
            if grammar is not None or self._has_grammar[start.row]:
                begun.append((start.row, grammar, start.tokens[start.prompt_length :]))
            self._has_grammar[start.row] = grammar is not None
        if begun:
            self._last = self._thread.submit(self._guarded, self._begin, begun)

    @property
    def has_any(self) -> bool:
        """Whether a row has one just now: where none has, there is nothing to ask or to tell."""
        return bool(self._has_grammar.any())

    def masks(self, rows: np.ndarray) -> Masks:
        """Of the rows [S] that are about to sample; waits until they are there."""
        if self._last is None:
            return NO_MASKS  # no row has ever had one
        entries = np.flatnonzero(self._has_grammar[rows])
        if not len(entries):
            return NO_MASKS
        self._last.result()
        masked = rows[entries]
        errors = {
            int(entry): self._errors[row]
            for entry, row in zip(entries, masked.tolist(), strict=True)
            if row in self._errors
        }
        return Masks(entries, self._bits[masked].view(np.uint8), errors)

    def advance(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """These rows [S] sampled these tokens."""
        if self._last is None:
            return
        masked = self._has_grammar[rows]
        if masked.any():
            pairs = list(zip(rows[masked].tolist(), tokens[masked].tolist(), strict=True))
            self._last = self._thread.submit(self._guarded, self._follow, pairs)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    # -- in the thread beside the steps

    def _guarded(self, work: Callable[[list[Any]], None], rows: list[Any]) -> None:
        """A mistake in here ends the requests of these rows, and no others of their step."""
        try:
            work(rows)
        except BaseException as error:  # a panic in llguidance derives from BaseException
            for row, *_ in rows:
                self._fail(row, f"{type(error).__name__}: {error}")

    def _fail(self, row: int, error: str) -> None:
        self._errors[row] = f"the grammar cannot be followed any further: {error}"

    def _begin(self, begun: list[tuple[int, Grammar | None, tuple[int, ...]]]) -> None:
        for row, grammar, generated in begun:
            self._errors.pop(row, None)
            self._matchers.pop(row, None)
            if grammar is None:
                continue
            try:
                matcher = self._compiler.compile(grammar).deep_copy()
            except InvalidRequestError as error:
                # It was compiled when it was taken in, but is no longer among those compiled lately.
                self._fail(row, str(error))
                continue
            matcher.consume_tokens(list(generated))
            self._matchers[row] = matcher
        self._fill([row for row, _, _ in begun])

    def _follow(self, sampled: list[tuple[int, int]]) -> None:
        rows = []
        for row, token in sampled:
            if row in self._matchers:
                # After an end too: a step that was planned before the end was known samples once more, for nobody.
                self._matchers[row].consume_token(token)
                rows.append(row)
        self._fill(rows)

    def _fill(self, rows: list[int]) -> None:
        """Makes the masks of these rows."""
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par

        if self._executor is None:
            self._executor = LLExecutor()
        matchers = [(self._matchers[row], row) for row in rows if row in self._matchers]
        if matchers:
            fill_next_token_bitmask_par(self._executor, matchers, self._bits)
        for matcher, row in matchers:
            if matcher.is_error():
                self._fail(row, matcher.get_error().replace("<non-verbose/>", "").strip())
