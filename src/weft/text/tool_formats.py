"""The ways in which models write the calls of tools, and how a model's own is found."""

from __future__ import annotations

import re
import secrets
import string
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SHORT_ID = re.compile("[a-zA-Z0-9]{9}")
_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolFormat:
    """One format: `begin`, then for each call `before_name` name `before_arguments` JSON `after_arguments`, with
    `separator` between them, then `end`.

    That is how weft writes calls and what it forces. The parser takes more: what models are known to write.
    """

    name: str
    openings: tuple[str, ...]
    """Any of these in an answer may begin calls."""
    before_name: str
    before_arguments: str
    after_arguments: str = ""
    begin: str = ""
    separator: str = "\n"
    end: str = ""
    closing: str = ""
    """The marker behind a call."""
    has_named_calls: bool = False
    """A call may also be `name[ARGS]{...}`, or `name[CALL_ID]id[ARGS]{...}`."""
    is_bare: bool = False
    """An answer that begins with a brace may be a call, without any opening."""
    is_single: bool = False
    """The model was made for one call in an answer."""
    has_short_ids: bool = False
    """The templates of its models refuse ids other than nine letters and digits."""
    template: str = r"(?!)"
    """Matches what a template makes of a call of `probe`."""

    @property
    def markers(self) -> tuple[str, ...]:
        """What may be a control token, and has to be seen all the same."""
        return (*self.openings, self.closing, *(("[ARGS]", "[CALL_ID]") if self.has_named_calls else ()))

    def written(self, calls: Iterable[tuple[str, str]]) -> str:
        """Names and arguments as a model would write them."""
        each = (
            f"{self.before_name}{name}{self.before_arguments}{arguments}{self.after_arguments}"
            for name, arguments in calls
        )
        return self.begin + self.separator.join(each) + self.end

    def new_id(self) -> str:
        if self.has_short_ids:
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return f"call_{uuid.uuid4().hex[:24]}"


HERMES = ToolFormat(
    "hermes",
    openings=("<tool_call>",),
    before_name='<tool_call>\n{"name": "',
    before_arguments='", "arguments": ',
    after_arguments="}\n</tool_call>",
    closing="</tool_call>",
    template=r'<tool_call>\s*\{\s*"name":\s*"probe",\s*"arguments":\s*\{',
)
LLAMA3 = ToolFormat(
    "llama3",
    openings=("<|python_tag|>",),
    before_name='{"name": "',
    before_arguments='", "parameters": ',
    after_arguments="}",
    separator="; ",
    is_bare=True,
    is_single=True,
    template=r'(?:<\|python_tag\|>|[\n>])\s*\{\s*"name":\s*"probe",\s*"parameters":\s*\{',
)
MISTRAL = ToolFormat(
    "mistral",
    openings=("[TOOL_CALLS]",),
    before_name='{"name": "',
    before_arguments='", "arguments": ',
    after_arguments="}",
    begin="[TOOL_CALLS][",
    separator=", ",
    end="]",
    has_named_calls=True,
    has_short_ids=True,
    template=r'\[TOOL_CALLS\]\s*\[\s*\{\s*"name":\s*"probe"',
)
MISTRAL_ARGS = ToolFormat(
    "mistral_args",
    openings=("[TOOL_CALLS]",),
    before_name="[TOOL_CALLS]",
    before_arguments="[ARGS]",
    separator="",
    has_named_calls=True,
    has_short_ids=True,
    template=r"\[TOOL_CALLS\]\s*probe(?:\[CALL_ID\]\w*)?\[ARGS\]\s*\{",
)
FORMATS = {one.name: one for one in (HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS)}


def format_in(texts: Sequence[str]) -> ToolFormat | None:
    """The format of a call of `probe` in what a template rendered; None for one that weft does not know."""
    return next(
        (one for one in FORMATS.values() for text in texts if re.search(one.template, text)),
        None,
    )
