"""Documents and their passages."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from weft.errors import WeftError


class DocumentError(WeftError):
    """A document cannot be read. `code` is that of the OpenAI API."""

    def __init__(self, message: str, code: str = "invalid_file") -> None:
        super().__init__(message)
        self.code = code


class Strength(IntEnum):
    """How well a passage may end at a place."""

    WORD = 0
    SENTENCE = 1
    LINE = 2
    PARAGRAPH = 3
    HEADING = 4


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """What begins at an offset of the text: a heading with its path, or a page."""

    start: int
    label: str


class Document(msgspec.Struct, frozen=True):
    """The text of a file."""

    text: str
    headings: list[Mark] = []
    """The label is the path of the heading: "Install > On Linux"."""
    pages: list[Mark] = []
    """The label is the number of the page. Empty: the file has no pages."""
    paragraphs: list[int] = []
    """Offsets at which a block begins that no empty line shows, such as a list item of HTML."""


class Passage(msgspec.Struct, frozen=True, array_like=True):
    """A span of the text of a document: `text == document.text[start:end]`."""

    start: int
    end: int
    text: str
    heading: str = ""
    page: int | None = None

    @property
    def searched_text(self) -> str:
        """The text that is embedded and whose words are found."""
        return searched_text(self.heading, self.text)


class ChunkSize(msgspec.Struct, frozen=True):
    """The length of passages in tokens of the embedding model."""

    max_tokens: int = 800
    overlap_tokens: int = 400

    def within(self, max_tokens: int) -> ChunkSize:
        """The same for a model that reads at most `max_tokens`. The overlap keeps its ratio."""
        if self.max_tokens <= max_tokens:
            return self
        return ChunkSize(max_tokens, self.overlap_tokens * max_tokens // self.max_tokens)


def searched_text(heading: str, text: str) -> str:
    return f"{heading}\n{text}" if heading else text
