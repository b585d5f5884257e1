"""Puts found passages into a prompt, and finds citations of them in the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from weft.memory.documents import searched_text


class Source(msgspec.Struct, frozen=True):
    """A passage that was found, with its file."""

    file_id: str
    name: str
    score: float
    text: str
    heading: str = ""
    page: int | None = None
    start: int = 0
    end: int = 0
    attributes: dict[str, str | float | bool] = {}

    @property
    def searched_text(self) -> str:
        return searched_text(self.heading, self.text)

    def with_score(self, score: float) -> Source:
        return msgspec.structs.replace(self, score=score)

    @property
    def place(self) -> str:
        """The position of the passage in words: "guide.md, Install > On Linux"."""
        page = None if self.page is None else f"page {self.page}"
        return ", ".join(part for part in (self.name, self.heading, page) if part)

    @property
    def span(self) -> dict[str, Any]:
        """The position of the passage, as fields of an answer."""
        return {"start": self.start, "end": self.end, "heading": self.heading, "page": self.page}


class Citation(NamedTuple):
    source: Source
    offset: int
    """Characters of the answer before the citation."""


_MARK = re.compile(r"\[(\d{1,3}(?:\s*,\s*\d{1,3}){0,9})\]")
_HEAD = "Use these passages to answer. After a sentence, write the number of the passage that it comes from, such as [1]."


def question_with_passages(question: str, sources: Sequence[Source]) -> str:
    """A message with the passages, then `question`. The question is last, because small models attend best to the
    end of a prompt."""
    if not sources:
        return question
    passages = "\n\n".join(f"[{number}] {one.place}:\n{one.text}" for number, one in enumerate(sources, 1))
    return f"{_HEAD}\n\n{passages}\n\nQuestion: {question}"


def citations(answer: str, sources: Sequence[Source]) -> list[Citation]:
    """The passages that an answer names by their numbers. If it names none, the best passage is cited at its end."""
    found = [
        Citation(sources[int(number) - 1], match.start())
        for match in _MARK.finditer(answer)
        for number in re.split(r"\s*,\s*", match[1])
        if 1 <= int(number) <= len(sources)
    ]
    if not found and sources and answer:
        found = [Citation(sources[0], len(answer))]
    return found
