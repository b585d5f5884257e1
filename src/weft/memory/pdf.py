"""Extracts the text of a PDF, page by page, with pypdf (the extra `memory`)."""

from __future__ import annotations

import io
import logging

from weft.memory.documents import Document, DocumentError, Mark

MAX_PAGES = 5000


def read_pdf(content: bytes, max_characters: int) -> Document:
    try:
        import pypdf
    except ImportError:
        message = "reading a PDF needs the package pypdf; install weft[memory] on the server"
        raise DocumentError(message, "unsupported_file") from None
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # pypdf logs a line for each oddity of a file
    try:
        reader = pypdf.PdfReader(io.BytesIO(content))
        if reader.is_encrypted and not reader.decrypt(""):
            raise DocumentError("the PDF is encrypted; attach one without a password")
        num_pages = len(reader.pages)
        if num_pages > MAX_PAGES:
            raise DocumentError(f"the PDF has {num_pages} pages; allowed: {MAX_PAGES}; split the file")
        return _joined(reader, max_characters)
    except (DocumentError, MemoryError):
        raise
    except RecursionError:
        raise DocumentError("the PDF is nested too deeply; save it again with another program") from None
    except Exception as error:  # pypdf raises many kinds for broken files
        raise DocumentError(f"the PDF is broken: {type(error).__name__}: {error!s:.200}") from None


def _joined(reader: object, max_characters: int) -> Document:
    """The text of all pages, with the offset at which each begins."""
    parts: list[str] = []
    pages: list[Mark] = []
    length = 0
    for number, page in enumerate(reader.pages, 1):  # type: ignore[attr-defined]
        text = page.extract_text().replace("\0", "").strip()
        # Unpaired surrogates come from broken character maps. They cannot be stored.
        text = text.encode("utf-8", "replace").decode()
        if not text:
            continue
        if parts:
            parts.append("\n\n")
            length += 2
        pages.append(Mark(length, str(number)))
        parts.append(text)
        length += len(text)
        if length > max_characters:
            message = f"the first {number} pages have {length} characters; allowed: {max_characters}; split the file"
            raise DocumentError(message)
    return Document("".join(parts), pages=pages)
