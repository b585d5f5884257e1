"""Grammars over a real vocabulary: compilation, the allowed next tokens, and masks in the sampler."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from weft.backends.grammar import Masks, RowGrammars
from weft.backends.step_arrays import Rows
from weft.errors import InvalidRequestError
from weft.plan import IterationPlan, RowStart
from weft.request import Grammar, RequestId, SamplingParams
from weft.sampling.reference import Sampled, sample
from weft.text.grammar import GrammarCompiler
from weft.text.tokenizer import Tokenizer

VOCABULARY = 49_152
WIDER = VOCABULARY + 13
"""The output of a model may be wider than its vocabulary."""
ENDS = (0, 2)
PROMPT = (5, 6, 7)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3},
        "more": {"type": "object", "properties": {"x": {"type": "number"}}, "additionalProperties": False},
    },
    "required": ["name", "age", "tags", "more"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler(default_tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: default_tokenizer, ENDS, WIDER)


@pytest.fixture
def rows(compiler: GrammarCompiler) -> Iterator[RowGrammars]:
    grammars = RowGrammars(compiler, 8, WIDER)
    yield grammars
    grammars.close()


def start(row: int, grammar: Grammar | None, generated: Sequence[int] = ()) -> RowStart:
    params = SamplingParams(grammar=grammar)
    return RowStart(row, RequestId(str(row)), (*PROMPT, *generated), len(PROMPT), params, 0, (0,))


def allowed(grammars: RowGrammars, row: int) -> list[int]:
    masks = grammars.masks(np.array([row]))
    assert not masks.errors, masks.errors
    return np.flatnonzero(np.unpackbits(masks.bits[0], bitorder="little")).tolist()


def advance(grammars: RowGrammars, row: int, token: int) -> None:
    grammars.advance(np.array([row]), np.array([token]))


# --- compiling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "definition", "message"),
    [
        ("regex", "a(b", "unclosed group, at character 2 of 3"),
        ("regex", "[b-a]x", "at character 2 of 6"),
        ("regex", "a\n(b", "unclosed group"),
        ("regex", r"[^\s\S]", "nothing can ever match"),
        ("choice", "[]", "at least one"),
        ("choice", '{"a": 1}', "list of at least one string"),
        ("choice", "[" * 100_000, "list of choices"),
        ("lark", "start: foo", 'unknown name: "foo"'),
        ("lark", 'root ::= "a', "GBNF"),
        ("lark", 'other ::= "a"', "root"),
        ("json_schema", "{", "EOF"),
        ("json_schema", "3", "JSON schema"),
        ("json_schema", '{"enum": []}', "nothing can ever match"),
        ("json_schema", '{"not": {}, "uniqueItems": true}', '"not", "uniqueItems"'),
        ("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}', '"not"'),
        ("json_schema", '{"oneOf": [{"type": "number"}, {"type": "integer"}]}', "use anyOf"),
        ("json_schema", '{"$ref": "https://example.org/schema"}', "another document"),
    ],
)
def test_an_invalid_grammar_is_rejected_with_the_position_or_the_keyword(
    compiler: GrammarCompiler, kind: str, definition: str, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(message)) as rejected:
        compiler.compile(Grammar(kind, definition))
    assert rejected.value.field == "grammar" and len(str(rejected.value)) < 600


def test_recently_compiled_grammars_are_cached(compiler: GrammarCompiler) -> None:
    grammar = Grammar("regex", "[a-z]{3}")
    first = compiler.compile(grammar)
    assert compiler.compile(Grammar("regex", "[a-z]{3}")) is first
    for index in range(200):
        compiler.compile(Grammar("regex", f"a{{{index}}}"))
    assert compiler.compile(grammar) is not first, "the cache is bounded"


def test_several_threads_may_compile_the_first_grammars_at_once(default_tokenizer: Tokenizer) -> None:
    opened = []
    compiler = GrammarCompiler(lambda: opened.append(1) or default_tokenizer, ENDS, VOCABULARY)
    threads = [
        threading.Thread(target=compiler.compile, args=(Grammar("regex", f"a{{{index}}}"),))
        for index in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened == [1]


def test_a_model_without_an_end_token_rejects_grammars(default_tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(lambda: default_tokenizer, (), VOCABULARY)
    with pytest.raises(InvalidRequestError, match="no EOS token"):
        compiler.compile(Grammar("regex", "a"))


# --- allowed next tokens ----------------------------------------------------------------------------------------------


def test_a_mask_allows_exactly_the_tokens_that_keep_a_match_possible(
    rows: RowGrammars, default_tokenizer: Tokenizer
) -> None:
    """Compared with a search through the whole vocabulary, at every step of a random walk."""
    rng = random.Random(1)
    words = ["abc", "abd", "b", "bcde", "x y"]
    rows.start([start(3, Grammar("regex", "|".join(words)))])
    content = [default_tokenizer.token_bytes(token) for token in range(VOCABULARY)]
    written = b""
    while True:
        rest = [word.encode()[len(written) :] for word in words if word.encode().startswith(written)]
        expected = {
            token
            for token, text in enumerate(content)
            if text and token not in default_tokenizer.control_ids and any(r.startswith(text) for r in rest)
        }
        found = set(allowed(rows, 3))
        assert found - set(ENDS) <= expected and bool(found - set(ENDS)) == bool(expected)
        assert found.issuperset(ENDS) == (b"" in rest), (
            "end tokens are allowed only where a match is complete"
        )
        # If only one text is left, the grammar may allow only the tokenizer's own tokens for it.
        assert found - set(ENDS) == expected or len(rest) == 1
        continuing = sorted(found - set(ENDS))
        if not continuing:
            break
        token = rng.choice(continuing)
        written += content[token]
        advance(rows, 3, token)
    assert written.decode() in words


def test_a_matcher_rebuilt_from_tokens_allows_the_same_tokens_as_before(
    rows: RowGrammars, default_tokenizer: Tokenizer
) -> None:
    """Contract 5: a row start has all the state of a row, so a grammar continues after preemption and after a failed step."""
    rng = random.Random(2)
    grammar = Grammar("json_schema", json.dumps(PERSON))
    rows.start([start(0, grammar)])
    generated: list[int] = []
    while True:
        choices = allowed(rows, 0)
        rows.start([start(5, grammar, generated)])
        assert allowed(rows, 5) == choices
        choices = [token for token in choices if token not in ENDS]
        if not choices:
            break
        # Prefers long tokens: a uniform random walk would write mostly spaces.
        token = max(
            rng.sample(choices, min(8, len(choices))), key=lambda t: len(default_tokenizer.token_bytes(t))
        )
        generated.append(token)
        advance(rows, 0, token)
    person = json.loads(default_tokenizer.decode(generated))
    assert list(person) == ["name", "age", "tags", "more"] and 0 <= person["age"] <= 150


def test_text_that_spells_a_control_token_never_allows_the_token(
    rows: RowGrammars, default_tokenizer: Tokenizer
) -> None:
    rows.start([start(0, Grammar("regex", r"<\|im_end\|>|<.*"))])
    assert not default_tokenizer.control_ids & set(allowed(rows, 0))


def test_json_has_at_most_one_line_break_between_its_parts(
    rows: RowGrammars, default_tokenizer: Tokenizer
) -> None:
    rows.start([start(0, Grammar("json_schema", '{"type": "object"}'))])
    for text in ("{", "\n"):
        [token] = default_tokenizer.encode(text)
        assert token in allowed(rows, 0)
        advance(rows, 0, token)
    content = b"".join(default_tokenizer.token_bytes(token) for token in allowed(rows, 0))
    assert b" " in content and not set(b"\n\t\r") & set(content)


def test_a_row_may_be_sampled_again_after_its_end_token(rows: RowGrammars) -> None:
    """A step in flight samples once more after the end. That token is discarded."""
    rows.start([start(0, Grammar("choice", '["a"]'))])
    advance(rows, 0, allowed(rows, 0)[0])
    assert allowed(rows, 0) == list(ENDS)
    for _ in range(2):
        advance(rows, 0, ENDS[1])
        assert allowed(rows, 0) == list(ENDS)


def test_rows_with_and_without_grammars_do_not_affect_each_other(rows: RowGrammars) -> None:
    rows.start([start(0, Grammar("regex", "a")), start(1, None), start(2, Grammar("regex", "b"))])
    masks = rows.masks(np.array([2, 1, 0]))
    assert masks.entries.tolist() == [0, 2]
    assert len(rows.masks(np.array([1])).entries) == 0
    rows.start([start(0, None), start(1, Grammar("regex", "c"))])
    assert rows.masks(np.array([0, 1, 2])).entries.tolist() == [1, 2]


def test_29_a_grammar_that_becomes_too_complex_is_an_error_of_its_row_only(
    rows: RowGrammars, default_tokenizer: Tokenizer
) -> None:
    letters = [t for t in range(VOCABULARY) if re.fullmatch(b"[a-z]{10,}", default_tokenizer.token_bytes(t))]
    rows.start(
        [start(0, Grammar("regex", "(([a-z]{0,999}){0,999}){0,999}")), start(1, Grammar("regex", "[a-z]*"))]
    )
    both = np.array([0, 1])
    for letter in letters[:40]:
        if rows.masks(both).errors:
            break
        rows.advance(both, np.array([letter, letter]))
    assert list(rows.masks(both).errors) == [0]
    assert "cannot be followed any further" in rows.masks(both).errors[0].message
    rows.start([start(0, Grammar("regex", "a"))])
    assert not rows.masks(both).errors, "the next request of the row starts without the error"


# --- masks in the sampler ---------------------------------------------------------------------------------------------


def masked_sample(
    logits: np.ndarray, params: list[SamplingParams], allowed: dict[int, list[int]], eos: Sequence[int] = ()
) -> Sampled:
    """Samples one token per row of logits. `allowed` maps a row to its allowed tokens; other rows have no mask."""
    count, vocabulary = logits.shape
    starts = tuple(
        RowStart(row, RequestId(str(row)), PROMPT, len(PROMPT), params[row], row, (0,))
        for row in range(count)
    )
    plan = IterationPlan(
        step=0,
        num_decodes=count,
        request_ids=tuple(map(RequestId, range(count))),
        rows=tuple(range(count)),
        starts=(len(PROMPT) - 1,) * count,
        counts=(1,) * count,
        samples=(True,) * count,
        row_starts=starts,
    )
    state = Rows(count, 64, 16)
    state.update(plan)
    bits = np.zeros((len(allowed), -(-vocabulary // 32) * 32), np.uint8)
    for index, tokens in enumerate(allowed.values()):
        bits[index, tokens] = 1
    masks = Masks(np.array(list(allowed), np.int64), np.packbits(bits, axis=1, bitorder="little"))
    return sample(logits, state.prepare(plan).entries, state, eos, masks)


SHAPES = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 0.7, "min_p": 0.1, "repetition_penalty": 1.4},
    {"temperature": 1.0, "typical_p": 0.4},
    {"temperature": 1.0, "frequency_penalty": 1.0, "presence_penalty": 0.5, "logit_bias": {3: 100.0}},
    {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": (4,)},
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_mask_has_the_effect_of_logits_of_minus_infinity_for_other_tokens(dtype: type) -> None:
    """Every second row has a mask. The other rows must not change."""
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(16, 101), scale=3).astype(dtype)
    params = [SamplingParams(**SHAPES[row % len(SHAPES)]) for row in range(16)]  # type: ignore[arg-type]
    allowed = {row: sorted(rng.choice(101, size=1 + row, replace=False).tolist()) for row in range(1, 16, 2)}
    sampled = masked_sample(logits, params, allowed)
    impossible = logits.copy()
    for row, tokens in allowed.items():
        impossible[row, np.setdiff1d(np.arange(101), tokens)] = -np.inf
    plain = masked_sample(impossible, params, {})
    assert sampled.tokens.tolist() == plain.tokens.tolist() and not sampled.errors
    free = masked_sample(logits, params, {})
    assert sampled.tokens[::2].tolist() == free.tokens[::2].tolist(), "rows without a mask do not change"
    for row, tokens in allowed.items():
        assert int(sampled.tokens[row]) in tokens


def test_logprobs_ignore_the_mask(rows: RowGrammars) -> None:
    logits = np.random.default_rng(5).normal(size=(2, 64)).astype(np.float32)
    params = [SamplingParams(temperature=0.0, logprobs=3)] * 2
    masked = masked_sample(logits, params, {0: [9]}).logprobs
    free = masked_sample(logits, params, {}).logprobs
    assert masked is not None and free is not None and masked[0] is not None and free[0] is not None
    assert masked[0].top == free[0].top
    wide = logits[0].astype(np.float64)
    assert masked[0].logprob == pytest.approx(wide[9] - np.log(np.exp(wide).sum()), abs=1e-5)


def test_min_tokens_is_ignored_if_the_grammar_allows_only_end_tokens() -> None:
    logits = np.zeros((2, 40), np.float32)
    logits[:, 7] = 9.0
    params = [SamplingParams(temperature=0.0, min_tokens=5, grammar=Grammar("regex", "a"))] * 2
    sampled = masked_sample(logits, params, {0: [7], 1: [7, 8]}, eos=[7])
    assert sampled.tokens.tolist() == [7, 8] and not sampled.errors


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_18_a_row_without_any_allowed_token_fails_alone(temperature: float) -> None:
    logits = np.zeros((3, 40), np.float32)
    params = [SamplingParams(temperature=temperature)] * 3
    sampled = masked_sample(logits, params, {1: []})
    assert list(sampled.errors) == [1] and "every token is forbidden" in sampled.errors[1].message


def test_llguidance_is_not_imported_without_a_grammar() -> None:
    code = (
        "import sys, weft.engine.ipc.process, weft.backends.cpu.runner, weft.server.app\n"
        "assert 'weft.backends.grammar' in sys.modules and 'llguidance' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
