"""Masks of rows with draft tokens: the same as those of a matcher that never saw a draft token. And forced tokens: each
is the only one that is allowed."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import numpy as np
import pytest

from weft.backends.grammar import Drafts, Masks, RowGrammars
from weft.plan import RowStart
from weft.request import Grammar, RequestId, SamplingParams
from weft.text.grammar import GrammarCompiler
from weft.text.tokenizer import Tokenizer

VOCABULARY = 49_152
ENDS = (0, 2)
NUM_ROWS = 4
RECORD = {
    "type": "object",
    "properties": {
        "name_of_the_thing": {"type": "string", "maxLength": 5},
        "is_available": {"type": "boolean"},
        "parts": {"type": "array", "items": {"enum": ["a", "bc", "bcd_and_more"]}, "maxItems": 3},
    },
    "required": ["name_of_the_thing", "is_available", "parts"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar("json_schema", json.dumps(RECORD)),
    Grammar("json_schema", '{"type": "object"}'),
    Grammar("regex", r"[A-Z][a-z]{2,4} \d{2}( and so on)?"),
    Grammar("choice", '["yes", "no", "perhaps not", "perhaps so", "Größe"]'),
    Grammar("lark", 'start: "(" start ")" | "[[[[" start "]" | NUMBER\nNUMBER: /[0-9]{2}/'),
]


@pytest.fixture(scope="module")
def compiler(default_tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: default_tokenizer, ENDS, VOCABULARY)


def allowed_after(compiler: GrammarCompiler, grammar: Grammar, tokens: Sequence[int]) -> list[int]:
    """The definition: what a matcher allows that has consumed the tokens of an answer, and nothing else."""
    matcher = compiler.compile(grammar).deep_copy()
    for token in tokens:
        matcher.consume_token(token)
    return bits_of(np.frombuffer(matcher.compute_bitmask(), np.uint8))


def without_ends(tokens: Sequence[int]) -> list[int]:
    return [token for token in tokens if token not in ENDS]


def bits_of(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()


def mask_of(masks: Masks, sample: int) -> list[int] | None:
    """The tokens that are allowed at a sample. None: it has no mask."""
    [found] = [bits_of(masks.bits[index]) for index in np.flatnonzero(masks.entries == sample)] or [None]
    return found


def test_masks_after_draft_tokens_are_those_of_a_matcher_that_saw_only_accepted_tokens(
    compiler: GrammarCompiler,
) -> None:
    """Rows without a grammar, without draft tokens, and with ones that are allowed, forbidden, accepted and rejected."""
    num_accepted = num_rejected = num_forbidden = 0
    for seed in range(40):
        print(f"seed {seed}")
        rows = RowGrammars(compiler, NUM_ROWS, VOCABULARY, finds_forced=True)
        walk = Walk(rows, compiler, random.Random(seed))
        for _ in range(12):
            walk.step()
        rows.close()
        num_accepted += walk.num_accepted
        num_rejected += walk.num_rejected
        num_forbidden += walk.num_forbidden
    assert min(num_accepted, num_rejected, num_forbidden) > 100


class Walk:
    """Random steps, with a random token for each sample."""

    def __init__(self, rows: RowGrammars, compiler: GrammarCompiler, rng: random.Random) -> None:
        self.rows, self._compiler, self._rng = rows, compiler, rng
        self._grammars: list[Grammar | None] = [None] * NUM_ROWS
        self._answers: list[list[int]] = [[] for _ in range(NUM_ROWS)]
        self._has_ended = [True] * NUM_ROWS
        self.num_accepted = self.num_rejected = self.num_forbidden = 0

    def step(self) -> None:
        rng = self._rng
        self._start_rows()
        order = rng.sample(range(NUM_ROWS), NUM_ROWS)
        num_plain, num_drafted = sorted(rng.randrange(NUM_ROWS + 1) for _ in range(2))
        drafts: Drafts = tuple(
            tuple(self._draw_drafts(row, rng.randint(1, 6))) for row in order[num_plain:num_drafted]
        )
        counts = [1] * num_plain + [1 + len(one) for one in drafts] + [1] * (NUM_ROWS - num_drafted)
        sampled_rows = np.repeat(np.array(order, np.int64), counts)
        self.rows.start_drafts(sampled_rows, num_plain, drafts)
        masks = self.rows.masks(sampled_rows)
        assert not masks.errors
        tokens = np.zeros(len(sampled_rows), np.int64)
        sample = 0
        for entry, row in enumerate(order):
            expected = drafts[entry - num_plain] if num_plain <= entry < num_drafted else ()
            found = [mask_of(masks, sample + index) for index in range(1 + len(expected))]
            sampled = self._sample(row, expected, found)
            tokens[sample : sample + len(sampled)] = sampled
            sample += len(sampled)
        future = self.rows.advance(sampled_rows, tokens, num_plain, drafts)
        forced = {} if future is None else future.result()
        for row, grammar in enumerate(self._grammars):
            if grammar is not None and not self._has_ended[row]:
                check_forced(self._compiler, grammar, self._answers[row], forced.get(RequestId(str(row)), ()))

    def _start_rows(self) -> None:
        """Starts rows whose answer has ended with another grammar, and sometimes a row with the same tokens again."""
        starts = []
        for row in range(NUM_ROWS):
            if self._has_ended[row]:
                self._grammars[row] = self._rng.choice([*GRAMMARS, *GRAMMARS, None])
                self._answers[row], self._has_ended[row] = [], False
            elif self._rng.random() < 0.8:
                continue
            params, tokens = SamplingParams(grammar=self._grammars[row]), (5, 6, *self._answers[row])
            starts.append(RowStart(row, RequestId(str(row)), tokens, 2, params, 0, (0,)))
        self.rows.start(starts)

    def _sample(self, row: int, expected: Sequence[int], masks: Sequence[list[int] | None]) -> list[int]:
        """Draws a token for each sample of a row, and adds those to its answer that follow accepted draft tokens."""
        grammar, sampled = self._grammars[row], []
        for index, mask in enumerate(masks):
            is_reached = sampled == list(expected[:index])
            if grammar is None:
                assert mask is None
            elif is_reached:
                assert mask == allowed_after(self._compiler, grammar, self._answers[row])
            token = self._draw_token(mask, expected[index : index + 1])
            sampled.append(token)
            if is_reached:
                self._answers[row].append(token)
                self._has_ended[row] = grammar is not None and token in ENDS
            if index < len(expected):
                self.num_accepted += is_reached and token == expected[index]
                self.num_rejected += is_reached and token != expected[index]
                self.num_forbidden += is_reached and mask is not None and expected[index] not in mask
        return sampled

    def _draw_token(self, allowed: list[int] | None, expected: Sequence[int]) -> int:
        """One of the allowed tokens, often the draft token. No end token if there is another."""
        choices = [*expected, 77] if allowed is None else without_ends(allowed) or allowed
        if expected and expected[0] in choices and self._rng.random() < 0.7:
            return expected[0]
        return self._rng.choice(choices)

    def _draw_drafts(self, row: int, count: int) -> list[int]:
        """Draft tokens: mostly allowed ones."""
        found: list[int] = []
        grammar = self._grammars[row]
        while grammar is not None and len(found) < count and self._rng.random() < 0.8:
            allowed = without_ends(allowed_after(self._compiler, grammar, [*self._answers[row], *found]))
            if not allowed:
                break
            found.append(self._rng.choice(allowed))
        return found + [self._rng.randrange(3, VOCABULARY) for _ in range(count - len(found))]


def check_forced(
    compiler: GrammarCompiler, grammar: Grammar, answer: Sequence[int], forced: Sequence[int]
) -> None:
    """No forced token is missing: what follows them is a choice."""
    for index in range(len(forced)):
        assert allowed_after(compiler, grammar, [*answer, *forced[:index]]) == [forced[index]]
    following = allowed_after(compiler, grammar, [*answer, *forced])
    assert len(following) > 1 or following[0] in ENDS
