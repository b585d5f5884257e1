"""Grammars for answers with calls: the calls that must be, or the form of those that may be, in the model's own format.

In the Lark of llguidance. A marker that is a control token of the model is named by its id, since text never becomes
one; all others are strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.request import Grammar
from weft.text.answer_reader import AnswerForm
from weft.text.tokenizer import Tokenizer
from weft.text.tool_formats import ToolFormat

_MOST_CALLS = 16
"""A model that may go on calling does not always find an end."""

# As templates write JSON. A model that may put white space anywhere may put nothing else.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_TEXT = "(?s:.*)"
_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class Tool:
    name: str
    parameters: Mapping[str, Any]
    """A JSON schema."""
    is_strict: bool = False


def forced_calls(
    tools: Sequence[Tool], form: AnswerForm, tokenizer: Tokenizer, *, is_single: bool = False
) -> Grammar:
    """At least one call of one of the tools, behind thoughts where the model has some, and nothing else."""
    writer = _Writer(form, tokenizer, is_single)
    return writer.grammar(writer.calls(tools))


def possible_calls(
    tools: Sequence[Tool],
    form: AnswerForm,
    tokenizer: Tokenizer,
    answer: Grammar | None,
    *,
    is_single: bool = False,
) -> Grammar | None:
    """Calls, in which the arguments of strict tools follow their schemas, or an answer, which `answer` describes.

    None where there is nothing to hold an answer to.
    """
    if answer is None and not any(tool.is_strict for tool in tools):
        return None
    writer = _Writer(form, tokenizer, is_single)
    checked = [tool if tool.is_strict else Tool(tool.name, _ANY_OBJECT) for tool in tools]
    if answer is not None:
        return writer.grammar(f"{writer.calls(checked)} | {writer.answer(answer)}")
    return writer.grammar(writer.text_and_calls(checked))


def behind_thoughts(answer: Grammar, form: AnswerForm, tokenizer: Tokenizer) -> Grammar:
    """A grammar for a model that thinks before it answers: it is for the answer alone."""
    if form.reasoning is None:
        return answer
    writer = _Writer(form, tokenizer)
    return writer.grammar(writer.answer(answer))


class _Writer:
    """Collects the rules of one grammar. Methods return what stands for a part in other rules."""

    def __init__(self, form: AnswerForm, tokenizer: Tokenizer, is_single: bool = False) -> None:
        self._form = form
        self._is_single = is_single or (form.tools is not None and form.tools.is_single)
        self._ids = {text: token for token, text in tokenizer.control_tokens.items()}
        self._rules: list[str] = []

    def grammar(self, body: str) -> Grammar:
        rules = [f"start: {self._thoughts()} ({body})", *self._rules]
        return Grammar("lark", "\n".join(rules) + "\n")

    def calls(self, tools: Sequence[Tool]) -> str:
        tool_format = self._format
        self._rule("call", " | ".join(self._call(tool_format.before_name, tool) for tool in tools))
        most = 1 if self._is_single else self._form.max_calls or _MOST_CALLS
        more = f" ({self._literal(tool_format.separator)} call){{0,{most - 1}}}" if most > 1 else ""
        return f"{self._literal(tool_format.begin)} call{more} {self._literal(tool_format.end)}"

    def text_and_calls(self, tools: Sequence[Tool]) -> str:
        """Text in which an opening is always followed by calls."""
        tool_format = self._format
        thoughts = "" if self._form.reasoning is None else f" & ~/{self._open_thoughts}{_ANY_TEXT}/"
        if tool_format.is_bare:
            # There is no opening: what does not begin as a call is none.
            self._rule("TEXT", rf"/[^{{\[\s]{_ANY_TEXT}/{thoughts}")
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
        self._rule("TEXT", f"/(?s:.+)/ & ~/{_ANY_TEXT}{marker}{_ANY_TEXT}/{thoughts}")
        # Text and the opening behind it are one terminal: the longest match would run past an opening of its own.
        self._rule("BEGINNING", f"/{_ANY_TEXT}{marker}/{thoughts}")
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
        # Only a strict tool promises that all of its schema is kept; of others what can be.
        self._rule(f"arguments_{number}", f"%json {_styled(tool.parameters, lenient=not tool.is_strict)}")
        before = self._literal(before_name + tool.name + tool_format.before_arguments)
        return f"{before} arguments_{number} {self._literal(tool_format.after_arguments)}"

    def _thoughts(self) -> str:
        """Thoughts that must end where the prompt began them, and may be there where the model would."""
        markers = self._form.reasoning
        if markers is None:
            return ""
        if markers.closing in self._ids:
            self._rule("ANYTHING", f"/{_ANY_TEXT}/")
            inside = f"ANYTHING {self._literal(markers.closing)}"
        else:
            self._rule("inside[lazy]", f"/{_ANY_TEXT}{_in_regex(markers.closing)}/")
            inside = "inside"
        space = r"/\s{0,8}/"
        if self._form.begins_inside:
            return f"{inside} {space}"
        is_control = markers.opening in self._ids
        opening = self._literal(markers.opening) if is_control else f"/{self._open_thoughts}/"
        return f"({opening} {inside} {space})?"

    @property
    def _open_thoughts(self) -> str:
        assert self._form.reasoning is not None
        return r"\s{0,8}" + _in_regex(self._form.reasoning.opening)

    @property
    def _format(self) -> ToolFormat:
        assert self._form.tools is not None
        return self._form.tools

    def _rule(self, name: str, content: str) -> None:
        self._rules.append(f"{name}: {content}")

    def _literal(self, text: str) -> str:
        """Text with the markers in it that are control tokens."""
        return " ".join(
            f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part)
            for part in _split(text, (marker for marker in self._format_markers if marker in self._ids))
        )

    @property
    def _format_markers(self) -> Iterable[str]:
        form = self._form
        thoughts = () if form.reasoning is None else (form.reasoning.opening, form.reasoning.closing)
        return (*thoughts, *(form.tools.markers if form.tools is not None else ()))


def _split(text: str, markers: Iterable[str]) -> list[str]:
    """Text cut before and behind every marker."""
    pattern = "|".join(map(re.escape, filter(None, markers)))
    return [part for part in re.split(f"({pattern})", text) if part] if pattern else [text] * bool(text)


def _styled(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """`lenient` leaves keywords out that llguidance does not know, such as uniqueItems."""
    return json.dumps({**schema, "x-guidance": {**_JSON_STYLE, "lenient": lenient}})


def _in_regex(text: str) -> str:
    return _in_slashes(re.escape(text))


def _in_slashes(pattern: str) -> str:
    """A pattern as it may stand between slashes."""
    return re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), pattern)
