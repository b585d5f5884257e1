"""Rows with grammars over a real vocabulary: full lexers, long forced text, and failures of single rows."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from llguidance import LLParserLimits

from weft.backends.grammar import Drafts, ForcedTokens, Masks, RowGrammars
from weft.plan import RowStart
from weft.request import Grammar, RequestId, SamplingParams
from weft.text import grammar as text_grammar
from weft.text.grammar import GrammarCompiler
from weft.text.tokenizer import Tokenizer

VOCABULARY = 49_152
ENDS = (0, 2)
NUM_DRAFTS = 11
LETTERS = Grammar("regex", "([a-d ]*a[a-d ]{16})*x")
"""Each text of these letters adds states to the lexer."""


@pytest.fixture
def compiler(default_tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: default_tokenizer, ENDS, VOCABULARY)


@pytest.fixture
def rows(compiler: GrammarCompiler) -> Iterator[RowGrammars]:
    grammars = RowGrammars(compiler, 8, VOCABULARY, finds_forced=True)
    yield grammars
    grammars.close()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Returns how often llguidance has tokenised forced text."""
    num_calls = 0
    encode = text_grammar._TokenizerAdapter.__call__

    def count(self: Any, text: bytes | str) -> list[int]:
        nonlocal num_calls
        num_calls += 1
        return encode(self, text)

    monkeypatch.setattr(text_grammar._TokenizerAdapter, "__call__", count)
    return lambda: num_calls


def start(row: int, grammar: Grammar | None, generated: Sequence[int] = ()) -> RowStart:
    params = SamplingParams(grammar=grammar)
    return RowStart(row, RequestId(str(row)), (5, *generated), 1, params, 0, (0,))


def choice(*texts: str) -> Grammar:
    return Grammar("choice", json.dumps(texts))


