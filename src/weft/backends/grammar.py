"""The grammar state of each row, and the token masks that follow from it.

While one thread computes the logits of a step, a second thread consumes the tokens of the previous step and makes the
masks. llguidance releases the GIL and works on all rows in parallel.

A row with draft tokens has a mask after each of them, up to the first one that the grammar forbids. A copy of its
matcher consumes them. The matcher itself consumes only accepted tokens, so nothing has to be rolled back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from operator import eq
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from weft.errors import InvalidRequestError
from weft.plan import RowStart
from weft.request import Failure, FailureKind, Grammar, RequestId
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

MAX_FORCED = 64
"""How many forced tokens are reported at most. A step checks fewer."""

_DraftMasks = dict[int, "int | Failure | None"]
Drafts = tuple[tuple[int, ...], ...]
ForcedTokens = dict[RequestId, tuple[int, ...]]


class _DraftedRow(NamedTuple):
    row: int
    sample: int
    """Its first sample in the step. Each draft token adds one."""
    first: int
    """Index in `RowGrammars._draft_bits` of the mask after its first draft token."""
    drafts: tuple[int, ...]


class _SampledRow(NamedTuple):
    row: int
    request_id: RequestId
    """Kept here, since the row may be another request's before the grammar thread reads it."""
    tokens: list[int]


