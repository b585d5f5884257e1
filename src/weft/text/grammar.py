"""Compiles grammars for a model's vocabulary with llguidance. Owns llguidance's copy of the vocabulary, and a cache of
compiled grammars.

llguidance's fuel bounds the cost of compilation and of every token, so that a malicious grammar fails instead of
blocking the engine. A schema that refers to another document is rejected: nothing is downloaded.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from weft.errors import InvalidRequestError
from weft.request import Grammar

if TYPE_CHECKING:  # imported at run time only when the first grammar is compiled
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    from weft.text.tokenizer import Tokenizer

WHITESPACE = r"\x20|\x0A\x20{0,32}"
"""White space between JSON tokens: a space, or a newline with indentation. If it were unlimited, small models would
write empty lines up to the token limit."""

_MAX_COMPILED = 128
_CONTROL = b"\xff"
"""llguidance's prefix of control tokens. Text never matches them: an EOS token cannot occur in a JSON string."""
_MAX_ERROR = 400
_KINDS = {
    "json_schema": "the JSON schema",
    "regex": "the regular expression",
    "choice": "the list of choices",
    "lark": "the grammar",
}
_TOO_COMPLEX = re.compile(r"(?i)fuel|too (many|large|big|complex|deeply)|; max is|recursion limit|TooComplex")


class GrammarCompiler:
    """Thread-safe. The first call of `compile` reads the vocabulary, in the thread of its caller."""

    def __init__(
        self, open_tokenizer: Callable[[], Tokenizer], end_ids: Collection[int], vocabulary_size: int
    ) -> None:
        self._open_tokenizer = open_tokenizer
        self._end_ids = sorted(end_ids)
        self._vocabulary_size = vocabulary_size
        self._vocabulary_lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._cache_lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def compile(self, grammar: Grammar) -> LLMatcher:
        """Returns a matcher in its initial state, for the caller to copy.

        Raises InvalidRequestError if the grammar is invalid, too complex, or matches nothing.
        """
        with self._cache_lock:
            if (known := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return known
        matcher = self._compile(grammar)
        with self._cache_lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher

    def compile_again(self, grammar: Grammar, full: LLMatcher) -> LLMatcher:
        """Returns a matcher whose lexer no other matcher shares. `full` is one whose lexer is full: it leaves the cache."""
        with self._cache_lock:
            if self._compiled.get(grammar) is full:
                del self._compiled[grammar]
        return self._compile(grammar)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher

        if not self._end_ids:
            raise InvalidRequestError(
                "the model has no EOS token, so weft cannot apply a grammar; omit the grammar",
                field="grammar",
            )
        try:
            definition = _DEFINITIONS[grammar.kind](LLMatcher, grammar.definition)
            matcher = LLMatcher(self._read_vocabulary(), definition, limits=_limits(), log_level=0)
        except (ValueError, RecursionError) as error:
            raise _invalid(grammar, str(error)) from None
        if matcher.is_error():
            raise _invalid(grammar, matcher.get_error())
        matcher.compute_bitmask()  # a grammar that matches nothing fails only here
        if matcher.is_error():
            raise _invalid(grammar, matcher.get_error())
        return matcher

    def _read_vocabulary(self) -> LLTokenizer:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                from llguidance import LLTokenizer, TokenizerWrapper

                tokenizer = self._open_tokenizer()
                if not tokenizer.is_concatenative:
                    raise InvalidRequestError(
                        "in this model's tokenizer the text of a token depends on its neighbours, so weft cannot apply "
                        "a grammar; omit the grammar",
                        field="grammar",
                        code="unsupported",
                    )
                adapter = TokenizerWrapper(_TokenizerAdapter(tokenizer, self._end_ids, self._vocabulary_size))
                self._vocabulary = LLTokenizer(
                    adapter, n_vocab=self._vocabulary_size, eos_token=self._end_ids
                )
            return self._vocabulary


class _TokenizerAdapter:
    """The tokenizer interface of llguidance: the bytes of every token, and the encoding of forced text."""

    def __init__(self, tokenizer: Tokenizer, end_ids: list[int], vocabulary_size: int) -> None:
        control = tokenizer.control_ids.union(end_ids)
        self.eos_token_id = end_ids[0]
        self.bos_token_id = None
        self.special_token_ids = [token for token in sorted(control) if token < vocabulary_size]
        self.tokens = [
            (_CONTROL if token in control else b"") + tokenizer.token_bytes(token)
            for token in range(vocabulary_size)
        ]
        self._encode = tokenizer.encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode(), add_bos=False)


