"""Rewrites a Lark grammar so that it describes its texts as they are written inside of a JSON string.

A model writes the input of a custom tool as a string of JSON: a line break is `\\n`, a quote is `\\"`. Escaping works
character by character, so it is enough to rewrite the strings and regular expressions of the grammar. A character class
becomes a choice between a class of safe characters and some escapes.

Terminals become rules, with one terminal for each escape. A terminal with several escapes would fail: all of them begin
with a backslash, and the lexer looks only one byte ahead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from re import _constants as parts  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from weft.request import MAX_GRAMMAR_LENGTH

_SPECIAL = {chr(code): json.dumps(chr(code))[1:-1] for code in (*range(0x20), ord('"'), ord("\\"))}
"""The characters that JSON escapes, and their escapes."""
_PATTERNS = {character: re.escape(escape) for character, escape in _SPECIAL.items()}
_SAFE = r'[^"\\\x00-\x1f]'
_NAME = re.compile(r"_?[A-Z][_A-Z0-9]*")
"""Matches the name of a terminal."""
_CATEGORIES = {
    parts.CATEGORY_DIGIT: r"\d",
    parts.CATEGORY_NOT_DIGIT: r"\D",
    parts.CATEGORY_SPACE: r"\s",
    parts.CATEGORY_NOT_SPACE: r"\S",
    parts.CATEGORY_WORD: r"\w",
    parts.CATEGORY_NOT_WORD: r"\W",
}
_SPACE = frozenset("\t\n\r\v\f ")
_OF_CATEGORY = {
    parts.CATEGORY_DIGIT: frozenset[str](),
    parts.CATEGORY_NOT_DIGIT: frozenset(_SPECIAL),
    parts.CATEGORY_SPACE: _SPACE & _SPECIAL.keys(),
    parts.CATEGORY_NOT_SPACE: _SPECIAL.keys() - _SPACE,
    parts.CATEGORY_WORD: frozenset[str](),
    parts.CATEGORY_NOT_WORD: frozenset(_SPECIAL),
}
"""Category -> its characters that JSON escapes."""
_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r\n]+ | //[^\n]* | \#[^\n]*)
    | (?P<range>"(?:\\.|[^"\\])*"\s*\.\.\s*"(?:\\.|[^"\\])*")
    | (?P<string>"(?:\\.|[^"\\])*"i?)
    | (?P<regex>/(?:\\.|[^/\\\n])+/[imslux]*)
    | (?P<import>%import[ \t]+(?P<imported>[^\n]*))
    | (?P<directive>%\w+)
    | (?P<other>[\w-]+|[^\w\s\"/])
    """,
    re.VERBOSE,
)
_COUNT = re.compile(r"\s*\d")
"""The count after the `~` of a repetition."""
_NOT_REWRITTEN = frozenset(
    ("<", "@", "%json", "%lark", "%regex", "%llguidance", "%override", "%declare", "%ignore", "&")
)
"""Syntax of llguidance that is not rewritten: it raises NotRewritableError."""
_COMMON = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "ESCAPED_STRING": r'"([^"\\\n]|\\[^\n])*"',
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "NUMBER": r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
}
"""The terminals of Lark's library, by name, as regular expressions."""


class NotRewritableError(ValueError):
    """The grammar uses something that has no form inside of a JSON string. The message says what."""


def in_json_string(lark: str) -> str:
    """The grammar of the same texts inside of a JSON string. Raises NotRewritableError."""
    return "".join(_bounded(_tokens(lark)))


def _tokens(lark: str) -> Iterator[str]:
    position = 0
    while position < len(lark):
        token = _TOKEN.match(lark, position)
        if token is None:
            raise NotRewritableError(f"{lark[position : position + 20]!r} is not understood")
        yield _rewritten(token, lark)
        position = token.end()


