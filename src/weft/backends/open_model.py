"""Opens a model for any backend: its files, its tokenizer, the check of `max_context`, its grammar compiler."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from weft.backends.base import Backend, OpenedModel
from weft.errors import InvalidRequestError
from weft.loading.checkpoint import Checkpoint, open_checkpoint
from weft.text.grammar import GrammarCompiler

if TYPE_CHECKING:
    from weft.text.tokenizer import Tokenizer


def check_context(max_context: int, model_context: int) -> None:
    is_integer = isinstance(max_context, int) and not isinstance(max_context, bool)
    if not is_integer or not 2 <= max_context <= model_context:
        raise InvalidRequestError(
            f"max_context is {max_context!r}; allowed: a whole number from 2 to {model_context}, the model's own context",
            field="max_context",
        )


def grammar_compiler(checkpoint: Checkpoint, vocabulary_size: int) -> GrammarCompiler:
    """Returns a compiler that opens the tokenizer for its first grammar, so that the start does not wait for it."""

    def open_tokenizer() -> Tokenizer:
        from weft.text.model_text import open_tokenizer

        return open_tokenizer(checkpoint)

    return GrammarCompiler(open_tokenizer, checkpoint.end_ids, vocabulary_size)


def open_with_text(model: str, build: Callable[[Checkpoint], Backend]) -> OpenedModel:
    """Opens `model` with the backend that `build` makes, and with its tokenizer if it has one."""
    from weft.loading.pull import pull
    from weft.text.answer_text import AnswerText
    from weft.text.model_text import open_tokenizer

    checkpoint = open_checkpoint(pull(model))
    if not checkpoint.has_text:
        return OpenedModel(build(checkpoint), None, None)
    tokenizer = open_tokenizer(checkpoint)
    return OpenedModel(build(checkpoint), tokenizer, partial(AnswerText, tokenizer))