def _limits() -> LLParserLimits:
    """The limits of one grammar. The worst known grammar within them takes 40 ms for a mask and 20 MB for a row.

    A grammar beyond them may take seconds to fail, so the server first compiles grammars in another process.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=1_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=20_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        precompute_large_lexemes=True,
        verbose_errors=False,
    )


def _from_schema(matchers: type[LLMatcher], definition: str) -> str:
    # Overrides "x-guidance" in the schema: a request must not turn these off.
    return matchers.grammar_from_json_schema(
        definition,
        overrides={"whitespace_pattern": WHITESPACE, "whitespace_flexible": True, "lenient": False},
    )


def _from_choices(matchers: type[LLMatcher], definition: str) -> str:
    choices = json.loads(definition)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("it is not a list of at least one string")
    # One terminal: as separate rules, thousands of choices would be thousands of parallel parses.
    return matchers.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices)))


def as_lark(definition: str) -> str:
    """Converts a grammar in llama.cpp's GBNF to llguidance's Lark; Lark is returned unchanged. Raises ValueError."""
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    if is_lark_syntax(definition) or "::=" not in definition:
        return definition
    try:
        return gbnf_to_lark(definition)
    except Exception as error:  # gbnf_to_lark raises plain Exceptions
        raise ValueError(f"as GBNF: {error}") from None


_DEFINITIONS: dict[str, Callable[[type[LLMatcher], str], str]] = {
    "json_schema": _from_schema,
    "regex": lambda matchers, definition: matchers.grammar_from_regex(definition),
    "choice": _from_choices,
    "lark": lambda matchers, definition: matchers.grammar_from_lark(as_lark(definition)),
}


def _invalid(grammar: Grammar, error: str) -> InvalidRequestError:
    code = "grammar_too_complex" if _TOO_COMPLEX.search(error) else "invalid_grammar"
    return InvalidRequestError(
        f"{_KINDS[grammar.kind]} cannot be used: {_explain(grammar, error)}", field="grammar", code=code
    )


def _explain(grammar: Grammar, error: str) -> str:
    """Rewrites an error of llguidance for the author of the grammar."""
    error = error.replace("<non-verbose/>", "").strip()
    # An error in a schema inside another grammar. Cut off the rest: it quotes that grammar, which weft may have made.
    if inside := re.match(
        r"at \d+\(\d+\): failed to compile JSON schema: (.*?)(?=\n +\d+ \||\Z)", error, re.DOTALL
    ):
        error = inside[1]
    if error.startswith(("NoExtension", "Unsatisfiable")):
        return f"nothing can ever match it ({error.splitlines()[0]})"
    if remote := re.match(r"Resource '(.*)' is not present in a registry", error):
        return f'$ref names another document ({remote[1]:.200}); allowed: references within the schema ("#/$defs/...")'
    if error.startswith("Unimplemented keys: "):
        return f"weft cannot enforce {error.partition(': ')[2]}; omit keywords that answers need not satisfy"
    if error.startswith("oneOf constraints"):
        return "weft cannot enforce a oneOf whose parts may both match; use anyOf"
    if grammar.kind == "regex" and "regex parse error:" in error:
        # The error has the pattern, a line with carets under the position, and the problem.
        problem = re.search(r"^error: (.*)$", error, re.MULTILINE)
        carets = re.search(r"^ {4}( *)\^", error, re.MULTILINE)
        if problem and carets and "\n" not in grammar.definition:
            return f"{problem[1]}, at character {len(carets[1]) + 1} of {len(grammar.definition)}"
    if grammar.kind == "regex":
        error = re.sub(r'^at 1\(\d+\): invalid regex ".*?" \(in regex\): ', "", error.split("\n   1 |")[0])
    if _TOO_COMPLEX.search(error):
        error = f"it is too complex; simplify it ({error})"
    return error if len(error) <= _MAX_ERROR else error[:_MAX_ERROR] + "..."
