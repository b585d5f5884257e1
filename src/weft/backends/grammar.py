"""The grammar state of each row, and the token masks that follow from it.

While one thread computes the logits of a step, a second thread consumes the tokens of the previous step and makes the
masks. llguidance releases the GIL and works on all rows in parallel.

A row with draft tokens has a mask after each of them, up to the first one that the grammar forbids. A copy of its
matcher consumes them. The matcher itself consumes only sampled tokens.

Where a grammar forces tokens, llguidance tokenises all of the forced text for each mask. Here that is done once, where
the text begins: while forced tokens remain, each mask allows only the next of them. NOTE: a second time, in the middle
of the text, llguidance may find other tokens. So a rebuilt row looks for forced tokens at the same places.

All matchers of a grammar share the states of its lexer, whose number is limited. Copies add states too, and so do other
rows. If the lexer is full, the row gets a new one, and its matcher is rebuilt from its tokens. A row fails only if the
new lexer fails too. So whether it fails depends on its tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
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
"""How many forced tokens are reported at most. A step checks at most as many."""
_LEXER_IS_FULL = "too many states"
"""In llguidance's error."""

_DraftMasks = dict[int, "int | Failure | None"]
Drafts = tuple[tuple[int, ...], ...]
ForcedTokens = dict[RequestId, tuple[int, ...]]


class _DraftedRow(NamedTuple):
    row: int
    sample: int
    """The row's first sample in the step. Each draft token adds one."""
    first: int
    """Index in `RowGrammars._draft_bits` of the mask after its first draft token."""
    drafts: tuple[int, ...]


class _SampledRow(NamedTuple):
    row: int
    request_id: RequestId
    """The row may already have another request when the grammar thread runs."""
    tokens: list[int]


