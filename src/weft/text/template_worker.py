"""The process that `template_process` starts: renders chat templates within limits of memory and instructions.

Run as a script, it imports only the standard library and minijinja. A request is a line of JSON, and so is a response.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import minijinja

_FUEL = 2_000_000  # minijinja instructions; a chat of a thousand messages needs a few hundred thousand
_MEMORY_BYTES = 512 << 20  # address space; Python itself takes some 50 MB

# `{% generation %}` marks the text for training. It has no effect here, and minijinja does not know it.
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
_TAG = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)
_STRING = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_FORMAT = re.compile(rf"({_STRING})(\s*%(?!\}})\s*)?", re.DOTALL)
_OPERAND = re.compile(rf"{_STRING}|[\w.]*", re.DOTALL)
_BRACKET = re.compile(rf"{_STRING}|[()\[\]]", re.DOTALL)
_ATTRIBUTES = re.compile(r"(?:\.\w+)*")


class Templates:
    """The compiled templates of one model."""

    def __init__(self, sources: dict[str, str]) -> None:
        self._mark = ""
        self._time = datetime.min
        # The settings that Hugging Face templates expect.
        self._environment = minijinja.Environment(
            trim_blocks=True, lstrip_blocks=True, fuel=_FUEL, auto_escape_callback=lambda name: None
        )
        self._environment.add_filter("tojson", self._to_json)
        self._environment.add_test("iterable", _is_iterable)
        self._environment.add_function("raise_exception", _raise_exception)
        self._environment.add_function("strftime_now", lambda pattern: self._time.strftime(pattern))
        for name, source in sources.items():
            self._environment.add_template(name, _as_minijinja(source))

    def render(self, name: str, context: dict[str, Any], mark: str, time: str) -> str:
        self._mark, self._time = mark, datetime.fromisoformat(time)
        return self._environment.render_template(name, **context)

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: Sequence[str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """`tojson` as in Hugging Face. minijinja's own filter escapes `<>&'` for HTML."""
        between, after = separators or (", " if indent is None else ",", ": ")
        text = json.dumps(
            value, ensure_ascii=False, indent=indent, separators=(between, after), sort_keys=sort_keys
        )
        # The mark must not be escaped: the tokenizer removes it as a character.
        return re.sub(f"[^\\x00-\\x7f{self._mark}]", _escape, text) if ensure_ascii else text


def _escape(match: re.Match[str]) -> str:
    return json.dumps(match[0])[1:-1]


def _is_iterable(value: Any) -> bool:
    """The test `iterable` as in Jinja. minijinja's own accepts None."""
    return hasattr(value, "__iter__")


def _raise_exception(message: str) -> None:
    raise minijinja.TemplateError(message)


def _as_minijinja(source: str) -> str:
    """Rewrites the constructs that minijinja lacks: `generation` blocks and `'%s' % value`."""
    source = _GENERATION.sub(lambda tag: f"{tag[1]}{'endif' if tag[2] else 'if true'}{tag[3]}", source)
    return _TAG.sub(lambda tag: _without_percent(tag[0]), source)


def _without_percent(tag: str) -> str:
    """Rewrites `'...' % value` and `'...' % (a, b)` in a tag to `'...'|format(...)`."""
    position = 0
    while found := _FORMAT.search(tag, position):
        position = found.end()
        if found[2]:
            end = _end_of_operand(tag, position)
            operand = tag[position:end]
            if operand.startswith("("):
                operand = operand[1:-1]
            tag = f"{tag[: found.end(1)]}|format({operand}){tag[end:]}"
    return tag


def _end_of_operand(tag: str, start: int) -> int:
    """The end of an operand: a name, a literal or parentheses, and the calls, indices and attributes after it."""
    first = _OPERAND.match(tag, start)
    assert first is not None, "the pattern also matches an empty string"
    end = first.end()
    while tag[end : end + 1] in ("(", "["):
        end = _end_of_brackets(tag, end)
        attributes = _ATTRIBUTES.match(tag, end)
        end = attributes.end() if attributes else end
    return end


def _end_of_brackets(tag: str, start: int) -> int:
    depth = 0
    for part in _BRACKET.finditer(tag, start):
        depth += (part[0] in "([") - (part[0] in ")]")
        if depth == 0:
            return part.end()
    return len(tag)


def _handle(templates: Templates | None, line: bytes) -> tuple[Templates | None, dict[str, str]]:
    """Handles one request. The first one has the sources of the templates, later ones render."""
    try:
        request = json.loads(line)
        if templates is None:
            return Templates(request), {}
        return templates, {"text": templates.render(**request)}
    except minijinja.TemplateError as error:
        where = "" if error.line is None else f" (line {error.line})"
        return templates, {"error": (error.detail or error.message) + where}
    except Exception as error:
        # From functions of the template: tojson of a value that is not JSON, or a bad pattern of strftime_now.
        return templates, {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    # Running out of memory is an expected case and needs no core dump.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    templates: Templates | None = None
    for line in sys.stdin.buffer:
        templates, response = _handle(templates, line)
        sys.stdout.buffer.write(json.dumps(response).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