def bits_of(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()


def allowed(rows: RowGrammars, row: int) -> list[int]:
    masks = rows.masks(np.array([row]))
    assert not masks.errors, masks.errors
    return bits_of(masks.bits[0])


def masks_of(rows: RowGrammars, row: int, drafts: Sequence[int]) -> Masks:
    """The masks of a step with one row and these draft tokens."""
    samples = np.full(1 + len(drafts), row)
    rows.start_drafts(samples, 0, (tuple(drafts),))
    return rows.masks(samples)


def advance(rows: RowGrammars, row: int, tokens: Sequence[int], drafts: Drafts = ()) -> ForcedTokens:
    future = rows.advance(np.full(len(tokens), row), np.array(tokens), 0, drafts)
    assert future is not None
    return future.result()


def letters(tokenizer: Tokenizer) -> list[int]:
    return [t for t in range(VOCABULARY) if re.fullmatch(b"[a-d ]+", tokenizer.token_bytes(t))]


@pytest.mark.parametrize("num_drafts", [0, NUM_DRAFTS])
def test_rejected_draft_tokens_that_fill_the_lexer_end_no_answer(
    rows: RowGrammars, compiler: GrammarCompiler, default_tokenizer: Tokenizer, num_drafts: int
) -> None:
    compiled = compiler.compile(LETTERS)
    choices, rng, other = letters(default_tokenizer), random.Random(1), random.Random(2)
    rows.start([start(0, LETTERS), start(1, LETTERS)])
    for _ in range(500):
        token = rng.choice(choices)
        drafts = tuple(other.choices([t for t in choices if t != token], k=num_drafts))
        masks = masks_of(rows, 0, drafts)
        assert not masks.errors
        assert len(masks.entries) == 1 + num_drafts and all(token in bits_of(bits) for bits in masks.bits)
        advance(rows, 0, [token, *[0] * num_drafts], (drafts,))
    expected = allowed(rows, 0)
    assert set(choices) <= set(expected)
    assert allowed(rows, 1) and not masks_of(rows, 1, choices[:NUM_DRAFTS]).errors
    rows.start([start(2, LETTERS), start(3, LETTERS, choices[:9])])
    assert set(choices) <= set(allowed(rows, 2)) & set(allowed(rows, 3)), "later requests have no full lexer"
    assert (compiler.compile(LETTERS) is compiled) is (num_drafts == 0), "the full one left the cache"


def test_a_text_that_fills_a_lexer_alone_fails_with_and_without_draft_tokens_at_the_same_token(
    default_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = LLParserLimits(max_lexer_states=600, verbose_errors=False)
    monkeypatch.setattr(text_grammar, "_limits", lambda: limits)
    choices, ends = letters(default_tokenizer), []
    for num_drafts in (0, 3):
        compiler = GrammarCompiler(lambda: default_tokenizer, ENDS, VOCABULARY)
        rows = RowGrammars(compiler, 1, VOCABULARY, finds_forced=True)
        rows.start([start(0, LETTERS)])
        rng, other = random.Random(1), random.Random(2)
        for index in range(300):
            token = rng.choice(choices)
            drafts = tuple(other.choices([t for t in choices if t != token], k=num_drafts))
            masks = masks_of(rows, 0, drafts)
            if 0 in masks.errors:
                assert "too many states" in masks.errors[0].message
                ends.append(index)
                break
            advance(rows, 0, [token, *[0] * num_drafts], (drafts,))
        rows.close()
    assert len(ends) == 2 and ends[0] == ends[1] > 10


LONG = "".join(f"Line {index}: it's the same text, isn't it?!\n\n" for index in range(100))


@pytest.mark.parametrize("num_drafts", [0, NUM_DRAFTS])
def test_a_long_forced_text_is_tokenised_once(
    rows: RowGrammars, default_tokenizer: Tokenizer, counted: Callable[[], int], num_drafts: int
) -> None:
    """For the masks, and for the forced tokens that a step reports."""
    text = default_tokenizer.encode(LONG, add_bos=False)
    rows.start([start(0, choice(LONG + "a", LONG + "b"))])
    assert allowed(rows, 0) == text[:1]
    position, before = 0, counted()
    while position + num_drafts < len(text) - 5:
        drafts = tuple(text[position : position + num_drafts])
        masks = masks_of(rows, 0, drafts)
        assert [bits_of(bits) for bits in masks.bits] == [
            [token] for token in text[position : position + 1 + num_drafts]
        ]
        position += 1 + num_drafts
        forced = advance(rows, 0, text[position - 1 - num_drafts : position], (drafts,))
        reported = forced[RequestId("0")]
        assert text[position : position + len(reported)] == list(reported)
        assert len(reported) > NUM_DRAFTS or position + len(reported) >= len(text) - 5
    assert counted() - before <= 4


def test_a_long_text_that_a_draft_token_forces_is_tokenised_once(
    rows: RowGrammars, default_tokenizer: Tokenizer, counted: Callable[[], int]
) -> None:
    text = default_tokenizer.encode("A" + LONG, add_bos=False)
    rows.start([start(0, choice("A" + LONG, "B"))])
    assert text[0] in allowed(rows, 0) and len(allowed(rows, 0)) > 1
    before = counted()
    masks = masks_of(rows, 0, text[:NUM_DRAFTS])
    assert [bits_of(bits) for bits in masks.bits[1:]] == [[token] for token in text[1 : NUM_DRAFTS + 1]]
    assert counted() - before <= 2


def test_forced_text_has_the_same_tokens_with_draft_tokens_and_after_a_restart_of_the_row(
    rows: RowGrammars, compiler: GrammarCompiler, default_tokenizer: Tokenizer
) -> None:
    """In the middle of this text llguidance finds other tokens: "'s" is one token if only the last bytes of "🙂" are known."""
    grammar = choice("it's 🙂", "a🙂's and then🙂'll")
    rows.start([start(row, grammar) for row in range(3)])
    tokens = [token for token in allowed(rows, 0) if default_tokenizer.token_bytes(token) == b"a"]
    advance(rows, 0, tokens)
    while (found := allowed(rows, 0))[0] not in ENDS:
        assert len(found) == 1
        rows.start([start(1, grammar, tokens)])
        assert allowed(rows, 1) == found
        tokens += found
        advance(rows, 0, found)
    assert default_tokenizer.decode(tokens) == "a🙂's and then🙂'll"
    matcher = compiler.compile(grammar).deep_copy()
    matcher.consume_tokens(tokens[:-2])
    assert matcher.compute_ff_tokens() != tokens[-2:], "this is the hard place"
    masks = masks_of(rows, 2, tokens)
    assert [bits_of(bits) for bits in masks.bits[1:-1]] == [[token] for token in tokens[1:]]


class Broken:
    """A matcher that panics."""

    def __init__(self, method: str) -> None:
        self._method = method

    def deep_copy(self) -> Any:
        return self._call("deep_copy", self)

    def consume_token(self, token: int) -> bool:
        return bool(self._call("consume_token", True))

    def compute_ff_tokens(self) -> list[int]:
        return []  # the mask of this object raises a TypeError

    def _call(self, name: str, result: object) -> object:
        if name == self._method:
            raise BaseException("simulated")
        return result


@pytest.mark.parametrize("method", ["deep_copy", "consume_token", "mask"])
def test_a_copy_that_fails_does_not_fail_other_rows(
    rows: RowGrammars, default_tokenizer: Tokenizer, method: str
) -> None:
    a, b = (default_tokenizer.encode(letter, add_bos=False)[0] for letter in "ab")
    rows.start([start(row, Grammar("regex", "[ab]*")) for row in range(3)])
    expected = allowed(rows, 1)
    rows._states[1].matcher = Broken(method)  # type: ignore[assignment]
    samples = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2])
    rows.start_drafts(samples, 0, ((a, b), (a, b), (a, b)))
    masks = rows.masks(samples)
    assert list(masks.errors) == [4], "sample 5 follows it and is discarded"
    assert masks.entries.tolist() == [0, 1, 2, 3, 4, 6, 7, 8]
    assert all(bits_of(masks.bits[index]) == expected for index in (0, 1, 2, 3, 5, 6, 7))
