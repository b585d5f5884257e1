"""The types of what is read from a file: the document, its passages, and their size."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from weft.errors import WeftError


class DocumentError(WeftError):
    """A document cannot be read. `code` is an error code of the OpenAI API."""

    def __init__(self, message: str, code: str = "invalid_file") -> None:
        super().__init__(message)
        self.code = code


class Strength(IntEnum):
    """How good a boundary between two words is as the end of a passage. Higher is better."""

    WORD = 0
    SENTENCE = 1
    LINE = 2
    PARAGRAPH = 3
    HEADING = 4


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """A section or a page that begins at offset `start` of the text."""

    start: int
    label: str


class Document(msgspec.Struct, frozen=True):
    """The text of a file, and where its sections, pages and paragraphs begin."""

    text: str
    headings: list[Mark] = []
    """The sections. The label of each is the path of its heading: "Install > On Linux"."""
    pages: list[Mark] = []
    """The pages. The label of each is its number. The list is empty if the file has no pages."""
    paragraphs: list[int] = []
    """Offsets of paragraphs that do not follow an empty line, such as list items of HTML."""


class Passage(msgspec.Struct, frozen=True, array_like=True):
    """A span of the text of a document: `text == document.text[start:end]`."""

    start: int
    end: int
    text: str
    heading: str = ""
    page: int | None = None

    @property
    def searched_text(self) -> str:
        """The text for both kinds of search: its vector and its words are indexed."""
        return searched_text(self.heading, self.text)


class ChunkSize(msgspec.Struct, frozen=True):
    """The length of passages, and the overlap of two neighbours, in tokens of the embedding model."""

    max_tokens: int = 800
    overlap_tokens: int = 400

    def within(self, max_tokens: int) -> ChunkSize:
        """This size, reduced for a model that reads at most `max_tokens`. The overlap keeps its ratio to the length."""
        if self.max_tokens <= max_tokens:
            return self
        return ChunkSize(max_tokens, self.overlap_tokens * max_tokens // self.max_tokens)


def searched_text(heading: str, text: str) -> str:
    return f"{heading}\n{text}" if heading else text
