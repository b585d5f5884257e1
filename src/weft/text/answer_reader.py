"""Parses the text of an answer into deltas of content, reasoning and tool calls, while it is generated."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from weft.text.answer_parts import Content, Delta, Reasoning
from weft.text.reasoning import ReasoningMarkers, ReasoningParser
from weft.text.tokenizer import Tokenizer
from weft.text.tool_formats import ToolFormat
from weft.text.tool_parser import ToolParser


@dataclass(frozen=True)
class AnswerSyntax:
    """The syntax of an answer: whether it may contain reasoning and tool calls, and how they are marked."""

    reasoning: ReasoningMarkers | None = None
    starts_in_reasoning: bool = False
    """Whether the prompt ends with the opening marker, so that the answer starts inside the reasoning."""
    tool_format: ToolFormat | None = None
    tool_names: Collection[str] = ()
    max_calls: int | None = None

    def visible_control_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Control tokens that must appear in the text: they mark reasoning and tool calls."""
        markers: set[str] = set(self.tool_format.markers) if self.tool_format is not None else set()
        if self.reasoning is not None:
            markers |= {self.reasoning.opening, self.reasoning.closing}
        return frozenset(token for token, text in tokenizer.control_tokens.items() if text in markers)


class AnswerReader:
    """Parses one answer while it is generated."""

    def __init__(self, syntax: AnswerSyntax) -> None:
        self._reasoning: ReasoningParser | None = None
        self._tools: ToolParser | None = None
        if syntax.reasoning is not None:
            self._reasoning = ReasoningParser(
                syntax.reasoning, starts_in_reasoning=syntax.starts_in_reasoning
            )
        if syntax.tool_format is not None:
            self._tools = ToolParser(syntax.tool_format, syntax.tool_names, max_calls=syntax.max_calls)

    @property
    def is_in_reasoning(self) -> bool:
        return self._reasoning is not None and self._reasoning.is_inside

    @property
    def is_over(self) -> bool:
        """Whether the maximum number of tool calls is complete. Then further text is not part of the answer."""
        return self._tools is not None and self._tools.is_over

    def add(self, text: str) -> list[Delta]:
        if self._reasoning is None:
            return self._after_reasoning(text)
        reasoning, rest = self._reasoning.add(text)
        deltas: list[Delta] = [Reasoning(reasoning)] if reasoning else []
        return deltas + self._after_reasoning(rest) if rest else deltas

    def finish(self) -> list[Delta]:
        """Ends the text and returns the deltas held back."""
        deltas: list[Delta] = []
        if self._reasoning is not None:
            reasoning, rest = self._reasoning.finish()
            deltas = [Reasoning(reasoning)] if reasoning else []
            deltas += self._after_reasoning(rest)
        return deltas if self._tools is None else deltas + self._tools.finish()

    def _after_reasoning(self, text: str) -> list[Delta]:
        if self._tools is not None:
            return self._tools.add(text)
        return [Content(text)] if text else []
