"""Text that is safe to write to a terminal, whoever it comes from."""

from __future__ import annotations

import unicodedata

# Not "printable" to Python, and harmless: the joiners of emoji and of several scripts.
_JOINERS = "\u200c\u200d"


def printable(text: str) -> str:
    """Text of a model or a file with its control codes spelled out: they could move the cursor, rename the window, or
    turn the direction of writing. Lines, tabs and every kind of space stay."""
    return "".join(character if _is_harmless(character) else ascii(character)[1:-1] for character in text)


def one_line(error: Exception) -> str:
    """An error for a person: its message on one line, or its name where it has none."""
    return printable(" ".join(str(error).splitlines())) or type(error).__name__


def _is_harmless(character: str) -> bool:
    return (
        character.isprintable() or character in "\n\t" + _JOINERS or unicodedata.category(character) == "Zs"
    )
