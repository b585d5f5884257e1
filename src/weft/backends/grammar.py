"""The grammar state of each row, and the token masks that follow from it.

While one thread computes the logits of a step, a second thread consumes the tokens of the previous step and makes the
masks. llguidance releases the GIL and works on all rows in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.errors import InvalidRequestError
from weft.plan import RowStart
from weft.request import Failure, FailureKind, Grammar
from weft.text.grammar import GrammarCompiler

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


@dataclass(frozen=True)
class Masks:
    """The tokens that grammars allow, for the M of a step's S samples that have a grammar."""

    entries: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64 [M]: indices of samples."""
    bits: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.uint8))
    """uint8 [M, bytes]: one bit per token, the first token in the lowest bit; 1: allowed."""
    errors: dict[int, Failure] = field(default_factory=dict)
    """Entry -> why its grammar cannot be continued."""


NO_MASKS = Masks()


class RowGrammars:
    """Owns the grammar thread. The step thread calls these methods; the grammar thread does the work in call order."""

    def __init__(self, compiler: GrammarCompiler, num_rows: int, vocabulary_size: int) -> None:
        self._compiler = compiler
        self._has_grammar = np.zeros(num_rows, np.bool_)
        self._bits = np.zeros((num_rows, -(-vocabulary_size // 32)), np.int32)
        self._matchers: dict[int, LLMatcher] = {}
        self._errors: dict[int, Failure] = {}
        self._executor: LLExecutor | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weft-grammar")
        self._last: Future[None] | None = None

    def start(self, starts: Iterable[RowStart]) -> None:
        """Assigns new sequences to these rows. The matcher of a row starts after the tokens that its sequence has
        generated."""
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
        """Whether any row has a grammar. If not, callers may skip `masks` and `advance`."""
        return bool(self._has_grammar.any())

    def masks(self, rows: np.ndarray) -> Masks:
        """The masks of the rows [S] that sample next. Waits for the grammar thread."""
        if self._last is None:
            return NO_MASKS  # no row has ever had a grammar
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
        """Consumes the tokens that the rows [S] sampled."""
        if self._last is None:
            return
        masked = self._has_grammar[rows]
        if masked.any():
            pairs = list(zip(rows[masked].tolist(), tokens[masked].tolist(), strict=True))
            self._last = self._thread.submit(self._guarded, self._follow, pairs)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    # -- in the grammar thread

    def _guarded(self, work: Callable[[list[Any]], None], rows: list[Any]) -> None:
        """An exception ends the requests of these rows, but not the other requests of their step."""
        try:
            work(rows)
        except BaseException as error:  # a panic in llguidance derives from BaseException
            for row, *_ in rows:
                self._fail(row, f"{type(error).__name__}: {error}")

    def _fail(self, row: int, error: str) -> None:
        message = f"the grammar cannot be followed any further: {error}"
        self._errors[row] = Failure(FailureKind.NO_ALLOWED_TOKEN, message)

    def _begin(self, begun: list[tuple[int, Grammar | None, tuple[int, ...]]]) -> None:
        """Makes the matchers and the first masks of new sequences."""
        for row, grammar, generated in begun:
            self._errors.pop(row, None)
            self._matchers.pop(row, None)
            if grammar is None:
                continue
            try:
                matcher = self._compiler.compile(grammar).deep_copy()
            except InvalidRequestError as error:
                # Rare: the grammar was valid at submission, then left the compiler's cache, and compiling it again
                # failed.
                self._fail(row, str(error))
                continue
            matcher.consume_tokens(list(generated))
            self._matchers[row] = matcher
        self._fill([row for row, _, _ in begun])

    def _follow(self, sampled: list[tuple[int, int]]) -> None:
        """Consumes sampled tokens, and makes the next masks."""
        rows = []
        for row, token in sampled:
            if row in self._matchers:
                # The matcher also accepts a token after the end token: a step in flight may sample one more, which is
                # discarded.
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
