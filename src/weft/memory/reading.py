"""Reads a file into a `Document`. Its format follows from its first bytes, or else from the end of its name.

A name only chooses how the content is read. It is never opened as a path.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable

from weft.memory.documents import Document, DocumentError, Mark
from weft.memory.markup import read_html

MAX_CHARACTERS = 16 << 20
"""Maximum characters of the text of a document."""
_MAX_HEADING = 200
"""Maximum characters of a path of headings. The path is indexed with each passage of its section."""
_PDF = b"%PDF-"
_CONTAINERS = {
    b"PK\x03\x04": "a zip container (docx, xlsx, epub and the like)",
    b"PK\x05\x06": "an empty zip container",
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"7z\xbc\xaf": "7z",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"Rar!": "rar",
    b"\xd0\xcf\x11\xe0": "an old Office file (doc, xls, ppt)",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"GIF8": "a picture",
    b"\x7fELF": "a program",
}
"""Formats that are refused by their first bytes. Nothing is ever unpacked, so no archive can grow in memory."""
_ENCODINGS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_HTML_NAMES = (".html", ".htm", ".xhtml")
_MARKDOWN_NAMES = (".md", ".markdown", ".mdx", ".rst")
_CODE_NAMES = (
    *(
        ".py",
        ".pyi",
        ".c",
        ".h",
        ".cc",
        ".cpp",
        ".hpp",
        ".cu",
        ".cuh",
        ".java",
        ".kt",
        ".scala",
        ".cs",
        ".go",
        ".rs",
    ),
    *(
        ".js",
        ".jsx",
        ".ts",
        ".tsx",
        ".mjs",
        ".rb",
        ".php",
        ".swift",
        ".sh",
        ".bash",
        ".pl",
        ".lua",
        ".r",
        ".jl",
    ),
)
_HTML_START = re.compile(r"\s*(?:<\?xml[^>]{0,200}>\s*)?<(?:!doctype\s+html|html)\b", re.IGNORECASE)
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_ATX = re.compile(r" {0,3}(#{1,6})[ \t]+(.*?)[ \t]*#*[ \t]*$")
_UNDERLINE = re.compile(r"([=\-~^])\1{2,}[ \t]*$")
_LEVELS = {"=": 1, "-": 2, "~": 3, "^": 4}
_DEFINITION = re.compile(
    r"(?:@|(?:export |pub(?:\([a-z]*\))? |public |private |protected |static |async |abstract |final |default )*"
    r"(?:def|class|func|function|fn|impl|struct|enum|trait|interface|namespace|module|type|template|object)\b)"
)


def read_document(content: bytes, name: str) -> Document:
    """Raises DocumentError if weft cannot read a text from the content."""
    if not content.strip():
        raise DocumentError("the file is empty; attach one with text")
    if content[:1024].lstrip().startswith(_PDF):
        from weft.memory.pdf import read_pdf

        return checked(read_pdf(content, MAX_CHARACTERS))
    for start, what in _CONTAINERS.items():
        if content.startswith(start):
            message = (
                f"the file is {what}, which weft does not read; convert it to text, Markdown, HTML or PDF"
            )
            raise DocumentError(message, "unsupported_file")
    text = _decoded(content)
    return checked(_reader(name.lower(), text)(text))


def checked(document: Document) -> Document:
    """Raises DocumentError for a document without text, or with too much."""
    if len(document.text) > MAX_CHARACTERS:
        message = f"the text has {len(document.text)} characters; allowed: {MAX_CHARACTERS}; split the file"
        raise DocumentError(message)
    if not document.text.strip():
        raise DocumentError("the file has no text; a scanned PDF needs text recognition first")
    return document


def _reader(name: str, text: str) -> Callable[[str], Document]:
    if name.endswith(_HTML_NAMES) or _HTML_START.match(text[:1024]):
        return read_html
    if name.endswith(_MARKDOWN_NAMES):
        return read_markdown
    return read_code if name.endswith(_CODE_NAMES) else Document


def _decoded(content: bytes) -> str:
    encoding = next((name for mark, name in _ENCODINGS if content.startswith(mark)), "utf-8")
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        message = f"the file is not text in UTF-8 or UTF-16: byte {error.start} is wrong; convert it"
        raise DocumentError(message, "unsupported_file") from None
    if "\0" in text:
        message = f"the file is not text: it has a zero byte at character {text.index(chr(0))}"
        raise DocumentError(message, "unsupported_file")
    return text


def read_markdown(text: str) -> Document:
    """Markdown, and the headings of reStructuredText."""
    headings: list[Mark] = []
    path = HeadingPath()
    fence = ""
    start = before_start = 0
    before = ""
    for line in text.splitlines(keepends=True):
        bare = line.rstrip("\r\n")
        found = _FENCE.match(bare)
        if fence:
            if found and found[1].startswith(fence) and not bare[found.end() :].strip():
                fence = ""
        elif found:
            fence = found[1]
        elif atx := _ATX.match(bare):
            headings.append(Mark(start, path.enter(len(atx[1]), atx[2])))
        elif (
            (under := _UNDERLINE.fullmatch(bare)) and before.strip() and len(bare) >= len(before.strip()) // 2
        ):
            headings.append(Mark(before_start, path.enter(_LEVELS[under[1]], before)))
        before, before_start = bare, start
        start += len(line)
    return Document(text, headings)


def read_code(text: str) -> Document:
    """Definitions that begin at the left margin are headings."""
    headings: list[Mark] = []
    start, is_decorated = 0, False
    for line in text.splitlines(keepends=True):
        if line[0] not in " \t\r\n" and _DEFINITION.match(line):
            if is_decorated:  # the section begins at the decorator, and is named by the definition
                headings[-1] = Mark(headings[-1].start, short_heading(line))
            else:
                headings.append(Mark(start, short_heading(line)))
            is_decorated = line[0] == "@"
        elif line[0] not in " \t)]}":
            is_decorated = False
        start += len(line)
    return Document(text, headings)


class HeadingPath:
    """The path of headings above the current position in a document."""

    def __init__(self) -> None:
        self._path: list[tuple[int, str]] = []

    def enter(self, level: int, title: str) -> str:
        """Begins a section. Returns its path, which ends with its heading."""
        while self._path and self._path[-1][0] >= level:
            self._path.pop()
        self._path.append((level, short_heading(title)))
        return " > ".join(text for _, text in self._path if text)[-_MAX_HEADING:]


def short_heading(title: str) -> str:
    return " ".join(title[: 4 * _MAX_HEADING].split())[:_MAX_HEADING]
