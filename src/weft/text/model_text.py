"""The text side of a model: its tokenizer and its chat template, whatever files they come from."""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import InvalidRequestError, ModelFileError
from weft.loading.checkpoint import Checkpoint
from weft.text.chat_template import ChatTemplate
from weft.text.folder_tokenizer import read_folder_tokenizer
from weft.text.gguf_tokenizer import tokenizer_of
from weft.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ModelText:
    """`chat_template` is None for a model that was not made for conversations."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None

    def close(self) -> None:
        """End the process that renders templates."""
        if self.chat_template is not None:
            self.chat_template.close()

    def require_chat_template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise InvalidRequestError(
                "the model has no chat template; give it plain prompts (`weft generate` without --chat)",
                field="messages",
            )
        return self.chat_template


def open_model_text(checkpoint: Checkpoint) -> ModelText:
    """Tokenizer and chat template of a model; errors name its path."""
    tokenizer = open_tokenizer(checkpoint)
    try:
        return ModelText(tokenizer, ChatTemplate(tokenizer) if tokenizer.specials.chat_templates else None)
    except ModelFileError as error:
        raise ModelFileError(f"{checkpoint.path}: {error}") from error


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer alone; errors name the model's path."""
    if checkpoint.vocabulary is None:
        return read_folder_tokenizer(checkpoint.path)
    try:
        return tokenizer_of(checkpoint.vocabulary)
    except ModelFileError as error:
        raise ModelFileError(f"{checkpoint.path}: {error}") from error
