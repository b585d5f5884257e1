"""Keeps what people wrote from steering the model: marks control tokens in their text, so that they stay text.

The mark is a noncharacter, put where a control token could come about. The tokenizer looks for control tokens in
the marked text, and takes the marks out before anything else looks at it, so that all the rest is one string.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any


class Shield:
    """Marks the control tokens in text from outside.

    `literals` is the source of a chat template. Strings that it mentions in quotes are left as they are: it
    compares roles and types with them.
    """

    def __init__(self, control_tokens: Collection[str], literals: str = "") -> None:
        self._tokens = frozenset(token for token in control_tokens if token)
        self._literals = literals
        self.pattern = any_of(self._tokens)
        self._longest = max(map(len, self._tokens), default=0)
        self._beginnings = {token[:end] for token in self._tokens for end in range(1, len(token))}
        self._endings = {token[start:] for token in self._tokens for start in range(1, len(token))}
        self._all = "\0".join(self._tokens)

    def mark_whole(self, text: str, mark: str) -> str:
        """`text` with the mark inside every whole control token."""
        return self.pattern.sub(lambda match: match[0][0] + mark + match[0][1:], text)

    def mark(self, value: Any, mark: str) -> Any:
        """`value` with all its strings marked, those included that a template could make a control token with.

        A template may write `'<|' + role + '|>'`, or one string after the other.
        """
        if isinstance(value, str):
            return self._mark_part(value, mark)
        if isinstance(value, Mapping):
            return {self.mark(key, mark): self.mark(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item, mark) for item in value]
        return value

    def _mark_part(self, text: str, mark: str) -> str:
        lengths = range(1, min(self._longest, len(text) + 1))
        begins = any(text[:length] in self._endings for length in lengths)
        ends = any(text[-length:] in self._beginnings for length in lengths)
        if 0 < len(text) < self._longest and text in self._all:
            begins = ends = not self._is_literal(text)
        marked = self.mark_whole(text, mark)
        return (mark if begins else "") + marked + (mark if ends else "")

    def _is_literal(self, text: str) -> bool:
        return f"'{text}'" in self._literals or f'"{text}"' in self._literals


def any_of(words: Collection[str]) -> re.Pattern[str]:
    """Matches the longest of `words` at a place; nothing for none."""
    escaped = [re.escape(word) for word in sorted(words, key=len, reverse=True)]
    return re.compile("|".join(escaped) or r"(?!)")
