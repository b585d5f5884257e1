"""Makes text of any origin safe to write to a terminal."""

from __future__ import annotations

import unicodedata

# str.isprintable() rejects these harmless characters: the joiners of emoji and of several scripts.
_JOINERS = "\u200c\u200d"


def printable(text: str) -> str:
    """Escapes control characters, which could move the cursor, rename the window or reverse the writing direction.
    Keeps newlines, tabs and all kinds of space."""
    return "".join(character if _is_harmless(character) else ascii(character)[1:-1] for character in text)


def one_line(error: Exception) -> str:
    """The message of an error on one line, or its type if it has no message."""
    return printable(" ".join(str(error).splitlines())) or type(error).__name__


def _is_harmless(character: str) -> bool:
    return (
        character.isprintable() or character in "\n\t" + _JOINERS or unicodedata.category(character) == "Zs"
    )
