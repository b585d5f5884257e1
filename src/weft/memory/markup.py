"""Extracts the text of HTML with the parser of the standard library, which keeps no tree and does not recurse."""

from __future__ import annotations

from html.parser import HTMLParser

from weft.memory.documents import Document, Mark

_HIDDEN = frozenset(("script", "style", "template", "noscript", "svg", "iframe", "object"))
_VOID = frozenset(
    ("br", "hr", "img", "input", "link", "meta", "area", "base", "col", "embed", "source", "wbr")
)
_BLOCKS = frozenset(
    (
        *(
            "address",
            "article",
            "aside",
            "blockquote",
            "body",
            "dd",
            "details",
            "div",
            "dl",
            "dt",
            "figure",
            "footer",
        ),
        *(
            "form",
            "header",
            "hr",
            "li",
            "main",
            "nav",
            "ol",
            "p",
            "pre",
            "section",
            "summary",
            "table",
            "tr",
            "ul",
        ),
        *("h1", "h2", "h3", "h4", "h5", "h6", "caption", "figcaption", "fieldset", "option", "title"),
    )
)
_CELLS = frozenset(("td", "th"))


def read_html(source: str) -> Document:
    """The text with one paragraph for each block element, without scripts and styles. Other text in the head counts as
    text of the body, as in a browser: the tags of head and body are optional."""
    parser = _Text()
    parser.feed(source)
    parser.close()
    return parser.document()


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._parts: list[str] = []
        self._length = 0
        self._headings: list[tuple[int, int, int]] = []
        """The start of each heading, its end, and its level."""
        self._heading_level = 0
        """The level of a heading that has begun, but has no text yet. 0: there is no such heading."""
        self._is_in_heading = False
        self._paragraphs: list[int] = []
        self._hidden: dict[str, int] = {}
        """Tag -> number of open elements with this tag. Their text is left out."""
        self._num_pre = 0
        self._wants_block = self._wants_space = False
        """Whether an empty line or a space goes before the next text."""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in _HIDDEN:
            self._hidden[tag] = self._hidden.get(tag, 0) + 1
            return
        if tag == "br":
            self._write("\n")
        elif tag in _BLOCKS:
            self._wants_block = True
        elif tag in _CELLS:
            self._wants_space = True
        if tag == "pre":
            self._num_pre += 1
        if len(tag) == 2 and tag[0] == "h" and tag[1] in "123456":
            self._close_heading()
            self._heading_level = int(tag[1])

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        if tag not in _HIDDEN:
            self.handle_starttag(tag, attrs)
            if tag not in _VOID:
                self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in _HIDDEN:
            if self._hidden.get(tag, 0) > 1:
                self._hidden[tag] -= 1
            else:
                self._hidden.pop(tag, None)
        if tag in _BLOCKS:
            self._wants_block = True
        if tag == "pre":
            self._num_pre = max(0, self._num_pre - 1)
        if len(tag) == 2 and tag[0] == "h" and tag[1] in "123456":
            self._close_heading()

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        if self._num_pre:
            if data.strip() or self._parts:
                self._write(data)
            return
        words = data.split()
        if not words:
            self._wants_space = self._wants_space or bool(data)
            return
        if data[0].isspace():
            self._wants_space = True
        self._write(" ".join(words))
        self._wants_space = data[-1].isspace()

    def parse_marked_section(self, i: int, report: bool = True) -> int:
        """Reads `<![...]>` as a comment, as browsers do. The parser of the library raises AssertionError for some of them."""
        return self.parse_bogus_comment(i)

    def document(self) -> Document:
        from weft.memory.reading import HeadingPath

        self._close_heading()
        text = "".join(self._parts)
        path = HeadingPath()
        headings = [Mark(start, path.enter(level, text[start:end])) for start, end, level in self._headings]
        return Document(text, headings, paragraphs=self._paragraphs)

    def _write(self, text: str) -> None:
        """Adds text, after the space or empty line that goes before it."""
        if self._parts and self._wants_block:
            self._add("\n\n")
        elif self._parts and self._wants_space:
            self._add(" ")
        if self._wants_block or not self._parts:
            self._paragraphs.append(self._length)
        self._wants_block = self._wants_space = False
        if self._heading_level:
            self._headings.append((self._length, self._length, self._heading_level))
            self._heading_level, self._is_in_heading = 0, True
        self._add(text)

    def _add(self, text: str) -> None:
        self._parts.append(text)
        self._length += len(text)

    def _close_heading(self) -> None:
        if self._is_in_heading:
            start, _, level = self._headings[-1]
            self._headings[-1] = start, self._length, level
        self._heading_level, self._is_in_heading = 0, False
