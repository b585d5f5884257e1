"""What the commands share about writing to a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Text of a model without control codes: they could move the cursor, rename the window, or worse."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else "\ufffd" for character in text
    )
