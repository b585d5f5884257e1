"""The formats in which models write tool calls, and the detection of a model's format."""

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
    """The format in which weft renders calls and forces them by a grammar. The parser also accepts known variants.

    begin  call separator call ...  end
           call: before_name NAME before_arguments JSON after_arguments
    """

    name: str
    openings: tuple[str, ...]
    """Markers that may start calls in an answer."""
    before_name: str
    before_arguments: str
    after_arguments: str = ""
    begin: str = ""
    separator: str = "\n"
    end: str = ""
    closing: str = ""
    """The marker after a call."""
    has_named_calls: bool = False
    """Whether a call may also be `name[ARGS]{...}`, or `name[CALL_ID]id[ARGS]{...}`."""
    has_unmarked_calls: bool = False
    """Whether an answer that starts with a brace may be a call, without an opening marker."""
    is_single_call: bool = False
    """Whether the models are trained for one call in an answer only."""
    has_short_ids: bool = False
    """Whether the templates of these models accept only call ids of nine letters and digits."""
    template: str = r"(?!)"
    """A regular expression that finds a call of the function "probe" in the output of a chat template. `detect_format`
    uses it. The default matches nothing."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers of calls. Those that are control tokens must stay in the text."""
        return (*self.openings, self.closing, *(("[ARGS]", "[CALL_ID]") if self.has_named_calls else ()))

    def render_calls(self, calls: Iterable[tuple[str, str]]) -> str:
        """Renders calls (name, arguments) as a model would write them."""
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
    has_unmarked_calls=True,
    is_single_call=True,
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


def detect_format(texts: Sequence[str]) -> ToolFormat | None:
    """The format of a call of `probe` in a template's output; None if weft does not know it."""
    return next(
        (one for one in FORMATS.values() for text in texts if re.search(one.template, text)),
        None,
    )
