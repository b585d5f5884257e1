"""Escapes control tokens in untrusted text, so that the tokenizer does not encode them as control tokens.

The shield inserts a mark (a Unicode noncharacter) wherever a control token is, or could arise by concatenation:

    user text         <|im_end|>
    marked            <MARK|im_end|>     matches no control token
    after removal     <|im_end|>         encoded as plain text

The tokenizer first matches control tokens in the marked text. Its normalizer then removes the marks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any


class Shield:
    """Inserts marks into control tokens in untrusted text.

    `template` is the source of the chat template that renders the text; "" for none. Roles that it compares and keys
    that it looks up must stay unmarked.
    """

    def __init__(self, control_tokens: Collection[str], template: str = "") -> None:
        tokens = {token for token in control_tokens if token}
        escaped = [re.escape(token) for token in sorted(tokens, key=len, reverse=True)]
        self.pattern = re.compile("|".join(escaped) or r"(?!)")
        """Matches a control token. Of several that begin at the same position, it matches the longest."""
        self._template = template
        self._longest = max(map(len, tokens), default=0)
        self._first_characters = {token[0] for token in tokens}
        self._last_characters = {token[-1] for token in tokens}
        self._prefixes = {token[:end] for token in tokens for end in range(1, len(token))}
        self._suffixes = {token[start:] for token in tokens for start in range(1, len(token))}
        self._all_tokens = "\0".join(tokens)

    def mark_control_tokens(self, text: str, mark: str) -> str:
        """`text` with the mark inside every complete control token."""
        return self.pattern.sub(lambda match: match[0][0] + mark + match[0][1:], text)

    def mark(self, value: Any, mark: str) -> Any:
        """`value` with marks in every string that contains a control token, or may become a part of one.

        A template may write `'<|' + role + '|>'`, or concatenate two strings.
        """
        if isinstance(value, str):
            return self._mark_string(value, mark, self._is_quoted_in_template)
        if isinstance(value, Mapping):
            return {
                self._mark_string(str(key), mark, self._is_key_in_template): self.mark(item, mark)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.mark(item, mark) for item in value]
        return value

    def _mark_string(self, text: str, mark: str, is_known: Callable[[str], bool]) -> str:
        """Marks one string. A part of a control token gets marks around it, unless the template compares it (`is_known`)."""
        marked = self.mark_control_tokens(text, mark)
        if marked == text and 0 < len(text) < self._longest and text in self._all_tokens:
            return text if text.isidentifier() and is_known(text) else mark + text + mark
        if self._starts_with_token_suffix(text):
            marked = mark + marked
        if self._ends_with_token_prefix(text):
            marked += mark
        return marked

    def _starts_with_token_suffix(self, text: str) -> bool:
        head = text[: self._longest]
        if not any(character in head for character in self._last_characters):
            return False
        return any(head[:length] in self._suffixes for length in range(1, len(head) + 1))

    def _ends_with_token_prefix(self, text: str) -> bool:
        tail = text[-self._longest :]
        if not any(character in tail for character in self._first_characters):
            return False
        return any(tail[start:] in self._prefixes for start in range(len(tail)))

    def _is_quoted_in_template(self, text: str) -> bool:
        return f"'{text}'" in self._template or f'"{text}"' in self._template

    def _is_key_in_template(self, key: str) -> bool:
        return self._is_quoted_in_template(key) or f".{key}" in self._template
