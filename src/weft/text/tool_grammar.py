"""Grammars for answers with forced or optional tool calls, in the model's tool format.

They are written in llguidance's Lark. A marker that is a control token is referenced by its id, since text never
matches a control token. Other markers are strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.request import Grammar
from weft.text.answer_reader import AnswerSyntax
from weft.text.tokenizer import Tokenizer
from weft.text.tool_formats import ToolFormat

_MOST_CALLS = 16
"""The limit of calls in an answer. Without it, some models never stop calling."""

# JSON as templates write it. If white space were allowed anywhere, some models would write nothing else.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_TEXT = "(?s:.*)"
_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class Tool:
    name: str
    parameters: Mapping[str, Any]
    """A JSON schema."""
    is_strict: bool = False
    arguments_grammar: str | None = None
    """A Lark grammar of the arguments, as they are written in JSON. None: `parameters` describe them."""


def forced_calls(
    tools: Sequence[Tool], syntax: AnswerSyntax, tokenizer: Tokenizer, *, is_single_call: bool = False
) -> Grammar:
    """A grammar for at least one call and no content. Reasoning may come first, if the model has it."""
    writer = _Writer(syntax, tokenizer, is_single_call)
    return writer.grammar(writer.calls(tools))


def optional_calls(
    tools: Sequence[Tool],
    syntax: AnswerSyntax,
    tokenizer: Tokenizer,
    answer: Grammar | None,
    *,
    is_single_call: bool = False,
) -> Grammar | None:
    """A grammar for calls or content. Arguments of strict tools match their schemas; content matches `answer`.

    None if there is nothing to enforce: no strict tool and no `answer`.
    """
    if answer is None and not any(tool.is_strict for tool in tools):
        return None
    writer = _Writer(syntax, tokenizer, is_single_call)
    checked = [tool if tool.is_strict else Tool(tool.name, _ANY_OBJECT) for tool in tools]
    if answer is not None:
        return writer.grammar(f"{writer.calls(checked)} | {writer.answer(answer)}")
    return writer.grammar(writer.text_and_calls(checked))


def after_reasoning(answer: Grammar, syntax: AnswerSyntax, tokenizer: Tokenizer) -> Grammar:
    """A grammar that allows reasoning first, and applies `answer` to the text after it."""
    if syntax.reasoning is None:
        return answer
    writer = _Writer(syntax, tokenizer)
    return writer.grammar(writer.answer(answer))


class _Writer:
    """Collects the rules of one grammar. Methods add rules and return an expression that refers to them."""

    def __init__(self, syntax: AnswerSyntax, tokenizer: Tokenizer, is_single_call: bool = False) -> None:
        self._syntax = syntax
        self._is_single_call = is_single_call or (
            syntax.tool_format is not None and syntax.tool_format.is_single_call
        )
        self._ids = {text: token for token, text in tokenizer.control_tokens.items()}
        self._rules: list[str] = []

    def grammar(self, body: str) -> Grammar:
        rules = [f"start: {self._reasoning()} ({body})", *self._rules]
        return Grammar("lark", "\n".join(rules) + "\n")

    def calls(self, tools: Sequence[Tool]) -> str:
        tool_format = self._format
        self._rule("call", " | ".join(self._call(tool_format.before_name, tool) for tool in tools))
        most = 1 if self._is_single_call else self._syntax.max_calls or _MOST_CALLS
        more = f" ({self._literal(tool_format.separator)} call){{0,{most - 1}}}" if most > 1 else ""
        return f"{self._literal(tool_format.begin)} call{more} {self._literal(tool_format.end)}"

    def text_and_calls(self, tools: Sequence[Tool]) -> str:
        """Text in which every opening marker is followed by calls."""
        tool_format = self._format
        not_reasoning = "" if self._syntax.reasoning is None else f" & ~/{self._open_reasoning}{_ANY_TEXT}/"
        if tool_format.has_unmarked_calls:
            # There is no opening marker, so text must not start like a call.
            self._rule("TEXT", rf"/[^{{\[\s]{_ANY_TEXT}/{not_reasoning}")
            return f"TEXT | {self.calls(tools)}"
        opening = tool_format.openings[0]
        self._rule(
            "call",
            " | ".join(self._call(tool_format.before_name.removeprefix(opening), tool) for tool in tools),
        )
        several = "call"
        if tool_format.begin:
            inside = self._literal(tool_format.begin.removeprefix(opening))
            several = f"{inside} call ({self._literal(tool_format.separator)} call)* {self._literal(tool_format.end)}"
        if opening in self._ids:
            self._rule("TEXT", "/(?s:.+)/")
            return f"TEXT? ({self._literal(opening)} {several} TEXT?)*"
        marker = _in_regex(opening)
        self._rule("TEXT", f"/(?s:.+)/ & ~/{_ANY_TEXT}{marker}{_ANY_TEXT}/{not_reasoning}")
        # Text and the opening marker after it are one terminal. If the marker were a terminal of its own, the longest
        # match of the text would include it.
        self._rule("BEGINNING", f"/{_ANY_TEXT}{marker}/{not_reasoning}")
        self._rule("beginning[lazy]", "BEGINNING")
        return f"(beginning {several})* TEXT?"

    def answer(self, grammar: Grammar) -> str:
        if grammar.kind == "json_schema":
            self._rule("answer", f"%json {_styled(json.loads(grammar.definition))}")
        elif grammar.kind == "regex":
            self._rule("answer", f"/{_in_slashes(grammar.definition)}/")
        elif grammar.kind == "choice":
            self._rule("answer", " | ".join(map(json.dumps, json.loads(grammar.definition))))
        else:
            self._rule("answer", f"%lark {{\n{grammar.definition}\n}}")
        return "answer"

    def _call(self, before_name: str, tool: Tool) -> str:
        number = len(self._rules)
        tool_format = self._format
        # The whole schema is enforced only for a strict tool; for others, keywords that llguidance lacks are ignored.
        if tool.arguments_grammar is None:
            arguments = f"%json {_styled(tool.parameters, lenient=not tool.is_strict)}"
        else:
            arguments = f"%lark {{\n{tool.arguments_grammar}\n}}"
        self._rule(f"arguments_{number}", arguments)
        before = self._literal(before_name + tool.name + tool_format.before_arguments)
        return f"{before} arguments_{number} {self._literal(tool_format.after_arguments)}"

    def _reasoning(self) -> str:
        """The reasoning: required if the prompt has opened it, otherwise optional."""
        markers = self._syntax.reasoning
        if markers is None:
            return ""
        if markers.closing in self._ids:
            self._rule("ANYTHING", f"/{_ANY_TEXT}/")
            inside = f"ANYTHING {self._literal(markers.closing)}"
        else:
            self._rule("inside[lazy]", f"/{_ANY_TEXT}{_in_regex(markers.closing)}/")
            inside = "inside"
        space = r"/\s{0,8}/"
        if self._syntax.starts_in_reasoning:
            return f"{inside} {space}"
        is_control = markers.opening in self._ids
        opening = self._literal(markers.opening) if is_control else f"/{self._open_reasoning}/"
        return f"({opening} {inside} {space})?"

    @property
    def _open_reasoning(self) -> str:
        assert self._syntax.reasoning is not None
        return r"\s{0,8}" + _in_regex(self._syntax.reasoning.opening)

    @property
    def _format(self) -> ToolFormat:
        assert self._syntax.tool_format is not None
        return self._syntax.tool_format

    def _rule(self, name: str, content: str) -> None:
        self._rules.append(f"{name}: {content}")

    def _literal(self, text: str) -> str:
        """An expression for `text`, in which markers that are control tokens are referenced by id."""
        return " ".join(
            f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part)
            for part in _split(text, (marker for marker in self._format_markers if marker in self._ids))
        )

    @property
    def _format_markers(self) -> Iterable[str]:
        syntax = self._syntax
        reasoning = () if syntax.reasoning is None else (syntax.reasoning.opening, syntax.reasoning.closing)
        return (*reasoning, *(syntax.tool_format.markers if syntax.tool_format is not None else ()))


def _split(text: str, markers: Iterable[str]) -> list[str]:
    """Splits `text` before and after every marker."""
    pattern = "|".join(map(re.escape, filter(None, markers)))
    return [part for part in re.split(f"({pattern})", text) if part] if pattern else [text] * bool(text)


def _styled(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """The schema with weft's JSON style. `lenient` ignores keywords that llguidance does not know (uniqueItems)."""
    return json.dumps({**schema, "x-guidance": {**_JSON_STYLE, "lenient": lenient}})


def _in_regex(text: str) -> str:
    return _in_slashes(re.escape(text))


def _in_slashes(pattern: str) -> str:
    """Escapes a pattern for use between slashes."""
    return re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), pattern)