def _bounded(pieces: Iterable[str]) -> list[str]:
    """The pieces of the rewritten grammar. Raises if they are too long together. A dot becomes 280 characters. A
    repetition may write its content twice, so the length doubles with each level of nesting."""
    found, length = [], 0
    for piece in pieces:
        found.append(piece)
        length += len(piece)
        if length > MAX_GRAMMAR_LENGTH:
            message = f"inside of a JSON string it has more than {MAX_GRAMMAR_LENGTH} characters; shorten it"
            raise NotRewritableError(message)
    return found


def _rewritten(token: re.Match[str], lark: str) -> str:
    """Rewrites one token of the grammar."""
    text, kind = token[0], token.lastgroup
    if kind == "string":
        return _literal(_string(text.rstrip("i")), is_any_case=text.endswith("i"))
    if kind == "range":
        first, last = (_string(one.strip()) for one in text.split(".."))
        return _expression(f"[{re.escape(first)}-{re.escape(last)}]")
    if kind == "regex":
        pattern, _, flags = text[1:].rpartition("/")
        flags = flags.replace("l", "").replace("u", "")
        return _expression(f"(?{flags}:{pattern})" if flags else pattern)
    if token["import"] is not None:
        return _imported(token["imported"].strip())
    if text in _NOT_REWRITTEN or (text == "~" and not _COUNT.match(lark, token.end())):
        raise NotRewritableError(f"{text!r} is not supported in the grammar of a custom tool")
    return _rule_name(text) if _NAME.fullmatch(text) else text


def _imported(what: str) -> str:
    names = re.fullmatch(r"common\.(\w+)(?:\s*->\s*(\w+))?", what)
    pattern = None if names is None else _COMMON.get(names[1])
    if names is None or pattern is None:
        raise NotRewritableError(f"%import {what:.80} is not supported; write its terminals into the grammar")
    return f"{_rule_name(names[2] or names[1])}: {_common_expression(pattern)}"


def _rule_name(terminal: str) -> str:
    return f"terminal{'_' if terminal.startswith('_') else ''}_{terminal.strip('_').lower()}"


def _string(text: str) -> str:
    """The value of a Lark string. `text` is the string as it stands in the grammar, with its quotes."""
    try:
        value = json.loads(re.sub(r"\\x([0-9a-fA-F]{2})", r"\\u00\1", text))
    except ValueError:
        raise NotRewritableError(f"{text:.80} is not a string") from None
    return str(value)


def _literal(text: str, *, is_any_case: bool = False) -> str:
    """A Lark string that matches the text as it is written in JSON."""
    if not is_any_case:
        return json.dumps("".join(_SPECIAL.get(one, one) for one in text), ensure_ascii=False)
    pieces = re.findall(r'[^"\\\x00-\x1f]+|["\\\x00-\x1f]', text)
    written = (
        _literal(one) if one in _SPECIAL else json.dumps(one, ensure_ascii=False) + "i" for one in pieces
    )
    return f"({' '.join(written)})" if pieces else '""'


def _expression(pattern: str) -> str:
    """A Lark expression for all texts that match a regular expression, with their characters escaped."""
    try:
        tree = parser.parse(pattern)
        return f"({_sequence(tree, tree.state.flags)})"
    except (re.error, RecursionError, OverflowError) as error:
        raise NotRewritableError(
            f"the regular expression /{pattern:.80}/ is not understood: {error}"
        ) from None


_common_expression = cache(_expression)


def _sequence(tree: Sequence[Any], flags: int) -> str:
    return " ".join(_bounded(_pieces(tree, flags)))


def _pieces(tree: Sequence[Any], flags: int) -> Iterator[str]:
    """Rewrites the parts of a regular expression. Neighbouring characters become one string."""
    is_any_case = bool(flags & re.IGNORECASE)
    text = ""
    for kind, value in tree:
        if kind is parts.LITERAL:
            text += chr(value)
            continue
        if text:
            yield _literal(text, is_any_case=is_any_case)
            text = ""
        yield _node(kind, value, flags)
    if text or not tree:
        yield _literal(text, is_any_case=is_any_case)


