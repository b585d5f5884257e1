"""A model's own chat template: from messages to the tokens of a prompt.

A template is code from a model file. It runs in minijinja, which has no way out of the template, with a limit on
its work. What users wrote must not steer the model: a control token such as `<|im_end|>` inside a message gets a
character that occurs nowhere else put into it before rendering, and the tokenizer takes that character out again
after it has looked for control tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import minijinja

from weft.errors import InvalidRequestError, ModelFileError
from weft.text.tokenizer import Tokenizer

_FUEL = 1_000_000  # instructions of the template; a long conversation needs some thousands
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode promises never to assign these

# Marks what training should learn from; without meaning here, and unknown to minijinja.
_GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")

Message = Mapping[str, Any]


class ChatTemplate:
    """One compiled template."""

    def __init__(self, tokenizer: Tokenizer, now: Callable[[], datetime] = datetime.now) -> None:
        vocabulary = tokenizer.vocabulary
        if vocabulary.chat_template is None:
            raise ModelFileError(
                "tokenizer.chat_template: the model file has no chat template; use it without chat"
            )
        self._tokenizer = tokenizer
        # Longest first, so that no control token is cut by a shorter one inside it.
        words = sorted((vocabulary.tokens[i] for i in vocabulary.control_ids), key=len, reverse=True)
        self._control = re.compile("|".join(re.escape(word) for word in words if word) or r"(?!)")
        self._names = {
            "bos_token": "" if vocabulary.bos_id is None else vocabulary.tokens[vocabulary.bos_id],
            "eos_token": "" if vocabulary.eos_id is None else vocabulary.tokens[vocabulary.eos_id],
        }
        # The settings every Hugging Face template is written for.
        self._environment = minijinja.Environment(
            trim_blocks=True, lstrip_blocks=True, fuel=_FUEL, auto_escape_callback=lambda name: None
        )
        self._environment.add_filter("tojson", _to_json)
        self._environment.add_function("raise_exception", _raise_exception)
        self._environment.add_function("strftime_now", lambda pattern: now().strftime(pattern))
        try:
            self._environment.add_template("chat", _GENERATION_TAG.sub("", vocabulary.chat_template))
        except minijinja.TemplateError as error:
            raise ModelFileError(f"tokenizer.chat_template: {error.message}") from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt as text, for people."""
        guard = self._unused_character(messages)
        return self._render(messages, guard, add_generation_prompt).replace(guard, "")

    def encode(
        self, messages: Sequence[Message], *, tools: Any = None, add_generation_prompt: bool = True
    ) -> list[int]:
        """The prompt as token ids; control tokens come from the template alone."""
        guard = self._unused_character(messages)
        text = self._render(messages, guard, add_generation_prompt)
        # A template that wants the beginning-of-sequence token writes it itself.
        return self._tokenizer.encode(text, allow_control=True, add_bos=False, ignore=guard)

    def _render(self, messages: Sequence[Message], guard: str, add_generation_prompt: bool) -> str:
        if not messages:
            raise InvalidRequestError("messages is empty; send at least one message", field="messages")
        try:
            return self._environment.render_template(
                "chat",
                messages=[self._guarded(message, guard) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **self._names,
            )
        except minijinja.TemplateError as error:
            raise InvalidRequestError(
                f"the model's chat template refused the messages: {error.message}", field="messages"
            ) from error

    def _guarded(self, value: Any, guard: str) -> Any:
        """`value` with the guard after the first character of every control token in any of its strings."""
        if isinstance(value, str):
            return self._control.sub(lambda match: match[0][0] + guard + match[0][1:], value)
        if isinstance(value, Mapping):
            return {self._guarded(key, guard): self._guarded(item, guard) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._guarded(item, guard) for item in value]
        return value

    def _unused_character(self, messages: Sequence[Message]) -> str:
        text = json.dumps(list(messages), ensure_ascii=False, default=str)
        for character in _NONCHARACTERS:
            if character not in text:
                return character
        raise InvalidRequestError(
            f"the messages use all {len(_NONCHARACTERS)} noncharacters of Unicode; send text without them",
            field="messages",
        )


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False
) -> str:
    """As Hugging Face does it; minijinja's own escapes `<>&'` for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise minijinja.TemplateError(message)
