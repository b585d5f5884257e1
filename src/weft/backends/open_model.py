"""What opening a model takes on every backend: its files, its text, the context it may have, grammars over its tokens."""

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


def check_context(wanted: int, own: int) -> None:
    if not isinstance(wanted, int) or isinstance(wanted, bool) or not 2 <= wanted <= own:
        raise InvalidRequestError(
            f"max_context is {wanted!r}; allowed: a whole number from 2 to {own}, the model's own context",
            field="max_context",
        )


def grammar_compiler(checkpoint: Checkpoint, vocabulary_size: int) -> GrammarCompiler:
    """The tokenizer is opened when the first grammar comes: whoever sends none does not wait for it."""

    def open_tokenizer() -> Tokenizer:
        from weft.text.model_text import open_tokenizer

        return open_tokenizer(checkpoint)

    return GrammarCompiler(open_tokenizer, checkpoint.end_ids, vocabulary_size)


def open_with_text(model: str, build: Callable[[Checkpoint], Backend]) -> OpenedModel:
    """The backend that `build` makes of the model, with the model's tokenizer."""
    from weft.loading.pull import pull
    from weft.text.answer_text import AnswerText
    from weft.text.model_text import open_tokenizer

    checkpoint = open_checkpoint(pull(model))
    if not checkpoint.has_text:
        return OpenedModel(build(checkpoint), None, None)
    tokenizer = open_tokenizer(checkpoint)
    return OpenedModel(build(checkpoint), tokenizer, partial(AnswerText, tokenizer))