class _RowState:
    """The grammar of a row. Only the grammar thread uses it."""

    def __init__(self, grammar: Grammar, compiled: LLMatcher) -> None:
        self.grammar = grammar
        self._start(compiled, compiled.deep_copy())

    def _start(self, compiled: LLMatcher, matcher: LLMatcher) -> None:
        self.compiled = compiled
        """`matcher` shares its lexer with this one."""
        self.matcher = matcher
        self.tokens: list[int] = []
        """All that `matcher` has consumed."""
        self.forced = tuple(matcher.compute_ff_tokens())
        """The next tokens, where the grammar allows no others."""

    def consume(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            # The matcher also accepts another end token after the end token: a step in flight may sample one more, which
            # is discarded.
            self.matcher.consume_token(token)
            self.tokens.append(token)
            self.forced = self.forced[1:] if self.forced[:1] == (token,) else ()
            self.forced = self.forced or tuple(self.matcher.compute_ff_tokens())

    def rebuild(self, compiler: GrammarCompiler) -> None:
        """Replaces the full lexer by a new one, which no other row uses."""
        tokens, compiled = self.tokens, compiler.compile_again(self.grammar, self.compiled)
        self._start(compiled, compiled)
        self.consume(tokens)


@dataclass
class _Branch:
    """The walk along the draft tokens of a row."""

    drafted: _DraftedRow
    forced: tuple[int, ...]
    """As in `_RowState`, but after the draft tokens."""
    matcher: LLMatcher | None = None
    num_consumed: int = 0
    """How many draft tokens `matcher` has consumed."""


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
        self._states: dict[int, _RowState] = {}
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
        """Starts computing the masks after the draft tokens of a step. `rows` [S] are the rows of its samples."""
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
            self._states.pop(row, None)
            if grammar is None:
                continue
            try:
                compiled = self._compiler.compile(grammar)
            except InvalidRequestError as error:
                # Rare: the grammar was valid at submission, then left the compiler's cache, and compiling it again
                # failed.
                self._fail(row, str(error))
                continue
            self._states[row] = _RowState(grammar, compiled)
            self._states[row].consume(generated)
        self._fill(begun)

    def _follow(self, sampled: list[_SampledRow]) -> ForcedTokens:
        """Consumes sampled tokens."""
        forced: ForcedTokens = {}
        errors: dict[int, str] = {}
        for row, request_id, tokens in sampled:
            if (state := self._states.get(row)) is None:
                continue
            with _caught(errors, row):
                state.consume(tokens)
                if self._finds_forced and state.forced:
                    forced[request_id] = state.forced[:MAX_FORCED]
        for row, error in errors.items():
            self._fail(row, error)
        return forced

    def _fill(self, changed: list[Any]) -> None:
        """Makes the masks of rows that have begun or have consumed tokens."""
        changed_rows = [row for row, *_ in changed if row in self._states and row not in self._errors]
        errors = self._compute_rows(changed_rows)
        full = [row for row, error in errors.items() if _LEXER_IS_FULL in error]
        for row in full:
            del errors[row]
            with _caught(errors, row):
                self._states[row].rebuild(self._compiler)
                errors |= self._compute_rows([row])
        for row, error in errors.items():
            self._fail(row, error)

    def _compute_rows(self, rows: list[int]) -> dict[int, str]:
        """Makes the masks of rows. Returns the errors of those that failed."""
        filled: list[tuple[LLMatcher, int]] = []
        for row in rows:
            state = self._states[row]
            if state.forced and not state.matcher.is_error():
                _allow_only(self._bits[row], state.forced[0])
            else:
                filled.append((state.matcher, row))
        return self._compute(filled, self._bits)

    def _fill_drafts(self, found: _DraftMasks, drafted: list[_DraftedRow]) -> None:
        """Makes the masks after draft tokens: for all rows after the first one, then after the second one, and so on.
        `found` becomes `_draft_masks`."""
        branches: list[_Branch] = []
        for one in drafted:
            found.update(dict.fromkeys(range(one.sample + 1, one.sample + 1 + len(one.drafts))))
            if one.row in self._states and one.row not in self._errors:
                branches.append(_Branch(one, self._states[one.row].forced))
        for index in range(max(len(one.drafts) for one in drafted)):
            branches = [branch for branch in branches if self._allows_draft(branch, index)]
            errors: dict[int, str] = {}
            filled: list[tuple[LLMatcher, int]] = []
            for branch in branches:
                mask = branch.drafted.first + index
                branch.forced = branch.forced[1:]
                if not branch.forced:
                    with _caught(errors, mask):
                        self._consume_drafts(branch, index)
                if branch.forced:
                    _allow_only(self._draft_bits[mask], branch.forced[0])
                elif branch.matcher is not None and mask not in errors:
                    filled.append((branch.matcher, mask))
            errors |= self._compute(filled, self._draft_bits)
            for branch in branches:
                row, sample, first, _ = branch.drafted
                mask = first + index
                if _LEXER_IS_FULL in errors.get(mask, ""):
                    del errors[mask]
                    with _caught(errors, mask):
                        self._states[row].rebuild(self._compiler)
                        branch.matcher, branch.num_consumed = None, 0
                        self._consume_drafts(branch, index)
                        assert branch.matcher is not None
                        errors |= self._compute([(branch.matcher, mask)], self._draft_bits)
                # The copy fails as its matcher would. The failure counts only if this sample is reached.
                found[sample + 1 + index] = _failure(errors[mask]) if mask in errors else mask
            branches = [branch for branch in branches if branch.drafted.first + index not in errors]

    def _allows_draft(self, branch: _Branch, index: int) -> bool:
        """Whether there is a draft token with this index, and the grammar allows it."""
        row, _, first, drafts = branch.drafted
        if index >= len(drafts):
            return False
        bits = self._draft_bits[first + index - 1] if index else self._bits[row]
        return bool(bits[drafts[index] >> 5] >> (drafts[index] & 31) & 1)

    def _consume_drafts(self, branch: _Branch, index: int) -> None:
        """Brings a copy of the row's matcher to the place after this draft token."""
        if branch.matcher is None:
            # A copy, because an error of a matcher is final, and the draft tokens may be rejected.
            branch.matcher = self._states[branch.drafted.row].matcher.deep_copy()
        for token in branch.drafted.drafts[branch.num_consumed : index + 1]:
            branch.matcher.consume_token(token)
        branch.num_consumed = index + 1
        branch.forced = tuple(branch.matcher.compute_ff_tokens())

    def _compute(self, matchers: list[tuple[LLMatcher, int]], bits: np.ndarray) -> dict[int, str]:
        """Writes the masks of matchers to these indices of `bits`. Returns the errors of those that failed."""
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par

        if self._executor is None:
            self._executor = LLExecutor()
        errors: dict[int, str] = {}
        if not matchers:
            return errors
        try:
            fill_next_token_bitmask_par(self._executor, matchers, bits)
        except BaseException:
            # It does not say which of them failed.
            for matcher, index in matchers:
                with _caught(errors, index):
                    fill_next_token_bitmask_par(self._executor, [(matcher, index)], bits)
        for matcher, index in matchers:
            if index not in errors and matcher.is_error():
                errors[index] = matcher.get_error().replace("<non-verbose/>", "").strip()
        return errors


@contextmanager
def _caught(errors: dict[int, str], index: int) -> Iterator[None]:
    """Adds an exception to `errors`."""
    try:
        yield
    except BaseException as error:  # a panic in llguidance derives from BaseException
        errors[index] = f"{type(error).__name__}: {error}"


def _allow_only(bits: np.ndarray, token: int) -> None:
    bits[:] = 0
    bits.view(np.uint32)[token >> 5] = 1 << (token & 31)


def _failure(error: str) -> Failure:
    return Failure(FailureKind.NO_ALLOWED_TOKEN, f"the grammar cannot be followed any further: {error}")