class RowGrammars:
    """Owns the grammar thread. The step thread calls these methods; the grammar thread does the work in call order.

    Samples of a step with draft tokens: from sample `first_draft` on, each entry has one sample, and one more after each
    of its draft tokens."""

    def __init__(
        self, compiler: GrammarCompiler, num_rows: int, vocabulary_size: int, finds_forced: bool = False
    ) -> None:
        """`finds_forced`: whether `advance` returns forced tokens."""
        self._compiler = compiler
        self._finds_forced = finds_forced
        self._has_grammar = np.zeros(num_rows, np.bool_)
        self._request_ids: dict[int, RequestId] = {}
        self._bits = np.zeros((num_rows, -(-vocabulary_size // 32)), np.int32)
        self._draft_bits = self._bits[:0]
        self._draft_masks: _DraftMasks = {}
        """Sample after a draft token -> index in `_draft_bits`, or why there is no mask. None: a draft token before it is
        forbidden, so the sample is discarded."""
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
            self._request_ids[start.row] = start.request_id
        if begun:
            self._last = self._thread.submit(self._guarded, self._begin, begun)

    @property
    def has_any(self) -> bool:
        """Whether any row has a grammar. If not, callers may skip `masks` and `advance`."""
        return bool(self._has_grammar.any())

    def start_drafts(self, rows: np.ndarray, first_draft: int, drafts: Drafts) -> None:
        """Begins the masks after the draft tokens of a step. `rows` [S] are the rows of its samples."""
        if not drafts:
            self._draft_masks = {}
            return
        drafted: list[_DraftedRow] = []
        sample = first_draft
        num_masks = 0
        for tokens in drafts:
            row = int(rows[sample])
            if self._has_grammar[row]:
                drafted.append(_DraftedRow(row, sample, num_masks, tokens))
                num_masks += len(tokens)
            sample += 1 + len(tokens)
        found: _DraftMasks = {}
        self._draft_masks = found
        if drafted:
            if num_masks > len(self._draft_bits):
                self._draft_bits = np.zeros((num_masks, self._bits.shape[1]), np.int32)
            self._last = self._thread.submit(self._guarded, partial(self._fill_drafts, found), drafted)

    def masks(self, rows: np.ndarray) -> Masks:
        """The masks of the rows [S] that sample next. Waits for the grammar thread. For a step with draft tokens:
        called after `start_drafts`, with the same rows."""
        if self._last is None:
            return NO_MASKS  # no row has ever had a grammar
        entries = np.flatnonzero(self._has_grammar[rows])
        if not len(entries):
            return NO_MASKS
        self._last.result()
        after_drafts = self._draft_masks  # empty for most steps
        if after_drafts:
            kept = [entry for entry in entries.tolist() if after_drafts.get(entry, 0) is not None]
            entries = np.array(kept, np.int64)
        masked = rows[entries]
        bits = self._bits[masked]
        errors = {
            int(entry): self._errors[row]
            for entry, row in zip(entries, masked.tolist(), strict=True)
            if row in self._errors
        }
        for index, entry in enumerate(entries.tolist() if after_drafts else ()):
            found = after_drafts.get(entry)
            if isinstance(found, Failure):
                errors[entry] = found
            elif found is not None:
                bits[index] = self._draft_bits[found]
        return Masks(entries, bits.view(np.uint8), errors)

    def advance(
        self, rows: np.ndarray, tokens: np.ndarray, first_draft: int = 0, drafts: Drafts = ()
    ) -> Future[ForcedTokens] | None:
        """Consumes the tokens that the rows [S] sampled, up to the first one of a row that differs from its draft token.
        Returns the tokens that grammars force after them: at each of these places, the grammar allows no other. None: no
        row has a grammar."""
        if self._last is None:
            return None
        masked = self._has_grammar[rows]
        if not masked.any():
            return None
        sampled: list[_SampledRow] = []
        sample = first_draft
        for expected in drafts:
            if masked[sample]:
                found = tokens[sample : sample + 1 + len(expected)].tolist()
                num_accepted = sum(takewhile(bool, map(eq, expected, found)))
                sampled.append(self._sampled(int(rows[sample]), found[: 1 + num_accepted]))
            sample += 1 + len(expected)
        masked[first_draft:sample] = False
        for row, token in zip(rows[masked].tolist(), tokens[masked].tolist(), strict=True):
            sampled.append(self._sampled(row, [token]))
        forced = self._thread.submit(self._follow, sampled)
        self._last = self._thread.submit(self._guarded, self._fill, sampled)
        return forced

    def _sampled(self, row: int, tokens: list[int]) -> _SampledRow:
        return _SampledRow(row, self._request_ids[row], tokens)

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
        self._errors[row] = _failure(error)

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
        self._fill(begun)

    def _follow(self, sampled: list[_SampledRow]) -> ForcedTokens:
        """Consumes sampled tokens."""
        forced: ForcedTokens = {}
        for row, request_id, tokens in sampled:
            if row not in self._matchers:
                continue
            try:
                matcher = self._matchers[row]
                # The matcher also accepts a token after the end token: a step in flight may sample one more, which is
                # discarded.
                for token in tokens:
                    matcher.consume_token(token)
                if self._finds_forced and (found := matcher.compute_ff_tokens()):
                    forced[request_id] = tuple(found[:MAX_FORCED])
            except BaseException as error:  # as in `_guarded`
                self._fail(row, f"{type(error).__name__}: {error}")
        return forced

    def _fill(self, changed: list[Any]) -> None:
        """Makes the masks of rows that have begun or have consumed tokens."""
        matchers = [(self._matchers[row], row) for row, *_ in changed if row in self._matchers]
        self._compute(matchers, self._bits)
        for matcher, row in matchers:
            if matcher.is_error():
                self._fail(row, _error_of(matcher))

    def _fill_drafts(self, found: _DraftMasks, drafted: list[_DraftedRow]) -> None:
        """Makes the masks after draft tokens: for all rows after the first one, then after the second one, and so on.
        `found` becomes `_draft_masks`."""
        copies: dict[int, LLMatcher] = {}
        for row, sample, _, drafts in drafted:
            found.update(dict.fromkeys(range(sample + 1, sample + 1 + len(drafts))))
            if row in self._matchers and row not in self._errors:
                # A copy, because an error of a matcher is final, and the draft tokens may be rejected.
                copies[row] = self._matchers[row].deep_copy()
        for index in range(max(len(one.drafts) for one in drafted)):
            filled: list[tuple[LLMatcher, int]] = []
            samples: list[int] = []
            for row, sample, first, drafts in drafted:
                if row not in copies or index >= len(drafts):
                    continue
                bits = self._draft_bits[first + index - 1] if index else self._bits[row]
                if not _allows(bits, drafts[index]):
                    del copies[row]
                    continue
                copies[row].consume_token(drafts[index])
                filled.append((copies[row], first + index))
                samples.append(sample + 1 + index)
            self._compute(filled, self._draft_bits)
            for sample, (copy, mask) in zip(samples, filled, strict=True):
                # The copy fails as its matcher would. The failure counts only if this sample is reached.
                found[sample] = _failure(_error_of(copy)) if copy.is_error() else mask
            copies = {row: copy for row, copy in copies.items() if not copy.is_error()}

    def _compute(self, matchers: list[tuple[LLMatcher, int]], bits: np.ndarray) -> None:
        """Writes the masks of matchers to these indices of `bits`."""
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par

        if self._executor is None:
            self._executor = LLExecutor()
        if matchers:
            fill_next_token_bitmask_par(self._executor, matchers, bits)


def _allows(bits: np.ndarray, token: int) -> bool:
    return bool(bits[token >> 5] >> (token & 31) & 1)


def _error_of(matcher: LLMatcher) -> str:
    return matcher.get_error().replace("<non-verbose/>", "").strip()


def _failure(error: str) -> Failure:
    return Failure(FailureKind.NO_ALLOWED_TOKEN, f"the grammar cannot be followed any further: {error}")
