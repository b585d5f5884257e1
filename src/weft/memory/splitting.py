"""Splits a document into passages of limited length in tokens, at the strongest boundaries.

words   |w|w|w|w|w|w|w|w|w|w|w|w|w|w|      each with its tokens, and the strength of the boundary before it
passage |<--------- max ------->|          ends at the strongest boundary of its second half
next              |<-overlap->|            begins at the strongest boundary of the overlap
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

from weft.memory.documents import ChunkSize, Document, DocumentError, Mark, Passage, Strength

MAX_PASSAGES = 50_000
"""Limit for the passages of one document."""
_WORD = re.compile(r"\S{1,48}")
"""A longer run of characters without spaces counts as several words, so that any text can be split."""
_SENTENCE_ENDS = (".", "!", "?", ":", ";", "。", "！", "？", '."', ".)")
_HEADING_PART = 4
"""A passage repeats its heading if the heading has at most 1/4 of the tokens of the passage."""


def words_of(document: Document) -> set[str]:
    """All words of the document and of its headings. `split` needs the number of tokens of each."""
    found = {match.group() for match in _WORD.finditer(document.text)}
    for mark in document.headings:
        found.update(_WORD.findall(mark.label))
    return found


def split(document: Document, size: ChunkSize, tokens: Mapping[str, int]) -> list[Passage]:
    """Splits a document into passages, in order. `tokens` has the number of tokens of each word. A word that is not in
    it counts as one token per byte."""
    starts, ends, counts = array("q"), array("q"), array("q")
    for word in _WORD.finditer(document.text):
        starts.append(word.start())
        ends.append(word.end())
        text = word.group()
        counts.append(tokens[text] if text in tokens else len(text.encode()))
    sums = [0, *accumulate(counts)]
    """sums[i] is the number of tokens of all words before word i."""
    strengths = _strengths(document, starts, ends)
    passages: list[Passage] = []
    begin = end = 0
    while end < len(starts):
        heading, room = _heading_and_room(document, starts[begin], size.max_tokens, tokens)
        least = end + 1
        end = _end(begin, least, room, sums, strengths)
        if end < least:
            # With the overlap, no new word fits. So the passage begins without the overlap.
            begin = end = least - 1
            continue
        page = _label_at(document.pages, starts[begin])
        start, stop = starts[begin], ends[end - 1]
        passages.append(Passage(start, stop, document.text[start:stop], heading, int(page) if page else None))
        if len(passages) > MAX_PASSAGES:
            message = (
                f"the document has more than {MAX_PASSAGES} passages; allowed: {MAX_PASSAGES}; split the file"
            )
            raise DocumentError(message)
        begin = _next_begin(begin, end, size.overlap_tokens, sums, strengths)
    return passages


def refit(size: ChunkSize, most: int, limit: int) -> ChunkSize:
    """A smaller size, for a document with a passage of `most` tokens when the model reads at most `limit`. A passage
    can be too long, because a text may have more tokens than its words have separately."""
    parts = (size.max_tokens, size.overlap_tokens)
    return ChunkSize(*(part * limit // (most + 1) for part in parts))


def _heading_and_room(
    document: Document, offset: int, max_tokens: int, tokens: Mapping[str, int]
) -> tuple[str, int]:
    """The heading of a passage that begins at `offset`, and the tokens that are left for its text. The heading is "" if
    there is none, or if it is too long."""
    heading = _label_at(document.headings, offset)
    cost = sum(tokens.get(word, len(word.encode())) for word in _WORD.findall(heading))
    return (heading, max_tokens - cost) if cost <= max_tokens // _HEADING_PART else ("", max_tokens)


def _end(begin: int, least: int, room: int, sums: Sequence[int], strengths: Sequence[int]) -> int:
    """The end of a passage that begins with word `begin`: the index after its last word. It ends at the strongest
    boundary in the second half of its `room` tokens, at `least` or later. If the words up to `least` do not fit, the
    result is smaller than `least`."""
    last = max(begin + 1, bisect_right(sums, sums[begin] + room) - 1)
    if last >= len(strengths) or last < least:
        return last
    first = min(max(least, bisect_right(sums, sums[begin] + room // 2)), last)
    return max(range(first, last + 1), key=lambda place: (strengths[place], place))


def _next_begin(begin: int, end: int, overlap: int, sums: Sequence[int], strengths: Sequence[int]) -> int:
    """The index of the first word of the next passage: the strongest boundary of the overlap."""
    if end >= len(strengths) or strengths[end] == Strength.HEADING:
        return end  # no overlap across sections
    first = min(max(begin + 1, bisect_left(sums, sums[end] - overlap)), end)
    return max(range(first, end), key=lambda place: (strengths[place], -place), default=end)


def _strengths(document: Document, starts: Sequence[int], ends: Sequence[int]) -> list[int]:
    """The strength of the boundary before each word."""
    text = document.text
    headings = {mark.start for mark in document.headings}
    blocks = {*document.paragraphs, *(mark.start for mark in document.pages)}
    found: list[int] = []
    before = 0
    for start, end in zip(starts, ends, strict=True):
        gap = text[before:start]
        lines = gap.count("\n")
        # The mark of a heading is at its first word, or up to three characters before: Markdown allows three spaces.
        if headings and any(place in headings for place in range(start - min(3, len(gap)), start + 1)):
            found.append(Strength.HEADING)
        elif lines > 1 or start in blocks:
            found.append(Strength.PARAGRAPH)
        elif lines:
            found.append(Strength.LINE)
        elif gap and text[max(0, before - 2) : before].endswith(_SENTENCE_ENDS):
            found.append(Strength.SENTENCE)
        else:
            found.append(Strength.WORD)
        before = end
    return found


def _label_at(marks: Sequence[Mark], offset: int) -> str:
    """The label of the last mark at `offset` or before; "" if there is none."""
    index = bisect_right(marks, offset, key=lambda mark: mark.start) - 1
    return marks[index].label if index >= 0 else ""