def _node(kind: Any, value: Any, flags: int) -> str:
    """Rewrites one node of a parsed regular expression."""
    if (items := _class_items(kind, value, flags)) is not None:
        return f"({_one_of(items, flags)})"
    if kind in (parts.MAX_REPEAT, parts.MIN_REPEAT):
        least, most, inner = value
        return _repeated(least, most, inner, flags)
    if kind is parts.BRANCH:
        options = _bounded(_sequence(one, flags) for one in value[1] if len(one))
        return f"({' | '.join(options)}){'?' if len(options) < len(value[1]) else ''}"
    if kind is parts.SUBPATTERN:
        _, added, removed, inner = value
        return f"({_sequence(inner, (flags | added) & ~removed)})"
    raise NotRewritableError(f"a regular expression has {str(kind).lower()}, which is not supported")


def _repeated(least: int, most: Any, inner: Sequence[Any], flags: int) -> str:
    kind, value = inner[0] if len(inner) == 1 else (None, None)
    items = _class_items(kind, value, flags)
    one = _sequence(inner, flags) if items is None else _one_of(items, flags)
    if most is not parts.MAXREPEAT:
        return f"({one}){{{least},{most}}}"
    # A run of characters up to the next escape is one terminal: one terminal per character needs far more parser steps.
    many = one if items is None else _one_of(items, flags, is_run=True)
    first = f"({one}){{{least - 1}}} " if least > 1 else ""
    return f"{first}({many}){'+' if least else '*'}"


def _class_items(kind: Any, value: Any, flags: int) -> Sequence[Any] | None:
    """The parts of a class of characters; None if the node is something else."""
    if kind is parts.LITERAL:
        return [(kind, value)]
    if kind is parts.NOT_LITERAL:
        return [(parts.NEGATE, None), (parts.LITERAL, value)]
    if kind is parts.ANY:
        return [(parts.NEGATE, None), *([] if flags & re.DOTALL else [(parts.LITERAL, 10)])]
    return list(value) if kind is parts.IN else None


def _one_of(items: Sequence[Any], flags: int, *, is_run: bool = False) -> str:
    """An expression for one character of a class: a character that JSON does not escape, or an escape. With `is_run`,
    one or more characters that JSON does not escape."""
    is_negated = items[0][0] is parts.NEGATE
    inside = items[1:] if is_negated else items
    written = "".join(_in_class(inside))
    options = []
    if is_negated or any(_is_safe(kind, value) for kind, value in inside):
        safe = _SAFE if not written else f"[[{'^' if is_negated else ''}{written}]&&{_SAFE}]"
        case = "(?i:" if flags & re.IGNORECASE else "(?:"
        options.append(f"/{case}{safe}){'+' if is_run else ''}/")
    held = set[str]().union(*(_special(kind, value) for kind, value in inside))
    if escapes := [pattern for character, pattern in _PATTERNS.items() if (character in held) != is_negated]:
        options.append(f"/{'|'.join(escapes)}/")
    return " | ".join(options)


def _is_safe(kind: Any, value: Any) -> bool:
    """Whether a part of a class has a character that JSON does not escape."""
    if kind is parts.LITERAL:
        return chr(value) not in _SPECIAL
    return kind is not parts.RANGE or value[1] >= 0x20


def _in_class(items: Sequence[Any]) -> Iterator[str]:
    """The parts of a character class, as a regular expression writes them between brackets."""
    for kind, value in items:
        if kind is parts.LITERAL:
            yield rf"\x{{{value:x}}}"
        elif kind is parts.RANGE:
            yield rf"\x{{{value[0]:x}}}-\x{{{value[1]:x}}}"
        elif kind is parts.CATEGORY:
            yield _CATEGORIES[value]
        else:
            raise NotRewritableError(f"a class of characters has {str(kind).lower()}, which is not supported")


def _special(kind: Any, value: Any) -> Iterable[str]:
    """The characters in this part of a character class that JSON escapes."""
    if kind is parts.LITERAL:
        return (chr(value),)
    if kind is parts.RANGE:
        return (character for character in _SPECIAL if value[0] <= ord(character) <= value[1])
    return _OF_CATEGORY[value]
