"""How the answers to one request are read: from a model's text to content, thoughts and calls."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from weft.text.answer_parts import Content, Delta, Thought
from weft.text.reasoning import ReasoningMarkers, ReasoningParser
from weft.text.tokenizer import Tokenizer
from weft.text.tool_formats import ToolFormat
from weft.text.tool_parser import ToolParser


@dataclass(frozen=True)
class AnswerForm:
    """What answers may hold besides content: thoughts, calls, or both."""

    reasoning: ReasoningMarkers | None = None
    begins_inside: bool = False
    """The prompt ends with the marker that opens the thoughts."""
    tools: ToolFormat | None = None
    names: Collection[str] = ()
    max_calls: int | None = None

    def shown_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Control tokens that have to be in the text, since they mark the parts of an answer."""
        markers: set[str] = set(self.tools.markers) if self.tools is not None else set()
        if self.reasoning is not None:
            markers |= {self.reasoning.opening, self.reasoning.closing}
        return frozenset(token for token, text in tokenizer.control_tokens.items() if text in markers)


class AnswerReader:
    """One answer while it comes."""

    def __init__(self, form: AnswerForm) -> None:
        self._reasoning: ReasoningParser | None = None
        self._tools: ToolParser | None = None
        if form.reasoning is not None:
            self._reasoning = ReasoningParser(form.reasoning, begins_inside=form.begins_inside)
        if form.tools is not None:
            self._tools = ToolParser(form.tools, form.names, max_calls=form.max_calls)

    @property
    def is_thinking(self) -> bool:
        return self._reasoning is not None and self._reasoning.is_inside

    @property
    def is_over(self) -> bool:
        """As many calls as are allowed are complete: nothing that follows is part of the answer."""
        return self._tools is not None and self._tools.is_over

    def add(self, text: str) -> list[Delta]:
        if self._reasoning is None:
            return self._answer(text)
        thought, answer = self._reasoning.add(text)
        deltas: list[Delta] = [Thought(thought)] if thought else []
        return deltas + self._answer(answer) if answer else deltas

    def finish(self) -> list[Delta]:
        """What was held back, once no more text follows."""
        deltas: list[Delta] = []
        if self._reasoning is not None:
            thought, answer = self._reasoning.finish()
            deltas = [Thought(thought)] if thought else []
            deltas += self._answer(answer)
        return deltas if self._tools is None else deltas + self._tools.finish()

    def _answer(self, text: str) -> list[Delta]:
        if self._tools is not None:
            return self._tools.add(text)
        return [Content(text)] if text else []
