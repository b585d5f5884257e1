"""Grammars over a model's own tokens: owns llguidance's view of one vocabulary, and the grammars compiled lately.

Everything a grammar costs is bounded by `llguidance`'s fuel, in compiling and at every token, so that a hostile one fails
instead of holding anybody up. Nothing is fetched: a schema that refers to another document is refused.
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

if TYPE_CHECKING:  # both are imported when the first grammar comes, and never by those who send none
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    from weft.text.tokenizer import Tokenizer

WHITESPACE = r"\x20|\x0A\x20{0,32}"
"""Between the parts of JSON: a space, or a line with its indentation. Without a bound a small model writes empty lines
until it has no tokens left."""

_MAX_COMPILED = 128
_CONTROL = b"\xff"
"""llguidance's mark before a token that no text may become: a string in JSON never ends the answer."""
_MAX_ERROR = 400
_KINDS = {
    "json_schema": "the JSON schema",
    "regex": "the regular expression",
    "choice": "the list of choices",
    "lark": "the grammar",
}
_TOO_COMPLEX = re.compile(r"(?i)fuel|too (many|large|big|complex|deeply)|; max is|recursion limit|TooComplex")


class GrammarCompiler:
    """Any thread may compile. The vocabulary is read when the first grammar comes, in the thread that brings it."""

    def __init__(
        self, open_tokenizer: Callable[[], Tokenizer], end_ids: Collection[int], vocabulary_size: int
    ) -> None:
        self._open_tokenizer = open_tokenizer
        self._end_ids = sorted(end_ids)
        self._vocabulary_size = vocabulary_size
        self._opening = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._caching = threading.Lock()
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def compile(self, grammar: Grammar) -> LLMatcher:
        """A matcher at its start, for the caller to copy. Raises InvalidRequestError for what is none, can never be
        met, or is too much work."""
        with self._caching:
            if (known := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return known
        matcher = self._compile(grammar)
        with self._caching:
            self._compiled[grammar] = matcher
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher

        if not self._end_ids:
            raise InvalidRequestError(
                "the model has no token that ends an answer, so no grammar can be followed; leave it out",
                field="grammar",
            )
        try:
            definition = _DEFINITIONS[grammar.kind](LLMatcher, grammar.definition)
            matcher = LLMatcher(self._read_vocabulary(), definition, limits=_limits(), log_level=0)
        except (ValueError, RecursionError) as error:
            raise _refusal(grammar, str(error)) from None
        if matcher.is_error():
            raise _refusal(grammar, matcher.get_error())
        matcher.compute_bitmask()  # where nothing can ever match, the first mask is the first to notice
        if matcher.is_error():
            raise _refusal(grammar, matcher.get_error())
        return matcher

    def _read_vocabulary(self) -> LLTokenizer:
        with self._opening:
            if self._vocabulary is None:
                from llguidance import LLTokenizer, TokenizerWrapper

                tokenizer = self._open_tokenizer()
                if not tokenizer.is_concatenative:
                    raise InvalidRequestError(
                        "the model's tokenizer makes text of tokens by rules of its own, so no grammar can be followed; "
                        "leave it out",
                        field="grammar",
                        code="unsupported",
                    )
                words = TokenizerWrapper(_Words(tokenizer, self._end_ids, self._vocabulary_size))
                self._vocabulary = LLTokenizer(words, n_vocab=self._vocabulary_size, eos_token=self._end_ids)
            return self._vocabulary


class _Words:
    """A tokenizer as llguidance asks for one: its tokens as bytes, and how a text that is forced is best written."""

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
    """What one grammar may cost. The worst found so far took 40 ms for a mask and 20 MB for a row's states; one that is
    refused for its size may take seconds until then, which is why a server tries grammars out elsewhere first."""
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
    # After what the schema itself says in "x-guidance": neither may be turned off from outside.
    return matchers.grammar_from_json_schema(
        definition,
        overrides={"whitespace_pattern": WHITESPACE, "whitespace_flexible": True, "lenient": False},
    )


def _from_choices(matchers: type[LLMatcher], definition: str) -> str:
    choices = json.loads(definition)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("it is not a list of strings, at least one")
    # One terminal: as rules, thousands of choices would be thousands of parses side by side.
    return matchers.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices)))


def as_lark(definition: str) -> str:
    """A grammar in llguidance's Lark, from that or from llama.cpp's GBNF. Raises ValueError for what is neither."""
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    if is_lark_syntax(definition) or "::=" not in definition:
        return definition
    try:
        return gbnf_to_lark(definition)
    except Exception as error:  # it has no class of its own
        raise ValueError(f"as GBNF: {error}") from None


_DEFINITIONS: dict[str, Callable[[type[LLMatcher], str], str]] = {
    "json_schema": _from_schema,
    "regex": lambda matchers, definition: matchers.grammar_from_regex(definition),
    "choice": _from_choices,
    "lark": lambda matchers, definition: matchers.grammar_from_lark(as_lark(definition)),
}


def _refusal(grammar: Grammar, error: str) -> InvalidRequestError:
    code = "grammar_too_complex" if _TOO_COMPLEX.search(error) else "invalid_grammar"
    return InvalidRequestError(
        f"{_KINDS[grammar.kind]} cannot be used: {_told(grammar, error)}", field="grammar", code=code
    )


def _told(grammar: Grammar, error: str) -> str:
    """What llguidance says, for whoever wrote the grammar."""
    error = error.replace("<non-verbose/>", "").strip()
    # A schema inside of another grammar; what follows is that grammar, which may be one that nobody sent.
    if inside := re.match(
        r"at \d+\(\d+\): failed to compile JSON schema: (.*?)(?=\n +\d+ \||\Z)", error, re.DOTALL
    ):
        error = inside[1]
    if error.startswith(("NoExtension", "Unsatisfiable")):
        return f"nothing can ever match it ({error.splitlines()[0]})"
    if remote := re.match(r"Resource '(.*)' is not present in a registry", error):
        return f'$ref names another document ({remote[1]:.200}); allowed: places in the schema itself ("#/$defs/...")'
    if error.startswith("Unimplemented keys: "):
        return f"weft cannot enforce {error.partition(': ')[2]}; leave out what an answer need not obey"
    if error.startswith("oneOf constraints"):
        return "weft cannot enforce a oneOf whose parts may both match; use anyOf"
    if grammar.kind == "regex" and "regex parse error:" in error:
        # The pattern, a line with carets under the place, and what is wrong there.
        problem = re.search(r"^error: (.*)$", error, re.MULTILINE)
        carets = re.search(r"^ {4}( *)\^", error, re.MULTILINE)
        if problem and carets and "\n" not in grammar.definition:
            return f"{problem[1]}, at character {len(carets[1]) + 1} of {len(grammar.definition)}"
    if grammar.kind == "regex":
        error = re.sub(r'^at 1\(\d+\): invalid regex ".*?" \(in regex\): ', "", error.split("\n   1 |")[0])
    if _TOO_COMPLEX.search(error):
        error = f"it is too much work; make it simpler ({error})"
    return error if len(error) <= _MAX_ERROR else error[:_MAX_ERROR] + "..."
