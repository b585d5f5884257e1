"""Keeps what people wrote from steering the model: marks control tokens in their text, so that they stay text.

The mark is a noncharacter, put where a control token could come about. The tokenizer looks for control tokens in
the marked text, and takes the marks out before anything else looks at it, so that all the rest is one string.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any


class Shield:
    """Marks the control tokens in text from outside.

    `template` is the source of the chat template that will get the text, "" for none. What it compares with must stay
    as it is: a role that it mentions in quotes, a key that it looks up.
    """

    def __init__(self, control_tokens: Collection[str], template: str = "") -> None:
        tokens = {token for token in control_tokens if token}
        escaped = [re.escape(token) for token in sorted(tokens, key=len, reverse=True)]
        self.pattern = re.compile("|".join(escaped) or r"(?!)")
        """Matches the longest control token at a place."""
        self._template = template
        self._longest = max(map(len, tokens), default=0)
        self._first_characters = {token[0] for token in tokens}
        self._last_characters = {token[-1] for token in tokens}
        self._beginnings = {token[:end] for token in tokens for end in range(1, len(token))}
        self._endings = {token[start:] for token in tokens for start in range(1, len(token))}
        self._all = "\0".join(tokens)

    def mark_whole(self, text: str, mark: str) -> str:
        """`text` with the mark inside every whole control token."""
        return self.pattern.sub(lambda match: match[0][0] + mark + match[0][1:], text)

    def mark(self, value: Any, mark: str) -> Any:
        """`value` with all its strings marked, those included that could become a part of a control token.

        A template may write `'<|' + role + '|>'`, or one string right after another.
        """
        if isinstance(value, str):
            return self._mark_string(value, mark, self._is_compared)
        if isinstance(value, Mapping):
            return {
                self._mark_string(str(key), mark, self._is_looked_up): self.mark(item, mark)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.mark(item, mark) for item in value]
        return value

    def _mark_string(self, text: str, mark: str, is_known: Callable[[str], bool]) -> str:
        marked = self.mark_whole(text, mark)
        if marked == text and 0 < len(text) < self._longest and text in self._all:
            return text if text.isidentifier() and is_known(text) else mark + text + mark
        if self._begins_as_end(text):
            marked = mark + marked
        if self._ends_as_beginning(text):
            marked += mark
        return marked

    def _begins_as_end(self, text: str) -> bool:
        head = text[: self._longest]
        if not any(character in head for character in self._last_characters):
            return False
        return any(head[:length] in self._endings for length in range(1, len(head) + 1))

    def _ends_as_beginning(self, text: str) -> bool:
        tail = text[-self._longest :]
        if not any(character in tail for character in self._first_characters):
            return False
        return any(tail[start:] in self._beginnings for start in range(len(tail)))

    def _is_compared(self, text: str) -> bool:
        return f"'{text}'" in self._template or f'"{text}"' in self._template

    def _is_looked_up(self, key: str) -> bool:
        return self._is_compared(key) or f".{key}" in self._template
