"""What opening a model takes on every backend: the context it may have, and grammars over its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.errors import InvalidRequestError
from weft.loading.checkpoint import Checkpoint
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
